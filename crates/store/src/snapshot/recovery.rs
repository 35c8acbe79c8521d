//! Recovers a store: identity, newest valid snapshots, then the log after them.
//!
//! Damage to one partition makes only that partition unavailable; damage to the log, which all partitions share, fails the start.

use super::file::{self as snapshot_file, LEDGER, SnapshotReader};
use crate::context::Context;
use crate::payload::{PayloadOptions, Payloads};
use crate::replication;
use crate::replication::shipping::Shipping;
use crate::state::content::Column;
use crate::state::import::Import;
use crate::state::partitions::Partitions;
use crate::state::{PartitionState, Pending, RecoveredState};
use crate::wal::{self, Body, Entry, Tail, Wal, Writer};
use crate::{Clock, Disk, Error, FileHead, Identity, ImportError, Options};
use engram_cluster::injected;
use engram_cluster::replica::History;
use engram_kernels::Device;
use engram_memory::codec::decode_record;
use engram_memory::{Digest, Incarnation, Lsn, PartitionId, Record, Settings, Term};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

/// Records replayed at once: enough to fill the passes of a device, few enough to stay small.
const REPLAY_RECORDS: usize = 4_096;
/// Bytes of records replayed at once.
const REPLAY_BYTES: usize = 16 << 20;

/// Result of recovery.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Recovery {
    /// Recovery of the log.
    pub log: wal::Recovery,
    /// Partitions with data.
    pub partitions: u64,
    /// Memories in them.
    pub memories: u64,
    /// Records applied from the log.
    pub replayed: u64,
    /// Damaged snapshots that were replaced by an older one and the log.
    pub skipped_snapshots: Vec<(PartitionId, String)>,
    /// Corrupt partitions, with the reason.
    pub corrupt: Vec<(PartitionId, String)>,
    /// Whether nothing written by the previous process can be missing.
    pub lossless: bool,
    /// Whether the disk is full: reads are served, and writes fail until there is space.
    pub disk_full: bool,
}

/// Parts of a recovered store.
pub(crate) struct RecoveredStore {
    pub(crate) context: Arc<Context>,
    pub(crate) identity: Identity,
    pub(crate) partitions: Partitions,
    pub(crate) states: Vec<PartitionState>,
    pub(crate) wal: Wal,
    pub(crate) writer: Writer,
    pub(crate) shipping: Shipping,
    /// Partitions whose snapshot is newer than the log: the last batch was damaged, or a crash came before the log named an installed state.
    /// The log continues after the snapshot.
    pub(crate) ahead_of_log: Vec<(PartitionId, Tail)>,
}

/// Recovers the store of a directory, empty at first start.
///
/// # Errors
/// Another cluster, store, shape or format; a locked directory; a damaged log; those of the disk and the device.
pub(crate) fn recover(
    disk: Arc<dyn Disk>,
    clock: Arc<dyn Clock>,
    device: Box<dyn Device>,
    mut options: Options,
) -> Result<(RecoveredStore, Recovery), Error> {
    let mut identity = Identity::open(&disk, options.cluster, options.shape, options.origin)?;
    options.wal.sealed_at = identity.durable_end();
    options.wal.replicas = options.replication.replicas;
    let head = identity.head();
    let payloads = Payloads::open(PayloadOptions {
        disk: Arc::clone(&disk),
        head,
        cache_bytes: options.payload_cache_bytes,
        segment_bytes: options.payload_segment_bytes,
    })?;
    let partitions = Partitions::with_payloads(device, options.shape, payloads);
    let mut replay = Replay::new(partitions, &options.replication);
    replay.load_snapshots(&*disk, &head)?;
    let log = Arc::clone(&disk);
    let (mut wal, writer, log_recovery) =
        Wal::open_with(log, head, options.wal, &mut |entry, commits| replay.entry(entry, commits))?;
    replay.flush()?;
    replay.resolve_rejected(&*disk)?;
    replay.remove_unused_segments(&*disk)?;
    let Replay { partitions, recovered, mut recovery, shipping, .. } = replay;
    recovery.lossless = identity.is_lossless(&log_recovery);
    recovery.log = log_recovery;
    recovery.partitions = partitions.iter().count() as u64;
    recovery.memories = partitions.memories();
    let keeps_all = replication::rules(&options).keeps_all;
    let lossless_since = identity.record_lossless(&disk, recovery.lossless || keeps_all)?;
    let ahead_of_log = continue_log(&mut wal, &recovered);
    let context = Arc::new(Context::new(disk, clock, options, &identity));
    let state = |data: RecoveredPartition| data.into_state(&context, lossless_since);
    let states = recovered.into_iter().map(state).collect();
    let store = RecoveredStore { context, identity, partitions, states, wal, writer, shipping, ahead_of_log };
    Ok((store, recovery))
}

