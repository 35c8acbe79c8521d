//! What this worker does for its own partitions: shares of plans, draws, definitions, leases.

use super::Buffers;
use super::catalog::{self, Definition, unknown};
use super::messages::convert::{invalid, now_ms};
use super::messages::rows::{ANSWER_BYTES, Selection};
use crate::engine::device_problem;
use engram_memory::buffer::{Buffer, BufferCommand, BufferRef, Cursor, MAX_LISTED, Placement, Position, position_of};
use engram_memory::{Command, Group, MemoryId, PartitionId, Record, partition_of};
use engram_proto::v1::change_buffer_request::Change;
use engram_proto::v1::get_shares_request::Query;
use engram_proto::v1::{self, Problem, ProblemKind};
use engram_store::{ByAge, Partitions, Sampler};
use prost::Message as _;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Most handles in the share of a partition.
pub(crate) const MAX_HANDLES: u32 = 65_536;
/// Bytes of shares after which a response ends: with the last share below the limit of a message between workers.
const SHARES_BYTES: usize = 8 << 20;

/// Why planned items were not drawn.
enum Undrawn {
    /// The definition is not that of the partitions.
    Outdated,
    /// An item was removed after the plan.
    Removed,
    /// The fields are too large for an answer.
    TooLarge,
}

impl Buffers {
    /// Returns the definition of a buffer: cached, from a partition here, or from another worker if none is here.
    pub(crate) async fn definition(&self, name: &str) -> Result<Arc<Definition>, Problem> {
        if let Some(definition) = self.shared.buffers.get(name) {
            return Ok(definition);
        }
        let changes = self.shared.buffers.changes();
        let (group, definition) = self.find(name).await?;
        Ok(self.shared.buffers.insert(name, Definition::parse(name, group, &definition)?, changes))
    }

    async fn find(&self, name: &str) -> Result<(Group, Vec<u8>), Problem> {
        let (wanted, served) = (name.to_owned(), self.shared.served());
        let serves_none = served.is_empty();
        match self.shared.engine.read(move |store| catalog::find(store, &served, &wanted)).await? {
            Some(found) => Ok(found),
            // A worker that is drained, or has lost its disk, does not know what exists.
            None if serves_none => self.find_elsewhere(name).await,
            None => Err(unknown(name)),
        }
    }

    /// Returns the problem of a call with a definition that is not that of the partitions: the buffer was deleted, and may have been created again.
    pub(crate) fn outdated(&self, name: &str) -> Problem {
        self.shared.buffers.forget(name);
        unknown(name)
    }

    /// Makes a call; if its definition is outdated, once more.
    pub(crate) async fn with_definition<T, F: Future<Output = Result<T, Problem>>>(
        &self,
        name: &str,
        call: impl Fn() -> F,
    ) -> Result<T, Problem> {
        match call().await {
            Err(problem) if is_unknown(&problem) => {
                self.shared.buffers.forget(name);
                call().await
            }
            other => other,
        }
    }

    /// Returns the shares of the partitions served here, or of those requested: the first of them if their handles take much room.
    pub(crate) async fn local_shares(&self, request: v1::GetSharesRequest) -> Result<Vec<v1::BufferShare>, Problem> {
        let served = self.shared.served();
        let partitions: Vec<PartitionId> = match request.partitions.is_empty() {
            true => served,
            false => {
                let requested: Vec<PartitionId> = request.partitions.iter().copied().map(PartitionId).collect();
                self.require_served(&requested).await?;
                requested
            }
        };
        let sampler = match request.query {
            Some(Query::Exponent(exponent)) => Some(self.sampler(Some(exponent))?),
            Some(Query::Uniform(_)) => Some(Sampler::Uniform),
            _ => None,
        };
        let (read, count) = (partitions.clone(), self.shared.partitions());
        let lacks_items = self.shared.buffers.lacks_items(&request.buffer);
        let shares = self.shared.engine.read_leased(partitions, move |store| {
            let (mut shares, mut bytes) = (Vec::with_capacity(read.len()), 0);
            for partition in read {
                let share = share(store, partition, count, &request, sampler.as_ref())?;
                bytes += share.encoded_len();
                shares.push(v1::BufferShare { lacks_items, ..share });
                if bytes > SHARES_BYTES {
                    break;
                }
            }
            Ok(shares)
        });
        shares.await?.map_err(|error: engram_kernels::Error| device_problem(&error))
    }

