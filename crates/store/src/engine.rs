//! Runs the store on threads: one decides and applies, one writes the log, one writes snapshots.
//!
//! ```text
//!  handles ──events (bounded by bytes and calls)──> engine ──batch──> log writer ──durable──┐
//!                                                    │ ▲ └──export─> snapshot writer ──done─┤
//!                                                    │ └────────────────────────────────────┘
//!                                                    └──> callbacks
//! ```
//!
//! While one batch is synced the next one fills; once it is durable the next one is sent to the disk before the durable one is
//! applied and answered. Reads run on the engine thread between batches, on committed state. A failed sync aborts the process.

mod stepped;

pub use stepped::SteppedEngine;

use crate::background::{Job, JobOutput, RoundCallback};
use crate::confirmed_reads::ConfirmError;
use crate::partitions::Partitions;
use crate::peer::{Envelope, Peers};
use crate::pending_calls::Callback;
use crate::replication::ReplicaStatus;
use crate::results::{ActivateError, CommittedWrite, WriteError};
use crate::session_clock::SessionClock;
use crate::stale_reads::ReplicaPosition;
use crate::stats::{self, Shared, Stats};
use crate::store::{Options, Outgoing, Store};
use crate::wal::{Batch, Position, Writer};
use crate::{Clock, Disk, Error, FileDisk, SnapshotInfo, abort_on_sync_failure};
use engram_cluster::PartitionMap;
use engram_memory::{
    Blobs, BufferCommand, Command, Incarnation, Lsn, Member, Ordinal, PartitionId, Record, Settings, StoreId, Term,
    Updates,
};
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, SyncSender, channel, sync_channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// Longest sleep of the idle engine: the granularity of snapshots and expiry.
const IDLE: Duration = Duration::from_millis(500);
/// Longest sleep with peers or during a backup: the granularity of lease expiry and retries.
const IDLE_WITH_PEERS: Duration = Duration::from_millis(50);
/// Events processed before the log and the snapshots are served.
const EVENTS_PER_TURN: usize = 1_024;
/// Bytes counted per queued call in addition to its columns.
const CALL_BYTES: usize = 256;

/// The queue is full: retry later.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the store is overloaded: {bytes} bytes in {calls} calls are in flight")]
pub struct Overload {
    /// Bytes of queued records.
    pub bytes: usize,
    /// Queued calls.
    pub calls: usize,
}

/// A partition could not be read because a lease is missing.
#[derive(Debug)]
pub struct MissingLease<R> {
    /// The partition.
    pub partition: PartitionId,
    /// The read, if it did not run.
    pub read: Option<R>,
}

/// Starts store engines.
pub struct Engine;

/// Handle of a running store. Cheap to clone; callbacks run on the engine thread and must return quickly. After the engine ended
/// (stopped, or its log or device failed) writes are answered with [`WriteError::Failed`] or [`WriteError::DiskFull`]; callbacks of
/// calls in flight at that moment may be dropped instead.
#[derive(Clone)]
pub struct Handle {
    sender: Arc<EventSender>,
    queue: Arc<Queue>,
    shared: Arc<Shared>,
    identity: (StoreId, Incarnation),
    session_clock: Arc<SessionClock>,
}

/// Sends events to the engine, which stops when the last handle is dropped.
struct EventSender {
    events: Sender<Event>,
    /// Called after each event if no thread waits for events.
    wake: Option<Box<dyn Fn() + Send + Sync>>,
}

impl EventSender {
    /// Returns the event if the engine has ended.
    fn send(&self, event: Event) -> Result<(), Box<Event>> {
        self.events.send(event).map_err(|returned| Box::new(returned.0))?;
        if let Some(wake) = &self.wake {
            wake();
        }
        Ok(())
    }
}

impl Drop for EventSender {
    fn drop(&mut self) {
        // Fails if the engine has ended already.
        let _ = self.send(Event::Stop(Box::new(|_| {})));
    }
}

/// Work for the engine thread.
type StoreTask = Box<dyn FnOnce(&mut Store) -> Result<(), Error> + Send>;

