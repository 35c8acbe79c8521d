//! The store of one worker, on one thread: log, apply, answer, snapshot.
//!
//! ```text
//!  write ──> checks, dedupe ──┐
//! peers ──> Append ──────────┴─> log buffer ──seal──> batch ──Writer (inline, or a thread)──> written
//!                                   │ pending: logged, not applied                              │
//!  answer <── ledger, columns, device <── apply, in log order <── commit <── Replica::step <────┘
//! ```
//!
//! Invariants: state changes by applied records alone, and a record is applied when the partition's replica says that it is
//! committed; lsn is dense per partition; a partition that was never configured has
//! [`Settings::default`], so that the log alone gives the state; a term is served by the process that promised it, once;
//! after a device failed nothing is served.

use crate::answers::{ActivateError, Committed, WriteError};
use crate::background::Background;
use crate::confirm::Confirming;
use crate::gather::{Done, Gather, Waiter};
use crate::lagging::Lagging;
use crate::leases::Leases;
use crate::partitions::Partitions;
use crate::replication::{self, Replication};
use crate::stats::{self, Shared};
use crate::verify::Marked;
use crate::wal::{self, Batch, Body, Entry, Position, Wal, Writer};
use crate::{Clock, Disk, Error, Identity, Origin};
use engram_cluster::Replica;
use engram_cluster::replica::Event;
use engram_memory::{
    ClusterId, Command, Incarnation, Lsn, Member, PartitionId, Record, Reply, Request, Settings, Shape, Term,
};
use std::collections::{BTreeSet, HashMap, VecDeque};
use std::sync::Arc;

/// What a store needs to know beside its disk.
#[derive(Debug, Clone)]
pub struct Options {
    /// Cluster that the disk belongs to.
    pub cluster: ClusterId,
    /// What is fixed of it.
    pub shape: Shape,
    /// What a partition is configured to when it is activated; whether updates are counted stays as it is.
    pub settings: Settings,
    /// Kernel run and mount of this process.
    pub origin: Origin,
    /// Place in the cluster, and copies.
    pub replication: replication::Options,
    /// Settings of the log; its copies are those of `replication`.
    pub wal: wal::Options,
    /// Bytes of log after which partitions are snapshotted. Less makes recovery shorter and writes more.
    pub snapshot_bytes: u64,
    /// Milliseconds after which changed partitions are snapshotted.
    pub snapshot_ms: u64,
    /// Milliseconds in which every served partition is compared with its copies once.
    pub digest_ms: u64,
    /// Milliseconds in which every snapshot here is read again once; 0 = never. Less finds damage earlier and reads more.
    pub scrub_ms: u64,
    /// Most bytes of records that the engine takes before it answers; more are turned away.
    pub queue_bytes: usize,
    /// Most calls that the engine takes before it answers; more are turned away.
    pub queue_calls: usize,
}

impl Options {
    /// Options for production, but for what they name.
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
            queue_bytes: 64 << 20,
            queue_calls: 16_384,
        }
    }
}

/// What the store keeps of a partition beside its state machine.
pub(crate) struct Place {
    /// What it may promise, log, acknowledge and serve.
    pub(crate) replica: Replica,
    /// Damaged: not served, kept for who repairs it.
    pub(crate) corrupt: Option<String>,
    /// Last applied record.
    pub(crate) applied: Lsn,
    pub(crate) applied_term: Term,
    /// Records logged and not applied, dense behind `applied`.
    pub(crate) pending: VecDeque<Pending>,
    /// The most memories that these create.
    pub(crate) creates: u64,
    /// Name of the last record that is in the log as the mode demands.
    pub(crate) wrote: (Lsn, Term),
    /// Who waits for the partition to be served, and at which term.
    pub(crate) activations: Vec<(Term, Waiter)>,
    pub(crate) marked: Marked,
    /// Since when it is served here without a break, by the monotonic clock.
    pub(crate) served_since_ms: Option<u64>,
    /// A damaged partition is whole again when it has committed up to here.
    pub(crate) whole_at: Lsn,
    /// Snapshots on the store's own disk: the newest, and the one before.
    pub(crate) snapshots: [Option<Lsn>; 2],
    /// Snapshots there that are damaged: their files go when another one is written.
    pub(crate) damaged: Vec<Lsn>,
}

