//! Sequencer: the order of log entries, the batches that carry them to the disk, and the callers that wait for them.
//!
//! ```text
//!  append ──> log buffer ──seal──> ready ──Writer (inline, or a thread)──> in flight ──> written
//!               │ one mark per entry, in log order                                         │
//!               └──────────────────────────────────────────────────────────────────> marks, in batches
//! ```
//!
//! Knows neither replicas nor state: it reports which marks are written, and is given what the state has applied.

use super::pending_calls::{Callback, PendingCalls, Waiter};
use super::results::{CommittedWrite, WriteError};
use crate::Error;
use crate::state::Pending;
use crate::stats::{self, Shared};
use crate::wal::{Batch, Body, Entry, Position, Wal, Writer};
use engram_memory::codec::encode_record;
use engram_memory::{Lsn, MAX_RECORD_BYTES, PartitionId, Record, Refusal, Request, Term};
use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::sync::Arc;

/// Answer to the caller of a record.
pub(crate) type Answer = Result<CommittedWrite, WriteError>;

/// What an entry of a log batch is for.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Mark {
    Record(PartitionId, Lsn, Term),
    Promise(PartitionId, Term),
    /// Other entries, without waiting callers.
    Other(PartitionId),
}

impl Mark {
    pub(crate) const fn partition(self) -> PartitionId {
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

/// Marks in no batch yet.
#[derive(Debug, Default)]
struct Unsealed {
    marks: usize,
    /// Whether one of them has to be durable.
    must_sync: bool,
}

/// A batch that is written.
pub(crate) struct WrittenBatch {
    /// Its marks, in log order.
    pub(crate) marks: Vec<Mark>,
    /// Whether it is synced too.
    pub(crate) is_durable: bool,
}

/// Log, batches and requests of a store.
pub(crate) struct Sequencer {
    wal: Wal,
    /// `None` while a thread has it.
    writer: Option<Writer>,
    /// Entries not reported as written yet, in log order.
    marks: VecDeque<Mark>,
    unsealed: Unsealed,
    /// Sealed batches that wait for the writer, with their number of marks.
    ready: VecDeque<(Outgoing, usize)>,
    /// Number of marks of each batch at the writer.
    in_flight: VecDeque<usize>,
    /// Partitions with written records that are not synced.
    unsynced: BTreeSet<PartitionId>,
    /// Position applied by partitions whose commit LSN is not logged yet.
    committed: BTreeMap<PartitionId, (Term, Lsn)>,
    /// Records in flight by request, to detect repeats before they are applied.
    requests: HashMap<(PartitionId, Request), Lsn>,
    writes: PendingCalls<Answer>,
    /// Buffer of the record that is encoded.
    scratch: Vec<u8>,
    shared: Arc<Shared>,
}

impl Sequencer {
    pub(crate) fn new(wal: Wal, writer: Writer, shared: Arc<Shared>) -> Self {
        Self {
            wal,
            writer: Some(writer),
            marks: VecDeque::new(),
            unsealed: Unsealed::default(),
            ready: VecDeque::new(),
            in_flight: VecDeque::new(),
            unsynced: BTreeSet::new(),
            committed: BTreeMap::new(),
            requests: HashMap::new(),
            writes: PendingCalls::default(),
            scratch: Vec::new(),
            shared,
        }
    }

    /// Returns the writer, in single-thread mode.
    pub(crate) fn writer(&mut self) -> &mut Writer {
        self.writer.as_mut().expect("the writer is here in single-thread mode")
    }

    /// Returns the writer, for a thread of its own.
    pub(crate) fn take_writer(&mut self) -> Writer {
        self.writer.take().expect("the writer is taken once")
    }

    /// Takes the writer back from its thread.
    pub(crate) fn return_writer(&mut self, writer: Writer) {
        self.writer = Some(writer);
    }

    /// Seals the log; returns its end.
    ///
    /// # Errors
    /// Those of the disk.
    pub(crate) fn close(&mut self) -> Result<Position, Error> {
        self.writer.take().expect("the writer was given back").close()
    }

    /// Adds an entry with its mark. `must_sync`: it has to be durable in every mode.
    ///
    /// # Errors
    /// Those of the log.
    pub(crate) fn append(&mut self, entry: &Entry<'_>, mark: Mark, must_sync: bool) -> Result<(), Error> {
        self.append_entry(entry)?;
        self.push(mark, must_sync);
        Ok(())
    }

    /// Adds a record without a mark, and passes its encoding to `retain`; [`Sequencer::push`] follows.
    ///
    /// # Errors
    /// The record is too long, or the log failed.
    pub(crate) fn append_record(
        &mut self,
        (partition, term, lsn): (PartitionId, Term, Lsn),
        record: &Record,
        retain: impl FnOnce(&[u8]),
    ) -> Result<(), WriteError> {
        let mut bytes = std::mem::take(&mut self.scratch);
        bytes.clear();
        encode_record(record, &mut bytes);
        let logged = if bytes.len() > MAX_RECORD_BYTES {
            let refusal = Refusal::Malformed { what: "record: at most 8 MiB encoded" };
            Err(WriteError::Invalid { partition, refusal })
        } else {
            self.append_entry(&Entry { partition, term, lsn, body: Body::Command(&bytes) })
                .map_err(|error| WriteError::of_failure(&error))
        };
        stats::add(&self.shared.logged_bytes, bytes.len() as u64);
        if logged.is_ok() {
            retain(&bytes);
        }
        self.scratch = bytes;
        logged
    }

    fn append_entry(&mut self, entry: &Entry<'_>) -> Result<(), Error> {
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
        self.unsealed.must_sync |= must_sync;
        self.marks.push_back(mark);
        self.unsealed.marks += 1;
    }

    /// Makes what is appended durable in every mode.
    pub(crate) const fn require_sync(&mut self) {
        self.unsealed.must_sync = true;
    }

    /// Records that a partition has applied a record, so that the next batch logs its commit.
    pub(crate) fn set_applied(&mut self, partition: PartitionId, term: Term, lsn: Lsn) {
        self.committed.insert(partition, (term, lsn));
    }

    /// Corrects the position of a partition whose state was replaced, if its commit is not logged yet.
    pub(crate) fn replace_applied(&mut self, partition: PartitionId, term: Term, lsn: Lsn) {
        if let Some(applied) = self.committed.get_mut(&partition) {
            *applied = (term, lsn);
        }
    }

    /// Returns the next batch for the writer. Each one ends in [`Sequencer::finish_batch`] or [`Sequencer::withdraw`].
    pub(crate) fn next_batch(&mut self) -> Option<Outgoing> {
        if self.ready.is_empty() {
            self.seal_batch();
        }
        let (outgoing, marks) = self.ready.pop_front()?;
        self.in_flight.push_back(marks);
        self.shared.batch_records.add(marks as u64);
        self.shared.batch_bytes.add(outgoing.batch.len_bytes());
        Some(outgoing)
    }

    fn seal_batch(&mut self) {
        let commits: Vec<_> = self.committed.iter().map(|(partition, (term, lsn))| (*partition, *term, *lsn)).collect();
        if let Some(batch) = self.wal.seal(&commits) {
            self.committed.clear();
            let Unsealed { marks, must_sync } = std::mem::take(&mut self.unsealed);
            self.ready.push_back((Outgoing { batch, must_sync }, marks));
        }
    }

    /// Handles the oldest batch of the writer as written.
    pub(crate) fn finish_batch(&mut self, batch: Batch, position: Position) -> WrittenBatch {
        self.wal.recycle(batch);
        let count = self.in_flight.pop_front().expect("the writer had a batch");
        let is_durable = self.wal.durable(position);
        WrittenBatch { marks: self.marks.drain(..count).collect(), is_durable }
    }

    /// Adds to `touched` the partitions that a durable batch syncs; remembers those of one that is only written.
    pub(crate) fn synced(&mut self, is_durable: bool, touched: &mut BTreeSet<PartitionId>) {
        if is_durable {
            touched.append(&mut self.unsynced);
        } else {
            self.unsynced.extend(touched.iter().copied());
        }
    }

    /// Withdraws a batch that failed to be written, and all later ones.
    pub(crate) fn withdraw(&mut self, batch: Batch) {
        for (later, _) in self.ready.drain(..).rev() {
            self.wal.withdraw(later.batch);
        }
        self.wal.withdraw(batch);
    }

    /// Forgets all entries that are not reported as written; returns their partitions.
    pub(crate) fn clear(&mut self) -> BTreeSet<PartitionId> {
        self.in_flight.clear();
        self.ready.clear();
        self.unsealed = Unsealed::default();
        std::mem::take(&mut self.marks).into_iter().map(Mark::partition).collect()
    }

    /// Whether everything written is durable.
    pub(crate) fn is_durable(&self) -> bool {
        self.wal.durable(self.wal.written())
    }

    /// Whether the log is durable up to a position.
    pub(crate) fn is_durable_at(&self, position: Position) -> bool {
        self.wal.durable(position)
    }

    /// Returns the end of what is written.
    pub(crate) fn written_position(&self) -> Position {
        self.wal.written()
    }

    /// Returns the bytes of the log on disk.
    pub(crate) fn log_bytes(&self) -> u64 {
        self.wal.bytes()
    }

    /// Deletes the log that snapshots at these LSNs cover; what remains is deleted later.
    pub(crate) fn delete_covered(&self, covered: &BTreeMap<PartitionId, Lsn>) {
        match self.wal.delete_below(covered) {
            Ok(bytes) => stats::add(&self.shared.deleted_log_bytes, bytes),
            // Remaining segments cost space and are deleted after the next round.
            Err(_) => stats::add(&self.shared.failed_snapshots, 1),
        }
    }

    /// Returns the LSN of the record in flight that has this request.
    pub(crate) fn request_in_flight(&self, partition: PartitionId, request: Request) -> Option<Lsn> {
        self.requests.get(&(partition, request)).copied()
    }

    /// Indexes the request of a logged record, unless it repeats one in flight.
    pub(crate) fn index_request(&mut self, partition: PartitionId, request: Request, lsn: Lsn) {
        self.requests.entry((partition, request)).or_insert(lsn);
    }

    /// Removes the request of a record that is not in flight any more.
    pub(crate) fn remove_request(&mut self, partition: PartitionId, pending: &Pending) {
        if let Some(request) = pending.record.request
            && self.requests.get(&(partition, request)) == Some(&pending.lsn)
        {
            self.requests.remove(&(partition, request));
        }
    }

    /// Begins a call whose answers are passed to `done`.
    pub(crate) fn begin_write(&mut self, count: usize, done: Callback<Answer>) -> impl Fn(usize) -> Waiter + use<> {
        self.writes.begin(count, done)
    }

    /// Answers a caller.
    pub(crate) fn answer(&mut self, waiter: Waiter, answer: Answer) {
        self.writes.answer(waiter, answer);
    }

    /// Rejects a record that will not be applied here.
    pub(crate) fn refuse(&mut self, partition: PartitionId, pending: Pending, error: &WriteError) {
        self.remove_request(partition, &pending);
        if let WriteError::Failed { .. } | WriteError::DiskFull { .. } = error {
            stats::add(&self.shared.failed_records, 1);
        }
        for waiter in pending.waiters {
            self.answer(waiter, Err(error.clone()));
        }
    }

    pub(crate) fn update_gauges(&self) {
        stats::set(&self.shared.waiting_records, self.marks.len() as u64);
        stats::set(&self.shared.log_bytes, self.wal.bytes());
    }
}
