//! What a request does that meets a partition while it changes hands: it waits here for a moment, or stops waiting elsewhere.
//!
//! Whoever is refused asks again, later than needed and from a budget of retries; so a worker that the map names keeps requests
//! until it serves, which takes it two writes to a disk, and one that passed a request on takes it back from an owner that hangs as
//! soon as the map names another.

use crate::shared::Shared;
use engram_memory::{Ordinal, PartitionId};
use engram_proto::v1::{Problem, ProblemKind};
use std::time::Duration;
use tokio::time::{sleep, timeout};

/// How long a request waits for its partitions: as long as a lease that the primary before may hold.
const HOLD: Duration = Duration::from_millis(1_100);
/// Between looks; the store serves without telling anybody.
const LOOK: Duration = Duration::from_millis(5);
/// Requests that may wait, each with its rows.
pub(crate) const HELD: usize = 128;

impl Shared {
    /// Waits until each of these partitions is served here, or is not this worker's by the map.
    pub(crate) async fn taken_over(&self, partitions: impl Iterator<Item = PartitionId> + Clone) {
        let waits = || {
            let mut partitions = partitions.clone();
            partitions.any(|partition| self.is_coming(partition))
        };
        if !waits() || self.is_stopping() {
            return;
        }
        // One more that waits is one too many: it is refused, and comes again.
        let Ok(_place) = self.held.try_acquire() else { return };
        let served = async {
            while waits() {
                sleep(LOOK).await;
            }
        };
        let mut stopping = self.stopping.subscribe();
        tokio::select! {
            _ = timeout(HOLD, served) => {}
            _ = stopping.wait_for(|stopping| *stopping) => {}
        }
    }

    /// Whether the map gives a partition to this very process, which does not serve it yet.
    fn is_coming(&self, partition: PartitionId) -> bool {
        // The usual case first, which takes no lock.
        if self.engine.position(partition).is_some() {
            return false;
        }
        let view = self.view.borrow();
        let entry = view.map.as_ref().and_then(|map| map.partitions.get(partition.0 as usize));
        entry.is_some_and(|entry| entry.served_by(&self.member))
    }

    /// Waits for a call that was passed on to `owner`, until the map gives one of its partitions to another.
    pub(crate) async fn while_owned<T>(
        &self,
        owner: Ordinal,
        partitions: &[PartitionId],
        call: impl Future<Output = Result<T, Problem>>,
    ) -> Result<T, Problem> {
        // The client is told of a map a moment later than the view by which the call was passed on.
        let version = self.view.borrow().version();
        tokio::select! {
            biased;
            answer = call => answer,
            () = self.peers.until_moved(version, owner, partitions) => {
                // It may have executed it all the same: under its number it is executed once.
                let text = format!("worker {owner} did not answer, and another has taken over from it");
                Err(Problem::of(ProblemKind::Unavailable, text))
            }
        }
    }
}

#[cfg(test)]
mod tests;
