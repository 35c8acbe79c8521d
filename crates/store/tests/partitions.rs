//! The partitions compared bit for bit with the slow reference after every batch.
#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

mod finite;

use engram_kernels::Cpu;
use engram_kernels::recall::{Query, inverse_norm};
use engram_memory::{
    Command, Digest, FeatureShape, FeatureType, Group, Law, LearningEpoch, MemoryId, Outcome, PartitionId,
    QualityVector, Record, Reply, RunId, Settings, Shape, Updates, Upsert, Weight, law, partition_of, reference,
};
use engram_store::{Content, Partitions};
use engram_testing::commands::World;
use finite::finite;
use proptest::prelude::*;

const FEATURES: [FeatureShape; 3] = [
    FeatureShape::NONE,
    FeatureShape { dimension: 3, dtype: FeatureType::F16 },
    FeatureShape { dimension: 1, dtype: FeatureType::F32 },
];

const fn shape(partitions: u32, features: FeatureShape) -> Shape {
    Shape { partitions, law: Law::Linear, features }
}

/// Asserts that everything readable in `store` equals `references`, by partition.
fn assert_equal(store: &mut Partitions, references: &[reference::Partition]) {
    let (mut quality, mut digest) = (QualityVector::default(), Digest::default());
    let mut rank = Vec::new();
    for (index, reference) in references.iter().enumerate() {
        let partition = PartitionId(index as u32);
        quality.merge(&reference.quality());
        digest.merge(reference.digest());
        rank.extend(reference.rank());
        assert_eq!(store.replica_digest(partition).unwrap(), Some(reference.replica_digest()), "partition {partition}");
        assert_eq!(store.ledger(partition), Some(reference.ledger()));
        assert_eq!(store.count(partition), reference.memories().len() as u64);
        let ids: Vec<MemoryId> = reference.memories().keys().copied().collect();
        let mut visited = 0;
        store
            .get_many(&ids, |id, memory| {
                let (expected, memory) = (&reference.memories()[&id], memory.expect("the reference has it"));
                assert_eq!((memory.id, memory.weight, memory.group), (id, expected.weight, expected.group));
                assert_eq!((memory.key, memory.features), (&expected.key[..], &expected.features[..]));
                assert_eq!((memory.payload, memory.updates), (&expected.payload[..], expected.updates));
                visited += 1;
            })
            .unwrap();
        assert_eq!(visited, ids.len());
        let mut scanned: Vec<MemoryId> = Vec::new();
        let mut before = None;
        loop {
            before = store.scan(partition, before, 5, |memory| scanned.push(memory.id)).unwrap();
            if before.is_none() {
                break;
            }
        }
        scanned.sort();
        assert_eq!(scanned, ids);
    }
    rank.sort_by(|a, b| law::rank_order(*a, *b));
    assert_eq!(store.quality().unwrap(), quality);
    assert_eq!(store.digest().unwrap(), digest);
    let ranked = |store: &mut Partitions, limit| -> Vec<(Weight, MemoryId)> {
        store.rank(limit, None).unwrap().iter().map(|ranked| (ranked.weight, ranked.id)).collect()
    };
    assert_eq!(ranked(store, None), rank);
    assert_eq!(ranked(store, Some(7)), rank[..rank.len().min(7)]);
    assert_recalls(store, references);
    for bits in [0, 3, 12] {
        let mut histogram = references[0].histogram(bits);
        references[1..].iter().for_each(|reference| histogram.merge(&reference.histogram(bits)));
        assert_eq!(store.histogram(bits).unwrap(), histogram);
    }
}

/// Asserts that recall of `store` equals an exhaustive search; empty unless features are f16.
fn assert_recalls(store: &mut Partitions, references: &[reference::Partition]) {
    let query = Query::new(&[0x3c00, 0xc000, 0x3555]);
    if store.features() != FEATURES[1] {
        assert_eq!(store.recall(&query, 10, None).unwrap(), []);
        return;
    }
    let memories = references.iter().flat_map(|reference| reference.memories());
    let mut expected: Vec<(f32, MemoryId, Group)> = memories
        .map(|(id, memory)| {
            let bits: Vec<u16> = memory.features.chunks(2).map(|pair| u16::from_le_bytes([pair[0], pair[1]])).collect();
            (query.score(&bits, inverse_norm(&bits), memory.weight.units()), *id, memory.group)
        })
        .collect();
    expected.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
    let mut check = |limit: usize, group: Option<Group>| {
        let of_group = expected.iter().filter(|(.., other)| group.is_none_or(|group| group == *other));
        let first: Vec<(u32, MemoryId)> = of_group.take(limit).map(|(score, id, _)| (score.to_bits(), *id)).collect();
        let recalled = store.recall(&query, limit, group).unwrap();
        let recalled: Vec<(u32, MemoryId)> = recalled.iter().map(|one| (one.score.to_bits(), one.id)).collect();
        assert_eq!(recalled, first);
    };
    check(7, None);
    check(usize::MAX, Some(Group(1)));
}

