//! A store over one or several GPUs: replies, ranks, recalls and digests equal those of a store over the CPU, also when a GPU fails.
//! The GPU is an emulated CUDA driver below the production launch code.
#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

#[path = "../../../kernels/tests/host/build.rs"]
mod build;
#[path = "../../../kernels/tests/host/emulated_driver.rs"]
mod emulated_driver;
mod finite;

use emulated_driver::{LONG_DEADLINE, run_with_emulated_driver};
use engram_kernels::gpu::cuda::Cuda;
use engram_kernels::partitioner::Strategy;
use engram_kernels::recall::Query;
use engram_kernels::{AvailableDevice, Cpu, Device, Gpu, LogicalDevice, MirrorStatus, MirroredDevice};
use engram_memory::{
    Digest, FeatureShape, FeatureType, Group, Histogram, Law, MemoryId, PartitionId, QualityVector, Record, Settings,
    Shape, Weight,
};
use engram_store::{Partitions, RankedMemory};
use engram_testing::commands::World;
use finite::finite;
use proptest::strategy::{Strategy as _, ValueTree as _};
use proptest::test_runner::TestRunner;

const PARTITIONS: u32 = 3;
const FEATURES: FeatureShape = FeatureShape { dimension: 5, dtype: FeatureType::F16 };
/// Records per batch.
const BATCH: usize = 6;

/// Returns random settings, and records of all partitions in turn: upserts with features and payloads, removals, reinforcement by id
/// and by group, decays that fold, epochs, evictions, digest markers, repeats.
fn history() -> (Settings, Vec<(PartitionId, Record)>) {
    let mut runner = TestRunner::deterministic();
    let worlds: Vec<World> =
        (0..PARTITIONS).map(|p| World::of_partition(FEATURES, 400, 150, PartitionId(p), PARTITIONS)).collect();
    let settings = worlds[0].arb_settings().new_tree(&mut runner).unwrap().current();
    let logs: Vec<Vec<Record>> =
        worlds.iter().map(|world| world.arb_records(40..41).new_tree(&mut runner).unwrap().current()).collect();
    let merged = (0..40).flat_map(|at| (0..PARTITIONS).map(move |p| (PartitionId(p), at)));
    let records = merged.map(|(partition, at)| (partition, finite(logs[partition.0 as usize][at].clone()))).collect();
    (settings, records)
}

type Ranks = [Vec<RankedMemory>; 3];
/// Ids, weights and the bits of scores.
type Recalls = [Vec<(MemoryId, Weight, u32)>; 2];
type Sums = (Digest, QualityVector, Histogram);

/// Results of all passes over a store.
fn observe(store: &mut Partitions) -> (Ranks, Recalls, Sums) {
    let query = Query::new(&[0x3c00, 0xc000, 0x3555, 0x0001, 0xb800]);
    let recall = |store: &mut Partitions, limit, group| -> Vec<_> {
        let recalled = store.recall(&query, limit, group).unwrap();
        recalled.into_iter().map(|one| (one.id, one.weight, one.score.to_bits())).collect()
    };
    let ranked = [(None, None), (Some(9), None), (Some(50), Some(Group(7)))];
    let ranked = ranked.map(|(limit, group)| store.rank(limit, group).unwrap());
    let recalled = [recall(store, 7, None), recall(store, usize::MAX, Some(Group(1)))];
    (ranked, recalled, (store.digest().unwrap(), store.quality().unwrap(), store.histogram(6).unwrap()))
}

/// Returns all emulated devices.
fn gpus() -> Box<dyn Device> {
    let devices = engram_kernels::gpu::cuda::devices().unwrap();
    let opened = (0..devices).map(|ordinal| {
        let driver = Cuda::open(ordinal, LONG_DEADLINE).unwrap();
        let name = driver.name().to_owned();
        AvailableDevice::unmeasured(Gpu::new(driver, name))
    });
    Box::new(MirroredDevice::over(Cpu::new(1), opened.collect(), Some(0), Strategy::LatencyOptimized))
}

