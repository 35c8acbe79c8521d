//! Random histories: the kernels and the CPU device hold the same after every batch of updates, by digest, whatever happens between.
#![allow(clippy::unwrap_used)] // Helpers of tests are tests too.

mod host;
mod numbers;
mod past;

use host::{Host, Variant, program};
use past::History;

#[test]
fn kernels_and_cpu_hold_the_same_after_every_batch() {
    if let Some(program) = program(Variant::Plain, None) {
        let done = History::new(Host::start(&program, None), 3).run(200_000, 40, |_| ());
        assert!(done.is_all(), "{done:?}");
    }
}

#[test]
#[ignore = "full: ten million updates take half a minute"]
fn kernels_and_cpu_hold_the_same_through_ten_million_updates() {
    if let Some(program) = program(Variant::Plain, None) {
        let done = History::new(Host::start(&program, Some(11)), 11).run(10_000_000, 2_000, |_| ());
        println!("{done:?}");
        assert!(done.is_all());
    }
}
