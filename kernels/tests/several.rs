//! Several devices beside the CPU: the bits are those of the CPU alone, whichever device holds what, and whatever becomes of one of them.
#![allow(clippy::unwrap_used)] // Helpers of tests are tests too.

#[path = "host/build.rs"]
mod build;
mod naive;
mod numbers;
#[path = "host/stand_in.rs"]
mod stand_in;
mod twins;

use engram_kernels::gpu::cuda::Cuda;
use engram_kernels::partitioner::Strategy;
use engram_kernels::recall::{Alike, Recall};
use engram_kernels::{
    Cpu, Device, Error, Given, Gpu, GroupUpdate, Held, Info, Logical, Mirror, Mirrored, Order, Scope, Segment, Slot,
    Standing, Tile, TileId, Tiles, Update,
};
use engram_memory::{Digest, Group, Histogram, MemoryId, QualityVector};
use proptest::prelude::*;
use proptest::strategy::Strategy as _;
use stand_in::{PATIENT, on_stand_in};
use twins::Twins;

/// What becomes of a device in a call: the how manyth.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Fate {
    Lives,
    /// It has no memory for that call, once.
    Full(u32),
    /// It fails then and ever after.
    Fails(u32),
}

/// A device that holds so many tiles, and meets its fate.
struct Fickle {
    device: Logical,
    fate: Fate,
    calls: u32,
}

impl Fickle {
    fn given(number: usize, tiles: u32, fate: Fate) -> Given<Self> {
        let device = Logical::new(format!("logical {number}"), 1, tiles);
        Given::unmeasured(Self { device, fate, calls: 0 })
    }

    fn call<T>(&mut self, call: impl FnOnce(&mut Logical) -> Result<T, Error>) -> Result<T, Error> {
        self.calls += 1;
        match self.fate {
            Fate::Full(nth) if nth == self.calls => Err(Error::Full { missing_bytes: 1 }),
            Fate::Fails(nth) if nth <= self.calls => Err(Error::Failed { pass: "test", code: 700 }),
            _ => call(&mut self.device),
        }
    }
}

impl Mirror for Fickle {
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

impl Device for Fickle {
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
        unreachable!("memories are changed on the host");
    }

    fn read(&mut self, _: &[Slot], _: &mut Vec<(u32, Group)>) -> Result<(), Error> {
        unreachable!("memories are read on the host");
    }

    fn update(&mut self, _: &[Segment], _: &[Update]) -> Result<(), Error> {
        unreachable!("memories are changed on the host");
    }

    fn update_groups(&mut self, _: &[Segment], _: &[GroupUpdate], _: &mut Vec<u64>) -> Result<(), Error> {
        unreachable!("memories are changed on the host");
    }

    fn epoch(&mut self, segments: &[Segment], updates: &[Update], out: &mut Vec<QualityVector>) -> Result<(), Error> {
        assert!(updates.is_empty() && segments.iter().all(|segment| segment.fold == 0));
        self.call(|device| device.epoch(segments, updates, out))
    }

    fn histogram(&mut self, segments: &[Segment], bits: u32) -> Result<Histogram, Error> {
        self.call(|device| device.histogram(segments, bits))
    }

    fn rank(
        &mut self,
        segments: &[Segment],
        scope: Scope,
        order: Order,
        limit: Option<usize>,
        ids: &Tiles<MemoryId>,
        out: &mut Vec<(Slot, u32)>,
    ) -> Result<(), Error> {
        self.call(|device| device.rank(segments, scope, order, limit, ids, out))
    }

    fn recall(
        &mut self,
        segments: &[Segment],
        asked: &Recall<'_>,
        ids: &Tiles<MemoryId>,
        out: &mut Vec<Alike>,
    ) -> Result<(), Error> {
        self.call(|device| device.recall(segments, asked, ids, out))
    }

