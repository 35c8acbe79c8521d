//! Seeds that once found a bug, and determinism.
#![allow(clippy::unwrap_used, reason = "tests fail by panicking")]

use engram_simulation::{Durability, Options, run};
use std::process::Command;

/// Each found a bug in the simulation of its time: records dropped before a follower had them (5, 6, 24, 70), a failed
/// sync ignored by the next process (11, 14), a log that starts with a cut (56), a duplicate snapshot that deleted its
/// file (130, 2087), a failed start that cost the next one its eligibility (49, 57), an answer of a deposed primary
/// (20369), and in mode async acknowledgements after a canceled leadership transfer (1289, 3063, 3087).
const FOUND: [(Durability, &[u64]); 3] = [
    (Durability::Sync, &[5, 6, 11, 14, 24, 56, 130, 2087]),
    (Durability::Replicated, &[49, 57, 70, 20_369]),
    (Durability::Async, &[1289, 3063, 3087]),
];

#[test]
fn seeds_that_once_found_a_bug_pass() {
    for (durability, seeds) in FOUND {
        for &seed in seeds {
            let outcome = run(seed, &Options::new(durability));
            assert_eq!(outcome.failure, None, "{durability:?}, seed {seed}");
            assert!(outcome.acked > 0, "{durability:?}, seed {seed}: no operation was acknowledged");
        }
    }
}

/// Both replicas of a partition are unusable: one is damaged, the other has lost its end. Each passed leadership to the
/// other, three times a second.
#[test]
fn leadership_is_not_passed_back_and_forth_between_unusable_replicas() {
    let outcome = run(1682, &Options::new(Durability::Replicated));
    assert_eq!(outcome.failure, None);
    assert!(outcome.unrecoverable, "the seed no longer ends without an intact replica: find another one");
    assert!(outcome.promotions < 50, "{} promotions", outcome.promotions);
}

#[test]
fn traces_of_a_seed_are_equal_in_and_across_processes() {
    let options = Options::new(Durability::Sync);
    let first: Vec<u64> = (0..8).map(|seed| run(seed, &options).trace_hash).collect();
    for (seed, &trace) in first.iter().enumerate() {
        assert_eq!(run(seed as u64, &options).trace_hash, trace, "seed {seed}, a second time");
        let binary = env!("CARGO_BIN_EXE_engram-simulation");
        let output = Command::new(binary).args(["--seed", &seed.to_string()]).output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        let last_line = text.lines().last().unwrap().to_owned();
        assert_eq!(last_line, format!("seed {seed}: trace {trace:016x}"), "in another process");
    }
    assert!(first.windows(2).all(|pair| pair[0] != pair[1]), "seeds differ");
}

#[test]
fn no_replica_loses_the_payload_of_an_acknowledged_item() {
    for durability in [Durability::Sync, Durability::Replicated] {
        for seed in 0..6 {
            let outcome = run(seed, &Options { has_items: true, ..Options::new(durability) });
            assert_eq!(outcome.failure, None, "{durability:?}, seed {seed}");
        }
    }
}
