//! The store of one worker on one thread: log, apply, answer, snapshot.
//!
//! ```text
//!  write ──> checks, dedupe ──┐
//! peers ──> Append ──────────┴─> log buffer ──seal──> batch ──Writer (inline, or a thread)──> written
//!                                   │ pending: logged, not applied                              │
//!  answer <── ledger, columns, device <── apply, in log order <── commit <── Replica::step <────┘
//! ```
//!
//! Invariants: state changes only by applied records, and a record is applied once the partition's replica has committed it; LSNs
//! are dense per partition; a partition that was never configured has [`Settings::default`], so that the log alone determines the
//! state; a term is served only by the process that promised it; after a device failure nothing is served.

use crate::background::Background;
use crate::confirmed_reads::ConfirmedReads;
use crate::digest_check::DigestCheck;
use crate::leases::Leases;
use crate::partitions::Partitions;
use crate::payloads;
use crate::pending_calls::{Callback, PendingCalls, Waiter};
use crate::replication::{self, Replication};
use crate::results::{ActivateError, CommittedWrite, WriteError};
use crate::session_clock::SessionClock;
use crate::stale_reads::StaleReads;
use crate::stats::{self, Shared};
use crate::traces::RecordTrace;
use crate::wal::{self, Batch, Body, Entry, Position, Wal, Writer};
use crate::{Clock, Disk, Error, Identity, Origin};
use engram_cluster::Replica;
use engram_cluster::replica::Event;
use engram_memory::{
    ClusterId, Command, Incarnation, Lsn, Member, PartitionId, Record, Reply, Request, Settings, Shape, Term,
};
use std::collections::{BTreeSet, HashMap, VecDeque};
use std::sync::Arc;
use std::time::SystemTime;

/// Options of a store.
#[derive(Debug, Clone)]
pub struct Options {
    /// Cluster that the disk belongs to.
    pub cluster: ClusterId,
    /// Immutable shape of the cluster.
    pub shape: Shape,
    /// Settings of a partition on activation; whether updates are counted is kept.
    pub settings: Settings,
    /// Kernel boot and volume mount of this process.
    pub origin: Origin,
    /// Replication options.
    pub replication: replication::Options,
    /// Options of the log; its replicas are those of `replication`.
    pub wal: wal::Options,
    /// Bytes of log after which partitions are snapshotted. Lower shortens recovery and increases disk writes.
    pub snapshot_bytes: u64,
    /// Milliseconds after which changed partitions are snapshotted.
    pub snapshot_ms: u64,
    /// Milliseconds in which the digest of every served partition is compared with its replicas once.
    pub digest_ms: u64,
    /// Milliseconds in which every snapshot here is scrubbed once; 0 = never. Lower finds damage earlier and increases disk reads.
    pub scrub_ms: u64,
    /// Interval between proposals of session expiry, in milliseconds. Lower removes expired sessions earlier and writes more records.
    pub expiry_ms: u64,
    /// Bytes of memory for payloads of items that were read or written last. Higher saves disk reads.
    pub payload_cache_bytes: u64,
    /// Bytes after which a payload segment is closed. Lower frees disk space earlier and opens more files.
    pub payload_segment_bytes: u32,
    /// Disk space kept in reserve, so that a store on a full disk still starts; 0 = none.
    pub reserve_bytes: u64,
    /// Most bytes of unanswered records in the engine; calls above are rejected.
    pub queue_bytes: usize,
    /// Most unanswered calls in the engine; calls above are rejected.
    pub queue_calls: usize,
}

impl Options {
    /// Returns production defaults.
    pub fn new(cluster: ClusterId, shape: Shape, settings: Settings) -> Self {
        Self {
            cluster,
            shape,
            settings,
            origin: Origin::current(0),
            replication: replication::Options::default(),
            wal: wal::Options::default(),
            snapshot_bytes: 256 << 20,
            snapshot_ms: 5 * 60 * 1_000,
            digest_ms: 60 * 60 * 1_000,
            scrub_ms: 24 * 60 * 60 * 1_000,
            expiry_ms: 60 * 60 * 1_000,
            payload_cache_bytes: 128 << 20,
            payload_segment_bytes: payloads::SEGMENT_BYTES,
            reserve_bytes: 0,
            queue_bytes: 64 << 20,
            queue_calls: 16_384,
        }
    }
}

