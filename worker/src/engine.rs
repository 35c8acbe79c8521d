//! The store's engine, as tasks see it: callbacks become futures, its errors become problems.

use engram_cluster::PartitionMap;
use engram_memory::{Lsn, Member, Ordinal, PartitionId, Record, Reply, Settings, Term};
use engram_proto::v1::{self, Problem, ProblemKind};
use engram_store::peer::Envelope;
use engram_store::{
    Committed, Error, Handle, Overloaded, Partitions, ReplicaStatus, SnapshotInfo, Stats, Unreadable, WriteError,
};
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::sync::oneshot;
use tokio::time::Instant;

/// When to come again after the queue was full, in milliseconds: a few log batches.
const OVERLOAD_RETRY_MS: u64 = 50;

/// When to come again where too few copies are in sync, in milliseconds: a copy takes longer to make, or is back at once.
const COPIES_RETRY_MS: u64 = 200;

/// How long a read waits for a lease before it is refused: some beats.
const LEASE_WAIT: Duration = Duration::from_millis(1_000);
/// When to come again where a partition is not readable, in milliseconds: a lease is renewed with every beat.
pub(crate) const LEASE_RETRY_MS: u64 = 50;

/// A started store.
#[derive(Clone)]
pub(crate) struct Engine(pub(crate) Handle);

pub(crate) type Answers = Vec<Result<Committed, WriteError>>;

impl Engine {
    /// Hands records over; the answers come when they are committed. Not taking the answers does not take the records back.
    pub(crate) fn submit(&self, records: Vec<(PartitionId, Record)>) -> Result<oneshot::Receiver<Answers>, Problem> {
        let (done, answers) = oneshot::channel();
        let taken = self.0.write(records, move |committed| {
            // Whoever asked may be gone; the answer is kept under the session.
            let _ = done.send(committed);
        });
        taken.map_err(|full| overloaded(&full))?;
        Ok(answers)
    }

    pub(crate) async fn write(&self, records: Vec<(PartitionId, Record)>) -> Result<Answers, Problem> {
        self.submit(records)?.await.map_err(|_| ended())
    }

