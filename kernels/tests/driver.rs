//! The production launch code on the emulated CUDA driver: every pass, and every driver failure.
//!
//! Every test re-executes itself with the emulated driver (`host/emulated_driver.rs`).
#![allow(clippy::unwrap_used)] // Test helpers.

#[path = "host/build.rs"]
mod build;
#[path = "host/emulated_driver.rs"]
mod emulated_driver;
#[path = "driver/nccl.rs"]
mod nccl;
mod pass_checks;
mod random_numbers;
mod reference_device;

use emulated_driver::{LONG_DEADLINE, run_with_emulated_driver};
use engram_kernels::gpu::Driver as _;
use engram_kernels::gpu::cuda::{Cuda, DEADLINE, OpenError, devices};
use engram_kernels::profiler::{Kind, ProfiledDriver, Recorder};
use engram_kernels::{Cpu, Device, Error, Gpu, MirroredDevice, Segment, Tile, Update};
use engram_memory::{DecayClock, Group, ONE};
use pass_checks::{PARTS, PassChecks};
use std::time::{Duration, Instant};

const ILLEGAL_ADDRESS: i32 = 700;
const UNCORRECTABLE: i32 = 214;

/// Returns a device with one full tile of weights one half, and an update of each memory.
fn small() -> (Gpu<Cuda>, Segment, Vec<Update>) {
    let mut device = Gpu::new(Cuda::open(0, LONG_DEADLINE).unwrap(), String::new());
    device.reserve(1).unwrap();
    device.map_tile(0, Tile { segment: 0, count: 4_096 });
    let segment = Segment { clock: DecayClock::from_units(7).unwrap(), ..Segment::default() };
    let rows: Vec<_> = (0..4_096).map(|slot| (slot, 7 + ONE / 2, Group(0))).collect();
    device.write(&rows).unwrap();
    let updates = (0..4_096).map(|slot| Update { slot, delta: slot as i32 }).collect();
    (device, segment, updates)
}

fn potentials(device: &mut Gpu<Cuda>) -> Vec<u32> {
    let (mut potentials, mut groups) = (Vec::new(), Vec::new());
    device.export(0, &mut potentials, &mut groups).unwrap();
    potentials
}

#[test]
fn passes_on_a_driver_equal_the_reference() {
    run_with_emulated_driver("passes_on_a_driver_equal_the_reference", &[], || {
        assert_eq!(devices().unwrap(), 1);
        let driver = Cuda::open(0, LONG_DEADLINE).unwrap();
        assert_eq!(driver.name(), "emulated 0");
        let mut checks = PassChecks::new(driver, 5, &[4_096, 4_096, 3_000, 700], false);
        PARTS.into_iter().chain(PARTS).for_each(|part| checks.check(part));
    });
}

#[test]
fn machine_without_a_driver_has_no_device() {
    // With a driver, the test only checks that it does not panic.
    match Cuda::open(64, DEADLINE) {
        Err(OpenError::NoDriver) => assert_eq!(devices().unwrap(), 0),
        Err(OpenError::NoDevice { .. } | OpenError::OldDriver { .. } | OpenError::Failed { .. }) => {}
        other => panic!("{:?}", other.err()),
    }
}

#[test]
fn driver_without_devices_reports_none() {
    run_with_emulated_driver("driver_without_devices_reports_none", &[("CUDA_HOST_DEVICES", "0")], || {
        assert_eq!(devices().unwrap(), 0);
        let error = Cuda::open(0, DEADLINE).err().unwrap();
        assert_eq!(error.to_string(), "no CUDA device 0: the driver reports 0");
    });
}

#[test]
fn device_beyond_the_last_is_rejected() {
    run_with_emulated_driver("device_beyond_the_last_is_rejected", &[("CUDA_HOST_DEVICES", "3")], || {
        assert!(Cuda::open(2, DEADLINE).is_ok());
        assert_eq!(Cuda::open(3, DEADLINE).err().unwrap().to_string(), "no CUDA device 3: the driver reports 3");
    });
}