/// State of a partition other than its state machine.
pub(crate) struct PartitionState {
    /// Decides what is promised, logged, acknowledged and served.
    pub(crate) replica: Replica,
    /// Damage, if any: the partition is not served, its files are kept for repair.
    pub(crate) corrupt: Option<String>,
    /// LSN of the last applied record.
    pub(crate) applied: Lsn,
    pub(crate) applied_term: Term,
    /// Records logged and not applied, dense after `applied`.
    pub(crate) pending: VecDeque<Pending>,
    /// Most memories that these can create.
    pub(crate) creates: u64,
    /// Last record written as the durability mode requires.
    pub(crate) written: (Lsn, Term),
    /// Callers that wait for the partition to be served at a term.
    pub(crate) activations: Vec<(Term, Waiter)>,
    pub(crate) digest_check: DigestCheck,
    /// Since when it is continuously served here, by the monotonic clock.
    pub(crate) served_since_ms: Option<u64>,
    /// LSN up to which a damaged partition has to commit to be repaired.
    pub(crate) complete_at: Lsn,
    /// Snapshots on the store's own disk: the newest and the older one.
    pub(crate) snapshots: [Option<Lsn>; 2],
    /// Damaged snapshots there: removed when the next one is written.
    pub(crate) damaged: Vec<Lsn>,
}

/// A record that is logged and not applied.
pub(crate) struct Pending {
    pub(crate) lsn: Lsn,
    pub(crate) term: Term,
    pub(crate) record: Record,
    /// Waiting callers; several if the request was repeated before it was applied.
    pub(crate) waiters: Vec<Waiter>,
    /// Present if its trace is sampled.
    pub(crate) trace: Option<Box<RecordTrace>>,
}

impl PartitionState {
    /// Returns the LSN of the last record in the local log.
    pub(crate) fn last(&self) -> Lsn {
        self.replica.history().end()
    }
}

/// What an entry of a log batch is for.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Mark {
    Record(PartitionId, Lsn, Term),
    Promise(PartitionId, Term),
    /// Other entries, without waiting callers.
    Other(PartitionId),
}

impl Mark {
    const fn partition(self) -> PartitionId {
        match self {
            Self::Record(partition, ..) | Self::Promise(partition, _) | Self::Other(partition) => partition,
        }
    }
}

/// A batch for the writer.
pub(crate) struct Outgoing {
    pub(crate) batch: Batch,
    /// Has to be durable in every mode: contains a promise, or a record of a single-replica partition.
    must_sync: bool,
}

impl Outgoing {
    pub(crate) fn write(&self, writer: &mut Writer, now_ms: u64) -> Result<Position, Error> {
        let end = writer.write(&self.batch, now_ms)?;
        if self.must_sync {
            writer.sync()?;
        }
        Ok(end)
    }
}

/// The partitions of one worker, their log and snapshots.
pub struct Store {
    pub(crate) disk: Arc<dyn Disk>,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) session_clock: Arc<SessionClock>,
    pub(crate) options: Options,
    identity: Identity,
    pub(crate) partitions: Partitions,
    pub(crate) states: Vec<PartitionState>,
    pub(crate) wal: Wal,
    writer: Option<Writer>,
    /// Entries not reported as written yet, in log order.
    pub(crate) marks: VecDeque<Mark>,
    /// Records in flight by request, to detect repeats before they are applied.
    pub(crate) requests: HashMap<(PartitionId, Request), Lsn>,
    /// Number of marks in no batch yet.
    unsealed_marks: usize,
    /// Whether one of them has to be durable.
    pub(crate) must_sync: bool,
    /// Sealed batches that wait for the writer, with their number of marks.
    ready: VecDeque<(Outgoing, usize)>,
    /// Number of marks of each batch at the writer.
    in_flight_marks: VecDeque<usize>,
    /// Partitions with written records that are not synced.
    unsynced: BTreeSet<PartitionId>,
    /// Partitions whose commit LSN is not logged yet.
    committed: BTreeSet<PartitionId>,
    /// Partitions with committed records that are not applied.
    pub(crate) due: BTreeSet<PartitionId>,
    pub(crate) writes: PendingCalls<Result<CommittedWrite, WriteError>>,
    pub(crate) activations: PendingCalls<Result<(), ActivateError>>,
    pub(crate) replication: Replication,
    pub(crate) leases: Leases,
    pub(crate) confirmed_reads: ConfirmedReads,
    pub(crate) stale_reads: StaleReads,
    pub(crate) shared: Arc<Shared>,
    pub(crate) background: Background,
    pub(crate) scratch: Vec<u8>,
}

