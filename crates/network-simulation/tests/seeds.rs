//! Seeds of the network simulation, each in a process of its own.
#![allow(clippy::unwrap_used, reason = "tests fail by panicking")]

use std::process::Command;

/// Runs a seed; returns everything it printed.
fn replay(seed: u64) -> String {
    let binary = env!("CARGO_BIN_EXE_engram-network-simulation");
    let output = Command::new(binary).args(["--seed", &seed.to_string()]).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "seed {seed}:\n{}\n{}", text, String::from_utf8_lossy(&output.stderr));
    text
}

fn number(text: &str, name: &str) -> u64 {
    let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    value.unwrap().parse().unwrap()
}

#[test]
fn seeds_are_deterministic_and_pass() {
    // In even seeds clients count; in odd ones every epoch decays.
    let texts = [0, 1].map(|seed| {
        let text = replay(seed);
        assert_eq!(replay(seed), text, "seed {seed}, a second time");
        text
    });
    assert_ne!(texts[0], texts[1], "seeds differ");
    assert!(number(&texts[0], "acknowledged") > 0 && number(&texts[0], "reads") > 0);
    assert!(texts.iter().all(|text| number(text, "epochs") > 0 && number(text, "map_writes") > 1));
    assert!(texts.iter().any(|text| number(text, "drivers_died") > 0));
}
