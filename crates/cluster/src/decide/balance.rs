//! Balances primaries over workers.

use super::{ClusterView, LeadershipTransfer, Plan};
use engram_memory::{Ordinal, PartitionId};
use std::collections::BTreeMap;

/// Nothing is balanced this soon after a failover.
const SETTLE_MS: u64 = 10_000;
/// Concurrent leadership transfers; each pauses its partition briefly.
const MAX_TRANSFERS: usize = 4;

/// Plans leadership transfers from workers with too many primaries to workers with too few. A deviation below a
/// twentieth of the share is tolerated.
pub(super) fn plan(
    view: &ClusterView<'_>,
    settled: &[PartitionId],
    primaries: &mut BTreeMap<Ordinal, usize>,
    plan: &mut Plan,
) {
    let observed = view.observed;
    let settled_down = observed.last_failover_ms.is_none_or(|at_ms| observed.now_ms.saturating_sub(at_ms) >= SETTLE_MS);
    let eligible: Vec<Ordinal> =
        view.holders().filter(|worker| !worker.damped).map(|worker| worker.member.ordinal).collect();
    // Whatever goes to the other workers meanwhile would move a second time.
    let starting = eligible.iter().any(|ordinal| !view.serves_at_once(*ordinal));
    if !settled_down || starting || eligible.is_empty() || !plan.changes.is_empty() || !plan.transfers.is_empty() {
        return;
    }
    let partitions = view.map.partitions.len();
    let (min_share, max_share) = (partitions / eligible.len(), partitions.div_ceil(eligible.len()));
    let slack = (max_share / 20).max(1);
    for &partition in settled {
        let entry = &view.map.partitions[partition.0 as usize];
        let primaries_of = |ordinal: Ordinal| primaries.get(&ordinal).copied().unwrap_or(0);
        if plan.transfers.len() == MAX_TRANSFERS {
            return;
        }
        let current = primaries_of(entry.primary);
        if !entry.activated || current <= min_share {
            continue;
        }
        let to = entry
            .isr
            .iter()
            .map(|member| member.ordinal)
            .filter(|ordinal| eligible.contains(ordinal) && primaries_of(*ordinal) + 1 < current)
            .filter(|ordinal| current > max_share + slack || primaries_of(*ordinal) + slack < min_share)
            .min_by_key(|ordinal| (primaries_of(*ordinal), *ordinal));
        if let Some(to) = to {
            plan.transfers.push(LeadershipTransfer { partition, to });
            *primaries.entry(to).or_default() += 1;
            primaries.entry(entry.primary).and_modify(|count| *count -= 1);
        }
    }
}
