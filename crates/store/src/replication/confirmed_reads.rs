//! Confirmed reads: linearizable without relying on clocks.
//!
//! A read that arrives at a primary serving term T records the LSN the state must reach, its *index*: everything committed here,
//! and the tail of the log inherited from the previous primary. Then every other member of the maximal in-sync set (that of the
//! map, plus a proposed new member) is queried for its highest promise. The read runs on the applied state once each has
//! responded with T, from the disk named by the map, to a query sent after the read arrived; the index is applied; and this
//! process still serves T.
//!
//! Why nothing is missing that was acknowledged before the read arrived, at moment *m*:
//! - acknowledged at T: committed here, by this process, so at or below the index;
//! - acknowledged at an earlier term: every primary starts from the log of an in-sync member, so it is in the tail. Since this
//!   process has read that T is activated, no entry before T can be activated any more;
//! - acknowledged at a later term: impossible. T is activated, so the primary of the first later activated entry is a member of
//!   T's maximal in-sync set: the map promotes no other. A primary promises its term, in memory at once and on disk, before it
//!   requests activation, and serves after it has read the activation. If it is another member, it responded *after m* that its
//!   highest promise is T, so it serves nothing before m. If it is this process, it would no longer serve T.
//!
//! A member responds on its engine thread, which also processes the map and makes promises: a response follows everything
//! promised before it. Unresponsive members delay a read until the map no longer names them and this process is primary at the
//! next term, where the query is repeated, or until the timeout. A member dropped from the set meanwhile may still respond as a
//! follower: it counts for T, which ends when this process reads the new entry.
//!
//! Queries of one turn share a round, for any number of waiting reads.

use super::Replication;
use crate::Partitions;
use crate::peer::Message;
use crate::state::State;
use engram_memory::{Lsn, Member, Ordinal, PartitionId, StoreId, Term};
use std::collections::BTreeMap;

/// Timeout of a read in milliseconds: a dead member has left the in-sync set by then.
const CONFIRM_TIMEOUT_MS: u64 = 3_000;
/// Milliseconds after which an unanswered query is repeated.
const RETRY_MS: u64 = 200;

/// Why a read was not confirmed and did not run.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ConfirmError {
    /// This worker does not serve the partition, or no longer does.
    #[error("partition {partition} is not served by this worker")]
    NotServed {
        /// Partition.
        partition: PartitionId,
    },
    /// An in-sync member has promised a higher term: another worker is or becomes primary.
    #[error("no longer primary of partition {partition} at term {term}: a replica has promised term {promised}")]
    Deposed {
        /// Partition.
        partition: PartitionId,
        /// Term served here.
        term: Term,
        /// Term promised by the member.
        promised: Term,
    },
    /// Not every in-sync member responded in time.
    #[error("partition {partition} could not be confirmed: no response from workers {unresponsive:?}")]
    NoResponse {
        /// Partition.
        partition: PartitionId,
        /// Ordinals of these members; empty if records in flight were not applied in time.
        unresponsive: Vec<u32>,
    },
}

pub(crate) type ReadCallback = Box<dyn FnOnce(Result<&mut Partitions, ConfirmError>) + Send>;

/// Waiting reads and the responses to queries.
#[derive(Default)]
pub(crate) struct ConfirmedReads {
    reads: Vec<PendingRead>,
    round: u64,
    /// By partition and ordinal: disk, term and round of the newest response.
    responses: BTreeMap<(PartitionId, Ordinal), (StoreId, Term, u64)>,
    /// Highest promise above the queried term.
    refused: BTreeMap<PartitionId, Term>,
    retried_ms: u64,
}

struct PendingRead {
    targets: Vec<ReadTarget>,
    since_ms: u64,
    done: ReadCallback,
}

struct ReadTarget {
    partition: PartitionId,
    query: Option<ConfirmQuery>,
}

#[derive(Clone)]
struct ConfirmQuery {
    term: Term,
    round: u64,
    index: Lsn,
    members: Vec<Member>,
}

impl ConfirmedReads {
    /// Processes a response.
    pub(crate) fn receive(&mut self, partition: PartitionId, from: Member, term: Term, round: u64, promised: Term) {
        if promised > term {
            let refused = self.refused.entry(partition).or_default();
            *refused = promised.max(*refused);
        } else if promised == term {
            let response = self.responses.entry((partition, from.ordinal)).or_insert((from.store, term, round));
            if response.0 != from.store || (response.1, response.2) < (term, round) {
                *response = (from.store, term, round);
            }
        }
    }

    fn has_responded(&self, partition: PartitionId, member: &Member, query: &ConfirmQuery) -> bool {
        self.responses
            .get(&(partition, member.ordinal))
            .is_some_and(|(store, term, round)| *store == member.store && *term == query.term && *round >= query.round)
    }

    fn unresponsive(&self, partition: PartitionId, query: &ConfirmQuery) -> impl Iterator<Item = Ordinal> {
        let unresponsive = query.members.iter().filter(move |member| !self.has_responded(partition, member, query));
        unresponsive.map(|member| member.ordinal)
    }
}

