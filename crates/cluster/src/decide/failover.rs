//! Failover: promotes another replica when a primary's process is gone.

use super::{ClusterView, MemberHealth, Plan, count, workers};
use crate::change::Change;
use crate::injected;
use crate::map::Entry;
use engram_memory::{Member, Ordinal, PartitionId};
use std::collections::BTreeMap;

/// A primary removes dead members itself, except one that never connected to it: after this silence of a lost member,
/// the coordinator removes it from the map.
const LOST_MEMBER_GRACE_MS: u64 = 2_000;

/// Plans promotions. Returns the partitions whose primary serves and that this plan does not change.
pub(super) fn plan(
    view: &ClusterView<'_>,
    primaries: &mut BTreeMap<Ordinal, usize>,
    plan: &mut Plan,
) -> Vec<PartitionId> {
    let mut settled = Vec::with_capacity(view.map.partitions.len());
    let mut waiting: BTreeMap<String, usize> = BTreeMap::new();
    for (partition, entry) in view.map.entries() {
        let primary = entry.primary_member().expect("the map store accepts only entries with a primary");
        let serves = view.worker(primary.ordinal).is_some_and(|worker| worker.member == *primary);
        let change = match view.health(entry, primary) {
            MemberHealth::Alive if serves => remove_lost_members(view, entry, primary),
            MemberHealth::Alive | MemberHealth::Lost { .. } => match elect(view, entry, primary, primaries) {
                Ok(change) => Some(change),
                Err(why) => {
                    *waiting.entry(why).or_default() += 1;
                    continue;
                }
            },
            MemberHealth::Unknown => {
                let why = match view.worker(primary.ordinal) {
                    None => format!("no heartbeat from {} yet", workers([primary.ordinal])),
                    Some(_) => format!("{} is suspected dead, not confirmed yet", workers([primary.ordinal])),
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
    let describe = |(why, partitions)| format!("{} without a serving primary: {why}", count(partitions, "partition"));
    plan.conditions.extend(waiting.into_iter().map(describe));
    settled
}

/// Chooses a living candidate that holds everything acknowledged; the previous primary as a new process, if it is
/// eligible.
fn elect(
    view: &ClusterView<'_>,
    entry: &Entry,
    before: &Member,
    primaries: &mut BTreeMap<Ordinal, usize>,
) -> Result<Change, String> {
    let eligible = || entry.candidates().filter_map(|member| view.eligible(entry, member));
    let chosen = eligible().min_by_key(|worker| {
        let ordinal = worker.member.ordinal;
        let count = primaries.get(&ordinal).copied().unwrap_or(0);
        (worker.damped, view.is_draining(ordinal), ordinal != before.ordinal, count, ordinal)
    });
    let injected_choice = || view.holders().next().filter(|_| injected!(PromoteNonIsr));
    let Some(chosen) = chosen.or_else(injected_choice) else { return Err(no_candidate_reason(view, entry, before)) };
    let primary = chosen.member;
    if primary.ordinal != before.ordinal {
        *primaries.entry(primary.ordinal).or_default() += 1;
        primaries.entry(before.ordinal).and_modify(|count| *count = count.saturating_sub(1));
    }
    // A member that has not reported yet keeps its membership: a starting cluster comes up one by one. A dead member
    // would only keep the new primary waiting.
    let stays = |member: &Member| {
        member.ordinal == primary.ordinal
            || view.eligible(entry, member).is_some()
            || (view.worker(member.ordinal).is_none() && view.health(entry, member) == MemberHealth::Unknown)
    };
    let mut isr: Vec<_> = entry.candidates().filter(|member| stays(member)).map(|member| member.ordinal).collect();
    isr.push(primary.ordinal);
    isr.sort_unstable();
    isr.dedup();
    Ok(Change::Promote { primary, isr })
}

/// Explains why a partition has no primary.
fn no_candidate_reason(view: &ClusterView<'_>, entry: &Entry, before: &Member) -> String {
    let foreign =
        |member: &&Member| view.worker(member.ordinal).is_some_and(|worker| worker.member.store != member.store);
    if let Some(member) = entry.candidates().find(foreign) {
        let store = view.worker(member.ordinal).expect("the filter matched this worker").member.store;
        return format!(
            "{} started with store {store}, but its data is on store {}: restore that disk",
            workers([member.ordinal]),
            member.store
        );
    }
    if view.health(entry, before) == MemberHealth::Alive {
        return format!(
            "{} lost acknowledged writes when it stopped, and no other replica is available",
            workers([before.ordinal])
        );
    }
    let mut candidates: Vec<_> = entry.candidates().map(|member| member.ordinal).collect();
    candidates.sort_unstable();
    candidates.dedup();
    format!("all acknowledged writes are only on {}", workers(candidates))
}

/// Keeps the primary and removes members that are lost and that it did not remove itself, and members that restarted
/// without data that they had acknowledged: those are added again like any other replica.
fn remove_lost_members(view: &ClusterView<'_>, entry: &Entry, primary: &Member) -> Option<Change> {
    let lost = |member: &&Member| match view.health(entry, member) {
        MemberHealth::Lost { for_ms } => for_ms >= LOST_MEMBER_GRACE_MS,
        MemberHealth::Alive => member.ordinal != primary.ordinal && view.eligible(entry, member).is_none(),
        MemberHealth::Unknown => false,
    };
    entry.isr.iter().find(lost)?;
    let isr = entry.isr.iter().filter(|member| !lost(member)).map(|member| member.ordinal).collect();
    // Not a removal: a primary that becomes the only replica may first have to make its log durable.
    Some(Change::Promote { primary: *primary, isr })
}
