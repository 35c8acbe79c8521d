//! Items keep their payloads over crashes, snapshots, compaction and damage, while memory stays bounded.

use super::segment;
use crate::{Disk as _, ManualClock, Options, Recovery, SimDisk, Store, restore, snapshot_file};
use engram_kernels::Cpu;
use engram_memory::buffer::{Buffer, BufferRef, Limits, Remover, handles, position_of};
use engram_memory::{
    Blobs, BufferCommand, ClusterId, Command, FeatureShape, FeatureType, Group, Law, MemoryId, PartitionId, Record,
    Reply, Settings, Shape, Term, Upsert, mix64,
};
use engram_replay::item::Head;
use parking_lot::Mutex;
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::sync::Arc;

const P: PartitionId = PartitionId(0);
const CACHE_BYTES: u64 = 8 << 10;
const FEATURES: FeatureShape = FeatureShape { dimension: 2, dtype: FeatureType::F16 };

fn options() -> Options {
    let shape = Shape { partitions: 1, law: Law::Linear, features: FEATURES };
    let mut options = Options::new(ClusterId(7), shape, Settings::default());
    options.origin = crate::Origin { boot: 0, mount: 0 };
    options.wal.segment_bytes = 16 << 10;
    (options.snapshot_bytes, options.payload_segment_bytes) = (24 << 10, 4 << 10);
    options.payload_cache_bytes = CACHE_BYTES;
    options.scrub_ms = 20_000;
    options
}

fn buffer() -> BufferRef {
    let stamp = Buffer { definition: b"d".to_vec(), ..Buffer::default() }.stamp();
    BufferRef { group: Group(255), stamp }
}

fn payload(seed: u64, length: usize) -> Vec<u8> {
    let mut payload = Vec::new();
    Head { version: seed, trajectory: seed % 3, tag: b"t" }.encode(&mut payload);
    let end = payload.len() + length;
    let words = length.div_ceil(8) as u64;
    payload.extend((0..words).flat_map(|at| mix64(seed ^ at << 32).to_le_bytes()));
    payload.truncate(end);
    payload
}

/// A store with the payloads that it must have.
struct World {
    disk: SimDisk,
    clock: Arc<ManualClock>,
    store: Option<Store>,
    expected: BTreeMap<MemoryId, Vec<u8>>,
    /// Payloads of appends without an answer, which may exist.
    unanswered: Vec<Vec<u8>>,
    seed: u64,
}

impl World {
    fn new(disk: SimDisk) -> Self {
        let clock = Arc::new(ManualClock::new(1_000_000));
        Self { disk, clock, store: None, expected: BTreeMap::new(), unanswered: Vec::new(), seed: 0 }
    }

    /// Opens the store and activates its partition; `None` if the disk stops.
    fn open(&mut self) -> Option<Recovery> {
        let disk = Arc::new(self.disk.clone());
        let opened = Store::open(disk, self.clock.clone(), Box::new(Cpu::new(1)), options());
        let (mut store, recovery) = opened.ok()?;
        let term = store.promised(P).0 + 1;
        store.activate(vec![(P, Term(term))], |_| {});
        store.turn().ok()?;
        self.store = Some(store);
        let limits = Limits { capacity: 1 << 20, share: 1 << 20, remover: Remover::Refuse, max_reuse: 0 };
        self.write(BufferCommand::Define { group: None, name: "b".into(), definition: b"d".to_vec(), limits })?;
        Some(recovery)
    }

    fn store(&mut self) -> &mut Store {
        self.store.as_mut().expect("it is open")
    }

    /// Writes a command; `None` if it has no answer because the disk stopped.
    fn write(&mut self, command: BufferCommand) -> Option<Reply> {
        let answer = Arc::new(Mutex::new(None));
        let slot = Arc::clone(&answer);
        let record = Record::bare(Command::Buffer(command));
        self.store().write(vec![(P, record)], move |mut answers| *slot.lock() = answers.pop());
        let _ = self.store().turn();
        let answer = answer.lock().take();
        answer.and_then(Result::ok).map(|committed| committed.reply)
    }

    fn append(&mut self, lengths: &[usize]) -> Option<()> {
        let payloads: Vec<Vec<u8>> = lengths
            .iter()
            .map(|length| {
                self.seed += 1;
                payload(self.seed, *length)
            })
            .collect();
        let command = BufferCommand::Append {
            buffer: buffer(),
            from: 0,
            weights: vec![1 << 20; payloads.len()],
            payloads: payloads.iter().collect::<Blobs>(),
        };
        match self.write(command) {
            Some(Reply::Applied(outcome)) => {
                let ids = handles(outcome.first.expect("items were created"), outcome.created, 1);
                self.expected.extend(ids.zip(payloads));
                Some(())
            }
            Some(reply) => panic!("{reply:?}"),
            None => {
                self.unanswered.extend(payloads);
                None
            }
        }
    }