impl Replication {
    /// Reads `partitions`, linearizable without relying on clocks: `done` gets the state in a later turn, once every other in-sync
    /// member has confirmed this process as primary. The head of this module has the proof.
    pub(crate) fn read_confirmed(&mut self, partitions: Vec<PartitionId>, done: ReadCallback) {
        let targets = partitions.into_iter().map(|partition| ReadTarget { partition, query: None }).collect();
        let since_ms = self.context.now_ms();
        self.confirmed_reads.reads.push(PendingRead { targets, since_ms, done });
    }

    /// Responds to a query with the highest promise.
    pub(crate) fn receive_confirm(
        &mut self,
        state: &State,
        partition: PartitionId,
        from: Member,
        (term, round): (Term, u64),
    ) {
        let promised = state.of(partition).replica().promised();
        self.send(from.ordinal, partition, Message::Confirmed { term, round, promised });
    }

    /// Processes a response to a query.
    pub(crate) fn receive_confirmed(
        &mut self,
        partition: PartitionId,
        from: Member,
        (term, round): (Term, u64),
        promised: Term,
    ) {
        self.confirmed_reads.receive(partition, from, term, round, promised);
    }

    /// Sends queries, and completes the reads that are confirmed or failed.
    pub(crate) fn complete_confirmed_reads(&mut self, state: &mut State) {
        if self.confirmed_reads.reads.is_empty() {
            return;
        }
        let now_ms = self.context.now_ms();
        let mut reads = std::mem::take(&mut self.confirmed_reads.reads);
        self.send_queries(state, &mut reads, now_ms);
        for read in reads {
            match self.is_confirmed(state, &read, now_ms) {
                Ok(true) => (read.done)(Ok(state.partitions_mut())),
                Ok(false) => self.confirmed_reads.reads.push(read),
                Err(error) => (read.done)(Err(error)),
            }
        }
    }

    /// Sends one round of queries for new reads, and repeats old ones.
    fn send_queries(&mut self, state: &State, reads: &mut [PendingRead], now_ms: u64) {
        let is_retry = now_ms.saturating_sub(self.confirmed_reads.retried_ms) >= RETRY_MS;
        if is_retry {
            self.confirmed_reads.retried_ms = now_ms;
        }
        self.confirmed_reads.round += 1;
        let mut current: BTreeMap<PartitionId, Option<ConfirmQuery>> = BTreeMap::new();
        let mut queries: BTreeMap<(PartitionId, Ordinal), (Term, u64)> = BTreeMap::new();
        for target in reads.iter_mut().flat_map(|read| &mut read.targets) {
            let partition = target.partition;
            let latest = current.entry(partition).or_insert_with(|| self.current_query(state, partition));
            let new_query =
                latest.as_ref().filter(|latest| target.query.as_ref().is_none_or(|query| query.term != latest.term));
            let is_new = new_query.is_some();
            if is_new {
                target.query = new_query.cloned();
            }
            if let Some(query) = target.query.as_ref().filter(|_| is_new || is_retry) {
                for unresponsive in self.confirmed_reads.unresponsive(partition, query) {
                    let slot = queries.entry((partition, unresponsive)).or_insert((query.term, query.round));
                    *slot = (*slot).max((query.term, query.round));
                }
            }
        }
        for ((partition, to), (term, round)) in queries {
            self.send(to, partition, Message::Confirm { term, round });
        }
    }

    /// Returns what a read arriving now waits for; `None` while the partition is not served.
    fn current_query(&self, state: &State, partition: PartitionId) -> Option<ConfirmQuery> {
        let (term, index, members) = state.get(partition)?.replica().read_confirmation()?;
        Some(ConfirmQuery { term, round: self.confirmed_reads.round, index, members })
    }

    fn is_confirmed(&self, state: &State, read: &PendingRead, now_ms: u64) -> Result<bool, ConfirmError> {
        let mut open = None;
        for ReadTarget { partition, query } in &read.targets {
            let partition = *partition;
            let state = state.get(partition).filter(|state| state.corrupt().is_none());
            let Some(state) = state.filter(|state| state.replica().primary_term().is_some()) else {
                return Err(ConfirmError::NotServed { partition });
            };
            // Activating a new configuration: queried once it serves again.
            let Some(query) = query.as_ref().filter(|query| state.replica().serving_term() == Some(query.term)) else {
                open = Some((partition, Vec::new()));
                continue;
            };
            if let Some(promised) =
                self.confirmed_reads.refused.get(&partition).filter(|promised| **promised > query.term)
            {
                return Err(ConfirmError::Deposed { partition, term: query.term, promised: *promised });
            }
            let unresponsive: Vec<u32> =
                self.confirmed_reads.unresponsive(partition, query).map(|ordinal| ordinal.0).collect();
            if !unresponsive.is_empty() || state.applied().0 < query.index {
                open = Some((partition, unresponsive));
            }
        }
        match open {
            Some((partition, unresponsive)) if now_ms.saturating_sub(read.since_ms) >= CONFIRM_TIMEOUT_MS => {
                Err(ConfirmError::NoResponse { partition, unresponsive })
            }
            open => Ok(open.is_none()),
        }
    }
}
