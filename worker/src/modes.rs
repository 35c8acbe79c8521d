//! How reads are answered: under leases, confirmed by every copy in sync, or of a copy that lags.
//!
//! A read says how it wants to be answered, and is answered so or refused: nothing falls back to less than was asked for.

use crate::engine::{Engine, LEASE_RETRY_MS, ended, moved, overloaded};
use crate::service::Memories;
use engram_client::{Client, ReadMode};
use engram_memory::PartitionId;
use engram_proto::v1::{self, Problem, ProblemKind};
use engram_store::{Copied, Partitions, Unconfirmed};
use std::time::Duration;
use tokio::sync::oneshot;

/// How a read is answered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum How {
    Leased,
    Confirmed,
    /// Of copies that lag by at most so much, of these partitions.
    Copies(u64, Vec<PartitionId>),
}

impl How {
    /// The same for the client library.
    const fn mode(&self) -> ReadMode {
        match self {
            Self::Leased => ReadMode::Linearizable,
            Self::Confirmed => ReadMode::Confirmed,
            Self::Copies(max_lag_ms, _) => ReadMode::Replica { max_lag: Duration::from_millis(*max_lag_ms) },
        }
    }
}

impl Memories {
    /// What is asked for, checked.
    pub(crate) fn how(&self, read: Option<v1::Read>) -> Result<How, Problem> {
        let Some(read) = read else { return Ok(How::Leased) };
        let mode = v1::ReadMode::try_from(read.mode).map_err(|_| {
            Problem::of(ProblemKind::Invalid, format!("read.mode: {} is not allowed; allowed: 0 to 3", read.mode))
        })?;
        Ok(match mode {
            v1::ReadMode::Unspecified | v1::ReadMode::Linearizable => How::Leased,
            v1::ReadMode::Confirmed => How::Confirmed,
            v1::ReadMode::Replica => {
                let mut partitions = read.partitions;
                if partitions.is_empty() {
                    partitions = (0..self.shared.partitions()).collect();
                }
                partitions.sort_unstable();
                partitions.dedup();
                let checked = partitions.into_iter().map(|partition| self.shared.check_partition(partition));
                How::Copies(read.max_lag_ms, checked.collect::<Result<_, _>>()?)
            }
        })
    }

    /// The same for reads that primaries answer.
    pub(crate) fn how_of_primary(&self, read: Option<v1::Read>) -> Result<How, Problem> {
        match self.how(read)? {
            How::Copies(..) => Err(Problem::of(
                ProblemKind::Invalid,
                "read.mode: REPLICA is not allowed; allowed: LINEARIZABLE, CONFIRMED (REPLICA is for quality, rank and digest)",
            )),
            how => Ok(how),
        }
    }

    /// The client of all workers, reading so.
    pub(crate) fn peers(&self, how: &How) -> Client {
        self.shared.peers.reading(how.mode())
    }

    /// Reads partitions that are served here.
    pub(crate) async fn read_some<T: Send + 'static>(
        &self,
        how: &How,
        partitions: Vec<PartitionId>,
        read: impl FnOnce(&mut Partitions) -> T + Send + 'static,
    ) -> Result<T, Problem> {
        match how {
            How::Confirmed => match self.shared.engine.read_confirmed(partitions, read).await? {
                Ok(value) => Ok(value),
                Err(why) => Err(self.unconfirmed(&why)),
            },
            _ => self.shared.engine.read_leased(partitions, read).await,
        }
    }

    /// Reads all that is served here, or the copies asked for; `read` is told where each partition in it stands.
    pub(crate) async fn read_all<T: Send + 'static>(
        &self,
        how: How,
        read: impl FnOnce(&mut Partitions, Vec<v1::PartitionVersion>) -> T + Send + 'static,
    ) -> Result<T, Problem> {
        let (engine, count) = (self.shared.engine.clone(), self.shared.partitions());
        match how {
            How::Copies(max_lag_ms, partitions) => {
                let read = move |store: &mut Partitions, copied: Vec<Copied>| {
                    read(store, copied.iter().map(version).collect())
                };
                self.shared.engine.read_copies(partitions, max_lag_ms, read).await
            }
            How::Leased => {
                self.shared.engine.read_served(count, move |store| read(store, engine.versions(count))).await
            }
            How::Confirmed => {
                let served = engine.served(count);
                let read = move |store: &mut Partitions| (read(store, engine.versions(count)), engine.served(count));
                let (value, then) = self.read_some(&how, served.clone(), read).await?;
                if then == served { Ok(value) } else { Err(moved()) }
            }
        }
    }

    fn unconfirmed(&self, why: &Unconfirmed) -> Problem {
        let text = why.to_string();
        match why {
            Unconfirmed::NotServed { partition } => self.shared.not_primary(*partition),
            // The map will say who leads; asking again at once would meet the same.
            Unconfirmed::Deposed { partition, .. } | Unconfirmed::NoAnswer { partition, .. } => {
                Problem::of(ProblemKind::Unavailable, text).at(*partition).retry_after(LEASE_RETRY_MS)
            }
        }
    }
}

fn version(copied: &Copied) -> v1::PartitionVersion {
    let version = v1::PartitionVersion::of(copied.partition, copied.term, copied.lsn);
    v1::PartitionVersion { lag_ms: Some(copied.lag_ms), ..version }
}

impl Engine {
    /// Reads when every copy in sync has said, after this call, that this worker leads `partitions`.
    async fn read_confirmed<T: Send + 'static>(
        &self,
        partitions: Vec<PartitionId>,
        read: impl FnOnce(&mut Partitions) -> T + Send + 'static,
    ) -> Result<Result<T, Unconfirmed>, Problem> {
        let (done, result) = oneshot::channel();
        let taken = self.0.read_confirmed(partitions, read, move |value| {
            let _ = done.send(value);
        });
        taken.map_err(|full| overloaded(&full))?;
        result.await.map_err(|_| ended())
    }

    /// Reads the copies here that lag by at most so much.
    async fn read_copies<T: Send + 'static>(
        &self,
        partitions: Vec<PartitionId>,
        max_lag_ms: u64,
        read: impl FnOnce(&mut Partitions, Vec<Copied>) -> T + Send + 'static,
    ) -> Result<T, Problem> {
        let (done, result) = oneshot::channel();
        let taken = self.0.read_copies(partitions, max_lag_ms, read, move |value| {
            let _ = done.send(value);
        });
        taken.map_err(|full| overloaded(&full))?;
        result.await.map_err(|_| ended())
    }
}
