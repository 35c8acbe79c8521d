//! Reads: of this worker's partitions on the engine's thread, of all through the client library. What is read
//! has a lease of every copy in sync, or what else the reader asked for ([`crate::modes`]), but for the keys of a rank's later pages.

use crate::batch::{Batches, Columns, of_rows};
use crate::engine::device_problem;
use crate::modes::How;
use crate::service::{Memories, Plane};
use engram_client::{Error, GetOptions, QualityOptions, RankOptions};
use engram_memory::quality::MAX_HISTOGRAM_BITS;
use engram_memory::{Group, MemoryId, PartitionId, partition_of};
use engram_proto::v1::{self, MemoryBatch, Problem, ProblemKind};
use engram_proto::{answers, columns};
use engram_store::Ranked;
use futures::FutureExt as _;
use futures::stream::{BoxStream, StreamExt as _};
use std::panic::AssertUnwindSafe;
use std::sync::PoisonError;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Status;

type Batched = BoxStream<'static, Result<MemoryBatch, Status>>;
type Sender = mpsc::Sender<Result<MemoryBatch, Status>>;

/// Batches gathered before the reader takes them.
const AHEAD: usize = 4;
/// Rows read at once: between two pages the engine turns to writes.
const PAGE: u32 = 4_096;

impl Memories {
    pub(crate) async fn get(&self, asked: v1::GetMemoriesRequest) -> Result<Batched, Problem> {
        columns::check_rows(asked.ids.len())?;
        let partitions = self.shared.partitions();
        self.shared.taken_over(asked.ids.iter().map(|id| partition_of(MemoryId(*id), partitions))).await;
        let is_here = |id: &u64| self.shared.engine.position(partition_of(MemoryId(*id), partitions)).is_some();
        let how = self.how_of_primary(asked.read)?;
        let wanted = Columns { features: asked.with_features, payloads: asked.with_payloads };
        let (here, elsewhere): (Vec<u64>, Vec<u64>) = asked.ids.iter().partition(|id| is_here(id));
        if let (Plane::Peer, Some(id)) = (self.plane, elsewhere.first()) {
            return Err(self.shared.not_primary(partition_of(MemoryId(*id), partitions)));
        }
        let mut batches = Vec::new();
        if !here.is_empty() || elsewhere.is_empty() {
            batches = self.get_here(&how, here, wanted).await?;
        }
        if !elsewhere.is_empty() {
            batches.extend(self.get_elsewhere(&how, &elsewhere, wanted).await?);
        }
        Ok(futures::stream::iter(batches.into_iter().map(Ok)).boxed())
    }

