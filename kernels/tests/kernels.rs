//! The CUDA kernels without a GPU: compiled as C++ and run on the CPU, they are the law, bit for bit, and their launches are those
//! of production.
#![allow(clippy::unwrap_used)] // Helpers of tests are tests too.

mod host;
mod naive;
mod numbers;
mod story;
mod twins;

use engram_kernels::profiler::{Kind, Profiled, ProfiledDriver, Recorder, analyse};
use engram_kernels::{Cpu, Device, Gpu};
use host::{Host, Variant, program};
use proptest::prelude::*;
use std::time::Instant;
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

#[test]
fn recorded_devices_are_the_law_and_their_timelines_hold_what_they_did() {
    let Some(program) = program(Variant::Plain, None) else { return };
    let origin = Instant::now();
    let [cpu, gpu] = ["cpu", "kernels on the CPU"].map(|name| Recorder::new(name.to_owned(), origin, 100_000));
    let driver = ProfiledDriver::new(Host::start(&program, None), gpu.clone());
    let devices: Vec<Box<dyn Device>> = vec![
        Box::new(Profiled::new(Cpu::new(2), cpu.clone())),
        Box::new(Gpu::new(driver, "kernels on the CPU".to_owned())),
    ];
    let mut twins = Twins::new(3, 3, devices);
    for _ in 0..20 {
        twins.step();
    }
    twins.rank();
    twins.compare();
    let tracks = [cpu.take(), gpu.take()];
    for (track, names) in tracks.iter().zip([["write", "rank", "digest"], ["upload", "radix_pass", "digest"]]) {
        assert_eq!(track.dropped, 0);
        assert!(track.spans.is_sorted_by_key(|span| span.end_ns), "calls follow one another");
        for name in names {
            assert!(
                track.spans.iter().any(|span| span.name == name),
                "{name} is not on the timeline of {}",
                track.device
            );
        }
    }
    // One thread has both devices, so that neither waits for the other, and each is idle while the other works.
    let analysis = analyse(&tracks).unwrap();
    let [of_cpu, of_gpu] = analysis.devices[..] else { panic!("{analysis:?}") };
    assert!(
        of_cpu.idle >= of_gpu.kernels + of_gpu.copies && of_gpu.idle >= of_cpu.kernels + of_cpu.copies,
        "{analysis:?}"
    );
    let is_copy = |name: &str| ["write", "read", "export", "upload", "download", "copy"].contains(&name);
    let spans = tracks.iter().flat_map(|track| &track.spans).filter(|span| span.kind != Kind::Wait);
    spans.for_each(|span| assert_eq!(is_copy(span.name), span.kind == Kind::Copy, "{span:?}"));
}
