//! Opens a store: identity, newest whole snapshots, then the log behind them.
//!
//! What is damaged of one partition refuses that partition, by name, and leaves the others; damage to the log itself, which
//! all of them share, refuses the start.

use crate::content::{Column, Import};
use crate::partitions::Partitions;
use crate::snapshot_file::{self, LEDGER, SnapshotReader};
use crate::store::{Options, Place, State, Store};
use crate::wal::{self, Body, Entry, Tail, Wal, Writer};
use crate::{Clock, Disk, Error, FileHead, Identity, ImportError};
use engram_kernels::Device;
use engram_memory::codec::decode_record;
use engram_memory::{Digest, Lsn, PartitionId, Record, Settings};
use std::sync::Arc;

/// Records replayed at once: enough to fill the passes of a device, few enough to stay small.
const REPLAY_RECORDS: usize = 4_096;
/// Bytes of records replayed at once.
const REPLAY_BYTES: usize = 16 << 20;

/// What was found at the start.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Recovery {
    /// Of the log.
    pub log: wal::Recovery,
    /// Partitions with data.
    pub partitions: u64,
    /// Their memories.
    pub memories: u64,
    /// Records applied from the log.
    pub replayed: u64,
    /// Damaged snapshots that an older one and the log stood in for.
    pub passed_over: Vec<(PartitionId, String)>,
    /// Partitions that are not served, and why.
    pub corrupt: Vec<(PartitionId, String)>,
    /// Whether nothing that the process before had written can be missing.
    pub lost_nothing: bool,
}

/// What an opened store is made of.
pub(crate) struct Recovered {
    pub(crate) partitions: Partitions,
    pub(crate) places: Vec<Place>,
    pub(crate) wal: Wal,
    pub(crate) writer: Writer,
}

impl Store {
    /// Opens the store of a folder, an empty one the first time; nothing is served before [`Store::activate`].
    ///
    /// # Errors
    /// Another cluster, store, shape or format; another process in the folder; a damaged log; those of the disk and the device.
    pub fn open(
        disk: Arc<dyn Disk>,
        clock: Arc<dyn Clock>,
        device: Box<dyn Device>,
        mut options: Options,
    ) -> Result<(Self, Recovery), Error> {
        let identity = Identity::open(&disk, options.cluster, options.shape, options.origin)?;
        options.wal.sealed_at = identity.durable_end();
        let head = identity.head();
        let mut replay = Replay::new(Partitions::new(device, options.shape));
        replay.load_snapshots(&*disk, &head)?;
        let log = Arc::clone(&disk);
        let (mut wal, writer, recovered) = Wal::open(log, head, options.wal, &mut |entry| replay.entry(entry))?;
        replay.flush()?;
        replay.settle_rejected(&*disk)?;
        let Replay { partitions, places, mut recovery, .. } = replay;
        recovery.lost_nothing = identity.lost_nothing(&recovered);
        recovery.log = recovered;
        recovery.partitions = partitions.iter().count() as u64;
        recovery.memories = partitions.memories();
        // A snapshot outlives the log's last batch when that one was damaged: the log then goes on behind the snapshot.
        let mut ahead = Vec::new();
        for (partition, place) in places.iter().enumerate().filter(|(_, place)| place.applied > Lsn(0)) {
            let (partition, tail) =
                (PartitionId(partition as u32), Tail { lsn: place.applied, term: place.applied_term });
            wal.continue_after(partition, tail);
            if wal.tail(partition).is_some_and(|tail| tail.lsn < place.applied) {
                ahead.push((partition, tail));
            }
        }
        let recovered = Recovered { partitions, places, wal, writer };
        let mut store = Self::assemble(disk, clock, options, identity, recovered);
        for (partition, tail) in ahead {
            store.installed(partition, tail.term, tail.lsn)?;
        }
        Ok((store, recovery))
    }
}

/// The state under recovery.
struct Replay {
    partitions: Partitions,
    places: Vec<Place>,
    recovery: Recovery,
    /// Damaged snapshots.
    rejected: Vec<(PartitionId, Lsn)>,
    records: Vec<(PartitionId, Record)>,
    bytes: usize,
}

impl Replay {
    fn new(partitions: Partitions) -> Self {
        let places = vec![Place::default(); partitions.shape().partitions as usize];
        Self { partitions, places, recovery: Recovery::default(), rejected: Vec::new(), records: Vec::new(), bytes: 0 }
    }

