//! The store on threads: one decides and applies, one writes the log, one writes snapshots.
//!
//! ```text
//!  handles ──events (bounded by bytes and calls)──> engine ──batch──> log writer ──durable──┐
//!                                                    │ ▲ └──copy───> snapshot writer ──done─┤
//!                                                    │ └────────────────────────────────────┘
//!                                                    └──> callbacks
//! ```
//!
//! While one batch is being synced the next one gathers; when it is durable the next one goes to the disk first, then the durable
//! one is applied and answered. Reads run on the engine's thread between batches, on committed state. A failed sync ends the process.

use crate::answers::{ActivateError, Committed, WriteError};
use crate::background::{Job, RoundDone, Written};
use crate::gather::Done;
use crate::partitions::Partitions;
use crate::stats::{self, Shared, Stats};
use crate::store::{Outgoing, Store};
use crate::wal::{Batch, Position, Writer};
use crate::{Clock, Disk, Error, FileDisk, SnapshotInfo, abort_on_sync_failure};
use engram_memory::{Blobs, Command, Incarnation, Lsn, PartitionId, Record, Settings, StoreId, Term, Updates};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, SyncSender, channel, sync_channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// How long the engine sleeps at most when nothing comes: the grain of snapshots and expiry.
const IDLE: Duration = Duration::from_millis(500);
/// Events taken before the log and the snapshots get their turn.
const EVENTS_PER_TURN: usize = 1_024;
/// Bytes that a call counts in the queue beside its columns.
const CALL_BYTES: usize = 256;

/// Too much is under way: try again later, with less.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the store is overloaded: {bytes} bytes in {calls} calls are under way")]
pub struct Overloaded {
    /// Bytes of records taken and not answered.
    pub bytes: usize,
    /// Calls taken and not answered.
    pub calls: usize,
}

/// Starts stores.
pub struct Engine;

/// A started store. Cheap to clone; callbacks run on the engine's thread, so they should hand over and return. After the
/// engine ended (stopped, or its device failed) writes are answered [`WriteError::Failed`]; callbacks of what was under way just
/// then may be dropped instead.
#[derive(Clone)]
pub struct Handle {
    door: Arc<Door>,
    queue: Arc<Queue>,
    shared: Arc<Shared>,
    identity: (StoreId, Incarnation),
}

/// Where events go in; the engine ends when the last handle closes it.
struct Door(Sender<Event>);

impl Drop for Door {
    fn drop(&mut self) {
        // An engine that has ended needs no stop.
        let _ = self.0.send(Event::Stop(Box::new(|_| {})));
    }
}

/// What comes to the engine.
enum Event {
    Write(Vec<(PartitionId, Record)>, Done<Result<Committed, WriteError>>),
    Read(Box<dyn FnOnce(&mut Partitions) + Send>),
    Activate(Vec<(PartitionId, Term)>, Done<Result<(), ActivateError>>),
    Deactivate(Vec<PartitionId>, Box<dyn FnOnce() + Send>),
    Snapshot(Option<PathBuf>, RoundDone),
    Stop(Box<dyn FnOnce(Result<(), Error>) + Send>),
    BatchWritten(Batch, Result<Position, Error>),
    SnapshotWritten(Box<Job>, Result<Written, Error>),
}

/// What is taken and not answered.
struct Queue {
    bytes: AtomicUsize,
    calls: AtomicUsize,
    most_bytes: usize,
    most_calls: usize,
}

/// A place in the queue, given back when dropped.
struct Place {
    queue: Arc<Queue>,
    bytes: usize,
}

