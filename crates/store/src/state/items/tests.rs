//! Random commands on buffers, mixed with commands on memories, in the store and in the reference.

use super::{ByAge, Sampler};
use crate::Partitions;
use engram_kernels::Cpu;
use engram_memory::buffer::{BufferRef, Limits, Position, Remover, handle_at, handles, position_of};
use engram_memory::codec::{decode_ledger, decode_record, encode_ledger, encode_record};
use engram_memory::{
    Blobs, BufferCommand, Command, FeatureShape, Group, Law, MemoryId, OnMissing, PartitionId, Record, Reply, Settings,
    Shape, Updates, Upsert, partition_of, reference,
};
use engram_replay::item::Head;
use engram_replay::tiles::Priorities;
use proptest::prelude::*;

const PARTITIONS: u32 = 3;
const PARTITION: PartitionId = PartitionId(1);
const GROUP: Group = Group(255);

#[derive(Debug, Clone)]
enum Step {
    Append { weights: Vec<u32>, version: u64 },
    SetWeights(Vec<(prop::sample::Index, u32)>),
    Delete(Vec<prop::sample::Index>),
    Use(Vec<prop::sample::Index>),
    Lease { pick: Vec<prop::sample::Index>, now: u64 },
    Acknowledge(Vec<prop::sample::Index>),
    Decay(u32),
    Reinforce(prop::sample::Index, i32),
    ReinforceGroup(i32),
    Remove(prop::sample::Index),
    Regroup(prop::sample::Index),
    Evict(u64),
    Reopen,
}

fn step() -> impl Strategy<Value = Step> {
    let picks = || proptest::collection::vec(any::<prop::sample::Index>(), 1..5);
    let weight = || prop_oneof![Just(0_u32), 1..1_u32 << 30];
    prop_oneof![
        4 => (proptest::collection::vec(weight(), 0..6), 0_u64..5).prop_map(|(weights, version)| Step::Append { weights, version }),
        2 => proptest::collection::vec((any::<prop::sample::Index>(), weight()), 1..5).prop_map(Step::SetWeights),
        2 => picks().prop_map(Step::Delete),
        2 => picks().prop_map(Step::Use),
        2 => (picks(), 0_u64..300).prop_map(|(pick, now)| Step::Lease { pick, now }),
        2 => picks().prop_map(Step::Acknowledge),
        1 => (1_u32..1 << 28).prop_map(Step::Decay),
        1 => (any::<prop::sample::Index>(), -1000_i32..1 << 20).prop_map(|(pick, delta)| Step::Reinforce(pick, delta)),
        1 => (-1000_i32..1 << 20).prop_map(Step::ReinforceGroup),
        1 => any::<prop::sample::Index>().prop_map(Step::Remove),
        1 => any::<prop::sample::Index>().prop_map(Step::Regroup),
        1 => (0_u64..3).prop_map(Step::Evict),
        1 => Just(Step::Reopen),
    ]
}

fn payload(version: u64) -> Vec<u8> {
    let mut payload = Vec::new();
    Head { version, trajectory: version % 2, tag: b"" }.encode(&mut payload);
    payload
}

/// The command of a step; handles are picked from all that were ever used.
fn command(step: &Step, used: &[MemoryId], buffer: BufferRef) -> Option<Command> {
    let pick = |picks: &[prop::sample::Index]| picks.iter().map(|pick| *pick.get(used)).collect::<Vec<_>>();
    if used.is_empty() && !matches!(step, Step::Append { .. } | Step::Decay(_) | Step::ReinforceGroup(_)) {
        return None;
    }
    let by_id =
        |id, delta| Updates::ById { ids: vec![id], deltas: vec![delta], on_missing: OnMissing::Report, keys: None };
    Some(match step {
        Step::Append { weights, version } => Command::Buffer(BufferCommand::Append {
            buffer,
            from: u64::from(PARTITION.0),
            weights: weights.clone(),
            payloads: weights.iter().map(|_| payload(*version)).collect::<Blobs>(),
        }),
        Step::SetWeights(changes) => Command::Buffer(BufferCommand::SetWeights {
            buffer,
            ids: changes.iter().map(|(pick, _)| *pick.get(used)).collect(),
            weights: changes.iter().map(|(_, weight)| *weight).collect(),
        }),
        Step::Delete(picks) => Command::Buffer(BufferCommand::Delete { buffer, ids: pick(picks) }),
        Step::Use(picks) => Command::Buffer(BufferCommand::Use { buffer, sampled: 2, ids: pick(picks) }),
        Step::Lease { pick: picks, now } => Command::Buffer(BufferCommand::Lease {
            buffer,
            consumer: "c".into(),
            ids: pick(picks),
            now_ms: *now,
            until_ms: now + 100,
        }),
        Step::Acknowledge(picks) => {
            Command::Buffer(BufferCommand::Acknowledge { buffer, consumer: "c".into(), ids: pick(picks) })
        }
        Step::Decay(amount) => Command::Decay { amount: *amount },
        Step::Reinforce(pick, delta) => Command::Reinforce(by_id(*pick.get(used), *delta)),
        Step::ReinforceGroup(delta) => Command::Reinforce(Updates::ByGroup(vec![(GROUP, *delta)])),
        Step::Remove(pick) => Command::Remove { ids: vec![*pick.get(used)] },
        Step::Regroup(pick) => {
            Command::Upsert(Upsert { ids: vec![*pick.get(used)], groups: vec![Group(1)], ..Upsert::default() })
        }
        Step::Evict(count) => Command::Evict { count: *count },
        Step::Reopen => return None,
    })
}

