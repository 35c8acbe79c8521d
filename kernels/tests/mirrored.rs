//! A GPU beside the CPU: the bits are those of the CPU whatever the GPU does, and after it has failed.
#![allow(clippy::unwrap_used)] // Helpers of tests are tests too.

mod host;
mod naive;
mod numbers;
#[path = "host/stand_in.rs"]
mod stand_in;
mod twins;

use engram_kernels::gpu::cuda::Cuda;
use engram_kernels::{Cpu, Device, Gpu, Mirrored, Standing, threshold};
use host::{Host, build};
use proptest::prelude::*;
use stand_in::{PATIENT, on_stand_in};
use std::time::Duration;
use twins::Twins;

/// The kernels on the CPU, as the GPU of a mirror.
fn on_kernels(threshold: Option<u64>) -> Option<Box<dyn Device>> {
    let host = Host::start(&host::program(host::Variant::Plain, None)?, None);
    Some(Box::new(Mirrored::new(Cpu::new(2), Gpu::new(host, "kernels on the CPU".to_owned()), threshold)))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(16))]

    #[test]
    fn a_mirror_equals_the_law_over_random_arenas(seed: u64, tiles in 0_usize..5) {
        let devices: Option<Vec<_>> = [Some(0), Some(5_000), None].map(on_kernels).into_iter().collect();
        if let Some(devices) = devices {
            let mut twins = Twins::new(seed, tiles, devices);
            for _ in 0..12 {
                twins.step();
            }
            twins.rank();
            twins.compare();
            let passes = |at: usize| twins.devices()[at].standing().unwrap().passes;
            prop_assert!(passes(0) >= passes(1) && passes(2) == 0, "a pass below the threshold is the CPU's");
            prop_assert!(twins.devices().iter().all(|device| device.standing().unwrap().given_up.is_none()));
        }
    }
}

/// A history over a mirror on the stand-in, equal to the law at every step; how the GPU stands at its end.
fn history(deadline: Duration) -> Standing {
    let gpu = Gpu::new(Cuda::open(0, deadline).unwrap(), "stand-in".to_owned());
    let mirrored: Box<dyn Device> = Box::new(Mirrored::new(Cpu::new(1), gpu, Some(0)));
    let mut twins = Twins::new(12, 4, vec![mirrored]);
    for _ in 0..30 {
        twins.step();
    }
    twins.compare();
    let device = &twins.devices()[0];
    let standing = device.standing().unwrap().clone();
    assert_eq!(device.info().kind, if standing.given_up.is_some() { "cpu" } else { "cuda" });
    standing
}

#[test]
fn a_mirror_on_a_driver_takes_only_what_has_changed() {
    on_stand_in("a_mirror_on_a_driver_takes_only_what_has_changed", &[], || {
        let standing = history(PATIENT);
        assert_eq!((standing.fallbacks, standing.given_up), (0, None));
        assert!(standing.passes > 20, "{} passes", standing.passes);
        // 4 tiles of 20 kB: all of them each time would be more.
        let all = standing.passes * 4 * 4_096 * 5;
        assert!(standing.mirrored_bytes * 2 < all, "{} of {all} bytes", standing.mirrored_bytes);
    });
}

#[test]
fn a_gpu_that_fails_in_the_middle_is_given_up_and_the_bits_stay() {
    let test = "a_gpu_that_fails_in_the_middle_is_given_up_and_the_bits_stay";
    // In a launch, for good, in a copy: early, and when the mirror has long been used.
    for plan in ["cuLaunchKernel:1:700", "cuLaunchKernel:40:700", "cuLaunchKernel:60:214", "cuMemcpyHtoDAsync:60:719"] {
        let said = on_stand_in(test, &[("CUDA_HOST_FAIL", plan)], || {
            let standing = history(PATIENT);
            let why = standing.given_up.expect("it failed");
            assert!(why.starts_with("the device failed in pass"), "{why}");
            assert_eq!((standing.fallbacks, standing.bytes), (1, 0));
        });
        // The process on the stand-in has one plan.
        if said.is_none() {
            break;
        }
    }
}

#[test]
fn a_gpu_without_memory_for_a_pass_has_the_cpu_do_it_and_stays() {
    let test = "a_gpu_without_memory_for_a_pass_has_the_cpu_do_it_and_stays";
    // Allocations of the mirror's rows, of a pass, and of another; the first four are those of the columns.
    for nth in [5, 6, 12, 31, 70] {
        let said = on_stand_in(test, &[("CUDA_HOST_FAIL", &format!("cuMemAllocAsync:{nth}:2"))], || {
            let standing = history(PATIENT);
            assert_eq!((standing.fallbacks, standing.given_up), (1, None));
            assert!(standing.passes > 20);
        });
        if said.is_none() {
            break;
        }
    }
}

#[test]
fn a_gpu_too_small_for_the_columns_is_given_up() {
    on_stand_in("a_gpu_too_small_for_the_columns_is_given_up", &[("CUDA_HOST_MEMORY_MIB", "0")], || {
        let standing = history(PATIENT);
        assert!(standing.given_up.expect("it is too small").starts_with("the device is full"));
        assert_eq!((standing.passes, standing.fallbacks), (0, 1));
    });
}

#[test]
fn a_gpu_that_does_not_answer_is_given_up() {
    on_stand_in("a_gpu_that_does_not_answer_is_given_up", &[], || {
        let standing = history(Duration::ZERO);
        assert!(standing.given_up.expect("it did not answer").ends_with("(code 702)"));
        assert_eq!((standing.passes, standing.fallbacks), (0, 1));
    });
}

#[test]
fn a_driver_serves_a_mirror_after_its_threshold_was_measured() {
    on_stand_in("a_driver_serves_a_mirror_after_its_threshold_was_measured", &[], || {
        let mut gpu = Gpu::new(Cuda::open(0, PATIENT).unwrap(), "stand-in".to_owned());
        // Any number: it is of this machine.
        let measured = threshold::measure(&mut Cpu::new(1), &mut gpu).unwrap();
        println!("{measured:?}");
        assert!(measured.throughput > 0);
        let gpu = Gpu::new(gpu.into_driver(), "stand-in".to_owned());
        let mirrored: Box<dyn Device> = Box::new(Mirrored::new(Cpu::new(1), gpu, Some(1)));
        let mut twins = Twins::new(3, 2, vec![mirrored]);
        (0..4).for_each(|_| twins.step());
        twins.compare();
        assert!(twins.devices()[0].standing().unwrap().passes > 0);
    });
}
