//! Replays every input of the corpora in a plain build, as regression tests.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use engram_fuzz::TARGETS;
use std::fs;
use std::path::Path;

/// Size limit of all corpora together: they are part of every checkout.
const MOST_BYTES: usize = 300 << 10;

#[test]
fn every_target_accepts_every_input_of_its_corpus() {
    let mut bytes = 0;
    for target in TARGETS {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(target.name);
        let mut inputs = 0;
        for file in fs::read_dir(&folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display())) {
            let path = file.unwrap().path();
            let input = fs::read(&path).unwrap();
            bytes += input.len();
            inputs += 1;
            // The panic message lacks the name of the file.
            if std::panic::catch_unwind(|| (target.run)(&input)).is_err() {
                panic!("{}: see the panic above", path.display());
            }
        }
        assert!(inputs > 1, "{} has no corpus", target.name);
    }
    assert!(bytes <= MOST_BYTES, "the corpora have {bytes} bytes, more than {MOST_BYTES}");
}

#[test]
fn unstructured_inputs_violate_no_invariant() {
    for target in TARGETS {
        for len in [0, 1, 2, 3, 40, 5_000] {
            for byte in [0, 1, 2, 3, 0x7f, 0xff] {
                (target.run)(&vec![byte; len]);
            }
        }
    }
}
