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

mod stepped;

pub use stepped::Stepped;

use crate::answers::{ActivateError, Committed, WriteError};
use crate::background::{Job, JobDone, RoundDone};
use crate::confirm::Unconfirmed;
use crate::gather::Done;
use crate::lagging::Copied;
use crate::partitions::Partitions;
use crate::peer::{Envelope, Peers};
use crate::replication::ReplicaStatus;
use crate::stats::{self, Shared, Stats};
use crate::store::{Options, Outgoing, Store};
use crate::wal::{Batch, Position, Writer};
use crate::{Clock, Disk, Error, FileDisk, SnapshotInfo, abort_on_sync_failure};
use engram_cluster::PartitionMap;
use engram_memory::{
    Blobs, Command, Incarnation, Lsn, Member, Ordinal, PartitionId, Record, Settings, StoreId, Term, Updates,
};
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, SyncSender, channel, sync_channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// How long the engine sleeps at most when nothing comes: the grain of snapshots and expiry.
const IDLE: Duration = Duration::from_millis(500);
/// The same with peers, and while a backup waits for its turn: the grain of grants that end, and of reminders.
const IDLE_WITH_PEERS: Duration = Duration::from_millis(50);
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

/// A partition could not be read: a lease is missing.
#[derive(Debug)]
pub struct Unreadable<R> {
    /// Which.
    pub partition: PartitionId,
    /// What was to be read, where it was not run.
    pub read: Option<R>,
}

/// Starts stores.
pub struct Engine;

/// A started store. Cheap to clone; callbacks run on the engine's thread, so they should hand over and return. After the
/// engine ended (stopped, or its log or device failed) writes are answered [`WriteError::Failed`] or [`WriteError::DiskFull`]; callbacks of what was under way just
/// then may be dropped instead.
#[derive(Clone)]
pub struct Handle {
    door: Arc<Door>,
    queue: Arc<Queue>,
    shared: Arc<Shared>,
    identity: (StoreId, Incarnation),
}

/// Where events go in; the engine ends when the last handle closes it.
struct Door {
    events: Sender<Event>,
    /// Called after each event, where no thread waits for it.
    wake: Option<Box<dyn Fn() + Send + Sync>>,
}

impl Door {
    /// Gives the event back when the engine has ended.
    fn send(&self, event: Event) -> Result<(), Box<Event>> {
        self.events.send(event).map_err(|returned| Box::new(returned.0))?;
        if let Some(wake) = &self.wake {
            wake();
        }
        Ok(())
    }
}

impl Drop for Door {
    fn drop(&mut self) {
        // An engine that has ended needs no stop.
        let _ = self.send(Event::Stop(Box::new(|_| {})));
    }
}

/// Something done on the engine's thread.
type Turn = Box<dyn FnOnce(&mut Store) -> Result<(), Error> + Send>;

/// What comes to the engine.
enum Event {
    Write(Vec<(PartitionId, Record)>, Done<Result<Committed, WriteError>>),
    Read(Box<dyn FnOnce(&mut Partitions) + Send>),
    Activate(Vec<(PartitionId, Term)>, Done<Result<(), ActivateError>>),
    /// Something about replication.
    Turn(Turn),
    Snapshot(Option<PathBuf>, RoundDone),
    Stop(Box<dyn FnOnce(Result<(), Error>) + Send>),
    BatchWritten(Batch, Result<Position, Error>),
    JobDone(Box<Job>, Result<JobDone, Error>),
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
    const fn of(options: &Options) -> Self {
        Self {
            bytes: AtomicUsize::new(0),
            calls: AtomicUsize::new(0),
            most_bytes: options.queue_bytes,
            most_calls: options.queue_calls,
        }
    }

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

    /// Takes the newest map that was read. See [`Store::learn`].
    pub fn learn(&self, map: Arc<PartitionMap>) {
        self.turn(move |store| {
            store.learn(&map);
            Ok(())
        });
    }

    /// Takes what a peer says; `taken` is called when it was worked on, so that who reads can bound what is under way.
    pub fn hear(&self, from: Member, envelopes: Vec<Envelope>, taken: impl FnOnce() + Send + 'static) {
        self.turn(move |store| {
            let heard = store.hear(from, envelopes);
            taken();
            heard
        });
    }

    /// A stream to a process is open in both directions.
    pub fn connected(&self, peer: Member) {
        self.turn(move |store| {
            store.connected(peer);
            Ok(())
        });
    }

    /// The detector takes the process at a place for dead.
    pub fn suspected(&self, ordinal: Ordinal) {
        self.turn(move |store| {
            store.suspected(ordinal);
            Ok(())
        });
    }

    /// The detector no longer does.
    pub fn trusted(&self, ordinal: Ordinal) {
        self.turn(move |store| {
            store.trusted(ordinal);
            Ok(())
        });
    }

    /// See [`Store::leaving`].
    pub fn leaving(&self, leavers: BTreeSet<Ordinal>) {
        self.turn(move |store| {
            store.leaving(&leavers);
            Ok(())
        });
    }

