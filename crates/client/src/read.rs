//! Reads: one call per worker, every partition exactly once.

use crate::call::{Failure, Service};
use crate::client::Client;
use crate::error::Error;
use crate::map::Map;
use crate::options::ReadMode;
use crate::retry::Retry;
use crate::rows::{Memory, memories, raw};
use engram_memory::quality::MAX_HISTOGRAM_BITS;
use engram_memory::{
    Digest, Group, Histogram, LearningEpoch, MAX_IDS, MemoryId, Ordinal, PartitionId, QualityVector, RunId,
};
use engram_proto::v1::{self, Problem, ProblemKind};
use engram_proto::{answers, split};
use futures::future::join_all;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::timeout;
use tonic::{Response, Status, Streaming};

/// Optional columns of a read.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct GetOptions {
    /// Feature vectors.
    pub features: bool,
    /// Payloads.
    pub payloads: bool,
}

/// Result of a read by id.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct GetResult {
    /// Memories in the requested order.
    pub memories: Vec<Memory>,
    /// Ids that do not exist, in the requested order.
    pub missing: Vec<MemoryId>,
}

/// Options of a quality query.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct QualityOptions {
    /// Bins of a histogram as a power of two, at most 12.
    pub histogram_bits: Option<u32>,
    /// Coverage: memories with at least this many updates; 0 = disabled.
    pub covered_updates: u32,
}

/// Quality of a whole cluster.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Quality {
    /// Per group.
    pub vector: QualityVector,
    /// Per group, if requested.
    pub histogram: Option<Histogram>,
    /// Per group, memories addressed at least once and those with at least `covered_updates`, if requested.
    pub coverage: BTreeMap<Group, (u64, u64)>,
    /// The latest broadcast global quality that any worker received, with its run and epoch.
    pub broadcast: Option<(RunId, LearningEpoch, QualityVector)>,
    /// Version of each partition.
    pub versions: Vec<v1::PartitionVersion>,
}

/// Digest of a whole cluster.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DigestResult {
    /// Order-free digest of all memories.
    pub digest: Digest,
    /// Number of memories.
    pub memories: u64,
    /// Version of each partition.
    pub versions: Vec<v1::PartitionVersion>,
}

impl Client {
    /// Reads memories by id; the ids are split by worker and message.
    ///
    /// # Errors
    /// As [`Error`] says.
    pub async fn get(&self, ids: &[MemoryId], options: GetOptions) -> Result<GetResult, Error> {
        let mut retry = self.read();
        self.check_primary()?;
        let mut read: HashMap<u64, Memory> = HashMap::with_capacity(ids.len());
        // Grouped by partition: primaries may change between attempts.
        let mut open: BTreeMap<PartitionId, Vec<u64>> = BTreeMap::new();
        for (partition, ids) in split::ids(&raw(ids.to_vec()), self.map()?.partition_count()) {
            open.entry(partition).or_default().extend(ids);
        }
        while !open.is_empty() {
            let map = self.map()?;
            let mut by_owner: BTreeMap<Ordinal, Vec<(PartitionId, Vec<u64>)>> = BTreeMap::new();
            for (partition, ids) in std::mem::take(&mut open) {
                let owner = map.owner(partition).expect("ids were split by a map of as many partitions");
                by_owner.entry(owner).or_default().push((partition, ids));
            }
            let retry_now = &retry;
            let map_now = &map;
            let calls = by_owner.into_iter().map(|(owner, wanted)| async move {
                let ids: Vec<u64> = wanted.iter().flat_map(|(_, ids)| ids.iter().copied()).collect();
                let read = self.get_from(map_now, owner, &ids, options, retry_now);
                (self.while_owner(map_now, owner, read).await, wanted)
            });
            let mut failure_seen = None;
            for (response, wanted) in join_all(calls).await {
                match response {
                    Ok(memories) => read.extend(memories.into_iter().map(|memory| (memory.id.0, memory))),
                    Err(failure) => {
                        failure_seen = Some(failure);
                        open.extend(wanted);
                    }
                }
            }
            if let Some(failure) = failure_seen {
                retry.after(self, failure).await?;
            }
        }
        let mut result = GetResult::default();
        for id in ids {
            match read.get(&id.0) {
                Some(memory) => result.memories.push(memory.clone()),
                None => result.missing.push(*id),
            }
        }
        Ok(result)
    }

