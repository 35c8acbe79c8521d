//! Writes: validated as a whole, then executed part by part, locally or by the primary.

pub(crate) mod admission;
pub(crate) mod batch;
pub(crate) mod epoch;
pub(crate) mod partition_write;

use crate::buffers::Definitions;
use crate::engine::{part_reply, write_problem};
use crate::service::{Memories, Plane};
use crate::write::partition_write::{FORWARD_DEADLINE, WriteBodyExt as _, check_partition, forward, forward_problem};
use engram_memory::{MAX_IDS, Ordinal, PartitionId, Record, Request, SessionId};
use engram_proto::v1::{self, Problem, ProblemKind};
use engram_store::{SessionClock, WriteError};
use engram_wire::{PartitionWrite, WriteBody};
use futures::future::join_all;
use std::collections::BTreeMap;

/// A part of a request: with partition and sequence number under a session, without both otherwise.
pub(crate) struct WritePart {
    pub(crate) partition: Option<u32>,
    pub(crate) seq: u64,
    pub(crate) body: WriteBody,
}

impl Memories {
    /// Executes one request. It is rejected as a whole, or answered part by part. Changes of items need the definitions of their buffers.
    pub(crate) async fn write(
        &self,
        session: Option<v1::Session>,
        parts: Vec<WritePart>,
        buffers: &Definitions,
    ) -> Result<v1::WriteResponse, Problem> {
        let shared = &self.shared;
        let rows: usize = parts.iter().map(|part| part.body.rows()).sum();
        if rows > MAX_IDS {
            return Err(Problem::of(
                ProblemKind::Invalid,
                format!("ids: {rows} in one message is not allowed; allowed: at most 65,536"),
            ));
        }
        let parts = match session {
            Some(session) => {
                check_session(session, self.shared.engine.session_clock())?;
                self.numbered(parts)?
            }
            None => self.unnumbered(parts)?,
        };
        shared.wait_until_served(parts.iter().map(|part| part.partition)).await;
        // Nothing is executed before everything is validated.
        let mut local = Vec::new();
        let mut remote: BTreeMap<Ordinal, Vec<PartitionWrite>> = BTreeMap::new();
        let mut replies = Vec::with_capacity(parts.len());
        for part in parts {
            let (partition, seq) = (part.partition, part.seq);
            match (shared.engine.served_settings(partition), self.route(partition)) {
                (Some(settings), _) => {
                    let command = part.body.into_command(shared, buffers, Some(settings))?;
                    let request = session.map(|session| Request { session: SessionId::from(session), seq });
                    local.push(((partition, Record { request, command }), seq));
                }
                (None, Some(primary)) => {
                    part.body.check(shared, buffers)?;
                    remote.entry(primary).or_default().push(part);
                }
                (None, None) => {
                    part.body.check(shared, buffers)?;
                    replies.push(part_reply(partition, seq, Err(shared.not_primary(partition))));
                }
            }
        }
        let (local, remote) = tokio::join!(self.execute(local), self.forward_parts(session, remote));
        replies.extend(local?);
        replies.extend(remote);
        Ok(v1::WriteResponse { parts: replies })
    }

    /// Returns the worker to forward a partition to; `None` if it is this one, or the request was forwarded already.
    pub(crate) fn route(&self, partition: PartitionId) -> Option<Ordinal> {
        let primary = self.shared.membership.view().primary(partition)?;
        (self.plane == Plane::Client && primary != self.shared.ordinal()).then_some(primary)
    }

    async fn execute(&self, records: Vec<((PartitionId, Record), u64)>) -> Result<Vec<v1::PartitionResult>, Problem> {
        if records.is_empty() {
            return Ok(Vec::new());
        }
        let slots: Vec<(PartitionId, u64)> = records.iter().map(|((partition, _), seq)| (*partition, *seq)).collect();
        let results = self.shared.engine.write(records.into_iter().map(|(record, _)| record).collect()).await?;
        let mut updates = 0;
        let replies = slots.into_iter().zip(results).map(|((partition, seq), result)| {
            if let Ok(committed) = &result
                && let engram_memory::Reply::Applied(outcome) = &committed.reply
            {
                updates += outcome.applied;
            }
            part_reply(partition, seq, result.map_err(|error| self.problem(&error)))
        });
        let replies = replies.collect();
        self.shared.metrics.updates.inc_by(updates);
        Ok(replies)
    }

    /// Converts a write error, with what the map says of a partition that is not served here.
    pub(crate) fn problem(&self, error: &WriteError) -> Problem {
        match error {
            WriteError::NotPrimary { partition, .. } => self.shared.not_primary(*partition),
            other => write_problem(other),
        }
    }