    /// A worker granted this one a read lease until `until_ms` ([`Clock::elapsed_ms`]), but for these partitions.
    pub fn lease_held(&self, granter: Member, until_ms: u64, except: Vec<PartitionId>) {
        self.turn(move |store| {
            store.lease_held(granter, until_ms, except);
            Ok(())
        });
    }

    /// Grants a process a read lease, counted from now, and tells `done` the partitions that it does not cover.
    pub fn grant_lease(&self, holder: Member, done: impl FnOnce(Vec<PartitionId>) + Send + 'static) {
        self.turn(move |store| {
            done(store.grant_lease(holder));
            Ok(())
        });
    }

    /// It is proven that this very process is dead.
    pub fn proven_dead(&self, dead: Member) {
        self.turn(move |store| {
            store.proven_dead(dead);
            Ok(())
        });
    }

    /// As [`Handle::read`], linearizable for `partitions`: their leases are looked at before and after `read` runs. Where one is
    /// missing before, `done` gets `read` back, to be tried again.
    ///
    /// # Errors
    /// [`Overloaded`]: nothing was taken, both are dropped.
    pub fn read_leased<T: Send + 'static, R: FnOnce(&mut Partitions) -> T + Send + 'static>(
        &self,
        partitions: Vec<PartitionId>,
        read: R,
        done: impl FnOnce(Result<T, Unreadable<R>>) + Send + 'static,
    ) -> Result<(), Overloaded> {
        let place = self.take(0)?;
        self.turn(move |store| {
            stats::add(&store.shared.reads, 1);
            let unreadable =
                |store: &Store| partitions.iter().copied().find(|partition| !store.is_readable(*partition));
            if let Some(partition) = unreadable(store) {
                drop(place);
                done(Err(Unreadable { partition, read: Some(read) }));
                return Ok(());
            }
            let result = read(store.partitions());
            drop(place);
            let unreadable = unreadable(store);
            done(unreadable.map_or(Ok(result), |partition| Err(Unreadable { partition, read: None })));
            Ok(())
        });
        Ok(())
    }

    /// As [`Handle::read`], linearizable for `partitions` without trust in any clock: runs when every member in sync has said that
    /// this process still leads. See [`Store::read_confirmed`].
    ///
    /// # Errors
    /// [`Overloaded`]: nothing was taken, both are dropped.
    pub fn read_confirmed<T: Send + 'static>(
        &self,
        partitions: Vec<PartitionId>,
        read: impl FnOnce(&mut Partitions) -> T + Send + 'static,
        done: impl FnOnce(Result<T, Unconfirmed>) + Send + 'static,
    ) -> Result<(), Overloaded> {
        let place = self.take(0)?;
        self.turn(move |store| {
            stats::add(&store.shared.reads, 1);
            store.read_confirmed(partitions, move |confirmed| {
                let result = confirmed.map(read);
                drop(place);
                done(result);
            });
            Ok(())
        });
        Ok(())
    }

    /// As [`Handle::read`], of the copies here, whoever leads them, that lag at most `max_lag_ms`: `read` sees those only, and is
    /// told where each one stands. See [`Store::read_copies`].
    ///
    /// # Errors
    /// [`Overloaded`]: nothing was taken, both are dropped.
    pub fn read_copies<T: Send + 'static>(
        &self,
        partitions: Vec<PartitionId>,
        max_lag_ms: u64,
        read: impl FnOnce(&mut Partitions, Vec<Copied>) -> T + Send + 'static,
        done: impl FnOnce(T) + Send + 'static,
    ) -> Result<(), Overloaded> {
        let place = self.take(0)?;
        self.turn(move |store| {
            stats::add(&store.shared.reads, 1);
            store.read_copies(partitions, max_lag_ms, move |partitions, copied| {
                let result = read(partitions, copied);
                drop(place);
                done(result);
            });
            Ok(())
        });
        Ok(())
    }

    /// See [`Store::hand_over`].
    pub fn hand_over(&self, partition: PartitionId, to: Ordinal) {
        self.turn(move |store| {
            store.hand_over(partition, to);
            Ok(())
        });
    }

    /// How every replica stands.
    pub fn replicas(&self, done: impl FnOnce(Vec<ReplicaStatus>) + Send + 'static) {
        self.turn(move |store| {
            done(store.replicas());
            Ok(())
        });
    }

    fn turn(&self, turn: impl FnOnce(&mut Store) -> Result<(), Error> + Send + 'static) {
        self.send(Event::Turn(Box::new(turn)));
    }

    /// Snapshots every partition that has data into `folder`, or into the store's own directory. See [`Store::snapshot_all`].
    pub fn snapshot_all(
        &self,
        folder: Option<PathBuf>,
        done: impl FnOnce(Result<Vec<SnapshotInfo>, Error>) + Send + 'static,
    ) {
        self.send(Event::Snapshot(folder, Box::new(done)));
    }

    /// Snapshots one partition into `folder`, if it is shown here. See [`Store::snapshot_one`].
    pub fn snapshot_one(
        &self,
        partition: PartitionId,
        folder: PathBuf,
        done: impl FnOnce(Result<Vec<SnapshotInfo>, Error>) + Send + 'static,
    ) {
        self.turn(move |store| {
            match FileDisk::new(folder) {
                Ok(disk) => store.snapshot_one(partition, Arc::new(disk), done),
                Err(error) => done(Err(error)),
            }
            Ok(())
        });
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
        if let Err(returned) = self.door.send(event) {
            returned.refuse(&self.shared.ended());
        }
    }
}

