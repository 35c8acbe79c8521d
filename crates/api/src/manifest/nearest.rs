//! The nearest known word, for "did you mean".

/// Returns the word of `known` that `word` was most likely meant to be; `None` where none is near enough: upper and
/// lower case aside, one edit in three letters.
pub(crate) fn nearest<'a>(word: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let word = word.to_lowercase();
    known
        .into_iter()
        .map(|candidate| (candidate.to_lowercase(), candidate))
        .filter(|(lower, _)| word.len().abs_diff(lower.len()) <= lower.len())
        .map(|(lower, candidate)| (distance(&word, &lower), candidate))
        .filter(|(distance, candidate)| *distance <= candidate.chars().count().div_ceil(3))
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, candidate)| candidate)
}

/// Number of letters to insert, delete, replace, or swap with their neighbour to turn `from` into `to`.
fn distance(from: &str, to: &str) -> usize {
    let (from, to): (Vec<char>, Vec<char>) = (from.chars().collect(), to.chars().collect());
    // rows[i][j] is the distance of the first i letters of `from` to the first j of `to`.
    let mut rows = vec![(0..=to.len()).collect::<Vec<usize>>()];
    for i in 1..=from.len() {
        let mut row = vec![i];
        for j in 1..=to.len() {
            let replaced = rows[i - 1][j - 1] + usize::from(from[i - 1] != to[j - 1]);
            let mut best = replaced.min(rows[i - 1][j] + 1).min(row[j - 1] + 1);
            if i > 1 && j > 1 && from[i - 1] == to[j - 2] && from[i - 2] == to[j - 1] {
                best = best.min(rows[i - 2][j - 2] + 1);
            }
            row.push(best);
        }
        rows.push(row);
    }
    rows[from.len()][to.len()]
}

#[cfg(test)]
mod tests {
    use super::{distance, nearest};

    #[test]
    fn a_slip_of_the_finger_is_one_edit() {
        for (from, to, edits) in [("workers", "workers", 0), ("wrokers", "workers", 1), ("worker", "workers", 1)] {
            assert_eq!(distance(from, to), edits);
            assert_eq!(distance(to, from), edits);
        }
        assert_eq!(distance("", "abc"), 3);
    }

    #[test]
    fn the_nearest_word_is_suggested_and_a_stranger_is_not() {
        assert_eq!(nearest("evict", ["Refuse", "Evict"]), Some("Evict"));
        assert_eq!(nearest("memorys", ["memories", "policy"]), Some("memories"));
        assert_eq!(nearest("colour", ["memories", "policy"]), None);
        assert_eq!(nearest(&"x".repeat(10_000), ["memories"]), None);
    }
}
