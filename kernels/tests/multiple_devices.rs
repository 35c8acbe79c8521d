//! Several devices that mirror the CPU: results equal the CPU's for any assignment, and after any device has failed.
#![allow(clippy::unwrap_used)] // Test helpers.

#[path = "host/build.rs"]
mod build;
mod device_comparison;
#[path = "host/emulated_driver.rs"]
mod emulated_driver;
mod random_numbers;
mod reference_device;

use device_comparison::DeviceComparison;
use emulated_driver::{LONG_DEADLINE, run_with_emulated_driver};
use engram_kernels::gpu::cuda::Cuda;
use engram_kernels::partitioner::Strategy;
use engram_kernels::recall::{RecallMatch, RecallRequest};
use engram_kernels::{
    AvailableDevice, Cpu, Device, DeviceStatus, DigestRequest, Error, Gpu, GroupUpdate, Info, LogicalDevice, Mirror,
    MirrorStatus, MirroredDevice, RankRequest, Segment, Slot, Tile, TileId, Update,
};
use engram_memory::{Digest, Group, Histogram, QualityVector};
use proptest::prelude::*;
use proptest::strategy::Strategy as _;

/// Fault of a device at its nth call.
#[derive(Debug, Clone, Copy, PartialEq)]
enum DeviceFault {
    Lives,
    /// Out of memory in that call, once.
    Full(u32),
    /// Permanent failure from that call on.
    Fails(u32),
}

/// A device with a limited number of tiles, and a fault.
struct FaultyDevice {
    device: LogicalDevice,
    fault: DeviceFault,
    calls: u32,
}

impl FaultyDevice {
    fn available(number: usize, tiles: u32, fault: DeviceFault) -> AvailableDevice<Self> {
        let device = LogicalDevice::new(format!("logical {number}"), 1, tiles);
        AvailableDevice::unmeasured(Self { device, fault, calls: 0 })
    }

    fn call<T>(&mut self, call: impl FnOnce(&mut LogicalDevice) -> Result<T, Error>) -> Result<T, Error> {
        self.calls += 1;
        match self.fault {
            DeviceFault::Full(nth) if nth == self.calls => Err(Error::Full { missing_bytes: 1 }),
            DeviceFault::Fails(nth) if nth <= self.calls => Err(Error::Failed { pass: "test", code: 700 }),
            _ => call(&mut self.device),
        }
    }
}

impl Mirror for FaultyDevice {
    fn tiles(&self) -> usize {
        self.device.tiles()
    }

    fn hold(&mut self, tile: TileId, entry: Tile, origin: TileId) {
        self.device.hold(tile, entry, origin);
    }

    fn touch(&mut self, tile: TileId) {
        self.device.touch(tile);
    }

    fn refresh(&mut self, slots: &[Slot], rows: &[(u32, Group)]) -> Result<(), Error> {
        self.call(|device| device.refresh(slots, rows))
    }

    fn replace(&mut self, tile: TileId, potentials: &[u32], groups: &[u8]) -> Result<(), Error> {
        self.call(|device| device.replace(tile, potentials, groups))
    }

    fn clear(&mut self) {
        self.device.clear();
    }
}

impl Device for FaultyDevice {
    fn info(&self) -> &Info {
        self.device.info()
    }

    fn reserve(&mut self, tiles: u32) -> Result<(), Error> {
        self.call(|device| device.reserve(tiles))
    }

    fn map_tile(&mut self, tile: TileId, entry: Tile) {
        self.device.map_tile(tile, entry);
    }

    fn write(&mut self, _: &[(Slot, u32, Group)]) -> Result<(), Error> {
        unreachable!("the host changes memories");
    }

    fn read(&mut self, _: &[Slot], _: &mut Vec<(u32, Group)>) -> Result<(), Error> {
        unreachable!("the host reads memories");
    }

    fn update(&mut self, _: &[Segment], _: &[Update]) -> Result<(), Error> {
        unreachable!("the host changes memories");
    }

    fn update_groups(&mut self, _: &[Segment], _: &[GroupUpdate], _: &mut Vec<u64>) -> Result<(), Error> {
        unreachable!("the host changes memories");
    }

