//! Async interface of the store's engine: callbacks become futures, errors become problems.

pub(crate) mod device;
pub(crate) mod gpu_fault;

use engram_cluster::PartitionMap;
use engram_memory::{Lsn, Member, Ordinal, PartitionId, Record, Reply, Settings, Term};
use engram_proto::v1::{self, Problem, ProblemKind};
use engram_store::peer::Envelope;
use engram_store::{
    CommittedWrite, Error, Handle, MissingLease, Overload, Partitions, ReplicaStatus, SessionClock, SnapshotInfo,
    Stats, WriteError,
};
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::sync::{oneshot, watch};
use tokio::time::Instant;

/// Retry hint after the queue was full, in milliseconds: a few log batches.
const OVERLOAD_RETRY_MS: u64 = 50;

/// Retry hint with too few in-sync replicas, in milliseconds: re-replication takes longer, and a restarted replica returns at once.
const REPLICAS_RETRY_MS: u64 = 200;

/// Maximum wait of a read for a lease: some heartbeats.
const LEASE_WAIT: Duration = Duration::from_millis(1_000);
/// Retry hint if a partition is not readable, in milliseconds: a lease is renewed with every heartbeat, and is not announced because it also
/// expires.
pub(crate) const LEASE_RETRY_MS: u64 = 50;

/// A started store.
#[derive(Clone)]
pub(crate) struct Engine {
    pub(crate) handle: Handle,
    /// Notified when a partition starts or stops being served.
    serving: watch::Receiver<()>,
}

pub(crate) type WriteResults = Vec<Result<CommittedWrite, WriteError>>;

impl Engine {
    pub(crate) fn new(handle: Handle) -> Self {
        let (changed, serving) = watch::channel(());
        handle.on_serving_change(move |_, _| {
            changed.send_replace(());
        });
        Self { handle, serving }
    }

    /// Returns a receiver that is notified when a partition starts or stops being served.
    pub(crate) fn serving_changes(&self) -> watch::Receiver<()> {
        let mut serving = self.serving.clone();
        serving.mark_unchanged();
        serving
    }

    /// Waits until `is_served` holds. It is checked now and whenever a partition starts or stops being served.
    pub(crate) async fn wait_until(&self, mut is_served: impl FnMut() -> bool) {
        // The receiver has seen only what was published before the check, so no change is missed.
        let mut serving = self.serving_changes();
        while !is_served() && serving.changed().await.is_ok() {}
    }

    /// Submits records; the results arrive when they are committed. Dropping the receiver does not cancel the records.
    pub(crate) fn submit(
        &self,
        records: Vec<(PartitionId, Record)>,
    ) -> Result<oneshot::Receiver<WriteResults>, Problem> {
        let (done, results) = oneshot::channel();
        let queued = self.handle.write(records, move |committed| {
            // The receiver may be gone; the result is kept under the session.
            let _ = done.send(committed);
        });
        queued.map_err(|full| overloaded(&full))?;
        Ok(results)
    }

    pub(crate) async fn write(&self, records: Vec<(PartitionId, Record)>) -> Result<WriteResults, Problem> {
        self.submit(records)?.await.map_err(|_| ended())
    }

    /// Returns the time of sessions.
    pub(crate) fn session_clock(&self) -> &SessionClock {
        self.handle.session_clock()
    }

