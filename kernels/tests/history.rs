//! Random histories: the digests of kernels and CPU device are equal after every batch of updates.
#![allow(clippy::unwrap_used)] // Test helpers.

mod host;
mod random_history;
mod random_numbers;

use host::{Host, Variant, program};
use random_history::History;

#[test]
fn kernels_and_cpu_agree_after_every_batch() {
    if let Some(program) = program(Variant::Plain, None) {
        let done = History::new(Host::start(&program, None), 3).run(200_000, 40, |_| ());
        assert!(done.is_complete(), "{done:?}");
    }
}

#[test]
#[ignore = "full: ten million updates take half a minute"]
fn kernels_and_cpu_agree_through_ten_million_updates() {
    if let Some(program) = program(Variant::Plain, None) {
        let done = History::new(Host::start(&program, Some(11)), 11).run(10_000_000, 2_000, |_| ());
        println!("{done:?}");
        assert!(done.is_complete());
    }
}
