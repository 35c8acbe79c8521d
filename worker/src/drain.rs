//! Before an orderly stop: what is led here is led elsewhere first, and then the others go on without the copies that are here, so
//! that the stop pauses nobody: a primary waits for each copy in sync, until the death of the one that had it is proven.
//!
//! Invariants: only a member in sync is asked to lead, and the map decides; this worker goes on serving and passing on what is asked
//! of it; a partition without another copy in sync stays; a copy stays in sync without which its primary would take no writes. Who
//! leads something leaves no in-sync set, nor does anybody go on without it who is about to be stopped as well: workers that are all
//! stopped at once do not leave each other alone.

use crate::shared::Shared;
use engram_cluster::{Entry, PartitionMap};
use engram_memory::{Ordinal, PartitionId};
use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tokio::time::{Instant, sleep};

/// Between looks at what is left.
const LOOK: Duration = Duration::from_millis(20);
/// Partitions that are on their way at a time: each pauses while its successor makes its promise durable.
const AT_ONCE: usize = 8;
/// A successor that did not take over in this time is not the one to wait for.
const PATIENCE: Duration = Duration::from_secs(2);
/// For how long nothing may have moved while no coordinator is heard: who writes the map instead takes some of it, and where the map
/// has gone with its cluster nobody does. Where nothing is led here any more, nothing but a short wait of others is at stake.
const FORSAKEN: Duration = Duration::from_secs(5);
/// For how long nothing may have come back before nothing will: what a coordinator had planned before it knew is through by then.
const QUIET: Duration = Duration::from_millis(300);

/// What came of a drain.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Drained {
    pub(crate) handed_over: u32,
    /// Still led here.
    pub(crate) left: Vec<PartitionId>,
    /// Led elsewhere, by those who wait for the copy here.
    pub(crate) waited_for: u32,
}

/// Who was asked to lead a partition, and when.
type Asked = BTreeMap<PartitionId, (Ordinal, Instant)>;

/// Hands over whatever is led here, until nothing is or the deadline passes. The worker is given nothing to lead from here on.
pub(crate) async fn drain(shared: &Shared, deadline: Duration) -> Drained {
    let until = Instant::now() + deadline;
    shared.leaving.store(true, Ordering::Release);
    shared.tell_leavers();
    let (mut asked, mut led_first, mut led_at) = (Asked::new(), None, Instant::now());
    let (mut left_last, mut moved_at) = ((0, 0), Instant::now());
    loop {
        let map = shared.view.borrow().map.clone();
        let led = map.as_deref().map(|map| led(map, shared.ordinal())).unwrap_or_default();
        let total = *led_first.get_or_insert(led.len());
        let waited_for = map.as_deref().map(|map| waited_for(shared, map)).unwrap_or_default();
        let now = Instant::now();
        if !led.is_empty() || waited_for > 0 || !is_known_to_leave(shared) {
            led_at = now;
        }
        if (led.len(), waited_for) != left_last {
            (left_last, moved_at) = ((led.len(), waited_for), now);
        }
        let unheard = Duration::from_millis(shared.coordinators.unheard_ms());
        // Who leads nothing waits no longer for others to move than for a coordinator.
        let is_forsaken =
            now.duration_since(moved_at) >= FORSAKEN && (unheard >= FORSAKEN || (led.is_empty() && waited_for > 0));
        let is_over = led.is_empty() && waited_for == 0 && now.duration_since(led_at) >= QUIET;
        let is_stuck = !led.is_empty()
            && map.as_deref().is_none_or(|map| led.iter().all(|partition| others(shared, map, *partition).is_empty()));
        if is_over || is_stuck || is_forsaken || now >= until || shared.is_stopping() || !shared.is_leaving() {
            let handed_over = total.saturating_sub(led.len()) as u32;
            tracing::info!(handed_over, left = led.len(), waited_for, "handed over what was led here");
            return Drained { handed_over, left: led, waited_for };
        }
        asked.retain(|partition, _| led.binary_search(partition).is_ok());
        if let Some(map) = &map {
            ask(shared, map, &led, &mut asked, now);
        }
        sleep(LOOK).await;
    }
}

/// The worker stays after all.
pub(crate) fn call_off(shared: &Shared) {
    shared.leaving.store(false, Ordering::Release);
    shared.tell_leavers();
}

/// Asks for the next ones to be taken over; what was asked in vain is asked of another.
fn ask(shared: &Shared, map: &PartitionMap, led: &[PartitionId], asked: &mut Asked, now: Instant) {
    let mut load: BTreeMap<Ordinal, usize> = BTreeMap::new();
    for (_, entry) in map.entries() {
        *load.entry(entry.primary).or_default() += 1;
    }
    for (to, _) in asked.values() {
        *load.entry(*to).or_default() += 1;
    }
    for &partition in led {
        let before = asked.get(&partition).copied();
        if before.is_some_and(|(_, since)| now.duration_since(since) < PATIENCE) {
            continue;
        }
        if before.is_none() && asked.len() >= AT_ONCE {
            continue;
        }
        let in_vain = before.map(|(to, _)| to);
        let to = others(shared, map, partition).into_iter();
        let to = to.min_by_key(|to| (Some(*to) == in_vain, load.get(to).copied().unwrap_or(0), *to));
        if let Some(to) = to {
            shared.engine.hand_over(partition, to);
            *load.entry(to).or_default() += 1;
            asked.insert(partition, (to, now));
        }
    }
}

/// Whether the coordinator that is heard has heard that this worker leaves; where none is heard, nobody gives it anything.
fn is_known_to_leave(shared: &Shared) -> bool {
    let here = shared.ordinal().0;
    shared.coordinators.unheard_ms() > 0
        || shared.view.borrow().members.iter().any(|member| member.ordinal == here && member.leaving)
}

/// The partitions that the map gives to this place, in order.
fn led(map: &PartitionMap, here: Ordinal) -> Vec<PartitionId> {
    map.entries().filter(|(_, entry)| entry.primary == here).map(|(partition, _)| partition).collect()
}

/// How many partitions have their copy here in sync, and primaries that shall go on without it: they stay, and may take writes alone.
fn waited_for(shared: &Shared, map: &PartitionMap) -> u32 {
    let (here, view) = (shared.ordinal(), shared.view.borrow());
    if shared.coordinators.unheard_ms() > 0 {
        // Nobody hears that this worker leaves.
        return 0;
    }
    let stays = |ordinal: Ordinal| {
        view.members.iter().any(|member| member.ordinal == ordinal.0 && member.alive && !member.leaving)
    };
    let waits = |entry: &&Entry| {
        entry.primary != here
            && entry.in_sync(here).is_some()
            && entry.isr.len() > shared.options.min_in_sync()
            && stays(entry.primary)
    };
    map.partitions.iter().filter(waits).count() as u32
}

/// Who else could lead a partition: in sync, heard by a coordinator, and not about to be stopped itself.
fn others(shared: &Shared, map: &PartitionMap, partition: PartitionId) -> Vec<Ordinal> {
    let view = shared.view.borrow();
    let stays = |ordinal: Ordinal| {
        view.members.iter().any(|member| member.ordinal == ordinal.0 && member.alive && !member.leaving)
    };
    let entry = map.partitions.get(partition.0 as usize);
    let in_sync = entry.into_iter().flat_map(|entry| &entry.isr).map(|member| member.ordinal);
    in_sync.filter(|ordinal| *ordinal != shared.ordinal() && stays(*ordinal)).collect()
}