impl Store {
    pub(crate) fn assemble(
        disk: Arc<dyn Disk>,
        clock: Arc<dyn Clock>,
        options: Options,
        identity: Identity,
        recovered: crate::recovery::RecoveredStore,
    ) -> Self {
        let crate::recovery::RecoveredStore { mut partitions, states, wal, writer, shipping } = recovered;
        let shared = Arc::new(Shared::new(options.shape.partitions));
        let replicated = options.replication.replicas > 1;
        let session_clock = Arc::new(SessionClock::new(Arc::clone(&clock), replicated));
        for partition in
            (0..options.shape.partitions).map(PartitionId).filter(|it| partitions.contains(*it)).collect::<Vec<_>>()
        {
            shared.set_settings(partition, partitions.ledger(partition).map(|ledger| ledger.settings));
            shared.set_lsn(partition, states[partition.0 as usize].applied);
            if let Some(ledger) = partitions.ledger(partition) {
                session_clock.recovered(ledger.sessions.watermark_ms(), ledger.sessions.last_opened_ms().unwrap_or(0));
            }
            // Until it is served here, another worker may be its primary.
            partitions.set_hidden(partition, replicated);
        }
        let background =
            Background::new(clock.elapsed_ms(), options.replication.transfer_bytes_per_s, options.expiry_ms);
        // Before the first process on a disk no lease can have been granted.
        let granted = replicated && identity.incarnation() > Incarnation(1);
        let everywhere = (0..options.shape.partitions).map(PartitionId).filter(|_| granted);
        let leases = Leases::assume_granted(everywhere, clock.elapsed_ms());
        let replication = Replication::new(shipping, &options.replication);
        let mut store = Self {
            disk,
            clock,
            session_clock,
            options,
            identity,
            partitions,
            states,
            wal,
            writer: Some(writer),
            marks: VecDeque::new(),
            requests: HashMap::new(),
            unsealed_marks: 0,
            must_sync: false,
            ready: VecDeque::new(),
            in_flight_marks: VecDeque::new(),
            unsynced: BTreeSet::new(),
            committed: BTreeSet::new(),
            due: BTreeSet::new(),
            writes: PendingCalls::default(),
            activations: PendingCalls::default(),
            replication,
            leases,
            confirmed_reads: ConfirmedReads::default(),
            stale_reads: StaleReads::default(),
            shared,
            background,
            scratch: Vec::new(),
        };
        store.index_pending_requests();
        store.update_gauges();
        store
    }

    /// Returns the time of sessions.
    pub fn session_clock(&self) -> &SessionClock {
        &self.session_clock
    }

    /// Returns the identity of store and process.
    pub const fn identity(&self) -> &Identity {
        &self.identity
    }

    /// Returns this process as a member of its cluster.
    pub fn member(&self) -> Member {
        let ordinal = self.options.replication.ordinal;
        Member { ordinal, store: self.identity.store(), incarnation: self.identity.incarnation() }
    }

    /// Returns the committed state for reads.
    pub const fn partitions(&mut self) -> &mut Partitions {
        &mut self.partitions
    }

    /// Returns the term at which a partition is served; `None` if it is not.
    pub fn serving(&self, partition: PartitionId) -> Option<Term> {
        let state = self.states.get(partition.0 as usize)?;
        state.replica.serving_term().filter(|_| state.corrupt.is_none())
    }

    /// Returns the last applied LSN of a partition and its term.
    pub fn applied(&self, partition: PartitionId) -> (Term, Lsn) {
        let state = self.states.get(partition.0 as usize);
        state.map_or_else(Default::default, |state| (state.applied_term, state.applied))
    }

    /// Returns the highest promised term of a partition.
    pub fn promised(&self, partition: PartitionId) -> Term {
        self.states.get(partition.0 as usize).map_or(Term(0), |state| state.replica.promised())
    }

    /// Returns the counters.
    pub fn stats(&self) -> stats::Stats {
        self.shared.snapshot()
    }

