//! A run's cluster through the client library.

use super::cluster::{Cluster, ClusterError, ClusterFacts, EpochOutcome, Turn};
use super::driver::SentKeys;
use crate::report::RankEntry;
use crate::source::{Content, Event, Population, Signal};
use engram_client::{
    Client, EpochUpdates, Error, GetOptions, GroupSignal, Memory, QualityOptions, RankOptions, Rows, Signals, Updates,
};
use engram_memory::{Blobs, Digest, Group, Histogram, LearningEpoch, MemoryId, OnMissing, QualityVector, RunId};
use engram_proto::v1::ProblemKind;
use futures::stream::{self, StreamExt as _, TryStreamExt as _};

/// Memories per batch of a population, and batches in flight.
const BATCH: usize = 32 << 10;
const BATCHES: usize = 4;

/// A cluster through a client.
#[derive(Debug, Clone)]
pub struct ClientCluster {
    client: Client,
    facts: ClusterFacts,
}

impl ClientCluster {
    /// Creates a cluster with these properties.
    pub const fn new(client: Client, facts: ClusterFacts) -> Self {
        Self { client, facts }
    }
}

impl Cluster for ClientCluster {
    fn facts(&self) -> ClusterFacts {
        self.facts.clone()
    }

    async fn acquire_turn(&self, run: RunId, name: &str, submitted_ms: u64) -> Result<Turn, ClusterError> {
        let reply = self.client.acquire_turn(run, name, submitted_ms).await?;
        Ok(if reply.granted {
            Turn::Granted
        } else {
            Turn::Held { holder: reply.holder, runs_ahead: reply.runs_ahead }
        })
    }

    async fn release_turn(&self, run: RunId) -> Result<(), ClusterError> {
        Ok(self.client.release_turn(run).await?)
    }

    async fn set_update_counting(&self, enabled: bool) -> Result<(), ClusterError> {
        Ok(self.client.set_update_counting(enabled).await?)
    }

    async fn populate(&self, population: &Population) -> Result<(), ClusterError> {
        let session = self.client.session();
        let ids: Vec<MemoryId> = population.ids().collect();
        let weight = population.initial_weight;
        stream::iter(ids.chunks(BATCH).map(<[MemoryId]>::to_vec))
            .map(Ok)
            .try_for_each_concurrent(BATCHES, |ids| {
                let rows = Rows {
                    weights: vec![weight; ids.len()],
                    groups: ids.iter().map(|id| Population::group_of(*id)).collect(),
                    ids,
                    ..Rows::default()
                };
                let session = &session;
                async move { session.upsert(rows).await.map(drop) }
            })
            .await?;
        Ok(())
    }

    async fn learn(
        &self,
        run: RunId,
        n: LearningEpoch,
        decay: f64,
        content: &Content,
        on_missing: OnMissing,
        sent: &SentKeys,
    ) -> Result<EpochOutcome, ClusterError> {
        let updates = updates(content, on_missing, sent);
        let report = self.client.learn_epoch(run, n, decay, updates).await?;
        Ok(EpochOutcome {
            applied: report.outcome.applied,
            created: report.outcome.created,
            evicted: report.outcome.evicted,
            rejected: report.outcome.rejected,
            quality: report.quality,
        })
    }

    async fn broadcast(&self, run: RunId, n: LearningEpoch, quality: &QualityVector) -> Result<(), ClusterError> {
        // Best effort: a worker that misses it gets the next one, and it changes no replicated state.
        self.client.broadcast_quality(run, n, quality).await;
        Ok(())
    }

    async fn top(&self, limit: usize) -> Result<Vec<RankEntry>, ClusterError> {
        let memories = self.client.top(limit as u64, None).await?;
        Ok(memories.into_iter().map(rank_entry).collect())
    }

    async fn get(&self, ids: &[MemoryId]) -> Result<Vec<RankEntry>, ClusterError> {
        let result = self.client.get(ids, GetOptions::default()).await?;
        Ok(result.memories.into_iter().map(rank_entry).collect())
    }

    async fn ranked_pairs(&self, first: Group, second: Group) -> Result<Vec<(u32, bool)>, ClusterError> {
        let mut ranked = self.client.rank(RankOptions::default()).await?;
        let mut pairs = Vec::new();
        while let Some(rows) = ranked.next().await? {
            let selected = rows.into_iter().filter(|memory| [first, second].contains(&memory.group));
            pairs.extend(selected.map(|memory| (memory.weight.units(), memory.group == first)));
        }
        Ok(pairs)
    }

