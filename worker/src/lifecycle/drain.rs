//! Draining before an orderly stop: the primaries on this worker are transferred to other workers, and then the other primaries
//! drop the replicas on this worker from their in-sync sets. So the stop pauses no client: a primary waits for each in-sync replica
//! until the death of its worker is proven. Before that, training members leave their groups, so that no step waits for them: the drivers of
//! their runs may be primaries here.
//!
//! Invariants:
//! - Only an in-sync member is asked to become primary, and the map decides.
//! - The worker continues to serve and to forward requests.
//! - A partition without another in-sync replica stays.
//! - A replica without which its primary would take no writes stays in sync.
//! - A worker that is primary of a partition leaves no in-sync set, and no primary that is about to be stopped drops a replica:
//!   workers that are all stopped at once do not leave each other with a single replica.

use crate::membership::cluster_view::ClusterView;
use crate::shared::Shared;
use engram_cluster::{Entry, PartitionMap};
use engram_memory::{Ordinal, PartitionId};
use std::collections::BTreeMap;
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::{Instant, timeout_at};

/// Maximum number of concurrent transfers: each pauses its partition while the successor makes its promise durable.
const MAX_TRANSFERS: usize = 8;
/// A transfer that takes longer than this is requested from another successor.
const TRANSFER_TIMEOUT: Duration = Duration::from_secs(2);
/// Time without any change after which draining gives up while no coordinator is heard. Once this worker is primary of nothing,
/// only a short wait of other primaries is at stake.
const STALL_TIMEOUT: Duration = Duration::from_secs(5);
/// Time without partitions after which draining is complete: a coordinator may have planned a change before it received the drain
/// request.
const QUIET_PERIOD: Duration = Duration::from_millis(300);

/// Limit for training members to end a step and leave.
const LEAVE_TIMEOUT: Duration = Duration::from_secs(2);

/// Result of a drain.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct DrainOutcome {
    pub(crate) transferred: u32,
    /// Partitions whose primary is still this worker.
    pub(crate) remaining: Vec<PartitionId>,
    /// Number of partitions with another primary that waits for the replica on this worker.
    pub(crate) awaited_replicas: u32,
}

/// Requested successor of each partition, and when it was requested.
type TransferRequests = BTreeMap<PartitionId, (Ordinal, Instant)>;

/// Transfers all primaries on this worker to other workers, until there are none or the deadline passes. From then on the worker
/// gets no partition as primary, and takes part in no training.
pub(crate) async fn drain(shared: &Shared, deadline: Duration) -> DrainOutcome {
    let until = Instant::now() + deadline;
    shared.membership.set_leaving(true);
    shared.membership.update_leavers();
    if timeout_at(until.min(Instant::now() + LEAVE_TIMEOUT), shared.trainings.ended()).await.is_err() {
        tracing::warn!("training members have not left their groups in time");
    }
    transfer_primaries(shared, until).await
}

/// Transfers the primaries until there are none or the deadline passes.
async fn transfer_primaries(shared: &Shared, until: Instant) -> DrainOutcome {
    let mut changes = Changes::of(shared);
    let (mut requested, mut initial_count, mut last_pending_at) = (TransferRequests::new(), None, Instant::now());
    let (mut last_remaining, mut last_change_at) = ((0, 0), Instant::now());
    loop {
        changes.mark_seen();
        let map = shared.membership.view().map.clone();
        let own_primaries = map.as_deref().map(|map| primaries(map, shared.ordinal())).unwrap_or_default();
        let total = *initial_count.get_or_insert(own_primaries.len());
        let awaited_replicas = map.as_deref().map(|map| awaited_replicas(shared, map)).unwrap_or_default();
        let now = Instant::now();
        if !own_primaries.is_empty() || awaited_replicas > 0 || !is_leaving_announced(shared) {
            last_pending_at = now;
        }
        if (own_primaries.len(), awaited_replicas) != last_remaining {
            (last_remaining, last_change_at) = ((own_primaries.len(), awaited_replicas), now);
        }
        let silence = Duration::from_millis(shared.membership.coordinators().silence_ms());
        // A worker without primaries waits no longer for others than for a coordinator.
        let is_stalled = now.duration_since(last_change_at) >= STALL_TIMEOUT
            && (silence >= STALL_TIMEOUT || (own_primaries.is_empty() && awaited_replicas > 0));
        let is_over =
            own_primaries.is_empty() && awaited_replicas == 0 && now.duration_since(last_pending_at) >= QUIET_PERIOD;
        let is_stuck = !own_primaries.is_empty()
            && map
                .as_deref()
                .is_none_or(|map| own_primaries.iter().all(|partition| candidates(shared, map, *partition).is_empty()));
        if is_over
            || is_stuck
            || is_stalled
            || now >= until
            || shared.lifecycle.is_stopping()
            || !shared.membership.is_leaving()
        {
            let transferred = total.saturating_sub(own_primaries.len()) as u32;
            tracing::info!(transferred, remaining = own_primaries.len(), awaited_replicas, "transferred primaries");
            return DrainOutcome { transferred, remaining: own_primaries, awaited_replicas };
        }
        requested.retain(|partition, _| own_primaries.binary_search(partition).is_ok());
        if let Some(map) = &map {
            request_transfers(shared, map, &own_primaries, &mut requested, now);
        }
        let quiet_at = (own_primaries.is_empty() && awaited_replicas == 0).then(|| last_pending_at + QUIET_PERIOD);
        let stalled_at = [last_change_at + STALL_TIMEOUT, now + STALL_TIMEOUT.saturating_sub(silence)];
        let next_request = requested.values().map(|(_, since)| *since + TRANSFER_TIMEOUT).min();
        let due = stalled_at.into_iter().chain(quiet_at).chain(next_request).filter(|at| *at > now).min();
        let _ = timeout_at(due.map_or(until, |at| at.min(until)), changes.next()).await;
    }
}

