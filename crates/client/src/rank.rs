//! Rank over all workers: each sorts its own memories, the client merges. Weight descending, then id ascending.

use crate::call::Failure;
use crate::client::Client;
use crate::error::Error;
use crate::map::Map;
use crate::options::ReadMode;
use crate::read::{check_coverage, next, opened, protocol_violation};
use crate::replica_reads::OpenPartitions;
use crate::retry::Retry;
use crate::rows::{Memory, memories};
use engram_memory::law::rank_order;
use engram_memory::{Group, Ordinal};
use engram_proto::v1;
use futures::future::join_all;
use std::collections::VecDeque;
use std::time::Duration;
use tonic::Streaming;

/// Maximum rows that [`Ranking::next`] returns at once.
const ROWS: usize = 4_096;

/// Options of a rank query.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RankOptions {
    /// Maximum number of memories; 0 = all.
    pub limit: u64,
    /// Only this group.
    pub group: Option<Group>,
    /// Include keys.
    pub keys: bool,
}

/// Memories by rank, merged from the streams of all workers.
#[derive(Debug)]
pub struct Ranking {
    runs: Vec<Run>,
    versions: Vec<v1::PartitionVersion>,
    remaining: u64,
    deadline: Duration,
}

/// Sorted memories of one worker.
#[derive(Debug)]
struct Run {
    stream: Streaming<v1::MemoryBatch>,
    rows: VecDeque<Memory>,
    versions: Vec<v1::PartitionVersion>,
}

impl Client {
    /// Ranks all memories, streaming: the first rows arrive before the last are sent. Each worker responds from one
    /// snapshot.
    ///
    /// # Errors
    /// As [`Error`] says.
    pub async fn rank(&self, options: RankOptions) -> Result<Ranking, Error> {
        let mut retry = self.read();
        loop {
            match self.rank_once(options, &retry).await {
                Ok(ranking) => return Ok(ranking),
                Err(failure) => retry.after(self, failure).await?,
            }
        }
    }

    /// Returns the first `limit` memories, of a group or of all. Retries if a worker fails meanwhile.
    ///
    /// # Errors
    /// As [`Error`] says.
    pub async fn top(&self, limit: u64, group: Option<Group>) -> Result<Vec<Memory>, Error> {
        if limit == 0 {
            return Ok(Vec::new());
        }
        let mut retry = self.read();
        loop {
            match self.top_once(RankOptions { limit, group, keys: true }, &retry).await {
                Ok(memories) => return Ok(memories),
                Err(failure) => retry.after(self, failure).await?,
            }
        }
    }

    async fn top_once(&self, options: RankOptions, retry: &Retry) -> Result<Vec<Memory>, Failure> {
        let mut ranking = self.rank_once(options, retry).await?;
        let mut memories = Vec::new();
        while let Some(rows) = ranking.pull().await? {
            memories.extend(rows);
        }
        Ok(memories)
    }

    async fn rank_once(&self, options: RankOptions, retry: &Retry) -> Result<Ranking, Failure> {
        let map = self.map().map_err(|error| Failure::unavailable(error.to_string()))?;
        let deadline = self.attempt(retry);
        let runs = match self.read_mode() {
            ReadMode::Replica { .. } => self.run_replicas(&map, options, deadline).await?,
            _ => {
                let map = &map;
                let runs = map.owners().into_iter().map(|owner| async move {
                    let run = self.run(map, owner, options, &[], deadline).await?;
                    check_coverage(map, owner, &run.versions)?;
                    Ok(run)
                });
                join_all(runs).await.into_iter().collect::<Result<Vec<_>, Failure>>()?
            }
        };
        let versions = runs.iter().flat_map(|run| run.versions.iter().copied()).collect();
        let remaining = if options.limit == 0 { u64::MAX } else { options.limit };
        Ok(Ranking { runs, versions, remaining, deadline })
    }

    /// Reads each partition from a backup, or from its primary if no backup is fresh enough.
    async fn run_replicas(&self, map: &Map, options: RankOptions, deadline: Duration) -> Result<Vec<Run>, Failure> {
        let mut open = OpenPartitions::all(map);
        let mut runs = Vec::new();
        let mut failure_seen = None;
        for _ in 0..2 {
            let requested = open.plan(map).into_iter().map(|(worker, partitions)| async move {
                (self.run(map, worker, options, &partitions, deadline).await, partitions)
            });
            for (run, requested) in join_all(requested).await {
                match run.and_then(|run| open.record_response(&requested, &run.versions).map(|()| run)) {
                    Ok(run) => runs.push(run),
                    Err(failure) => failure_seen = Some(failure),
                }
            }
            if open.is_empty() {
                return Ok(runs);
            }
        }
        Err(failure_seen.unwrap_or_else(|| open.failure(self.read_mode())))
    }

    async fn run(
        &self,
        map: &Map,
        owner: Ordinal,
        options: RankOptions,
        partitions: &[u32],
        deadline: Duration,
    ) -> Result<Run, Failure> {
        let mut service = self.service_of(map, owner)?;
        let message = v1::RankRequest {
            local: true,
            limit: options.limit,
            group: options.group.map(|group| u32::from(group.0)),
            with_keys: options.keys,
            read: self.read_options(partitions),
        };
        let mut stream = opened(deadline, service.rank(self.request(message, deadline))).await?;
        let first = next(&mut stream, deadline).await?.unwrap_or_default();
        let rows = memories(&first).map_err(|error| protocol_violation(&error))?.into();
        Ok(Run { stream, rows, versions: first.versions })
    }
}

impl Ranking {
    /// Returns the next rows; `None` after the last.
    ///
    /// # Errors
    /// A worker failed during the query; it must be repeated.
    pub async fn next(&mut self) -> Result<Option<Vec<Memory>>, Error> {
        self.pull().await.map_err(|failure| Error::rejected(failure.problem))
    }

    /// Returns the version of each partition.
    pub fn versions(&self) -> &[v1::PartitionVersion] {
        &self.versions
    }

    async fn pull(&mut self) -> Result<Option<Vec<Memory>>, Failure> {
        let mut rows = Vec::new();
        while rows.len() < ROWS && self.remaining > 0 {
            let mut ended = false;
            for run in &mut self.runs {
                ended |= !run.fill(self.deadline).await?;
            }
            if ended {
                self.runs.retain(|run| !run.rows.is_empty());
            }
            // Until one run is empty, the smallest head is the next of all.
            while rows.len() < ROWS && self.remaining > 0 {
                let heads = self.runs.iter_mut().filter(|run| !run.rows.is_empty());
                let best = heads.min_by(|a, b| {
                    let key = |run: &Run| (run.rows[0].weight, run.rows[0].id);
                    rank_order(key(a), key(b))
                });
                let Some(best) = best else { break };
                rows.extend(best.rows.pop_front());
                self.remaining -= 1;
                if best.rows.is_empty() {
                    break;
                }
            }
            if self.runs.is_empty() {
                break;
            }
        }
        Ok((!rows.is_empty()).then_some(rows))
    }
}

impl Run {
    /// Ensures that the run has a head; returns false at its end.
    async fn fill(&mut self, deadline: Duration) -> Result<bool, Failure> {
        while self.rows.is_empty() {
            match next(&mut self.stream, deadline).await? {
                Some(batch) => self.rows = memories(&batch).map_err(|error| protocol_violation(&error))?.into(),
                None => return Ok(false),
            }
        }
        Ok(true)
    }
}