    async fn get_here(&self, how: &How, ids: Vec<u64>, wanted: Columns) -> Result<Vec<MemoryBatch>, Problem> {
        let (shape, count) = (self.shared.shape.features, self.shared.partitions());
        let mut asked: Vec<PartitionId> = ids.iter().map(|id| partition_of(MemoryId(*id), count)).collect();
        asked.sort_unstable();
        asked.dedup();
        let read = self.read_some(how, asked, move |partitions| {
            let mut batches = Batches::new(wanted, shape);
            let each = |id: MemoryId, memory: Option<engram_store::Memory<'_>>| match memory {
                Some(memory) => batches.push(&memory),
                None => batches.missing(id.0),
            };
            partitions.get_many(&columns::ids(ids), each)?;
            Ok(batches.finish())
        });
        read.await?.map_err(|error| device_problem(&error))
    }

    async fn get_elsewhere(&self, how: &How, ids: &[u64], wanted: Columns) -> Result<Vec<MemoryBatch>, Problem> {
        let ids: Vec<MemoryId> = ids.iter().copied().map(MemoryId).collect();
        let options = GetOptions { features: wanted.features, payloads: wanted.payloads };
        let found = self.peers(how).get(&ids, options).await.map_err(|error| passed_on(&error))?;
        // A row has at most 64 KiB of payload, 16 KiB of features and a key: so many are below a message.
        let mut batches: Vec<MemoryBatch> = found.memories.chunks(32).map(of_rows).collect();
        if !found.missing.is_empty() {
            let missing = found.missing.iter().map(|id| id.0).collect();
            batches.push(MemoryBatch { missing, ..Default::default() });
        }
        Ok(batches)
    }

    pub(crate) async fn quality(&self, asked: v1::QualityRequest) -> Result<v1::QualityReply, Problem> {
        if asked.histogram_bits.is_some_and(|bits| bits > MAX_HISTOGRAM_BITS) {
            let bits = asked.histogram_bits.unwrap_or_default();
            let text = format!("histogram_bits: {bits} is not allowed; allowed: 0 to {MAX_HISTOGRAM_BITS}");
            return Err(Problem::of(ProblemKind::Invalid, text));
        }
        let how = self.how(asked.read)?;
        let broadcast = self.shared.broadcast.read().unwrap_or_else(PoisonError::into_inner).clone();
        if !self.is_local(asked.local) {
            let options =
                QualityOptions { histogram_bits: asked.histogram_bits, covered_updates: asked.covered_updates };
            let quality = self.peers(&how).quality(options).await.map_err(|error| passed_on(&error))?;
            let coverage = quality.coverage.iter().map(|(group, (addressed, covered))| v1::GroupCoverage {
                group: u32::from(group.0),
                addressed: *addressed,
                covered: *covered,
            });
            return Ok(v1::QualityReply {
                groups: answers::quality_to_wire(&quality.vector),
                histogram: quality.histogram.as_ref().map(answers::histogram_to_wire).unwrap_or_default(),
                coverage: coverage.collect(),
                versions: quality.versions,
                broadcast,
            });
        }
        let read = self.read_all(how, move |partitions, versions| {
            let vector = partitions.quality()?;
            let histogram = asked.histogram_bits.map(|bits| partitions.histogram(bits)).transpose()?;
            let coverage = match asked.covered_updates {
                0 => Vec::new(),
                updates => partitions.coverage(u64::from(updates))?,
            };
            Ok((vector, histogram, coverage, versions))
        });
        let (vector, histogram, coverage, versions) = read.await?.map_err(|error| device_problem(&error))?;
        let coverage = coverage.iter().map(|group| v1::GroupCoverage {
            group: u32::from(group.group.0),
            addressed: group.addressed,
            covered: group.full,
        });
        Ok(v1::QualityReply {
            groups: answers::quality_to_wire(&vector),
            histogram: histogram.as_ref().map(answers::histogram_to_wire).unwrap_or_default(),
            coverage: coverage.collect(),
            versions,
            broadcast,
        })
    }

    pub(crate) async fn digest(&self, asked: v1::DigestRequest) -> Result<v1::DigestReply, Problem> {
        let how = self.how(asked.read)?;
        if !self.is_local(asked.local) {
            let digested = self.peers(&how).digest().await.map_err(|error| passed_on(&error))?;
            return Ok(v1::DigestReply {
                digest: answers::identity(digested.digest.0),
                memories: digested.memories,
                versions: digested.versions,
            });
        }
        let read = self.read_all(how, move |partitions, versions| {
            let digest = partitions.digest()?;
            Ok((digest, partitions.memories(), versions))
        });
        let (digest, memories, versions) = read.await?.map_err(|error| device_problem(&error))?;
        Ok(v1::DigestReply { digest: answers::identity(digest.0), memories, versions })
    }

    pub(crate) async fn ranked(&self, asked: v1::RankRequest) -> Result<Batched, Problem> {
        let group = match asked.group {
            None => None,
            Some(group) => {
                Some(answers::group(group).map_err(|error| Problem::of(ProblemKind::Invalid, error.to_string()))?)
            }
        };
        let how = self.how(asked.read.clone())?;
        if !self.is_local(asked.local) {
            let options = RankOptions { limit: asked.limit, group, keys: asked.with_keys };
            let mut ranked = self.peers(&how).rank(options).await.map_err(|error| passed_on(&error))?;
            return Ok(stream(move |sender| async move {
                loop {
                    match ranked.next().await {
                        Ok(Some(rows)) => {
                            if sender.send(Ok(of_rows(&rows))).await.is_err() {
                                return;
                            }
                        }
                        Ok(None) => return,
                        Err(error) => return fail(&sender, passed_on(&error)).await,
                    }
                }
            }));
        }
        self.ranked_here(how, asked, group).await
    }

    async fn ranked_here(&self, how: How, asked: v1::RankRequest, group: Option<Group>) -> Result<Batched, Problem> {
        let limit = usize::try_from(asked.limit).ok().filter(|limit| *limit > 0);
        let read = self.read_all(how, move |partitions, versions| {
            let ranked = partitions.rank(limit, group)?;
            // The first page takes its keys from the same state; later ones may miss those removed meanwhile.
            let first = &ranked[..ranked.len().min(PAGE as usize)];
            let mut batch = rank_batch(first);
            if asked.with_keys {
                add_keys(partitions, &mut batch)?;
            }
            batch.versions = versions;
            Ok((batch, ranked))
        });
        let (first, ranked) = read.await?.map_err(|error| device_problem(&error))?;
        if ranked.len() <= PAGE as usize {
            return Ok(futures::stream::iter([Ok(first)]).boxed());
        }
        let engine = self.shared.engine.clone();
        Ok(stream(move |sender| async move {
            if sender.send(Ok(first)).await.is_err() {
                return;
            }
            for page in ranked[PAGE as usize..].chunks(PAGE as usize) {
                let mut batch = rank_batch(page);
                if asked.with_keys {
                    let keyed = engine.read(move |partitions| add_keys(partitions, &mut batch).map(|()| batch)).await;
                    batch = match keyed {
                        Ok(Ok(batch)) => batch,
                        Ok(Err(error)) => return fail(&sender, device_problem(&error)).await,
                        Err(problem) => return fail(&sender, problem).await,
                    };
                }
                if sender.send(Ok(batch)).await.is_err() {
                    return;
                }
            }
        }))
    }

    pub(crate) async fn scan(&self, asked: v1::ScanMemoriesRequest) -> Result<Batched, Problem> {
        let how = self.how_of_primary(asked.read)?;
        let wanted = Columns { features: asked.with_features, payloads: asked.with_payloads };
        if !self.is_local(asked.local) {
            let options = GetOptions { features: wanted.features, payloads: wanted.payloads };
            let mut scan = self.peers(&how).scan(options).await.map_err(|error| passed_on(&error))?;
            return Ok(stream(move |sender| async move {
                loop {
                    match scan.next().await {
                        Ok(Some(rows)) => {
                            for rows in rows.chunks(32) {
                                if sender.send(Ok(of_rows(rows))).await.is_err() {
                                    return;
                                }
                            }
                        }
                        Ok(None) => return,
                        Err(error) => return fail(&sender, passed_on(&error)).await,
                    }
                }
            }));
        }
        let engine = self.shared.engine.clone();
        let shape = self.shared.shape.features;
        let versions = engine.versions(self.shared.partitions());
        let first = MemoryBatch { versions: versions.clone(), ..Default::default() };
        let memories = self.clone();
        Ok(stream(move |sender| async move {
            if sender.send(Ok(first)).await.is_err() {
                return;
            }
            for partition in versions.iter().map(|version| PartitionId(version.partition)) {
                let mut before = None;
                loop {
                    let page = memories.read_some(&how, vec![partition], move |partitions| {
                        let mut batches = Batches::new(wanted, shape);
                        let next = partitions.scan(partition, before, PAGE, |memory| batches.push(&memory))?;
                        Ok((batches.finish(), next))
                    });
                    let (batches, next) = match page.await {
                        Ok(Ok(page)) => page,
                        Ok(Err(error)) => return fail(&sender, device_problem(&error)).await,
                        Err(problem) => return fail(&sender, problem).await,
                    };
                    for batch in batches.into_iter().filter(|batch| !batch.ids.is_empty()) {
                        if sender.send(Ok(batch)).await.is_err() {
                            return;
                        }
                    }
                    before = next;
                    if before.is_none() {
                        break;
                    }
                }
            }
        }))
    }

    pub(crate) fn is_local(&self, local: bool) -> bool {
        local || self.plane == Plane::Peer
    }
}