impl Queue {
    fn take(self: &Arc<Self>, bytes: usize) -> Result<Place, Overloaded> {
        let bytes = bytes + CALL_BYTES;
        let place = Place { queue: Arc::clone(self), bytes };
        let bytes_before = self.bytes.fetch_add(bytes, Ordering::Relaxed);
        let calls_before = self.calls.fetch_add(1, Ordering::Relaxed);
        // One call always fits, however large: its size is bounded where it is made.
        if calls_before > 0 && (bytes_before + bytes > self.most_bytes || calls_before >= self.most_calls) {
            return Err(Overloaded { bytes: bytes_before, calls: calls_before });
        }
        Ok(place)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.queue.bytes.fetch_sub(self.bytes, Ordering::Relaxed);
        self.queue.calls.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Handle {
    /// Proposes records, each of one partition, and calls `done` with all answers in order once they are committed and applied.
    /// Records of one partition are applied in the order given.
    ///
    /// # Errors
    /// [`Overloaded`]: nothing was taken, `done` is dropped.
    pub fn write(
        &self,
        records: Vec<(PartitionId, Record)>,
        done: impl FnOnce(Vec<Result<Committed, WriteError>>) + Send + 'static,
    ) -> Result<(), Overloaded> {
        let bytes = records.iter().map(|(_, record)| record_bytes(record)).sum();
        let place = self.take(bytes)?;
        let done = Box::new(move |answers| {
            drop(place);
            done(answers);
        });
        self.send(Event::Write(records, done));
        Ok(())
    }

    /// Runs `read` on the committed state, between two batches, then `done` with its result, both on the engine's thread.
    ///
    /// # Errors
    /// [`Overloaded`]: nothing was taken, both are dropped.
    pub fn read<T: Send + 'static>(
        &self,
        read: impl FnOnce(&mut Partitions) -> T + Send + 'static,
        done: impl FnOnce(T) + Send + 'static,
    ) -> Result<(), Overloaded> {
        let place = self.take(0)?;
        self.send(Event::Read(Box::new(move |partitions| {
            let result = read(partitions);
            drop(place);
            done(result);
        })));
        Ok(())
    }

    /// Settings of a partition that is here, as of its last applied or activating configuration. Never waits for the engine.
    pub fn settings(&self, partition: PartitionId) -> Option<Settings> {
        self.shared.settings(partition)
    }

    /// Term at which a partition is served, and its last applied lsn; `None` when it is not served. Never waits for the engine.
    pub fn position(&self, partition: PartitionId) -> Option<(Term, Lsn)> {
        self.shared.position(partition)
    }

    /// See [`Store::activate`].
    pub fn activate(
        &self,
        partitions: Vec<(PartitionId, Term)>,
        done: impl FnOnce(Vec<Result<(), ActivateError>>) + Send + 'static,
    ) {
        self.send(Event::Activate(partitions, Box::new(done)));
    }

    /// See [`Store::deactivate`].
    pub fn deactivate(&self, partitions: Vec<PartitionId>, done: impl FnOnce() + Send + 'static) {
        self.send(Event::Deactivate(partitions, Box::new(done)));
    }

    /// Snapshots every partition that has data into `folder`, or into the store's own directory. See [`Store::snapshot_all`].
    pub fn snapshot_all(
        &self,
        folder: Option<PathBuf>,
        done: impl FnOnce(Result<Vec<SnapshotInfo>, Error>) + Send + 'static,
    ) {
        self.send(Event::Snapshot(folder, Box::new(done)));
    }

    /// Ends in order: answers what was taken, seals and syncs the log, leaves the clean mark, frees the folder, then calls `done`.
    pub fn stop(&self, done: impl FnOnce(Result<(), Error>) + Send + 'static) {
        self.send(Event::Stop(Box::new(done)));
    }

    /// What was counted so far.
    pub fn stats(&self) -> Stats {
        self.shared.snapshot()
    }

    /// The disk, and this process start on it.
    pub const fn identity(&self) -> (StoreId, Incarnation) {
        self.identity
    }

    fn take(&self, bytes: usize) -> Result<Place, Overloaded> {
        self.queue.take(bytes).inspect_err(|_| stats::add(&self.shared.overloaded_calls, 1))
    }

    fn send(&self, event: Event) {
        if let Err(returned) = self.door.0.send(event) {
            returned.0.refuse(&self.shared.snapshot().fault.unwrap_or_else(|| STOPPED.to_owned()));
        }
    }
}

const STOPPED: &str = "the store was stopped";

impl Event {
    /// Answers for an engine that ended.
    fn refuse(self, reason: &str) {
        let reason = || reason.to_owned();
        match self {
            Self::Write(records, done) => {
                done(records.iter().map(|_| Err(WriteError::Failed { reason: reason() })).collect());
            }
            Self::Activate(partitions, done) => {
                done(partitions.iter().map(|_| Err(ActivateError::Failed { reason: reason() })).collect());
            }
            Self::Deactivate(_, done) => done(),
            Self::Stop(done) => done(Ok(())),
            Self::Snapshot(_, done) => done(Err(Error::Stopped)),
            Self::Read(_) | Self::BatchWritten(..) | Self::SnapshotWritten(..) => {}
        }
    }
}

impl Engine {
    /// Starts the threads of a store. They end with [`Handle::stop`], or when the last handle is dropped.
    ///
    /// # Errors
    /// A thread cannot be started.
    pub fn start(mut store: Store) -> std::io::Result<Handle> {
        let (events, incoming) = channel();
        let (batches, to_write) = sync_channel::<Outgoing>(1);
        let (jobs, to_copy) = sync_channel::<Box<Job>>(1);
        let (queue, shared) = (
            Arc::new(Queue {
                bytes: AtomicUsize::new(0),
                calls: AtomicUsize::new(0),
                most_bytes: store.options.queue_bytes,
                most_calls: store.options.queue_calls,
            }),
            Arc::clone(&store.shared),
        );
        let identity = (store.identity().store(), store.identity().incarnation());
        let (clock, writer) = (Arc::clone(&store.clock), store.take_writer());
        let log = {
            let (shared, events) = (Arc::clone(&shared), events.clone());
            let name = thread::Builder::new().name("engram-log".into());
            name.spawn(move || write_log(writer, &to_write, &events, &*clock, &shared))?
        };
        let snapshots = {
            let events = events.clone();
            thread::Builder::new().name("engram-snapshot".into()).spawn(move || write_snapshots(&to_copy, &events))?
        };
        let threads = Threads { store, incoming, batches, jobs, log, snapshots, writing: false, copying: false };
        thread::Builder::new().name("engram-store".into()).spawn(move || threads.run())?;
        Ok(Handle { door: Arc::new(Door(events)), queue, shared, identity })
    }
}

/// The engine's thread.
struct Threads {
    store: Store,
    incoming: Receiver<Event>,
    batches: SyncSender<Outgoing>,
    jobs: SyncSender<Box<Job>>,
    log: JoinHandle<Writer>,
    snapshots: JoinHandle<()>,
    /// A batch is at the log writer.
    writing: bool,
    /// A partition is at the snapshot writer.
    copying: bool,
}

/// Who is told when the engine has ended.
type Stopped = Box<dyn FnOnce(Result<(), Error>) + Send>;

impl Threads {
    fn run(mut self) {
        let ended = self.turns();
        if let Err(error) = &ended {
            *self.store.shared.fault.write().expect(stats::UNPOISONED) = Some(error.to_string());
            self.store.fail(&error.to_string());
        }
        let Self { store, incoming, batches, jobs, log, snapshots, .. } = self;
        let shared = Arc::clone(&store.shared);
        drop((batches, jobs));
        let writer = log.join().expect("the log writer does not panic");
        snapshots.join().expect("the snapshot writer does not panic");
        let result = match ended {
            Ok(stopped) => (store.stop_with(writer), stopped),
            Err(error) => (Err(error), Box::new(|_| {}) as Stopped),
        };
        let reason = shared.snapshot().fault.unwrap_or_else(|| STOPPED.to_owned());
        incoming.try_iter().for_each(|event| event.refuse(&reason));
        drop(incoming);
        (result.1)(result.0);
    }