    async fn get_from(
        &self,
        map: &Map,
        owner: Ordinal,
        ids: &[u64],
        options: GetOptions,
        retry: &Retry,
    ) -> Result<Vec<Memory>, Failure> {
        let mut service = self.service_of(map, owner)?;
        let mut rows = Vec::with_capacity(ids.len());
        for ids in ids.chunks(MAX_IDS) {
            let message = v1::GetMemoriesRequest {
                ids: ids.to_vec(),
                with_features: options.features,
                with_payloads: options.payloads,
                read: self.read_options(&[]),
            };
            let deadline = self.attempt(retry);
            let mut batches = opened(deadline, service.get_memories(self.request(message, deadline))).await?;
            while let Some(batch) = next(&mut batches, deadline).await? {
                rows.extend(memories(&batch).map_err(|error| protocol_violation(&error))?);
            }
        }
        Ok(rows)
    }

    /// Reads memories by id in pages, as they arrive, worker by worker. A repeated id is returned as often.
    ///
    /// # Errors
    /// There is no map, or the read mode requires replicas.
    pub fn get_pages(&self, ids: &[MemoryId], options: GetOptions) -> Result<GetStream, Error> {
        self.check_primary()?;
        let mut open: BTreeMap<PartitionId, Vec<u64>> = BTreeMap::new();
        for (partition, ids) in split::ids(&raw(ids.to_vec()), self.map()?.partition_count()) {
            open.entry(partition).or_default().extend(ids);
        }
        Ok(GetStream { client: self.clone(), options, open, current: None })
    }

    /// Returns the quality of all memories.
    ///
    /// # Errors
    /// As [`Error`] says.
    pub async fn quality(&self, options: QualityOptions) -> Result<Quality, Error> {
        if options.histogram_bits.is_some_and(|bits| bits > MAX_HISTOGRAM_BITS) {
            return Err(Error::rejected(Problem::of(ProblemKind::Invalid, "histogram_bits: allowed: 0 to 12")));
        }
        let replies = self
            .fan_out(|mut service, read, deadline| async move {
                let message = v1::GetQualityRequest {
                    local: true,
                    histogram_bits: options.histogram_bits,
                    covered_updates: options.covered_updates,
                    read,
                };
                let reply = service.get_quality(self.request(message, deadline)).await?.into_inner();
                Ok((reply.versions.clone(), reply))
            })
            .await?;
        let mut quality = Quality::default();
        for reply in replies {
            quality.vector.merge(&answers::quality_from_wire(&reply.groups)?);
            if let Some(bits) = options.histogram_bits {
                let histogram = answers::histogram_from_wire(bits, reply.histogram)?;
                match &mut quality.histogram {
                    Some(sum) => sum.merge(&histogram),
                    None => quality.histogram = Some(histogram),
                }
            }
            for entry in reply.coverage {
                let sum = quality.coverage.entry(answers::group(entry.group)?).or_default();
                *sum = (sum.0 + entry.addressed, sum.1 + entry.covered);
            }
            if let Some(broadcast) = reply.broadcast {
                let epoch = LearningEpoch(broadcast.epoch);
                if quality.broadcast.as_ref().is_none_or(|(_, latest, _)| *latest < epoch) {
                    let vector = answers::quality_from_wire(&broadcast.quality)?;
                    quality.broadcast = Some((answers::run_id(&broadcast.run)?, epoch, vector));
                }
            }
            quality.versions.extend(reply.versions);
        }
        Ok(quality)
    }

    /// Returns the digest of all memories.
    ///
    /// # Errors
    /// As [`Error`] says.
    pub async fn digest(&self) -> Result<DigestResult, Error> {
        let replies = self
            .fan_out(|mut service, read, deadline| async move {
                let request = self.request(v1::GetDigestRequest { local: true, read }, deadline);
                let reply = service.get_digest(request).await?.into_inner();
                Ok((reply.versions.clone(), reply))
            })
            .await?;
        let mut result = DigestResult::default();
        for reply in replies {
            result.digest.merge(answers::digest(&reply.digest)?);
            result.memories += reply.memories;
            result.versions.extend(reply.versions);
        }
        Ok(result)
    }

    /// Scans all memories, unordered, worker by worker.
    ///
    /// # Errors
    /// As [`Error`] says.
    pub async fn scan(&self, options: GetOptions) -> Result<Scan, Error> {
        self.check_primary()?;
        let map = self.map()?;
        let owners = map.owners().into_iter().collect();
        Ok(Scan { client: self.clone(), options, map, owners, open: None, has_returned_rows: false })
    }

    /// Calls every primary; each must respond for exactly the partitions that the map assigns to it. Calls replicas
    /// instead if the read mode allows it.
    pub(crate) async fn fan_out<T, F, A>(&self, call_worker: F) -> Result<Vec<T>, Error>
    where
        F: Fn(Service, Option<v1::Read>, Duration) -> A,
        A: Future<Output = Result<(Vec<v1::PartitionVersion>, T), Failure>>,
    {
        if let ReadMode::Replica { .. } = self.read_mode() {
            return self.read_replicas(&call_worker).await;
        }
        let mut retry = self.read();
        loop {
            match self.fan_out_once(&call_worker, &retry).await {
                Ok(answers) => return Ok(answers),
                Err(failure) => retry.after(self, failure).await?,
            }
        }
    }

