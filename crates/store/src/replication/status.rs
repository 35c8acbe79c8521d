//! Status of the replicas of a worker.

use crate::state::State;
use engram_memory::{Lsn, Ordinal, PartitionId, Term};

/// Status of a replica.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReplicaStatus {
    /// Partition.
    pub partition: PartitionId,
    /// `primary`, `activating`, `backup`, `corrupt` or `idle`.
    pub role: &'static str,
    /// Highest promised term.
    pub term: Term,
    /// LSN of the last record in the log.
    pub last: Lsn,
    /// Term of that record.
    pub last_term: Term,
    /// LSN of the last record known to be committed.
    pub commit: Lsn,
    /// LSN of the last applied record.
    pub applied: Lsn,
    /// For a primary: its followers with their acknowledged LSN.
    pub followers: Vec<(Ordinal, Lsn)>,
}

/// Returns the status of every replica.
pub(crate) fn replicas(state: &State) -> Vec<ReplicaStatus> {
    let status = |(partition, state): (PartitionId, &crate::state::PartitionState)| {
        let replica = state.replica();
        let role = match (state.corrupt(), replica.serving_term(), replica.primary_term()) {
            (Some(_), ..) => "corrupt",
            (_, Some(_), _) => "primary",
            (_, _, Some(_)) => "activating",
            _ if state.last() > Lsn(0) => "backup",
            _ => "idle",
        };
        ReplicaStatus {
            partition,
            role,
            term: replica.promised(),
            last: state.last(),
            last_term: replica.history().last().1,
            commit: replica.commit(),
            applied: state.applied().0,
            followers: replica.followers().map(|(ordinal, follower)| (ordinal, follower.acked)).collect(),
        }
    };
    state.iter().map(status).collect()
}
