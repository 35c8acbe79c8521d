//! The CUDA kernels without a GPU: compiled as C++ and run on the CPU with the production launch code, they equal the reference bit for bit.
#![allow(clippy::unwrap_used)] // Test helpers.

mod device_comparison;
mod host;
mod pass_checks;
mod random_numbers;
mod reference_device;

use device_comparison::DeviceComparison;
use engram_kernels::profiler::{Kind, ProfiledDevice, ProfiledDriver, Recorder, analyse};
use engram_kernels::{Cpu, Device, Gpu};
use host::{Host, Variant, program};
use pass_checks::{PARTS, PassChecks};
use proptest::prelude::*;
use std::time::Instant;

/// Returns a device on the kernels, with a thread order determined by the seed.
fn gpu(seed: Option<u64>) -> Option<Box<dyn Device>> {
    let host = Host::start(&program(Variant::Plain, None)?, seed);
    Some(Box::new(Gpu::new(host, "kernels on the CPU".to_owned())))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn kernels_equal_the_reference_over_random_arenas(seed: u64, tiles in 0_usize..4) {
        let devices: Option<Vec<_>> = [None, Some(seed)].map(gpu).into_iter().collect();
        if let Some(devices) = devices {
            let mut devices = DeviceComparison::new(seed, tiles, devices);
            for _ in 0..10 {
                devices.step();
            }
            devices.rank();
            devices.compare();
        }
    }
}

#[test]
fn every_pass_equals_the_reference_in_any_thread_order() {
    let Some(program) = program(Variant::Plain, None) else { return };
    for seed in [None, Some(1), Some(2)] {
        let host = Host::start(&program, seed);
        let mut checks = PassChecks::new(host, 5 + seed.unwrap_or(0), &[4_096, 4_096, 3_000, 4_095, 4_096, 700], false);
        for part in PARTS.into_iter().chain(PARTS) {
            checks.check(part);
        }
    }
}

#[test]
fn recorded_devices_equal_the_reference_and_have_complete_timelines() {
    let Some(program) = program(Variant::Plain, None) else { return };
    let origin = Instant::now();
    let [cpu, gpu] = ["cpu", "kernels on the CPU"].map(|name| Recorder::new(name.to_owned(), origin, 100_000));
    let driver = ProfiledDriver::new(Host::start(&program, None), gpu.clone());
    let devices: Vec<Box<dyn Device>> = vec![
        Box::new(ProfiledDevice::new(Cpu::new(2), cpu.clone())),
        Box::new(Gpu::new(driver, "kernels on the CPU".to_owned())),
    ];
    let mut devices = DeviceComparison::new(3, 3, devices);
    for _ in 0..20 {
        devices.step();
    }
    devices.rank();
    devices.compare();
    let tracks = [cpu.take(), gpu.take()];
    for (track, names) in tracks.iter().zip([["write", "rank", "digest"], ["upload", "radix_pass", "digest"]]) {
        assert_eq!(track.dropped, 0);
        assert!(track.spans.is_sorted_by_key(|span| span.end_ns), "calls are sequential");
        for name in names {
            assert!(
                track.spans.iter().any(|span| span.name == name),
                "{name} is missing in the timeline of {}",
                track.device
            );
        }
    }
    // One thread drives both devices, so that neither waits for the other, and each is idle while the other works.
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