/// Event processed by the engine.
enum Event {
    Write(Vec<(PartitionId, Record)>, Option<engram_trace::Context>, Callback<Result<CommittedWrite, WriteError>>),
    Read(Box<dyn FnOnce(&mut Partitions) + Send>),
    Activate(Vec<(PartitionId, Term)>, Callback<Result<(), ActivateError>>),
    /// Work such as replication.
    Task(StoreTask),
    Snapshot(Option<PathBuf>, RoundCallback),
    Stop(Box<dyn FnOnce(Result<(), Error>) + Send>),
    BatchWritten(Batch, Result<Position, Error>),
    JobDone(Box<Job>, Result<JobOutput, Error>),
}

/// Accounting of calls that are not answered yet.
struct Queue {
    bytes: AtomicUsize,
    calls: AtomicUsize,
    max_bytes: usize,
    max_calls: usize,
}

/// Capacity taken by one call, released on drop.
struct QueueSlot {
    queue: Arc<Queue>,
    bytes: usize,
}

impl Queue {
    const fn of(options: &Options) -> Self {
        Self {
            bytes: AtomicUsize::new(0),
            calls: AtomicUsize::new(0),
            max_bytes: options.queue_bytes,
            max_calls: options.queue_calls,
        }
    }

    fn reserve(self: &Arc<Self>, bytes: usize) -> Result<QueueSlot, Overload> {
        let bytes = bytes + CALL_BYTES;
        let slot = QueueSlot { queue: Arc::clone(self), bytes };
        let bytes_before = self.bytes.fetch_add(bytes, Ordering::Relaxed);
        let calls_before = self.calls.fetch_add(1, Ordering::Relaxed);
        // A single call always fits: its size is bounded by the caller.
        if calls_before > 0 && (bytes_before + bytes > self.max_bytes || calls_before >= self.max_calls) {
            return Err(Overload { bytes: bytes_before, calls: calls_before });
        }
        Ok(slot)
    }
}

