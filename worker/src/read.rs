//! Reads: of local partitions on the engine's thread, of all partitions through the client library. Reads are linearizable by
//! leases of all in-sync replicas, or as the client requested ([`crate::read_consistency`]), except the keys of later pages of a
//! ranking.

use crate::batch::{Batches, Columns, of_rows};
use crate::engine::device_problem;
use crate::read_consistency::ReadConsistency;
use crate::service::{Memories, Plane};
use engram_client::{Error, GetOptions, QualityOptions, RankOptions};
use engram_memory::quality::MAX_HISTOGRAM_BITS;
use engram_memory::{Group, MemoryId, PartitionId, partition_of};
use engram_proto::v1::{self, MemoryBatch, Problem, ProblemKind};
use engram_proto::{answers, columns};
use engram_store::RankedMemory;
use futures::FutureExt as _;
use futures::stream::{BoxStream, StreamExt as _};
use std::panic::AssertUnwindSafe;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Status;

type BatchStream = BoxStream<'static, Result<MemoryBatch, Status>>;
type Sender = mpsc::Sender<Result<MemoryBatch, Status>>;

/// Batches produced ahead of the client.
const BATCHES_AHEAD: usize = 4;
/// Rows per page: the engine processes writes between two pages.
const PAGE_ROWS: u32 = 4_096;

impl Memories {
    pub(crate) async fn get(&self, request: v1::GetMemoriesRequest) -> Result<BatchStream, Problem> {
        columns::check_rows(request.ids.len())?;
        let partitions = self.shared.partitions();
        self.shared.wait_until_served(request.ids.iter().map(|id| partition_of(MemoryId(*id), partitions))).await;
        let is_here = |id: &u64| self.shared.engine.position(partition_of(MemoryId(*id), partitions)).is_some();
        let consistency = self.primary_consistency(request.read)?;
        let columns = Columns { features: request.with_features, payloads: request.with_payloads };
        let (local, remote): (Vec<u64>, Vec<u64>) = request.ids.iter().partition(|id| is_here(id));
        if let (Plane::Peer, Some(id)) = (self.plane, remote.first()) {
            return Err(self.shared.not_primary(partition_of(MemoryId(*id), partitions)));
        }
        let mut batches = Vec::new();
        if !local.is_empty() || remote.is_empty() {
            batches = self.get_local(&consistency, local, columns).await?;
        }
        if !remote.is_empty() {
            batches.extend(self.get_remote(&consistency, &remote, columns).await?);
        }
        Ok(futures::stream::iter(batches.into_iter().map(Ok)).boxed())
    }

