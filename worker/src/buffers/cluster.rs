//! Calls that need all partitions: this worker asks each primary, itself included, and repeats the call when primaries change.

use super::Buffers;
use super::messages::rows::{ANSWER_BYTES, Selection};
use crate::shared::Shared;
use crate::write::partition_write::{FORWARD_DEADLINE, forward_problem};
use engram_memory::{MemoryId, Ordinal, PartitionId, partition_of};
use engram_proto::v1::{self, Problem, ProblemKind};
use futures::future::join_all;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{Instant, sleep};

/// How long a call is repeated while primaries change.
const PATIENCE: Duration = Duration::from_secs(8);
/// Pause before a call is repeated, about the time of a map change: another worker announces neither that it serves a partition nor that it is no
/// longer overloaded.
const PAUSE: Duration = Duration::from_millis(20);

/// Whether a call can be repeated, with the next map.
pub(crate) fn is_passing(problem: &Problem) -> bool {
    use ProblemKind::{NotEnoughReplicas, NotPrimary, OutcomeUnknown, Overloaded, Stopping, Unavailable};
    matches!(problem.kind(), NotPrimary | Unavailable | Overloaded | Stopping | OutcomeUnknown | NotEnoughReplicas)
}

/// Decides whether a call is repeated while primaries change.
pub(crate) struct Patience {
    shared: Arc<Shared>,
    deadline: Instant,
}

impl Patience {
    pub(crate) fn new(shared: &Arc<Shared>) -> Self {
        Self { shared: Arc::clone(shared), deadline: Instant::now() + PATIENCE }
    }

    /// Waits a moment and returns true if the call that failed with `problem` is worth another attempt.
    pub(crate) async fn again(&mut self, problem: &Problem) -> bool {
        let again =
            is_passing(problem) && Instant::now() + PAUSE < self.deadline && !self.shared.lifecycle.is_stopping();
        if again {
            sleep(PAUSE).await;
        }
        again
    }
}

impl Buffers {
    /// Returns the primary of a partition by the current map.
    pub(crate) fn primary(&self, partition: PartitionId) -> Result<Ordinal, Problem> {
        let primary = self.shared.membership.view().primary(partition);
        primary.ok_or_else(|| self.shared.not_primary(partition))
    }

    /// Returns the partitions by primary.
    pub(crate) fn owners(
        &self,
        partitions: impl IntoIterator<Item = PartitionId>,
    ) -> Result<BTreeMap<Ordinal, Vec<PartitionId>>, Problem> {
        let mut owners: BTreeMap<Ordinal, Vec<PartitionId>> = BTreeMap::new();
        for partition in partitions {
            owners.entry(self.primary(partition)?).or_default().push(partition);
        }
        Ok(owners)
    }

    pub(crate) fn all_partitions(&self) -> impl Iterator<Item = PartitionId> + use<> {
        (0..self.shared.partitions()).map(PartitionId)
    }

    /// Returns the shares of all partitions, in order of their number.
    pub(crate) async fn shares(&self, request: &v1::GetSharesRequest) -> Result<Vec<v1::BufferShare>, Problem> {
        let mut patience = Patience::new(&self.shared);
        loop {
            match self.shares_once(request).await {
                Err(problem) if patience.again(&problem).await => {}
                other => return other,
            }
        }
    }

    async fn shares_once(&self, request: &v1::GetSharesRequest) -> Result<Vec<v1::BufferShare>, Problem> {
        let owners = self.owners(self.all_partitions())?;
        let calls = owners.into_iter().map(|(owner, partitions)| self.shares_of(owner, partitions, request));
        let mut shares: Vec<v1::BufferShare> = Vec::new();
        for part in join_all(calls).await {
            shares.extend(part?);
        }
        shares.sort_unstable_by_key(|share| share.partition);
        Ok(shares)
    }

    /// Returns the shares of partitions of one worker, in as many responses as they need.
    async fn shares_of(
        &self,
        owner: Ordinal,
        mut partitions: Vec<PartitionId>,
        request: &v1::GetSharesRequest,
    ) -> Result<Vec<v1::BufferShare>, Problem> {
        let mut shares: Vec<v1::BufferShare> = Vec::with_capacity(partitions.len());
        while !partitions.is_empty() {
            let requested = partitions.len();
            let partitions_of = partitions.iter().map(|partition| partition.0).collect();
            let request = v1::GetSharesRequest { partitions: partitions_of, ..request.clone() };
            let part = if owner == self.shared.ordinal() {
                self.local_shares(request).await?
            } else {
                let mut worker = self.shared.client.worker(owner)?;
                let request = self.shared.client.request(request, FORWARD_DEADLINE);
                let call =
                    async { worker.buffers().get_shares(request).await.map_err(|status| forward_problem(&status)) };
                self.shared.while_primary(owner, &partitions, call).await?.into_inner().shares
            };
            partitions.retain(|partition| part.iter().all(|share| share.partition != partition.0));
            if partitions.len() == requested {
                return Err(Problem::of(ProblemKind::Unavailable, format!("worker {owner} returned no share")));
            }
            shares.extend(part);
        }
        Ok(shares)
    }