/// Copies `store` through its snapshots, and asserts that they are exported again byte for byte, including slot order.
fn restored(store: &mut Partitions, threads: usize) -> Partitions {
    let mut copy = Partitions::new(Box::new(Cpu::new(threads)), store.shape());
    // Another arena layout: the last partition first, and reused tiles.
    for partition in store.iter().collect::<Vec<_>>().into_iter().rev() {
        let content = store.export(partition).unwrap().expect("the partition is open");
        copy.import(&content).unwrap();
        copy.close(partition);
        copy.import(&content).unwrap();
        assert_eq!(copy.export(partition).unwrap(), Some(content));
        assert_eq!(copy.replica_digest(partition).unwrap(), store.replica_digest(partition).unwrap());
    }
    copy
}

#[test]
fn memory_is_allocated_for_the_ids_of_a_content_and_not_for_its_stated_count() {
    let mut partitions = Partitions::new(Box::new(Cpu::new(1)), shape(1, FEATURES[0]));
    partitions.open(PartitionId(0), Settings::default());
    let content = partitions.export(PartitionId(0)).unwrap().expect("the partition is open");
    partitions.close(PartitionId(0));
    let before = partitions.bytes();
    let error = partitions.import(&Content { memories: 1 << 28, ..content.clone() }).unwrap_err();
    assert!(error.to_string().contains("number of ids differs from that of memories"), "{error}");
    assert_eq!((partitions.bytes(), partitions.contains(PartitionId(0))), (before, false));
    partitions.import(&content).unwrap();
}

/// Interleaves the logs of several partitions by `order`, keeping each one's order.
fn interleave(logs: &[Vec<Record>], order: &[usize]) -> Vec<(PartitionId, Record)> {
    let mut rest: Vec<_> = logs.iter().map(|log| log.iter()).collect();
    let mut merged: Vec<(PartitionId, Record)> = Vec::new();
    for at in order.iter().copied().chain((0..logs.len()).flat_map(|at| std::iter::repeat_n(at, logs[at].len()))) {
        let at = at % logs.len();
        merged.extend(rest[at].next().map(|record| (PartitionId(at as u32), record.clone())));
    }
    merged
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(192))]

    #[test]
    fn partitions_equal_the_reference_bit_for_bit(
        (partitions, threads, batch, features, settings, logs, order, restored_after) in (1_u32..4, 1_usize..4, 1_usize..40, 0..FEATURES.len())
            .prop_flat_map(|(partitions, threads, batch, features)| {
                let worlds: Vec<World> = (0..partitions)
                    .map(|p| World::of_partition(FEATURES[features], 24, 12, PartitionId(p), partitions))
                    .collect();
                let logs: Vec<_> = worlds.iter().map(|world| world.arb_records(0..60)).collect();
                let order = proptest::collection::vec(0_usize..3, 0..100);
                (Just(partitions), Just(threads), Just(batch), Just(FEATURES[features]), worlds[0].arb_settings(), logs, order, 0_usize..10)
            })
    ) {
        let shape = shape(partitions, features);
        let recalled = features == FEATURES[1];
        let admitted = |record: Record| if recalled { finite(record) } else { record };
        let logs: Vec<Vec<Record>> =
            logs.into_iter().map(|log: Vec<Record>| log.into_iter().map(admitted).collect()).collect();
        let mut store = Partitions::new(Box::new(Cpu::new(threads)), shape);
        let mut references = Vec::new();
        for partition in 0..partitions {
            store.open(PartitionId(partition), settings);
            references.push(reference::Partition::new(shape, settings));
        }
        for (index, batch) in interleave(&logs, &order).chunks(batch).enumerate() {
            let replies = store.apply_batch(batch).unwrap();
            for ((partition, record), reply) in batch.iter().zip(replies) {
                prop_assert_eq!(&reply, &references[partition.0 as usize].apply(record), "{:?}", record);
            }
            assert_equal(&mut store, &references);
            if index == restored_after {
                store = restored(&mut store, 4 - threads);
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(8))]

    /// Thousands of memories: several tiles, removals that move memories across them, tiles that are freed and reused.
    #[test]
    fn partitions_of_many_tiles_equal_the_reference(
        (settings, records) in {
            let world = World::sized(FeatureShape::NONE, 12_000, 6_000);
            (world.arb_settings(), world.arb_records(1..12))
        }
    ) {
        let shape = shape(1, FeatureShape::NONE);
        let mut store = Partitions::new(Box::new(Cpu::new(2)), shape);
        store.open(PartitionId(0), settings);
        let mut reference = reference::Partition::new(shape, settings);
        for record in &records {
            prop_assert_eq!(store.apply(PartitionId(0), record).unwrap(), reference.apply(record));
        }
        assert_equal(&mut store, &[reference]);
    }
}

