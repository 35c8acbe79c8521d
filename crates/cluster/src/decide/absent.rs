//! Workers that the map names but that have not reported since this coordinator started.

use super::WorkerObservation;
use crate::detector::Detector;
use crate::map::Entry;
use engram_memory::Ordinal;
use std::collections::BTreeSet;

/// A worker that has never reported counts as absent after this time, the same grace as for a lost worker.
pub const ABSENT_MS: u64 = 30_000;

/// Returns the replica holders that count as lost although they never reported: by their supervisor's exit report,
/// because a live peer suspects them, or after [`ABSENT_MS`]. When more workers are missing than one fault explains, no
/// peer's suspicion counts: this coordinator may itself be partitioned.
pub fn find_absent(
    entries: &[Entry],
    reported: &[WorkerObservation],
    detector: &Detector,
    now_ms: u64,
) -> BTreeSet<Ordinal> {
    let age_ms = detector.age_ms(now_ms);
    let holders: BTreeSet<_> = entries.iter().flat_map(Entry::candidates).map(|member| member.ordinal).collect();
    let has_reported = |ordinal: &Ordinal| reported.iter().any(|worker| worker.member.ordinal == *ordinal);
    let unreported: BTreeSet<_> = holders.iter().copied().filter(|ordinal| !has_reported(ordinal)).collect();
    let one_fault = unreported.len() <= 1 || 3 * unreported.len() <= holders.len();
    let warmed_up = age_ms >= detector.timing().warmup_ms;
    let is_lost = |ordinal: &Ordinal| {
        let is_suspected =
            || reported.iter().any(|worker| worker.liveness.is_alive() && worker.suspects.contains(ordinal));
        age_ms >= ABSENT_MS || (warmed_up && (detector.died_unseen(*ordinal) || (one_fault && is_suspected())))
    };
    unreported.into_iter().filter(is_lost).collect()
}