    fn digest(
        &mut self,
        segments: &[Segment],
        ids: &Tiles<MemoryId>,
        content: Option<&Tiles<u128>>,
        out: &mut Vec<Digest>,
    ) -> Result<(), Error> {
        self.call(|device| device.digest(segments, ids, content, out))
    }

    fn export(&mut self, _: TileId, _: &mut Vec<u32>, _: &mut Vec<u8>) -> Result<(), Error> {
        unreachable!("memories are read on the host");
    }

    fn bytes(&self) -> u64 {
        self.device.bytes()
    }
}

fn fates() -> impl proptest::strategy::Strategy<Value = Fate> {
    prop_oneof![2 => Just(Fate::Lives), 1 => (1_u32..30).prop_map(Fate::Full), 1 => (1_u32..30).prop_map(Fate::Fails)]
}

/// How a device beside the CPU stands after a history that equals the law at every step.
fn history(seed: u64, tiles: usize, device: Box<dyn Device>) -> Standing {
    let mut twins = Twins::new(seed, tiles, vec![device]);
    for _ in 0..20 {
        twins.step();
    }
    twins.rank();
    twins.compare();
    twins.devices()[0].standing().unwrap().clone()
}

/// Partitions that are said to be somewhere, and their memories.
fn placed(standing: &Standing) -> (u64, u64) {
    let sum = |of: fn(&Held) -> u64| standing.devices.iter().map(of).sum::<u64>();
    (sum(|held| held.partitions), sum(|held| held.memories))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn any_devices_equal_the_law_whatever_becomes_of_them(
        seed: u64,
        tiles in 0_usize..9,
        devices in prop::collection::vec((0_u32..9, fates(), prop_oneof![Just(u64::MAX), 0_u64..2_000_000]), 1..5),
        strategy in prop::sample::select(&Strategy::ALL[..]),
    ) {
        let given = devices.iter().enumerate().map(|(number, &(tiles, fate, free_bytes))| {
            Given { free_bytes, ..Fickle::given(number, tiles, fate) }
        });
        let standing = history(seed, tiles, Box::new(Mirrored::over(Cpu::new(1), given.collect(), Some(0), strategy)));
        for (held, (_, fate, _)) in standing.devices.iter().zip(&devices) {
            let failed = held.given_up.as_ref().is_some_and(|why| why.starts_with("the device failed"));
            prop_assert!(!failed || matches!(fate, Fate::Fails(_)), "{held:?}");
            prop_assert!(held.given_up.is_none() || (held.memories, held.bytes) == (0, 0), "{held:?}");
        }
    }
}

/// Of a history with five segments.
const SEED: u64 = 17;

/// Devices that live, with memory for so many tiles each.
fn living(tiles: &[u32]) -> Box<dyn Device> {
    let given = tiles.iter().enumerate().map(|(number, &tiles)| Fickle::given(number, tiles, Fate::Lives));
    Box::new(Mirrored::over(Cpu::new(1), given.collect(), Some(0), Strategy::Balanced))
}

#[test]
fn what_fits_on_no_device_is_the_hosts_and_the_rest_stays_on_the_devices() {
    let standing = history(SEED, 12, living(&[100, 100]));
    let (partitions, memories) = placed(&standing);
    assert!(standing.devices.iter().all(|held| held.memories > 0 && held.passes > 5), "{standing:?}");
    assert_eq!((standing.host_memories, standing.fallbacks, standing.given_up), (0, 0, None));

    let less = history(SEED, 12, living(&[3, 3]));
    let (kept, held) = placed(&less);
    assert!(0 < held && held < memories && 0 < kept && kept < partitions, "{less:?}");
    assert_eq!(held + less.host_memories, memories);
    // They are not asked for more than they have; what is of one partition of the host alone is no pass of theirs.
    assert_eq!((less.fallbacks, less.given_up), (0, None));
    assert!((6..=standing.passes).contains(&less.passes), "{} of {} passes", less.passes, standing.passes);
}

