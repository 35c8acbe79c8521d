//! The launch code of production on a stand-in for libcuda: the passes, and all that a driver may refuse or break.
//!
//! Every test starts itself once more with the stand-in (`host/stand_in.rs`).
#![allow(clippy::unwrap_used)] // Helpers of tests are tests too.

#[path = "host/build.rs"]
mod build;
mod naive;
mod numbers;
#[path = "host/stand_in.rs"]
mod stand_in;
mod story;

use engram_kernels::gpu::Driver as _;
use engram_kernels::gpu::cuda::{Cuda, DEADLINE, OpenError, devices};
use engram_kernels::profiler::{Kind, ProfiledDriver, Recorder};
use engram_kernels::{Cpu, Device, Error, Gpu, Mirrored, Segment, Tile, Update};
use engram_memory::{DecayClock, Group, ONE};
use stand_in::{PATIENT, on_stand_in};
use std::time::{Duration, Instant};
use story::{PARTS, Story};

const ILLEGAL_ADDRESS: i32 = 700;
const UNCORRECTABLE: i32 = 214;

/// A device with one full tile of weights one half, and an update of each memory.
fn small() -> (Gpu<Cuda>, Segment, Vec<Update>) {
    let mut device = Gpu::new(Cuda::open(0, PATIENT).unwrap(), String::new());
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
fn passes_on_a_driver_equal_the_law() {
    on_stand_in("passes_on_a_driver_equal_the_law", &[], || {
        assert_eq!(devices().unwrap(), 1);
        let driver = Cuda::open(0, PATIENT).unwrap();
        assert_eq!(driver.name(), "stand-in 0");
        let mut story = Story::new(driver, 5, &[4_096, 4_096, 3_000, 700], false);
        PARTS.into_iter().chain(PARTS).for_each(|part| story.tell(part));
    });
}

#[test]
fn a_machine_without_a_driver_has_no_device() {
    // Where there is a driver it is not asked for a device beyond its own.
    match Cuda::open(64, DEADLINE) {
        Err(OpenError::NoDriver) => assert_eq!(devices().unwrap(), 0),
        Err(OpenError::NoDevice { .. } | OpenError::OldDriver { .. } | OpenError::Failed { .. }) => {}
        other => panic!("{:?}", other.err()),
    }
}

#[test]
fn a_driver_without_devices_has_none() {
    on_stand_in("a_driver_without_devices_has_none", &[("CUDA_HOST_DEVICES", "0")], || {
        assert_eq!(devices().unwrap(), 0);
        let error = Cuda::open(0, DEADLINE).err().unwrap();
        assert_eq!(error.to_string(), "there is no device 0: the driver has 0");
    });
}

#[test]
fn a_device_beyond_the_last_is_refused() {
    on_stand_in("a_device_beyond_the_last_is_refused", &[("CUDA_HOST_DEVICES", "3")], || {
        assert!(Cuda::open(2, DEADLINE).is_ok());
        assert_eq!(Cuda::open(3, DEADLINE).err().unwrap().to_string(), "there is no device 3: the driver has 3");
    });
}

#[test]
fn a_driver_that_is_too_old_is_refused() {
    on_stand_in("a_driver_that_is_too_old_is_refused", &[("CUDA_HOST_DRIVER", "12080")], || {
        let error = Cuda::open(0, DEADLINE).err().unwrap().to_string();
        assert_eq!(error, "the driver is too old: it is of CUDA 12.8, and 13.0 (driver 580) or newer is needed");
    });
}

#[test]
fn a_device_older_than_all_code_is_refused() {
    on_stand_in("a_device_older_than_all_code_is_refused", &[("CUDA_HOST_CAPABILITY", "75")], || {
        let error = Cuda::open(0, DEADLINE).err().unwrap().to_string();
        assert_eq!(error, "fatbin 'digest' is nothing for a device of compute capability 7.5 (code 209)");
    });
}

#[test]
fn a_device_newer_than_all_code_takes_its_ptx() {
    on_stand_in("a_device_newer_than_all_code_takes_its_ptx", &[("CUDA_HOST_CAPABILITY", "110")], || {
        let (mut device, segment, updates) = small();
        device.update(&[segment], &updates).unwrap();
        assert!(potentials(&mut device).into_iter().eq((0..4_096).map(|slot| 7 + ONE / 2 + slot)));
    });
}

#[test]
fn a_full_device_is_told_and_nothing_has_changed() {
    // The arena is 13 bytes a slot; 64 MiB hold no more than 1,260 tiles, and half of that while columns grow.
    on_stand_in("a_full_device_is_told_and_nothing_has_changed", &[("CUDA_HOST_MEMORY_MIB", "64")], || {
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
fn memory_that_ends_within_a_batch_leaves_the_state_as_it_was() {
    let test = "memory_that_ends_within_a_batch_leaves_the_state_as_it_was";
    // Each allocation of the batches fails once, until there is no such one; the first are those of the arena, of its rows, and of more tiles.
    const FIRST: u32 = 12;
    let mut nth = FIRST;
    while let Some(said) =
        on_stand_in(test, &[("CUDA_HOST_FAIL", &format!("cuMemAllocAsync:{nth}:2"))], refused_batches)
    {
        if said.contains("refused 0 batches") {
            break;
        }
        nth += 1;
    }
    assert!(nth == FIRST || nth > FIRST + 22, "an update and an epoch on both paths need more than {nth} allocations");
}

/// An update that folds and an epoch that finds a bucket too small and takes the sorted path; what is refused for want of memory is tried again.
fn refused_batches() {
    let (mut device, _, updates) = small();
    device.reserve(5).unwrap();
    let hot: Vec<_> = (0..300).map(|_| Update { slot: 9, delta: 1 }).collect();
    let update = Segment { fold: 7, ..Segment::default() };
    let (mut expected, mut refused) = (vec![7 + ONE / 2; 4_096], 0);
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
            refused += 1;
            assert!(potentials(&mut device) == expected, "a refused batch changed something");
        }
        expected = after;
        assert!(potentials(&mut device) == expected);
    };
    call(update, None, (0..4_096).map(|slot| ONE / 2 + slot).collect());
    let after = |slot| ONE / 2 + slot + if slot == 9 { 300 } else { 0 };
    call(Segment::default(), Some(&hot), (0..4_096).map(after).collect());
    println!("refused {refused} batches");
}

#[test]
fn a_kernel_that_fails_ends_the_device_and_a_new_one_can_be_had() {
    let test = "a_kernel_that_fails_ends_the_device_and_a_new_one_can_be_had";
    on_stand_in(test, &[("CUDA_HOST_FAIL", "cuLaunchKernel:3:700")], || {
        let (mut device, segment, updates) = small();
        let is_lost = |error: Error| matches!(error, Error::Failed { code: ILLEGAL_ADDRESS, .. });
        assert!(is_lost(device.update(&[segment], &updates).unwrap_err()));
        // Not only the call that saw it.
        assert!(is_lost(device.epoch(&[segment], &[], &mut Vec::new()).unwrap_err()));
        assert!(is_lost(device.read(&[1], &mut Vec::new()).unwrap_err()));
        drop(device);
        let (mut device, segment, updates) = small();
        device.update(&[segment], &updates).unwrap();
    });
}

#[test]
fn a_device_that_broke_for_good_is_refused_when_opened_again() {
    let test = "a_device_that_broke_for_good_is_refused_when_opened_again";
    on_stand_in(test, &[("CUDA_HOST_FAIL", "cuLaunchKernel:2:214")], || {
        let (mut device, segment, updates) = small();
        let error = device.update(&[segment], &updates).unwrap_err();
        assert!(matches!(error, Error::Failed { code: UNCORRECTABLE, .. }), "{error}");
        drop(device);
        let error = Cuda::open(0, DEADLINE).err().unwrap().to_string();
        assert_eq!(error, "the driver failed to make a context (code 214)");
    });
}

#[test]
fn a_device_that_does_not_answer_is_given_up() {
    on_stand_in("a_device_that_does_not_answer_is_given_up", &[], || {
        let mut device = Gpu::new(Cuda::open(0, Duration::ZERO).unwrap(), String::new());
        device.reserve(1).unwrap();
        device.map_tile(0, Tile { segment: 0, count: 1 });
        let error = device.write(&[(0, 1, Group(0))]).unwrap_err().to_string();
        assert_eq!(error, "the device failed in pass 'wait' (code 702)");
        let error = device.read(&[0], &mut Vec::new()).unwrap_err().to_string();
        assert_eq!(error, "the device failed in pass 'allocate' (code 702)");
    });
}

/// Bytes of no pattern.
fn noise(bytes: usize, seed: u64) -> Vec<u8> {
    (0..bytes as u64).map(|at| engram_memory::mix64(at ^ seed << 40) as u8).collect()
}

#[test]
fn bytes_go_and_come_back_through_pieces_that_are_used_again() {
    on_stand_in("bytes_go_and_come_back_through_pieces_that_are_used_again", &[], || {
        // More than all pinned memory twice over, and pieces that are filled in odd parts.
        let bytes = noise((9 << 20) + 4_321, 1);
        let mut driver = Cuda::open(0, PATIENT).unwrap();
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
        // What was taken over and waited for makes room for what comes next.
        for turn in 2..40 {
            let (at, own) = (turn * 1_000, noise(300_000, turn as u64));
            driver.upload(&buffer, at, &own).unwrap();
            assert!(read(&mut driver, at, own.len(), &buffer) == own, "turn {turn}");
        }
    });
}

#[test]
fn the_next_piece_is_filled_before_the_last_is_copied() {
    let test = "the_next_piece_is_filled_before_the_last_is_copied";
    on_stand_in(test, &[("CUDA_HOST_FAIL", "cuEventQuery:1:999")], || {
        // Whoever asks for an event is told; four pieces are filled before anybody has to.
        let mut driver = Cuda::open(0, PATIENT).unwrap();
        let buffer = driver.allocate(8 << 20).unwrap();
        driver.upload(&buffer, 0, &noise(4 << 20, 1)).unwrap();
        let error = driver.upload(&buffer, 4 << 20, &[7]).unwrap_err();
        assert!(matches!(error, Error::Failed { pass: "upload", code: 999 }), "{error}");
    });
}

#[test]
fn a_device_times_what_it_does_by_its_own_clock() {
    on_stand_in("a_device_times_what_it_does_by_its_own_clock", &[], || {
        let (mut device, segment, updates) = small();
        device.driver_mut().time();
        device.update(&[segment], &updates[..1]).unwrap();
        let timed = device.driver_mut().timings().unwrap();
        let names: Vec<&str> = timed.iter().map(|it| it.name).collect();
        assert!(names.contains(&"upload") && names.contains(&"radix_pass"), "{names:?}");
        assert_eq!(names.last(), Some(&"apply_updates"));
        assert!(timed.iter().all(|it| 0.0 <= it.begin_ms && it.begin_ms <= it.end_ms), "{timed:?}");
        assert!(timed.is_sorted_by_key(|it| it.begin_ms));
        // Once is enough.
        device.update(&[segment], &updates).unwrap();
        assert_eq!(device.driver_mut().timings().unwrap(), []);
        let (free, all) = device.driver_mut().memory().unwrap();
        assert!(free < all && all == 4_096 << 20, "{free} of {all}");
    });
}

#[test]
fn an_epoch_beside_the_cpu_is_two_launches() {
    on_stand_in("an_epoch_beside_the_cpu_is_two_launches", &[], || {
        let recorder = Recorder::off("gpu".to_owned());
        let driver = ProfiledDriver::new(Cuda::open(0, PATIENT).unwrap(), recorder.clone());
        let mut device = Mirrored::new(Cpu::new(1), Gpu::new(driver, String::new()), Some(0));
        device.reserve(2).unwrap();
        let segments = [Segment { clock: DecayClock::from_units(7).unwrap(), ..Segment::default() }];
        for tile in 0..2 {
            device.map_tile(tile, Tile { segment: 0, count: 4_096 });
            let rows: Vec<_> = (0..4_096).map(|at| (tile * 4_096 + at, 7 + ONE / 2, Group(0))).collect();
            device.write(&rows).unwrap();
        }
        let mut quality = Vec::new();
        device.epoch(&segments, &[], &mut quality).unwrap();
        // What comes again and again: updates, and the quality after them.
        let updates: Vec<_> = (0..100).map(|at| Update { slot: at * 50, delta: 5 }).collect();
        recorder.start(Instant::now(), 1_000);
        device.epoch(&segments, &updates, &mut quality).unwrap();
        let spans = recorder.stop().spans;
        let of = |kind| spans.iter().filter(|span| span.kind == kind).map(|span| span.name).collect::<Vec<_>>();
        // While it is recorded it is asked for in turn, otherwise as one graph from "upload" to "download".
        assert_eq!(of(Kind::Kernel), ["scatter_rows", "fill", "fold_quality"]);
        assert_eq!(of(Kind::Copy), ["upload", "upload", "upload", "upload", "download"]);
    });
}

/// Epochs with other updates, segments and tiles each time: what a graph holds on to must be what stays.
#[test]
fn a_graph_serves_epochs_as_long_as_it_fits_and_is_made_anew_where_it_does_not() {
    // A launch in a graph is asked for when the graph is captured: once for each that is made.
    let test = "a_graph_serves_epochs_as_long_as_it_fits_and_is_made_anew_where_it_does_not";
    on_stand_in(test, &[], || {
        let (mut device, mut host) = (Gpu::new(Cuda::open(0, PATIENT).unwrap(), String::new()), Cpu::new(1));
        let (mut there, mut here) = (Vec::new(), Vec::new());
        let mut tiles = 0;
        let mut seed = 0;
        for (round, (grown, segments, groups, updates)) in [
            (3, 1, 1, 0),
            (3, 1, 1, 100),
            // As many updates, fewer, more than there is room for.
            (3, 1, 1, 100),
            (3, 1, 1, 190),
            (3, 1, 1, 3),
            (3, 1, 1, 150),
            (3, 1, 1, 0),
            // Other shapes, and back.
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
            device.epoch(&segments, &updates, &mut there).unwrap();
            host.epoch(&segments, &updates, &mut here).unwrap();
            assert_eq!(there, here, "round {round}");
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
fn epochs_alike_are_one_call_of_the_driver_each() {
    // The first epoch captures its two kernels, behind the one of the rows; another capture would be noticed by the fourth.
    on_stand_in("epochs_alike_are_one_call_of_the_driver_each", &[("CUDA_HOST_FAIL", "cuLaunchKernel:4:999")], || {
        let (mut device, segment, updates) = small();
        for turn in 0..20 {
            let some = &updates[turn * 50..turn * 50 + 50];
            device.epoch(&[segment], some, &mut Vec::new()).unwrap();
        }
        let error = device.update(&[segment], &updates).unwrap_err();
        assert!(matches!(error, Error::Failed { code: 999, .. }), "{error}");
    });
}

#[test]
fn a_capture_that_fails_ends_the_device_and_takes_its_memory_along() {
    let test = "a_capture_that_fails_ends_the_device_and_takes_its_memory_along";
    for call in [
        "cuStreamBeginCapture:1",
        "cuLaunchKernel:2",
        "cuMemsetD8Async:2",
        "cuStreamEndCapture:1",
        "cuGraphInstantiateWithFlags:1",
        "cuGraphLaunch:1",
        "cuGraphLaunch:2",
    ] {
        let done = on_stand_in(test, &[("CUDA_HOST_FAIL", &format!("{call}:999"))], || {
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
        // In the test that was started there is one such call.
        if done.is_none() {
            return;
        }
    }
}