/// What a drain depends on, apart from the time.
struct Changes {
    view: watch::Receiver<ClusterView>,
    coordinators: watch::Receiver<usize>,
    leaving: watch::Receiver<bool>,
    stopping: watch::Receiver<bool>,
}

impl Changes {
    fn of(shared: &Shared) -> Self {
        Self {
            view: shared.membership.subscribe(),
            coordinators: shared.membership.coordinators().connections(),
            leaving: shared.membership.leaving_changes(),
            stopping: shared.lifecycle.stopping(),
        }
    }

    fn mark_seen(&mut self) {
        self.view.mark_unchanged();
        self.coordinators.mark_unchanged();
        self.leaving.mark_unchanged();
        self.stopping.mark_unchanged();
    }

    async fn next(&mut self) {
        let _ = tokio::select! {
            changed = self.view.changed() => changed,
            changed = self.coordinators.changed() => changed,
            changed = self.leaving.changed() => changed,
            changed = self.stopping.changed() => changed,
        };
    }
}

/// Cancels a drain.
pub(crate) fn cancel(shared: &Shared) {
    shared.membership.set_leaving(false);
    shared.membership.update_leavers();
}

/// Requests the next transfers. A transfer that did not happen is requested from another successor.
fn request_transfers(
    shared: &Shared,
    map: &PartitionMap,
    primaries: &[PartitionId],
    requested: &mut TransferRequests,
    now: Instant,
) {
    let mut load: BTreeMap<Ordinal, usize> = BTreeMap::new();
    for (_, entry) in map.entries() {
        *load.entry(entry.primary).or_default() += 1;
    }
    for (to, _) in requested.values() {
        *load.entry(*to).or_default() += 1;
    }
    for &partition in primaries {
        let before = requested.get(&partition).copied();
        if before.is_some_and(|(_, since)| now.duration_since(since) < TRANSFER_TIMEOUT) {
            continue;
        }
        if before.is_none() && requested.len() >= MAX_TRANSFERS {
            continue;
        }
        let failed_target = before.map(|(to, _)| to);
        let to = candidates(shared, map, partition).into_iter();
        let to = to.min_by_key(|to| (Some(*to) == failed_target, load.get(to).copied().unwrap_or(0), *to));
        if let Some(to) = to {
            shared.engine.transfer_leadership(partition, to);
            *load.entry(to).or_default() += 1;
            requested.insert(partition, (to, now));
        }
    }
}

/// Returns whether a connected coordinator knows that this worker is leaving. Without a coordinator the worker gets no partitions.
fn is_leaving_announced(shared: &Shared) -> bool {
    let here = shared.ordinal().0;
    shared.membership.coordinators().silence_ms() > 0
        || shared.membership.view().members.iter().any(|member| member.ordinal == here && member.leaving)
}

/// Returns the partitions whose primary by the map is `here`, in order.
fn primaries(map: &PartitionMap, here: Ordinal) -> Vec<PartitionId> {
    map.entries().filter(|(_, entry)| entry.primary == here).map(|(partition, _)| partition).collect()
}

/// Returns the number of partitions that have an in-sync replica here, and a primary that stays, may take writes alone and so
/// should drop the replica.
fn awaited_replicas(shared: &Shared, map: &PartitionMap) -> u32 {
    let (here, view) = (shared.ordinal(), shared.membership.view());
    if shared.membership.coordinators().silence_ms() > 0 {
        // No coordinator knows that this worker is leaving.
        return 0;
    }
    let stays = |ordinal: Ordinal| {
        view.members.iter().any(|member| member.ordinal == ordinal.0 && member.alive && !member.leaving)
    };
    let waits = |entry: &&Entry| {
        entry.primary != here
            && entry.in_sync(here).is_some()
            && entry.isr.len() > shared.setup.options.min_in_sync()
            && stays(entry.primary)
    };
    map.partitions.iter().filter(waits).count() as u32
}

/// Returns the other workers that could become primary of a partition: in sync, alive by a coordinator, and not leaving.
fn candidates(shared: &Shared, map: &PartitionMap, partition: PartitionId) -> Vec<Ordinal> {
    let view = shared.membership.view();
    let stays = |ordinal: Ordinal| {
        view.members.iter().any(|member| member.ordinal == ordinal.0 && member.alive && !member.leaving)
    };
    let entry = map.partitions.get(partition.0 as usize);
    let in_sync = entry.into_iter().flat_map(|entry| &entry.isr).map(|member| member.ordinal);
    in_sync.filter(|ordinal| *ordinal != shared.ordinal() && stays(*ordinal)).collect()
}