    /// Reads committed state on the engine's thread.
    pub(crate) async fn read<T: Send + 'static>(
        &self,
        read: impl FnOnce(&mut Partitions) -> T + Send + 'static,
    ) -> Result<T, Problem> {
        let (done, result) = oneshot::channel();
        let queued = self.handle.read(read, move |value| {
            let _ = done.send(value);
        });
        queued.map_err(|full| overloaded(&full))?;
        result.await.map_err(|_| ended())
    }

    /// Increments `answered` when the engine processes the ping; returns whether it was queued.
    pub(crate) fn ping(&self, answered: Arc<AtomicU64>) -> bool {
        let count = move |()| {
            answered.fetch_add(1, Ordering::Release);
        };
        self.handle.read(|_| (), count).is_ok()
    }

    /// Reads linearizably for `partitions`: no other worker served any of them when `read` ran.
    pub(crate) async fn read_leased<T: Send + 'static>(
        &self,
        partitions: Vec<PartitionId>,
        read: impl FnOnce(&mut Partitions) -> T + Send + 'static,
    ) -> Result<T, Problem> {
        let mut read = read;
        let started = Instant::now();
        loop {
            match self.try_leased(partitions.clone(), read).await? {
                Ok(value) => return Ok(value),
                // Just activated, or a replica is late: its next heartbeat brings the lease.
                Err(MissingLease { partition, read: Some(retry) })
                    if started.elapsed() < LEASE_WAIT && self.position(partition).is_some() =>
                {
                    tokio::time::sleep(Duration::from_millis(LEASE_RETRY_MS)).await;
                    read = retry;
                }
                Err(MissingLease { partition, .. }) => {
                    let text = format!("partition {partition} cannot be read now: a replica has not renewed its lease");
                    return Err(Problem::of(ProblemKind::Unavailable, text).at(partition).retry_after(LEASE_RETRY_MS));
                }
            }
        }
    }

    /// Reads without waiting for leases; returns the value, or a partition that cannot be read now.
    pub(crate) async fn read_leased_now<T: Send + 'static>(
        &self,
        partitions: Vec<PartitionId>,
        read: impl FnOnce(&mut Partitions) -> T + Send + 'static,
    ) -> Result<Result<T, PartitionId>, Problem> {
        Ok(self.try_leased(partitions, read).await?.map_err(|unreadable| unreadable.partition))
    }

    async fn try_leased<T: Send + 'static, R: FnOnce(&mut Partitions) -> T + Send + 'static>(
        &self,
        partitions: Vec<PartitionId>,
        read: R,
    ) -> Result<Result<T, MissingLease<R>>, Problem> {
        let (done, result) = oneshot::channel();
        let queued = self.handle.read_leased(partitions, read, move |value| {
            let _ = done.send(value);
        });
        queued.map_err(|full| overloaded(&full))?;
        result.await.map_err(|_| ended())
    }

    /// Reads linearizably over all partitions served here.
    pub(crate) async fn read_served<T: Send + 'static>(
        &self,
        partitions: u32,
        read: impl FnOnce(&mut Partitions) -> T + Send + 'static,
    ) -> Result<T, Problem> {
        let (served, engine) = (self.served(partitions), self.clone());
        let read = self.read_leased(served.clone(), move |store| (read(store), engine.served(partitions)));
        let (value, served_after) = read.await?;
        if served_after == served { Ok(value) } else { Err(moved()) }
    }

    /// Returns the partitions served here, of a cluster with `partitions` partitions.
    pub(crate) fn served(&self, partitions: u32) -> Vec<PartitionId> {
        (0..partitions).map(PartitionId).filter(|partition| self.position(*partition).is_some()).collect()
    }

    pub(crate) fn update_map(&self, map: Arc<PartitionMap>) {
        self.handle.update_map(map);
    }

    /// Passes a peer's messages to the store; `taken` is called once they are processed.
    pub(crate) fn receive(&self, from: Member, envelopes: Vec<Envelope>, queued: impl FnOnce() + Send + 'static) {
        self.handle.receive(from, envelopes, queued);
    }

    pub(crate) fn connected(&self, peer: Member) {
        self.handle.connect_peer(peer);
    }

    pub(crate) fn suspected(&self, ordinal: Ordinal) {
        self.handle.suspect(ordinal);
    }

    pub(crate) fn trusted(&self, ordinal: Ordinal) {
        self.handle.trust(ordinal);
    }

    /// Notifies the store of workers that are about to be stopped and are primary of no partition.
    pub(crate) fn leaving(&self, leavers: BTreeSet<Ordinal>) {
        self.handle.set_leaving(leavers);
    }

    /// Notifies the store that a process is proven dead.
    pub(crate) fn proven_dead(&self, dead: Member) {
        self.handle.confirm_dead(dead);
    }

    /// Records a read lease that another worker granted, except for some partitions.
    pub(crate) fn lease_held(&self, granter: Member, until_ms: u64, except: Vec<PartitionId>) {
        self.handle.record_lease(granter, until_ms, except);
    }

    /// Grants a process a read lease from now on; returns the partitions that it does not cover.
    pub(crate) fn grant_lease(&self, holder: Member) -> oneshot::Receiver<Vec<PartitionId>> {
        let (done, granted) = oneshot::channel();
        self.handle.grant_lease(holder, move |except| {
            let _ = done.send(except);
        });
        granted
    }

    pub(crate) fn transfer_leadership(&self, partition: PartitionId, to: Ordinal) {
        self.handle.transfer_leadership(partition, to);
    }

    /// Returns the status of every replica.
    pub(crate) async fn replicas(&self) -> Result<Vec<ReplicaStatus>, Problem> {
        let (done, result) = oneshot::channel();
        self.handle.replicas(move |replicas| {
            let _ = done.send(replicas);
        });
        result.await.map_err(|_| ended())
    }

    pub(crate) async fn snapshot(&self, folder: PathBuf) -> Result<Vec<SnapshotInfo>, Error> {
        let (done, result) = oneshot::channel();
        self.handle.snapshot_all(Some(folder), move |written| {
            let _ = done.send(written);
        });
        result.await.unwrap_or(Err(Error::Stopped))
    }

    /// Writes a snapshot of one partition into `folder`; `None` if this worker is not its primary.
    pub(crate) async fn snapshot_one(
        &self,
        partition: PartitionId,
        folder: PathBuf,
    ) -> Result<Option<SnapshotInfo>, Error> {
        let (done, result) = oneshot::channel();
        self.handle.snapshot_one(partition, folder, move |written| {
            let _ = done.send(written);
        });
        Ok(result.await.unwrap_or(Err(Error::Stopped))?.pop())
    }

    pub(crate) async fn stop(&self) -> Result<(), Error> {
        let (done, result) = oneshot::channel();
        self.handle.stop(move |stopped| {
            let _ = done.send(stopped);
        });
        result.await.unwrap_or(Err(Error::Stopped))
    }

    /// Returns the settings of a partition served here; `None` if it is not, because what depends on them cannot be computed then.
    pub(crate) fn served_settings(&self, partition: PartitionId) -> Option<Settings> {
        self.position(partition).and_then(|_| self.handle.settings(partition))
    }

    pub(crate) fn position(&self, partition: PartitionId) -> Option<(Term, Lsn)> {
        self.handle.position(partition)
    }

    pub(crate) fn stats(&self) -> Stats {
        self.handle.stats()
    }

    /// Returns the versions of the partitions served here.
    pub(crate) fn versions(&self, partitions: u32) -> Vec<v1::PartitionVersion> {
        let version = |partition| {
            let (term, lsn) = self.position(partition)?;
            Some(v1::PartitionVersion::of(partition, term, lsn))
        };
        (0..partitions).map(PartitionId).filter_map(version).collect()
    }
}

