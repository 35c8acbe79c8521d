//! Bugs injected into the real code are found, and the same seeds pass without them.
//!
//! `cargo xtask simulate --injected-bugs` injects all of them, which takes minutes; here are those found within few seeds.
#![cfg(feature = "defects")]
#![allow(clippy::unwrap_used, reason = "tests fail by panicking")]

use engram_cluster::injected::Bug;
use engram_simulation::{Options, run, target};

/// Maximum seeds per bug: several times as many as needed, since later changes alter what a seed does.
const MAX_SEEDS: u64 = 150;

/// At least one of every part of the protocol.
const BUGS: &[Bug] = &[
    Bug::AckWithoutBackup,
    Bug::KeepTail,
    Bug::RestartSameTerm,
    Bug::SoloAckWithoutFsync,
    Bug::ShrinkWithoutFsync,
    Bug::StalePrev,
    Bug::PromoteNonIsr,
    Bug::NeverRenews,
    Bug::ReadWithoutLease,
    Bug::ProofWithoutDeath,
    Bug::NoDedupe,
    Bug::NoEpochTable,
    Bug::ForgiveSyncFailure,
];

/// One test, since a bug is injected into the whole process.
#[test]
fn injected_bugs_are_found_and_their_seeds_pass_without_them() {
    for &bug in BUGS {
        let (scenario, durability) = target(bug).unwrap();
        let correct = Options { scenario: Some(scenario), ..Options::new(durability) };
        let with_bug = Options { injected_bug: Some(bug), ..correct };
        let found = (0..MAX_SEEDS).find(|seed| run(*seed, &with_bug).failure.is_some());
        let seed = found.unwrap_or_else(|| panic!("{bug:?} is not found by {MAX_SEEDS} seeds"));
        assert_eq!(run(seed, &correct).failure, None, "{bug:?}, seed {seed}, without the bug");
        println!("{bug:?}: {} seeds", seed + 1);
    }
}
