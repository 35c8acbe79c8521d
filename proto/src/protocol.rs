//! The versions of the protocol inside a cluster that this build speaks: between workers, and with coordinators.
//!
//! A version is raised when a message means something else than before, not when a field is added: unknown fields are passed over.
//! A build speaks a range of versions, so that workers of two builds work together while a cluster is upgraded, and goes on with
//! the newest that both know. `tests/compatibility.rs` holds the messages of each version against those of this build.

/// Oldest version that this build speaks.
pub const OLDEST: u32 = 1;
/// Newest version that this build speaks.
pub const NEWEST: u32 = 1;

/// Returns the version that this build and one that speaks `oldest` to `newest` go on with: the newest of both; `None` where
/// there is none.
pub fn common(oldest: u32, newest: u32) -> Option<u32> {
    among((OLDEST, NEWEST), (oldest, newest))
}

fn among(ours: (u32, u32), theirs: (u32, u32)) -> Option<u32> {
    let (oldest, newest) = (ours.0.max(theirs.0), ours.1.min(theirs.1));
    (oldest <= newest).then_some(newest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_builds_go_on_with_the_newest_version_that_both_know() {
        // A rolling upgrade from a build that speaks 3 to one that speaks 3 and 4, and to one that has forgotten 3.
        assert_eq!(among((3, 3), (3, 4)), Some(3));
        assert_eq!(among((3, 4), (3, 3)), Some(3));
        assert_eq!(among((3, 4), (2, 7)), Some(4));
        assert_eq!(among((4, 4), (3, 3)), None);
        assert_eq!(among((3, 3), (4, 4)), None);
        // Nonsense meets nobody.
        assert_eq!(among((1, 1), (2, 1)), None);
        assert_eq!(common(OLDEST, u32::MAX), Some(NEWEST));
        assert_eq!(common(0, 0), None);
    }
}