    /// Returns the sampler of an exponent; `None` = uniform.
    pub(crate) fn sampler(&self, exponent: Option<u32>) -> Result<Sampler, Problem> {
        match exponent {
            None => Ok(Sampler::Uniform),
            Some(exponent @ ..=65_536) => Ok(self.shared.buffers.sampler(exponent)),
            Some(exponent) => Err(invalid(format!("exponent: {exponent} is not allowed; allowed: 0 to 65,536"))),
        }
    }

    /// Waits until partitions are served here.
    async fn require_served(&self, partitions: &[PartitionId]) -> Result<(), Problem> {
        self.shared.wait_until_served(partitions.iter().copied()).await;
        let missing = partitions.iter().find(|partition| self.shared.engine.position(**partition).is_none());
        missing.map_or(Ok(()), |partition| Err(self.shared.not_primary(*partition)))
    }

    /// Draws planned items of partitions served here; counts the batch if uses or samples are counted.
    pub(crate) async fn local_draws(&self, request: v1::DrawItemsRequest) -> Result<v1::ItemBatch, Problem> {
        let definition = self.definition(&request.buffer).await?;
        let selection = Selection::new(Arc::clone(&definition), &request.fields, request.without_fields)?;
        let sampler = self.sampler(request.exponent)?;
        let partitions: Vec<PartitionId> = request.partitions.iter().map(|it| PartitionId(it.partition)).collect();
        self.require_served(&partitions).await?;
        // No other batch draws an item between this draw and the count of its uses.
        let _one_batch = match definition.spec.max_reuse {
            0 => None,
            _ => Some(self.shared.buffers.one_batch.lock().await),
        };
        let (buffer, oldest) = (definition.buffer, request.oldest_version);
        let (counts_uses, counts_samples) = (definition.spec.max_reuse > 0, definition.counts_samples());
        let fields = selection.clone();
        let (plans, max_bytes) = (request.partitions, request.max_bytes);
        let drawn = self.shared.engine.read_leased(partitions, move |store| {
            let mut ids: Vec<MemoryId> = Vec::new();
            let (mut draws, mut priorities) = (Vec::new(), Vec::new());
            let mut sampled: BTreeMap<PartitionId, Vec<MemoryId>> = BTreeMap::new();
            for plan in &plans {
                let partition = PartitionId(plan.partition);
                if !is_current(store, partition, buffer) {
                    return Ok(Err(Undrawn::Outdated));
                }
                let chosen = plan.handles.iter().map(|handle| (MemoryId(*handle), 0)).collect::<Vec<_>>();
                let drawn =
                    store.draw_items(partition, buffer.group, &sampler, oldest, plan.total, &plan.thresholds)?;
                let drawn = chosen.into_iter().chain(drawn.into_iter().map(|item| (item.id, item.priority)));
                for ((id, priority), draw) in drawn.zip(&plan.draws) {
                    sampled.entry(partition).or_default().push(id);
                    ids.push(id);
                    draws.push(*draw);
                    priorities.push(priority);
                }
            }
            let mut batch = selection.read(store, &ids, max_bytes)?;
            // The fields of items that are used up cannot be read later.
            if counts_uses && selection.lacks_columns(&batch) {
                return Ok(Err(Undrawn::TooLarge));
            }
            // What is counted is delivered: the caller draws other items.
            if counts_samples && !batch.missing.is_empty() {
                return Ok(Err(Undrawn::Removed));
            }
            // An item that was removed after the plan has no row.
            let missing: Vec<u64> = batch.missing.clone();
            let keep = |index: &usize| !missing.contains(&ids[*index].0);
            batch.draws = (0..ids.len()).filter(keep).map(|index| draws[index]).collect();
            batch.drawn_priorities = (0..ids.len()).filter(keep).map(|index| priorities[index]).collect();
            Ok::<_, engram_kernels::Error>(Ok((batch, sampled)))
        });
        let (batch, sampled) = match drawn.await?.map_err(|error| device_problem(&error))? {
            Ok(drawn) => drawn,
            Err(Undrawn::Outdated) => return Err(self.outdated(&definition.spec.name)),
            Err(Undrawn::Removed) => return Err(removed()),
            Err(Undrawn::TooLarge) => {
                let most = if max_bytes == 0 { ANSWER_BYTES as u64 } else { max_bytes };
                return Err(invalid(format!(
                    "count: items of more than {most} bytes on one worker are not allowed in a buffer with max_reuse; allowed: fewer items, or fewer fields"
                )));
            }
        };
        let failed = self.count_batch(&definition, sampled).await?;
        let Some(problem) = failed.values().next() else { return Ok(batch) };
        let is_counted = |row: &usize| {
            let partition = partition_of(MemoryId(batch.handles[*row]), self.shared.partitions());
            !failed.contains_key(&partition)
        };
        let counted: Vec<(usize, usize)> = (0..batch.handles.len()).filter(is_counted).map(|row| (0, row)).collect();
        match counted.is_empty() {
            true => Err(problem.clone()),
            false => fields.merge(std::slice::from_ref(&batch), &counted),
        }
    }

