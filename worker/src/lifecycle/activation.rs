//! Requests to a partition whose primary is changing: they wait here for a moment, or stop waiting for another worker.
//!
//! A rejected client retries later than needed, and from a budget of retries. So a worker that the map names keeps requests until
//! it serves, which takes two disk writes, and a forwarding worker abandons a call to an unresponsive primary as soon as the map
//! names another.

use crate::shared::Shared;
use engram_memory::{Ordinal, PartitionId};
use engram_proto::v1::{Problem, ProblemKind};
use std::time::Duration;
use tokio::time::timeout;

/// Maximum wait: the lease that the previous primary may hold.
const MAX_WAIT: Duration = Duration::from_millis(1_100);
/// Maximum number of waiting requests, each with its rows.
pub(crate) const MAX_WAITING: usize = 128;

impl Shared {
    /// Waits until each of these partitions is served here or assigned to another worker.
    pub(crate) async fn wait_until_served(&self, partitions: impl Iterator<Item = PartitionId> + Clone) {
        let is_pending = || {
            let mut partitions = partitions.clone();
            partitions.any(|partition| self.is_activating(partition))
        };
        if !is_pending() || self.lifecycle.is_stopping() {
            return;
        }
        // Beyond the limit a request does not wait: it is rejected and retried.
        let Ok(_permit) = self.limits.waiting().try_acquire() else { return };
        // Subscribed before the check, so no change of the map is missed.
        let mut view = self.membership.subscribe();
        let moved = async { while is_pending() && view.changed().await.is_ok() {} };
        let mut stopping = self.lifecycle.stopping();
        tokio::select! {
            _ = timeout(MAX_WAIT, self.engine.wait_until(|| !is_pending())) => {}
            () = moved => {}
            _ = stopping.wait_for(|stopping| *stopping) => {}
        }
    }

    /// Returns whether the map assigns a partition to this process, which does not serve it yet.
    fn is_activating(&self, partition: PartitionId) -> bool {
        // The common case first, which takes no lock.
        if self.engine.position(partition).is_some() {
            return false;
        }
        let view = self.membership.view();
        let entry = view.map.as_ref().and_then(|map| map.partitions.get(partition.0 as usize));
        entry.is_some_and(|entry| entry.served_by(&self.setup.member))
    }

    /// Waits for a call forwarded to `primary`, until the map assigns one of its partitions to another worker.
    pub(crate) async fn while_primary<T>(
        &self,
        primary: Ordinal,
        partitions: &[PartitionId],
        call: impl Future<Output = Result<T, Problem>>,
    ) -> Result<T, Problem> {
        // The client gets a map slightly later than the view by which the call was forwarded.
        let version = self.membership.view().version();
        tokio::select! {
            biased;
            response = call => response,
            () = self.client.wait_until_moved(version, primary, partitions) => {
                // It may have executed the call; its sequence number makes a retry idempotent.
                let text = format!("worker {primary} did not respond, and another worker is primary now");
                Err(Problem::of(ProblemKind::Unavailable, text))
            }
        }
    }
}

#[cfg(test)]
mod tests;