    async fn get_local(
        &self,
        consistency: &ReadConsistency,
        ids: Vec<u64>,
        columns: Columns,
    ) -> Result<Vec<MemoryBatch>, Problem> {
        let (shape, count) = (self.shared.shape.features, self.shared.partitions());
        let mut request: Vec<PartitionId> = ids.iter().map(|id| partition_of(MemoryId(*id), count)).collect();
        request.sort_unstable();
        request.dedup();
        let read = self.read_some(consistency, request, move |partitions| {
            let mut batches = Batches::new(columns, shape);
            let each = |id: MemoryId, memory: Option<engram_store::Memory<'_>>| match memory {
                Some(memory) => batches.push(&memory),
                None => batches.missing(id.0),
            };
            partitions.get_many(&columns::ids(ids), each)?;
            Ok(batches.finish())
        });
        read.await?.map_err(|error| device_problem(&error))
    }

    async fn get_remote(
        &self,
        consistency: &ReadConsistency,
        ids: &[u64],
        columns: Columns,
    ) -> Result<Vec<MemoryBatch>, Problem> {
        let ids: Vec<MemoryId> = ids.iter().copied().map(MemoryId).collect();
        let options = GetOptions { features: columns.features, payloads: columns.payloads };
        let result = self.peers(consistency).get(&ids, options).await.map_err(|error| client_problem(&error))?;
        // A row has at most 64 KiB of payload, 16 KiB of features and a key, so 32 rows fit into a message.
        let mut batches: Vec<MemoryBatch> = result.memories.chunks(32).map(of_rows).collect();
        if !result.missing.is_empty() {
            let missing = result.missing.iter().map(|id| id.0).collect();
            batches.push(MemoryBatch { missing, ..Default::default() });
        }
        Ok(batches)
    }

    pub(crate) async fn quality(&self, request: v1::GetQualityRequest) -> Result<v1::GetQualityResponse, Problem> {
        if request.histogram_bits.is_some_and(|bits| bits > MAX_HISTOGRAM_BITS) {
            let bits = request.histogram_bits.unwrap_or_default();
            let text = format!("histogram_bits: {bits} is not allowed; allowed: 0 to {MAX_HISTOGRAM_BITS}");
            return Err(Problem::of(ProblemKind::Invalid, text));
        }
        let consistency = self.consistency(request.read)?;
        let broadcast = self.shared.broadcast.read().clone();
        if !self.is_local(request.local) {
            let options =
                QualityOptions { histogram_bits: request.histogram_bits, covered_updates: request.covered_updates };
            let quality = self.peers(&consistency).quality(options).await.map_err(|error| client_problem(&error))?;
            let coverage = quality.coverage.iter().map(|(group, (addressed, covered))| v1::GroupCoverage {
                group: u32::from(group.0),
                addressed: *addressed,
                covered: *covered,
            });
            return Ok(v1::GetQualityResponse {
                groups: answers::quality_to_wire(&quality.vector),
                histogram: quality.histogram.as_ref().map(answers::histogram_to_wire).unwrap_or_default(),
                coverage: coverage.collect(),
                versions: quality.versions,
                broadcast,
            });
        }
        let read = self.read_all(consistency, move |partitions, versions| {
            let vector = partitions.quality()?;
            let histogram = request.histogram_bits.map(|bits| partitions.histogram(bits)).transpose()?;
            let coverage = match request.covered_updates {
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
        Ok(v1::GetQualityResponse {
            groups: answers::quality_to_wire(&vector),
            histogram: histogram.as_ref().map(answers::histogram_to_wire).unwrap_or_default(),
            coverage: coverage.collect(),
            versions,
            broadcast,
        })
    }

    pub(crate) async fn digest(&self, request: v1::GetDigestRequest) -> Result<v1::GetDigestResponse, Problem> {
        let consistency = self.consistency(request.read)?;
        if !self.is_local(request.local) {
            let remote_digest = self.peers(&consistency).digest().await.map_err(|error| client_problem(&error))?;
            return Ok(v1::GetDigestResponse {
                digest: answers::identity(remote_digest.digest.0),
                memories: remote_digest.memories,
                versions: remote_digest.versions,
            });
        }
        let read = self.read_all(consistency, move |partitions, versions| {
            let digest = partitions.digest()?;
            Ok((digest, partitions.memories(), versions))
        });
        let (digest, memories, versions) = read.await?.map_err(|error| device_problem(&error))?;
        Ok(v1::GetDigestResponse { digest: answers::identity(digest.0), memories, versions })
    }

    pub(crate) async fn ranked(&self, request: v1::RankRequest) -> Result<BatchStream, Problem> {
        let group = match request.group {
            None => None,
            Some(group) => {
                Some(answers::group(group).map_err(|error| Problem::of(ProblemKind::Invalid, error.to_string()))?)
            }
        };
        let consistency = self.consistency(request.read.clone())?;
        if !self.is_local(request.local) {
            let options = RankOptions { limit: request.limit, group, keys: request.with_keys };
            let mut ranked = self.peers(&consistency).rank(options).await.map_err(|error| client_problem(&error))?;
            return Ok(stream(move |sender| async move {
                loop {
                    match ranked.next().await {
                        Ok(Some(rows)) => {
                            if sender.send(Ok(of_rows(&rows))).await.is_err() {
                                return;
                            }
                        }
                        Ok(None) => return,
                        Err(error) => return fail(&sender, client_problem(&error)).await,
                    }
                }
            }));
        }
        self.rank_local(consistency, request, group).await
    }

    async fn rank_local(
        &self,
        consistency: ReadConsistency,
        request: v1::RankRequest,
        group: Option<Group>,
    ) -> Result<BatchStream, Problem> {
        let limit = usize::try_from(request.limit).ok().filter(|limit| *limit > 0);
        let read = self.read_all(consistency, move |partitions, versions| {
            let ranked = partitions.rank(limit, group)?;
            // The first page has keys of the same state; later pages may miss memories removed meanwhile.
            let first = &ranked[..ranked.len().min(PAGE_ROWS as usize)];
            let mut batch = rank_batch(first);
            if request.with_keys {
                add_keys(partitions, &mut batch)?;
            }
            batch.versions = versions;
            Ok((batch, ranked))
        });
        let (first, ranked) = read.await?.map_err(|error| device_problem(&error))?;
        if ranked.len() <= PAGE_ROWS as usize {
            return Ok(futures::stream::iter([Ok(first)]).boxed());
        }
        let engine = self.shared.engine.clone();
        Ok(stream(move |sender| async move {
            if sender.send(Ok(first)).await.is_err() {
                return;
            }
            for page in ranked[PAGE_ROWS as usize..].chunks(PAGE_ROWS as usize) {
                let mut batch = rank_batch(page);
                if request.with_keys {
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

    pub(crate) async fn scan(&self, request: v1::ScanMemoriesRequest) -> Result<BatchStream, Problem> {
        let consistency = self.primary_consistency(request.read)?;
        let columns = Columns { features: request.with_features, payloads: request.with_payloads };
        if !self.is_local(request.local) {
            let options = GetOptions { features: columns.features, payloads: columns.payloads };
            let mut scan = self.peers(&consistency).scan(options).await.map_err(|error| client_problem(&error))?;
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
                        Err(error) => return fail(&sender, client_problem(&error)).await,
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
                    let page = memories.read_some(&consistency, vec![partition], move |partitions| {
                        let mut batches = Batches::new(columns, shape);
                        let next = partitions.scan(partition, before, PAGE_ROWS, |memory| batches.push(&memory))?;
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

fn rank_batch(page: &[RankedMemory]) -> MemoryBatch {
    MemoryBatch {
        ids: page.iter().map(|ranked| ranked.id.0).collect(),
        weight_units: page.iter().map(|ranked| ranked.weight.units()).collect(),
        ..Default::default()
    }
}

/// Adds keys and groups to a page of a ranking.
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

/// Runs `fill` in its own task. A panic is sent as an error: a stream that just ended would look complete.
fn stream<F, Fut>(fill: F) -> BatchStream
where
    F: FnOnce(Sender) -> Fut,
    Fut: Future<Output = ()> + Send + 'static,
{
    let (sender, receiver) = mpsc::channel(BATCHES_AHEAD);
    let guard = sender.clone();
    let task = AssertUnwindSafe(fill(sender)).catch_unwind();
    tokio::spawn(async move {
        if task.await.is_err() {
            tracing::error!("streaming memories panicked");
            let _ = guard.send(Err(Status::internal("the read panicked"))).await;
        }
    });
    ReceiverStream::new(receiver).boxed()
}

async fn fail(sender: &Sender, problem: Problem) {
    // The client may have gone.
    let _ = sender.send(Err(problem.into_status())).await;
}

/// Converts the failure of a read over all workers.
pub(crate) fn client_problem(error: &Error) -> Problem {
    error.problem().cloned().unwrap_or_else(|| Problem::of(ProblemKind::Unavailable, error.to_string()))
}