#[test]
fn too_old_driver_is_rejected() {
    run_with_emulated_driver("too_old_driver_is_rejected", &[("CUDA_HOST_DRIVER", "12080")], || {
        let error = Cuda::open(0, DEADLINE).err().unwrap().to_string();
        assert_eq!(error, "CUDA driver is too old: it supports CUDA 12.8, but 13.0 (driver 580) or newer is required");
    });
}

#[test]
fn device_older_than_all_code_is_rejected() {
    run_with_emulated_driver("device_older_than_all_code_is_rejected", &[("CUDA_HOST_CAPABILITY", "75")], || {
        let error = Cuda::open(0, DEADLINE).err().unwrap().to_string();
        assert_eq!(error, "fatbin 'algebra' does not support compute capability 7.5 (driver code 209)");
    });
}

#[test]
fn device_newer_than_all_code_uses_ptx() {
    run_with_emulated_driver("device_newer_than_all_code_uses_ptx", &[("CUDA_HOST_CAPABILITY", "110")], || {
        let (mut device, segment, updates) = small();
        device.update(&[segment], &updates).unwrap();
        assert!(potentials(&mut device).into_iter().eq((0..4_096).map(|slot| 7 + ONE / 2 + slot)));
    });
}

#[test]
fn full_device_is_reported_and_nothing_changes() {
    // The arena has 13 bytes per slot; 64 MiB hold at most 1,260 tiles, and half of that while columns grow.
    run_with_emulated_driver("full_device_is_reported_and_nothing_changes", &[("CUDA_HOST_MEMORY_MIB", "64")], || {
        let (mut device, segment, updates) = small();
        device.reserve(300).unwrap();
        let before = potentials(&mut device);
        let error = device.reserve(1_000).unwrap_err();
        assert!(matches!(error, Error::Full { missing_bytes } if missing_bytes > 1 << 20), "{error}");
        assert_eq!(device.bytes(), 300 * 4_096 * 13);
        assert!(potentials(&mut device) == before);
        device.update(&[segment], &updates).unwrap();
        assert!(potentials(&mut device).into_iter().eq((0..4_096).map(|slot| 7 + ONE / 2 + slot)));
    });
}

#[test]
fn running_out_of_memory_within_a_batch_changes_nothing() {
    let test = "running_out_of_memory_within_a_batch_changes_nothing";
    // Each allocation of the batches fails once; the first ones are those of the arena, its rows, and more tiles.
    const FIRST: u32 = 12;
    let mut nth = FIRST;
    while let Some(output) =
        run_with_emulated_driver(test, &[("CUDA_HOST_FAIL", &format!("cuMemAllocAsync:{nth}:2"))], rejected_batches)
    {
        if output.contains("refused 0 batches") {
            break;
        }
        nth += 1;
    }
    assert!(nth == FIRST || nth > FIRST + 22, "update and epoch on both paths need more than {nth} allocations");
}

/// Runs an update that folds and an epoch that overflows a bucket and takes the sorted path; retries a batch that runs out of memory.
fn rejected_batches() {
    let (mut device, _, updates) = small();
    device.reserve(5).unwrap();
    let hot: Vec<_> = (0..300).map(|_| Update { slot: 9, delta: 1 }).collect();
    let update = Segment { fold: 7, ..Segment::default() };
    let (mut expected, mut rejected) = (vec![7 + ONE / 2; 4_096], 0);
    let mut call = |segment: Segment, hot: Option<&[Update]>, after: Vec<u32>| {
        loop {
            let done = match hot {
                None => device.update(&[segment], &updates),
                Some(hot) => device.epoch(&[segment], hot, &mut Vec::new()),
            };
            if done.is_ok() {
                break;
            }
            assert!(matches!(done, Err(Error::Full { .. })), "{done:?}");
            rejected += 1;
            assert!(potentials(&mut device) == expected, "a rejected batch changed the state");
        }
        expected = after;
        assert!(potentials(&mut device) == expected);
    };
    call(update, None, (0..4_096).map(|slot| ONE / 2 + slot).collect());
    let after = |slot| ONE / 2 + slot + if slot == 9 { 300 } else { 0 };
    call(Segment::default(), Some(&hot), (0..4_096).map(after).collect());
    println!("refused {rejected} batches");
}