impl Drop for QueueSlot {
    fn drop(&mut self) {
        self.queue.bytes.fetch_sub(self.bytes, Ordering::Relaxed);
        self.queue.calls.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Handle {
    /// Proposes records, each of one partition, and calls `done` with all answers in order once they are committed and applied.
    /// Records of one partition are applied in the given order. Within a sampled trace, the steps of each record are spans.
    ///
    /// # Errors
    /// [`Overload`]: nothing was queued, `done` is dropped.
    pub fn write(
        &self,
        records: Vec<(PartitionId, Record)>,
        done: impl FnOnce(Vec<Result<CommittedWrite, WriteError>>) + Send + 'static,
    ) -> Result<(), Overload> {
        let bytes = records.iter().map(|(_, record)| record_bytes(record)).sum();
        let slot = self.reserve(bytes)?;
        let done = Box::new(move |answers| {
            drop(slot);
            done(answers);
        });
        let trace = engram_trace::current().filter(|context| context.is_sampled());
        self.send(Event::Write(records, trace, done));
        Ok(())
    }

    /// Runs `read` on the committed state between two batches, then `done` with its result, both on the engine thread.
    ///
    /// # Errors
    /// [`Overload`]: nothing was queued, both are dropped.
    pub fn read<T: Send + 'static>(
        &self,
        read: impl FnOnce(&mut Partitions) -> T + Send + 'static,
        done: impl FnOnce(T) + Send + 'static,
    ) -> Result<(), Overload> {
        let slot = self.reserve(0)?;
        self.send(Event::Read(Box::new(move |partitions| {
            let result = read(partitions);
            drop(slot);
            done(result);
        })));
        Ok(())
    }

    /// Returns the settings of a local partition, as of its last applied or activating configuration. Does not wait for the engine.
    pub fn settings(&self, partition: PartitionId) -> Option<Settings> {
        self.shared.settings(partition)
    }

    /// Returns the term at which a partition is served and its last applied LSN; `None` if it is not served. Does not wait for the engine.
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

    /// See [`Store::update_map`].
    pub fn update_map(&self, map: Arc<PartitionMap>) {
        self.submit(move |store| {
            store.update_map(&map);
            Ok(())
        });
    }

    /// Processes messages of a peer; `processed` is called afterwards, so that the caller can bound the messages in flight.
    pub fn receive(&self, from: Member, envelopes: Vec<Envelope>, processed: impl FnOnce() + Send + 'static) {
        self.submit(move |store| {
            let result = store.receive(from, envelopes);
            processed();
            result
        });
    }

    /// See [`Store::connect_peer`].
    pub fn connect_peer(&self, peer: Member) {
        self.submit(move |store| {
            store.connect_peer(peer);
            Ok(())
        });
    }

    /// See [`Store::suspect`].
    pub fn suspect(&self, ordinal: Ordinal) {
        self.submit(move |store| {
            store.suspect(ordinal);
            Ok(())
        });
    }

    /// See [`Store::trust`].
    pub fn trust(&self, ordinal: Ordinal) {
        self.submit(move |store| {
            store.trust(ordinal);
            Ok(())
        });
    }

    /// See [`Store::set_leaving`].
    pub fn set_leaving(&self, leavers: BTreeSet<Ordinal>) {
        self.submit(move |store| {
            store.set_leaving(&leavers);
            Ok(())
        });
    }

    /// Records a read lease granted until `until_ms` ([`Clock::elapsed_ms`]) for all partitions but `except`.
    pub fn record_lease(&self, granter: Member, until_ms: u64, except: Vec<PartitionId>) {
        self.submit(move |store| {
            store.record_lease(granter, until_ms, except);
            Ok(())
        });
    }

    /// Grants a process a read lease from now, and passes the partitions not covered to `done`.
    pub fn grant_lease(&self, holder: Member, done: impl FnOnce(Vec<PartitionId>) + Send + 'static) {
        self.submit(move |store| {
            done(store.grant_lease(holder));
            Ok(())
        });
    }

    /// See [`Store::confirm_dead`].
    pub fn confirm_dead(&self, dead: Member) {
        self.submit(move |store| {
            store.confirm_dead(dead);
            Ok(())
        });
    }

    /// As [`Handle::read`], linearizable for `partitions`: their leases are checked before and after `read` runs. If one is missing
    /// before, `done` gets `read` back for a retry.
    ///
    /// # Errors
    /// [`Overload`]: nothing was queued, both are dropped.
    pub fn read_leased<T: Send + 'static, R: FnOnce(&mut Partitions) -> T + Send + 'static>(
        &self,
        partitions: Vec<PartitionId>,
        read: R,
        done: impl FnOnce(Result<T, MissingLease<R>>) + Send + 'static,
    ) -> Result<(), Overload> {
        let slot = self.reserve(0)?;
        self.submit(move |store| {
            stats::add(&store.shared.reads, 1);
            let missing_lease =
                |store: &Store| partitions.iter().copied().find(|partition| !store.is_readable(*partition));
            if let Some(partition) = missing_lease(store) {
                drop(slot);
                done(Err(MissingLease { partition, read: Some(read) }));
                return Ok(());
            }
            let result = read(store.partitions());
            drop(slot);
            let missing_lease = missing_lease(store);
            done(missing_lease.map_or(Ok(result), |partition| Err(MissingLease { partition, read: None })));
            Ok(())
        });
        Ok(())
    }

    /// As [`Handle::read`], linearizable for `partitions` without relying on clocks: runs once every in-sync member has confirmed
    /// this process as primary. See [`Store::read_confirmed`].
    ///
    /// # Errors
    /// [`Overload`]: nothing was queued, both are dropped.
    pub fn read_confirmed<T: Send + 'static>(
        &self,
        partitions: Vec<PartitionId>,
        read: impl FnOnce(&mut Partitions) -> T + Send + 'static,
        done: impl FnOnce(Result<T, ConfirmError>) + Send + 'static,
    ) -> Result<(), Overload> {
        let slot = self.reserve(0)?;
        self.submit(move |store| {
            stats::add(&store.shared.reads, 1);
            store.read_confirmed(partitions, move |confirmed| {
                let result = confirmed.map(read);
                drop(slot);
                done(result);
            });
            Ok(())
        });
        Ok(())
    }

