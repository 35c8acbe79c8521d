//! Bounded-staleness reads: served by any replica that lags at most as much as the caller allows.
//!
//! A replica requests its primary's position and remembers the request time by its own clock. The primary responds while it
//! holds its read leases, so a deposed primary never responds. Once the reported record is applied, the replica holds everything
//! acknowledged before the request: it lags at most by the time since then, whatever happens to the primary. State only moves
//! forward, so a known bound stays true in any role; a primary with its leases does not lag. Requests are sent only for reads,
//! and reads with loose bounds share a response.
//!
//! Lag is counted until the read arrives, so a bound of 0 takes a round trip per read. A damaged replica, or one that waits for a
//! state transfer, serves no reads. The clock assumptions are those of leases.

use super::Replication;
use crate::Partitions;
use crate::peer::Message;
use crate::state::State;
use engram_memory::{Lsn, Member, PartitionId, Term};
use std::collections::{BTreeMap, VecDeque};

/// Timeout of a read in milliseconds: some round trips. The caller then tries another replica.
const READ_TIMEOUT_MS: u64 = 150;
/// Milliseconds after which an unanswered request is repeated.
const RETRY_MS: u64 = 50;
/// Most responses of one partition that wait for their record to be applied.
const MAX_REPORTED: usize = 8;

/// Position of a replica that was read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReplicaPosition {
    /// Partition.
    pub partition: PartitionId,
    /// Term of the last applied record.
    pub term: Term,
    /// LSN of the last applied record.
    pub lsn: Lsn,
    /// Everything acknowledged this many milliseconds before the read arrived is applied.
    pub lag_ms: u64,
}

pub(crate) type ReadCallback = Box<dyn FnOnce(&mut Partitions, Vec<ReplicaPosition>) + Send>;

/// Waiting reads, and the freshness of the replicas here.
#[derive(Default)]
pub(crate) struct StaleReads {
    reads: Vec<PendingRead>,
    freshness: BTreeMap<PartitionId, Freshness>,
}

struct PendingRead {
    partitions: Vec<PartitionId>,
    max_lag_ms: u64,
    since_ms: u64,
    done: ReadCallback,
}

#[derive(Default)]
struct Freshness {
    /// Everything acknowledged before this moment is applied.
    complete_ms: Option<u64>,
    /// Later moments that hold once these records are applied.
    reported: VecDeque<(Lsn, u64)>,
    queried_ms: Option<u64>,
}

impl Replication {
    /// Reads those of `partitions` whose replica here lags at most `max_lag_ms` behind this call. `done` sees only these and gets
    /// their positions.
    pub(crate) fn read_replicas(&mut self, partitions: Vec<PartitionId>, max_lag_ms: u64, done: ReadCallback) {
        let since_ms = self.context.now_ms();
        self.stale_reads.reads.push(PendingRead { partitions, max_lag_ms, since_ms, done });
    }

    /// Reports the position of this primary to a replica, if its leases are valid.
    pub(crate) fn receive_position_query(
        &mut self,
        state: &State,
        partition: PartitionId,
        from: Member,
        requested_ms: u64,
    ) {
        let serving = state.of(partition).replica().serving_term();
        if let Some(term) = serving.filter(|_| self.is_readable(state, partition)) {
            let lsn = state.of(partition).applied().0;
            self.send(from.ordinal, partition, Message::Position { term, lsn, requested_ms });
        }
    }

    /// Processes a position reported by a primary.
    pub(crate) fn receive_position(
        &mut self,
        state: &State,
        partition: PartitionId,
        from: Member,
        (term, lsn, requested_ms): (Term, Lsn, u64),
    ) {
        let replica = state.of(partition).replica();
        let freshness = self.stale_reads.freshness.entry(partition).or_default();
        let is_expected = freshness.queried_ms.is_some_and(|queried_ms| requested_ms <= queried_ms);
        if is_expected && replica.follows(from) && replica.promised() == term && freshness.reported.len() < MAX_REPORTED
        {
            freshness.reported.push_back((lsn, requested_ms));
        }
    }

    /// Completes the reads whose replicas are fresh enough, or whose timeout has passed.
    pub(crate) fn complete_stale_reads(&mut self, state: &mut State) {
        let now_ms = self.context.now_ms();
        for read in std::mem::take(&mut self.stale_reads.reads) {
            let mut positions = Vec::new();
            let mut is_waiting = false;
            for partition in &read.partitions {
                let is_complete = has_complete_prefix(state, *partition);
                match self.complete_ms(state, *partition, now_ms).filter(|_| is_complete) {
                    Some(complete_ms) if complete_ms.saturating_add(read.max_lag_ms) >= read.since_ms => {
                        let lag_ms = read.since_ms.saturating_sub(complete_ms);
                        let (lsn, term) = state.of(*partition).applied();
                        positions.push(ReplicaPosition { partition: *partition, term, lsn, lag_ms });
                    }
                    _ if is_complete => is_waiting |= self.query_position(state, *partition, &read, now_ms),
                    _ => {}
                }
            }
            if is_waiting && now_ms.saturating_sub(read.since_ms) < READ_TIMEOUT_MS {
                self.stale_reads.reads.push(read);
            } else {
                let visible: Vec<PartitionId> = positions.iter().map(|position| position.partition).collect();
                state.partitions_mut().with_visible(&visible, |partitions| (read.done)(partitions, positions));
            }
        }
    }

    /// Returns the latest known moment before which everything acknowledged is applied here.
    fn complete_ms(&mut self, state: &State, partition: PartitionId, now_ms: u64) -> Option<u64> {
        let is_primary = self.is_readable(state, partition);
        let applied = state.get(partition)?.applied().0;
        let freshness = self.stale_reads.freshness.entry(partition).or_default();
        while let Some((_, requested_ms)) = freshness.reported.pop_front_if(|(lsn, _)| *lsn <= applied) {
            freshness.complete_ms = freshness.complete_ms.max(Some(requested_ms));
        }
        if is_primary {
            freshness.complete_ms = Some(now_ms);
        }
        freshness.complete_ms
    }

    /// Requests the primary's position unless a sufficient response is pending. Returns whether there is a primary to ask.
    fn query_position(&mut self, state: &State, partition: PartitionId, read: &PendingRead, now_ms: u64) -> bool {
        let primary = state.of(partition).replica().entry().map(|entry| entry.primary);
        let Some(primary) = primary.filter(|primary| *primary != self.context.options.replication.ordinal) else {
            return false;
        };
        let freshness = self.stale_reads.freshness.entry(partition).or_default();
        let suffices = |queried_ms: u64| {
            queried_ms.saturating_add(read.max_lag_ms) >= read.since_ms && now_ms < queried_ms + RETRY_MS
        };
        if !freshness.queried_ms.is_some_and(suffices) {
            freshness.queried_ms = Some(now_ms);
            self.send(primary, partition, Message::PositionRequest { requested_ms: now_ms });
        }
        true
    }
}

/// Whether the replica here holds a complete prefix of its primary's state.
fn has_complete_prefix(state: &State, partition: PartitionId) -> bool {
    state.get(partition).is_some_and(|state| state.corrupt().is_none() && !state.replica().needs_snapshot())
}
