//! Rank over all workers: each sorts its own, the client merges. Weight descending, then id ascending.

use crate::call::Failure;
use crate::client::Client;
use crate::copies::Open;
use crate::error::Error;
use crate::map::Map;
use crate::options::ReadMode;
use crate::read::{broken, covers, next, opened};
use crate::retry::Retry;
use crate::rows::{Memory, memories};
use engram_memory::law::rank_order;
use engram_memory::{Group, Ordinal};
use engram_proto::v1;
use futures::future::join_all;
use std::collections::VecDeque;
use std::time::Duration;
use tonic::Streaming;

/// Rows that [`Ranked::next`] gives at once.
const ROWS: usize = 4_096;

/// What to rank.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RankOptions {
    /// How many of the first; 0 = all.
    pub limit: u64,
    /// Of this group only.
    pub group: Option<Group>,
    /// With keys.
    pub keys: bool,
}

/// Memories by rank, merged from all workers as they stream.
#[derive(Debug)]
pub struct Ranked {
    runs: Vec<Run>,
    versions: Vec<v1::PartitionVersion>,
    left: u64,
    deadline: Duration,
}

/// The sorted memories of one worker.
#[derive(Debug)]
struct Run {
    stream: Streaming<v1::MemoryBatch>,
    rows: VecDeque<Memory>,
    versions: Vec<v1::PartitionVersion>,
}

impl Client {
    /// Ranks all memories, streaming: the first rows come before the last are sent. Each worker answers as of one moment.
    ///
    /// # Errors
    /// As [`Error`] says.
    pub async fn rank(&self, options: RankOptions) -> Result<Ranked, Error> {
        let mut retry = self.read();
        loop {
            match self.rank_once(options, &retry).await {
                Ok(ranked) => return Ok(ranked),
                Err(failure) => retry.after(self, failure).await?,
            }
        }
    }

    /// The first `limit` memories, of a group or of all. A worker that goes away meanwhile is waited for.
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
        let mut ranked = self.rank_once(options, retry).await?;
        let mut memories = Vec::new();
        while let Some(rows) = ranked.pull().await? {
            memories.extend(rows);
        }
        Ok(memories)
    }

    async fn rank_once(&self, options: RankOptions, retry: &Retry) -> Result<Ranked, Failure> {
        let map = self.map().map_err(|error| Failure::unavailable(error.to_string()))?;
        let deadline = self.attempt(retry);
        let runs = match self.read_mode() {
            ReadMode::Replica { .. } => self.run_copies(&map, options, deadline).await?,
            _ => {
                let map = &map;
                let runs = map.owners().into_iter().map(|owner| async move {
                    let run = self.run(map, owner, options, &[], deadline).await?;
                    covers(map, owner, &run.versions)?;
                    Ok(run)
                });
                join_all(runs).await.into_iter().collect::<Result<Vec<_>, Failure>>()?
            }
        };
        let versions = runs.iter().flat_map(|run| run.versions.iter().copied()).collect();
        let left = if options.limit == 0 { u64::MAX } else { options.limit };
        Ok(Ranked { runs, versions, left, deadline })
    }

    /// Of a copy of each partition, or of its primary where no other is close enough.
    async fn run_copies(&self, map: &Map, options: RankOptions, deadline: Duration) -> Result<Vec<Run>, Failure> {
        let mut open = Open::all(map);
        let mut runs = Vec::new();
        let mut met = None;
        for _ in 0..2 {
            let asked = open.plan(map).into_iter().map(|(worker, partitions)| async move {
                (self.run(map, worker, options, &partitions, deadline).await, partitions)
            });
            for (run, asked) in join_all(asked).await {
                match run.and_then(|run| open.answered(&asked, &run.versions).map(|()| run)) {
                    Ok(run) => runs.push(run),
                    Err(failure) => met = Some(failure),
                }
            }
            if open.is_empty() {
                return Ok(runs);
            }
        }
        Err(met.unwrap_or_else(|| open.failure(self.read_mode())))
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
            read: self.how(partitions),
        };
        let mut stream = opened(deadline, service.rank(self.request(message, deadline))).await?;
        let first = next(&mut stream, deadline).await?.unwrap_or_default();
        let rows = memories(&first).map_err(|error| broken(&error))?.into();
        Ok(Run { stream, rows, versions: first.versions })
    }
}

impl Ranked {
    /// The next rows; `None` after the last.
    ///
    /// # Errors
    /// A worker went away while it was read; the rank is to be asked for again.
    pub async fn next(&mut self) -> Result<Option<Vec<Memory>>, Error> {
        self.pull().await.map_err(|failure| Error::refused(failure.problem))
    }

    /// Where each partition stood.
    pub fn versions(&self) -> &[v1::PartitionVersion] {
        &self.versions
    }

    async fn pull(&mut self) -> Result<Option<Vec<Memory>>, Failure> {
        let mut rows = Vec::new();
        while rows.len() < ROWS && self.left > 0 {
            let mut ended = false;
            for run in &mut self.runs {
                ended |= !run.fill(self.deadline).await?;
            }
            if ended {
                self.runs.retain(|run| !run.rows.is_empty());
            }
            // Until one run is empty, the smallest head is the next of all.
            while rows.len() < ROWS && self.left > 0 {
                let heads = self.runs.iter_mut().filter(|run| !run.rows.is_empty());
                let best = heads.min_by(|a, b| {
                    let key = |run: &Run| (run.rows[0].weight, run.rows[0].id);
                    rank_order(key(a), key(b))
                });
                let Some(best) = best else { break };
                rows.extend(best.rows.pop_front());
                self.left -= 1;
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
    /// Makes sure that there is a head; false at the end.
    async fn fill(&mut self, deadline: Duration) -> Result<bool, Failure> {
        while self.rows.is_empty() {
            match next(&mut self.stream, deadline).await? {
                Some(batch) => self.rows = memories(&batch).map_err(|error| broken(&error))?.into(),
                None => return Ok(false),
            }
        }
        Ok(true)
    }
}
