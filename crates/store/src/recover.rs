//! Opens a store: identity, newest whole snapshots, then the log behind them.
//!
//! What is damaged of one partition refuses that partition, by name, and leaves the others; damage to the log itself, which
//! all of them share, refuses the start.

use crate::content::{Column, Import};
use crate::partitions::Partitions;
use crate::replication;
use crate::ship::Shipping;
use crate::snapshot_file::{self, LEDGER, SnapshotReader};
use crate::store::{Mark, Options, Pending, Place, Store};
use crate::wal::{self, Body, Entry, Tail, Wal, Writer};
use crate::{Clock, Disk, Error, FileHead, Identity, ImportError};
use engram_cluster::replica::{Defect, History, is_planted};
use engram_kernels::Device;
use engram_memory::codec::decode_record;
use engram_memory::{Digest, Incarnation, Lsn, Member, PartitionId, Record, Settings, Term};
use std::collections::{BTreeMap, VecDeque};
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
    pub(crate) shipping: Shipping,
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
        let mut identity = Identity::open(&disk, options.cluster, options.shape, options.origin)?;
        options.wal.sealed_at = identity.durable_end();
        options.wal.copies = options.replication.copies;
        let head = identity.head();
        let mut replay = Replay::new(Partitions::new(device, options.shape), &options.replication);
        replay.load_snapshots(&*disk, &head)?;
        let log = Arc::clone(&disk);
        let (mut wal, writer, recovered) =
            Wal::open_with(log, head, options.wal, &mut |entry, commits| replay.entry(entry, commits))?;
        replay.flush()?;
        replay.settle_rejected(&*disk)?;
        let Replay { partitions, founds, mut recovery, shipping, .. } = replay;
        recovery.lost_nothing = identity.lost_nothing(&recovered);
        recovery.log = recovered;
        recovery.partitions = partitions.iter().count() as u64;
        recovery.memories = partitions.memories();
        let keeps_all = replication::rules(&options).keeps_all;
        let lossless_since = identity.settle_lossless(&disk, recovery.lost_nothing || keeps_all)?;
        // A snapshot outlives the log's last batch when that one was damaged, and a copy outlives a crash before the log names it: the
        // log then goes on behind the snapshot.
        let mut moved = Vec::new();
        for (partition, found) in founds.iter().enumerate().filter(|(_, found)| found.history.end() > Lsn(0)) {
            let (lsn, term) = found.history.last();
            let (partition, tail) = (PartitionId(partition as u32), Tail { lsn, term });
            wal.continue_after(partition, tail);
            if found.corrupt.is_none() && wal.tail(partition).is_some_and(|tail| tail.lsn != lsn) {
                moved.push((partition, tail));
            }
        }
        let ordinal = options.replication.ordinal;
        let member = Member { ordinal, store: identity.store(), incarnation: identity.incarnation() };
        let place = |found: Found| found.into_place(member, &options, lossless_since);
        let places = founds.into_iter().map(place).collect();
        let recovered = Recovered { partitions, places, wal, writer, shipping };
        let mut store = Self::assemble(disk, clock, options, identity, recovered);
        for (partition, tail) in moved {
            store.log_installed(Mark::Other(partition), tail.term, tail.lsn)?;
        }
        // What other copies make whole begins anew, and is known not to be whole until then.
        let replicated = store.options.replication.copies > 1;
        for (partition, what) in recovery.corrupt.iter().filter(|_| replicated) {
            store.log_installed(Mark::Other(*partition), Term(0), Lsn(0))?;
            store.note(*partition, what)?;
        }
        Ok((store, recovery))
    }
}

/// What was found of one partition.
#[derive(Default)]
struct Found {
    corrupt: Option<String>,
    /// A start before found it damaged, and it was not whole again.
    noted: Option<String>,
    promised: Term,
    /// Of the whole log here.
    history: History,
    /// What is in the state, or on its way there.
    applied: Lsn,
    applied_term: Term,
    /// Logged, and not known to be committed.
    pending: VecDeque<Pending>,
    snapshots: [Option<Lsn>; 2],
}

impl Found {
    fn into_place(self, member: Member, options: &Options, lossless_since: Incarnation) -> Place {
        let Self { corrupt, noted, promised, history, applied, applied_term, pending, snapshots } = self;
        let wrote = history.last();
        let creates = pending.iter().map(|pending| pending.record.command.may_create() as u64).sum();
        let remembers = !is_planted(Defect::ForgetLeaseGrant);
        let granted = options.replication.copies > 1 && member.incarnation > Incarnation(1) && remembers;
        let replica = replication::found(member, options, lossless_since, promised, (history, applied), granted);
        Place {
            replica,
            corrupt: corrupt.or(noted.filter(|_| !is_planted(Defect::ForgetDamage))),
            applied,
            applied_term,
            pending,
            creates,
            wrote,
            activations: Vec::new(),
            marked: Default::default(),
            served_since_ms: None,
            // Until a primary says what it holds.
            whole_at: Lsn(u64::MAX),
            snapshots,
            damaged: Vec::new(),
        }
    }
}

