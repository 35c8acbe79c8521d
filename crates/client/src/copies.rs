//! Reads of copies: each partition is asked of one that is no primary first, then of its primary, until all are answered.

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

/// The partitions that a read has no answer of yet.
#[derive(Debug)]
pub(crate) struct Open {
    partitions: BTreeSet<u32>,
    /// Which of its copies each one is asked of: another one each time.
    turn: usize,
}

impl Open {
    pub(crate) fn all(map: &Map) -> Self {
        Self { partitions: (0..map.partition_count()).collect(), turn: 0 }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.partitions.is_empty()
    }

    /// Whom to ask for what now: copies that are no primary first, spread over the workers that are up; every other time the primary.
    pub(crate) fn plan(&mut self, map: &Map) -> BTreeMap<Ordinal, Vec<u32>> {
        let mut plan: BTreeMap<Ordinal, Vec<u32>> = BTreeMap::new();
        for &partition in &self.partitions {
            let at = partition as usize;
            let Some(primary) = map.partitions.get(at).map(|placement| placement.primary) else { continue };
            let is_up = |ordinal: &Ordinal| map.workers.get(ordinal).is_some_and(|worker| worker.alive);
            let others = map.in_sync.get(at).into_iter().flatten().copied();
            let others: Vec<Ordinal> = others.filter(|ordinal| *ordinal != primary && is_up(ordinal)).collect();
            let asked = if self.turn % 2 == 1 || others.is_empty() {
                primary
            } else {
                others[(at + self.turn / 2) % others.len()]
            };
            plan.entry(asked).or_default().push(partition);
        }
        self.turn += 1;
        plan
    }

    /// Takes what a worker answered of the partitions that it was asked for.
    ///
    /// # Errors
    /// It answered something else, or twice: what it said counts twice, or for nobody.
    pub(crate) fn answered(&mut self, asked: &[u32], versions: &[v1::PartitionVersion]) -> Result<(), Failure> {
        let mut told = BTreeSet::new();
        for version in versions {
            if !asked.contains(&version.partition) || !told.insert(version.partition) {
                let text = format!("partition {} was answered and not asked for, or twice", version.partition);
                return Err(Failure::of(Problem::of(ProblemKind::Unspecified, text)));
            }
        }
        self.partitions.retain(|partition| !told.contains(partition));
        Ok(())
    }

    /// Why it is not empty.
    pub(crate) fn failure(&self, mode: ReadMode) -> Failure {
        let first = self.partitions.first().copied().unwrap_or_default();
        let allowed = if let ReadMode::Replica { max_lag } = mode { max_lag } else { Duration::ZERO };
        Failure::unavailable(format!(
            "no copy of partition {first} is known to lag by at most {} ms",
            allowed.as_millis()
        ))
    }
}

impl Client {
    /// How reads are answered, as it travels; with the partitions that a copy is asked for.
    pub(crate) fn how(&self, partitions: &[u32]) -> Option<v1::Read> {
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
    /// Reads are of copies, and this one is for primaries.
    pub(crate) fn check_primary(&self) -> Result<(), Error> {
        match self.read_mode() {
            ReadMode::Replica { .. } => Err(Error::refused(Problem::of(
                ProblemKind::Invalid,
                "read mode: replica is not allowed; allowed: linearizable, confirmed (replica is for quality, rank and digest)",
            ))),
            _ => Ok(()),
        }
    }

    /// Asks copies for all partitions, until each is answered once.
    pub(crate) async fn copies<T, F, A>(&self, ask: &F) -> Result<Vec<T>, Error>
    where
        F: Fn(Service, Option<v1::Read>, Duration) -> A,
        A: Future<Output = Result<(Vec<v1::PartitionVersion>, T), Failure>>,
    {
        let mut retry = self.read();
        let mut open = Open::all(&*self.map()?);
        let mut answers = Vec::new();
        loop {
            let map = self.map()?;
            let deadline = self.attempt(&retry);
            let calls = open.plan(&map).into_iter().map(|(worker, partitions)| {
                let map = &map;
                async move {
                    let answer = async {
                        let service = self.service_of(map, worker)?;
                        let call = ask(service, self.how(&partitions), deadline);
                        timeout(deadline, call).await.map_err(|_| Failure::timed_out())?
                    };
                    (answer.await, partitions)
                }
            });
            let mut met = None;
            for (answer, asked) in join_all(calls).await {
                let taken = answer.and_then(|(versions, answer)| {
                    open.answered(&asked, &versions)?;
                    Ok((!versions.is_empty()).then_some(answer))
                });
                match taken {
                    Ok(answer) => answers.extend(answer),
                    Err(failure) => met = Some(failure),
                }
            }
            if open.is_empty() {
                return Ok(answers);
            }
            let first = open.turn == 1;
            let failure = met.unwrap_or_else(|| open.failure(self.read_mode()));
            // The primary is asked at once.
            if !first || !failure.retryable {
                retry.after(self, failure).await?;
            }
        }
    }
}
