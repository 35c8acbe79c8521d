//! Reads: of local partitions on the engine's thread, of all partitions through the client library. Reads are linearizable by
//! leases of all in-sync replicas, or as the client requested ([`consistency`]), except the keys of later pages of a
//! ranking.

pub(crate) mod consistency;
pub(crate) mod recall;

use crate::engine::device_problem;
use crate::service::edge::call_body::too_many;
use crate::service::{Memories, Plane};
use crate::write::batch::{Batches, Columns, of_rows};
use consistency::ReadConsistency;
use engram_client::{Error, GetOptions, GetStream, QualityOptions, RankOptions};
use engram_memory::quality::MAX_HISTOGRAM_BITS;
use engram_memory::{Group, MemoryId, PartitionId, partition_of};
use engram_proto::v1::{self, MemoryBatch, Problem, ProblemKind};
use engram_proto::{answers, columns};
use engram_store::RankedMemory;
use futures::FutureExt as _;
use futures::stream::{BoxStream, StreamExt as _};
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio_stream::wrappers::ReceiverStream;
use tonic::Status;

type BatchStream = BoxStream<'static, Result<MemoryBatch, Status>>;
type Sender = mpsc::Sender<Result<MemoryBatch, Status>>;

/// Batches produced ahead of the client: one is sent while the next is read.
const BATCHES_AHEAD: usize = 1;
/// Rows per page of a ranking: keys of the maximum size still fit into a message.
const RANK_PAGE_ROWS: usize = 3_072;
/// Bytes that an answer of several pages holds while its client does not read: the batches of a page, the queue and the transport.
const ANSWER_BYTES: usize = 2 << 20;
/// Maximum bytes of answers of several pages, per plane: 128 of them, or the ranking of 30 million memories.
const MAX_ANSWER_BYTES: usize = 256 << 20;
/// Unit of the budget, since a semaphore has fewer permits than there are bytes.
const ANSWER_UNIT_BYTES: usize = 1 << 10;

/// Budget of answers of several pages: those for clients and those for other workers, which pass them on.
pub(crate) struct AnswerBytes([Arc<Semaphore>; 2]);

impl Default for AnswerBytes {
    fn default() -> Self {
        Self([(); 2].map(|()| Arc::new(Semaphore::new(MAX_ANSWER_BYTES / ANSWER_UNIT_BYTES))))
    }
}