/// A record that is logged and not yet applied.
pub(crate) struct Pending {
    pub(crate) lsn: Lsn,
    pub(crate) term: Term,
    pub(crate) record: Record,
    /// Who waits; more than one when the request came again before it was applied.
    pub(crate) waiters: Vec<Waiter>,
}

impl Place {
    /// Last record of the log here.
    pub(crate) fn last(&self) -> Lsn {
        self.replica.history().end()
    }
}

/// Something in a batch of the log, in its order.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Mark {
    Record(PartitionId, Lsn, Term),
    Promise(PartitionId, Term),
    /// Nothing waits for it.
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
    /// Something in it has to be durable before it counts, in every mode: a promise, a record of a partition that is alone.
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
    pub(crate) options: Options,
    identity: Identity,
    pub(crate) partitions: Partitions,
    pub(crate) places: Vec<Place>,
    pub(crate) wal: Wal,
    writer: Option<Writer>,
    /// What the log holds that was not seen written, in log order.
    pub(crate) marks: VecDeque<Mark>,
    /// Records under way by request, to find a repeat before its first is applied.
    pub(crate) requests: HashMap<(PartitionId, Request), Lsn>,
    /// Marks that are in no batch yet.
    gathered: usize,
    /// Whether one of them has to be durable.
    pub(crate) must_sync: bool,
    /// Sealed batches that wait for the writer, with how many marks each has.
    ready: VecDeque<(Outgoing, usize)>,
    /// Marks of the batches that the writer has.
    flying: VecDeque<usize>,
    /// Partitions with records that were written and not synced.
    unsynced: BTreeSet<PartitionId>,
    /// Partitions whose commit is news to the log.
    committed: BTreeSet<PartitionId>,
    /// Partitions with committed records that are not applied.
    pub(crate) due: BTreeSet<PartitionId>,
    pub(crate) writes: Gather<Result<Committed, WriteError>>,
    pub(crate) activations: Gather<Result<(), ActivateError>>,
    pub(crate) replication: Replication,
    pub(crate) leases: Leases,
    pub(crate) confirming: Confirming,
    pub(crate) lagging: Lagging,
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
        recovered: crate::recover::Recovered,
    ) -> Self {
        let crate::recover::Recovered { mut partitions, places, wal, writer, shipping } = recovered;
        let shared = Arc::new(Shared::new(options.shape.partitions));
        let replicated = options.replication.copies > 1;
        for partition in
            (0..options.shape.partitions).map(PartitionId).filter(|it| partitions.contains(*it)).collect::<Vec<_>>()
        {
            shared.set_settings(partition, partitions.ledger(partition).map(|ledger| ledger.settings));
            shared.set_lsn(partition, places[partition.0 as usize].applied);
            // Until it is served here it may be a copy of what another worker serves.
            partitions.set_hidden(partition, replicated);
        }
        let background = Background::new(clock.elapsed_ms(), options.replication.copy_bytes_per_s);
        // Nobody before the first process on a disk can have granted anything.
        let granted = replicated && identity.incarnation() > Incarnation(1);
        let everywhere = (0..options.shape.partitions).map(PartitionId).filter(|_| granted);
        let leases = Leases::assume(everywhere, clock.elapsed_ms());
        let replication = Replication::new(shipping, &options.replication);
        let mut store = Self {
            disk,
            clock,
            options,
            identity,
            partitions,
            places,
            wal,
            writer: Some(writer),
            marks: VecDeque::new(),
            requests: HashMap::new(),
            gathered: 0,
            must_sync: false,
            ready: VecDeque::new(),
            flying: VecDeque::new(),
            unsynced: BTreeSet::new(),
            committed: BTreeSet::new(),
            due: BTreeSet::new(),
            writes: Gather::default(),
            activations: Gather::default(),
            replication,
            leases,
            confirming: Confirming::default(),
            lagging: Lagging::default(),
            shared,
            background,
            scratch: Vec::new(),
        };
        store.find_requests();
        store.measure();
        store
    }

    /// Who this disk and process are.
    pub const fn identity(&self) -> &Identity {
        &self.identity
    }

    /// This process, as a member of its cluster.
    pub fn member(&self) -> Member {
        let ordinal = self.options.replication.ordinal;
        Member { ordinal, store: self.identity.store(), incarnation: self.identity.incarnation() }
    }

    /// The committed state, for reads.
    pub const fn partitions(&mut self) -> &mut Partitions {
        &mut self.partitions
    }

    /// Term at which a partition is served; `None` when it is not.
    pub fn serving(&self, partition: PartitionId) -> Option<Term> {
        let place = self.places.get(partition.0 as usize)?;
        place.replica.serves().filter(|_| place.corrupt.is_none())
    }

    /// Last applied lsn of a partition, and its term.
    pub fn applied(&self, partition: PartitionId) -> (Term, Lsn) {
        let place = self.places.get(partition.0 as usize);
        place.map_or_else(Default::default, |place| (place.applied_term, place.applied))
    }

    /// Highest term that was promised for a partition.
    pub fn promised(&self, partition: PartitionId) -> Term {
        self.places.get(partition.0 as usize).map_or(Term(0), |place| place.replica.promised())
    }

    /// What was counted so far.
    pub fn stats(&self) -> stats::Stats {
        self.shared.snapshot()
    }

    /// Everything that is due, on this thread: logs what was proposed, applies and answers it, takes snapshots. For simulators
    /// and tests; an engine has threads for it.
    ///
    /// # Errors
    /// [`Error::SyncFailed`]: the process must end. A device that failed. A log that could not be written is no error here:
    /// the writes were answered so.
    pub fn turn(&mut self) -> Result<(), Error> {
        self.flush()?;
        self.housekeeping();
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

    /// Ends in order: what was proposed is logged and answered, the log is sealed, and a mark says so.
    ///
    /// # Errors
    /// Those of the log and of the mark.
    pub fn stop(mut self) -> Result<(), Error> {
        self.flush()?;
        let end = self.writer.take().expect("the writer was given back").close()?;
        self.identity.leave_clean_mark(&self.disk, end)
    }

    fn flush(&mut self) -> Result<(), Error> {
        while let Some(outgoing) = self.next_batch() {
            let now_ms = self.clock.elapsed_ms();
            match outgoing.write(self.writer(), now_ms) {
                Ok(position) => self.written(outgoing.batch, position)?,
                Err(error @ Error::SyncFailed { .. }) => return Err(error),
                Err(error) => self.not_written(outgoing.batch, error)?,
            }
        }
        Ok(())
    }

    fn writer(&mut self) -> &mut Writer {
        self.writer.as_mut().expect("the writer is here in single-thread mode")
    }

    /// Gives the writer to a thread of its own.
    pub(crate) fn take_writer(&mut self) -> Writer {
        self.writer.take().expect("the writer is taken once")
    }

    /// [`Store::stop`] with the writer that its thread gave back.
    pub(crate) fn stop_with(mut self, writer: Writer) -> Result<(), Error> {
        self.writer = Some(writer);
        self.stop()
    }

    /// Adds an entry to the log's buffer.
    pub(crate) fn append(&mut self, entry: &Entry<'_>) -> Result<(), Error> {
        match self.wal.append(entry) {
            Err(Error::BatchFull { .. }) => {
                self.seal();
                self.wal.append(entry)
            }
            appended => appended,
        }
    }

    /// Notes what was just appended. `must_sync`: it has to be durable before it counts, in every mode.
    pub(crate) fn push(&mut self, mark: Mark, must_sync: bool) {
        self.must_sync |= must_sync;
        self.marks.push_back(mark);
        self.gathered += 1;
    }

    /// The next batch for the writer. Each one ends in [`Store::written`] or [`Store::not_written`].
    pub(crate) fn next_batch(&mut self) -> Option<Outgoing> {
        if self.ready.is_empty() {
            self.seal();
        }
        let (outgoing, items) = self.ready.pop_front()?;
        self.flying.push_back(items);
        self.shared.batch_records.add(items as u64);
        self.shared.batch_bytes.add(outgoing.batch.len_bytes());
        Some(outgoing)
    }

    fn seal(&mut self) {
        let commits: Vec<_> = std::mem::take(&mut self.committed)
            .into_iter()
            .map(|partition| {
                let place = &self.places[partition.0 as usize];
                (partition, place.applied_term, place.applied)
            })
            .collect();
        match self.wal.seal(&commits) {
            Some(batch) => {
                let must_sync = std::mem::take(&mut self.must_sync);
                self.ready.push_back((Outgoing { batch, must_sync }, std::mem::take(&mut self.gathered)));
            }
            None => self.committed.extend(commits.iter().map(|(partition, ..)| *partition)),
        }
    }

    /// The writer has written the oldest batch it had: what that commits is applied and answered.
    ///
    /// # Errors
    /// The device failed; everything was answered so.
    pub(crate) fn written(&mut self, batch: Batch, position: Position) -> Result<(), Error> {
        self.wal.recycle(batch);
        let durable = self.wal.durable(position);
        let count = self.flying.pop_front().expect("the writer had a batch");
        let marks: Vec<Mark> = self.marks.drain(..count).collect();
        let mut touched = BTreeSet::new();
        for mark in marks {
            touched.insert(mark.partition());
            match mark {
                // Of several records the last one says it for all.
                Mark::Record(partition, lsn, term) => self.places[partition.0 as usize].wrote = (lsn, term),
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
            let (lsn, term) = self.places[partition.0 as usize].wrote;
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
    /// The device failed; everything was answered so.
    pub(crate) fn apply_due(&mut self) -> Result<(), Error> {
        let mut items: Vec<(PartitionId, Pending)> = Vec::new();
        for partition in std::mem::take(&mut self.due) {
            let place = &mut self.places[partition.0 as usize];
            let commit = place.replica.commit();
            let count = place.pending.iter().take_while(|pending| pending.lsn <= commit).count();
            items.extend(place.pending.drain(..count).map(|pending| (partition, pending)));
            if count > 0 && !self.partitions.contains(partition) {
                self.partitions.open(partition, Settings::default());
                let served = self.places[partition.0 as usize].replica.serves().is_some();
                self.partitions.set_hidden(partition, !served && self.options.replication.copies > 1);
            }
        }
        if items.is_empty() {
            // What was logged may be a promise, which leaves nothing to apply and nothing waiting.
            self.measure();
            return Ok(());
        }
        let records: Vec<(PartitionId, &Record)> =
            items.iter().map(|(partition, pending)| (*partition, &pending.record)).collect();
        let replies = match self.partitions.apply_refs(&records) {
            Ok(replies) => replies,
            Err(error) => {
                let error = error.into();
                let why = WriteError::of_failure(&error);
                for (partition, pending) in items {
                    self.refuse(partition, pending, &why);
                }
                self.fail(&why);
                return Err(error);
            }
        };
        let durable = self.wal.durable(self.wal.written());
        for ((partition, pending), reply) in items.into_iter().zip(replies) {
            self.applied_one(partition, &pending, &reply);
            let Pending { lsn, term, waiters, .. } = pending;
            if !waiters.is_empty() {
                // In mode async the others are not asked.
                let alone = self.options.wal.durability == wal::Durability::Async;
                let replicas = if alone { 1 } else { self.places[partition.0 as usize].replica.replicas() };
                let committed = Committed { partition, term, lsn, replicas, durable, reply };
                for waiter in waiters {
                    self.writes.answer(waiter, Ok(committed.clone()));
                }
            }
        }
        self.measure();
        Ok(())
    }

    fn applied_one(&mut self, partition: PartitionId, pending: &Pending, reply: &Reply) {
        let Pending { lsn, term, record, .. } = pending;
        let place = &mut self.places[partition.0 as usize];
        place.applied = *lsn;
        place.applied_term = *term;
        place.creates -= record.command.may_create() as u64;
        self.replication.shipping.applied(partition, *lsn);
        self.committed.insert(partition);
        self.shared.set_lsn(partition, *lsn);
        if let Some(request) = record.request
            && self.requests.get(&(partition, request)) == Some(lsn)
        {
            self.requests.remove(&(partition, request));
        }
        if let Command::Configure(settings) = record.command {
            self.shared.set_settings(partition, Some(settings));
        }
        stats::add(&self.shared.applied_records, 1);
        if let Reply::Applied(outcome) = reply {
            if let Some(digest) = outcome.digest.filter(|_| self.options.replication.copies > 1) {
                self.digested(partition, *lsn, digest);
            }
            stats::add(&self.shared.applied_rows, outcome.applied);
            stats::add(&self.shared.created_memories, outcome.created);
            stats::add(&self.shared.evicted_memories, outcome.evicted);
        }
    }

    /// The writer could not write a batch: nothing of what was proposed is logged. Other copies may have it, so with peers this
    /// ends the use of the store.
    ///
    /// # Errors
    /// `error`, with peers.
    pub(crate) fn not_written(&mut self, batch: Batch, error: Error) -> Result<(), Error> {
        for (later, _) in self.ready.drain(..).rev() {
            self.wal.withdraw(later.batch);
        }
        self.wal.withdraw(batch);
        self.fail(&WriteError::of_failure(&error));
        if self.options.replication.copies > 1 { Err(error) } else { Ok(()) }
    }

    /// Answers everything under way with a failure, and sets partitions back to what is written.
    pub(crate) fn fail(&mut self, why: &WriteError) {
        self.flying.clear();
        self.ready.clear();
        self.gathered = 0;
        self.must_sync = false;
        self.due.clear();
        let mut touched: BTreeSet<PartitionId> = BTreeSet::new();
        for mark in std::mem::take(&mut self.marks) {
            touched.insert(mark.partition());
        }
        for partition in touched {
            self.set_back(partition, why);
        }
        self.measure();
    }

    /// Answers a record that will not be applied here.
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

    /// Begins a call whose answers go to `done`.
    pub(crate) fn begin_write(
        &mut self,
        count: usize,
        done: Done<Result<Committed, WriteError>>,
    ) -> impl Fn(usize) -> Waiter + use<> {
        self.writes.begin(count, done)
    }

    fn measure(&mut self) {
        stats::set(&self.shared.waiting_records, self.marks.len() as u64);
        stats::set(&self.shared.memories, self.partitions.memories());
        stats::set(&self.shared.memory_bytes, self.partitions.bytes());
        stats::set(&self.shared.log_bytes, self.wal.bytes());
        self.shared.set_gpu(self.partitions.gpu());
    }

    /// Notes, for this start and the next ones, why the copy here is not whole; empty = it is. Who is not whole leads nobody: the map
    /// may still call it in sync.
    pub(crate) fn note(&mut self, partition: PartitionId, what: &str) -> Result<(), Error> {
        let place = &mut self.places[partition.0 as usize];
        place.corrupt = (!what.is_empty()).then(|| what.to_owned());
        let term = place.replica.promised();
        self.append(&Entry { partition, term, lsn: Lsn(0), body: Body::Note(what.as_bytes()) })?;
        self.push(Mark::Other(partition), true);
        Ok(())
    }

    /// Logs that something else took the place of a partition: a snapshot at `lsn`, or nothing, at 0. `mark` says who waits.
    pub(crate) fn log_installed(&mut self, mark: Mark, term: Term, lsn: Lsn) -> Result<(), Error> {
        self.append(&Entry { partition: mark.partition(), term, lsn, body: Body::Installed })?;
        self.push(mark, true);
        Ok(())
    }
}
