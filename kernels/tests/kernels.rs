//! The CUDA kernels without a GPU: compiled as C++ and run on the CPU, they are the law, bit for bit, and their launches are those
//! of production.
#![allow(clippy::unwrap_used)] // Helpers of tests are tests too.

mod host;
mod naive;
mod numbers;
mod story;
mod twins;

use engram_kernels::{Device, Gpu};
use host::{Host, Variant, program};
use proptest::prelude::*;
use story::{PARTS, Story};
use twins::Twins;

/// A device on the kernels, its threads in the order of a seed.
fn gpu(seed: Option<u64>) -> Option<Box<dyn Device>> {
    let host = Host::start(&program(Variant::Plain, None)?, seed);
    Some(Box::new(Gpu::new(host, "kernels on the CPU".to_owned())))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn kernels_equal_the_law_over_random_arenas(seed: u64, tiles in 0_usize..4) {
        let devices: Option<Vec<_>> = [None, Some(seed)].map(gpu).into_iter().collect();
        if let Some(devices) = devices {
            let mut twins = Twins::new(seed, tiles, devices);
            for _ in 0..10 {
                twins.step();
            }
            twins.rank();
            twins.compare();
        }
    }
}

#[test]
fn every_pass_equals_the_law_in_any_order_of_threads() {
    let Some(program) = program(Variant::Plain, None) else { return };
    for seed in [None, Some(1), Some(2)] {
        let host = Host::start(&program, seed);
        let mut story = Story::new(host, 5 + seed.unwrap_or(0), &[4_096, 4_096, 3_000, 4_095, 4_096, 700], false);
        for part in PARTS.into_iter().chain(PARTS) {
            story.tell(part);
        }
    }
}
