//! A store over a GPU: what it replies, ranks, recalls and digests is what a store over the CPU does, also when the GPU fails on the way.
//! The GPU is the stand-in for NVIDIA's library, under the launch code of production.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

#[path = "../../../kernels/tests/host/build.rs"]
mod build;
mod finite;
#[path = "../../../kernels/tests/host/stand_in.rs"]
mod stand_in;

use engram_kernels::gpu::cuda::Cuda;
use engram_kernels::recall::Query;
use engram_kernels::{Cpu, Gpu, Mirrored, Standing};
use engram_memory::testing::World;
use engram_memory::{
    Digest, FeatureShape, FeatureType, Group, Histogram, Law, MemoryId, PartitionId, QualityVector, Record, Settings,
    Shape, Weight,
};
use engram_store::{Partitions, Ranked};
use finite::finite;
use proptest::prelude::*;
use proptest::strategy::ValueTree as _;
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

/// Plays the history on both, compares them after every batch, and gives how the GPU stands at the end.
fn play() -> Standing {
    let shape = Shape { partitions: PARTITIONS, law: Law::Linear, features: FEATURES };
    let gpu = Gpu::new(Cuda::open(0, PATIENT).unwrap(), "stand-in".to_owned());
    let mut over_gpu = Partitions::new(Box::new(Mirrored::new(Cpu::new(1), gpu, Some(0))), shape);
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
        let standing = play();
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
            let standing = play();
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
