//! Defects planted in the real code are noticed, and the same seeds without them show nothing.
//!
//! `cargo xtask simulate --defects` plants all of them, which takes minutes; here are those that few seeds find.
#![cfg(feature = "defects")]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use engram_cluster::replica::Defect;
use engram_simulation::{Options, aim, run};

/// Seeds of one defect, at most: several times as many as one of these needs, whatever course later changes give a seed.
const MOST_SEEDS: u64 = 150;

/// One at least of every part of the protocol.
const SOON: &[Defect] = &[
    Defect::AckWithoutBackup,
    Defect::KeepTail,
    Defect::RestartSameTerm,
    Defect::SoloAckWithoutFsync,
    Defect::ShrinkWithoutFsync,
    Defect::StalePrev,
    Defect::PromoteNonIsr,
    Defect::NeverRenews,
    Defect::ReadWithoutLease,
    Defect::ProofWithoutDeath,
    Defect::NoDedupe,
    Defect::NoEpochTable,
    Defect::ForgiveSyncFailure,
];

/// One test, since a defect is planted in the whole process.
#[test]
fn what_is_planted_is_noticed_and_nothing_else_is() {
    for &defect in SOON {
        let (season, durability) = aim(defect).unwrap();
        let sound = Options { season: Some(season), ..Options::new(durability) };
        let planted = Options { defect: Some(defect), ..sound };
        let found = (0..MOST_SEEDS).find(|seed| run(*seed, &planted).failure.is_some());
        let seed = found.unwrap_or_else(|| panic!("{defect:?} is not found by {MOST_SEEDS} seeds"));
        assert_eq!(run(seed, &sound).failure, None, "{defect:?}, seed {seed}, without it");
        println!("{defect:?}: {} seeds", seed + 1);
    }
}