    fn epoch(&mut self, segments: &[Segment], updates: &[Update], out: &mut Vec<QualityVector>) -> Result<(), Error> {
        assert!(updates.is_empty() && segments.iter().all(|segment| segment.fold == 0));
        self.call(|device| device.epoch(segments, updates, out))
    }

    fn histogram(&mut self, segments: &[Segment], bits: u32) -> Result<Histogram, Error> {
        self.call(|device| device.histogram(segments, bits))
    }

    fn rank(&mut self, request: &RankRequest<'_>, out: &mut Vec<(Slot, u32)>) -> Result<(), Error> {
        self.call(|device| device.rank(request, out))
    }

    fn recall(&mut self, request: &RecallRequest<'_>, out: &mut Vec<RecallMatch>) -> Result<(), Error> {
        self.call(|device| device.recall(request, out))
    }

    fn digest(&mut self, request: &DigestRequest<'_>, out: &mut Vec<Digest>) -> Result<(), Error> {
        self.call(|device| device.digest(request, out))
    }

    fn export(&mut self, _: TileId, _: &mut Vec<u32>, _: &mut Vec<u8>) -> Result<(), Error> {
        unreachable!("the host reads memories");
    }

    fn bytes(&self) -> u64 {
        self.device.bytes()
    }
}

fn device_faults() -> impl proptest::strategy::Strategy<Value = DeviceFault> {
    prop_oneof![2 => Just(DeviceFault::Lives), 1 => (1_u32..30).prop_map(DeviceFault::Full), 1 => (1_u32..30).prop_map(DeviceFault::Fails)]
}

/// Returns the status of a mirrored device after a history that equals the reference at every step.
fn history(seed: u64, tiles: usize, device: Box<dyn Device>) -> MirrorStatus {
    let mut comparison = DeviceComparison::new(seed, tiles, vec![device]);
    for _ in 0..20 {
        comparison.step();
    }
    comparison.rank();
    comparison.compare();
    comparison.devices()[0].mirror_status().unwrap().clone()
}

/// Returns the reported partitions and memories.
fn placed(status: &MirrorStatus) -> (u64, u64) {
    let sum = |of: fn(&DeviceStatus) -> u64| status.devices.iter().map(of).sum::<u64>();
    (sum(|held| held.partitions), sum(|held| held.memories))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn devices_equal_the_reference_under_any_fault(
        seed: u64,
        tiles in 0_usize..9,
        devices in prop::collection::vec((0_u32..9, device_faults(), prop_oneof![Just(u64::MAX), 0_u64..2_000_000]), 1..5),
        strategy in prop::sample::select(&Strategy::ALL[..]),
    ) {
        let available = devices.iter().enumerate().map(|(number, &(tiles, fault, free_bytes))| {
            AvailableDevice { free_bytes, ..FaultyDevice::available(number, tiles, fault) }
        });
        let status = history(seed, tiles, Box::new(MirroredDevice::over(Cpu::new(1), available.collect(), Some(0), strategy)));
        for (held, (_, fault, _)) in status.devices.iter().zip(&devices) {
            let failed = held.given_up.as_ref().is_some_and(|why| why.starts_with("device failed"));
            prop_assert!(!failed || matches!(fault, DeviceFault::Fails(_)), "{held:?}");
            prop_assert!(held.given_up.is_none() || (held.memories, held.bytes) == (0, 0), "{held:?}");
        }
    }
}

/// Seed of a history with five segments.
const SEED: u64 = 17;

/// Returns healthy devices with memory for these tiles.
fn living(tiles: &[u32]) -> Box<dyn Device> {
    let available =
        tiles.iter().enumerate().map(|(number, &tiles)| FaultyDevice::available(number, tiles, DeviceFault::Lives));
    Box::new(MirroredDevice::over(Cpu::new(1), available.collect(), Some(0), Strategy::Balanced))
}

#[test]
fn partitions_that_fit_on_no_device_stay_on_the_host() {
    let status = history(SEED, 12, living(&[100, 100]));
    let (partitions, memories) = placed(&status);
    assert!(status.devices.iter().all(|held| held.memories > 0 && held.passes > 5), "{status:?}");
    assert_eq!((status.host_memories, status.fallbacks, status.given_up), (0, 0, None));

    let less = history(SEED, 12, living(&[3, 3]));
    let (kept, held) = placed(&less);
    assert!(0 < held && held < memories && 0 < kept && kept < partitions, "{less:?}");
    assert_eq!(held + less.host_memories, memories);
    // Devices stay within their memory; a pass over a partition of the host does not involve them.
    assert_eq!((less.fallbacks, less.given_up), (0, None));
    assert!((6..=status.passes).contains(&less.passes), "{} of {} passes", less.passes, status.passes);
}

