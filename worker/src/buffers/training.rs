//! Calls of training members on this worker: the schema of a buffer, and priorities from errors.

use super::Buffers;
use super::cluster::{Patience, is_passing};
use super::messages::convert::invalid;
use crate::service::Plane;
use crate::shared::Shared;
use engram_client::BufferSpec;
use engram_memory::{MemoryId, partition_of};
use engram_proto::v1::items_part::Change;
use engram_proto::v1::partition_result::Result as PartResult;
use engram_proto::v1::{self, Problem};
use engram_replay::schema::Schema;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Result of an update of priorities.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct PrioritiesChanged {
    pub(crate) changed: u64,
    /// Items that were removed before.
    pub(crate) stale: u64,
}

impl Buffers {
    /// Returns the buffers as this worker uses them itself.
    pub(crate) fn of_cluster(shared: &Arc<Shared>) -> Self {
        Self { shared: Arc::clone(shared), plane: Plane::Client }
    }

    /// Returns schema, capacity and number of items of a buffer.
    pub(crate) async fn contents(&self, name: &str) -> Result<(Schema, u64, u64), Problem> {
        let described = self.describe(name).await?;
        let spec = BufferSpec::from_wire(described.spec.unwrap_or_default());
        let spec = spec.and_then(|spec| spec.check().map(|schema| (schema, spec.capacity)));
        let (schema, capacity) = spec.map_err(|error| invalid(error.to_string()))?;
        Ok((schema, capacity, described.stats.map_or(0, |stats| stats.items)))
    }

    /// Sets priorities of items, each handle once. Repeating it has no further effect, so it needs no session.
    pub(crate) async fn set_priorities(
        &self,
        buffer: &str,
        handles: &[u64],
        priorities: &[f64],
    ) -> Result<PrioritiesChanged, Problem> {
        let mut waiting: BTreeMap<u32, v1::SetPriorities> = BTreeMap::new();
        for (handle, priority) in handles.iter().zip(priorities) {
            let partition = partition_of(MemoryId(*handle), self.shared.partitions());
            let change = waiting.entry(partition.0).or_default();
            change.handles.push(*handle);
            change.priorities.push(*priority);
        }
        let mut result = PrioritiesChanged::default();
        let mut patience = Patience::new(&self.shared);
        while !waiting.is_empty() {
            let refused = self.set_once(buffer, &mut waiting, &mut result).await;
            match refused {
                Some(problem) if is_passing(&problem) && patience.again(&problem).await => {}
                Some(problem) => return Err(problem),
                None if waiting.is_empty() => {}
                None => return Err(Problem::of(v1::ProblemKind::Unavailable, "a partition returned no result")),
            }
        }
        Ok(result)
    }

    /// Sends changes to all partitions; those that were made are removed from `waiting`. Returns the first refusal.
    async fn set_once(
        &self,
        buffer: &str,
        waiting: &mut BTreeMap<u32, v1::SetPriorities>,
        result: &mut PrioritiesChanged,
    ) -> Option<Problem> {
        let part = |(partition, change): (&u32, &v1::SetPriorities)| v1::ItemsPart {
            partition: *partition,
            seq: 0,
            buffer: buffer.to_owned(),
            change: Some(Change::Priorities(change.clone())),
        };
        let parts = waiting.iter().map(part).collect();
        let message = v1::WriteItemsRequest { parts, ..v1::WriteItemsRequest::default() };
        let written = match self.write(message).await {
            Ok(written) => written,
            Err(problem) => return Some(problem),
        };
        let mut refused = None;
        for part in written.parts {
            match part.result {
                Some(PartResult::Outcome(outcome)) => {
                    let count = waiting.remove(&part.partition).map_or(0, |change| change.handles.len() as u64);
                    result.changed += count.saturating_sub(outcome.rejected);
                    result.stale += outcome.rejected;
                }
                Some(PartResult::Problem(problem)) => refused = refused.or(Some(problem)),
                None => {}
            }
        }
        refused
    }
}
