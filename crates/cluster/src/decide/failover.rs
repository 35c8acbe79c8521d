//! Who leads when the process that led is gone.

use super::{Fate, Plan, Scene, count, workers};
use crate::change::Change;
use crate::map::Entry;
use crate::replica::{Defect, is_planted};
use engram_memory::{Member, Ordinal, PartitionId};
use std::collections::BTreeMap;

/// A primary gets rid of its dead partners by itself. It cannot of one that it never heard, and may be slow: after this
/// silence of a member that is lost, the map goes on without it.
const LINGER_MS: u64 = 2_000;

/// Plans promotions. Gives back the partitions whose primary serves and that are not changed now.
pub(super) fn plan(scene: &Scene<'_>, primaries: &mut BTreeMap<Ordinal, usize>, plan: &mut Plan) -> Vec<PartitionId> {
    let mut settled = Vec::with_capacity(scene.map.partitions.len());
    let mut waiting: BTreeMap<String, usize> = BTreeMap::new();
    for (partition, entry) in scene.map.entries() {
        let primary = entry.primary_member().expect("the map store lets in entries with a primary alone");
        let serves = scene.seen(primary.ordinal).is_some_and(|seen| seen.member == *primary);
        let change = match scene.fate(entry, primary) {
            Fate::Living if serves => without_the_lost(scene, entry, primary),
            Fate::Living | Fate::Lost { .. } => match elect(scene, entry, primary, primaries) {
                Ok(change) => Some(change),
                Err(why) => {
                    *waiting.entry(why).or_default() += 1;
                    continue;
                }
            },
            Fate::Doubtful => {
                let why = match scene.seen(primary.ordinal) {
                    None => format!("{} has not been heard", workers([primary.ordinal])),
                    Some(_) => format!("{} does not answer, which nobody confirms yet", workers([primary.ordinal])),
                };
                *waiting.entry(why).or_default() += 1;
                continue;
            }
        };
        match change {
            Some(change) => plan.changes.push((partition, change)),
            None => settled.push(partition),
        }
    }
    let words = |(why, partitions)| format!("{} not served: {why}", count(partitions, "partition"));
    plan.conditions.extend(waiting.into_iter().map(words));
    settled
}

/// Elects a candidate that lives and holds everything; the one that led before, as a new process, if it may.
fn elect(
    scene: &Scene<'_>,
    entry: &Entry,
    before: &Member,
    primaries: &mut BTreeMap<Ordinal, usize>,
) -> Result<Change, String> {
    let eligible = || entry.candidates().filter_map(|member| scene.eligible(entry, member));
    let chosen = eligible().min_by_key(|seen| {
        let ordinal = seen.member.ordinal;
        let led = primaries.get(&ordinal).copied().unwrap_or(0);
        (seen.damped, scene.is_draining(ordinal), ordinal != before.ordinal, led, ordinal)
    });
    let anybody = || scene.holders().next().filter(|_| is_planted(Defect::PromoteNonIsr));
    let Some(chosen) = chosen.or_else(anybody) else { return Err(nobody(scene, entry, before)) };
    let primary = chosen.member;
    if primary.ordinal != before.ordinal {
        *primaries.entry(primary.ordinal).or_default() += 1;
        primaries.entry(before.ordinal).and_modify(|led| *led = led.saturating_sub(1));
    }
    // Who has not been heard yet keeps its place: a cluster that was started comes up one by one. Who is dead would only
    // keep the new primary waiting.
    let stays = |member: &Member| {
        member.ordinal == primary.ordinal
            || scene.eligible(entry, member).is_some()
            || (scene.seen(member.ordinal).is_none() && scene.fate(entry, member) == Fate::Doubtful)
    };
    let mut isr: Vec<_> = entry.candidates().filter(|member| stays(member)).map(|member| member.ordinal).collect();
    isr.push(primary.ordinal);
    isr.sort_unstable();
    isr.dedup();
    Ok(Change::Promote { primary, isr })
}

/// Why a partition has no primary.
fn nobody(scene: &Scene<'_>, entry: &Entry, before: &Member) -> String {
    let foreign = |member: &&Member| scene.seen(member.ordinal).is_some_and(|seen| seen.member.store != member.store);
    if let Some(member) = entry.candidates().find(foreign) {
        let found = scene.seen(member.ordinal).expect("it was just seen").member.store;
        return format!(
            "{} came with store {found}, but its memories are on store {}: bring that disk back",
            workers([member.ordinal]),
            member.store
        );
    }
    if scene.fate(entry, before) == Fate::Living {
        return format!(
            "{} lost writes that it had acknowledged when it stopped, and no other copy is here",
            workers([before.ordinal])
        );
    }
    let mut candidates: Vec<_> = entry.candidates().map(|member| member.ordinal).collect();
    candidates.sort_unstable();
    candidates.dedup();
    format!("everything that was acknowledged is on {} alone", workers(candidates))
}

/// The same primary without members that are lost and that it did not remove itself, and without those that came back without
/// what they had acknowledged: they are added again as any other copy.
fn without_the_lost(scene: &Scene<'_>, entry: &Entry, primary: &Member) -> Option<Change> {
    let lost = |member: &&Member| match scene.fate(entry, member) {
        Fate::Lost { for_ms } => for_ms >= LINGER_MS,
        Fate::Living => member.ordinal != primary.ordinal && scene.eligible(entry, member).is_none(),
        Fate::Doubtful => false,
    };
    entry.isr.iter().find(lost)?;
    let isr = entry.isr.iter().filter(|member| !lost(member)).map(|member| member.ordinal).collect();
    // Not a removal: who is left alone may have to make its log durable before it says so.
    Some(Change::Promote { primary: *primary, isr })
}
