//! The part of a write request for one partition: checked, converted to a log record, or forwarded.

use crate::shared::Shared;
use engram_client::Client;
use engram_memory::{Command, Ordinal, PartitionId, Settings};
use engram_proto::v1::{self, Problem, ProblemKind};
use engram_proto::{columns, split};
use std::time::Duration;
use tonic::Status;

/// Deadline of a forwarded call.
pub(crate) const FORWARD_DEADLINE: Duration = Duration::from_secs(10);

/// Content of a write to one partition.
#[derive(Debug, Clone)]
pub(crate) enum WriteBody {
    Upsert(v1::UpsertPart),
    Remove(Vec<u64>),
    Reinforce(v1::Updates),
    Decay(f64),
}

/// A write to one partition, with its sequence number; 0 = without a session.
#[derive(Debug, Clone)]
pub(crate) struct PartitionWrite {
    pub(crate) partition: PartitionId,
    pub(crate) seq: u64,
    pub(crate) body: WriteBody,
}

impl WriteBody {
    pub(crate) fn ids(&self) -> &[u64] {
        match self {
            Self::Upsert(part) => &part.ids,
            Self::Remove(ids) => ids,
            Self::Reinforce(updates) => &updates.ids,
            Self::Decay(_) => &[],
        }
    }

    /// Returns the number of rows that count against the message limit.
    pub(crate) fn rows(&self) -> usize {
        match self {
            Self::Reinforce(updates) => updates.ids.len() + updates.groups.len(),
            other => other.ids().len(),
        }
    }

    /// Splits a write without a partition. Checks it first, so that an error names the index in the client's message.
    pub(crate) fn split(self, shared: &Shared) -> Result<Vec<(PartitionId, Self)>, Problem> {
        let partitions = shared.partitions();
        Ok(match self {
            Self::Upsert(part) => {
                columns::check_lengths(&part)?;
                columns::upsert(part.clone(), shared.shape.features)?;
                split::upsert(&part, partitions).into_iter().map(|(at, part)| (at, Self::Upsert(part))).collect()
            }
            Self::Remove(ids) => {
                split::ids(&ids, partitions).into_iter().map(|(at, ids)| (at, Self::Remove(ids))).collect()
            }
            Self::Reinforce(updates) => {
                columns::updates(updates.clone(), 1)?;
                if updates.groups.is_empty() {
                    let parts = split::updates(&updates, partitions);
                    parts.into_iter().map(|(at, updates)| (at, Self::Reinforce(updates))).collect()
                } else {
                    (0..partitions).map(|at| (PartitionId(at), Self::Reinforce(updates.clone()))).collect()
                }
            }
            Self::Decay(amount) => {
                columns::decay("amount", amount)?;
                (0..partitions).map(|at| (PartitionId(at), Self::Decay(amount))).collect()
            }
        })
    }

    /// Checks all values.
    pub(crate) fn check(&self, shared: &Shared) -> Result<(), Problem> {
        self.clone().into_command(shared, None).map(drop)
    }

    /// Converts to a log command. Without settings every value is checked all the same.
    pub(crate) fn into_command(self, shared: &Shared, settings: Option<Settings>) -> Result<Command, Problem> {
        Ok(match self {
            Self::Upsert(part) => Command::Upsert(columns::upsert(part, shared.shape.features)?),
            Self::Remove(ids) => {
                columns::check_rows(ids.len())?;
                Command::Remove { ids: columns::ids(ids) }
            }
            Self::Reinforce(updates) => {
                Command::Reinforce(columns::updates(updates, settings.map_or(1, |settings| settings.rate))?)
            }
            Self::Decay(amount) => Command::Decay { amount: columns::decay("amount", amount)? },
        })
    }
}

impl PartitionWrite {
    /// Checks that its ids belong to its partition.
    pub(crate) fn check_partition(&self, partitions: u32) -> Result<(), Problem> {
        columns::check_partition(self.body.ids(), self.partition, partitions)
            .map_err(|invalid| Problem::of(ProblemKind::WrongPartition, invalid.to_string()).at(self.partition))
    }
}

/// Forwards writes of one kind to their primary, once, under their session.
pub(crate) async fn forward(
    shared: &Shared,
    primary: Ordinal,
    session: Option<v1::Session>,
    parts: Vec<PartitionWrite>,
) -> Result<v1::WriteResponse, Problem> {
    let partitions: Vec<PartitionId> = parts.iter().map(|part| part.partition).collect();
    shared.while_primary(primary, &partitions, call(&shared.peers, primary, session, parts)).await
}

async fn call(
    peers: &Client,
    primary: Ordinal,
    session: Option<v1::Session>,
    parts: Vec<PartitionWrite>,
) -> Result<v1::WriteResponse, Problem> {
    let mut service = peers.worker(primary)?;
    let partition_and_seq = |part: &PartitionWrite| (Some(part.partition.0), part.seq);
    let response = match parts.first().map(|part| &part.body) {
        None => return Ok(v1::WriteResponse::default()),
        Some(WriteBody::Upsert(_)) => {
            let parts = parts.into_iter().filter_map(|part| {
                let (partition, seq) = partition_and_seq(&part);
                match part.body {
                    WriteBody::Upsert(rows) => Some(v1::UpsertPart { partition, seq, ..rows }),
                    _ => None,
                }
            });
            let message = v1::UpsertRequest { session, parts: parts.collect() };
            service.upsert(peers.request(tokio_stream::iter([message]), FORWARD_DEADLINE)).await
        }
        Some(WriteBody::Remove(_)) => {
            let parts = parts.into_iter().filter_map(|part| {
                let (partition, seq) = partition_and_seq(&part);
                match part.body {
                    WriteBody::Remove(ids) => Some(v1::RemovePart { partition, seq, ids }),
                    _ => None,
                }
            });
            let message = v1::RemoveRequest { session, parts: parts.collect() };
            service.remove(peers.request(message, FORWARD_DEADLINE)).await
        }
        Some(WriteBody::Reinforce(_)) => {
            let parts = parts.into_iter().filter_map(|part| {
                let (partition, seq) = partition_and_seq(&part);
                match part.body {
                    WriteBody::Reinforce(updates) => Some(v1::ReinforcePart { partition, seq, updates: Some(updates) }),
                    _ => None,
                }
            });
            let message = v1::ApplyReinforcementRequest { session, parts: parts.collect() };
            service.apply_reinforcement(peers.request(message, FORWARD_DEADLINE)).await
        }
        Some(&WriteBody::Decay(amount)) => {
            let parts = parts.iter().map(|part| v1::DecayPart { partition: part.partition.0, seq: part.seq });
            let message = v1::ApplyDecayRequest { session, amount, parts: parts.collect() };
            service.apply_decay(peers.request(message, FORWARD_DEADLINE)).await
        }
    };
    response.map(tonic::Response::into_inner).map_err(|status| forward_problem(&status))
}

/// Converts the failure of a forwarded call. Without a response it is unknown whether the primary executed it.
pub(crate) fn forward_problem(status: &Status) -> Problem {
    Problem::from_status(status).unwrap_or_else(|| {
        let text = format!("no response from the primary: {}", status.message());
        Problem::of(ProblemKind::Unavailable, text)
    })
}