    /// Counts a batch durably, if the limiter or the limit of uses needs it. Returns the partitions that failed to.
    async fn count_batch(
        &self,
        definition: &Definition,
        sampled: BTreeMap<PartitionId, Vec<MemoryId>>,
    ) -> Result<BTreeMap<PartitionId, Problem>, Problem> {
        let count: usize = sampled.values().map(Vec::len).sum();
        self.shared.metrics.buffers.sampled(&definition.spec.name, count as u64);
        let (buffer, counts_uses) = (definition.buffer, definition.spec.max_reuse > 0);
        if !definition.counts_samples() {
            return Ok(BTreeMap::new());
        }
        let mut records = Vec::new();
        for (partition, mut ids) in sampled {
            let sampled = ids.len() as u64;
            ids.sort_unstable();
            ids.dedup();
            let chunks: Vec<&[MemoryId]> = if counts_uses { ids.chunks(MAX_LISTED).collect() } else { vec![&[]] };
            for (index, chunk) in chunks.into_iter().enumerate() {
                let sampled = if index == 0 { sampled } else { 0 };
                let command = BufferCommand::Use { buffer, sampled, ids: chunk.to_vec() };
                records.push((partition, Record::bare(Command::Buffer(command))));
            }
        }
        let of: Vec<PartitionId> = records.iter().map(|(partition, _)| *partition).collect();
        let mut failed = BTreeMap::new();
        for (partition, result) in of.into_iter().zip(self.shared.engine.write(records).await?) {
            if let Err(error) = result {
                failed.insert(partition, crate::engine::write_problem(&error));
            }
        }
        Ok(failed)
    }

    /// Returns items of partitions served here, in the order of the handles.
    pub(crate) async fn local_items(&self, request: v1::GetItemsRequest) -> Result<v1::ItemBatch, Problem> {
        let definition = self.definition(&request.buffer).await?;
        let buffer = definition.buffer;
        let selection = Selection::new(definition, &request.fields, request.without_fields)?;
        let ids: Vec<MemoryId> = request.handles.into_iter().map(MemoryId).collect();
        let mut partitions: Vec<PartitionId> =
            ids.iter().map(|id| partition_of(*id, self.shared.partitions())).collect();
        partitions.sort_unstable();
        partitions.dedup();
        self.require_served(&partitions).await?;
        let (max_bytes, of) = (request.max_bytes, partitions.clone());
        let read = self.shared.engine.read_leased(partitions, move |store| {
            let is_outdated = of.iter().any(|partition| !is_current(store, *partition, buffer));
            if is_outdated { Ok(None) } else { selection.read(store, &ids, max_bytes).map(Some) }
        });
        let read = read.await?.map_err(|error: engram_kernels::Error| device_problem(&error))?;
        read.ok_or_else(|| self.outdated(&request.buffer))
    }

    /// Defines or drops a buffer in partitions served here, or leases items.
    pub(crate) async fn local_change(&self, request: v1::ChangeBufferRequest) -> Result<v1::WriteResponse, Problem> {
        let partitions: Vec<PartitionId> = request.partitions.iter().copied().map(PartitionId).collect();
        self.require_served(&partitions).await?;
        let mut changed = None;
        let records = match request.change {
            Some(Change::Define(define)) => {
                changed = define.spec.as_ref().map(|spec| spec.name.clone());
                self.definitions(&partitions, define)?
            }
            Some(Change::Drop(name)) => {
                let (group, definition) = self.find(&name).await?;
                let buffer = catalog::reference(group, &definition);
                changed = Some(name);
                let record = |partition: &PartitionId| (*partition, bare(BufferCommand::Drop { buffer }));
                partitions.iter().map(record).collect()
            }
            Some(Change::Lease(lease)) => self.leases(lease).await?,
            None => return Err(invalid("change: absent is not allowed; allowed: define, drop, lease")),
        };
        let of: Vec<PartitionId> = records.iter().map(|(partition, _)| *partition).collect();
        let results = self.shared.engine.write(records).await;
        if let Some(name) = changed {
            self.shared.buffers.forget(&name);
        }
        let results = results?;
        let mut response = v1::WriteResponse::default();
        for (partition, result) in of.into_iter().zip(results) {
            let result = result.map_err(|error| crate::engine::write_problem(&error));
            // A buffer that is gone in one partition is dropped there already.
            response.parts.push(crate::engine::part_reply(partition, 0, result));
        }
        Ok(response)
    }