fn rank_batch(page: &[Ranked]) -> MemoryBatch {
    MemoryBatch {
        ids: page.iter().map(|ranked| ranked.id.0).collect(),
        weight_units: page.iter().map(|ranked| ranked.weight.units()).collect(),
        ..Default::default()
    }
}

/// Adds keys and groups to a ranked page.
pub(crate) fn add_keys(
    partitions: &mut engram_store::Partitions,
    batch: &mut MemoryBatch,
) -> Result<(), engram_kernels::Error> {
    let ids: Vec<MemoryId> = batch.ids.iter().copied().map(MemoryId).collect();
    let (mut groups, mut keys) = (Vec::with_capacity(ids.len()), engram_memory::Blobs::default());
    partitions.get_many(&ids, |_, memory| {
        groups.push(memory.map_or(0, |memory| memory.group.0));
        keys.push(memory.map_or(&[], |memory| memory.key));
    })?;
    batch.groups = groups.into();
    batch.keys = (!keys.bytes().is_empty()).then(|| v1::Blobs::from(&keys));
    Ok(())
}

/// Runs `fill` in a task of its own. A panic in it is told to the reader: a stream that just ended would pass for complete.
fn stream<F, Fut>(fill: F) -> Batched
where
    F: FnOnce(Sender) -> Fut,
    Fut: Future<Output = ()> + Send + 'static,
{
    let (sender, receiver) = mpsc::channel(AHEAD);
    let guard = sender.clone();
    let filling = AssertUnwindSafe(fill(sender)).catch_unwind();
    tokio::spawn(async move {
        if filling.await.is_err() {
            tracing::error!("a task that streamed memories panicked");
            let _ = guard.send(Err(Status::internal("the worker failed while it read"))).await;
        }
    });
    ReceiverStream::new(receiver).boxed()
}

async fn fail(sender: &Sender, problem: Problem) {
    // A reader that is gone needs no reason.
    let _ = sender.send(Err(problem.into_status())).await;
}

/// Why a read over all workers failed.
pub(crate) fn passed_on(error: &Error) -> Problem {
    error.problem().cloned().unwrap_or_else(|| Problem::of(ProblemKind::Unavailable, error.to_string()))
}
