//! Read consistency: by leases, confirmed by every in-sync replica, or from a replica that may lag.
//!
//! A read is answered with the requested consistency or rejected; it never falls back to a weaker one.

use crate::engine::{Engine, LEASE_RETRY_MS, ended, moved, overloaded};
use crate::service::Memories;
use engram_client::{Client, ReadMode};
use engram_memory::PartitionId;
use engram_proto::v1::{self, Problem, ProblemKind};
use engram_store::{ConfirmError, Partitions, ReplicaPosition};
use std::time::Duration;
use tokio::sync::oneshot;

/// Consistency of a read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum ReadConsistency {
    Leased,
    Confirmed,
    /// From replicas of these partitions that lag by at most this many milliseconds.
    Replicas(u64, Vec<PartitionId>),
}

impl ReadConsistency {
    /// Returns the mode of the client library.
    const fn mode(&self) -> ReadMode {
        match self {
            Self::Leased => ReadMode::Linearizable,
            Self::Confirmed => ReadMode::Confirmed,
            Self::Replicas(max_lag_ms, _) => ReadMode::Replica { max_lag: Duration::from_millis(*max_lag_ms) },
        }
    }
}

impl Memories {
    /// Validates the requested consistency.
    pub(crate) fn consistency(&self, read: Option<v1::Read>) -> Result<ReadConsistency, Problem> {
        let Some(read) = read else { return Ok(ReadConsistency::Leased) };
        let mode = v1::ReadMode::try_from(read.mode).map_err(|_| {
            Problem::of(ProblemKind::Invalid, format!("read.mode: {} is not allowed; allowed: 0 to 3", read.mode))
        })?;
        Ok(match mode {
            v1::ReadMode::Unspecified | v1::ReadMode::Linearizable => ReadConsistency::Leased,
            v1::ReadMode::Confirmed => ReadConsistency::Confirmed,
            v1::ReadMode::Replica => {
                let mut partitions = read.partitions;
                if partitions.is_empty() {
                    partitions = (0..self.shared.partitions()).collect();
                }
                partitions.sort_unstable();
                partitions.dedup();
                let checked = partitions.into_iter().map(|partition| self.shared.check_partition(partition));
                ReadConsistency::Replicas(read.max_lag_ms, checked.collect::<Result<_, _>>()?)
            }
        })
    }

    /// Validates the consistency of a read that only primaries answer.
    pub(crate) fn primary_consistency(&self, read: Option<v1::Read>) -> Result<ReadConsistency, Problem> {
        match self.consistency(read)? {
            ReadConsistency::Replicas(..) => Err(Problem::of(
                ProblemKind::Invalid,
                "read.mode: REPLICA is not allowed; allowed: LINEARIZABLE, CONFIRMED (REPLICA is for quality, rank and digest)",
            )),
            consistency => Ok(consistency),
        }
    }

    /// Returns the client of all workers with this consistency.
    pub(crate) fn peers(&self, consistency: &ReadConsistency) -> Client {
        self.shared.client.with_read_mode(consistency.mode())
    }

    /// Reads partitions served here.
    pub(crate) async fn read_some<T: Send + 'static>(
        &self,
        consistency: &ReadConsistency,
        partitions: Vec<PartitionId>,
        read: impl FnOnce(&mut Partitions) -> T + Send + 'static,
    ) -> Result<T, Problem> {
        match consistency {
            ReadConsistency::Confirmed => match self.shared.engine.read_confirmed(partitions, read).await? {
                Ok(value) => Ok(value),
                Err(error) => Err(self.confirm_problem(&error)),
            },
            _ => self.shared.engine.read_leased(partitions, read).await,
        }
    }

    /// Reads all partitions served here, or the requested replicas; `read` gets the version of each.
    pub(crate) async fn read_all<T: Send + 'static>(
        &self,
        consistency: ReadConsistency,
        read: impl FnOnce(&mut Partitions, Vec<v1::PartitionVersion>) -> T + Send + 'static,
    ) -> Result<T, Problem> {
        let (engine, count) = (self.shared.engine.clone(), self.shared.partitions());
        match consistency {
            ReadConsistency::Replicas(max_lag_ms, partitions) => {
                let read = move |store: &mut Partitions, replicas: Vec<ReplicaPosition>| {
                    read(store, replicas.iter().map(version).collect())
                };
                self.shared.engine.read_replicas(partitions, max_lag_ms, read).await
            }
            ReadConsistency::Leased => {
                self.shared.engine.read_served(count, move |store| read(store, engine.versions(count))).await
            }
            ReadConsistency::Confirmed => {
                let served = engine.served(count);
                let read = move |store: &mut Partitions| (read(store, engine.versions(count)), engine.served(count));
                let (value, served_after) = self.read_some(&consistency, served.clone(), read).await?;
                if served_after == served { Ok(value) } else { Err(moved()) }
            }
        }
    }

    fn confirm_problem(&self, error: &ConfirmError) -> Problem {
        let text = error.to_string();
        match error {
            ConfirmError::NotServed { partition } => self.shared.not_primary(*partition),
            // The map will show the primary; an immediate retry would fail again.
            ConfirmError::Deposed { partition, .. } | ConfirmError::NoResponse { partition, .. } => {
                Problem::of(ProblemKind::Unavailable, text).at(*partition).retry_after(LEASE_RETRY_MS)
            }
        }
    }
}

fn version(replicas: &ReplicaPosition) -> v1::PartitionVersion {
    let version = v1::PartitionVersion::of(replicas.partition, replicas.term, replicas.lsn);
    v1::PartitionVersion { lag_ms: Some(replicas.lag_ms), ..version }
}

impl Engine {
    /// Reads once every in-sync replica has confirmed, after this call, that this worker is primary of `partitions`.
    async fn read_confirmed<T: Send + 'static>(
        &self,
        partitions: Vec<PartitionId>,
        read: impl FnOnce(&mut Partitions) -> T + Send + 'static,
    ) -> Result<Result<T, ConfirmError>, Problem> {
        let (done, result) = oneshot::channel();
        let taken = self.handle.read_confirmed(partitions, read, move |value| {
            let _ = done.send(value);
        });
        taken.map_err(|full| overloaded(&full))?;
        result.await.map_err(|_| ended())
    }

    /// Reads the replicas here that lag by at most `max_lag_ms`.
    async fn read_replicas<T: Send + 'static>(
        &self,
        partitions: Vec<PartitionId>,
        max_lag_ms: u64,
        read: impl FnOnce(&mut Partitions, Vec<ReplicaPosition>) -> T + Send + 'static,
    ) -> Result<T, Problem> {
        let (done, result) = oneshot::channel();
        let taken = self.handle.read_replicas(partitions, max_lag_ms, read, move |value| {
            let _ = done.send(value);
        });
        taken.map_err(|full| overloaded(&full))?;
        result.await.map_err(|_| ended())
    }
}