    fn definitions(
        &self,
        partitions: &[PartitionId],
        define: v1::DefineBuffer,
    ) -> Result<Vec<(PartitionId, Record)>, Problem> {
        let wire = define.spec.unwrap_or_default();
        let used = wire.partitions;
        let spec = engram_client::BufferSpec::from_wire(wire);
        let spec = spec.and_then(|spec| spec.check().map(|_| spec)).map_err(|error| invalid(error.to_string()))?;
        let group = define.group.map(|group| Group(group as u8));
        let placement = Placement::new(&spec.name, used, self.shared.partitions());
        let record = |partition: &PartitionId| {
            let command = BufferCommand::Define {
                group,
                name: spec.name.clone(),
                definition: Definition::encode(&spec, used),
                limits: spec.limits().placed(placement, partition.0),
            };
            (*partition, bare(command))
        };
        Ok(partitions.iter().map(record).collect())
    }

    async fn leases(&self, lease: v1::LeaseItems) -> Result<Vec<(PartitionId, Record)>, Problem> {
        let buffer = self.definition(&lease.buffer).await?.buffer;
        let mut by_partition: BTreeMap<PartitionId, Vec<MemoryId>> = BTreeMap::new();
        for handle in lease.handles.into_iter().map(MemoryId) {
            by_partition.entry(partition_of(handle, self.shared.partitions())).or_default().push(handle);
        }
        let now_ms = now_ms();
        let mut records = Vec::new();
        for (partition, ids) in by_partition {
            for ids in ids.chunks(MAX_LISTED) {
                let command = BufferCommand::Lease {
                    buffer,
                    consumer: lease.consumer.clone(),
                    ids: ids.to_vec(),
                    now_ms,
                    until_ms: now_ms.saturating_add(lease.lease_ms),
                };
                records.push((partition, bare(command)));
            }
        }
        Ok(records)
    }
}

fn bare(command: BufferCommand) -> Record {
    Record::bare(Command::Buffer(command))
}

/// Returns the share of one of `partitions` partitions.
fn share(
    store: &mut Partitions,
    partition: PartitionId,
    partitions: u32,
    request: &v1::GetSharesRequest,
    sampler: Option<&Sampler>,
) -> Result<v1::BufferShare, engram_kernels::Error> {
    let mut share = v1::BufferShare { partition: partition.0, ..v1::BufferShare::default() };
    let Some((group, buffer)) = store.ledger(partition).and_then(|ledger| ledger.buffers.find(&request.buffer)) else {
        return Ok(share);
    };
    describe(&mut share, group, buffer);
    let consumed = match &request.query {
        Some(Query::Consumer(query)) => buffer.consumers.get(&query.name).cloned(),
        _ => None,
    };
    let oldest = request.oldest_version;
    let sums = store.item_sums(partition, group, sampler.unwrap_or(&Sampler::Uniform), oldest)?;
    (share.total, share.positive, share.smallest, share.items) = (sums.total, sums.positive, sums.smallest, sums.items);
    let mut by_age = |newest_first, from, count: u32, accepts: &dyn Fn(Position) -> bool| {
        let order = ByAge { newest_first, from, oldest_version: oldest, count: count.min(MAX_HANDLES) as usize };
        store.items_by_age(partition, group, order, accepts)
    };
    let handles = match &request.query {
        Some(Query::Oldest(count)) => {
            let after = request.after.map(|handle| age(position_of(MemoryId(handle)), partitions));
            let from = after.map_or(0, |after| after.0 * u64::from(partitions));
            by_age(false, from, *count, &|position| after.is_none_or(|after| age(position, partitions) > after))?
        }
        Some(Query::Newest(count)) => by_age(true, 0, *count, &|_| true)?,
        Some(Query::Consumer(query)) => {
            let free = |position| consumed.as_ref().is_none_or(|cursor| cursor.check(position, query.now_ms).is_ok());
            // Everything before is acknowledged.
            let from = consumed.as_ref().map_or(0, Cursor::position);
            by_age(false, from, query.count, &free)?
        }
        Some(Query::Trajectories(_)) => {
            let trajectory = |it: engram_store::Trajectory| v1::TrajectoryShare {
                trajectory: it.number,
                handles: it.items.iter().map(|id| id.0).collect(),
            };
            share.trajectories = store.trajectories(partition, group, oldest)?.into_iter().map(trajectory).collect();
            Vec::new()
        }
        Some(Query::Exponent(_) | Query::Uniform(_)) | None => Vec::new(),
    };
    share.handles = handles.iter().map(|id| id.0).collect();
    Ok(share)
}