    /// Lets primaries draw planned items; returns one batch per worker, and the problem of the first worker that failed.
    pub(crate) async fn draws(
        &self,
        selection: &Selection,
        request: &v1::DrawItemsRequest,
    ) -> Result<(Vec<v1::ItemBatch>, Option<Problem>), Problem> {
        let mut by_owner: BTreeMap<Ordinal, Vec<v1::PartitionDraws>> = BTreeMap::new();
        for plan in &request.partitions {
            by_owner.entry(self.primary(PartitionId(plan.partition))?).or_default().push(plan.clone());
        }
        // Items that are used up cannot be read later, so their share is larger.
        let most = if selection.definition.spec.max_reuse > 0 { 2 * ANSWER_BYTES } else { ANSWER_BYTES };
        let max_bytes = (most / by_owner.len().max(1)) as u64;
        let calls = by_owner.into_iter().map(|(owner, plans)| {
            let partitions: Vec<PartitionId> = plans.iter().map(|plan| PartitionId(plan.partition)).collect();
            let request = v1::DrawItemsRequest { partitions: plans, max_bytes, ..request.clone() };
            async move {
                if owner == self.shared.ordinal() {
                    return self.local_draws(request).await;
                }
                let mut worker = self.shared.client.worker(owner)?;
                let request = self.shared.client.request(request, FORWARD_DEADLINE);
                let call = async {
                    let stream = worker.buffers().draw_items(request).await;
                    collect(stream).await
                };
                selection.join(self.shared.while_primary(owner, &partitions, call).await?)
            }
        });
        let (mut batches, mut failed) = (Vec::new(), None);
        for drawn in join_all(calls).await {
            match drawn {
                Ok(batch) => batches.push(batch),
                Err(problem) => failed = failed.or(Some(problem)),
            }
        }
        Ok((batches, failed))
    }

    /// Returns items in the order of the handles, and the handles of missing ones.
    pub(crate) async fn items(&self, selection: &Selection, handles: &[MemoryId]) -> Result<v1::ItemBatch, Problem> {
        let mut patience = Patience::new(&self.shared);
        loop {
            match self.items_once(selection, handles).await {
                Err(problem) if patience.again(&problem).await => {}
                other => return other,
            }
        }
    }

    async fn items_once(&self, selection: &Selection, handles: &[MemoryId]) -> Result<v1::ItemBatch, Problem> {
        let partitions = self.shared.partitions();
        let mut by_owner: BTreeMap<Ordinal, Vec<usize>> = BTreeMap::new();
        for (row, handle) in handles.iter().enumerate() {
            by_owner.entry(self.primary(partition_of(*handle, partitions))?).or_default().push(row);
        }
        let request = |rows: &[usize]| v1::GetItemsRequest {
            buffer: selection.definition.spec.name.clone(),
            handles: rows.iter().map(|row| handles[*row].0).collect(),
            fields: selection.names(),
            without_fields: selection.names().is_empty(),
            max_bytes: (ANSWER_BYTES / by_owner.len()) as u64,
        };
        let calls = by_owner.iter().map(|(&owner, rows)| {
            let request = request(rows);
            let mut of: Vec<PartitionId> = rows.iter().map(|row| partition_of(handles[*row], partitions)).collect();
            of.dedup();
            async move {
                if owner == self.shared.ordinal() {
                    return self.local_items(request).await;
                }
                let mut worker = self.shared.client.worker(owner)?;
                let request = self.shared.client.request(request, FORWARD_DEADLINE);
                let call = async {
                    let stream = worker.buffers().get_items(request).await;
                    collect(stream).await
                };
                selection.join(self.shared.while_primary(owner, &of, call).await?)
            }
        });
        let mut batches: Vec<v1::ItemBatch> = join_all(calls).await.into_iter().collect::<Result<_, Problem>>()?;
        if batches.len() == 1 {
            // It is in the order of the handles.
            return Ok(batches.swap_remove(0));
        }
        let mut order: Vec<(usize, (usize, usize))> = Vec::with_capacity(handles.len());
        let mut missing: Vec<u64> = Vec::new();
        for (index, (batch, rows)) in batches.iter().zip(by_owner.values()).enumerate() {
            let mut found = 0;
            for &row in rows {
                if batch.handles.get(found) == Some(&handles[row].0) {
                    order.push((row, (index, found)));
                    found += 1;
                } else {
                    missing.push(handles[row].0);
                }
            }
        }
        order.sort_unstable_by_key(|(row, _)| *row);
        let order: Vec<(usize, usize)> = order.into_iter().map(|(_, place)| place).collect();
        Ok(v1::ItemBatch { missing, ..selection.merge(&batches, &order)? })
    }

    /// Sends a change of buffers to the primaries of these partitions; `part` limits it to those of one worker.
    pub(crate) async fn change(
        &self,
        partitions: Vec<PartitionId>,
        change: impl Fn(&[PartitionId]) -> v1::change_buffer_request::Change,
    ) -> Result<v1::WriteResponse, Problem> {
        let calls = self.owners(partitions)?.into_iter().map(|(owner, partitions)| {
            let change = Some(change(&partitions));
            let request = v1::ChangeBufferRequest { partitions: partitions.iter().map(|it| it.0).collect(), change };
            async move {
                if owner == self.shared.ordinal() {
                    return self.local_change(request).await;
                }
                let mut worker = self.shared.client.worker(owner)?;
                let request = self.shared.client.request(request, FORWARD_DEADLINE);
                let call =
                    async { worker.buffers().change_buffer(request).await.map_err(|status| forward_problem(&status)) };
                Ok(self.shared.while_primary(owner, &partitions, call).await?.into_inner())
            }
        });
        let mut response = v1::WriteResponse::default();
        for part in join_all(calls).await {
            response.parts.extend(part?.parts);
        }
        Ok(response)
    }
}

/// Reads a stream of items to its end.
async fn collect(
    stream: Result<tonic::Response<tonic::Streaming<v1::ItemBatch>>, tonic::Status>,
) -> Result<Vec<v1::ItemBatch>, Problem> {
    let mut stream = stream.map_err(|status| forward_problem(&status))?.into_inner();
    let mut messages = Vec::new();
    while let Some(message) = stream.message().await.map_err(|status| forward_problem(&status))? {
        messages.push(message);
    }
    Ok(messages)
}
