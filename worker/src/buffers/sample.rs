//! Samples: this worker makes the plan from the shares of all partitions, lets the primaries draw, and merges what they return.

use super::Buffers;
use super::catalog::{self, Definition};
use super::cluster::{Patience, is_passing};
use super::local::{removed, sort_by_age};
use super::messages::convert::{invalid, now_ms};
use super::messages::pages::Answer;
use super::messages::rows::Selection;
use super::wait::{Waiting, Waits, limiter};
use engram_memory::buffer::{Placement, position_of};
use engram_memory::edge::ShortNumber;
use engram_memory::{Group, MemoryId, PartitionId, partition_of};
use engram_proto::v1::change_buffer_request::Change;
use engram_proto::v1::get_shares_request::Query;
use engram_proto::v1::sample_items_request::Sampler;
use engram_proto::v1::{self, Problem, ProblemKind};
use engram_replay::plan::{self, PartitionSum, Plan};
use engram_replay::{importance, item, selection};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// Most items of a batch, over all members.
const MAX_COUNT: u64 = 65_536;

/// A checked request.
struct Request {
    sample: v1::SampleItemsRequest,
    sampler: Sampler,
    selection: Selection,
    definition: Arc<Definition>,
    world: u32,
    /// Numbers of the own draws, ascending; `None` = those of the rank.
    draws: Option<Vec<u32>>,
    /// Lowest policy version of a drawn item.
    oldest_version: u64,
}

/// What one attempt to draw a batch has done.
enum Attempt {
    /// The batch is complete.
    Complete(v1::ItemBatch),
    /// Some items are counted as drawn, others failed for this reason.
    Partial(v1::ItemBatch, Problem),
    Waits(Waiting),
}

/// The items of a batch: which partition draws what.
struct Chosen {
    partitions: Vec<v1::PartitionDraws>,
    /// Items of this member that this attempt draws.
    count: usize,
    plan: Option<Plan>,
    /// Of a local sample: factor of the sum of weighted gradients.
    scale: Option<f64>,
}

impl Buffers {
    /// Draws a batch.
    pub(crate) async fn sample(&self, sample: v1::SampleItemsRequest) -> Result<Answer, Problem> {
        let request = self.checked(sample).await?;
        let batch = self.sample_checked(&request).await?;
        Ok(Answer { selection: request.selection, batch, is_sample: true })
    }

    /// Draws the items with these numbers, ascending, of the batch of a prioritized or uniform sampler.
    pub(crate) async fn sample_draws(
        &self,
        sample: v1::SampleItemsRequest,
        draws: Vec<u32>,
    ) -> Result<v1::ItemBatch, Problem> {
        let request = Request { draws: Some(draws), ..self.checked(sample).await? };
        let batch = self.sample_checked(&request).await?;
        self.whole(Answer { selection: request.selection, batch, is_sample: true }).await
    }

    async fn sample_checked(&self, request: &Request) -> Result<v1::ItemBatch, Problem> {
        let buffers = &self.shared.buffers;
        let (name, is_limited) = (&request.sample.buffer, request.definition.spec.limiter.is_some());
        let mut waits = Waits::new(&self.shared, name, request.sample.wait_ms);
        let mut patience = Patience::new(&self.shared);
        let mut counted = v1::ItemBatch::default();
        loop {
            let problem = match self.sample_once(request, &counted).await {
                Ok(Attempt::Complete(batch)) => {
                    if is_limited {
                        buffers.set_lacks_items(name, false);
                    }
                    return Ok(finished(batch));
                }
                Ok(Attempt::Waits(waiting)) => {
                    if is_limited && waiting.is_for_items() {
                        buffers.set_lacks_items(name, true);
                    }
                    patience = Patience::new(&self.shared);
                    match waits.pause(waiting).await {
                        Ok(()) => continue,
                        Err(problem) => return request.partial(counted, problem),
                    }
                }
                Ok(Attempt::Partial(batch, problem)) => {
                    counted = batch;
                    patience = Patience::new(&self.shared);
                    problem
                }
                Err(problem) => problem,
            };
            if !patience.again(&problem).await {
                return request.partial(counted, problem);
            }
        }
    }

