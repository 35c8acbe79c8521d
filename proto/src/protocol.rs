//! Protocol versions that this build supports inside a cluster: between workers, and with coordinators.
//!
//! The version changes when the meaning of a message changes, not when a field is added: receivers ignore unknown fields.
//! A build supports a range of versions, so that workers of two builds work together during a rolling upgrade. Two builds use the
//! newest version that both support. `tests/compatibility.rs` compares the messages of each version with those of this build.

/// Oldest version that this build supports.
pub const OLDEST: u32 = 1;
/// Newest version that this build supports.
pub const NEWEST: u32 = 1;

/// Returns the newest version that this build shares with a build that supports `oldest` to `newest`; `None` if there is none.
pub fn common(oldest: u32, newest: u32) -> Option<u32> {
    newest_common((OLDEST, NEWEST), (oldest, newest))
}

fn newest_common(ours: (u32, u32), theirs: (u32, u32)) -> Option<u32> {
    let (oldest, newest) = (ours.0.max(theirs.0), ours.1.min(theirs.1));
    (oldest <= newest).then_some(newest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_builds_use_the_newest_common_version() {
        // A rolling upgrade from a build with version 3 to one with 3 and 4, then to one without 3.
        assert_eq!(newest_common((3, 3), (3, 4)), Some(3));
        assert_eq!(newest_common((3, 4), (3, 3)), Some(3));
        assert_eq!(newest_common((3, 4), (2, 7)), Some(4));
        assert_eq!(newest_common((4, 4), (3, 3)), None);
        assert_eq!(newest_common((3, 3), (4, 4)), None);
        // An empty range has no common version.
        assert_eq!(newest_common((1, 1), (2, 1)), None);
        assert_eq!(common(OLDEST, u32::MAX), Some(NEWEST));
        assert_eq!(common(0, 0), None);
    }
}
