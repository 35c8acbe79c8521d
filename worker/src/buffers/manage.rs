//! Creates, describes, lists and drops buffers.

use super::Buffers;
use super::catalog::{Definition, unknown};
use super::cluster::Patience;
use super::local::{first_problem, is_unknown, oldest_handles};
use super::messages::convert::invalid;
use super::messages::rows::Selection;
use super::wait::{Waiting, check_append, limiter};
use crate::service::Plane;
use crate::write::partition_write::{FORWARD_DEADLINE, forward_problem};
use engram_client::BufferSpec;
use engram_kernels::priority::EXPONENT_ONE;
use engram_memory::buffer::Placement;
use engram_memory::{Group, MemoryId, ONE, Ordinal, PartitionId};
use engram_proto::v1::change_buffer_request::Change;
use engram_proto::v1::get_shares_request::Query;
use engram_proto::v1::{self, Problem};
use std::collections::{BTreeMap, BTreeSet};

/// Items of a page of a list: with tags of 255 bytes less than 16 MiB.
const PAGE_ITEMS: u32 = 32_768;
/// Handles of a page from each partition beyond its part: items are appended in pieces of 16.
const PAGE_SLACK: u32 = 64;
/// Partition that gives a buffer its group.
pub(super) const HOME: PartitionId = PartitionId(0);

impl Buffers {
    /// Creates a buffer in all partitions, or accepts an equal one. A call that ended in between can be repeated.
    pub(crate) async fn create(&self, spec: Option<v1::BufferSpec>) -> Result<v1::DescribeBufferResponse, Problem> {
        let spec = BufferSpec::from_wire(spec.unwrap_or_default());
        let spec = spec.and_then(|spec| spec.check().map(|_| spec)).map_err(|error| invalid(error.to_string()))?;
        let most_share = self.check_capacity(&spec)?;
        self.shared.buffers.forget(&spec.name);
        let home = self.share_of(&spec.name, HOME).await?;
        let mut used = Placement::spread(spec.capacity, most_share, self.shared.partitions());
        if !home.definition.is_empty() {
            let existing = Definition::parse(&spec.name, group(&home), &home.definition)?;
            existing.spec.expect(&spec).map_err(|error| invalid(error.to_string()))?;
            used = existing.partitions;
        }
        let wire = v1::BufferSpec { partitions: used, ..spec.to_wire() };
        self.define(vec![HOME], &wire, None).await?;
        let group = self.share_of(&spec.name, HOME).await?.group;
        let rest: Vec<PartitionId> = self.all_partitions().filter(|partition| *partition != HOME).collect();
        self.define(rest, &wire, Some(group)).await?;
        self.describe(&spec.name).await
    }

    /// Checks that the items fit into the cluster, whose capacity counts memories and items; returns how many fit into a partition.
    fn check_capacity(&self, spec: &BufferSpec) -> Result<u64, Problem> {
        let settings = self.shared.served().first().and_then(|it| self.shared.engine.served_settings(*it));
        let Some(settings) = settings else { return Ok(u64::MAX) };
        let most = settings.limit.saturating_mul(self.shared.partitions().into());
        if spec.capacity <= most {
            return Ok(settings.limit);
        }
        let text = format!(
            "capacity: {} is not allowed; allowed: at most the capacity of the cluster ({most})",
            spec.capacity
        );
        Err(invalid(text))
    }

    async fn define(
        &self,
        partitions: Vec<PartitionId>,
        spec: &v1::BufferSpec,
        group: Option<u32>,
    ) -> Result<(), Problem> {
        if partitions.is_empty() {
            return Ok(());
        }
        let define = v1::DefineBuffer { spec: Some(spec.clone()), group };
        let mut patience = Patience::new(&self.shared);
        loop {
            let defined = self.change(partitions.clone(), |_| Change::Define(define.clone())).await;
            match defined.and_then(|response| first_problem(&response).map_or(Ok(()), Err)) {
                Err(problem) if patience.again(&problem).await => {}
                other => return other,
            }
        }
    }

    async fn share_of(&self, name: &str, partition: PartitionId) -> Result<v1::BufferShare, Problem> {
        let request = v1::GetSharesRequest { buffer: name.to_owned(), ..v1::GetSharesRequest::default() };
        let shares = self.shares(&request).await?;
        Ok(shares.into_iter().find(|share| share.partition == partition.0).unwrap_or_default())
    }

    /// Returns the definition of a buffer that the primary of its home has.
    pub(super) async fn find_elsewhere(&self, name: &str) -> Result<(Group, Vec<u8>), Problem> {
        let share = self.share_of(name, HOME).await?;
        if share.definition.is_empty() {
            return Err(unknown(name));
        }
        Ok((group(&share), share.definition.to_vec()))
    }