    async fn checked(&self, sample: v1::SampleItemsRequest) -> Result<Request, Problem> {
        let definition = self.definition(&sample.buffer).await?;
        let selection = Selection::new(Arc::clone(&definition), &sample.fields, sample.without_fields)?;
        let world = sample.world.max(1);
        let sampler = sample.sampler.or_else(|| definition.spec.sampler?.to_request());
        let sampler = sampler.ok_or_else(|| {
            invalid("sampler: absent is not allowed; allowed: one of the samplers, as the buffer has none of its own")
        })?;
        let items = match &sampler {
            Sampler::Slices(slices) => u64::from(slices.length),
            Sampler::Groups(groups) => u64::from(groups.size),
            _ => 1,
        };
        let members = if sample.local { 1 } else { world };
        let total = u64::from(sample.count).saturating_mul(members.into()).saturating_mul(items);
        if total == 0 || total > MAX_COUNT {
            let text = format!("count: {total} items are not allowed; allowed: 1 to {MAX_COUNT} over all members");
            return Err(invalid(text));
        }
        if sample.rank >= world {
            return Err(invalid(format!("rank: {} is not allowed; allowed: below world ({world})", sample.rank)));
        }
        if let Sampler::Prioritized(prioritized) = &sampler {
            for (field, value) in [("alpha", prioritized.alpha), ("beta", prioritized.beta)] {
                if !(0.0..=1.0).contains(&value) {
                    let value = ShortNumber(value);
                    return Err(invalid(format!("{field}: {value} is not allowed; allowed: 0 to 1")));
                }
            }
        }
        if sample.local {
            if !matches!(sampler, Sampler::Prioritized(_)) {
                return Err(invalid(
                    "local: true is not allowed with this sampler; allowed: with a prioritized sampler",
                ));
            }
            let used = self.placement(&definition).used;
            if world > used {
                let text = format!(
                    "world: {world} is not allowed with local; allowed: at most {used}, the partitions of the buffer"
                );
                return Err(invalid(text));
            }
        }
        let max_age = definition.spec.max_age;
        let oldest_version = max_age.map_or(0, |max_age| item::oldest_version(sample.version, max_age));
        Ok(Request { sample, sampler, selection, definition, world, draws: None, oldest_version })
    }

    /// Draws the items of a batch that are not yet in `counted`.
    ///
    /// Partitions count what they draw, so a batch that one of them failed for is completed, not drawn again: each counted item is returned.
    async fn sample_once(&self, request: &Request, counted: &v1::ItemBatch) -> Result<Attempt, Problem> {
        let sample = &request.sample;
        let wanted = sample.count * request.world;
        let query = match &request.sampler {
            Sampler::Prioritized(prioritized) => Query::Exponent(exponent(prioritized.alpha)),
            Sampler::Uniform(_) => Query::Uniform(true),
            Sampler::Fifo(_) => Query::Oldest(wanted),
            Sampler::Lifo(_) => Query::Newest(wanted),
            Sampler::Slices(_) | Sampler::Groups(_) => Query::Trajectories(true),
        };
        let shares = v1::GetSharesRequest {
            buffer: sample.buffer.clone(),
            oldest_version: request.oldest_version,
            query: Some(query),
            ..v1::GetSharesRequest::default()
        };
        let shares = self.shares(&shares).await?;
        self.check_definition(&request.definition, &shares)?;
        // A batch is admitted with its first item.
        if counted.handles.is_empty()
            && let Some(limiter) = limiter(&request.definition.spec, &shares)
            && let Err(wait) = limiter.sample(1)
        {
            return Ok(Attempt::Waits(wait.into()));
        }
        let chosen = match &request.sampler {
            Sampler::Prioritized(_) | Sampler::Uniform(_) => self.planned(request, &shares, counted),
            Sampler::Fifo(_) | Sampler::Lifo(_) => self.by_age(request, &shares, counted),
            Sampler::Slices(slices) => self.slices(request, shares, slices.length as usize, counted),
            Sampler::Groups(groups) => self.groups(request, shares, groups.size as usize, counted),
        };
        let chosen = match chosen? {
            Ok(chosen) => chosen,
            Err(waiting) => return Ok(Attempt::Waits(waiting)),
        };
        let exponent = match &request.sampler {
            Sampler::Prioritized(prioritized) => Some(exponent(prioritized.alpha)),
            _ => None,
        };
        let draws = v1::DrawItemsRequest {
            buffer: sample.buffer.clone(),
            oldest_version: request.oldest_version,
            exponent,
            partitions: chosen.partitions,
            fields: request.selection.names(),
            without_fields: request.selection.names().is_empty(),
            max_bytes: 0,
        };
        let (batches, failed) = self.draws(&request.selection, &draws).await?;
        let mut batch = merge(&request.selection, &batches)?;
        let failed = if batch.handles.len() < chosen.count { Some(failed.unwrap_or_else(removed)) } else { failed };
        if let Some(problem) = &failed
            && (batch.handles.is_empty() || !request.definition.counts_samples())
        {
            return Err(problem.clone());
        }
        if let (Sampler::Prioritized(prioritized), Some(plan)) = (&request.sampler, &chosen.plan) {
            let weight =
                |priority: &u32| importance::weight(plan, (*priority).max(1), prioritized.beta).min(1.0) as f32;
            batch.weights = batch.drawn_priorities.iter().map(weight).collect();
        }
        let scale = chosen.scale;
        if !counted.handles.is_empty() {
            batch = merge(&request.selection, &[counted.clone(), batch])?;
        }
        batch.scale = scale;
        Ok(match failed {
            Some(problem) => Attempt::Partial(batch, problem),
            None => Attempt::Complete(batch),
        })
    }