/// Continues the log after the recovered records of each partition; returns those whose snapshot is newer.
fn continue_log(wal: &mut Wal, recovered: &[RecoveredPartition]) -> Vec<(PartitionId, Tail)> {
    let mut ahead_of_log = Vec::new();
    for (partition, data) in recovered.iter().enumerate().filter(|(_, data)| data.history.end() > Lsn(0)) {
        let (lsn, term) = data.history.last();
        let (partition, tail) = (PartitionId(partition as u32), Tail { lsn, term });
        wal.continue_after(partition, tail);
        if data.corrupt.is_none() && wal.tail(partition).is_some_and(|tail| tail.lsn != lsn) {
            ahead_of_log.push((partition, tail));
        }
    }
    ahead_of_log
}

/// Recovered data of one partition.
#[derive(Default)]
struct RecoveredPartition {
    corrupt: Option<String>,
    /// Damage found by an earlier start and not repaired since.
    damage_note: Option<String>,
    promised: Term,
    /// History of the complete local log.
    history: History,
    /// Last record in the state or queued for it.
    applied: Lsn,
    applied_term: Term,
    /// Logged, not known to be committed.
    pending: VecDeque<Pending>,
    snapshots: [Option<Lsn>; 2],
}

impl RecoveredPartition {
    fn into_state(self, context: &Context, lossless_since: Incarnation) -> PartitionState {
        let Self { corrupt, damage_note, promised, history, applied, applied_term, pending, snapshots } = self;
        let written = history.last();
        let remembers = !injected!(ForgetLeaseGrant);
        let granted = context.is_replicated() && context.member.incarnation > Incarnation(1) && remembers;
        let state = (history, applied);
        let replica =
            replication::recovered_replica(context.member, &context.options, lossless_since, promised, state, granted);
        let corrupt = corrupt.or(damage_note.filter(|_| !injected!(ForgetDamage)));
        let applied = (applied, applied_term);
        PartitionState::recovered(replica, RecoveredState { corrupt, applied, pending, written, snapshots })
    }
}

/// Recovery in progress.
struct Replay {
    partitions: Partitions,
    recovered: Vec<RecoveredPartition>,
    recovery: Recovery,
    /// Damaged snapshots.
    rejected: Vec<(PartitionId, Lsn)>,
    records: Vec<(PartitionId, Record)>,
    bytes: usize,
    /// With a single replica every logged record is committed.
    is_single: bool,
    shipping: Shipping,
}

impl Replay {
    fn new(partitions: Partitions, replication: &replication::Options) -> Self {
        let recovered = (0..partitions.shape().partitions).map(|_| RecoveredPartition::default()).collect();
        let is_single = replication.replicas <= 1;
        let shipping = Shipping::new(if is_single { 0 } else { replication.retained_bytes });
        let recovery = Recovery::default();
        Self {
            partitions,
            recovered,
            recovery,
            rejected: Vec::new(),
            records: Vec::new(),
            bytes: 0,
            is_single,
            shipping,
        }
    }

    fn load_snapshots(&mut self, disk: &dyn Disk, head: &FileHead) -> Result<(), Error> {
        for (partition, lsns) in snapshot_file::list(disk)? {
            if self.recovered.get(partition.0 as usize).is_none() {
                continue;
            }
            let (newest, rejected) = snapshot_file::newest_valid(disk, head, partition)?;
            for rejected in rejected {
                self.recovery.skipped_snapshots.push((partition, rejected.error.to_string()));
                self.rejected.push((partition, rejected.lsn));
            }
            // Without a valid snapshot the log may still reach back to the first record.
            let Some(reader) = newest else { continue };
            match load(&mut self.partitions, &reader) {
                Ok(()) => {}
                Err(LoadError::Import(ImportError::Device(error))) => return Err(error.into()),
                Err(LoadError::Import(error)) => {
                    self.mark_corrupt(partition, error.to_string());
                    continue;
                }
                Err(LoadError::File(error)) => return Err(error),
            }
            let snapshot = reader.head();
            let data = &mut self.recovered[partition.0 as usize];
            data.applied = snapshot.lsn;
            self.shipping.set_applied(partition, snapshot.lsn);
            data.applied_term = snapshot.term;
            data.promised = snapshot.term;
            data.history = History::from_floor(snapshot.lsn, snapshot.term);
            let older = lsns.iter().copied().find(|lsn| *lsn < snapshot.lsn);
            data.snapshots = [Some(snapshot.lsn), older];
        }
        Ok(())
    }