    fn delete(&mut self, ids: &[MemoryId]) -> Option<()> {
        let reply = self.write(BufferCommand::Delete { buffer: buffer(), ids: ids.to_vec() });
        for id in ids {
            // Without an answer the item may exist or not.
            let payload = self.expected.remove(id);
            self.unanswered.extend(payload.filter(|_| reply.is_none()));
        }
        reply.map(|_| ())
    }

    fn snapshot(&mut self) -> Option<()> {
        let done = Arc::new(Mutex::new(None));
        let slot = Arc::clone(&done);
        self.store().snapshot_all(None, move |written| *slot.lock() = written.ok());
        let _ = self.store().turn();
        done.lock().take().map(|_| ())
    }

    /// Advances the clock so that background work is done.
    fn work(&mut self, seconds: u64) {
        for _ in 0..seconds {
            self.clock.advance(1_000);
            let _ = self.store().turn();
        }
    }

    fn read(&mut self) -> BTreeMap<MemoryId, Vec<u8>> {
        let mut found = BTreeMap::new();
        let partitions = self.store().partitions();
        partitions
            .scan(P, None, u32::MAX, |memory| {
                found.insert(memory.id, memory.payload.to_vec());
            })
            .unwrap();
        found
    }

    /// Checks that every answered append is there, and nothing that was not requested.
    fn check(&mut self) {
        let found = self.read();
        for (id, payload) in &self.expected {
            assert_eq!(found.get(id), Some(payload), "item {id} of {} bytes", payload.len());
        }
        let unanswered = std::mem::take(&mut self.unanswered);
        for (id, payload) in found {
            if self.expected.insert(id, payload.clone()).is_none() {
                assert!(unanswered.contains(&payload), "item {id} was not requested");
            }
        }
        let usage = self.store().partitions().arena.payloads.usage();
        let live: usize = self.expected.values().map(Vec::len).sum();
        assert_eq!(usage.live_bytes, live as u64);
        assert!(usage.cached_bytes <= CACHE_BYTES);
    }

    fn segments(&self) -> Vec<String> {
        let names = self.disk.list().unwrap().into_iter();
        names.filter(|name| segment::parse_name(name).is_some()).collect()
    }
}

/// A life of a store: segments fill, some become sparse, snapshots refer to them, and they are compacted and removed.
fn scenario(world: &mut World) -> Option<()> {
    world.open()?;
    for round in 0..5_u64 {
        world.append(&[700, 30, 1_900, 0])?;
        world.append(&[1_200, 1_500])?;
        if round > 0 {
            let old: Vec<MemoryId> = world.expected.keys().copied().filter(|id| !id.0.is_multiple_of(5)).collect();
            let count = old.len() * 2 / 3;
            world.delete(&old[..count])?;
        }
        if round % 2 == 0 {
            world.snapshot()?;
        }
        world.work(2);
    }
    world.snapshot()
}

#[test]
fn answered_items_survive_a_crash_at_every_write() {
    let mut crashes = 0;
    for changes in 0.. {
        let mut world = World::new(SimDisk::new(changes));
        world.disk.stop_after(changes);
        let is_whole = scenario(&mut world).is_some();
        world.store = None;
        // After a power loss, or only the end of the process.
        if changes % 2 == 0 {
            world.disk.lose_power();
        } else {
            world.disk.kill();
        }
        let recovery = world.open().expect("the disk works again");
        assert!(recovery.corrupt.is_empty(), "after {changes} changes: {recovery:?}");
        world.check();
        world.append(&[500]).unwrap();
        world.snapshot().unwrap();
        world.store = None;
        world.disk.lose_power();
        world.open().unwrap();
        world.check();
        if is_whole {
            break;
        }
        crashes += 1;
    }
    assert!(crashes > 100, "{crashes}");
}

#[derive(Debug, Clone)]
enum Step {
    Append(Vec<usize>),
    Delete(Vec<prop::sample::Index>),
    Snapshot,
    Work,
    Crash { changes: u64, power: bool },
    DiskFull(bool),
}