    /// As [`Handle::read`], of the local replicas in any role that lag at most `max_lag_ms`: `read` sees only those, and gets their
    /// positions. See [`Store::read_replicas`].
    ///
    /// # Errors
    /// [`Overload`]: nothing was queued, both are dropped.
    pub fn read_replicas<T: Send + 'static>(
        &self,
        partitions: Vec<PartitionId>,
        max_lag_ms: u64,
        read: impl FnOnce(&mut Partitions, Vec<ReplicaPosition>) -> T + Send + 'static,
        done: impl FnOnce(T) + Send + 'static,
    ) -> Result<(), Overload> {
        let slot = self.reserve(0)?;
        self.submit(move |store| {
            stats::add(&store.shared.reads, 1);
            store.read_replicas(partitions, max_lag_ms, move |partitions, positions| {
                let result = read(partitions, positions);
                drop(slot);
                done(result);
            });
            Ok(())
        });
        Ok(())
    }

    /// See [`Store::transfer_leadership`].
    pub fn transfer_leadership(&self, partition: PartitionId, to: Ordinal) {
        self.submit(move |store| {
            store.transfer_leadership(partition, to);
            Ok(())
        });
    }

    /// Passes the status of every replica to `done`.
    pub fn replicas(&self, done: impl FnOnce(Vec<ReplicaStatus>) + Send + 'static) {
        self.submit(move |store| {
            done(store.replicas());
            Ok(())
        });
    }

    fn submit(&self, turn: impl FnOnce(&mut Store) -> Result<(), Error> + Send + 'static) {
        self.send(Event::Task(Box::new(turn)));
    }

    /// Snapshots every partition with data into `folder`, or into the store's own directory. See [`Store::snapshot_all`].
    pub fn snapshot_all(
        &self,
        folder: Option<PathBuf>,
        done: impl FnOnce(Result<Vec<SnapshotInfo>, Error>) + Send + 'static,
    ) {
        self.send(Event::Snapshot(folder, Box::new(done)));
    }

    /// Snapshots one partition into `folder` if it is visible here. See [`Store::snapshot_one`].
    pub fn snapshot_one(
        &self,
        partition: PartitionId,
        folder: PathBuf,
        done: impl FnOnce(Result<Vec<SnapshotInfo>, Error>) + Send + 'static,
    ) {
        self.submit(move |store| {
            match FileDisk::new(folder) {
                Ok(disk) => store.snapshot_one(partition, Arc::new(disk), done),
                Err(error) => done(Err(error)),
            }
            Ok(())
        });
    }

    /// Stops gracefully: answers queued calls, seals and syncs the log, writes the clean mark, unlocks the directory, then calls `done`.
    pub fn stop(&self, done: impl FnOnce(Result<(), Error>) + Send + 'static) {
        self.send(Event::Stop(Box::new(done)));
    }

    /// Returns the counters.
    pub fn stats(&self) -> Stats {
        self.shared.snapshot()
    }

    /// Returns the store id and the incarnation of this process.
    pub const fn identity(&self) -> (StoreId, Incarnation) {
        self.identity
    }

    /// Returns the time of sessions.
    pub fn session_clock(&self) -> &SessionClock {
        &self.session_clock
    }

    fn reserve(&self, bytes: usize) -> Result<QueueSlot, Overload> {
        self.queue.reserve(bytes).inspect_err(|_| stats::add(&self.shared.overloaded_calls, 1))
    }

    fn send(&self, event: Event) {
        if let Err(returned) = self.sender.send(event) {
            returned.refuse(&self.shared.ended());
        }
    }
}

impl Event {
    /// Answers an event on behalf of an ended engine.
    fn refuse(self, cause: &WriteError) {
        match self {
            Self::Write(records, _, done) => {
                done(records.iter().map(|_| Err(cause.clone())).collect());
            }
            Self::Activate(partitions, done) => {
                done(partitions.iter().map(|_| Err(ActivateError::Failed { reason: cause.reason() })).collect());
            }
            Self::Stop(done) => done(Ok(())),
            Self::Snapshot(_, done) => done(Err(Error::Stopped)),
            Self::Read(_) | Self::Task(_) | Self::BatchWritten(..) | Self::JobDone(..) => {}
        }
    }
}