/// Converts the result of a record to its part of a response.
pub(crate) fn part_reply(
    partition: PartitionId,
    seq: u64,
    result: Result<CommittedWrite, Problem>,
) -> v1::PartitionResult {
    let mut reply = v1::PartitionResult { partition: partition.0, seq, ..Default::default() };
    let result = match result {
        Ok(committed) => {
            (reply.term, reply.lsn) = (committed.term.0, committed.lsn.0);
            (reply.replicas, reply.durable) = (committed.replicas, committed.durable);
            match &committed.reply {
                Reply::Applied(outcome) => v1::partition_result::Result::Outcome(outcome.into()),
                Reply::Refused(refusal) => v1::partition_result::Result::Problem(Problem::from(refusal).at(partition)),
            }
        }
        Err(problem) => v1::partition_result::Result::Problem(problem),
    };
    reply.result = Some(result);
    reply
}

/// Converts a write error to a problem; the caller adds what the map says of a partition that is not served here.
pub(crate) fn write_problem(error: &WriteError) -> Problem {
    let text = error.to_string();
    match error {
        WriteError::NotPrimary { partition, .. } => Problem::of(ProblemKind::NotPrimary, text).at(*partition),
        WriteError::Corrupt { partition, .. } => Problem::of(ProblemKind::DataCorruption, text).at(*partition),
        WriteError::Invalid { partition, .. } => Problem::of(ProblemKind::Invalid, text).at(*partition),
        WriteError::Capacity { partition, .. } => Problem::of(ProblemKind::Capacity, text).at(*partition),
        WriteError::NotEnoughReplicas { partition, .. } => {
            Problem::of(ProblemKind::NotEnoughReplicas, text).at(*partition).retry_after(REPLICAS_RETRY_MS)
        }
        WriteError::Unknown { partition } => Problem::of(ProblemKind::OutcomeUnknown, text).at(*partition),
        WriteError::DiskFull { .. } => Problem::of(ProblemKind::DiskFull, text),
        WriteError::Failed { .. } => Problem::of(ProblemKind::Unavailable, text),
    }
}

/// Returns the problem of a failed device.
pub(crate) fn device_problem(error: &engram_kernels::Error) -> Problem {
    Problem::of(ProblemKind::Unavailable, format!("the device failed: {error}"))
}

/// Returns the problem of a read during which the set of served partitions changed.
pub(crate) fn moved() -> Problem {
    let text = "the partitions of this worker changed during the read";
    Problem::of(ProblemKind::Unavailable, text).retry_after(LEASE_RETRY_MS)
}

pub(crate) fn overloaded(full: &Overload) -> Problem {
    Problem::of(ProblemKind::Overloaded, full.to_string()).retry_after(OVERLOAD_RETRY_MS)
}

pub(crate) fn ended() -> Problem {
    Problem::of(ProblemKind::Unavailable, "the store of this worker has stopped")
}