    /// Checks that the partitions have the buffer that a definition was read of.
    fn check_definition(&self, definition: &Definition, shares: &[v1::BufferShare]) -> Result<(), Problem> {
        let mut existing = shares.iter().filter(|share| !share.definition.is_empty()).peekable();
        let is_same = |share: &v1::BufferShare| {
            catalog::reference(Group(share.group as u8), &share.definition) == definition.buffer
        };
        let is_current = existing.peek().is_some() && existing.all(is_same);
        if is_current { Ok(()) } else { Err(self.outdated(&definition.spec.name)) }
    }

    /// Plans draws in proportion to priorities: from all partitions, the same on any number of workers, or from those of the member.
    fn planned(
        &self,
        request: &Request,
        shares: &[v1::BufferShare],
        counted: &v1::ItemBatch,
    ) -> Result<Result<Chosen, Waiting>, Problem> {
        let sum = |share: &v1::BufferShare| PartitionSum {
            partition: PartitionId(share.partition),
            total: share.total,
            items: u32::try_from(share.positive).unwrap_or(u32::MAX),
            smallest: share.smallest,
        };
        let plan = match Plan::new(shares.iter().map(sum).collect()) {
            Ok(plan) => plan,
            Err(plan::Error::Empty) => {
                let items: u64 = shares.iter().map(|share| share.items).sum();
                let text = match items {
                    0 => "waiting for items: the buffer is empty".to_owned(),
                    items => format!("waiting for items: none of {items} has a positive priority and is new enough"),
                };
                return Ok(Err(Waiting::for_items(text)));
            }
            Err(error) => return Err(invalid(error.to_string())),
        };
        let sample = &request.sample;
        let local = match sample.local {
            true => match self.local(request, &plan) {
                Ok(local) => Some(local),
                Err(plan::Error::Empty) => {
                    let text = format!("waiting for items: the partitions of rank {} have none", sample.rank);
                    return Ok(Err(Waiting::for_items(text)));
                }
                Err(error) => return Err(invalid(error.to_string())),
            },
            false => None,
        };
        let count = if sample.local { sample.count } else { sample.count * request.world };
        let mut partitions = Vec::new();
        for share in shares.iter().filter(|share| share.total > 0) {
            let of = local.as_ref().map_or(&plan, |(local, _)| local);
            let draws = of.draws(PartitionId(share.partition), sample.seed, sample.step, count);
            let draws = draws.map_err(|error| invalid(error.to_string()))?;
            let is_left = |draw: u32| {
                (sample.local || request.is_mine(draw.into())) && counted.draws.binary_search(&draw).is_err()
            };
            let mine: Vec<_> = draws.into_iter().filter(|draw| is_left(draw.draw)).collect();
            if mine.is_empty() {
                continue;
            }
            partitions.push(v1::PartitionDraws {
                partition: share.partition,
                total: share.total,
                thresholds: mine.iter().map(|draw| draw.threshold).collect(),
                draws: mine.iter().map(|draw| draw.draw).collect(),
                handles: Vec::new(),
            });
        }
        let count = request.own_count().saturating_sub(counted.handles.len());
        let scale = local.map(|(_, scale)| scale);
        Ok(Ok(Chosen { partitions, count, plan: Some(plan), scale }))
    }