#[test]
fn failed_device_leaves_the_others_in_use() {
    let available = [DeviceFault::Lives, DeviceFault::Fails(9), DeviceFault::Lives].into_iter().enumerate();
    let available = available.map(|(number, fault)| FaultyDevice::available(number, 100, fault)).collect();
    let status =
        history(SEED, 12, Box::new(MirroredDevice::over(Cpu::new(1), available, Some(0), Strategy::CapabilityAware)));
    assert_eq!((status.fallbacks, status.host_memories), (1, 0));
    let lost: Vec<bool> = status.devices.iter().map(|held| held.given_up.is_some()).collect();
    assert_eq!(lost, [false, true, false]);
    let why = "logical 1 (logical 1): device failed in pass 'test' (code 700)";
    assert_eq!(status.given_up.as_deref(), Some(why));
    assert!(status.devices.iter().all(|held| (held.given_up.is_none()) == (held.memories > 0)), "{status:?}");
}

/// Runs a history over all emulated devices.
fn on_devices() -> MirrorStatus {
    let devices = engram_kernels::gpu::cuda::devices().unwrap();
    let available = (0..devices).map(|ordinal| {
        let mut driver = Cuda::open(ordinal, LONG_DEADLINE).unwrap();
        let (name, id) = (driver.name().to_owned(), driver.uuid().unwrap());
        let (free_bytes, _) = driver.memory().unwrap();
        AvailableDevice { id, free_bytes, ..AvailableDevice::unmeasured(Gpu::new(driver, name)) }
    });
    let mirrored = MirroredDevice::over(Cpu::new(1), available.collect(), Some(0), Strategy::LatencyOptimized);
    history(SEED, 7, Box::new(mirrored))
}

#[test]
fn several_gpus_of_a_driver_equal_the_reference() {
    run_with_emulated_driver("several_gpus_of_a_driver_equal_the_reference", &[("CUDA_HOST_DEVICES", "3")], || {
        let status = on_devices();
        assert_eq!((status.devices.len(), status.fallbacks, status.given_up), (3, 0, None));
        assert!(status.devices.iter().filter(|held| held.passes > 3).count() > 1, "{:?}", status.devices);
        let ids: std::collections::BTreeSet<&str> = status.devices.iter().map(|held| held.id.as_str()).collect();
        assert!(ids.len() == 3 && ids.iter().all(|id| id.starts_with("GPU-") && id.len() == 40), "{ids:?}");
    });
}

#[test]
fn failed_or_full_gpus_are_given_up_and_the_others_continue() {
    let test = "failed_or_full_gpus_are_given_up_and_the_others_continue";
    let cases = [
        // In a launch, in a copy, permanently, always on the second device; and a device without memory.
        ("CUDA_HOST_FAIL", "cuLaunchKernel:12:700:1"),
        ("CUDA_HOST_FAIL", "cuMemcpyHtoDAsync:9:719:1"),
        ("CUDA_HOST_FAIL", "cuLaunchKernel:3:214:1"),
        ("CUDA_HOST_MEMORY_MIB", "4096,0,4096"),
    ];
    for case in cases {
        let output = run_with_emulated_driver(test, &[("CUDA_HOST_DEVICES", "3"), case], || {
            let status = on_devices();
            let lost: Vec<bool> = status.devices.iter().map(|held| held.given_up.is_some()).collect();
            let is_full = std::env::var_os("CUDA_HOST_FAIL").is_none();
            // A device without memory is excluded before the first transfer.
            assert_eq!(lost, [false, !is_full, false], "{status:?}");
            assert_eq!((status.devices[1].memories, status.host_memories), (0, 0));
            assert_eq!(status.fallbacks, u64::from(!is_full));
            assert!(status.devices[0].memories > 0 && status.devices[0].passes > 5);
        });
        // The re-executed process has one plan.
        if output.is_none() {
            break;
        }
    }
}
