//! Who is named by the map, was never heard since this coordinator began, and is no longer waited for.

use super::Seen;
use crate::detector::Detector;
use crate::map::Entry;
use engram_memory::Ordinal;
use std::collections::BTreeSet;

/// After this nobody is waited for who was never heard: as long as a lost one is.
pub const ABSENT_MS: u64 = 30_000;

/// The places that hold copies and are given up though nobody was heard there: on their supervisors' word, on that of somebody who
/// heard them and no longer does, or in the end. Of more than one fault explains nobody's word is taken: who reaches so few may be
/// cut off itself.
pub fn absent(entries: &[Entry], heard: &[Seen], detector: &Detector, now_ms: u64) -> BTreeSet<Ordinal> {
    let age_ms = detector.age_ms(now_ms);
    let named: BTreeSet<_> = entries.iter().flat_map(Entry::candidates).map(|member| member.ordinal).collect();
    let is_heard = |ordinal: &Ordinal| heard.iter().any(|seen| seen.member.ordinal == *ordinal);
    let unheard: BTreeSet<_> = named.iter().copied().filter(|ordinal| !is_heard(ordinal)).collect();
    let one_fault = unheard.len() <= 1 || 3 * unheard.len() <= named.len();
    let has_opinion = age_ms >= detector.timing().opinion_ms;
    let given_up = |ordinal: &Ordinal| {
        let missed = || heard.iter().any(|seen| seen.standing.is_alive() && seen.suspects.contains(ordinal));
        age_ms >= ABSENT_MS || (has_opinion && (detector.died_unheard(*ordinal) || (one_fault && missed())))
    };
    unheard.into_iter().filter(given_up).collect()
}
