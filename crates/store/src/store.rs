//! The store of one worker, on one thread: log, apply, answer, snapshot.
//!
//! ```text
//!  write -> checks, dedupe -> log buffer ──seal──> batch ──Writer (inline, or a thread of the engine)──> durable
//!                                │ tail: proposed, not applied                                           │
//!  answer <- ledger, columns, device <──────────────────── apply, in log order ──────────────────────────┘
//! ```
//!
//! Invariants: state changes by applied records alone, and a record is applied when it is committed (with one copy: when the
//! log has it, durable as the mode says); lsn is dense per partition; a partition that was never configured has
//! [`Settings::default`], so that the log alone gives the state; a term is served by the process that promised it, once;
//! after a device failed nothing is served.

use crate::answers::{ActivateError, Committed, WriteError};
use crate::background::Background;
use crate::gather::{Done, Gather, Waiter};
use crate::partitions::Partitions;
use crate::stats::{self, Shared};
use crate::wal::{self, Batch, Body, Entry, Position, Wal, Writer};
use crate::{Clock, Disk, Error, Identity, Origin};
use engram_memory::{ClusterId, Command, Lsn, PartitionId, Record, Reply, Request, Settings, Shape, Term};
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
    /// Settings of the log.
    pub wal: wal::Options,
    /// Bytes of log after which partitions are snapshotted. Less makes recovery shorter and writes more.
    pub snapshot_bytes: u64,
    /// Milliseconds after which changed partitions are snapshotted.
    pub snapshot_ms: u64,
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
            wal: wal::Options::default(),
            snapshot_bytes: 256 << 20,
            snapshot_ms: 5 * 60 * 1_000,
            queue_bytes: 64 << 20,
            queue_calls: 16_384,
        }
    }
}

/// How a partition stands here.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) enum State {
    /// Not served; its data may be here.
    #[default]
    Idle,
    /// Served at this term.
    Serving(Term),
    /// Damaged: not served, not written, kept for who repairs it.
    Corrupt(String),
}

/// What the store keeps of a partition beside its state machine.
#[derive(Debug, Clone, Default)]
pub(crate) struct Place {
    pub(crate) state: State,
    /// Highest term promised here.
    pub(crate) promised: Term,
    /// Last applied record.
    pub(crate) applied: Lsn,
    pub(crate) applied_term: Term,
    /// Last proposed record.
    pub(crate) last: Lsn,
    /// Records proposed and not applied, and the most memories that they create.
    pub(crate) waiting: usize,
    pub(crate) creates: u64,
    /// Snapshots on the store's own disk: the newest, and the one before.
    pub(crate) snapshots: [Option<Lsn>; 2],
}

/// Something logged and not yet applied.
pub(crate) struct Item {
    pub(crate) partition: PartitionId,
    pub(crate) term: Term,
    pub(crate) kind: Kind,
}

#[expect(clippy::large_enum_variant, reason = "nearly all items are records")]
pub(crate) enum Kind {
    Record {
        lsn: Lsn,
        record: Record,
        /// Who waits; more than one when the request came again before it was applied.
        waiters: Vec<Waiter>,
    },
    Promise {
        waiter: Waiter,
        /// Highest promise before it.
        before: Term,
    },
    Installed,
}

/// A batch for the writer.
pub(crate) struct Outgoing {
    pub(crate) batch: Batch,
    /// A promise in it has to be durable before it counts, in every mode.
    promises: bool,
}