#[test]
fn failed_kernel_ends_the_device_and_it_can_be_reopened() {
    let test = "failed_kernel_ends_the_device_and_it_can_be_reopened";
    run_with_emulated_driver(test, &[("CUDA_HOST_FAIL", "cuLaunchKernel:3:700")], || {
        let (mut device, segment, updates) = small();
        let is_lost = |error: Error| matches!(error, Error::Failed { code: ILLEGAL_ADDRESS, .. });
        assert!(is_lost(device.update(&[segment], &updates).unwrap_err()));
        // Later calls fail, too.
        assert!(is_lost(device.epoch(&[segment], &[], &mut Vec::new()).unwrap_err()));
        assert!(is_lost(device.read(&[1], &mut Vec::new()).unwrap_err()));
        drop(device);
        let (mut device, segment, updates) = small();
        device.update(&[segment], &updates).unwrap();
    });
}

#[test]
fn permanently_failed_device_cannot_be_reopened() {
    let test = "permanently_failed_device_cannot_be_reopened";
    run_with_emulated_driver(test, &[("CUDA_HOST_FAIL", "cuLaunchKernel:2:214")], || {
        let (mut device, segment, updates) = small();
        let error = device.update(&[segment], &updates).unwrap_err();
        assert!(matches!(error, Error::Failed { code: UNCORRECTABLE, .. }), "{error}");
        drop(device);
        let error = Cuda::open(0, DEADLINE).err().unwrap().to_string();
        assert_eq!(error, "failed to create a context (driver code 214)");
    });
}

#[test]
fn hung_device_fails_after_the_deadline() {
    run_with_emulated_driver("hung_device_fails_after_the_deadline", &[], || {
        let mut device = Gpu::new(Cuda::open(0, Duration::ZERO).unwrap(), String::new());
        device.reserve(1).unwrap();
        device.map_tile(0, Tile { segment: 0, count: 1 });
        let error = device.write(&[(0, 1, Group(0))]).unwrap_err().to_string();
        assert_eq!(error, "device failed in pass 'wait' (code 702)");
        let error = device.read(&[0], &mut Vec::new()).unwrap_err().to_string();
        assert_eq!(error, "device failed in pass 'allocate' (code 702)");
    });
}

/// Returns pseudo-random bytes.
fn noise(bytes: usize, seed: u64) -> Vec<u8> {
    (0..bytes as u64).map(|at| engram_memory::mix64(at ^ seed << 40) as u8).collect()
}

#[test]
fn transfers_reuse_staging_pieces() {
    run_with_emulated_driver("transfers_reuse_staging_pieces", &[], || {
        // More than twice the pinned memory, and pieces filled in odd parts.
        let bytes = noise((9 << 20) + 4_321, 1);
        let mut driver = Cuda::open(0, LONG_DEADLINE).unwrap();
        let buffer = driver.allocate(bytes.len()).unwrap();
        let mut rest = &bytes[..];
        for part in [5, 70_000, (1 << 20) - 3, 900_001, 1, 6 << 20, usize::MAX] {
            let (now, later) = rest.split_at(part.min(rest.len()));
            driver.upload(&buffer, bytes.len() - rest.len(), now).unwrap();
            rest = later;
        }
        let read = |driver: &mut Cuda, from: usize, count: usize, buffer: &_| {
            let mut read = vec![0; count];
            driver.download(buffer, from, &mut read).unwrap();
            read
        };
        assert!(read(&mut driver, 0, bytes.len(), &buffer) == bytes);
        // A completed download frees all pieces.
        for turn in 2..40 {
            let (at, own) = (turn * 1_000, noise(300_000, turn as u64));
            driver.upload(&buffer, at, &own).unwrap();
            assert!(read(&mut driver, at, own.len(), &buffer) == own, "turn {turn}");
        }
    });
}

