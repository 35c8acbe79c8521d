//! A store over a GPU, or over several: what it replies, ranks, recalls and digests is what a store over the CPU does, also when the GPU fails on the way.
//! The GPU is the stand-in for NVIDIA's library, under the launch code of production.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

#[path = "../../../kernels/tests/host/build.rs"]
mod build;
mod finite;
#[path = "../../../kernels/tests/host/stand_in.rs"]
mod stand_in;

use engram_kernels::gpu::cuda::Cuda;
use engram_kernels::partitioner::Strategy;
use engram_kernels::recall::Query;
use engram_kernels::{Cpu, Device, Given, Gpu, Logical, Mirrored, Standing};
use engram_memory::{
    Digest, FeatureShape, FeatureType, Group, Histogram, Law, MemoryId, PartitionId, QualityVector, Record, Settings,
    Shape, Weight,
};
use engram_store::{Partitions, Ranked};
use engram_testing::commands::World;
use finite::finite;
use proptest::strategy::{Strategy as _, ValueTree as _};
use proptest::test_runner::TestRunner;
use stand_in::{PATIENT, on_stand_in};

const PARTITIONS: u32 = 3;
const FEATURES: FeatureShape = FeatureShape { dimension: 5, dtype: FeatureType::F16 };
/// Records applied at once.
const BATCH: usize = 6;

/// Random settings, and records of all partitions in turn: upserts with features and payloads, removals, reinforcement by id and by
/// group, decays that fold, epochs, evictions, digest markers, repeats.
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

type Ranks = [Vec<Ranked>; 3];
/// Ids, weights and the bits of scores.
type Recalls = [Vec<(MemoryId, Weight, u32)>; 2];
type Sums = (Digest, QualityVector, Histogram);

/// Everything that a pass says of a store.
fn told(store: &mut Partitions) -> (Ranks, Recalls, Sums) {
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

/// All devices of the stand-in.
fn gpus() -> Box<dyn Device> {
    let devices = engram_kernels::gpu::cuda::devices().unwrap();
    let given = (0..devices).map(|ordinal| {
        let driver = Cuda::open(ordinal, PATIENT).unwrap();
        let name = driver.name().to_owned();
        Given::unmeasured(Gpu::new(driver, name))
    });
    Box::new(Mirrored::over(Cpu::new(1), given.collect(), Some(0), Strategy::LatencyOptimized))
}

/// Plays the history on the devices and on the CPU, compares them after every batch, and gives how the devices stand at the end.
fn play(devices: Box<dyn Device>) -> Standing {
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
        // A copy of what another worker serves is left out.
        for store in [&mut over_gpu, &mut over_cpu] {
            store.set_hidden(PartitionId(1), batch % 4 == 3);
        }
        let ((ranked, recalled, sums), expected) = (told(&mut over_gpu), told(&mut over_cpu));
        assert!(ranked == expected.0, "rankings differ after batch {batch}");
        assert!(recalled == expected.1, "what is recalled differs after batch {batch}");
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
    on_stand_in("a_store_over_a_gpu_equals_one_over_the_cpu", &[], || {
        let standing = play(gpus());
        assert_eq!((standing.fallbacks, standing.given_up), (0, None));
        // Six reads a batch at least.
        assert!(standing.passes >= 6 * 20, "{} passes", standing.passes);
    });
}

#[test]
fn a_store_whose_gpu_fails_goes_on_with_the_same_bits() {
    let test = "a_store_whose_gpu_fails_goes_on_with_the_same_bits";
    // An illegal access, a broken device, a copy that fails; and, without an end, no memory for a pass.
    for plan in
        ["cuLaunchKernel:300:700", "cuLaunchKernel:1100:214", "cuMemcpyDtoHAsync:400:719", "cuMemAllocAsync:900:2"]
    {
        let said = on_stand_in(test, &[("CUDA_HOST_FAIL", plan)], || {
            let standing = play(gpus());
            let full = std::env::var("CUDA_HOST_FAIL").unwrap().ends_with(":2");
            assert_eq!((standing.fallbacks, standing.given_up.is_none()), (1, full), "{standing:?}");
            assert!(standing.passes > 10, "it failed in the middle: {standing:?}");
        });
        // The process on the stand-in has one plan.
        if said.is_none() {
            break;
        }
    }
}

#[test]
fn a_store_over_several_gpus_goes_on_with_those_that_are_left() {
    let test = "a_store_over_several_gpus_goes_on_with_those_that_are_left";
    // The second of three, after it has done its part for a while.
    let settings = [("CUDA_HOST_DEVICES", "3"), ("CUDA_HOST_FAIL", "cuLaunchKernel:150:700:1")];
    on_stand_in(test, &settings, || {
        let standing = play(gpus());
        let lost: Vec<bool> = standing.devices.iter().map(|held| held.given_up.is_some()).collect();
        assert_eq!(lost, [false, true, false], "{standing:?}");
        assert_eq!((standing.fallbacks, standing.host_memories), (1, 0));
        assert!(standing.devices.iter().all(|held| held.passes > 10), "{standing:?}");
    });
}

#[test]
fn a_store_larger_than_its_devices_is_in_part_the_hosts() {
    // Room for one partition of three: a tile of columns, vectors, and what passes take.
    let free_bytes = 4_096 * (13 + 32 + 2 * 5 + 4);
    let given = |number| {
        let device = Logical::new(format!("logical {number}"), 1, u32::MAX);
        Given { free_bytes, ..Given::unmeasured(device) }
    };
    let one = Mirrored::over(Cpu::new(1), vec![given(0)], Some(0), Strategy::MemoryAware);
    let standing = play(Box::new(one));
    assert_eq!((standing.devices[0].partitions, &standing.given_up), (1, &None), "{standing:?}");
    assert!(standing.devices[0].passes > 20 && standing.host_memories > standing.devices[0].memories, "{standing:?}");
    // And for each of them on three.
    let three = Mirrored::over(Cpu::new(1), (0..3).map(given).collect(), Some(0), Strategy::Balanced);
    let standing = play(Box::new(three));
    assert_eq!((standing.host_memories, standing.fallbacks), (0, 0));
    assert!(standing.devices.iter().all(|held| held.partitions == 1), "{standing:?}");
}
