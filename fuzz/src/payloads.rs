//! Payload segments: a store whose segments are damaged in any way returns the payloads that were written, or errors.

use crate::input::Input;
use crate::world;
use engram_memory::buffer::{Buffer, BufferRef, Limits, Remover};
use engram_memory::{Blobs, BufferCommand, Command, Group, MemoryId, Record, Term};
use engram_store::{Disk as _, SimDisk, Store};
use std::collections::BTreeMap;
use std::sync::LazyLock;

/// Most changes of an input.
const MAX_CHANGES: usize = 8;

/// A disk with items, and their payloads.
struct World {
    disk: SimDisk,
    payloads: BTreeMap<MemoryId, Vec<u8>>,
}

static WORLD: LazyLock<World> = LazyLock::new(|| {
    let disk = world::disk();
    let (mut store, _) = world::open(&disk, 1).expect("the disk can be opened");
    let term = Term(store.promised(world::P).0 + 1);
    store.activate(vec![(world::P, term)], |_| {});
    store.turn().expect("the disk does not fail");
    let limits = Limits { capacity: 100, share: 100, remover: Remover::Fifo, max_reuse: 0 };
    write(&mut store, BufferCommand::Define { group: None, name: "b".into(), definition: b"d".to_vec(), limits });
    let stamp = Buffer { definition: b"d".to_vec(), ..Buffer::default() }.stamp();
    let payloads: Blobs = (0..6_u8).map(|byte| vec![byte; 40 << byte]).collect();
    let buffer = BufferRef { group: Group(255), stamp };
    write(&mut store, BufferCommand::Append { buffer, from: 0, weights: vec![1; 6], payloads });
    store.snapshot_all(None, |written| assert!(written.is_ok()));
    store.turn().expect("the disk does not fail");
    let payloads = payloads_of(&mut store);
    assert_eq!(payloads.len(), 6);
    drop(store);
    disk.kill();
    World { disk, payloads }
});

fn write(store: &mut Store, command: BufferCommand) {
    let record = Record::bare(Command::Buffer(command));
    store.write(vec![(world::P, record)], |answers| assert!(answers.iter().all(Result::is_ok)));
    store.turn().expect("the disk does not fail");
}

fn payloads_of(store: &mut Store) -> BTreeMap<MemoryId, Vec<u8>> {
    let mut payloads = BTreeMap::new();
    let scanned = store.partitions().scan(world::P, None, u32::MAX, |memory| {
        payloads.insert(memory.id, memory.payload.to_vec());
    });
    scanned.expect("the device does not fail");
    payloads
}

/// The input lists changes of the segments: kind, and what it needs.
pub(crate) fn segment(bytes: &[u8]) {
    let (disk, mut input) = (WORLD.disk.fork(3), Input(bytes));
    for _ in 0..MAX_CHANGES {
        if input.is_empty() {
            break;
        }
        change(&disk, &mut input);
    }
    let (mut store, recovery) = match world::open(&disk, 1) {
        Ok(opened) => opened,
        Err(error) => return assert!(!error.to_string().is_empty()),
    };
    for (id, payload) in &WORLD.payloads {
        match store.partitions().get(*id) {
            Ok(Some(memory)) => assert_eq!(memory.payload, payload, "a damaged payload was returned"),
            Ok(None) => assert!(!recovery.corrupt.is_empty(), "an item is lost without a report"),
            Err(error) => assert!(!error.to_string().is_empty()),
        }
    }
    store.turn().expect("the disk does not fail");
}

fn change(disk: &SimDisk, input: &mut Input<'_>) {
    let (kind, at) = (input.u8(), input.u32() as usize);
    let names = disk.list().expect("the disk does not fail");
    let Some(name) = names.iter().find(|name| name.starts_with("payload-")) else { return };
    let mut file = disk.bytes(name);
    match kind % 5 {
        0 if !file.is_empty() => {
            let bit = at % (8 * file.len());
            file[bit / 8] ^= 1 << (bit % 8);
        }
        1 => file.truncate(at % (file.len() + 1)),
        2 => file.extend_from_slice(input.bytes()),
        3 => file = input.bytes().to_vec(),
        4 => return disk.remove(name).expect("the disk does not fail"),
        _ => return,
    }
    disk.put(name, &file);
}