    /// Runs everything due on this thread: logs proposals, applies and answers them, takes snapshots. For simulators and tests; an
    /// engine uses threads.
    ///
    /// # Errors
    /// [`Error::SyncFailed`]: the process must abort. A device failure. A failed log write is no error here: it is the answer to the
    /// writes.
    pub fn turn(&mut self) -> Result<(), Error> {
        self.flush()?;
        self.housekeeping()?;
        self.flush()?;
        while let Some(job) = self.next_job()? {
            let result = job.run();
            self.job_done(&job, result)?;
        }
        self.flush()?;
        self.dispatch()?;
        let now_ms = self.clock.elapsed_ms();
        self.writer().tick(now_ms)
    }

    /// Stops gracefully: proposals are logged and answered, the log is sealed, and the clean mark is written.
    ///
    /// # Errors
    /// Those of the log and of the clean mark.
    pub fn stop(mut self) -> Result<(), Error> {
        self.flush()?;
        let end = self.writer.take().expect("the writer was given back").close()?;
        self.identity.leave_clean_mark(&self.disk, end)
    }

    fn flush(&mut self) -> Result<(), Error> {
        while let Some(outgoing) = self.next_batch() {
            let now_ms = self.clock.elapsed_ms();
            match outgoing.write(self.writer(), now_ms) {
                Ok(position) => self.handle_written(outgoing.batch, position)?,
                Err(error @ Error::SyncFailed { .. }) => return Err(error),
                Err(error) => self.handle_write_failure(outgoing.batch, error)?,
            }
        }
        Ok(())
    }

    fn writer(&mut self) -> &mut Writer {
        self.writer.as_mut().expect("the writer is here in single-thread mode")
    }

    /// Returns the writer, for a thread of its own.
    pub(crate) fn take_writer(&mut self) -> Writer {
        self.writer.take().expect("the writer is taken once")
    }

    /// [`Store::stop`] with the writer returned by its thread.
    pub(crate) fn stop_with(mut self, writer: Writer) -> Result<(), Error> {
        self.writer = Some(writer);
        self.stop()
    }

    /// Adds an entry to the log's buffer.
    pub(crate) fn append(&mut self, entry: &Entry<'_>) -> Result<(), Error> {
        match self.wal.append(entry) {
            Err(Error::BatchFull { .. }) => {
                self.seal_batch();
                self.wal.append(entry)
            }
            appended => appended,
        }
    }

    /// Adds the mark of an appended entry. `must_sync`: it has to be durable in every mode.
    pub(crate) fn push(&mut self, mark: Mark, must_sync: bool) {
        self.must_sync |= must_sync;
        self.marks.push_back(mark);
        self.unsealed_marks += 1;
    }

    /// Returns the next batch for the writer. Each one ends in [`Store::handle_written`] or [`Store::handle_write_failure`].
    pub(crate) fn next_batch(&mut self) -> Option<Outgoing> {
        if self.ready.is_empty() {
            self.seal_batch();
        }
        let (outgoing, marks) = self.ready.pop_front()?;
        self.in_flight_marks.push_back(marks);
        self.shared.batch_records.add(marks as u64);
        self.shared.batch_bytes.add(outgoing.batch.len_bytes());
        Some(outgoing)
    }

    fn seal_batch(&mut self) {
        let commits: Vec<_> = std::mem::take(&mut self.committed)
            .into_iter()
            .map(|partition| {
                let state = &self.states[partition.0 as usize];
                (partition, state.applied_term, state.applied)
            })
            .collect();
        match self.wal.seal(&commits) {
            Some(batch) => {
                let must_sync = std::mem::take(&mut self.must_sync);
                self.ready.push_back((Outgoing { batch, must_sync }, std::mem::take(&mut self.unsealed_marks)));
            }
            None => self.committed.extend(commits.iter().map(|(partition, ..)| *partition)),
        }
    }

    /// Handles the oldest batch of the writer as written: applies and answers what it commits.
    ///
    /// # Errors
    /// The device failed; all callers were answered.
    pub(crate) fn handle_written(&mut self, batch: Batch, position: Position) -> Result<(), Error> {
        self.wal.recycle(batch);
        let durable = self.wal.durable(position);
        let count = self.in_flight_marks.pop_front().expect("the writer had a batch");
        let marks: Vec<Mark> = self.marks.drain(..count).collect();
        let mut touched = BTreeSet::new();
        for mark in marks {
            touched.insert(mark.partition());
            match mark {
                // The last of several records stands for all.
                Mark::Record(partition, lsn, term) => {
                    self.states[partition.0 as usize].written = (lsn, term);
                    self.trace_written(partition, lsn);
                }
                Mark::Promise(partition, term) => self.step(partition, Event::Promised(term)),
                Mark::Other(_) => {}
            }
        }
        if durable {
            touched.append(&mut self.unsynced);
        } else {
            self.unsynced.extend(touched.iter().copied());
        }
        for partition in touched {
            let (lsn, term) = self.states[partition.0 as usize].written;
            if durable {
                self.step(partition, Event::Synced(lsn, term));
            }
            self.step(partition, Event::Written(lsn, term));
        }
        self.apply_due()
    }

