//! A GPU that mirrors the CPU: results equal the CPU's, also after the GPU has failed.
#![allow(clippy::unwrap_used)] // Test helpers.

mod device_comparison;
#[path = "host/emulated_driver.rs"]
mod emulated_driver;
mod host;
mod random_numbers;
mod reference_device;

use device_comparison::DeviceComparison;
use emulated_driver::{LONG_DEADLINE, run_with_emulated_driver};
use engram_kernels::gpu::cuda::Cuda;
use engram_kernels::{Cpu, Device, Gpu, MirrorStatus, MirroredDevice, threshold};
use host::{Host, build};
use proptest::prelude::*;
use std::time::Duration;

/// Returns a mirrored device whose GPU runs the kernels on the CPU.
fn on_kernels(threshold: Option<u64>) -> Option<Box<dyn Device>> {
    let host = Host::start(&host::program(host::Variant::Plain, None)?, None);
    Some(Box::new(MirroredDevice::new(Cpu::new(2), Gpu::new(host, "kernels on the CPU".to_owned()), threshold)))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(16))]

    #[test]
    fn mirrored_device_equals_the_reference_over_random_arenas(seed: u64, tiles in 0_usize..5) {
        let devices: Option<Vec<_>> = [Some(0), Some(5_000), None].map(on_kernels).into_iter().collect();
        if let Some(devices) = devices {
            let mut comparison = DeviceComparison::new(seed, tiles, devices);
            for _ in 0..12 {
                comparison.step();
            }
            comparison.rank();
            comparison.compare();
            let passes = |at: usize| comparison.devices()[at].mirror_status().unwrap().passes;
            prop_assert!(passes(0) >= passes(1) && passes(2) == 0, "the CPU executes passes below the threshold");
            prop_assert!(comparison.devices().iter().all(|device| device.mirror_status().unwrap().given_up.is_none()));
        }
    }
}

/// Runs a history on a mirrored device with the emulated driver, comparing every step; returns the final status.
fn history(deadline: Duration) -> MirrorStatus {
    let gpu = Gpu::new(Cuda::open(0, deadline).unwrap(), "emulated".to_owned());
    let mirrored: Box<dyn Device> = Box::new(MirroredDevice::new(Cpu::new(1), gpu, Some(0)));
    let mut comparison = DeviceComparison::new(12, 4, vec![mirrored]);
    for _ in 0..30 {
        comparison.step();
    }
    comparison.compare();
    let device = &comparison.devices()[0];
    let status = device.mirror_status().unwrap().clone();
    assert_eq!(device.info().kind, if status.given_up.is_some() { "cpu" } else { "cuda" });
    status
}

#[test]
fn mirror_transfers_only_changes() {
    run_with_emulated_driver("mirror_transfers_only_changes", &[], || {
        let status = history(LONG_DEADLINE);
        assert_eq!((status.fallbacks, status.given_up), (0, None));
        assert!(status.passes > 20, "{} passes", status.passes);
        // 4 tiles of 20 kB each: full transfers would exceed this.
        let all = status.passes * 4 * 4_096 * 5;
        assert!(status.mirrored_bytes * 2 < all, "{} of {all} bytes", status.mirrored_bytes);
    });
}

#[test]
fn failing_gpu_is_given_up_and_results_stay_equal() {
    let test = "failing_gpu_is_given_up_and_results_stay_equal";
    // In a launch, permanently, in a copy: early, and after many passes.
    for plan in ["cuLaunchKernel:1:700", "cuLaunchKernel:40:700", "cuLaunchKernel:60:214", "cuMemcpyHtoDAsync:60:719"] {
        let output = run_with_emulated_driver(test, &[("CUDA_HOST_FAIL", plan)], || {
            let status = history(LONG_DEADLINE);
            let why = status.given_up.expect("the GPU failed");
            assert!(why.starts_with("device failed in pass"), "{why}");
            assert_eq!((status.fallbacks, status.bytes), (1, 0));
        });
        // The re-executed process has one plan.
        if output.is_none() {
            break;
        }
    }
}

#[test]
fn pass_without_gpu_memory_runs_on_the_cpu_and_the_gpu_stays() {
    let test = "pass_without_gpu_memory_runs_on_the_cpu_and_the_gpu_stays";
    // Allocations of the mirror's rows, of a pass, and of another; the first four are those of the columns.
    for nth in [5, 6, 12, 31, 70] {
        let output = run_with_emulated_driver(test, &[("CUDA_HOST_FAIL", &format!("cuMemAllocAsync:{nth}:2"))], || {
            let status = history(LONG_DEADLINE);
            assert_eq!((status.fallbacks, status.given_up), (1, None));
            assert!(status.passes > 20);
        });
        if output.is_none() {
            break;
        }
    }
}

#[test]
fn gpu_too_small_for_the_columns_is_given_up() {
    run_with_emulated_driver("gpu_too_small_for_the_columns_is_given_up", &[("CUDA_HOST_MEMORY_MIB", "0")], || {
        let status = history(LONG_DEADLINE);
        assert!(status.given_up.expect("the GPU is too small").starts_with("device is full"));
        assert_eq!((status.passes, status.fallbacks), (0, 1));
    });
}

#[test]
fn hung_gpu_is_given_up() {
    run_with_emulated_driver("hung_gpu_is_given_up", &[], || {
        let status = history(Duration::ZERO);
        assert!(status.given_up.expect("the GPU hung").ends_with("(code 702)"));
        assert_eq!((status.passes, status.fallbacks), (0, 1));
    });
}

#[test]
fn driver_serves_a_mirror_after_measuring_the_threshold() {
    run_with_emulated_driver("driver_serves_a_mirror_after_measuring_the_threshold", &[], || {
        let mut gpu = Gpu::new(Cuda::open(0, LONG_DEADLINE).unwrap(), "emulated".to_owned());
        // The value depends on the machine.
        let measured = threshold::measure(&mut Cpu::new(1), &mut gpu).unwrap();
        println!("{measured:?}");
        assert!(measured.throughput > 0);
        let gpu = Gpu::new(gpu.into_driver(), "emulated".to_owned());
        let mirrored: Box<dyn Device> = Box::new(MirroredDevice::new(Cpu::new(1), gpu, Some(1)));
        let mut comparison = DeviceComparison::new(3, 2, vec![mirrored]);
        (0..4).for_each(|_| comparison.step());
        comparison.compare();
        assert!(comparison.devices()[0].mirror_status().unwrap().passes > 0);
    });
}
