//! Golden bytes of format version 1 of the records, replies and state of replay buffers; see `golden.rs`.

use super::golden::{Value, check_golden};
use engram_memory::buffer::{BufferCommand, BufferRef, Limits, Remover, handle_at, handles, order, position};
use engram_memory::codec::encode_record;
use engram_memory::outcome::{Outcome, Reply};
use engram_memory::reference::Partition;
use engram_memory::{
    Blobs, Command, FeatureShape, FeatureType, Group, Law, Ledger, MemoryId, ONE, Record, Refusal, Settings, Shape,
};
use std::collections::BTreeSet;
use xxhash_rust::xxh3::xxh3_64;

const PARTITIONS: u32 = 256;
const PARTITION: u32 = 0;
const NOW_MS: u64 = 1_700_000_000_123;
const DEFINITION: &[u8] = b"schema and settings";

fn buffer() -> BufferRef {
    BufferRef { group: Group(255), stamp: xxh3_64(DEFINITION) }
}

fn limits() -> Limits {
    Limits { capacity: 1_000_000, share: 6, remover: Remover::LowestPriority, max_reuse: 2 }
}

fn from() -> u64 {
    position(order(NOW_MS, 7), PARTITION, PARTITIONS)
}

/// Handle of an item of the append below.
fn item(row: usize) -> MemoryId {
    handles(handle_at(from()), 6, PARTITIONS).nth(row).unwrap()
}

fn commands() -> Vec<(&'static str, BufferCommand)> {
    let (buffer, consumer) = (buffer(), "learner".to_owned());
    let payloads: Blobs = [&b"one"[..], &[0; 17], b"fields", &[255], b"five", b"six"].iter().collect();
    let define = |group| BufferCommand::Define {
        group,
        name: "träin".into(),
        definition: DEFINITION.to_vec(),
        limits: limits(),
    };
    let weights = vec![0, 1, ONE / 2, ONE, 7, 8];
    vec![
        ("define, the partition chooses the group", define(None)),
        ("define with a group", define(Some(Group(255)))),
        (
            "append of six items, as many as the share",
            BufferCommand::Append { buffer, from: from(), weights, payloads },
        ),
        (
            "append of one more item: another makes room",
            BufferCommand::Append {
                buffer,
                from: from(),
                weights: vec![3],
                payloads: [&b"seven"[..]].iter().collect(),
            },
        ),
        ("set weights", BufferCommand::SetWeights { buffer, ids: vec![item(1), MemoryId(9)], weights: vec![ONE, 0] }),
        ("use of two items", BufferCommand::Use { buffer, sampled: 5, ids: vec![item(2), item(3)] }),
        ("use again: one is used up", BufferCommand::Use { buffer, sampled: 1, ids: vec![item(3)] }),
        (
            "lease",
            BufferCommand::Lease {
                buffer,
                consumer: consumer.clone(),
                ids: vec![item(1), item(2), item(4)],
                now_ms: NOW_MS,
                until_ms: NOW_MS + 30_000,
            },
        ),
        ("acknowledge", BufferCommand::Acknowledge { buffer, consumer, ids: vec![item(2)] }),
        ("delete", BufferCommand::Delete { buffer, ids: vec![item(5), MemoryId(u64::MAX)] }),
        ("drop", BufferCommand::Drop { buffer: BufferRef { group: Group(3), stamp: 1 } }),
    ]
}

/// The ledger after all commands above.
fn ledger() -> Ledger {
    let features = FeatureShape { dimension: 0, dtype: FeatureType::F16 };
    let shape = Shape { partitions: PARTITIONS, law: Law::Linear, features };
    let mut partition = Partition::new(shape, Settings::default());
    for (_, command) in commands() {
        partition.apply(&Record::bare(Command::Buffer(command)));
    }
    partition.ledger().clone()
}

fn values() -> Vec<(String, Value)> {
    let record =
        |(what, command)| (format!("record: {what}"), Value::Record(Box::new(Record::bare(Command::Buffer(command)))));
    let refused = |what: &str, refusal| (format!("reply: {what}"), Value::Reply(Reply::Refused(refusal)));
    let appended = Outcome { created: 6, evicted: 1, first: Some(item(0)), ..Outcome::default() };
    let replies = [
        ("reply: appended".to_owned(), Value::Reply(Reply::Applied(appended))),
        refused("buffer unknown", Refusal::BufferUnknown),
        refused("buffer conflict", Refusal::BufferConflict),
        refused("buffer full", Refusal::BufferFull { items: 5, capacity: 5, needed: 2 }),
        refused("too many consumers", Refusal::BufferLimit { what: "buffers or consumers", most: 64 }),
    ];
    let ledger = ("ledger: a buffer with uses and a consumer".to_owned(), Value::Ledger(Box::new(ledger())));
    commands().into_iter().map(record).chain(replies).chain([ledger]).collect()
}

#[test]
fn buffer_bytes_of_version_1_are_encoded_and_decoded_unchanged() {
    check_golden("buffer-v1", &values());
}

#[test]
fn golden_buffer_values_cover_every_kind_and_all_state() {
    let kind = |(what, command): (&str, BufferCommand)| {
        assert_eq!(command.check(), Ok(()), "{what}");
        let mut bytes = Vec::new();
        encode_record(&Record::bare(Command::Buffer(command)), &mut bytes);
        bytes[2]
    };
    assert_eq!(commands().into_iter().map(kind).collect::<BTreeSet<u8>>(), (1..=8).collect());
    let ledger = ledger();
    let buffer = ledger.buffers.get(Group(255)).unwrap();
    assert_eq!((buffer.counts.inserted, buffer.counts.sampled, buffer.counts.deleted), (7, 6, 3));
    assert!(!buffer.uses.is_empty() && buffer.consumers["learner"].leased() > 0);
}