fn step() -> impl Strategy<Value = Step> {
    let length = prop_oneof![0_usize..40, 500_usize..3_000, Just(6_000)];
    prop_oneof![
        6 => proptest::collection::vec(length, 1..5).prop_map(Step::Append),
        3 => proptest::collection::vec(any::<prop::sample::Index>(), 1..8).prop_map(Step::Delete),
        2 => Just(Step::Snapshot),
        3 => Just(Step::Work),
        2 => (0_u64..60, any::<bool>()).prop_map(|(changes, power)| Step::Crash { changes, power }),
        1 => any::<bool>().prop_map(Step::DiskFull),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]
    #[test]
    fn payloads_survive_any_sequence_of_changes_and_crashes(
        steps in proptest::collection::vec(step(), 1..40),
        seed in any::<u64>(),
    ) {
        let mut world = World::new(SimDisk::new(seed));
        world.open().unwrap();
        let mut crash = false;
        for step in steps {
            match step {
                Step::Append(lengths) => {
                    let _ = world.append(&lengths);
                }
                Step::Delete(picks) if !world.expected.is_empty() => {
                    let ids: Vec<MemoryId> = world.expected.keys().copied().collect();
                    let mut picked: Vec<MemoryId> = picks.iter().map(|pick| *pick.get(&ids)).collect();
                    picked.sort_unstable();
                    picked.dedup();
                    let _ = world.delete(&picked);
                }
                Step::Snapshot => {
                    let _ = world.snapshot();
                }
                Step::Work => world.work(2),
                Step::DiskFull(true) => world.disk.set_capacity(Some(200 << 10)),
                Step::DiskFull(false) => world.disk.set_capacity(None),
                Step::Crash { changes, power } => {
                    world.disk.set_capacity(None);
                    world.disk.stop_after(changes);
                    let _ = world.append(&[1_000, 2_000]);
                    let _ = world.snapshot();
                    world.work(2);
                    world.store = None;
                    if power { world.disk.lose_power() } else { world.disk.kill() }
                    let recovery = world.open().unwrap();
                    prop_assert!(recovery.corrupt.is_empty(), "{:?}", recovery);
                    crash = true;
                }
                Step::Delete(_) => {}
            }
            if crash {
                world.check();
                crash = false;
            }
        }
        world.disk.set_capacity(None);
        world.store = None;
        world.disk.lose_power();
        world.open().unwrap();
        world.check();
    }
}

#[test]
fn snapshots_refer_to_payloads_and_sparse_segments_are_compacted_and_removed() {
    let mut world = World::new(SimDisk::new(1));
    world.open().unwrap();
    let mut appended = 0;
    for _ in 0..40 {
        world.append(&[1_200, 1_200, 1_200]).unwrap();
        appended += 3_600;
    }
    world.snapshot().unwrap();
    let snapshot = |world: &World| {
        let lsns = &snapshot_file::list(&world.disk).unwrap()[&P];
        world.disk.bytes(&snapshot_file::name(P, lsns[0])).len()
    };
    assert!(snapshot(&world) < appended / 10, "{} bytes for {appended}", snapshot(&world));
    let full = world.segments().len();
    assert!(full > 25, "{full} segments");
    // Every fourth item remains: no segment is free, and most are sparse.
    let mut ids: Vec<MemoryId> = world.expected.keys().copied().collect();
    ids.sort_unstable_by_key(|id| position_of(*id));
    let removed: Vec<MemoryId> = ids.into_iter().enumerate().filter(|(at, _)| at % 4 != 0).map(|(_, id)| id).collect();
    world.delete(&removed).unwrap();
    world.work(60);
    assert!(world.store().partitions().arena.payloads.usage().compacted_bytes > 20_000);
    assert!(world.segments().len() >= full, "kept snapshots still refer to them");
    world.check();
    for _ in 0..3 {
        world.append(&[100]).unwrap();
        world.snapshot().unwrap();
    }
    let left = world.segments().len();
    assert!(left < full / 2, "{left} of {full} segments remain");
    world.check();
    world.store = None;
    world.disk.lose_power();
    world.open().unwrap();
    world.check();
}

/// Opens a store of ten items, one of which has a flipped bit in its payload.
fn world_with_a_damaged_payload() -> World {
    let mut world = World::new(SimDisk::new(1));
    world.open().unwrap();
    (0..10).for_each(|_| world.append(&[1_500]).unwrap());
    world.snapshot().unwrap();
    world.store = None;
    world.open().unwrap();
    world.disk.flip_bit(&world.segments()[0].clone(), 8 * 900);
    world
}