    /// Takes turns until it is told to stop and nothing is under way; returns who waits for that.
    fn turns(&mut self) -> Result<Stopped, Error> {
        let mut stopping: Option<Stopped> = None;
        loop {
            let mut next = self.incoming.recv_timeout(IDLE).ok();
            let mut taken = 0;
            while let Some(event) = next {
                match event {
                    Event::Stop(done) if stopping.is_none() => stopping = Some(done),
                    Event::BatchWritten(..) | Event::SnapshotWritten(..) => self.take(event)?,
                    event if stopping.is_some() => event.refuse(STOPPED),
                    event => self.take(event)?,
                }
                taken += 1;
                next = if taken < EVENTS_PER_TURN { self.incoming.try_recv().ok() } else { None };
            }
            if stopping.is_none() {
                self.store.housekeeping();
                self.copy_next()?;
            }
            self.write_next();
            if !self.writing
                && !self.copying
                && let Some(done) = stopping.take()
            {
                return Ok(done);
            }
        }
    }

    fn take(&mut self, event: Event) -> Result<(), Error> {
        match event {
            Event::Write(records, done) => self.store.write(records, done),
            Event::Read(read) => {
                stats::add(&self.store.shared.reads, 1);
                read(self.store.partitions());
            }
            Event::Activate(partitions, done) => self.store.activate(partitions, done),
            Event::Deactivate(partitions, done) => {
                partitions.into_iter().for_each(|partition| self.store.deactivate(partition));
                done();
            }
            Event::Snapshot(folder, done) => match folder.map(FileDisk::new).transpose() {
                Ok(disk) => self.store.snapshot_all(disk.map(|disk| Arc::new(disk) as Arc<dyn Disk>), done),
                Err(error) => done(Err(error)),
            },
            Event::BatchWritten(batch, Ok(position)) => {
                self.writing = false;
                // The disk works on the next batch while this one is applied.
                self.write_next();
                let begun = Instant::now();
                self.store.written(batch, position)?;
                self.store.shared.apply_us.add(begun.elapsed().as_micros() as u64);
            }
            Event::BatchWritten(batch, Err(error)) => {
                self.writing = false;
                self.store.not_written(batch, &error);
            }
            Event::SnapshotWritten(job, result) => {
                self.copying = false;
                self.store.snapshot_done(&job, result)?;
            }
            Event::Stop(done) => done(Err(Error::Stopped)),
        }
        Ok(())
    }