    /// Reads committed state on the engine's thread.
    pub(crate) async fn read<T: Send + 'static>(
        &self,
        read: impl FnOnce(&mut Partitions) -> T + Send + 'static,
    ) -> Result<T, Problem> {
        let (done, result) = oneshot::channel();
        let taken = self.0.read(read, move |value| {
            let _ = done.send(value);
        });
        taken.map_err(|full| overloaded(&full))?;
        result.await.map_err(|_| ended())
    }

    /// Counts one more when the engine has come to it; whether it was asked.
    pub(crate) fn ping(&self, answered: Arc<AtomicU64>) -> bool {
        let count = move |()| {
            answered.fetch_add(1, Ordering::Release);
        };
        self.0.read(|_| (), count).is_ok()
    }

    /// The same, linearizable for `partitions`: nobody else served one of them when `read` ran.
    pub(crate) async fn read_leased<T: Send + 'static>(
        &self,
        partitions: Vec<PartitionId>,
        read: impl FnOnce(&mut Partitions) -> T + Send + 'static,
    ) -> Result<T, Problem> {
        let mut read = read;
        let begun = Instant::now();
        loop {
            match self.try_leased(partitions.clone(), read).await? {
                Ok(value) => return Ok(value),
                // Served since a moment, or a copy is late: its next beat brings the lease.
                Err(Unreadable { partition, read: Some(again) })
                    if begun.elapsed() < LEASE_WAIT && self.position(partition).is_some() =>
                {
                    tokio::time::sleep(Duration::from_millis(LEASE_RETRY_MS)).await;
                    read = again;
                }
                Err(Unreadable { partition, .. }) => {
                    let text =
                        format!("partition {partition} cannot be read now: a copy of it has not renewed its lease");
                    return Err(Problem::of(ProblemKind::Unavailable, text).at(partition).retry_after(LEASE_RETRY_MS));
                }
            }
        }
    }

    /// The same without a wait: what was read, or a partition that cannot be read now.
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
    ) -> Result<Result<T, Unreadable<R>>, Problem> {
        let (done, result) = oneshot::channel();
        let taken = self.0.read_leased(partitions, read, move |value| {
            let _ = done.send(value);
        });
        taken.map_err(|full| overloaded(&full))?;
        result.await.map_err(|_| ended())
    }

    /// The same for everything that is served here.
    pub(crate) async fn read_served<T: Send + 'static>(
        &self,
        partitions: u32,
        read: impl FnOnce(&mut Partitions) -> T + Send + 'static,
    ) -> Result<T, Problem> {
        let (served, engine) = (self.served(partitions), self.clone());
        let read = self.read_leased(served.clone(), move |store| (read(store), engine.served(partitions)));
        let (value, then) = read.await?;
        if then == served { Ok(value) } else { Err(moved()) }
    }

    /// The partitions of a cluster of so many that are served here.
    pub(crate) fn served(&self, partitions: u32) -> Vec<PartitionId> {
        (0..partitions).map(PartitionId).filter(|partition| self.position(*partition).is_some()).collect()
    }

    pub(crate) fn learn(&self, map: Arc<PartitionMap>) {
        self.0.learn(map);
    }

    /// Takes what a peer says; `taken` is called when the store has worked on it.
    pub(crate) fn hear(&self, from: Member, envelopes: Vec<Envelope>, taken: impl FnOnce() + Send + 'static) {
        self.0.hear(from, envelopes, taken);
    }

    pub(crate) fn connected(&self, peer: Member) {
        self.0.connected(peer);
    }

    pub(crate) fn suspected(&self, ordinal: Ordinal) {
        self.0.suspected(ordinal);
    }

    pub(crate) fn trusted(&self, ordinal: Ordinal) {
        self.0.trusted(ordinal);
    }

    /// Who is about to be stopped, and leads nothing any more.
    pub(crate) fn leaving(&self, leavers: BTreeSet<Ordinal>) {
        self.0.leaving(leavers);
    }

    /// It is proven that this very process will never act again.
    pub(crate) fn proven_dead(&self, dead: Member) {
        self.0.proven_dead(dead);
    }

    /// A worker granted this one a read lease, but for these partitions.
    pub(crate) fn lease_held(&self, granter: Member, until_ms: u64, except: Vec<PartitionId>) {
        self.0.lease_held(granter, until_ms, except);
    }

    /// Grants a process a read lease, counted from now; the partitions that it does not cover come back.
    pub(crate) fn grant_lease(&self, holder: Member) -> oneshot::Receiver<Vec<PartitionId>> {
        let (done, granted) = oneshot::channel();
        self.0.grant_lease(holder, move |except| {
            let _ = done.send(except);
        });
        granted
    }

    pub(crate) fn hand_over(&self, partition: PartitionId, to: Ordinal) {
        self.0.hand_over(partition, to);
    }

    /// How every replica stands.
    pub(crate) async fn replicas(&self) -> Result<Vec<ReplicaStatus>, Problem> {
        let (done, result) = oneshot::channel();
        self.0.replicas(move |replicas| {
            let _ = done.send(replicas);
        });
        result.await.map_err(|_| ended())
    }

    pub(crate) async fn snapshot(&self, folder: PathBuf) -> Result<Vec<SnapshotInfo>, Error> {
        let (done, result) = oneshot::channel();
        self.0.snapshot_all(Some(folder), move |written| {
            let _ = done.send(written);
        });
        result.await.unwrap_or(Err(Error::Stopped))
    }

    /// One partition into `folder`; `None` where it is not led here.
    pub(crate) async fn snapshot_one(
        &self,
        partition: PartitionId,
        folder: PathBuf,
    ) -> Result<Option<SnapshotInfo>, Error> {
        let (done, result) = oneshot::channel();
        self.0.snapshot_one(partition, folder, move |written| {
            let _ = done.send(written);
        });
        Ok(result.await.unwrap_or(Err(Error::Stopped))?.pop())
    }

    pub(crate) async fn stop(&self) -> Result<(), Error> {
        let (done, result) = oneshot::channel();
        self.0.stop(move |stopped| {
            let _ = done.send(stopped);
        });
        result.await.unwrap_or(Err(Error::Stopped))
    }

    /// Settings of a partition that is served here; `None` where it is not: what depends on them cannot be computed then.
    pub(crate) fn served_settings(&self, partition: PartitionId) -> Option<Settings> {
        self.position(partition).and_then(|_| self.0.settings(partition))
    }

    pub(crate) fn position(&self, partition: PartitionId) -> Option<(Term, Lsn)> {
        self.0.position(partition)
    }

    pub(crate) fn stats(&self) -> Stats {
        self.0.stats()
    }

    /// Where the served ones of `partitions` stand.
    pub(crate) fn versions(&self, partitions: u32) -> Vec<v1::PartitionVersion> {
        let version = |partition| {
            let (term, lsn) = self.position(partition)?;
            Some(v1::PartitionVersion::of(partition, term, lsn))
        };
        (0..partitions).map(PartitionId).filter_map(version).collect()
    }
}