/// The state under recovery.
struct Replay {
    partitions: Partitions,
    founds: Vec<Found>,
    recovery: Recovery,
    /// Damaged snapshots.
    rejected: Vec<(PartitionId, Lsn)>,
    records: Vec<(PartitionId, Record)>,
    bytes: usize,
    /// With one copy whatever is in the log is committed.
    alone: bool,
    shipping: Shipping,
}

impl Replay {
    fn new(partitions: Partitions, replication: &replication::Options) -> Self {
        let founds = (0..partitions.shape().partitions).map(|_| Found::default()).collect();
        let alone = replication.copies <= 1;
        let shipping = Shipping::new(if alone { 0 } else { replication.kept_bytes });
        let recovery = Recovery::default();
        Self { partitions, founds, recovery, rejected: Vec::new(), records: Vec::new(), bytes: 0, alone, shipping }
    }

    fn load_snapshots(&mut self, disk: &dyn Disk, head: &FileHead) -> Result<(), Error> {
        for (partition, lsns) in snapshot_file::list(disk)? {
            if self.founds.get(partition.0 as usize).is_none() {
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
            let found = &mut self.founds[partition.0 as usize];
            found.applied = snapshot.lsn;
            self.shipping.applied(partition, snapshot.lsn);
            found.applied_term = snapshot.term;
            found.promised = snapshot.term;
            found.history = History::from_floor(snapshot.lsn, snapshot.term);
            let older = lsns.iter().copied().find(|lsn| *lsn < snapshot.lsn);
            found.snapshots = [Some(snapshot.lsn), older];
        }
        Ok(())
    }

    fn entry(&mut self, entry: Entry<'_>, commits: &BTreeMap<PartitionId, (Term, Lsn)>) -> Result<(), Error> {
        let Some(found) = self.founds.get_mut(entry.partition.0 as usize) else { return Ok(()) };
        if !is_planted(Defect::ForgetPromise) {
            found.promised = found.promised.max(entry.term);
        }
        if let Body::Note(what) = entry.body {
            found.noted = (!what.is_empty()).then(|| String::from_utf8_lossy(what).into_owned());
        }
        if found.corrupt.is_some() {
            return Ok(());
        }
        match entry.body {
            Body::Command(bytes) if entry.lsn > found.history.floor().0 => self.command(&entry, bytes, commits),
            Body::Installed if entry.lsn > found.applied => {
                let what = format!("the snapshot at lsn {} that the log names is not there", entry.lsn);
                self.damage(entry.partition, what);
                Ok(())
            }
            _ => Ok(()),
        }
    }

    fn command(
        &mut self,
        entry: &Entry<'_>,
        bytes: &[u8],
        commits: &BTreeMap<PartitionId, (Term, Lsn)>,
    ) -> Result<(), Error> {
        let Entry { partition, term, lsn, .. } = *entry;
        let found = &mut self.founds[partition.0 as usize];
        let (end, last_term) = found.history.last();
        if term < last_term {
            // What a copy of the state replaced, before the log could say so.
            return Ok(());
        }
        if lsn.0 != end.0 + 1 {
            let what = format!("the log goes on at lsn {lsn}, what is known ends at {end}");
            self.damage(partition, what);
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
                self.damage(partition, format!("record {lsn} of the log: {what}"));
                return Ok(());
            }
        };
        found.history.append(lsn, term);
        self.shipping.keep(partition, lsn, term, bytes);
        let committed = self.alone || commits.get(&partition).is_some_and(|(_, commit)| lsn <= *commit);
        if !committed {
            found.pending.push_back(Pending { lsn, term, record, waiters: Vec::new() });
            return Ok(());
        }
        (found.applied, found.applied_term) = (lsn, term);
        self.shipping.applied(partition, lsn);
        if !self.partitions.contains(partition) {
            self.partitions.open(partition, Settings::default());
        }
        self.records.push((partition, record));
        self.bytes += bytes.len();
        if self.records.len() >= REPLAY_RECORDS || self.bytes >= REPLAY_BYTES {
            self.flush()?;
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
            let found = &self.founds[partition.0 as usize];
            if found.corrupt.is_some() {
                continue;
            }
            if found.applied < lsn {
                let what = format!("the snapshot at lsn {lsn} is damaged, and the log ends at {}", found.applied);
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
        let found = &mut self.founds[partition.0 as usize];
        let (promised, snapshots) = (found.promised, found.snapshots);
        *found = Found { corrupt: Some(what.clone()), promised, snapshots, ..Found::default() };
        self.recovery.corrupt.push((partition, what));
    }
}

/// Why a snapshot was not loaded.
pub(crate) enum LoadError {
    Import(ImportError),
    File(Error),
}

/// Loads a snapshot whose every byte was checked.
pub(crate) fn load(partitions: &mut Partitions, reader: &SnapshotReader) -> Result<(), LoadError> {
    let head = reader.head();
    let ledger = reader.ledger().map_err(LoadError::File)?;
    let ids = reader.chunks().iter().filter(|chunk| chunk.kind == Column::Ids.code());
    let id_bytes = ids.map(|chunk| u64::from(chunk.bytes)).sum();
    let begun = Import::begin(partitions, head.partition, head.memories, id_bytes, head.clock, &ledger);
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