    async fn forward_parts(
        &self,
        session: Option<v1::Session>,
        remote: BTreeMap<Ordinal, Vec<PartitionWrite>>,
    ) -> Vec<v1::PartitionResult> {
        let calls = remote.into_iter().map(|(primary, parts)| async move {
            self.shared.metrics.forwarded.inc_by(parts.len() as u64);
            let slots: Vec<(PartitionId, u64)> = parts.iter().map(|part| (part.partition, part.seq)).collect();
            match forward(&self.shared, primary, session, parts).await {
                Ok(reply) => reply.parts,
                Err(problem) => slots
                    .into_iter()
                    .map(|(partition, seq)| part_reply(partition, seq, Err(problem.clone().at(partition))))
                    .collect(),
            }
        });
        join_all(calls).await.into_iter().flatten().collect()
    }

    fn numbered(&self, parts: Vec<WritePart>) -> Result<Vec<PartitionWrite>, Problem> {
        let invalid = |text: String| Problem::of(ProblemKind::Invalid, text);
        let mut writes = Vec::with_capacity(parts.len());
        for (index, WritePart { partition, seq, body }) in parts.into_iter().enumerate() {
            let partition = partition.ok_or_else(|| {
                invalid(format!(
                    "parts[{index}].partition: absent is not allowed; allowed: a partition, under a session"
                ))
            })?;
            if seq == 0 {
                return Err(invalid(format!("parts[{index}].seq: 0 is not allowed; allowed: from 1, under a session")));
            }
            let write = PartitionWrite { partition: self.shared.check_partition(partition)?, seq, body };
            check_partition(&write, self.shared.partitions())?;
            writes.push(write);
        }
        Ok(writes)
    }

    fn unnumbered(&self, parts: Vec<WritePart>) -> Result<Vec<PartitionWrite>, Problem> {
        let mut writes = Vec::new();
        for (index, WritePart { partition, seq, body }) in parts.into_iter().enumerate() {
            if seq != 0 {
                let text = format!("parts[{index}].seq: {seq} is not allowed; allowed: unset, without a session");
                return Err(Problem::of(ProblemKind::Invalid, text));
            }
            match partition {
                Some(partition) => {
                    let write = PartitionWrite { partition: self.shared.check_partition(partition)?, seq, body };
                    check_partition(&write, self.shared.partitions())?;
                    writes.push(write);
                }
                None => writes.extend(body.split(&self.shared)?.into_iter().map(|(partition, body)| PartitionWrite {
                    partition,
                    seq: 0,
                    body,
                })),
            }
        }
        Ok(writes)
    }

    /// Returns the final outcome of a request from its partition.
    pub(crate) async fn outcome(&self, request: v1::GetOutcomeRequest) -> Result<v1::GetOutcomeResponse, Problem> {
        let session = request.session.ok_or_else(|| {
            Problem::of(ProblemKind::Invalid, "session: absent is not allowed; allowed: the session of the request")
        })?;
        check_session(session, self.shared.engine.session_clock())?;
        let partition = self.shared.check_partition(request.partition)?;
        self.shared.wait_until_served(std::iter::once(partition)).await;
        if let (None, Some(primary)) = (self.shared.engine.position(partition), self.route(partition)) {
            let mut service = self.shared.client.worker(primary)?;
            let request = self.shared.client.request(request, FORWARD_DEADLINE);
            let call = async { service.get_outcome(request).await.map_err(|status| forward_problem(&status)) };
            return self.shared.while_primary(primary, &[partition], call).await.map(tonic::Response::into_inner);
        }
        let close = engram_memory::Command::CloseRequest(Request { session: session.into(), seq: request.seq });
        let mut results = self.shared.engine.write(vec![(partition, Record::bare(close))]).await?;
        let result = results.pop().unwrap_or(Err(WriteError::NotPrimary { partition, term: None }));
        let reply = part_reply(partition, request.seq, result.map_err(|error| self.problem(&error)));
        let result = match &reply.result {
            Some(v1::partition_result::Result::Problem(problem)) => match problem.kind() {
                ProblemKind::AlreadyClosed => v1::get_outcome_response::Outcome::NeverExecuted(true),
                // It was rejected when it arrived, and the rejection is recorded under its number.
                ProblemKind::EpochGap | ProblemKind::EpochForgotten | ProblemKind::RunConflict => {
                    v1::get_outcome_response::Outcome::Applied(reply)
                }
                _ => return Err(problem.clone()),
            },
            _ => v1::get_outcome_response::Outcome::Applied(reply),
        };
        Ok(v1::GetOutcomeResponse { outcome: Some(result) })
    }
}

/// Checks a session: one from the future would outlive every watermark.
pub(crate) fn check_session(session: v1::Session, clock: &SessionClock) -> Result<(), Problem> {
    if clock.accepts(session.opened_ms) {
        return Ok(());
    }
    Err(Problem::of(
        ProblemKind::Invalid,
        format!(
            "session.opened_ms: {} is not allowed; allowed: at most one hour ahead of the cluster's clocks ({})",
            session.opened_ms,
            clock.opening_ms()
        ),
    ))
}
