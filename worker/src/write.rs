//! Writes: checked as a whole, then executed part by part, here or by the owner.

use crate::engine::{part_reply, write_problem};
use crate::part::{Body, FORWARD_DEADLINE, Part, forward, forwarded};
use crate::service::{Memories, Plane};
use engram_memory::{MAX_IDS, Ordinal, PartitionId, Record, Request, SessionId};
use engram_proto::v1::{self, Problem, ProblemKind};
use engram_store::WriteError;
use futures::future::join_all;
use std::collections::BTreeMap;
use std::time::Duration;

/// How far ahead of this worker's clock a session may have been opened: clocks of a cluster agree within this.
const CLOCK_SKEW: Duration = Duration::from_secs(60 * 60);

/// A part as it came: with its partition and number under a session, without both otherwise.
pub(crate) struct Asked {
    pub(crate) partition: Option<u32>,
    pub(crate) seq: u64,
    pub(crate) body: Body,
}

impl Memories {
    /// Executes one request. It is refused as a whole, or answered part by part.
    pub(crate) async fn write(
        &self,
        session: Option<v1::Session>,
        asked: Vec<Asked>,
    ) -> Result<v1::WriteReply, Problem> {
        let shared = &self.shared;
        let rows: usize = asked.iter().map(|asked| asked.body.rows()).sum();
        if rows > MAX_IDS {
            return Err(Problem::of(
                ProblemKind::Invalid,
                format!("ids: {rows} in one message is not allowed; allowed: at most 65,536"),
            ));
        }
        let parts = match session {
            Some(session) => {
                check_session(session, self.shared.clock.now_ms())?;
                self.numbered(asked)?
            }
            None => self.unnumbered(asked)?,
        };
        shared.taken_over(parts.iter().map(|part| part.partition)).await;
        // Nothing is executed before everything is known to be allowed.
        let mut here = Vec::new();
        let mut elsewhere: BTreeMap<Ordinal, Vec<Part>> = BTreeMap::new();
        let mut replies = Vec::with_capacity(parts.len());
        for part in parts {
            let (partition, seq) = (part.partition, part.seq);
            match (shared.engine.served_settings(partition), self.route(partition)) {
                (Some(settings), _) => {
                    let command = part.body.into_command(shared, Some(settings))?;
                    let request = session.map(|session| Request { session: SessionId::from(session), seq });
                    here.push(((partition, Record { request, command }), seq));
                }
                (None, Some(owner)) => {
                    part.body.check(shared)?;
                    elsewhere.entry(owner).or_default().push(part);
                }
                (None, None) => {
                    part.body.check(shared)?;
                    replies.push(part_reply(partition, seq, Err(shared.not_primary(partition))));
                }
            }
        }
        let (here, elsewhere) = tokio::join!(self.execute(here), self.pass_on(session, elsewhere));
        replies.extend(here?);
        replies.extend(elsewhere);
        Ok(v1::WriteReply { parts: replies })
    }

    /// The worker to pass a partition on to; `None` where it is this one's own, or may not be passed on again.
    pub(crate) fn route(&self, partition: PartitionId) -> Option<Ordinal> {
        let owner = self.shared.view.borrow().owner(partition)?;
        (self.plane == Plane::Client && owner != self.shared.ordinal()).then_some(owner)
    }

    async fn execute(&self, records: Vec<((PartitionId, Record), u64)>) -> Result<Vec<v1::PartitionReply>, Problem> {
        if records.is_empty() {
            return Ok(Vec::new());
        }
        let seats: Vec<(PartitionId, u64)> = records.iter().map(|((partition, _), seq)| (*partition, *seq)).collect();
        let answers = self.shared.engine.write(records.into_iter().map(|(record, _)| record).collect()).await?;
        let mut updates = 0;
        let replies = seats.into_iter().zip(answers).map(|((partition, seq), answer)| {
            if let Ok(committed) = &answer
                && let engram_memory::Reply::Applied(outcome) = &committed.reply
            {
                updates += outcome.applied;
            }
            part_reply(partition, seq, answer.map_err(|error| self.problem(&error)))
        });
        let replies = replies.collect();
        self.shared.metrics.updates.inc_by(updates);
        Ok(replies)
    }

    /// Why a record has no answer, with what the map says of a partition not served.
    pub(crate) fn problem(&self, error: &WriteError) -> Problem {
        match error {
            WriteError::NotPrimary { partition, .. } => self.shared.not_primary(*partition),
            other => write_problem(other),
        }
    }