    async fn fan_out_once<T, F, A>(&self, call_worker: &F, retry: &Retry) -> Result<Vec<T>, Failure>
    where
        F: Fn(Service, Option<v1::Read>, Duration) -> A,
        A: Future<Output = Result<(Vec<v1::PartitionVersion>, T), Failure>>,
    {
        let map = self.map().map_err(|error| Failure::unavailable(error.to_string()))?;
        let deadline = self.attempt(retry);
        let calls = map.owners().into_iter().map(|owner| {
            let map = &map;
            async move {
                let service = self.service_of(map, owner)?;
                let response = async {
                    timeout(deadline, call_worker(service, self.read_options(&[]), deadline))
                        .await
                        .map_err(|_| Failure::timed_out())?
                };
                let (versions, response) = self.while_owner(map, owner, response).await?;
                check_coverage(map, owner, &versions)?;
                Ok(response)
            }
        });
        join_all(calls).await.into_iter().collect()
    }
}

/// A read by id in pages, worker by worker.
#[derive(Debug)]
pub struct GetStream {
    client: Client,
    options: GetOptions,
    /// Ids that were not requested yet, by partition.
    open: BTreeMap<PartitionId, Vec<u64>>,
    current: Option<OpenGet>,
}

/// The stream of one worker.
#[derive(Debug)]
struct OpenGet {
    stream: Streaming<v1::MemoryBatch>,
    /// How often each requested id is still missing in the answer.
    remaining: HashMap<u64, usize>,
}

impl GetStream {
    /// Returns the next page; `None` after the last.
    ///
    /// # Errors
    /// As for [`Error`].
    pub async fn next(&mut self) -> Result<Option<GetResult>, Error> {
        let mut retry = self.client.read();
        loop {
            match self.pull(&retry).await {
                Ok(page) => return Ok(page),
                Err(failure) => {
                    self.reopen();
                    retry.after(&self.client, failure).await?;
                }
            }
        }
    }

    async fn pull(&mut self, retry: &Retry) -> Result<Option<GetResult>, Failure> {
        loop {
            let deadline = self.client.attempt(retry);
            if let Some(current) = &mut self.current {
                let Some(batch) = next(&mut current.stream, deadline).await? else {
                    if !current.remaining.is_empty() {
                        return Err(Failure::unavailable("a worker omitted memories of a read"));
                    }
                    self.current = None;
                    continue;
                };
                let page = GetResult {
                    memories: memories(&batch).map_err(|error| protocol_violation(&error))?,
                    missing: batch.missing.iter().copied().map(MemoryId).collect(),
                };
                page.memories.iter().map(|memory| memory.id).chain(page.missing.iter().copied()).for_each(|id| {
                    if let Some(count) = current.remaining.get_mut(&id.0) {
                        *count -= 1;
                        if *count == 0 {
                            current.remaining.remove(&id.0);
                        }
                    }
                });
                return Ok(Some(page));
            }
            if self.open.is_empty() {
                return Ok(None);
            }
            self.start(deadline).await?;
        }
    }

    /// Requests the ids of one worker.
    async fn start(&mut self, deadline: Duration) -> Result<(), Failure> {
        let map = self.client.map().map_err(|error| Failure::unavailable(error.to_string()))?;
        let first = self.open.keys().next().and_then(|partition| map.owner(*partition));
        let owner = first.ok_or_else(|| Failure::unavailable("the partition has no primary yet"))?;
        let is_of_owner = |partition: &PartitionId| map.owner(*partition) == Some(owner);
        let ids: Vec<u64> =
            self.open.iter().filter(|(it, _)| is_of_owner(it)).flat_map(|(_, ids)| ids.clone()).collect();
        let mut service = self.client.service_of(&map, owner)?;
        let message = v1::GetMemoriesRequest {
            ids: ids.iter().copied().take(MAX_IDS).collect(),
            with_features: self.options.features,
            with_payloads: self.options.payloads,
            read: self.client.read_options(&[]),
        };
        let requested = message.ids.clone();
        let call = opened(deadline, service.get_memories(self.client.request(message, deadline)));
        let stream = self.client.while_owner(&map, owner, call).await?;
        self.open.retain(|partition, _| !is_of_owner(partition));
        for id in ids.into_iter().skip(MAX_IDS) {
            self.open.entry(map.partition_of(MemoryId(id))).or_default().push(id);
        }
        let mut remaining = HashMap::with_capacity(requested.len());
        requested.into_iter().for_each(|id| *remaining.entry(id).or_insert(0) += 1);
        self.current = Some(OpenGet { stream, remaining });
        Ok(())
    }

