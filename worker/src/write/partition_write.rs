//! The part of a write request for one partition: checked, converted to a log record, or forwarded.

use crate::buffers::{self, Definitions};
use crate::shared::Shared;
use engram_client::Client;
use engram_memory::{Command, Ordinal, PartitionId, Settings};
use engram_proto::v1::{self, Problem, ProblemKind};
use engram_proto::{columns, split};
use engram_wire::{PartitionWrite, WriteBody, WriteRequest};
use std::time::Duration;
use tonic::Status;

/// Deadline of a forwarded call.
pub(crate) const FORWARD_DEADLINE: Duration = Duration::from_secs(10);

/// What a worker does with the content of a write.
pub(crate) trait WriteBodyExt: Sized {
    /// Splits a write without a partition. Checks it first, so that an error names the index in the client's message.
    fn split(self, shared: &Shared) -> Result<Vec<(PartitionId, Self)>, Problem>;

    /// Checks all values.
    fn check(&self, shared: &Shared, buffers: &Definitions) -> Result<(), Problem>;

    /// Converts to a log command. Without settings every value is checked all the same.
    fn into_command(
        self,
        shared: &Shared,
        buffers: &Definitions,
        settings: Option<Settings>,
    ) -> Result<Command, Problem>;
}

impl WriteBodyExt for WriteBody {
    fn split(self, shared: &Shared) -> Result<Vec<(PartitionId, Self)>, Problem> {
        let partitions = shared.partitions();
        Ok(match self {
            Self::Upsert(part) => {
                columns::check_lengths(&part)?;
                columns::upsert(part.clone(), shared.setup.shape.features)?;
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
            // Every part names its partition.
            Self::Items(part) => vec![(PartitionId(part.partition), Self::Items(part))],
        })
    }

    fn check(&self, shared: &Shared, buffers: &Definitions) -> Result<(), Problem> {
        self.clone().into_command(shared, buffers, None).map(drop)
    }

    fn into_command(
        self,
        shared: &Shared,
        buffers: &Definitions,
        settings: Option<Settings>,
    ) -> Result<Command, Problem> {
        Ok(match self {
            Self::Upsert(part) => Command::Upsert(columns::upsert(part, shared.setup.shape.features)?),
            Self::Remove(ids) => {
                columns::check_rows(ids.len())?;
                Command::Remove { ids: columns::ids(ids) }
            }
            Self::Reinforce(updates) => {
                Command::Reinforce(columns::updates(updates, settings.map_or(1, |settings| settings.rate))?)
            }
            Self::Decay(amount) => Command::Decay { amount: columns::decay("amount", amount)? },
            Self::Items(part) => {
                let definition = buffers.get(&part.buffer).ok_or_else(|| buffers::unknown(&part.buffer))?;
                Command::Buffer(buffers::command(part, definition, shared)?)
            }
        })
    }
}

/// Checks that the ids of a write belong to its partition.
pub(crate) fn check_partition(write: &PartitionWrite, partitions: u32) -> Result<(), Problem> {
    columns::check_partition(write.body.ids(), write.partition, partitions)
        .map_err(|invalid| Problem::of(ProblemKind::WrongPartition, invalid.to_string()).at(write.partition))
}

/// Forwards writes of one kind to their primary, once, under their session.
pub(crate) async fn forward(
    shared: &Shared,
    primary: Ordinal,
    session: Option<v1::Session>,
    parts: Vec<PartitionWrite>,
) -> Result<v1::WriteResponse, Problem> {
    let partitions: Vec<PartitionId> = parts.iter().map(|part| part.partition).collect();
    shared.while_primary(primary, &partitions, call(&shared.client, primary, session, parts)).await
}

async fn call(
    peers: &Client,
    primary: Ordinal,
    session: Option<v1::Session>,
    parts: Vec<PartitionWrite>,
) -> Result<v1::WriteResponse, Problem> {
    let mut service = peers.worker(primary)?;
    let Some(request) = WriteRequest::new(session, parts) else { return Ok(v1::WriteResponse::default()) };
    let response = peers.send_write(&mut service, request, FORWARD_DEADLINE).await;
    response.map(tonic::Response::into_inner).map_err(|status| forward_problem(&status))
}

/// Converts the failure of a forwarded call. Without a response it is unknown whether the primary executed it.
pub(crate) fn forward_problem(status: &Status) -> Problem {
    Problem::from_status(status).unwrap_or_else(|| {
        let text = format!("no response from the primary: {}", status.message());
        Problem::of(ProblemKind::Unavailable, text)
    })
}