/// Replays the history on the devices and on the CPU, compares them after every batch, and returns the final status of the devices.
fn play(devices: Box<dyn Device>) -> MirrorStatus {
    let shape = Shape { partitions: PARTITIONS, law: Law::Linear, features: FEATURES };
    let mut over_gpu = Partitions::new(devices, shape);
    let mut over_cpu = Partitions::new(Box::new(Cpu::new(2)), shape);
    let (settings, records) = history();
    for partition in (0..PARTITIONS).map(PartitionId) {
        over_gpu.open(partition, settings);
        over_cpu.open(partition, settings);
    }
    for (batch, records) in records.chunks(BATCH).enumerate() {
        let replies = over_gpu.apply_batch(records).unwrap();
        assert!(replies == over_cpu.apply_batch(records).unwrap(), "replies differ in batch {batch}");
        // A backup is excluded.
        for store in [&mut over_gpu, &mut over_cpu] {
            store.set_hidden(PartitionId(1), batch % 4 == 3);
        }
        let ((ranked, recalled, sums), expected) = (observe(&mut over_gpu), observe(&mut over_cpu));
        assert!(ranked == expected.0, "rankings differ after batch {batch}");
        assert!(recalled == expected.1, "recalls differ after batch {batch}");
        assert!(sums == expected.2, "digest, quality or histogram differ after batch {batch}");
    }
    for partition in (0..PARTITIONS).map(PartitionId) {
        assert_eq!(over_gpu.replica_digest(partition).unwrap(), over_cpu.replica_digest(partition).unwrap());
    }
    assert!(over_gpu.memories() > 300, "{} memories", over_gpu.memories());
    over_gpu.gpu().unwrap().clone()
}

#[test]
fn a_store_over_a_gpu_equals_one_over_the_cpu() {
    run_with_emulated_driver("a_store_over_a_gpu_equals_one_over_the_cpu", &[], || {
        let status = play(gpus());
        assert_eq!((status.fallbacks, status.given_up), (0, None));
        // At least six reads per batch.
        assert!(status.passes >= 6 * 20, "{} passes", status.passes);
    });
}

#[test]
fn a_store_whose_gpu_fails_continues_with_the_same_bits() {
    let test = "a_store_whose_gpu_fails_continues_with_the_same_bits";
    // An illegal access, a broken device, a failed copy; and, permanently, no memory for a pass.
    for plan in
        ["cuLaunchKernel:300:700", "cuLaunchKernel:1100:214", "cuMemcpyDtoHAsync:400:719", "cuMemAllocAsync:900:2"]
    {
        let output = run_with_emulated_driver(test, &[("CUDA_HOST_FAIL", plan)], || {
            let status = play(gpus());
            let full = std::env::var("CUDA_HOST_FAIL").unwrap().ends_with(":2");
            assert_eq!((status.fallbacks, status.given_up.is_none()), (1, full), "{status:?}");
            assert!(status.passes > 10, "the failure came in the middle: {status:?}");
        });
        // The re-executed process has one fault plan.
        if output.is_none() {
            break;
        }
    }
}

#[test]
fn a_store_over_several_gpus_continues_with_the_remaining_ones() {
    let test = "a_store_over_several_gpus_continues_with_the_remaining_ones";
    // The second of three fails after some passes.
    let settings = [("CUDA_HOST_DEVICES", "3"), ("CUDA_HOST_FAIL", "cuLaunchKernel:150:700:1")];
    run_with_emulated_driver(test, &settings, || {
        let status = play(gpus());
        let lost: Vec<bool> = status.devices.iter().map(|held| held.given_up.is_some()).collect();
        assert_eq!(lost, [false, true, false], "{status:?}");
        assert_eq!((status.fallbacks, status.host_memories), (1, 0));
        assert!(status.devices.iter().all(|held| held.passes > 10), "{status:?}");
    });
}

#[test]
fn a_store_larger_than_its_devices_is_partly_on_the_host() {
    // Memory for one partition of three: a tile of columns, vectors, and temporary data of passes.
    let free_bytes = 4_096 * (13 + 32 + 2 * 5 + 4);
    let logical_device = |number| {
        let device = LogicalDevice::new(format!("logical {number}"), 1, u32::MAX);
        AvailableDevice { free_bytes, ..AvailableDevice::unmeasured(device) }
    };
    let one = MirroredDevice::over(Cpu::new(1), vec![logical_device(0)], Some(0), Strategy::MemoryAware);
    let status = play(Box::new(one));
    assert_eq!((status.devices[0].partitions, &status.given_up), (1, &None), "{status:?}");
    assert!(status.devices[0].passes > 20 && status.host_memories > status.devices[0].memories, "{status:?}");
    // Memory for each of them on three devices.
    let three = MirroredDevice::over(Cpu::new(1), (0..3).map(logical_device).collect(), Some(0), Strategy::Balanced);
    let status = play(Box::new(three));
    assert_eq!((status.host_memories, status.fallbacks), (0, 0));
    assert!(status.devices.iter().all(|held| held.partitions == 1), "{status:?}");
}