    /// Returns the plan of a member's own partitions, and the factor of its gradients.
    fn local(&self, request: &Request, plan: &Plan) -> Result<(Plan, f64), plan::Error> {
        let placement = self.placement(&request.definition);
        let (rank, world) = (request.sample.rank, request.world);
        let local = plan.local(rank, |partition| placement.place(partition) % world == rank)?;
        let scale = plan.local_scale(&local, request.sample.count)?;
        Ok((local, scale))
    }

    fn placement(&self, definition: &Definition) -> Placement {
        Placement::new(&definition.spec.name, definition.partitions, self.shared.partitions())
    }

    /// The oldest or newest items over all partitions.
    fn by_age(
        &self,
        request: &Request,
        shares: &[v1::BufferShare],
        counted: &v1::ItemBatch,
    ) -> Result<Result<Chosen, Waiting>, Problem> {
        let counted_handles: BTreeSet<u64> = counted.handles.iter().copied().collect();
        let left = shares.iter().flat_map(|share| &share.handles).filter(|handle| !counted_handles.contains(handle));
        let mut handles: Vec<MemoryId> = left.copied().map(MemoryId).collect();
        sort_by_age(&mut handles, self.shared.partitions());
        if matches!(request.sampler, Sampler::Lifo(_)) {
            handles.reverse();
        }
        let wanted = request.left(counted, 1);
        if handles.len() < wanted {
            return Ok(Err(too_few(handles.len(), wanted, "items")));
        }
        let mine = handles.into_iter().take(wanted).enumerate().filter(|(draw, _)| request.is_mine(*draw as u64));
        Ok(Ok(self.handles(&mine.map(|(_, handle)| handle).collect::<Vec<_>>(), counted)))
    }

    fn slices(
        &self,
        request: &Request,
        shares: Vec<v1::BufferShare>,
        length: usize,
        counted: &v1::ItemBatch,
    ) -> Result<Result<Chosen, Waiting>, Problem> {
        let trajectories = self.trajectories(shares);
        let mut borders = Vec::with_capacity(trajectories.len());
        let mut items: Vec<MemoryId> = Vec::new();
        for trajectory in trajectories {
            borders.push(items.len());
            items.extend(trajectory);
        }
        let (sample, count) = (&request.sample, request.left(counted, length));
        let drawn = match selection::slices(&borders, items.len(), length, count, sample.seed, sample.step) {
            Ok(drawn) => drawn,
            Err(selection::Error::TooFew { available, .. }) => return Ok(Err(too_few(available, 1, "slices"))),
            Err(error) => return Err(invalid(error.to_string())),
        };
        let mine = drawn.into_iter().enumerate().filter(|(draw, _)| request.is_mine(*draw as u64));
        Ok(Ok(self.handles(&mine.flat_map(|(_, slice)| items[slice].to_vec()).collect::<Vec<_>>(), counted)))
    }

    fn groups(
        &self,
        request: &Request,
        shares: Vec<v1::BufferShare>,
        size: usize,
        counted: &v1::ItemBatch,
    ) -> Result<Result<Chosen, Waiting>, Problem> {
        let mut groups = self.trajectories(shares);
        if !counted.handles.is_empty() {
            let counted: BTreeSet<u64> = counted.handles.iter().copied().collect();
            groups.retain(|group| group.iter().all(|handle| !counted.contains(&handle.0)));
        }
        let numbers: Vec<u64> = (0..).zip(&groups).flat_map(|(number, group)| vec![number; group.len()]).collect();
        let items: Vec<MemoryId> = groups.into_iter().flatten().collect();
        let count = request.left(counted, size);
        let complete = match selection::groups(&numbers, size, count) {
            Ok(complete) => complete,
            Err(selection::Error::TooFew { available, .. }) => {
                return Ok(Err(too_few(available, count, "complete groups")));
            }
            Err(error) => return Err(invalid(error.to_string())),
        };
        let mine = complete.into_iter().enumerate().filter(|(draw, _)| request.is_mine(*draw as u64));
        let handles: Vec<MemoryId> = mine.flat_map(|(_, group)| group).map(|index| items[index]).collect();
        Ok(Ok(self.handles(&handles, counted)))
    }