#[test]
fn a_damaged_payload_is_never_returned_and_is_found_by_scrubbing() {
    let mut world = world_with_a_damaged_payload();
    world.work(30);
    let stats = world.store().stats();
    assert_eq!(stats.damaged_payloads, 1);
    assert!(stats.damage.unwrap().contains("payload checksum mismatch"));
    let mut errors = Vec::new();
    for (id, payload) in world.expected.clone() {
        match world.store().partitions().get(id) {
            Ok(memory) => assert_eq!(memory.unwrap().payload, payload),
            Err(error) => errors.push(error.to_string()),
        }
    }
    assert!(errors.len() == 1 && errors[0].contains("payload checksum mismatch"), "{errors:?}");
    // A backup would be incomplete.
    let target = Arc::new(SimDisk::new(2));
    let failed = Arc::new(Mutex::new(None));
    let slot = Arc::clone(&failed);
    world.store().snapshot_all(Some(target), move |written| *slot.lock() = written.err());
    world.work(1);
    assert!(failed.lock().take().unwrap().to_string().contains("payload checksum mismatch"));
}

#[test]
fn a_damaged_payload_stops_nothing_but_reads_of_its_item() {
    let mut world = world_with_a_damaged_payload();
    let ids: Vec<MemoryId> = world.expected.keys().copied().collect();
    // The content hash of an item covers its payload, so the features of the damaged one are set without it.
    let features: Vec<u8> = ids.iter().flat_map(|_| [0, 0x3C, 0, 0x40]).collect();
    let (weights, groups) = (Vec::new(), Vec::new());
    let upsert = Upsert { ids: ids.clone(), weights, groups, keys: None, features, payloads: None };
    let answered = Arc::new(Mutex::new(false));
    let slot = Arc::clone(&answered);
    let record = Record::bare(Command::Upsert(upsert));
    world.store().write(vec![(P, record)], move |answers| *slot.lock() = answers.iter().all(Result::is_ok));
    world.store().turn().unwrap();
    assert!(*answered.lock());
    let weights = vec![7; ids.len()];
    match world.write(BufferCommand::SetWeights { buffer: buffer(), ids, weights }) {
        Some(Reply::Applied(outcome)) => assert_eq!((outcome.applied, outcome.rejected), (10, 0)),
        other => panic!("{other:?}"),
    }
    world.append(&[100]).unwrap();
    world.work(30);
    let mut damaged = Vec::new();
    for (id, payload) in world.expected.clone() {
        match world.store().partitions().get(id) {
            Ok(memory) => assert_eq!(memory.unwrap().payload, payload),
            Err(error) => damaged.push((id, error.to_string())),
        }
    }
    let [(id, text)] = &damaged[..] else { panic!("{damaged:?}") };
    assert!(text.contains(&format!("item {id}:")) && text.contains("payload checksum mismatch"), "{text}");
    // Counted once, however often it is read and scrubbed, and named.
    let stats = world.store().stats();
    assert_eq!(stats.damaged_payloads, 1);
    assert!(stats.damage.unwrap().contains("payload checksum mismatch"));
    // It is listed with its version, and can be deleted.
    let head = crate::PayloadPart::Start(engram_replay::item::MAX_HEAD_BYTES as u32);
    let mut versions = Vec::new();
    let each = |memory: crate::Memory<'_>| versions.push(Head::decode(memory.payload).unwrap().0.version);
    world.store().partitions().scan_parts(P, None, u32::MAX, head, each).unwrap();
    versions.sort_unstable();
    assert_eq!(versions, (1..=11).collect::<Vec<u64>>());
    world.delete(&[*id]).unwrap();
    world.check();
    world.store = None;
    world.open().unwrap();
    world.check();
}

#[test]
fn a_missing_segment_makes_the_partition_corrupt() {
    let mut world = World::new(SimDisk::new(1));
    world.open().unwrap();
    (0..6).for_each(|_| world.append(&[1_500]).unwrap());
    world.snapshot().unwrap();
    world.append(&[10]).unwrap();
    world.snapshot().unwrap();
    world.store = None;
    world.disk.kill();
    world.disk.remove(&world.segments()[0].clone()).unwrap();
    let disk = Arc::new(world.disk.clone());
    let (_, recovery) = Store::open(disk, world.clock.clone(), Box::new(Cpu::new(1)), options()).unwrap();
    assert_eq!(recovery.corrupt.len(), 1, "{recovery:?}");
    assert!(recovery.corrupt[0].1.contains("payload segment"), "{recovery:?}");
}

