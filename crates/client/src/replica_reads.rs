//! Reads from replicas: each partition is read from a backup first, then from its primary, until all have responded.

use crate::call::{Failure, Service};
use crate::client::Client;
use crate::error::Error;
use crate::map::Map;
use crate::options::ReadMode;
use engram_memory::Ordinal;
use engram_proto::v1::{self, Problem, ProblemKind};
use futures::future::join_all;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;
use tokio::time::timeout;

/// Partitions that have not responded yet.
#[derive(Debug)]
pub(crate) struct OpenPartitions {
    partitions: BTreeSet<u32>,
    /// Number of the round, which selects the replica.
    round: usize,
}

impl OpenPartitions {
    pub(crate) fn all(map: &Map) -> Self {
        Self { partitions: (0..map.partition_count()).collect(), round: 0 }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.partitions.is_empty()
    }

    /// Plans the requests of the next round: backups first, spread over the live workers; the primary every other
    /// round.
    pub(crate) fn plan(&mut self, map: &Map) -> BTreeMap<Ordinal, Vec<u32>> {
        let mut plan: BTreeMap<Ordinal, Vec<u32>> = BTreeMap::new();
        for &partition in &self.partitions {
            let at = partition as usize;
            let Some(primary) = map.partitions.get(at).map(|placement| placement.primary) else { continue };
            let is_up = |ordinal: &Ordinal| map.workers.get(ordinal).is_some_and(|worker| worker.alive);
            let others = map.in_sync.get(at).into_iter().flatten().copied();
            let others: Vec<Ordinal> = others.filter(|ordinal| *ordinal != primary && is_up(ordinal)).collect();
            let worker = if self.round % 2 == 1 || others.is_empty() {
                primary
            } else {
                others[(at + self.round / 2) % others.len()]
            };
            plan.entry(worker).or_default().push(partition);
        }
        self.round += 1;
        plan
    }

    /// Records a response of a worker for the requested partitions.
    ///
    /// # Errors
    /// It responded for another partition, or twice: it would count twice or not at all.
    pub(crate) fn record_response(
        &mut self,
        requested: &[u32],
        versions: &[v1::PartitionVersion],
    ) -> Result<(), Failure> {
        let mut received = BTreeSet::new();
        for version in versions {
            if !requested.contains(&version.partition) || !received.insert(version.partition) {
                let text = format!("unexpected or duplicate response for partition {}", version.partition);
                return Err(Failure::of(Problem::of(ProblemKind::Unspecified, text)));
            }
        }
        self.partitions.retain(|partition| !received.contains(partition));
        Ok(())
    }

    /// Returns why partitions are left.
    pub(crate) fn failure(&self, mode: ReadMode) -> Failure {
        let first = self.partitions.first().copied().unwrap_or_default();
        let allowed = if let ReadMode::Replica { max_lag } = mode { max_lag } else { Duration::ZERO };
        Failure::unavailable(format!(
            "no replica of partition {first} is known to lag by at most {} ms",
            allowed.as_millis()
        ))
    }
}

impl Client {
    /// Returns the read options of a request for `partitions`.
    pub(crate) fn read_options(&self, partitions: &[u32]) -> Option<v1::Read> {
        let (mode, max_lag_ms) = match self.read_mode() {
            ReadMode::Linearizable => return None,
            ReadMode::Confirmed => (v1::ReadMode::Confirmed, 0),
            ReadMode::Replica { max_lag } => {
                (v1::ReadMode::Replica, u64::try_from(max_lag.as_millis()).unwrap_or(u64::MAX))
            }
        };
        Some(v1::Read { mode: mode.into(), max_lag_ms, partitions: partitions.to_vec() })
    }

    /// # Errors
    /// The read mode does not allow reads from primaries only.
    pub(crate) fn check_primary(&self) -> Result<(), Error> {
        match self.read_mode() {
            ReadMode::Replica { .. } => Err(Error::rejected(Problem::of(
                ProblemKind::Invalid,
                "read mode: replica is not allowed; allowed: linearizable, confirmed (replica is for quality, rank and digest)",
            ))),
            _ => Ok(()),
        }
    }

    /// Reads all partitions from replicas, each once.
    pub(crate) async fn read_replicas<T, F, A>(&self, call_worker: &F) -> Result<Vec<T>, Error>
    where
        F: Fn(Service, Option<v1::Read>, Duration) -> A,
        A: Future<Output = Result<(Vec<v1::PartitionVersion>, T), Failure>>,
    {
        let mut retry = self.read();
        let mut open = OpenPartitions::all(&*self.map()?);
        let mut answers = Vec::new();
        loop {
            let map = self.map()?;
            let deadline = self.attempt(&retry);
            let calls = open.plan(&map).into_iter().map(|(worker, partitions)| {
                let map = &map;
                async move {
                    let response = async {
                        let service = self.service_of(map, worker)?;
                        let call = call_worker(service, self.read_options(&partitions), deadline);
                        timeout(deadline, call).await.map_err(|_| Failure::timed_out())?
                    };
                    (response.await, partitions)
                }
            });
            let mut failure_seen = None;
            for (response, requested) in join_all(calls).await {
                let recorded = response.and_then(|(versions, response)| {
                    open.record_response(&requested, &versions)?;
                    Ok((!versions.is_empty()).then_some(response))
                });
                match recorded {
                    Ok(answer) => answers.extend(answer),
                    Err(failure) => failure_seen = Some(failure),
                }
            }
            if open.is_empty() {
                return Ok(answers);
            }
            let first = open.round == 1;
            let failure = failure_seen.unwrap_or_else(|| open.failure(self.read_mode()));
            // The primary is tried at once.
            if !first || !failure.retryable {
                retry.after(self, failure).await?;
            }
        }
    }
}
