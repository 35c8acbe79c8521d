//! Who leads how much.

use super::{HandOver, Plan, Scene};
use engram_memory::{Ordinal, PartitionId};
use std::collections::BTreeMap;

/// Nothing is moved for comfort so soon after a failover.
const CALM_MS: u64 = 10_000;
/// Moves under way at a time; each is a short pause of its partition.
const AT_ONCE: usize = 4;

/// Plans hand-overs from workers that lead too much, and to those that lead too little: a twentieth of the share is not worth it.
pub(super) fn plan(
    scene: &Scene<'_>,
    settled: &[PartitionId],
    primaries: &mut BTreeMap<Ordinal, usize>,
    plan: &mut Plan,
) {
    let observed = scene.observed;
    let calm = observed.failed_over_ms.is_none_or(|at_ms| observed.now_ms.saturating_sub(at_ms) >= CALM_MS);
    let leaders: Vec<Ordinal> = scene.holders().filter(|seen| !seen.damped).map(|seen| seen.member.ordinal).collect();
    // What is given to the others meanwhile would be moved once more.
    let starts = leaders.iter().any(|ordinal| !scene.serves_at_once(*ordinal));
    if !calm || starts || leaders.is_empty() || !plan.changes.is_empty() || !plan.hand_overs.is_empty() {
        return;
    }
    let partitions = scene.map.partitions.len();
    let (least, most) = (partitions / leaders.len(), partitions.div_ceil(leaders.len()));
    let slack = (most / 20).max(1);
    for &partition in settled {
        let entry = &scene.map.partitions[partition.0 as usize];
        let led = |ordinal: Ordinal| primaries.get(&ordinal).copied().unwrap_or(0);
        if plan.hand_overs.len() == AT_ONCE {
            return;
        }
        let leads = led(entry.primary);
        if !entry.activated || leads <= least {
            continue;
        }
        let to = entry
            .isr
            .iter()
            .map(|member| member.ordinal)
            .filter(|ordinal| leaders.contains(ordinal) && led(*ordinal) + 1 < leads)
            .filter(|ordinal| leads > most + slack || led(*ordinal) + slack < least)
            .min_by_key(|ordinal| (led(*ordinal), *ordinal));
        if let Some(to) = to {
            plan.hand_overs.push(HandOver { partition, to });
            *primaries.entry(to).or_default() += 1;
            primaries.entry(entry.primary).and_modify(|led| *led -= 1);
        }
    }
}