#[test]
fn next_piece_is_filled_before_the_previous_is_copied() {
    let test = "next_piece_is_filled_before_the_previous_is_copied";
    run_with_emulated_driver(test, &[("CUDA_HOST_FAIL", "cuEventQuery:1:999")], || {
        // Event queries are counted; four pieces are filled before the first one.
        let mut driver = Cuda::open(0, LONG_DEADLINE).unwrap();
        let buffer = driver.allocate(8 << 20).unwrap();
        driver.upload(&buffer, 0, &noise(4 << 20, 1)).unwrap();
        let error = driver.upload(&buffer, 4 << 20, &[7]).unwrap_err();
        assert!(matches!(error, Error::Failed { pass: "upload", code: 999 }), "{error}");
    });
}

#[test]
fn device_measures_operations_by_its_own_clock() {
    run_with_emulated_driver("device_measures_operations_by_its_own_clock", &[], || {
        let (mut device, segment, updates) = small();
        device.driver_mut().time();
        device.update(&[segment], &updates[..1]).unwrap();
        let timed = device.driver_mut().timings().unwrap();
        let names: Vec<&str> = timed.iter().map(|it| it.name).collect();
        assert!(names.contains(&"upload") && names.contains(&"radix_pass"), "{names:?}");
        assert_eq!(names.last(), Some(&"apply_updates"));
        assert!(timed.iter().all(|it| 0.0 <= it.begin_ms && it.begin_ms <= it.end_ms), "{timed:?}");
        assert!(timed.is_sorted_by_key(|it| it.begin_ms));
        // Timing stops when it is read.
        device.update(&[segment], &updates).unwrap();
        assert_eq!(device.driver_mut().timings().unwrap(), []);
        let (free, all) = device.driver_mut().memory().unwrap();
        assert!(free < all && all == 4_096 << 20, "{free} of {all}");
    });
}

#[test]
fn epoch_of_a_mirrored_device_is_two_launches() {
    run_with_emulated_driver("epoch_of_a_mirrored_device_is_two_launches", &[], || {
        let recorder = Recorder::off("gpu".to_owned());
        let driver = ProfiledDriver::new(Cuda::open(0, LONG_DEADLINE).unwrap(), recorder.clone());
        let mut device = MirroredDevice::new(Cpu::new(1), Gpu::new(driver, String::new()), Some(0));
        device.reserve(2).unwrap();
        let segments = [Segment { clock: DecayClock::from_units(7).unwrap(), ..Segment::default() }];
        for tile in 0..2 {
            device.map_tile(tile, Tile { segment: 0, count: 4_096 });
            let rows: Vec<_> = (0..4_096).map(|at| (tile * 4_096 + at, 7 + ONE / 2, Group(0))).collect();
            device.write(&rows).unwrap();
        }
        let mut quality = Vec::new();
        device.epoch(&segments, &[], &mut quality).unwrap();
        // The steady state: updates, and the quality after them.
        let updates: Vec<_> = (0..100).map(|at| Update { slot: at * 50, delta: 5 }).collect();
        recorder.start(Instant::now(), 1_000);
        device.epoch(&segments, &updates, &mut quality).unwrap();
        let spans = recorder.stop().spans;
        let of = |kind| spans.iter().filter(|span| span.kind == kind).map(|span| span.name).collect::<Vec<_>>();
        // Recorded step by step, otherwise one graph from "upload" to "download".
        assert_eq!(of(Kind::Kernel), ["scatter_rows", "fill", "fold_quality"]);
        assert_eq!(of(Kind::Copy), ["upload", "upload", "upload", "upload", "download"]);
    });
}