impl Outgoing {
    pub(crate) fn write(&self, writer: &mut Writer, now_ms: u64) -> Result<Position, Error> {
        let end = writer.write(&self.batch, now_ms)?;
        if self.promises {
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
    /// In log order; the first has number `first`.
    pub(crate) tail: VecDeque<Item>,
    pub(crate) first: u64,
    /// Numbers of the items of requests, to find a repeat before its first is applied.
    pub(crate) requests: HashMap<(PartitionId, Request), u64>,
    /// Items that are in no batch yet.
    pub(crate) gathered: usize,
    /// Whether a promise is among them.
    promising: bool,
    /// Sealed batches that wait for the writer, with how many items each has.
    ready: VecDeque<(Outgoing, usize)>,
    /// Items of the batches that the writer has.
    flying: VecDeque<usize>,
    /// Partitions whose commit is news to the log.
    committed: BTreeSet<PartitionId>,
    pub(crate) writes: Gather<Result<Committed, WriteError>>,
    pub(crate) activations: Gather<Result<(), ActivateError>>,
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
        let crate::recover::Recovered { partitions, mut places, wal, writer } = recovered;
        places.iter_mut().for_each(|place| place.last = place.applied);
        let shared = Arc::new(Shared::new(options.shape.partitions));
        for partition in partitions.iter() {
            shared.set_settings(partition, partitions.ledger(partition).map(|ledger| ledger.settings));
            shared.set_lsn(partition, places[partition.0 as usize].applied);
        }
        let background = Background::new(clock.elapsed_ms());
        let mut store = Self {
            disk,
            clock,
            options,
            identity,
            partitions,
            places,
            wal,
            writer: Some(writer),
            tail: VecDeque::new(),
            first: 0,
            requests: HashMap::new(),
            gathered: 0,
            promising: false,
            ready: VecDeque::new(),
            flying: VecDeque::new(),
            committed: BTreeSet::new(),
            writes: Gather::default(),
            activations: Gather::default(),
            shared,
            background,
            scratch: Vec::new(),
        };
        store.measure();
        store
    }

    /// Who this disk and process are.
    pub const fn identity(&self) -> &Identity {
        &self.identity
    }

    /// The committed state, for reads.
    pub const fn partitions(&mut self) -> &mut Partitions {
        &mut self.partitions
    }

    /// Term at which a partition is served; `None` when it is not.
    pub fn serving(&self, partition: PartitionId) -> Option<Term> {
        match self.places.get(partition.0 as usize)?.state {
            State::Serving(term) => Some(term),
            _ => None,
        }
    }

    /// Last applied lsn of a partition, and its term.
    pub fn applied(&self, partition: PartitionId) -> (Term, Lsn) {
        self.places.get(partition.0 as usize).map_or_else(Default::default, |place| (place.applied_term, place.applied))
    }

    /// Highest term that was promised for a partition.
    pub fn promised(&self, partition: PartitionId) -> Term {
        self.places.get(partition.0 as usize).map_or(Term(0), |place| place.promised)
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
        while let Some(job) = self.next_snapshot()? {
            let result = job.run();
            self.snapshot_done(&job, result)?;
        }
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
                Err(error) => self.not_written(outgoing.batch, &error),
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

    /// Notes an item whose entry was just appended; returns its number.
    pub(crate) fn push(&mut self, item: Item) -> u64 {
        self.promising |= matches!(item.kind, Kind::Promise { .. });
        self.tail.push_back(item);
        self.gathered += 1;
        self.first + self.tail.len() as u64 - 1
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
                let promises = std::mem::take(&mut self.promising);
                self.ready.push_back((Outgoing { batch, promises }, std::mem::take(&mut self.gathered)));
            }
            None => self.committed.extend(commits.iter().map(|(partition, ..)| *partition)),
        }
    }