/// The items by age, with weights and versions, from the reference.
fn items(reference: &reference::Partition) -> Vec<(Position, u32, u64)> {
    let of_buffer = reference.memories().iter().filter(|(_, memory)| memory.group == GROUP);
    let mut items: Vec<_> = of_buffer
        .map(|(id, memory)| {
            let version = Head::decode(&memory.payload).unwrap().0.version;
            (position_of(*id), memory.weight.units(), version)
        })
        .collect();
    items.sort_unstable();
    items
}

fn store(shape: Shape, settings: Settings) -> Partitions {
    let mut store = Partitions::new(Box::new(Cpu::new(1)), shape);
    store.open(PARTITION, settings);
    store
}

fn check_reads(store: &mut Partitions, reference: &reference::Partition) {
    let items = items(reference);
    for (sampler, oldest) in [(Sampler::prioritized(39_322), 0), (Sampler::Uniform, 2), (Sampler::Uniform, 3)] {
        let table = engram_kernels::priority::Priorities::new(39_322);
        let priority = |weight: u32| if matches!(sampler, Sampler::Uniform) { 1 } else { table.of(weight) };
        let expected: Vec<u32> =
            items.iter().map(|(_, weight, version)| if *version < oldest { 0 } else { priority(*weight) }).collect();
        let expected = Priorities::new(expected);
        let sums = store.item_sums(PARTITION, GROUP, &sampler, oldest).unwrap();
        assert_eq!((sums.total, sums.items), (expected.total(), items.len() as u64));
        assert_eq!((sums.positive, sums.smallest), (expected.positive().0, expected.positive().1.unwrap_or(0)));
        let thresholds: Vec<u64> = (0..8).map(|draw| draw * sums.total / 8).filter(|it| *it < sums.total).collect();
        let drawn = store.draw_items(PARTITION, GROUP, &sampler, oldest, sums.total, &thresholds).unwrap();
        let places: Vec<usize> = thresholds.iter().map(|threshold| expected.find(*threshold).unwrap()).collect();
        let of = |place: &usize| (handle_at(items[*place].0), expected.get(*place));
        assert_eq!(
            drawn.iter().map(|it| (it.id, it.priority)).collect::<Vec<_>>(),
            places.iter().map(of).collect::<Vec<_>>()
        );
    }
    let order = ByAge { newest_first: true, from: 0, oldest_version: 0, count: 3 };
    let newest = store.items_by_age(PARTITION, GROUP, order, |_| true).unwrap();
    let expected: Vec<MemoryId> = items.iter().rev().take(3).map(|item| handle_at(item.0)).collect();
    assert_eq!(newest, expected);
    let from = items.get(items.len() / 2).map_or(0, |item| item.0);
    let order = ByAge { newest_first: false, from, oldest_version: 2, count: 3 };
    let later = items.iter().filter(|(position, _, version)| *position >= from && *version >= 2);
    let expected: Vec<MemoryId> = later.take(3).map(|item| handle_at(item.0)).collect();
    assert_eq!(store.items_by_age(PARTITION, GROUP, order, |_| true).unwrap(), expected);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn store_and_reference_agree_on_buffers(
        remover in proptest::sample::select(&Remover::ALL[..]),
        max_reuse in 0_u32..3,
        steps in proptest::collection::vec(step(), 1..40),
    ) {
        let shape = Shape { partitions: PARTITIONS, law: Law::Linear, features: FeatureShape::NONE };
        let settings = Settings::default();
        let mut reference = reference::Partition::new(shape, settings);
        let mut store = store(shape, settings);
        let limits = Limits { capacity: 8, share: 8, remover, max_reuse };
        let define = BufferCommand::Define { group: None, name: "b".into(), definition: b"d".to_vec(), limits };
        let mut records = vec![Record::bare(Command::Buffer(define))];
        let stamp = engram_memory::buffer::Buffer { definition: b"d".to_vec(), ..Default::default() }.stamp();
        let buffer = BufferRef { group: GROUP, stamp };
        let mut used: Vec<MemoryId> = Vec::new();
        for step in std::iter::once(None).chain(steps.iter().map(Some)) {
            if let Some(Step::Reopen) = step {
                let content = store.export(PARTITION).unwrap().unwrap();
                store.close(PARTITION);
                store.import(&content).unwrap();
                continue;
            }
            records.extend(step.and_then(|step| command(step, &used, buffer)).map(Record::bare));
            let Some(record) = records.pop() else { continue };
            let mut bytes = Vec::new();
            encode_record(&record, &mut bytes);
            prop_assert_eq!(decode_record(&bytes), Ok(record.clone()));
            let (expected, found) = (reference.apply(&record), store.apply(PARTITION, &record).unwrap());
            prop_assert_eq!(&found, &expected, "{:?}", record);
            if let Reply::Applied(outcome) = &expected
                && let Some(first) = outcome.first
            {
                let new: Vec<MemoryId> = handles(first, outcome.created, PARTITIONS).collect();
                prop_assert!(new.iter().all(|id| !used.contains(id) && partition_of(*id, PARTITIONS) == PARTITION));
                used.extend(new);
            }
            prop_assert_eq!(store.replica_digest(PARTITION).unwrap(), Some(reference.replica_digest()));
            check_reads(&mut store, &reference);
        }
        let mut ledger = Vec::new();
        encode_ledger(reference.ledger(), &mut ledger);
        prop_assert_eq!(&decode_ledger(&ledger).unwrap(), reference.ledger());
    }
}