    /// Applies and answers what is committed.
    ///
    /// # Errors
    /// The device failed; all callers were answered.
    pub(crate) fn apply_due(&mut self) -> Result<(), Error> {
        let mut committed: Vec<(PartitionId, Pending)> = Vec::new();
        for partition in std::mem::take(&mut self.due) {
            let state = &mut self.states[partition.0 as usize];
            let commit = state.replica.commit();
            let count = state.pending.iter().take_while(|pending| pending.lsn <= commit).count();
            committed.extend(state.pending.drain(..count).map(|pending| (partition, pending)));
            if count > 0 && !self.partitions.contains(partition) {
                self.partitions.open(partition, Settings::default());
                let served = self.states[partition.0 as usize].replica.serving_term().is_some();
                self.partitions.set_hidden(partition, !served && self.options.replication.replicas > 1);
            }
        }
        if committed.is_empty() {
            // The batch may contain only promises.
            self.update_gauges();
            return Ok(());
        }
        let started = engram_trace::is_recording().then(SystemTime::now);
        let records: Vec<(PartitionId, &Record)> =
            committed.iter().map(|(partition, pending)| (*partition, &pending.record)).collect();
        let replies = match self.partitions.apply_refs(&records) {
            Ok(replies) => replies,
            Err(error) => {
                let error = error.into();
                let cause = WriteError::of_failure(&error);
                for (partition, pending) in committed {
                    self.refuse(partition, pending, &cause);
                }
                self.fail(&cause);
                return Err(error);
            }
        };
        let durable = self.wal.durable(self.wal.written());
        for ((partition, pending), reply) in committed.into_iter().zip(replies) {
            self.finish_record(partition, &pending, &reply);
            if let (Some(started), Some(trace)) = (started, &pending.trace) {
                trace.applied(partition, pending.lsn, started);
            }
            let Pending { lsn, term, waiters, .. } = pending;
            if !waiters.is_empty() {
                // Mode async does not wait for the other replicas.
                let is_async = self.options.wal.durability == wal::Durability::Async;
                let replicas = if is_async { 1 } else { self.states[partition.0 as usize].replica.in_sync_count() };
                let committed = CommittedWrite { partition, term, lsn, replicas, durable, reply };
                for waiter in waiters {
                    self.writes.answer(waiter, Ok(committed.clone()));
                }
            }
        }
        self.update_gauges();
        Ok(())
    }

    fn finish_record(&mut self, partition: PartitionId, pending: &Pending, reply: &Reply) {
        let Pending { lsn, term, record, .. } = pending;
        let state = &mut self.states[partition.0 as usize];
        state.applied = *lsn;
        state.applied_term = *term;
        state.creates -= record.command.may_create() as u64;
        self.replication.shipping.set_applied(partition, *lsn);
        self.committed.insert(partition);
        self.shared.set_lsn(partition, *lsn);
        if let Some(request) = record.request
            && self.requests.get(&(partition, request)) == Some(lsn)
        {
            self.requests.remove(&(partition, request));
        }
        match record.command {
            Command::Configure(settings) => self.shared.set_settings(partition, Some(settings)),
            Command::ExpireSessions { before_ms } => self.session_clock.recovered(before_ms, 0),
            _ => {}
        }
        stats::add(&self.shared.applied_records, 1);
        if let Reply::Applied(outcome) = reply {
            if let Some(digest) = outcome.digest.filter(|_| self.options.replication.replicas > 1) {
                self.compare_or_send_digest(partition, *lsn, digest);
            }
            stats::add(&self.shared.applied_rows, outcome.applied);
            stats::add(&self.shared.created_memories, outcome.created);
            stats::add(&self.shared.evicted_memories, outcome.evicted);
        }
    }

