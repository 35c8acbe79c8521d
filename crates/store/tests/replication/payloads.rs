//! Payloads of items on every replica: in the log, in state transfers, and repaired from another replica.

use super::cluster::{P, TestCluster};
use engram_cluster::Change;
use engram_memory::buffer::{Buffer, BufferRef, Limits, Remover};
use engram_memory::{Blobs, BufferCommand, Command, Group, MemoryId, Ordinal, Record};
use engram_replay::item::Head;
use engram_store::Store;
use std::collections::BTreeMap;

fn define() -> Record {
    let limits = Limits { capacity: 1 << 20, share: 1 << 20, remover: Remover::Refuse, max_reuse: 0 };
    let define = BufferCommand::Define { group: None, name: "b".into(), definition: b"d".to_vec(), limits };
    Record::bare(Command::Buffer(define))
}

fn append(version: u64, lengths: &[usize]) -> Record {
    let stamp = Buffer { definition: b"d".to_vec(), ..Buffer::default() }.stamp();
    let payload = |length: &usize| {
        let mut payload = Vec::new();
        Head { version, trajectory: 1, tag: b"" }.encode(&mut payload);
        payload.resize(payload.len() + length, version as u8);
        payload
    };
    let command = BufferCommand::Append {
        buffer: BufferRef { group: Group(255), stamp },
        from: 0,
        weights: vec![1; lengths.len()],
        payloads: lengths.iter().map(payload).collect::<Blobs>(),
    };
    Record::bare(Command::Buffer(command))
}

fn payloads(store: &mut Store) -> BTreeMap<u64, Vec<u8>> {
    let mut found = BTreeMap::new();
    let mut take = |memory: engram_store::Memory<'_>| {
        found.insert(memory.id.0, memory.payload.to_vec());
    };
    store.partitions().scan(P, None, u32::MAX, &mut take).unwrap();
    found
}

#[test]
fn a_learner_receives_payloads_that_the_log_no_longer_has() {
    let mut cluster = TestCluster::new(3, 2);
    cluster.write(0, define()).unwrap();
    for version in 0..4 {
        cluster.write(0, append(version, &[100, (4 << 20) - 17, 0, 1 << 20])).unwrap();
    }
    let expected = payloads(cluster.store(0));
    assert_eq!(expected.len(), 16);
    assert_eq!(payloads(cluster.store(1)), expected, "a backup has them from the log");

    cluster.kill(1);
    let promote = Change::Promote { primary: cluster.member(0), isr: vec![Ordinal(0)] };
    cluster.change(&promote);
    cluster.settle();
    cluster.change(&Change::Learn(vec![Ordinal(2)]));
    for _ in 0..400 {
        cluster.clock.advance(50);
        cluster.settle();
        if cluster.entry.isr.len() == 2 {
            break;
        }
    }
    assert_eq!((cluster.entry.isr.len(), cluster.store(2).stats().transfers_installed), (2, 1));
    assert_eq!(payloads(cluster.store(2)), expected);
    let digests = cluster.digests();
    assert_eq!(digests[0], digests[1]);

    // What it received is durable.
    cluster.lose_power(2);
    cluster.start(2);
    assert_eq!(payloads(cluster.store(2)), expected);
}

#[test]
fn damaged_payloads_of_any_replica_are_repaired_from_another_one() {
    for damaged in 0..2 {
        let mut cluster = TestCluster::new(2, 2);
        cluster.write(0, define()).unwrap();
        for version in 0..4 {
            cluster.write(0, append(version, &[5_000, 20_000])).unwrap();
        }
        let expected = payloads(cluster.store(0));
        for node in 0..2 {
            cluster.store(node).snapshot_all(None, |written| assert!(written.is_ok()));
        }
        cluster.settle();
        cluster.flip_payload_bit(damaged);
        // A day is one period.
        for _ in 0..60 {
            cluster.clock.advance(60 * 60 * 1_000);
            cluster.lease();
            cluster.settle();
        }
        for _ in 0..100 {
            cluster.clock.advance(100);
            cluster.settle();
        }
        assert_eq!(cluster.store(damaged).stats().damaged_payloads, 1, "node {damaged}");
        let digests = cluster.digests();
        assert_eq!((cluster.entry.isr.len(), digests.len()), (2, 2));
        assert_eq!(digests[0], digests[1]);
        for node in 0..2 {
            cluster.lose_power(node);
            cluster.start(node);
            assert_eq!(payloads(cluster.store(node)), expected, "node {node}, damaged {damaged}");
        }
    }
}

#[test]
fn a_damaged_payload_of_the_only_replica_does_not_block_re_replication_of_the_rest() {
    let mut cluster = TestCluster::new(2, 2);
    cluster.write(0, define()).unwrap();
    for version in 0..4 {
        // More than the log keeps in memory.
        cluster.write(0, append(version, &[100, (4 << 20) - 17, 0, 1 << 20])).unwrap();
    }
    let expected = payloads(cluster.store(0));
    cluster.store(0).snapshot_all(None, |written| assert!(written.is_ok()));
    cluster.settle();
    cluster.kill(1);
    cluster.change(&Change::Promote { primary: cluster.member(0), isr: vec![Ordinal(0)] });
    cluster.settle();
    cluster.flip_payload_bit(0);
    cluster.replace_disk(1);
    cluster.start(1);
    cluster.change(&Change::Learn(vec![Ordinal(1)]));
    let mut turns = 0;
    while cluster.entry.isr.len() < 2 && turns < 400 {
        cluster.clock.advance(50);
        cluster.settle();
        turns += 1;
    }
    assert_eq!(cluster.entry.isr.len(), 2, "{:?}", cluster.store(0).stats().damage);
    // The new replica has the same state, and the same item is damaged there.
    for _ in 0..60 {
        cluster.clock.advance(60 * 60 * 1_000);
        cluster.lease();
        cluster.settle();
    }
    let digests = cluster.digests();
    assert_eq!((digests.len(), digests[0]), (2, digests[1]));
    assert_eq!(cluster.entry.primary, Ordinal(0), "no other replica can repair it");
    let mut lost = Vec::new();
    for node in [0, 1] {
        let mut damaged = Vec::new();
        for (&id, payload) in &expected {
            match cluster.store(node).partitions().get(MemoryId(id)) {
                Ok(memory) => assert_eq!(memory.unwrap().payload, payload),
                // The cache of the first may still have it.
                Err(error) => damaged.push((id, error.to_string())),
            }
        }
        assert!(damaged.iter().all(|(id, text)| text.contains(&format!("item {}:", MemoryId(*id)))), "{damaged:?}");
        assert_eq!(cluster.store(node).stats().damaged_payloads, 1, "node {node}");
        lost.push(damaged.len());
    }
    assert_eq!(lost[1], 1, "{lost:?}");
    // Writes go on.
    cluster.write(0, append(9, &[10])).unwrap();
    cluster.settle();
    let digests = cluster.digests();
    assert_eq!((digests.len(), digests[0]), (2, digests[1]));
}