impl Engine {
    /// Starts the threads of a store, which sends its messages through `peers` ([`crate::NoPeers`] = none). They end with
    /// [`Handle::stop`], or when the last handle is dropped.
    ///
    /// # Errors
    /// A thread cannot be started.
    pub fn start(mut store: Store, peers: Box<dyn Peers>) -> std::io::Result<Handle> {
        store.set_peers(peers);
        let (events, incoming) = channel();
        let (batches, to_write) = sync_channel::<Outgoing>(1);
        let (jobs, to_export) = sync_channel::<Box<Job>>(1);
        let (queue, shared) = (Arc::new(Queue::of(&store.options)), Arc::clone(&store.shared));
        let identity = (store.identity().store(), store.identity().incarnation());
        let session_clock = Arc::clone(&store.session_clock);
        let (clock, writer) = (Arc::clone(&store.clock), store.take_writer());
        let log = {
            let (shared, events) = (Arc::clone(&shared), events.clone());
            let name = thread::Builder::new().name("engram-log".into());
            name.spawn(move || write_log(writer, &to_write, &events, &*clock, &shared))?
        };
        let snapshots = {
            let events = events.clone();
            thread::Builder::new().name("engram-snapshot".into()).spawn(move || write_snapshots(&to_export, &events))?
        };
        let threads = EngineThread { store, incoming, batches, jobs, log, snapshots, writing: false, exporting: false };
        thread::Builder::new().name("engram-store".into()).spawn(move || threads.run())?;
        Ok(Handle { sender: Arc::new(EventSender { events, wake: None }), queue, shared, identity, session_clock })
    }

    /// Starts a store without threads, for simulators: events are queued until [`SteppedEngine::step`], and `wake` is called for each.
    pub fn stepped(store: Store, peers: Box<dyn Peers>, wake: Box<dyn Fn() + Send + Sync>) -> (Handle, SteppedEngine) {
        SteppedEngine::start(store, peers, wake)
    }
}

/// The engine thread.
struct EngineThread {
    store: Store,
    incoming: Receiver<Event>,
    batches: SyncSender<Outgoing>,
    jobs: SyncSender<Box<Job>>,
    log: JoinHandle<Writer>,
    snapshots: JoinHandle<()>,
    /// Whether the log writer has a batch.
    writing: bool,
    /// Whether the snapshot writer has a job.
    exporting: bool,
}

/// Called when the engine has stopped.
type StopCallback = Box<dyn FnOnce(Result<(), Error>) + Send>;

impl EngineThread {
    fn run(mut self) {
        let ended = self.run_until_stopped();
        if let Err(error) = &ended {
            let cause = self.store.shared.end(error);
            self.store.fail(&cause);
        }
        let Self { store, incoming, batches, jobs, log, snapshots, .. } = self;
        let shared = Arc::clone(&store.shared);
        drop((batches, jobs));
        let writer = log.join().expect("the log writer does not panic");
        snapshots.join().expect("the snapshot writer does not panic");
        let result = match ended {
            Ok(stopped) => (store.stop_with(writer), stopped),
            Err(error) => (Err(error), Box::new(|_| {}) as StopCallback),
        };
        let cause = shared.ended();
        incoming.try_iter().for_each(|event| event.refuse(&cause));
        drop(incoming);
        (result.1)(result.0);
    }