    /// Handles a batch that failed to be written: no pending proposal is logged. Other replicas may have them, so with peers this ends
    /// the store.
    ///
    /// # Errors
    /// `error`, with peers.
    pub(crate) fn handle_write_failure(&mut self, batch: Batch, error: Error) -> Result<(), Error> {
        for (later, _) in self.ready.drain(..).rev() {
            self.wal.withdraw(later.batch);
        }
        self.wal.withdraw(batch);
        self.fail(&WriteError::of_failure(&error));
        if self.options.replication.replicas > 1 { Err(error) } else { Ok(()) }
    }

    /// Answers everything in flight with a failure, and rolls partitions back to what is written.
    pub(crate) fn fail(&mut self, cause: &WriteError) {
        self.in_flight_marks.clear();
        self.ready.clear();
        self.unsealed_marks = 0;
        self.must_sync = false;
        self.due.clear();
        let mut touched: BTreeSet<PartitionId> = BTreeSet::new();
        for mark in std::mem::take(&mut self.marks) {
            touched.insert(mark.partition());
        }
        for partition in touched {
            self.roll_back(partition, cause);
        }
        self.update_gauges();
    }

    /// Rejects a record that will not be applied here.
    pub(crate) fn refuse(&mut self, partition: PartitionId, pending: Pending, error: &WriteError) {
        if let Some(request) = pending.record.request
            && self.requests.get(&(partition, request)) == Some(&pending.lsn)
        {
            self.requests.remove(&(partition, request));
        }
        if let WriteError::Failed { .. } | WriteError::DiskFull { .. } = error {
            stats::add(&self.shared.failed_records, 1);
        }
        for waiter in pending.waiters {
            self.writes.answer(waiter, Err(error.clone()));
        }
    }

    /// Begins a call whose answers are passed to `done`.
    pub(crate) fn begin_write(
        &mut self,
        count: usize,
        done: Callback<Result<CommittedWrite, WriteError>>,
    ) -> impl Fn(usize) -> Waiter + use<> {
        self.writes.begin(count, done)
    }

    fn update_gauges(&mut self) {
        stats::set(&self.shared.waiting_records, self.marks.len() as u64);
        stats::set(&self.shared.memories, self.partitions.memories());
        let usage = self.partitions.ledger_usage();
        let ledgers = usage.run_record_bytes + usage.session_bytes;
        let bytes = self.partitions.bytes() + ledgers + self.replication.shipping.bytes();
        stats::set(&self.shared.memory_bytes, bytes);
        stats::set(&self.shared.run_records, usage.run_records);
        stats::set(&self.shared.run_record_bytes, usage.run_record_bytes);
        stats::set(&self.shared.sessions, usage.sessions);
        stats::set(&self.shared.session_bytes, usage.session_bytes);
        stats::set(&self.shared.epoch_entries, usage.epoch_entries);
        stats::set(&self.shared.log_bytes, self.wal.bytes());
        let payloads = self.partitions.arena.payloads.usage();
        stats::set(&self.shared.payload_live_bytes, payloads.live_bytes);
        stats::set(&self.shared.payload_disk_bytes, payloads.disk_bytes);
        stats::set(&self.shared.payload_cached_bytes, payloads.cached_bytes);
        stats::set(&self.shared.payload_segments, payloads.segments);
        stats::set(&self.shared.payload_cache_hits, payloads.hits);
        stats::set(&self.shared.payload_cache_misses, payloads.misses);
        stats::set(&self.shared.payload_compacted_bytes, payloads.compacted_bytes);
        self.shared.set_gpu(self.partitions.gpu());
    }

    /// Records durably why the replica here is damaged; empty = repaired. A damaged replica does not become primary, even if the map
    /// still lists it as in sync.
    pub(crate) fn set_damage_note(&mut self, partition: PartitionId, what: &str) -> Result<(), Error> {
        let state = &mut self.states[partition.0 as usize];
        state.corrupt = (!what.is_empty()).then(|| what.to_owned());
        let term = state.replica.promised();
        self.append(&Entry { partition, term, lsn: Lsn(0), body: Body::Note(what.as_bytes()) })?;
        self.push(Mark::Other(partition), true);
        Ok(())
    }

    /// Logs that the partition was replaced by a snapshot at `lsn`, or cleared if 0.
    pub(crate) fn log_installed(&mut self, mark: Mark, term: Term, lsn: Lsn) -> Result<(), Error> {
        self.append(&Entry { partition: mark.partition(), term, lsn, body: Body::Installed })?;
        self.push(mark, true);
        Ok(())
    }
}