    fn entry(&mut self, entry: Entry<'_>, commits: &BTreeMap<PartitionId, (Term, Lsn)>) -> Result<(), Error> {
        let Some(data) = self.recovered.get_mut(entry.partition.0 as usize) else { return Ok(()) };
        if !injected!(ForgetPromise) {
            data.promised = data.promised.max(entry.term);
        }
        if let Body::Note(what) = entry.body {
            data.damage_note = (!what.is_empty()).then(|| String::from_utf8_lossy(what).into_owned());
        }
        if data.corrupt.is_some() {
            return Ok(());
        }
        match entry.body {
            Body::Command(bytes) if entry.lsn > data.history.floor().0 => self.command(&entry, bytes, commits),
            Body::Installed if entry.lsn > data.applied => {
                let what = format!("snapshot at lsn {} named by the log is missing", entry.lsn);
                self.mark_corrupt(entry.partition, what);
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
        let data = &mut self.recovered[partition.0 as usize];
        let (end, last_term) = data.history.last();
        if term < last_term {
            // Replaced by a state transfer before the log recorded that.
            return Ok(());
        }
        if lsn.0 != end.0 + 1 {
            let what = format!("log continues at lsn {lsn}, but the recovered state ends at {end}");
            self.mark_corrupt(partition, what);
            return Ok(());
        }
        let decoded = decode_record(bytes).map_err(|error| error.to_string()).and_then(|record| {
            let shape = self.partitions.features();
            record.command.check_features(shape).map_err(|refusal| refusal.to_string())?;
            Ok(record)
        });
        let record = match decoded {
            Ok(record) => record,
            Err(what) => {
                self.mark_corrupt(partition, format!("invalid log record {lsn}: {what}"));
                return Ok(());
            }
        };
        data.history.append(lsn, term);
        self.shipping.retain(partition, lsn, term, bytes);
        let committed = self.is_single || commits.get(&partition).is_some_and(|(_, commit)| lsn <= *commit);
        if !committed {
            data.pending.push_back(Pending::new(lsn, term, record, Vec::new()));
            return Ok(());
        }
        (data.applied, data.applied_term) = (lsn, term);
        self.shipping.set_applied(partition, lsn);
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

    /// Marks partitions corrupt that did not reach the LSN of a damaged snapshot; removes the damaged snapshots of the others, so
    /// that they do not count as a generation.
    fn resolve_rejected(&mut self, disk: &dyn Disk) -> Result<(), Error> {
        for (partition, lsn) in std::mem::take(&mut self.rejected) {
            let data = &self.recovered[partition.0 as usize];
            if data.corrupt.is_some() {
                continue;
            }
            if data.applied < lsn {
                let what = format!("snapshot at lsn {lsn} is damaged, and the log ends at {}", data.applied);
                self.mark_corrupt(partition, what);
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

    /// Removes payload segments of partitions without state and snapshots.
    fn remove_unused_segments(&mut self, disk: &dyn Disk) -> Result<(), Error> {
        let partitions = self.partitions.arena.payloads.partitions();
        if partitions.is_empty() {
            return Ok(());
        }
        let snapshots = snapshot_file::list(disk)?;
        for partition in partitions {
            if self.partitions.contains(partition) || snapshots.contains_key(&partition) {
                continue;
            }
            for segment in self.partitions.arena.payloads.unused(partition) {
                // A file that remains is removed at the next start.
                if segment.remove(disk).is_ok() {
                    self.partitions.arena.payloads.removed(partition, &[segment.number]);
                }
            }
        }
        Ok(())
    }

    fn mark_corrupt(&mut self, partition: PartitionId, what: String) {
        self.partitions.close(partition);
        let data = &mut self.recovered[partition.0 as usize];
        let (promised, snapshots) = (data.promised, data.snapshots);
        *data =
            RecoveredPartition { corrupt: Some(what.clone()), promised, snapshots, ..RecoveredPartition::default() };
        self.recovery.corrupt.push((partition, what));
    }
}

/// Why a snapshot was not loaded.
pub(crate) enum LoadError {
    Import(ImportError),
    File(Error),
}

/// Loads a verified snapshot.
pub(crate) fn load(partitions: &mut Partitions, reader: &SnapshotReader) -> Result<(), LoadError> {
    let head = reader.head();
    let ledger = reader.ledger().map_err(LoadError::File)?;
    let ids = reader.chunks().iter().filter(|chunk| chunk.kind == Column::Ids.code());
    let id_bytes = ids.map(|chunk| u64::from(chunk.bytes)).sum();
    let started = Import::begin(partitions, head.partition, head.memories, id_bytes, head.clock, &ledger);
    let mut import = started.map_err(LoadError::Import)?;
    let mut bytes = Vec::new();
    for chunk in reader.chunks().iter().filter(|chunk| chunk.kind != LEDGER) {
        reader.read(chunk, &mut bytes).map_err(LoadError::File)?;
        let unknown = ImportError::Invalid("unknown column");
        let column = Column::from_code(chunk.kind).ok_or(unknown).map_err(LoadError::Import)?;
        import.chunk(column, &bytes).map_err(LoadError::Import)?;
    }
    import.finish(Digest(head.digest)).map_err(LoadError::Import)
}