/// The standard experiment: even ids rewarded, odd ids punished. Returns the separation after each epoch.
fn standard_experiment(memories: u64, partitions: u32, by_group: bool, epochs: u64) -> (Vec<u128>, Partitions) {
    let mut store = Partitions::new(Box::new(Cpu::new(2)), shape(partitions, FeatureShape::NONE));
    let mut ids: Vec<Vec<MemoryId>> = vec![Vec::new(); partitions as usize];
    (0..memories).map(MemoryId).for_each(|id| ids[partition_of(id, partitions).0 as usize].push(id));
    let group = |id: &MemoryId| Group((id.0 % 2) as u8);
    for (partition, ids) in ids.iter().enumerate() {
        let partition = PartitionId(partition as u32);
        store.open(partition, Settings { count_updates: true, ..Settings::default() });
        for ids in ids.chunks(50_000) {
            let groups = ids.iter().map(group).collect();
            let upsert = Command::Upsert(Upsert { ids: ids.to_vec(), groups, ..Upsert::default() });
            store.apply(partition, &Record::bare(upsert)).unwrap();
        }
    }
    let deltas = [42_949_673, -42_949_672];
    let mut separations = Vec::new();
    for n in (1..=epochs).map(LearningEpoch) {
        let batch: Vec<_> = ids
            .iter()
            .enumerate()
            .map(|(partition, ids)| {
                let updates = if by_group {
                    Updates::ByGroup(vec![(Group(0), deltas[0]), (Group(1), deltas[1])])
                } else {
                    let deltas = ids.iter().map(|id| deltas[usize::from(group(id).0)]).collect();
                    Updates::ById { ids: ids.clone(), deltas, on_missing: Default::default(), keys: None }
                };
                let epoch = Command::Epoch { run: RunId(1), n, decay: 10_737_418, updates };
                (PartitionId(partition as u32), Record::bare(epoch))
            })
            .collect();
        let mut total = Outcome::default();
        for reply in store.apply_batch(&batch).unwrap() {
            let Reply::Applied(outcome) = reply else { panic!("refused: {reply:?}") };
            total.merge(&outcome);
        }
        assert_eq!((total.applied, total.rejected), (memories, 0));
        let quality = total.quality.expect("an epoch was closed");
        let mean = |group| quality.group(group).sum / u128::from(quality.group(group).count);
        separations.push(mean(Group(0)) - mean(Group(1)));
    }
    (separations, store)
}

#[test]
fn standard_experiment_has_its_digest_with_any_number_of_partitions() {
    let digest = |hex| Digest(u128::from_str_radix(hex, 16).unwrap());
    for partitions in [1, 7, 256] {
        let (_, mut store) = standard_experiment(1_000, partitions, false, 5);
        assert_eq!(store.digest().unwrap(), digest("85540e11f201328e777384429e8fcfa8"));
        for (memories, epochs, expected) in [
            (1_000, 20, "81614da90c4f4be97e63ff0b5f2fb1ce"),
            (1_000, 250, "81614da90c4f4be97e63ff0b5f2fb1ce"),
            (100_000, 17, "0569a0a6cd4901dddad8e5e7fe77534e"),
        ] {
            for by_group in [false, true] {
                let (separations, mut store) = standard_experiment(memories, partitions, by_group, epochs);
                assert_eq!(store.digest().unwrap(), digest(expected), "{memories} memories, {partitions} partitions");
                assert_eq!((separations[0], separations[16]), (85_899_345, 1_073_741_824));
                let coverage = store.coverage(epochs).unwrap();
                assert!(coverage.iter().all(|group| group.full == memories / 2 && group.memories == memories / 2));
            }
        }
    }
}

/// Run by `cargo test --release -- --ignored`.
#[test]
#[ignore = "a million memories: for a release build"]
fn standard_experiment_of_a_million_has_its_digest() {
    for partitions in [1, 7, 256] {
        let (_, mut store) = standard_experiment(1_000_000, partitions, false, 17);
        assert_eq!(store.digest().unwrap(), Digest(0xf8d8_e5f6_d0cf_7eb8_d966_6555_ede0_f0dd));
    }
}