    /// Items of each trajectory in order of age, trajectories by their first item. Items without one are left out.
    fn trajectories(&self, shares: Vec<v1::BufferShare>) -> Vec<Vec<MemoryId>> {
        let mut whole: BTreeMap<u64, Vec<MemoryId>> = BTreeMap::new();
        for share in shares.into_iter().flat_map(|share| share.trajectories).filter(|it| it.trajectory != 0) {
            whole.entry(share.trajectory).or_default().extend(share.handles.into_iter().map(MemoryId));
        }
        let partitions = self.shared.partitions();
        let mut trajectories: Vec<Vec<MemoryId>> = whole.into_values().collect();
        trajectories.iter_mut().for_each(|items| sort_by_age(items, partitions));
        trajectories
            .sort_unstable_by_key(|items| (position_of(items[0]) / u64::from(partitions), position_of(items[0])));
        trajectories
    }

    /// Chooses items, whose draws follow those that are counted.
    fn handles(&self, handles: &[MemoryId], counted: &v1::ItemBatch) -> Chosen {
        let mut partitions: BTreeMap<PartitionId, v1::PartitionDraws> = BTreeMap::new();
        let first = counted.draws.last().map_or(0, |draw| draw + 1);
        for (draw, handle) in (first..).zip(handles) {
            let partition = partition_of(*handle, self.shared.partitions());
            let draws = partitions.entry(partition).or_default();
            draws.partition = partition.0;
            draws.handles.push(handle.0);
            draws.draws.push(draw);
        }
        Chosen { partitions: partitions.into_values().collect(), count: handles.len(), plan: None, scale: None }
    }

    /// Leases the oldest items that a consumer has not had.
    pub(crate) async fn consume(&self, request: v1::ConsumeItemsRequest) -> Result<Answer, Problem> {
        let definition = self.definition(&request.buffer).await?;
        let selection = Selection::new(definition, &request.fields, request.without_fields)?;
        if request.count == 0 || u64::from(request.count) > MAX_COUNT {
            return Err(invalid(format!("count: {} is not allowed; allowed: 1 to {MAX_COUNT}", request.count)));
        }
        if request.consumer.is_empty() || request.consumer.len() > engram_memory::buffer::MAX_NAME_BYTES {
            return Err(invalid(format!("consumer: {:?} is not allowed; allowed: 1 to 128 bytes", request.consumer)));
        }
        let mut waits = Waits::new(&self.shared, &request.buffer, request.wait_ms);
        let mut patience = Patience::new(&self.shared);
        let leased = loop {
            match self.lease_once(&request, &selection.definition).await {
                Ok(Ok(leased)) => break leased,
                Ok(Err(waiting)) => {
                    waits.pause(waiting).await?;
                    patience = Patience::new(&self.shared);
                }
                Err(problem) if patience.again(&problem).await => {}
                Err(problem) => return Err(problem),
            }
        };
        let batch = self.items(&selection, &leased).await?;
        Ok(Answer { selection, batch, is_sample: false })
    }