impl Event {
    /// Answers for an engine that ended.
    fn refuse(self, why: &WriteError) {
        match self {
            Self::Write(records, done) => {
                done(records.iter().map(|_| Err(why.clone())).collect());
            }
            Self::Activate(partitions, done) => {
                done(partitions.iter().map(|_| Err(ActivateError::Failed { reason: why.reason() })).collect());
            }
            Self::Stop(done) => done(Ok(())),
            Self::Snapshot(_, done) => done(Err(Error::Stopped)),
            Self::Read(_) | Self::Turn(_) | Self::BatchWritten(..) | Self::JobDone(..) => {}
        }
    }
}

impl Engine {
    /// Starts the threads of a store, with its way out ([`crate::Alone`] = none). They end with [`Handle::stop`], or when the last handle is dropped.
    ///
    /// # Errors
    /// A thread cannot be started.
    pub fn start(mut store: Store, peers: Box<dyn Peers>) -> std::io::Result<Handle> {
        store.set_peers(peers);
        let (events, incoming) = channel();
        let (batches, to_write) = sync_channel::<Outgoing>(1);
        let (jobs, to_copy) = sync_channel::<Box<Job>>(1);
        let (queue, shared) = (Arc::new(Queue::of(&store.options)), Arc::clone(&store.shared));
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
        Ok(Handle { door: Arc::new(Door { events, wake: None }), queue, shared, identity })
    }

    /// The same without threads, for simulators: events wait in it until [`Stepped::step`], and `wake` is called for each.
    pub fn stepped(store: Store, peers: Box<dyn Peers>, wake: Box<dyn Fn() + Send + Sync>) -> (Handle, Stepped) {
        Stepped::start(store, peers, wake)
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
            let why = self.store.shared.end(error);
            self.store.fail(&why);
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
        let why = shared.ended();
        incoming.try_iter().for_each(|event| event.refuse(&why));
        drop(incoming);
        (result.1)(result.0);
    }

    /// Takes turns until it is told to stop and nothing is under way; returns who waits for that.
    fn turns(&mut self) -> Result<Stopped, Error> {
        let mut stopping: Option<Stopped> = None;
        loop {
            let often = self.store.options.replication.copies > 1 || self.store.background.writes_elsewhere();
            let idle = if often { IDLE_WITH_PEERS } else { IDLE };
            let mut next = self.incoming.recv_timeout(idle).ok();
            let mut taken = 0;
            while let Some(event) = next {
                match event {
                    Event::Stop(done) if stopping.is_none() => stopping = Some(done),
                    Event::BatchWritten(..) | Event::JobDone(..) => self.take(event)?,
                    event if stopping.is_some() => event.refuse(&self.store.shared.ended()),
                    event => self.take(event)?,
                }
                taken += 1;
                next = if taken < EVENTS_PER_TURN { self.incoming.try_recv().ok() } else { None };
            }
            if stopping.is_none() {
                self.store.housekeeping();
                self.copy_next()?;
            }
            // What goes to peers and what goes to the disk are under way side by side.
            self.store.dispatch()?;
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
                self.store.not_written(batch, error)?;
            }
            Event::JobDone(job, result) => {
                self.copying = false;
                self.store.job_done(&job, result)?;
            }
            event => take(&mut self.store, event)?,
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
            && let Some(job) = self.store.next_job()?
        {
            self.copying = true;
            self.jobs.send(Box::new(job)).expect("the snapshot writer ends after the engine");
        }
        Ok(())
    }
}

/// Does what somebody asked for; what threads report is not among it.
fn take(store: &mut Store, event: Event) -> Result<(), Error> {
    match event {
        Event::Write(records, done) => store.write(records, done),
        Event::Read(read) => {
            stats::add(&store.shared.reads, 1);
            read(store.partitions());
        }
        Event::Activate(partitions, done) => store.activate(partitions, done),
        Event::Turn(turn) => turn(store)?,
        Event::Snapshot(folder, done) => match folder.map(FileDisk::new).transpose() {
            Ok(disk) => store.snapshot_all(disk.map(|disk| Arc::new(disk) as Arc<dyn Disk>), done),
            Err(error) => done(Err(error)),
        },
        Event::Stop(done) => done(Err(Error::Stopped)),
        Event::BatchWritten(..) | Event::JobDone(..) => unreachable!("whoever has threads takes these itself"),
    }
    Ok(())
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

/// The thread of what happens beside the log.
fn write_snapshots(jobs: &Receiver<Box<Job>>, events: &Sender<Event>) {
    for job in jobs {
        let result = abort_on_sync_failure(job.run());
        if events.send(Event::JobDone(job, result)).is_err() {
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