/// A record's answer as its part of a reply.
pub(crate) fn part_reply(partition: PartitionId, seq: u64, answer: Result<Committed, Problem>) -> v1::PartitionReply {
    let mut reply = v1::PartitionReply { partition: partition.0, seq, ..Default::default() };
    let result = match answer {
        Ok(committed) => {
            (reply.term, reply.lsn) = (committed.term.0, committed.lsn.0);
            (reply.replicas, reply.durable) = (committed.replicas, committed.durable);
            match &committed.reply {
                Reply::Applied(outcome) => v1::partition_reply::Result::Outcome(outcome.into()),
                Reply::Refused(refusal) => v1::partition_reply::Result::Problem(Problem::from(refusal).at(partition)),
            }
        }
        Err(problem) => v1::partition_reply::Result::Problem(problem),
    };
    reply.result = Some(result);
    reply
}

/// Why a record has no answer, as a problem; whoever knows the map adds what it says of a partition not served.
pub(crate) fn write_problem(error: &WriteError) -> Problem {
    let text = error.to_string();
    match error {
        WriteError::NotPrimary { partition, .. } => Problem::of(ProblemKind::NotPrimary, text).at(*partition),
        WriteError::Corrupt { partition, .. } => Problem::of(ProblemKind::DataCorruption, text).at(*partition),
        WriteError::Invalid { partition, .. } => Problem::of(ProblemKind::Invalid, text).at(*partition),
        WriteError::Capacity { partition, .. } => Problem::of(ProblemKind::Capacity, text).at(*partition),
        WriteError::TooFewCopies { partition, .. } => {
            Problem::of(ProblemKind::TooFewCopies, text).at(*partition).retry_after(COPIES_RETRY_MS)
        }
        WriteError::Unknown { partition } => Problem::of(ProblemKind::OutcomeUnknown, text).at(*partition),
        WriteError::DiskFull { .. } => Problem::of(ProblemKind::DiskFull, text),
        WriteError::Failed { .. } => Problem::of(ProblemKind::Unavailable, text),
    }
}

/// The device of the store failed.
pub(crate) fn device_problem(error: &engram_kernels::Error) -> Problem {
    Problem::of(ProblemKind::Unavailable, format!("the device failed: {error}"))
}

/// What was read of all partitions here is not of those that were here before.
pub(crate) fn moved() -> Problem {
    let text = "partitions came to this worker, or left it, while they were read";
    Problem::of(ProblemKind::Unavailable, text).retry_after(LEASE_RETRY_MS)
}

pub(crate) fn overloaded(full: &Overloaded) -> Problem {
    Problem::of(ProblemKind::Overloaded, full.to_string()).retry_after(OVERLOAD_RETRY_MS)
}

pub(crate) fn ended() -> Problem {
    Problem::of(ProblemKind::Unavailable, "the store of this worker has ended")
}