#[test]
fn a_backup_has_all_payloads_and_restores_into_an_empty_store() {
    let mut world = World::new(SimDisk::new(1));
    world.open().unwrap();
    world.append(&[3 << 20, 0, 17]).unwrap();
    world.append(&[(1 << 20) - 18, 5, 2 << 20]).unwrap();
    let target = SimDisk::new(2);
    world.store().snapshot_all(Some(Arc::new(target.clone())), |written| assert!(written.is_ok()));
    world.work(2);
    let empty = SimDisk::new(3);
    let disk: Arc<dyn crate::Disk> = Arc::new(empty.clone());
    restore::install(&disk, ClusterId(7), options().shape, &target, |_| true).unwrap();
    let mut restored = World { expected: world.expected.clone(), ..World::new(empty) };
    restored.open().unwrap();
    restored.check();
    assert_eq!(restored.store().partitions().digest().unwrap(), world.store().partitions().digest().unwrap());
    // Its own snapshots refer to its own segments, and only a backup can be restored.
    restored.snapshot().unwrap();
    restored.store = None;
    restored.open().unwrap();
    restored.check();
    let other: Arc<dyn crate::Disk> = Arc::new(SimDisk::new(4));
    let refused = restore::install(&other, ClusterId(7), options().shape, &restored.disk, |_| true).unwrap_err();
    assert!(refused.to_string().contains("restore from a backup"), "{refused}");
}

/// Fills a store, so that payloads exceed the cache, and reads as many at random. Returns the most bytes of memory that the
/// partitions used.
fn fill_and_read(total: u64, item: usize, cache: u64) -> u64 {
    let folder = tempfile::tempdir().unwrap();
    let shape = Shape { partitions: 1, law: Law::Linear, features: FeatureShape::NONE };
    let mut options = Options::new(ClusterId(7), shape, Settings::default());
    options.wal.durability = crate::Durability::Replicated;
    options.payload_cache_bytes = cache;
    let disk = Arc::new(crate::FileDisk::new(folder.path()).unwrap());
    let clock = Arc::new(ManualClock::new(1_000_000));
    let (mut store, _) = Store::open(disk, clock, Box::new(Cpu::new(1)), options).unwrap();
    store.activate(vec![(P, Term(1))], |_| {});
    store.turn().unwrap();
    let write = |store: &mut Store, command| {
        let answer = Arc::new(Mutex::new(None));
        let slot = Arc::clone(&answer);
        store.write(vec![(P, Record::bare(Command::Buffer(command)))], move |mut it| *slot.lock() = it.pop());
        store.turn().unwrap();
        let answer = answer.lock().take();
        answer.unwrap().unwrap().reply.into_result().unwrap()
    };
    let limits = Limits { capacity: 1 << 30, share: 1 << 30, remover: Remover::Refuse, max_reuse: 0 };
    write(&mut store, BufferCommand::Define { group: None, name: "b".into(), definition: b"d".to_vec(), limits });
    let (items, mut handles_of, mut most) = (total / item as u64, Vec::new(), 0);
    for first in (0..items).step_by(16) {
        let payloads: Vec<Vec<u8>> = (first..items.min(first + 16)).map(|seed| payload(seed, item)).collect();
        let (weights, payloads) = (vec![1; payloads.len()], payloads.iter().collect::<Blobs>());
        let count = weights.len() as u64;
        let append = BufferCommand::Append { buffer: buffer(), from: 0, weights, payloads };
        handles_of.extend(handles(write(&mut store, append).first.unwrap(), count, 1));
        most = most.max(store.partitions().bytes());
    }
    for read in 0..items {
        let seed = mix64(read) % items;
        let id = handles_of[seed as usize];
        let found = store.partitions().get(id).unwrap().unwrap();
        assert!(found.payload == payload(seed, item), "item {seed}");
        most = most.max(store.partitions().bytes());
    }
    assert!(store.stats().payload_disk_bytes >= total && store.stats().payload_live_bytes >= total);
    most
}

#[test]
fn payloads_of_64_mib_need_a_cache_of_4_mib() {
    let most = fill_and_read(64 << 20, 32 << 10, 4 << 20);
    assert!(most < 7 << 20, "{most} bytes");
}

#[test]
#[ignore = "full: writes and reads 5 GB"]
fn payloads_of_5_gb_need_128_mib_of_memory() {
    let most = fill_and_read(5_000_000_000, 64 << 10, 64 << 20);
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    let peak_kib: u64 = peak.trim().trim_end_matches(" kB").parse().unwrap();
    println!("{} MiB in partitions, {} MiB resident at most", most >> 20, peak_kib >> 10);
    assert!(most < 80 << 20, "{most} bytes in partitions");
    assert!(peak_kib < 128 << 10, "{peak_kib} KiB resident");
}
