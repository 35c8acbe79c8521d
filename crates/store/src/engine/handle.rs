//! Handle through which any thread calls the engine.

use super::event::{Event, EventSender};
use super::queue::{Overload, Queue, QueueSlot, record_bytes};
use crate::peer::Envelope;
use crate::serving::Serving;
use crate::stats::{self, Shared, Stats};
use crate::{
    ActivateError, CommittedWrite, ConfirmError, Error, FileDisk, Partitions, ReplicaPosition, ReplicaStatus,
    SessionClock, SnapshotInfo, Store, WriteError,
};
use engram_cluster::PartitionMap;
use engram_memory::{Incarnation, Lsn, Member, Ordinal, PartitionId, Record, Settings, StoreId, Term};
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;

/// A partition could not be read because a lease is missing.
#[derive(Debug)]
pub struct MissingLease<R> {
    /// The partition.
    pub partition: PartitionId,
    /// The read, if it did not run.
    pub read: Option<R>,
}

/// Handle of a running store. Cheap to clone; callbacks run on the engine thread and must return quickly. After the engine ended
/// (stopped, or its log or device failed) writes are answered with [`WriteError::Failed`] or [`WriteError::DiskFull`]; callbacks of
/// calls in flight at that moment may be dropped instead.
#[derive(Clone)]
pub struct Handle {
    sender: Arc<EventSender>,
    queue: Arc<Queue>,
    shared: Arc<Shared>,
    serving: Arc<Serving>,
    identity: (StoreId, Incarnation),
    session_clock: Arc<SessionClock>,
}

impl Handle {
    /// Creates the handle of a store whose events are sent through `sender`.
    pub(super) fn new(store: &Store, sender: EventSender) -> Self {
        Self {
            sender: Arc::new(sender),
            queue: Arc::new(Queue::of(&store.context().options)),
            shared: Arc::clone(store.shared()),
            serving: Arc::clone(&store.context().serving),
            identity: (store.identity().store(), store.identity().incarnation()),
            session_clock: Arc::clone(&store.context().session_clock),
        }
    }

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
        self.serving.settings(partition)
    }

    /// Returns the term at which a partition is served and its last applied LSN; `None` if it is not served. Does not wait for the engine.
    pub fn position(&self, partition: PartitionId) -> Option<(Term, Lsn)> {
        self.serving.position(partition)
    }

    /// Calls `listener` whenever a partition starts to be served at a term, or stops being served (`None`). [`Handle::position`]
    /// shows the change then. The call is made on the engine thread, so it must return quickly and not block; changes before this
    /// call are not repeated.
    pub fn on_serving_change(&self, listener: impl Fn(PartitionId, Option<Term>) + Send + Sync + 'static) {
        self.serving.listen(Box::new(listener));
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
            stats::add(&store.shared().reads, 1);
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
            stats::add(&store.shared().reads, 1);
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
            stats::add(&store.shared().reads, 1);
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