    /// Returns settings and figures of a buffer.
    pub(crate) async fn describe(&self, name: &str) -> Result<v1::DescribeBufferResponse, Problem> {
        let query = Some(Query::Exponent(EXPONENT_ONE));
        let request = v1::GetSharesRequest { buffer: name.to_owned(), query, ..v1::GetSharesRequest::default() };
        let changes = self.shared.buffers.changes();
        let shares = self.shares(&request).await?;
        // A buffer exists once all partitions have it: appends go to any.
        if shares.iter().any(|share| share.definition.is_empty()) {
            return Err(unknown(name));
        }
        let first = shares.first().ok_or_else(|| unknown(name))?;
        let definition = Definition::parse(name, group(first), &first.definition)?;
        let stats = stats(&definition.spec, &shares);
        let response = v1::DescribeBufferResponse {
            spec: Some(definition.spec.to_wire()),
            stats: Some(stats),
            group: first.group,
            partitions: shares.iter().filter(|share| share.share > 0).map(|share| share.partition).collect(),
        };
        self.shared.buffers.insert(name, definition, changes);
        Ok(response)
    }

    pub(crate) async fn list(&self) -> Result<v1::ListBuffersResponse, Problem> {
        let home = self.primary(HOME)?;
        // A worker that is drained, or has lost its disk, does not know what exists.
        if self.plane == Plane::Client && home != self.shared.ordinal() && self.shared.served().is_empty() {
            return self.list_elsewhere(home).await;
        }
        let names = self.shared.engine.read(|store| {
            let names = store.iter().filter_map(|partition| store.ledger(partition));
            names
                .flat_map(|ledger| ledger.buffers.iter().map(|(_, buffer)| buffer.name.clone()))
                .collect::<BTreeSet<_>>()
        });
        let (mut buffers, mut unreadable) = (Vec::new(), Vec::new());
        for name in names.await? {
            match self.describe(&name).await {
                Ok(described) => buffers.push(described),
                Err(problem) if problem.kind() == v1::ProblemKind::DataCorruption => {
                    unreadable.push(v1::DeclarationProblem { buffer: name, problem: problem.message });
                }
                // It is being created or dropped.
                Err(problem) if is_unknown(&problem) => {}
                Err(problem) => return Err(problem),
            }
        }
        let mut problems = self.declaration_problems(&buffers);
        problems.retain(|problem| unreadable.iter().all(|other| other.buffer != problem.buffer));
        problems.append(&mut unreadable);
        Ok(v1::ListBuffersResponse { buffers, problems })
    }

    async fn list_elsewhere(&self, owner: Ordinal) -> Result<v1::ListBuffersResponse, Problem> {
        let mut worker = self.shared.client.worker(owner)?;
        let request = self.shared.client.request(v1::ListBuffersRequest {}, FORWARD_DEADLINE);
        let call = async { worker.buffers().list_buffers(request).await.map_err(|status| forward_problem(&status)) };
        Ok(self.shared.while_primary(owner, &[HOME], call).await?.into_inner())
    }

    /// Removes a buffer from all partitions; the one that gave it its group is last, so that a repeated call finds what is left.
    pub(crate) async fn drop_buffer(&self, name: &str) -> Result<v1::DropBufferResponse, Problem> {
        let request = v1::GetSharesRequest { buffer: name.to_owned(), ..v1::GetSharesRequest::default() };
        let shares = self.shares(&request).await?;
        let defined = |share: &&v1::BufferShare| !share.definition.is_empty();
        let partitions: Vec<PartitionId> =
            shares.iter().filter(defined).map(|share| PartitionId(share.partition)).collect();
        if partitions.is_empty() {
            return Err(unknown(name));
        }
        let items = shares.iter().map(|share| share.items).sum();
        let (home, rest): (Vec<PartitionId>, Vec<PartitionId>) = partitions.into_iter().partition(|it| *it == HOME);
        for partitions in [rest, home] {
            self.drop_from(&partitions, name).await?;
        }
        self.shared.buffers.forget(name);
        Ok(v1::DropBufferResponse { items })
    }

    async fn drop_from(&self, partitions: &[PartitionId], name: &str) -> Result<(), Problem> {
        let mut patience = Patience::new(&self.shared);
        loop {
            let dropped = self.change(partitions.to_vec(), |_| Change::Drop(name.to_owned())).await;
            let problem = match dropped {
                Ok(response) => first_problem(&response),
                Err(problem) => Some(problem),
            };
            match problem.filter(|problem| !is_unknown(problem)) {
                None => return Ok(()),
                Some(problem) if patience.again(&problem).await => {}
                Some(problem) => return Err(problem),
            }
        }
    }

