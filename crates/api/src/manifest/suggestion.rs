//! Spelling suggestions.

/// Returns the candidate that `word` was most likely meant to be; `None` where none is within one edit per three letters,
/// ignoring case.
pub(crate) fn nearest<'a>(word: &str, candidates: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let word = word.to_lowercase();
    candidates
        .into_iter()
        .map(|candidate| (candidate.to_lowercase(), candidate))
        .filter(|(lower, _)| word.len().abs_diff(lower.len()) <= lower.len())
        .map(|(lower, candidate)| (strsim::osa_distance(&word, &lower), candidate))
        .filter(|(distance, candidate)| *distance <= candidate.chars().count().div_ceil(3))
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, candidate)| candidate)
}

#[cfg(test)]
mod tests {
    use super::nearest;

    #[test]
    fn only_near_words_are_suggested() {
        assert_eq!(nearest("evict", ["Refuse", "Evict"]), Some("Evict"));
        assert_eq!(nearest("memorys", ["memories", "policy"]), Some("memories"));
        assert_eq!(nearest("colour", ["memories", "policy"]), None);
        assert_eq!(nearest(&"x".repeat(10_000), ["memories"]), None);
    }
}