#[test]
fn a_device_that_fails_leaves_the_others_at_work() {
    let given = [Fate::Lives, Fate::Fails(9), Fate::Lives].into_iter().enumerate();
    let given = given.map(|(number, fate)| Fickle::given(number, 100, fate)).collect();
    let standing = history(SEED, 12, Box::new(Mirrored::over(Cpu::new(1), given, Some(0), Strategy::CapabilityAware)));
    assert_eq!((standing.fallbacks, standing.host_memories), (1, 0));
    let lost: Vec<bool> = standing.devices.iter().map(|held| held.given_up.is_some()).collect();
    assert_eq!(lost, [false, true, false]);
    let why = "logical 1 (logical 1): the device failed in pass 'test' (code 700)";
    assert_eq!(standing.given_up.as_deref(), Some(why));
    assert!(standing.devices.iter().all(|held| (held.given_up.is_none()) == (held.memories > 0)), "{standing:?}");
}

/// A history over all devices of the stand-in.
fn on_devices() -> Standing {
    let devices = engram_kernels::gpu::cuda::devices().unwrap();
    let given = (0..devices).map(|ordinal| {
        let mut driver = Cuda::open(ordinal, PATIENT).unwrap();
        let (name, id) = (driver.name().to_owned(), driver.uuid().unwrap());
        let (free_bytes, _) = driver.memory().unwrap();
        Given { id, free_bytes, ..Given::unmeasured(Gpu::new(driver, name)) }
    });
    let mirrored = Mirrored::over(Cpu::new(1), given.collect(), Some(0), Strategy::LatencyOptimized);
    history(SEED, 7, Box::new(mirrored))
}

#[test]
fn several_gpus_of_a_driver_equal_the_law() {
    on_stand_in("several_gpus_of_a_driver_equal_the_law", &[("CUDA_HOST_DEVICES", "3")], || {
        let standing = on_devices();
        assert_eq!((standing.devices.len(), standing.fallbacks, standing.given_up), (3, 0, None));
        assert!(standing.devices.iter().filter(|held| held.passes > 3).count() > 1, "{:?}", standing.devices);
        let ids: std::collections::BTreeSet<&str> = standing.devices.iter().map(|held| held.id.as_str()).collect();
        assert!(ids.len() == 3 && ids.iter().all(|id| id.starts_with("GPU-") && id.len() == 40), "{ids:?}");
    });
}

#[test]
fn of_several_gpus_those_that_fail_or_are_full_are_left_and_the_others_go_on() {
    let test = "of_several_gpus_those_that_fail_or_are_full_are_left_and_the_others_go_on";
    let cases = [
        // In a launch, in a copy, for good; all of the second device. And one that has no memory at all.
        ("CUDA_HOST_FAIL", "cuLaunchKernel:12:700:1"),
        ("CUDA_HOST_FAIL", "cuMemcpyHtoDAsync:9:719:1"),
        ("CUDA_HOST_FAIL", "cuLaunchKernel:3:214:1"),
        ("CUDA_HOST_MEMORY_MIB", "4096,0,4096"),
    ];
    for case in cases {
        let said = on_stand_in(test, &[("CUDA_HOST_DEVICES", "3"), case], || {
            let standing = on_devices();
            let lost: Vec<bool> = standing.devices.iter().map(|held| held.given_up.is_some()).collect();
            let is_full = std::env::var_os("CUDA_HOST_FAIL").is_none();
            // Of a device without memory that is known before anything is given to it.
            assert_eq!(lost, [false, !is_full, false], "{standing:?}");
            assert_eq!((standing.devices[1].memories, standing.host_memories), (0, 0));
            assert_eq!(standing.fallbacks, u64::from(!is_full));
            assert!(standing.devices[0].memories > 0 && standing.devices[0].passes > 5);
        });
        // The process on the stand-in has one plan.
        if said.is_none() {
            break;
        }
    }
}
