//! Parts of write requests, whatever their kind: checked, turned into records, or passed on.

use crate::shared::Shared;
use engram_client::Client;
use engram_memory::{Command, Ordinal, PartitionId, Settings};
use engram_proto::v1::{self, Problem, ProblemKind};
use engram_proto::{columns, split};
use std::time::Duration;
use tonic::Status;

/// How long an owner may take for what is passed on to it.
pub(crate) const FORWARD_DEADLINE: Duration = Duration::from_secs(10);

/// What is asked of one partition.
#[derive(Debug, Clone)]
pub(crate) enum Body {
    Upsert(v1::UpsertPart),
    Remove(Vec<u64>),
    Reinforce(v1::Updates),
    Decay(f64),
}

/// A part with its partition and number; number 0 = without a session.
#[derive(Debug, Clone)]
pub(crate) struct Part {
    pub(crate) partition: PartitionId,
    pub(crate) seq: u64,
    pub(crate) body: Body,
}

impl Body {
    pub(crate) fn ids(&self) -> &[u64] {
        match self {
            Self::Upsert(part) => &part.ids,
            Self::Remove(ids) => ids,
            Self::Reinforce(updates) => &updates.ids,
            Self::Decay(_) => &[],
        }
    }

    /// Entries that count against the limit of a message.
    pub(crate) fn rows(&self) -> usize {
        match self {
            Self::Reinforce(updates) => updates.ids.len() + updates.groups.len(),
            other => other.ids().len(),
        }
    }

    /// Splits a body that names no partition, checked first so that an error names the index that the sender knows.
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

    /// Checks all of it, keeping nothing.
    pub(crate) fn check(&self, shared: &Shared) -> Result<(), Problem> {
        self.clone().into_command(shared, None).map(drop)
    }

    /// The command of the log; without settings every value is checked all the same.
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

impl Part {
    /// Checks that its ids are of the partition it names.
    pub(crate) fn check_partition(&self, partitions: u32) -> Result<(), Problem> {
        columns::check_partition(self.body.ids(), self.partition, partitions)
            .map_err(|invalid| Problem::of(ProblemKind::WrongPartition, invalid.to_string()).at(self.partition))
    }
}

/// Passes parts of one kind to their owner, once, under the session they came with.
pub(crate) async fn forward(
    shared: &Shared,
    owner: Ordinal,
    session: Option<v1::Session>,
    parts: Vec<Part>,
) -> Result<v1::WriteReply, Problem> {
    let partitions: Vec<PartitionId> = parts.iter().map(|part| part.partition).collect();
    shared.while_owned(owner, &partitions, call(&shared.peers, owner, session, parts)).await
}

async fn call(
    peers: &Client,
    owner: Ordinal,
    session: Option<v1::Session>,
    parts: Vec<Part>,
) -> Result<v1::WriteReply, Problem> {
    let mut service = peers.worker(owner)?;
    let numbered = |part: &Part| (Some(part.partition.0), part.seq);
    let answer = match parts.first().map(|part| &part.body) {
        None => return Ok(v1::WriteReply::default()),
        Some(Body::Upsert(_)) => {
            let parts = parts.into_iter().filter_map(|part| {
                let (partition, seq) = numbered(&part);
                match part.body {
                    Body::Upsert(rows) => Some(v1::UpsertPart { partition, seq, ..rows }),
                    _ => None,
                }
            });
            let message = v1::UpsertRequest { session, parts: parts.collect() };
            service.upsert(peers.request(tokio_stream::iter([message]), FORWARD_DEADLINE)).await
        }
        Some(Body::Remove(_)) => {
            let parts = parts.into_iter().filter_map(|part| {
                let (partition, seq) = numbered(&part);
                match part.body {
                    Body::Remove(ids) => Some(v1::RemovePart { partition, seq, ids }),
                    _ => None,
                }
            });
            let message = v1::RemoveRequest { session, parts: parts.collect() };
            service.remove(peers.request(message, FORWARD_DEADLINE)).await
        }
        Some(Body::Reinforce(_)) => {
            let parts = parts.into_iter().filter_map(|part| {
                let (partition, seq) = numbered(&part);
                match part.body {
                    Body::Reinforce(updates) => Some(v1::ReinforcePart { partition, seq, updates: Some(updates) }),
                    _ => None,
                }
            });
            let message = v1::ReinforceRequest { session, parts: parts.collect() };
            service.apply_reinforcement(peers.request(message, FORWARD_DEADLINE)).await
        }
        Some(&Body::Decay(amount)) => {
            let parts = parts.iter().map(|part| v1::DecayPart { partition: part.partition.0, seq: part.seq });
            let message = v1::DecayRequest { session, amount, parts: parts.collect() };
            service.apply_decay(peers.request(message, FORWARD_DEADLINE)).await
        }
    };
    answer.map(tonic::Response::into_inner).map_err(|status| forwarded(&status))
}

/// What an owner said, or that it did not answer: then nobody knows whether it executed what it was sent.
pub(crate) fn forwarded(status: &Status) -> Problem {
    Problem::from_status(status).unwrap_or_else(|| {
        let text = format!("the owner did not answer: {}", status.message());
        Problem::of(ProblemKind::Unavailable, text)
    })
}