    /// Returns the items in partitions served here, by buffer, for the metrics page.
    pub(crate) async fn count_items(&self) -> Result<Vec<(String, u64)>, Problem> {
        let served = self.shared.served();
        let counts = self.shared.engine.read(move |store| {
            let mut counts: BTreeMap<String, u64> = BTreeMap::new();
            for ledger in served.iter().filter_map(|partition| store.ledger(*partition)) {
                for (_, buffer) in ledger.buffers.iter() {
                    let items = buffer.counts.inserted.saturating_sub(buffer.counts.deleted);
                    *counts.entry(buffer.name.clone()).or_default() += items;
                }
            }
            counts.into_iter().collect::<Vec<_>>()
        });
        counts.await
    }

    /// Returns a page of handles, versions and tags of items, oldest first.
    pub(crate) async fn list_items(&self, request: v1::ListItemsRequest) -> Result<Vec<v1::ItemBatch>, Problem> {
        let definition = self.definition(&request.buffer).await?;
        let limit = if request.limit == 0 { PAGE_ITEMS } else { request.limit.min(PAGE_ITEMS) };
        // With a tag, a page is what was read, however few have it.
        let count = if request.tag.is_some() { PAGE_ITEMS } else { limit };
        let partitions = self.shared.partitions();
        let used = if definition.partitions == 0 { partitions } else { definition.partitions };
        // Partitions have about as many items of a page each.
        let most = (count.div_ceil(used) * 5 / 4 + PAGE_SLACK).min(count);
        let (query, after) = (Some(Query::Oldest(most)), request.after);
        let shares = v1::GetSharesRequest { buffer: request.buffer, query, after, ..v1::GetSharesRequest::default() };
        let (mut handles, more) = oldest_handles(&self.shares(&shares).await?, most, partitions);
        let is_last = !more && handles.len() <= count as usize;
        handles.truncate(count as usize);
        let mut more = handles.last().filter(|_| !is_last).map(|handle: &MemoryId| handle.0);
        let selection = Selection::new(definition, &[], true)?;
        let mut batch = self.items(&selection, &handles).await?;
        batch.missing.clear();
        if let Some(tag) = request.tag {
            let mut order: Vec<(usize, usize)> =
                (0..batch.handles.len()).filter(|row| batch.tags[*row] == tag).map(|row| (0, row)).collect();
            if order.len() > limit as usize {
                order.truncate(limit as usize);
                more = order.last().map(|(_, row)| batch.handles[*row]);
            }
            batch = selection.merge(std::slice::from_ref(&batch), &order)?;
        }
        let mut messages = selection.cut(batch);
        messages[0].more_after = more;
        Ok(messages)
    }
}

fn group(share: &v1::BufferShare) -> Group {
    Group(share.group as u8)
}

fn stats(spec: &BufferSpec, shares: &[v1::BufferShare]) -> v1::BufferStats {
    let sum = |of: fn(&v1::BufferShare) -> u64| shares.iter().map(of).sum::<u64>();
    let mut consumers: BTreeMap<&str, u64> = BTreeMap::new();
    for consumer in shares.iter().flat_map(|share| &share.consumers) {
        *consumers.entry(&consumer.name).or_default() += consumer.leased;
    }
    let limiter = limiter(spec, shares);
    let reason = |wait: Option<Waiting>| wait.map_or_else(String::new, |wait| wait.text);
    let sample_waits = limiter.as_ref().and_then(|limiter| limiter.sample(1).err()).map(Waiting::from);
    let is_empty = sum(|share| share.items) == 0;
    let empty = || is_empty.then(|| Waiting::for_items("waiting for items: the buffer is empty".into()));
    let consumer = |(name, leased): (&str, u64)| v1::ConsumerStats { name: name.to_owned(), leased };
    v1::BufferStats {
        items: sum(|share| share.items),
        priority_sum: sum(|share| share.total) as f64 / f64::from(ONE) * spec.max_priority,
        appended: sum(|share| share.appended),
        sampled: sum(|share| share.sampled),
        deleted: sum(|share| share.deleted),
        consumers: consumers.into_iter().map(consumer).collect(),
        limiter_cursor: limiter.as_ref().map(engram_replay::limiter::RateLimiter::cursor),
        append_waits: reason(check_append(spec, shares).err()),
        sample_waits: reason(sample_waits.or_else(empty)),
    }
}