    /// Requests again what the current worker has not returned.
    fn reopen(&mut self) {
        let (Some(current), Ok(map)) = (self.current.take(), self.client.map()) else { return };
        for (id, count) in current.remaining {
            let open = self.open.entry(map.partition_of(MemoryId(id))).or_default();
            open.extend(std::iter::repeat_n(id, count));
        }
    }
}

/// A scan of all memories, worker by worker.
#[derive(Debug)]
pub struct Scan {
    client: Client,
    options: GetOptions,
    map: Arc<Map>,
    owners: Vec<Ordinal>,
    open: Option<Streaming<v1::MemoryBatch>>,
    /// Rows were returned: the remaining ones must belong to the same map.
    has_returned_rows: bool,
}

impl Scan {
    /// Returns the next rows; `None` after the last.
    ///
    /// # Errors
    /// As for [`Error`]. A worker that fails while it is read ends the scan.
    pub async fn next(&mut self) -> Result<Option<Vec<Memory>>, Error> {
        let deadline = self.client.options().read_deadline;
        loop {
            if let Some(stream) = &mut self.open {
                match next(stream, deadline).await.map_err(|failure| Error::rejected(failure.problem))? {
                    Some(batch) => return self.return_rows(&batch).map(Some),
                    None => self.open = None,
                }
            }
            let Some(owner) = self.owners.pop() else { return Ok(None) };
            let mut retry = self.client.read();
            let batch = loop {
                match self.start(owner, &retry).await {
                    Ok(batch) => break batch,
                    Err(failure) => retry.after(&self.client, failure).await?,
                }
                if !self.has_returned_rows {
                    self.map = self.client.map()?;
                    self.owners = self.map.owners().into_iter().filter(|other| *other != owner).collect();
                }
            };
            if let Some(batch) = batch {
                return self.return_rows(&batch).map(Some);
            }
        }
    }

    fn return_rows(&mut self, batch: &v1::MemoryBatch) -> Result<Vec<Memory>, Error> {
        self.has_returned_rows = true;
        memories(batch)
    }

    async fn start(&mut self, owner: Ordinal, retry: &Retry) -> Result<Option<v1::MemoryBatch>, Failure> {
        let deadline = self.client.attempt(retry);
        let mut service = self.client.service_of(&self.map, owner)?;
        let message = v1::ScanMemoriesRequest {
            local: true,
            with_features: self.options.features,
            with_payloads: self.options.payloads,
            read: self.client.read_options(&[]),
        };
        let mut stream = opened(deadline, service.scan_memories(self.client.request(message, deadline))).await?;
        let first = next(&mut stream, deadline).await?;
        check_coverage(&self.map, owner, first.as_ref().map_or(&[], |batch| &batch.versions))?;
        self.open = Some(stream);
        Ok(first)
    }
}

/// Waits for the head of a stream.
pub(crate) async fn opened<T>(
    deadline: Duration,
    call: impl Future<Output = Result<Response<Streaming<T>>, Status>>,
) -> Result<Streaming<T>, Failure> {
    Ok(timeout(deadline, call).await.map_err(|_| Failure::timed_out())??.into_inner())
}

/// Waits for the next message of a stream.
pub(crate) async fn next<T>(stream: &mut Streaming<T>, deadline: Duration) -> Result<Option<T>, Failure> {
    Ok(timeout(deadline, stream.message()).await.map_err(|_| Failure::timed_out())??)
}

/// Checks that a response covers exactly the partitions that the map assigns to a worker, so that each is read once.
pub(crate) fn check_coverage(map: &Map, owner: Ordinal, versions: &[v1::PartitionVersion]) -> Result<(), Failure> {
    let mut covered: Vec<u32> = versions.iter().map(|version| version.partition).collect();
    covered.sort_unstable();
    let expected = (0_u32..).zip(&map.partitions).filter(|(_, placement)| placement.primary == owner);
    let expected: Vec<u32> = expected.map(|(partition, _)| partition).collect();
    if covered == expected {
        return Ok(());
    }
    Err(Failure::unavailable(format!(
        "worker {owner} serves {} partitions, expected {} by the map",
        covered.len(),
        expected.len()
    )))
}

/// Returns the failure of a worker that violates the protocol.
pub(crate) fn protocol_violation(error: &Error) -> Failure {
    Failure::of(Problem::of(ProblemKind::Unspecified, error.to_string()))
}