impl AnswerBytes {
    /// Takes the bytes of an answer, at most all.
    fn take(&self, plane: Plane, bytes: usize) -> Result<OwnedSemaphorePermit, Problem> {
        let units = bytes.min(MAX_ANSWER_BYTES) / ANSWER_UNIT_BYTES;
        let units = u32::try_from(units).expect("at most the maximum");
        Arc::clone(&self.0[plane as usize])
            .try_acquire_many_owned(units)
            .map_err(|_| too_many("long answers are being read"))
    }
}

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
        let mut requested: Vec<PartitionId> = local.iter().map(|id| partition_of(MemoryId(*id), partitions)).collect();
        requested.sort_unstable();
        requested.dedup();
        let remote: Vec<MemoryId> = remote.into_iter().map(MemoryId).collect();
        let options = GetOptions { features: columns.features, payloads: columns.payloads };
        let remote = match remote.is_empty() {
            true => None,
            false => {
                Some(self.peers(&consistency).get_pages(&remote, options).map_err(|error| client_problem(&error))?)
            }
        };
        let local = columns::ids(local).into();
        let mut pages =
            GetPages { memories: self.clone(), consistency, columns, requested, local, position: 0, remote };
        let first = pages.next().await?.unwrap_or_else(|| vec![MemoryBatch::default()]);
        if pages.is_done() {
            return Ok(futures::stream::iter(first.into_iter().map(Ok)).boxed());
        }
        self.stream(ANSWER_BYTES, move |sender| async move {
            let mut page = first;
            loop {
                for batch in page {
                    if sender.send(Ok(batch)).await.is_err() {
                        return;
                    }
                }
                page = match pages.next().await {
                    Ok(Some(page)) => page,
                    Ok(None) => return,
                    Err(problem) => return fail(&sender, problem).await,
                };
            }
        })
    }

    pub(crate) async fn quality(&self, request: v1::GetQualityRequest) -> Result<v1::GetQualityResponse, Problem> {
        if request.histogram_bits.is_some_and(|bits| bits > MAX_HISTOGRAM_BITS) {
            let bits = request.histogram_bits.unwrap_or_default();
            let text = format!("histogram_bits: {bits} is not allowed; allowed: 0 to {MAX_HISTOGRAM_BITS}");
            return Err(Problem::of(ProblemKind::Invalid, text));
        }
        let consistency = self.consistency(request.read)?;
        let broadcast = self.shared.runs.broadcast.read().clone();
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
            return self.stream(ANSWER_BYTES, move |sender| async move {
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
            });
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
            let first = &ranked[..ranked.len().min(RANK_PAGE_ROWS)];
            let mut batch = rank_batch(first);
            if request.with_keys {
                add_keys(partitions, &mut batch)?;
            }
            batch.versions = versions;
            Ok((batch, ranked))
        });
        let (first, ranked) = read.await?.map_err(|error| device_problem(&error))?;
        if ranked.len() <= RANK_PAGE_ROWS {
            return Ok(futures::stream::iter([Ok(first)]).boxed());
        }
        let engine = self.shared.engine.clone();
        let bytes = ANSWER_BYTES + size_of_val(ranked.as_slice());
        self.stream(bytes, move |sender| async move {
            if sender.send(Ok(first)).await.is_err() {
                return;
            }
            for page in ranked[RANK_PAGE_ROWS..].chunks(RANK_PAGE_ROWS) {
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
        })
    }

    pub(crate) async fn scan(&self, request: v1::ScanMemoriesRequest) -> Result<BatchStream, Problem> {
        let consistency = self.primary_consistency(request.read)?;
        let columns = Columns { features: request.with_features, payloads: request.with_payloads };
        if !self.is_local(request.local) {
            let options = GetOptions { features: columns.features, payloads: columns.payloads };
            let mut scan = self.peers(&consistency).scan(options).await.map_err(|error| client_problem(&error))?;
            return self.stream(ANSWER_BYTES, move |sender| async move {
                loop {
                    match scan.next().await {
                        Ok(Some(rows)) => {
                            for rows in forwarded(&rows) {
                                if sender.send(Ok(of_rows(rows))).await.is_err() {
                                    return;
                                }
                            }
                        }
                        Ok(None) => return,
                        Err(error) => return fail(&sender, client_problem(&error)).await,
                    }
                }
            });
        }
        let engine = self.shared.engine.clone();
        let shape = self.shared.setup.shape.features;
        let versions = engine.versions(self.shared.partitions());
        let first = MemoryBatch { versions: versions.clone(), ..Default::default() };
        let memories = self.clone();
        self.stream(ANSWER_BYTES, move |sender| async move {
            if sender.send(Ok(first)).await.is_err() {
                return;
            }
            for partition in versions.iter().map(|version| PartitionId(version.partition)) {
                let mut before = None;
                loop {
                    let page = memories.read_some(&consistency, vec![partition], move |partitions| {
                        let mut batches = Batches::new(columns, shape);
                        let rows = columns.chunk_rows(shape) as u32;
                        let mut next = before;
                        loop {
                            let part = columns.payload_part();
                            next =
                                partitions.scan_parts(partition, next, rows, part, |memory| batches.push(&memory))?;
                            if next.is_none() || batches.is_page() {
                                return Ok((batches.finish(), next));
                            }
                        }
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
        })
    }

    /// Runs `fill` in its own task, within the budget of answers of several pages. A panic is sent as an error: a stream that just
    /// ended would look complete.
    fn stream<F, Fut>(&self, bytes: usize, fill: F) -> Result<BatchStream, Problem>
    where
        F: FnOnce(Sender) -> Fut,
        Fut: Future<Output = ()> + Send + 'static,
    {
        let permit = self.shared.limits.answer_bytes().take(self.plane, bytes)?;
        let (sender, receiver) = mpsc::channel(BATCHES_AHEAD);
        let guard = sender.clone();
        let task = AssertUnwindSafe(fill(sender)).catch_unwind();
        tokio::spawn(async move {
            if task.await.is_err() {
                tracing::error!("streaming memories panicked");
                let _ = guard.send(Err(Status::internal("the read panicked"))).await;
            }
        });
        // Held until the client has read the answer or has gone.
        Ok(ReceiverStream::new(receiver).map(move |batch| (&permit, batch).1).boxed())
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
    partitions.get_parts(&ids, engram_store::PayloadPart::None, |_, memory| {
        groups.push(memory.map_or(0, |memory| memory.group.0));
        keys.push(memory.map_or(&[], |memory| memory.key));
    })?;
    batch.groups = groups.into();
    batch.keys = (!keys.bytes().is_empty()).then(|| v1::Blobs::from(&keys));
    Ok(())
}

/// Rows of another worker per message: a row has at most 64 KiB of payload, 16 KiB of features and a key.
const FORWARDED_ROWS: usize = 32;
/// Payload bytes of these rows: an item of a buffer has up to 4 MiB, and fills a message alone.
const FORWARDED_BYTES: usize = 2 << 20;

/// Cuts rows of another worker into messages.
fn forwarded(rows: &[engram_client::Memory]) -> impl Iterator<Item = &[engram_client::Memory]> {
    let mut rest = rows;
    std::iter::from_fn(move || {
        let mut bytes = 0;
        let mut fits = |row: &engram_client::Memory| {
            bytes += row.payload.len();
            bytes <= FORWARDED_BYTES
        };
        let count = rest.iter().take(FORWARDED_ROWS).take_while(|row| fits(row)).count();
        let (page, after) = rest.split_at(count.max(1).min(rest.len()));
        rest = after;
        (!page.is_empty()).then_some(page)
    })
}

/// Pages of a read by id: of the memories here, then those of other workers.
struct GetPages {
    memories: Memories,
    consistency: ReadConsistency,
    columns: Columns,
    /// Partitions of the memories here.
    requested: Vec<PartitionId>,
    local: Arc<[MemoryId]>,
    /// Number of memories here that were read.
    position: usize,
    remote: Option<GetStream>,
}

impl GetPages {
    fn is_done(&self) -> bool {
        self.position == self.local.len() && self.remote.is_none()
    }

    /// Returns the next page; `None` after the last.
    async fn next(&mut self) -> Result<Option<Vec<MemoryBatch>>, Problem> {
        if self.position < self.local.len() {
            return self.next_local().await.map(Some);
        }
        let Some(remote) = &mut self.remote else { return Ok(None) };
        let Some(page) = remote.next().await.map_err(|error| client_problem(&error))? else {
            self.remote = None;
            return Ok(None);
        };
        let mut batches: Vec<MemoryBatch> = forwarded(&page.memories).map(of_rows).collect();
        if !page.missing.is_empty() {
            let missing = page.missing.iter().map(|id| id.0).collect();
            batches.push(MemoryBatch { missing, ..Default::default() });
        }
        Ok(Some(batches))
    }

    async fn next_local(&mut self) -> Result<Vec<MemoryBatch>, Problem> {
        let (columns, shape) = (self.columns, self.memories.shared.setup.shape.features);
        let (ids, start) = (Arc::clone(&self.local), self.position);
        let read = self.memories.read_some(&self.consistency, self.requested.clone(), move |partitions| {
            let (mut batches, mut end) = (Batches::new(columns, shape), start);
            for ids in ids[start..].chunks(columns.chunk_rows(shape)) {
                let each = |id: MemoryId, memory: Option<engram_store::Memory<'_>>| match memory {
                    Some(memory) => batches.push(&memory),
                    None => batches.missing(id.0),
                };
                partitions.get_parts(ids, columns.payload_part(), each)?;
                end += ids.len();
                if batches.is_page() {
                    break;
                }
            }
            Ok((batches.finish(), end))
        });
        let (batches, end) = read.await?.map_err(|error| device_problem(&error))?;
        self.position = end;
        Ok(batches)
    }
}

async fn fail(sender: &Sender, problem: Problem) {
    // The client may have gone.
    let _ = sender.send(Err(problem.into_status())).await;
}

/// Converts the failure of a read over all workers.
pub(crate) fn client_problem(error: &Error) -> Problem {
    error.problem().cloned().unwrap_or_else(|| Problem::of(ProblemKind::Unavailable, error.to_string()))
}
