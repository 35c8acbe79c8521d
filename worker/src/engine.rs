//! The store's engine, as tasks see it: callbacks become futures, its errors become problems.

use engram_memory::{Lsn, PartitionId, Record, Reply, Settings, Term};
use engram_proto::v1::{self, Problem, ProblemKind};
use engram_store::{ActivateError, Committed, Error, Handle, Overloaded, Partitions, SnapshotInfo, Stats, WriteError};
use std::path::PathBuf;
use tokio::sync::oneshot;

/// When to come again after the queue was full, in milliseconds: a few log batches.
const OVERLOAD_RETRY_MS: u64 = 50;

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

    pub(crate) async fn activate(&self, terms: Vec<(PartitionId, Term)>) -> Vec<Result<(), ActivateError>> {
        let (done, result) = oneshot::channel();
        let asked: Vec<PartitionId> = terms.iter().map(|(partition, _)| *partition).collect();
        self.0.activate(terms, move |results| {
            let _ = done.send(results);
        });
        let failed = |_| Err(ActivateError::Failed { reason: "the store has ended".into() });
        result.await.unwrap_or_else(|_| asked.into_iter().map(failed).collect())
    }

    pub(crate) async fn deactivate(&self, partitions: Vec<PartitionId>) {
        let (done, result) = oneshot::channel();
        self.0.deactivate(partitions, move || {
            let _ = done.send(());
        });
        // An ended store serves nothing either.
        let _ = result.await;
    }

    pub(crate) async fn snapshot(&self, folder: PathBuf) -> Result<Vec<SnapshotInfo>, Error> {
        let (done, result) = oneshot::channel();
        self.0.snapshot_all(Some(folder), move |written| {
            let _ = done.send(written);
        });
        result.await.unwrap_or(Err(Error::Stopped))
    }

    pub(crate) async fn stop(&self) -> Result<(), Error> {
        let (done, result) = oneshot::channel();
        self.0.stop(move |stopped| {
            let _ = done.send(stopped);
        });
        result.await.unwrap_or(Err(Error::Stopped))
    }

    pub(crate) fn settings(&self, partition: PartitionId) -> Option<Settings> {
        self.0.settings(partition)
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
        WriteError::Failed { reason } if reason.contains("no space left") => Problem::of(ProblemKind::DiskFull, text),
        WriteError::Failed { .. } => Problem::of(ProblemKind::Unavailable, text),
    }
}

/// The device of the store failed.
pub(crate) fn device_problem(error: &engram_kernels::Error) -> Problem {
    Problem::of(ProblemKind::Unavailable, format!("the device failed: {error}"))
}

fn overloaded(full: &Overloaded) -> Problem {
    Problem::of(ProblemKind::Overloaded, full.to_string()).retry_after(OVERLOAD_RETRY_MS)
}

fn ended() -> Problem {
    Problem::of(ProblemKind::Unavailable, "the store of this worker has ended")
}
