//! Events of the engine: calls of handles, and results of its threads.

use crate::engine::pending_calls::Callback;
use crate::snapshot::background::RoundCallback;
use crate::snapshot::job::{Job, JobOutput};
use crate::stats;
use crate::wal::{Batch, Position};
use crate::{ActivateError, CommittedWrite, Disk, Error, FileDisk, Partitions, Store, WriteError};
use engram_memory::{PartitionId, Record, Term};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::Sender;

/// Sends events to the engine, which stops when the last handle is dropped.
pub(super) struct EventSender {
    pub(super) events: Sender<Event>,
    /// Called after each event if no thread waits for events.
    pub(super) wake: Option<Box<dyn Fn() + Send + Sync>>,
}

impl EventSender {
    /// Returns the event if the engine has ended.
    pub(super) fn send(&self, event: Event) -> Result<(), Box<Event>> {
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
pub(super) type StoreTask = Box<dyn FnOnce(&mut Store) -> Result<(), Error> + Send>;

/// Event processed by the engine.
pub(super) enum Event {
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

impl Event {
    /// Answers an event on behalf of an ended engine.
    pub(super) fn refuse(self, cause: &WriteError) {
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

/// Processes a call; results of the threads are processed by their owner.
pub(super) fn process_call(store: &mut Store, event: Event) -> Result<(), Error> {
    match event {
        Event::Write(records, trace, done) => store.write_traced(records, trace, done),
        Event::Read(read) => {
            stats::add(&store.shared().reads, 1);
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