fn describe(share: &mut v1::BufferShare, group: Group, buffer: &Buffer) {
    share.definition = buffer.definition.clone().into();
    share.group = group.0.into();
    share.share = buffer.limits.share;
    (share.appended, share.sampled, share.deleted) =
        (buffer.counts.inserted, buffer.counts.sampled, buffer.counts.deleted);
    let consumer =
        |(name, cursor): (&String, &Cursor)| v1::ConsumerStats { name: name.clone(), leased: cursor.leased() as u64 };
    share.consumers = buffer.consumers.iter().map(consumer).collect();
}

/// Whether a partition has the buffer that a definition was read of.
fn is_current(store: &Partitions, partition: PartitionId, buffer: BufferRef) -> bool {
    store.ledger(partition).is_some_and(|ledger| ledger.buffers.check(buffer).is_ok())
}

/// Returns the problem of items that were removed after the plan.
pub(crate) fn removed() -> Problem {
    Problem::of(ProblemKind::Unavailable, "items were removed while they were drawn").retry_after(10)
}

/// Returns the oldest handles of shares with at most `most` handles each, in order of age, and whether there are more: up to the first end of a share
/// that may go on.
pub(crate) fn oldest_handles(shares: &[v1::BufferShare], most: u32, partitions: u32) -> (Vec<MemoryId>, bool) {
    let place = |handle: &u64| age(position_of(MemoryId(*handle)), partitions);
    let full = shares.iter().filter(|share| share.handles.len() >= most as usize);
    let end = full.filter_map(|share| share.handles.last()).map(place).min();
    let handles =
        shares.iter().flat_map(|share| &share.handles).filter(|handle| end.is_none_or(|end| place(handle) <= end));
    let mut handles: Vec<MemoryId> = handles.copied().map(MemoryId).collect();
    sort_by_age(&mut handles, partitions);
    (handles, end.is_some())
}

/// Sorts handles by age over all partitions.
pub(crate) fn sort_by_age(handles: &mut [MemoryId], partitions: u32) {
    handles.sort_unstable_by_key(|id| age(position_of(*id), partitions));
}

/// Returns the place of an item in the order of age over all partitions.
fn age(position: Position, partitions: u32) -> (u64, Position) {
    (position / u64::from(partitions), position)
}

/// Returns the first refusal of a response.
pub(crate) fn first_problem(response: &v1::WriteResponse) -> Option<Problem> {
    response.parts.iter().find_map(|part| match &part.result {
        Some(v1::partition_result::Result::Problem(problem)) => Some(problem.clone()),
        _ => None,
    })
}

/// Whether a reply refuses because the buffer does not exist.
pub(crate) fn is_unknown(problem: &Problem) -> bool {
    problem.kind() == ProblemKind::BufferUnknown
}

#[cfg(test)]
mod tests {
    use super::*;
    use engram_memory::buffer::handle_at;

    #[test]
    fn pages_of_few_handles_per_partition_are_all_items_by_age() {
        const PARTITIONS: u32 = 4;
        // Partition 0 has the oldest items, partition 3 none.
        let items: Vec<Vec<u64>> = [0..90, 60..120, 70..75, 0..0]
            .into_iter()
            .zip(0..)
            .map(|(orders, partition)| orders.map(|order| order * u64::from(PARTITIONS) + partition).collect())
            .collect();
        let mut expected: Vec<u64> = items.concat();
        expected.sort_unstable_by_key(|position| age(*position, PARTITIONS));
        let (mut found, mut after) = (Vec::new(), None);
        loop {
            let share = |positions: &Vec<u64>| v1::BufferShare {
                handles: positions
                    .iter()
                    .filter(|position| after.is_none_or(|after| age(**position, PARTITIONS) > age(after, PARTITIONS)))
                    .take(7)
                    .map(|position| handle_at(*position).0)
                    .collect(),
                ..v1::BufferShare::default()
            };
            let shares: Vec<_> = items.iter().map(share).collect();
            let (page, more) = oldest_handles(&shares, 7, PARTITIONS);
            found.extend(page.iter().map(|handle| position_of(*handle)));
            after = found.last().copied();
            if !more {
                break;
            }
            assert!(page.len() >= 7, "a page makes progress");
        }
        assert_eq!(found, expected);
    }
}