    async fn lease_once(
        &self,
        request: &v1::ConsumeItemsRequest,
        definition: &Definition,
    ) -> Result<Result<Vec<MemoryId>, Waiting>, Problem> {
        let query = v1::ConsumerQuery { name: request.consumer.clone(), count: request.count, now_ms: now_ms() };
        let shares = v1::GetSharesRequest {
            buffer: request.buffer.clone(),
            oldest_version: 0,
            query: Some(Query::Consumer(query)),
            ..v1::GetSharesRequest::default()
        };
        let shares = self.shares(&shares).await?;
        self.check_definition(definition, &shares)?;
        let mut handles: Vec<MemoryId> =
            shares.iter().flat_map(|share| share.handles.iter().copied().map(MemoryId)).collect();
        let partitions = self.shared.partitions();
        sort_by_age(&mut handles, partitions);
        handles.truncate(request.count as usize);
        if handles.is_empty() {
            let text = format!("waiting for items: consumer {:?} has had all", request.consumer);
            return Ok(Err(Waiting::for_items(text)));
        }
        let mut of: Vec<PartitionId> = handles.iter().map(|handle| partition_of(*handle, partitions)).collect();
        of.sort_unstable();
        of.dedup();
        let leased = self.change(of, |partitions_of_worker| {
            let mine = handles.iter().filter(|it| partitions_of_worker.contains(&partition_of(**it, partitions)));
            Change::Lease(v1::LeaseItems {
                buffer: request.buffer.clone(),
                consumer: request.consumer.clone(),
                handles: mine.map(|handle| handle.0).collect(),
                lease_ms: request.lease_ms,
            })
        });
        let response = leased.await?;
        for part in &response.parts {
            match &part.result {
                Some(v1::partition_result::Result::Outcome(outcome)) => {
                    // Another reader was faster, or the item was removed.
                    handles.retain(|handle| !outcome.rejected_ids.contains(&handle.0));
                }
                Some(v1::partition_result::Result::Problem(problem)) if !is_passing(problem) => {
                    return Err(problem.clone());
                }
                // What this partition leased is returned when the lease ends.
                _ => handles.retain(|handle| partition_of(*handle, partitions).0 != part.partition),
            }
        }
        if handles.is_empty() {
            let text = format!("waiting for items: other readers of consumer {:?} were faster", request.consumer);
            return Ok(Err(Waiting::for_items(text)));
        }
        Ok(Ok(handles))
    }
}

impl Request {
    fn is_mine(&self, draw: u64) -> bool {
        match &self.draws {
            Some(draws) => u32::try_from(draw).is_ok_and(|draw| draws.binary_search(&draw).is_ok()),
            None => draw % u64::from(self.world) == u64::from(self.sample.rank),
        }
    }

    /// Items of this member.
    fn own_count(&self) -> usize {
        self.draws.as_ref().map_or(self.sample.count as usize, Vec::len)
    }

    /// Items, slices or groups, of `size` items each, that are not counted yet, over all members.
    fn left(&self, counted: &v1::ItemBatch, size: usize) -> usize {
        let left = (self.sample.count as usize).saturating_sub(counted.handles.len() / size.max(1));
        left * self.world as usize
    }

    /// Returns what a batch that failed has counted; the error if that is nothing, or if the caller has named its draws.
    fn partial(&self, counted: v1::ItemBatch, problem: Problem) -> Result<v1::ItemBatch, Problem> {
        if counted.handles.is_empty() || self.draws.is_some() { Err(problem) } else { Ok(finished(counted)) }
    }
}

/// Returns a batch without what only its plan needs.
fn finished(batch: v1::ItemBatch) -> v1::ItemBatch {
    v1::ItemBatch { draws: Vec::new(), drawn_priorities: Vec::new(), ..batch }
}

/// Merges what the workers drew, in order of the draws.
fn merge(selection: &Selection, batches: &[v1::ItemBatch]) -> Result<v1::ItemBatch, Problem> {
    let mut order: Vec<(u32, (usize, usize))> = Vec::new();
    for (index, batch) in batches.iter().enumerate() {
        if batch.draws.len() != batch.handles.len() || batch.drawn_priorities.len() != batch.handles.len() {
            return Err(Problem::of(
                ProblemKind::Unavailable,
                "a worker returned a batch without the numbers of its draws",
            ));
        }
        order.extend(batch.draws.iter().enumerate().map(|(row, draw)| (*draw, (index, row))));
    }
    order.sort_unstable();
    let order: Vec<(usize, usize)> = order.into_iter().map(|(_, place)| place).collect();
    selection.merge(batches, &order)
}

fn too_few(available: usize, wanted: usize, what: &str) -> Waiting {
    Waiting::for_items(format!("waiting for items: {available} of {wanted} {what}"))
}

/// Returns an exponent in units of 2^-16.
fn exponent(alpha: f64) -> u32 {
    (alpha * 65_536.0 + 0.5).floor() as u32
}
