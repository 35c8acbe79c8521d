//! Seeds that found something once, and that a seed decides everything.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use engram_simulation::{Durability, Options, run};
use std::process::Command;

/// What each found in the simulated world of its time, whose later changes gave each seed another course: records that were
/// forgotten before a follower had them (5, 6, 24, 70), a sync that failed and was forgiven by the next process (11, 14), a log that
/// begins with a cut (56), a copy that came twice and took its file with it (130, 2087), a start that failed and cost the next one
/// its place (49, 57), an answer of a primary that was none any more (20369), and in mode async what was acknowledged after a
/// hand-over had been called off (1289, 3063, 3087).
const FOUND: [(Durability, &[u64]); 3] = [
    (Durability::Sync, &[5, 6, 11, 14, 24, 56, 130, 2087]),
    (Durability::Replicated, &[49, 57, 70, 20_369]),
    (Durability::Async, &[1289, 3063, 3087]),
];

#[test]
fn what_a_seed_found_once_is_mended() {
    for (durability, seeds) in FOUND {
        for &seed in seeds {
            let outcome = run(seed, &Options::new(durability));
            assert_eq!(outcome.failure, None, "{durability:?}, seed {seed}");
            assert!(outcome.acked > 0, "{durability:?}, seed {seed}: nothing was asked for");
        }
    }
}

/// Both copies of a partition are of no use: one is damaged, the other has lost its end. Each gave the lead to the other, three times a
/// second.
#[test]
fn a_lead_that_nobody_can_take_is_not_given_to_and_fro() {
    let outcome = run(1682, &Options::new(Durability::Replicated));
    assert_eq!(outcome.failure, None);
    assert!(outcome.forsaken, "the seed has another course by now: look for one that ends without a whole copy");
    assert!(outcome.promotions < 50, "{} promotions", outcome.promotions);
}

#[test]
fn a_seed_leaves_the_same_trace_again_and_in_another_process() {
    let options = Options::new(Durability::Sync);
    let first: Vec<u64> = (0..8).map(|seed| run(seed, &options).trace_hash).collect();
    for (seed, &trace) in first.iter().enumerate() {
        assert_eq!(run(seed as u64, &options).trace_hash, trace, "seed {seed}, a second time");
        let binary = env!("CARGO_BIN_EXE_engram-simulation");
        let output = Command::new(binary).args(["--seed", &seed.to_string()]).output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        let told = text.lines().last().unwrap().to_owned();
        assert_eq!(told, format!("seed {seed}: trace {trace:016x}"), "in another process");
    }
    assert!(first.windows(2).all(|pair| pair[0] != pair[1]), "seeds differ");
}