    /// The writer has written the oldest batch it had: what is in it is committed, applied and answered.
    ///
    /// # Errors
    /// The device failed; everything was answered so.
    pub(crate) fn written(&mut self, batch: Batch, position: Position) -> Result<(), Error> {
        self.wal.recycle(batch);
        let durable = self.wal.durable(position);
        let count = self.flying.pop_front().expect("the writer had a batch");
        let items: Vec<Item> = self.tail.drain(..count).collect();
        self.first += count as u64;
        let records: Vec<(PartitionId, &Record)> = (items.iter())
            .filter_map(|item| match &item.kind {
                Kind::Record { record, .. } => Some((item.partition, record)),
                _ => None,
            })
            .collect();
        let replies = match self.partitions.apply_refs(&records) {
            Ok(replies) => replies,
            Err(error) => {
                self.tail = items.into_iter().chain(self.tail.drain(..)).collect();
                self.fail(&error.to_string());
                return Err(error.into());
            }
        };
        let mut replies = replies.into_iter();
        for Item { partition, term, kind } in items {
            match kind {
                Kind::Record { lsn, record, waiters } => {
                    let reply = replies.next().expect("one reply per record");
                    self.applied_one(partition, term, lsn, &record, &reply);
                    let committed = Committed { partition, term, lsn, replicas: 1, durable, reply };
                    for waiter in waiters {
                        self.writes.answer(waiter, Ok(committed.clone()));
                    }
                }
                Kind::Promise { waiter, .. } => self.activations.answer(waiter, Ok(())),
                Kind::Installed => {}
            }
        }
        self.measure();
        Ok(())
    }

    fn applied_one(&mut self, partition: PartitionId, term: Term, lsn: Lsn, record: &Record, reply: &Reply) {
        let place = &mut self.places[partition.0 as usize];
        place.applied = lsn;
        place.applied_term = term;
        place.waiting -= 1;
        place.creates -= record.command.may_create() as u64;
        self.committed.insert(partition);
        self.shared.set_lsn(partition, lsn);
        if let Some(request) = record.request {
            self.requests.remove(&(partition, request));
        }
        if let Command::Configure(settings) = record.command {
            self.shared.set_settings(partition, Some(settings));
        }
        stats::add(&self.shared.applied_records, 1);
        if let Reply::Applied(outcome) = reply {
            stats::add(&self.shared.applied_rows, outcome.applied);
            stats::add(&self.shared.created_memories, outcome.created);
            stats::add(&self.shared.evicted_memories, outcome.evicted);
        }
    }

    /// The writer could not write a batch: nothing of what was proposed is logged.
    pub(crate) fn not_written(&mut self, batch: Batch, error: &Error) {
        for (later, _) in self.ready.drain(..).rev() {
            self.wal.withdraw(later.batch);
        }
        self.wal.withdraw(batch);
        self.fail(&error.to_string());
    }

    /// Answers everything proposed with a failure, and sets partitions back to what is applied.
    pub(crate) fn fail(&mut self, reason: &str) {
        self.flying.clear();
        self.ready.clear();
        self.requests.clear();
        self.gathered = 0;
        self.promising = false;
        self.first += self.tail.len() as u64;
        for Item { partition, kind, .. } in std::mem::take(&mut self.tail) {
            let place = &mut self.places[partition.0 as usize];
            place.last = place.applied;
            (place.waiting, place.creates) = (0, 0);
            match kind {
                Kind::Record { waiters, .. } => {
                    stats::add(&self.shared.failed_records, 1);
                    for waiter in waiters {
                        self.writes.answer(waiter, Err(WriteError::Failed { reason: reason.to_owned() }));
                    }
                }
                Kind::Promise { waiter, before } => {
                    // Nothing was served at this term: this process may promise it again.
                    place.state = State::Idle;
                    self.shared.set_term(partition, None);
                    place.promised = place.promised.min(before);
                    self.activations.answer(waiter, Err(ActivateError::Failed { reason: reason.to_owned() }));
                }
                Kind::Installed => {}
            }
        }
        self.measure();
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
        stats::set(&self.shared.waiting_records, self.tail.len() as u64);
        stats::set(&self.shared.memories, self.partitions.memories());
        stats::set(&self.shared.memory_bytes, self.partitions.bytes());
        stats::set(&self.shared.log_bytes, self.wal.bytes());
    }

    pub(crate) fn installed(&mut self, partition: PartitionId, term: Term, lsn: Lsn) -> Result<(), Error> {
        self.append(&Entry { partition, term, lsn, body: Body::Installed })?;
        self.push(Item { partition, term, kind: Kind::Installed });
        Ok(())
    }
}