    async fn quality(&self) -> Result<QualityVector, ClusterError> {
        Ok(self.client.quality(QualityOptions::default()).await?.vector)
    }

    async fn histogram(&self, bits: u32) -> Result<Histogram, ClusterError> {
        let options = QualityOptions { histogram_bits: Some(bits), ..QualityOptions::default() };
        let empty = || Histogram::new(bits).expect("a width that histograms have");
        Ok(self.client.quality(options).await?.histogram.unwrap_or_else(empty))
    }

    async fn coverage(&self, updates: u16) -> Result<Vec<(Group, u64, u64)>, ClusterError> {
        let options = QualityOptions { covered_updates: updates.into(), ..QualityOptions::default() };
        let quality = self.client.quality(options).await?;
        let groups = quality.vector.groups().iter();
        let covered = |group: &Group| quality.coverage.get(group).map_or(0, |(_, covered)| *covered);
        Ok(groups.map(|(group, quality)| (*group, covered(group), quality.count)).collect())
    }

    async fn digest(&self) -> Result<Digest, ClusterError> {
        Ok(self.client.digest().await?.digest)
    }
}

fn rank_entry(memory: Memory) -> RankEntry {
    RankEntry { id: memory.id, key: memory.key, weight: memory.weight }
}

fn updates(content: &Content, on_missing: OnMissing, sent: &SentKeys) -> EpochUpdates {
    match content {
        Content::Groups(groups) => {
            let signal = |signal: &Signal| match *signal {
                Signal::Quality(quality) => GroupSignal::Quality(quality),
                Signal::Delta(delta) => GroupSignal::Delta(delta),
            };
            EpochUpdates::ByGroup(groups.iter().map(|(group, it)| (*group, signal(it))).collect())
        }
        Content::Events(events) => by_id(events.iter(), on_missing, sent),
        Content::Noise(noise) => {
            let events: Vec<Event> = noise.events(0..noise.memories()).collect();
            by_id(events.iter(), on_missing, sent)
        }
    }
}

/// Converts events to columns. A source has either qualities or deltas.
fn by_id<'a>(events: impl Iterator<Item = &'a Event> + Clone, on_missing: OnMissing, sent: &SentKeys) -> EpochUpdates {
    let is_unsent = |event: &&Event| event.key.is_some() && !sent.contains(event.id);
    let keys = events.clone().any(|event| is_unsent(&event)).then(|| {
        let key = |event: &'a Event| event.key.as_deref().filter(|_| is_unsent(&event)).unwrap_or("").as_bytes();
        events.clone().map(key).collect::<Blobs>()
    });
    let qualities = events.clone().filter_map(|event| match event.signal {
        Signal::Quality(quality) => Some(quality),
        Signal::Delta(_) => None,
    });
    let deltas = events.clone().filter_map(|event| match event.signal {
        Signal::Delta(delta) => Some(delta),
        Signal::Quality(_) => None,
    });
    let (qualities, deltas): (Vec<f32>, Vec<f32>) = (qualities.collect(), deltas.collect());
    let signals = match qualities.first() {
        Some(first) if qualities.iter().all(|quality| quality.to_bits() == first.to_bits()) => Signals::Quality(*first),
        Some(_) => Signals::Qualities(qualities),
        None => Signals::Deltas(deltas),
    };
    EpochUpdates::ById(Updates { ids: events.map(|event| event.id).collect(), signals, on_missing, keys })
}

impl From<Error> for ClusterError {
    fn from(error: Error) -> Self {
        let message = error.to_string();
        let code = match error.kind() {
            // A deadline passed or a worker is unreachable: a repeated epoch is answered, not applied.
            _ if !matches!(error, Error::Rejected(_) | Error::Partial { .. }) => return Self::Temporary(message),
            ProblemKind::Unavailable
            | ProblemKind::NotPrimary
            | ProblemKind::Overloaded
            | ProblemKind::Stopping
            | ProblemKind::OutcomeUnknown
            | ProblemKind::NotEnoughReplicas
            | ProblemKind::SessionExpired
            | ProblemKind::Unspecified
            // Disk space may be freed while the run waits.
            | ProblemKind::DiskFull => return Self::Temporary(message),
            ProblemKind::Capacity => "ENG-0504",
            ProblemKind::DataCorruption => "ENG-0503",
            ProblemKind::Invalid => "ENG-0507",
            ProblemKind::WrongCluster => "ENG-0605",
            ProblemKind::Denied | ProblemKind::Unauthenticated => "ENG-0607",
            _ => "ENG-0308",
        };
        Self::Permanent { code, message }
    }
}