    fn write_next(&mut self) {
        if !self.writing
            && let Some(outgoing) = self.store.next_batch()
        {
            self.writing = true;
            self.batches.send(outgoing).expect("the log writer ends after the engine");
        }
    }

    fn copy_next(&mut self) -> Result<(), Error> {
        if !self.copying
            && let Some(job) = self.store.next_snapshot()?
        {
            self.copying = true;
            self.jobs.send(Box::new(job)).expect("the snapshot writer ends after the engine");
        }
        Ok(())
    }
}

/// The log writer's thread: writes what comes, syncs and seals what is due; gives the writer back when nobody sends any more.
fn write_log(
    mut writer: Writer,
    batches: &Receiver<Outgoing>,
    events: &Sender<Event>,
    clock: &dyn Clock,
    shared: &Shared,
) -> Writer {
    let mut wait = Duration::ZERO;
    loop {
        match batches.recv_timeout(wait) {
            Ok(outgoing) => {
                let begun = Instant::now();
                let result = abort_on_sync_failure(outgoing.write(&mut writer, clock.elapsed_ms()));
                shared.write_us.add(begun.elapsed().as_micros() as u64);
                if events.send(Event::BatchWritten(outgoing.batch, result)).is_err() {
                    return writer;
                }
                wait = due(&writer, clock);
            }
            Err(RecvTimeoutError::Timeout) => {
                // A seal that does not fit on a full disk is tried again; nothing waits for it.
                let ticked = abort_on_sync_failure(writer.tick(clock.elapsed_ms()));
                wait = if ticked.is_ok() { due(&writer, clock) } else { IDLE };
            }
            Err(RecvTimeoutError::Disconnected) => return writer,
        }
    }
}

fn due(writer: &Writer, clock: &dyn Clock) -> Duration {
    writer.wait_ms(clock.elapsed_ms()).map_or(IDLE, Duration::from_millis).min(IDLE)
}

/// The snapshot writer's thread.
fn write_snapshots(jobs: &Receiver<Box<Job>>, events: &Sender<Event>) {
    for job in jobs {
        let result = abort_on_sync_failure(job.run());
        if events.send(Event::SnapshotWritten(job, result)).is_err() {
            return;
        }
    }
}

/// About the memory that a record takes until it is answered: once as it is, once in the log's buffer.
fn record_bytes(record: &Record) -> usize {
    let strings = |blobs: &Option<Blobs>| blobs.as_ref().map_or(0, |blobs| blobs.bytes().len() + blobs.len() * 4);
    let columns = match &record.command {
        Command::Upsert(upsert) => {
            upsert.ids.len() * 13 + strings(&upsert.keys) + upsert.features.len() + strings(&upsert.payloads)
        }
        Command::Remove { ids } => ids.len() * 8,
        Command::Reinforce(updates) | Command::Epoch { updates, .. } | Command::EpochPart { updates, .. } => {
            match updates {
                Updates::ById { ids, keys, .. } => ids.len() * 12 + strings(keys),
                Updates::ByGroup(groups) => groups.len() * 8,
            }
        }
        Command::RunRecord { state, row, .. } => state.len() + row.as_ref().map_or(0, Vec::len),
        _ => 0,
    };
    2 * columns + CALL_BYTES
}