/// Varies updates, segments and tiles between epochs: a graph must not use outdated buffers.
#[test]
fn graph_is_reused_while_it_fits_and_rebuilt_otherwise() {
    // A launch in a graph is enqueued when the graph is captured: once for each graph.
    let test = "graph_is_reused_while_it_fits_and_rebuilt_otherwise";
    run_with_emulated_driver(test, &[], || {
        let (mut device, mut host) = (Gpu::new(Cuda::open(0, LONG_DEADLINE).unwrap(), String::new()), Cpu::new(1));
        let (mut on_gpu, mut on_host) = (Vec::new(), Vec::new());
        let mut tiles = 0;
        let mut seed = 0;
        for (round, (grown, segments, groups, updates)) in [
            (3, 1, 1, 0),
            (3, 1, 1, 100),
            // As many updates, fewer, more than the capacity.
            (3, 1, 1, 100),
            (3, 1, 1, 190),
            (3, 1, 1, 3),
            (3, 1, 1, 150),
            (3, 1, 1, 0),
            // Other dimensions, and back.
            (3, 3, 1, 150),
            (3, 3, 4, 150),
            (5, 3, 4, 150),
            (5, 3, 4, 0),
            (5, 3, 4, 320),
            (5, 3, 4, 321),
        ]
        .into_iter()
        .enumerate()
        {
            for device in [&mut device as &mut dyn Device, &mut host] {
                device.reserve(grown).unwrap();
                for tile in 0..grown {
                    device.map_tile(tile, Tile { segment: tile % segments, count: 4_096 });
                }
                let rows: Vec<_> = (tiles * 4_096..grown * 4_096).map(|slot| (slot, slot * 7, Group(0))).collect();
                device.write(&rows).unwrap();
                device.write(&[(round as u32, ONE / 3, Group(groups - 1))]).unwrap();
            }
            tiles = grown;
            let segment = |of: u32| Segment {
                clock: DecayClock::from_units(1_000 * round as u32 + of).unwrap(),
                fold: u32::from(round % 4 == 3) * 5,
                ..Segment::default()
            };
            let segments: Vec<_> = (0..segments).map(segment).collect();
            let updates: Vec<_> = (0..updates)
                .map(|_| {
                    seed += 1;
                    let noise = engram_memory::mix64(seed);
                    Update { slot: noise as u32 % (tiles * 4_096), delta: (noise >> 32) as i32 >> 2 }
                })
                .collect();
            device.epoch(&segments, &updates, &mut on_gpu).unwrap();
            host.epoch(&segments, &updates, &mut on_host).unwrap();
            assert_eq!(on_gpu, on_host, "round {round}");
            for tile in 0..tiles {
                let (mut of_device, mut of_host) = ((Vec::new(), Vec::new()), (Vec::new(), Vec::new()));
                device.export(tile, &mut of_device.0, &mut of_device.1).unwrap();
                host.export(tile, &mut of_host.0, &mut of_host.1).unwrap();
                assert!(of_device == of_host, "round {round}, tile {tile}");
            }
        }
    });
}

#[test]
fn repeated_epochs_are_one_driver_call_each() {
    // The first epoch captures its two kernels, after the one of the rows; the fourth would detect another capture.
    run_with_emulated_driver(
        "repeated_epochs_are_one_driver_call_each",
        &[("CUDA_HOST_FAIL", "cuLaunchKernel:4:999")],
        || {
            let (mut device, segment, updates) = small();
            for turn in 0..20 {
                let some = &updates[turn * 50..turn * 50 + 50];
                device.epoch(&[segment], some, &mut Vec::new()).unwrap();
            }
            let error = device.update(&[segment], &updates).unwrap_err();
            assert!(matches!(error, Error::Failed { code: 999, .. }), "{error}");
        },
    );
}

#[test]
fn failed_capture_ends_the_device_and_frees_its_memory() {
    let test = "failed_capture_ends_the_device_and_frees_its_memory";
    for call in [
        "cuStreamBeginCapture:1",
        "cuLaunchKernel:2",
        "cuMemsetD8Async:2",
        "cuStreamEndCapture:1",
        "cuGraphInstantiateWithFlags:1",
        "cuGraphLaunch:1",
        "cuGraphLaunch:2",
    ] {
        let done = run_with_emulated_driver(test, &[("CUDA_HOST_FAIL", &format!("{call}:999"))], || {
            let (mut device, segment, updates) = small();
            let mut quality = Vec::new();
            let outcome = (0..2).try_for_each(|_| device.epoch(&[segment], &updates[..60], &mut quality));
            assert!(matches!(outcome, Err(Error::Failed { code: 999, .. })), "{outcome:?}");
            let error = device.read(&[1], &mut Vec::new()).unwrap_err();
            assert!(matches!(error, Error::Failed { code: 999, .. }), "{error}");
            drop(device);
            let (mut device, segment, updates) = small();
            device.epoch(&[segment], &updates[..60], &mut quality).unwrap();
        });
        // The re-executed test has one such call.
        if done.is_none() {
            return;
        }
    }
}