    async fn pass_on(
        &self,
        session: Option<v1::Session>,
        elsewhere: BTreeMap<Ordinal, Vec<Part>>,
    ) -> Vec<v1::PartitionReply> {
        let calls = elsewhere.into_iter().map(|(owner, parts)| async move {
            self.shared.metrics.forwarded.inc_by(parts.len() as u64);
            let seats: Vec<(PartitionId, u64)> = parts.iter().map(|part| (part.partition, part.seq)).collect();
            match forward(&self.shared, owner, session, parts).await {
                Ok(reply) => reply.parts,
                Err(problem) => seats
                    .into_iter()
                    .map(|(partition, seq)| part_reply(partition, seq, Err(problem.clone().at(partition))))
                    .collect(),
            }
        });
        join_all(calls).await.into_iter().flatten().collect()
    }

    fn numbered(&self, asked: Vec<Asked>) -> Result<Vec<Part>, Problem> {
        let invalid = |text: String| Problem::of(ProblemKind::Invalid, text);
        let mut parts = Vec::with_capacity(asked.len());
        for (index, Asked { partition, seq, body }) in asked.into_iter().enumerate() {
            let partition = partition.ok_or_else(|| {
                invalid(format!(
                    "parts[{index}].partition: absent is not allowed; allowed: a partition, under a session"
                ))
            })?;
            if seq == 0 {
                return Err(invalid(format!("parts[{index}].seq: 0 is not allowed; allowed: from 1, under a session")));
            }
            let part = Part { partition: self.shared.check_partition(partition)?, seq, body };
            part.check_partition(self.shared.partitions())?;
            parts.push(part);
        }
        Ok(parts)
    }

    fn unnumbered(&self, asked: Vec<Asked>) -> Result<Vec<Part>, Problem> {
        let mut parts = Vec::new();
        for (index, Asked { partition, seq, body }) in asked.into_iter().enumerate() {
            if seq != 0 {
                let text = format!("parts[{index}].seq: {seq} is not allowed; allowed: unset, without a session");
                return Err(Problem::of(ProblemKind::Invalid, text));
            }
            match partition {
                Some(partition) => {
                    let part = Part { partition: self.shared.check_partition(partition)?, seq, body };
                    part.check_partition(self.shared.partitions())?;
                    parts.push(part);
                }
                None => parts.extend(body.split(&self.shared)?.into_iter().map(|(partition, body)| Part {
                    partition,
                    seq: 0,
                    body,
                })),
            }
        }
        Ok(parts)
    }

    /// What became of a request: asked of its partition, whose answer is final.
    pub(crate) async fn outcome(&self, asked: v1::GetOutcomeRequest) -> Result<v1::GetOutcomeReply, Problem> {
        let session = asked.session.ok_or_else(|| {
            Problem::of(ProblemKind::Invalid, "session: absent is not allowed; allowed: the session of the request")
        })?;
        check_session(session, self.shared.clock.now_ms())?;
        let partition = self.shared.check_partition(asked.partition)?;
        self.shared.taken_over(std::iter::once(partition)).await;
        if let (None, Some(owner)) = (self.shared.engine.position(partition), self.route(partition)) {
            let mut service = self.shared.peers.worker(owner)?;
            let request = self.shared.peers.request(asked, FORWARD_DEADLINE);
            let call = async { service.get_outcome(request).await.map_err(|status| forwarded(&status)) };
            return self.shared.while_owned(owner, &[partition], call).await.map(tonic::Response::into_inner);
        }
        let close = engram_memory::Command::CloseRequest(Request { session: session.into(), seq: asked.seq });
        let mut answers = self.shared.engine.write(vec![(partition, Record::bare(close))]).await?;
        let answer = answers.pop().unwrap_or(Err(WriteError::NotPrimary { partition, term: None }));
        let reply = part_reply(partition, asked.seq, answer.map_err(|error| self.problem(&error)));
        let answer = match &reply.result {
            Some(v1::partition_reply::Result::Problem(problem)) => match problem.kind() {
                ProblemKind::AlreadyClosed => v1::get_outcome_reply::Answer::Never(true),
                // Refused when it came, and that was its answer: kept under its number.
                ProblemKind::EpochGap | ProblemKind::EpochForgotten | ProblemKind::RunConflict => {
                    v1::get_outcome_reply::Answer::Applied(reply)
                }
                _ => return Err(problem.clone()),
            },
            _ => v1::get_outcome_reply::Answer::Applied(reply),
        };
        Ok(v1::GetOutcomeReply { answer: Some(answer) })
    }
}

/// Checks a session id: one from the future would outlive every watermark.
pub(crate) fn check_session(session: v1::Session, now_ms: u64) -> Result<(), Problem> {
    let latest = now_ms.saturating_add(CLOCK_SKEW.as_millis() as u64);
    if session.opened_ms <= latest {
        return Ok(());
    }
    Err(Problem::of(
        ProblemKind::Invalid,
        format!(
            "session.opened_ms: {} is not allowed; allowed: at most one hour ahead of this worker's clock",
            session.opened_ms
        ),
    ))
}