    fn load_snapshots(&mut self, disk: &dyn Disk, head: &FileHead) -> Result<(), Error> {
        for (partition, lsns) in snapshot_file::list(disk)? {
            if self.places.get(partition.0 as usize).is_none() {
                continue;
            }
            let (newest, rejected) = snapshot_file::newest_valid(disk, head, partition)?;
            for rejected in rejected {
                self.recovery.passed_over.push((partition, rejected.error.to_string()));
                self.rejected.push((partition, rejected.lsn));
            }
            // Without a whole one the log may still reach back to the first record.
            let Some(reader) = newest else { continue };
            match load(&mut self.partitions, &reader) {
                Ok(()) => {}
                Err(LoadError::Import(ImportError::Device(error))) => return Err(error.into()),
                Err(LoadError::Import(error)) => {
                    self.damage(partition, error.to_string());
                    continue;
                }
                Err(LoadError::File(error)) => return Err(error),
            }
            let snapshot = reader.head();
            let place = &mut self.places[partition.0 as usize];
            place.applied = snapshot.lsn;
            place.applied_term = snapshot.term;
            place.promised = snapshot.term;
            let older = lsns.iter().copied().find(|lsn| *lsn < snapshot.lsn);
            place.snapshots = [Some(snapshot.lsn), older];
        }
        Ok(())
    }

    fn entry(&mut self, entry: Entry<'_>) -> Result<(), Error> {
        let Some(place) = self.places.get_mut(entry.partition.0 as usize) else { return Ok(()) };
        place.promised = place.promised.max(entry.term);
        if matches!(place.state, State::Corrupt(_)) {
            return Ok(());
        }
        match entry.body {
            Body::Command(bytes) if entry.lsn > place.applied => {
                if entry.lsn.0 != place.applied.0 + 1 {
                    let what = format!("the log goes on at lsn {}, the snapshot ends at {}", entry.lsn, place.applied);
                    self.damage(entry.partition, what);
                    return Ok(());
                }
                let checked = decode_record(bytes).map_err(|error| error.to_string()).and_then(|record| {
                    let shape = self.partitions.features();
                    record.command.check_features(shape).map_err(|refusal| refusal.to_string())?;
                    Ok(record)
                });
                let record = match checked {
                    Ok(record) => record,
                    Err(what) => {
                        self.damage(entry.partition, format!("record {} of the log: {what}", entry.lsn));
                        return Ok(());
                    }
                };
                place.applied = entry.lsn;
                place.applied_term = entry.term;
                if !self.partitions.contains(entry.partition) {
                    self.partitions.open(entry.partition, Settings::default());
                }
                self.records.push((entry.partition, record));
                self.bytes += bytes.len();
                if self.records.len() >= REPLAY_RECORDS || self.bytes >= REPLAY_BYTES {
                    self.flush()?;
                }
            }
            Body::Installed if entry.lsn > place.applied => {
                let what = format!("the snapshot at lsn {} that the log names is not there", entry.lsn);
                self.damage(entry.partition, what);
            }
            _ => {}
        }
        Ok(())
    }

    fn flush(&mut self) -> Result<(), Error> {
        self.records.retain(|(partition, _)| self.partitions.contains(*partition));
        self.recovery.replayed += self.records.len() as u64;
        self.partitions.apply_batch(&self.records)?;
        self.records.clear();
        self.bytes = 0;
        Ok(())
    }

    /// Refuses partitions that did not get as far as a damaged snapshot had; removes the damaged ones of the others, so that
    /// they do not count as a generation.
    fn settle_rejected(&mut self, disk: &dyn Disk) -> Result<(), Error> {
        for (partition, lsn) in std::mem::take(&mut self.rejected) {
            let place = &self.places[partition.0 as usize];
            if matches!(place.state, State::Corrupt(_)) {
                continue;
            }
            if place.applied < lsn {
                let what = format!("the snapshot at lsn {lsn} is damaged, and the log ends at {}", place.applied);
                self.damage(partition, what);
                continue;
            }
            let name = snapshot_file::name(partition, lsn);
            disk.remove(&name).map_err(|source| Error::Io {
                operation: "remove",
                path: disk.describe(&name),
                source,
            })?;
        }
        Ok(())
    }

    fn damage(&mut self, partition: PartitionId, what: String) {
        self.partitions.close(partition);
        let place = &mut self.places[partition.0 as usize];
        let (promised, snapshots) = (place.promised, place.snapshots);
        *place = Place { state: State::Corrupt(what.clone()), promised, snapshots, ..Place::default() };
        self.recovery.corrupt.push((partition, what));
    }
}

/// Why a snapshot was not loaded.
enum LoadError {
    Import(ImportError),
    File(Error),
}

/// Loads a snapshot whose every byte was checked.
fn load(partitions: &mut Partitions, reader: &SnapshotReader) -> Result<(), LoadError> {
    let head = reader.head();
    let ledger = reader.ledger().map_err(LoadError::File)?;
    let begun = Import::begin(partitions, head.partition, head.memories, head.clock, &ledger);
    let mut import = begun.map_err(LoadError::Import)?;
    let mut bytes = Vec::new();
    for chunk in reader.chunks().iter().filter(|chunk| chunk.kind != LEDGER) {
        reader.read(chunk, &mut bytes).map_err(LoadError::File)?;
        let unknown = ImportError::Invalid("a column that this version does not know");
        let column = Column::from_code(chunk.kind).ok_or(unknown).map_err(LoadError::Import)?;
        import.chunk(column, &bytes).map_err(LoadError::Import)?;
    }
    import.finish(Digest(head.digest)).map_err(LoadError::Import)
}