    /// Runs turns until a stop is requested and nothing is in flight; returns the callback of the stop.
    fn run_until_stopped(&mut self) -> Result<StopCallback, Error> {
        let mut stopping: Option<StopCallback> = None;
        loop {
            let wakes_often = self.store.options.replication.replicas > 1 || self.store.background.writes_backup();
            let idle = if wakes_often { IDLE_WITH_PEERS } else { IDLE };
            let mut next = self.incoming.recv_timeout(idle).ok();
            let mut processed = 0;
            while let Some(event) = next {
                match event {
                    Event::Stop(done) if stopping.is_none() => stopping = Some(done),
                    Event::BatchWritten(..) | Event::JobDone(..) => self.process(event)?,
                    event if stopping.is_some() => event.refuse(&self.store.shared.ended()),
                    event => self.process(event)?,
                }
                processed += 1;
                next = if processed < EVENTS_PER_TURN { self.incoming.try_recv().ok() } else { None };
            }
            if stopping.is_none() {
                self.store.housekeeping()?;
                self.export_next()?;
            }
            // Messages to peers and the write to the disk proceed in parallel.
            self.store.dispatch()?;
            self.write_next();
            if !self.writing
                && !self.exporting
                && let Some(done) = stopping.take()
            {
                return Ok(done);
            }
        }
    }

    fn process(&mut self, event: Event) -> Result<(), Error> {
        match event {
            Event::BatchWritten(batch, Ok(position)) => {
                self.writing = false;
                // The disk writes the next batch while this one is applied.
                self.write_next();
                let started = Instant::now();
                self.store.handle_written(batch, position)?;
                self.store.shared.apply_us.add(started.elapsed().as_micros() as u64);
            }
            Event::BatchWritten(batch, Err(error)) => {
                self.writing = false;
                self.store.handle_write_failure(batch, error)?;
            }
            Event::JobDone(job, result) => {
                self.exporting = false;
                self.store.job_done(&job, result)?;
            }
            event => process_call(&mut self.store, event)?,
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

    fn export_next(&mut self) -> Result<(), Error> {
        if !self.exporting
            && let Some(job) = self.store.next_job()?
        {
            self.exporting = true;
            self.jobs.send(Box::new(job)).expect("the snapshot writer ends after the engine");
        }
        Ok(())
    }
}

/// Processes a call; results of the threads are processed by their owner.
fn process_call(store: &mut Store, event: Event) -> Result<(), Error> {
    match event {
        Event::Write(records, trace, done) => store.write_traced(records, trace, done),
        Event::Read(read) => {
            stats::add(&store.shared.reads, 1);
            read(store.partitions());
        }
        Event::Activate(partitions, done) => store.activate(partitions, done),
        Event::Task(turn) => turn(store)?,
        Event::Snapshot(folder, done) => match folder.map(FileDisk::new).transpose() {
            Ok(disk) => store.snapshot_all(disk.map(|disk| Arc::new(disk) as Arc<dyn Disk>), done),
            Err(error) => done(Err(error)),
        },
        Event::Stop(done) => done(Err(Error::Stopped)),
        Event::BatchWritten(..) | Event::JobDone(..) => unreachable!("only the threaded engine gets these events"),
    }
    Ok(())
}

/// Log writer thread: writes batches, syncs and seals when due; returns the writer when the channel closes.
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
                let started = Instant::now();
                let result = abort_on_sync_failure(outgoing.write(&mut writer, clock.elapsed_ms()));
                shared.write_us.add(started.elapsed().as_micros() as u64);
                if events.send(Event::BatchWritten(outgoing.batch, result)).is_err() {
                    return writer;
                }
                wait = due(&writer, clock);
            }
            Err(RecvTimeoutError::Timeout) => {
                // A seal that fails on a full disk is retried; nothing waits for it.
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

/// Snapshot thread: runs background jobs.
fn write_snapshots(jobs: &Receiver<Box<Job>>, events: &Sender<Event>) {
    for job in jobs {
        let result = abort_on_sync_failure(job.run());
        if events.send(Event::JobDone(job, result)).is_err() {
            return;
        }
    }
}

/// Approximate memory of a record until it is answered: once decoded, once in the log buffer.
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
        Command::Buffer(BufferCommand::Append { weights, payloads, .. }) => weights.len() * 8 + payloads.bytes().len(),
        Command::RunRecord { state, row, .. } => state.len() + row.as_ref().map_or(0, Vec::len),
        _ => 0,
    };
    2 * columns + CALL_BYTES
}
