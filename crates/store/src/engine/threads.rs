//! Threads of the engine: one decides and applies, one writes the log, one runs background jobs.

use super::event::{Event, EventSender, process_call};
use super::handle::Handle;
use super::sequencer::Outgoing;
use super::{SteppedEngine, Store};
use crate::peer::Peers;
use crate::snapshot::job::Job;
use crate::stats::Shared;
use crate::wal::Writer;
use crate::{Clock, Error, abort_on_sync_failure};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, SyncSender, channel, sync_channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// Longest sleep of the idle engine: the granularity of snapshots and expiry.
const IDLE: Duration = Duration::from_millis(500);
/// Longest sleep with peers or during a backup: the granularity of lease expiry and retries.
const IDLE_WITH_PEERS: Duration = Duration::from_millis(50);
/// Events processed before the log and the snapshots are served.
const EVENTS_PER_TURN: usize = 1_024;

/// Starts store engines.
pub struct Engine;

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
        let handle = Handle::new(&store, EventSender { events: events.clone(), wake: None });
        let (clock, writer) = (Arc::clone(&store.context().clock), store.take_writer());
        let log = {
            let (shared, events) = (Arc::clone(store.shared()), events.clone());
            let name = thread::Builder::new().name("engram-log".into());
            name.spawn(move || write_log(writer, &to_write, &events, &*clock, &shared))?
        };
        let snapshots = thread::Builder::new()
            .name("engram-snapshot".into())
            .spawn(move || write_snapshots(&to_export, &events))?;
        let threads = EngineThread { store, incoming, batches, jobs, log, snapshots, writing: false, exporting: false };
        thread::Builder::new().name("engram-store".into()).spawn(move || threads.run())?;
        Ok(handle)
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
            let cause = self.store.shared().end(error);
            self.store.fail(&cause);
        }
        let Self { store, incoming, batches, jobs, log, snapshots, .. } = self;
        let shared = Arc::clone(store.shared());
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
            let wakes_often = self.store.context().is_replicated() || self.store.writes_backup();
            let idle = if wakes_often { IDLE_WITH_PEERS } else { IDLE };
            let mut next = self.incoming.recv_timeout(idle).ok();
            let mut processed = 0;
            while let Some(event) = next {
                match event {
                    Event::Stop(done) if stopping.is_none() => stopping = Some(done),
                    Event::BatchWritten(..) | Event::JobDone(..) => self.process(event)?,
                    event if stopping.is_some() => event.refuse(&self.store.shared().ended()),
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
                self.store.shared().apply_us.add(started.elapsed().as_micros() as u64);
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
