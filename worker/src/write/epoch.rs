//! Learning epochs: one engine write per message; messages in order, partitions independent.

use crate::engine::WriteResults;
use crate::service::{Memories, Plane};
use crate::write::partition_write::forward_problem;
use engram_memory::{Command, LearningEpoch, MAX_IDS, Ordinal, Outcome, PartitionId, Record, Reply, RunId, Updates};
use engram_proto::v1::{self, Problem, ProblemKind};
use engram_proto::{answers, columns};
use futures::future::join_all;
use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;
use tokio::sync::oneshot;
use tonic::{Status, Streaming};

/// Messages submitted to the engine without a result: the next is decoded while the log is synced.
const MAX_PENDING: usize = 4;
/// Deadline of a forwarded message.
const FORWARD_DEADLINE: Duration = Duration::from_secs(30);

/// Identity and decay of an epoch.
#[derive(Debug, Clone, Copy)]
struct EpochHead {
    run: RunId,
    n: LearningEpoch,
    decay: u32,
}

/// Records of one submitted message, each with whether it completes its partition's epoch.
struct PendingMessage {
    results: oneshot::Receiver<WriteResults>,
    records: Vec<(PartitionId, bool)>,
}

/// Accumulated results of the epoch.
#[derive(Default)]
struct EpochTotals {
    outcome: Outcome,
    versions: Vec<v1::PartitionVersion>,
    /// First problem of each partition; later parts of it are not executed.
    problems: BTreeMap<PartitionId, Problem>,
    quality: engram_memory::QualityVector,
}

impl Memories {
    pub(crate) async fn epoch(
        &self,
        mut messages: Streaming<v1::LearnEpochRequest>,
    ) -> Result<v1::LearnEpochResponse, Status> {
        let mut totals = EpochTotals::default();
        let mut pending: VecDeque<PendingMessage> = VecDeque::new();
        while let Some(message) = messages.message().await? {
            let head = head(&message).map_err(Problem::into_status)?;
            if self.plane == Plane::Client {
                self.shared.runs.check_recorded(&self.shared, head.run).await.map_err(Problem::into_status)?;
            }
            self.shared.wait_until_served(message.parts.iter().map(|part| PartitionId(part.partition))).await;
            let (records, remote) = self.sort(head, message, &mut totals).map_err(Problem::into_status)?;
            if !records.is_empty() {
                let record_slots =
                    records.iter().map(|(partition, record)| (*partition, completes_epoch(&record.command))).collect();
                let results = self.shared.engine.submit(records).map_err(Problem::into_status)?;
                pending.push_back(PendingMessage { results, records: record_slots });
            }
            self.forward_epoch(remote, &mut totals).await?;
            while pending.len() >= MAX_PENDING {
                self.complete_oldest(&mut pending, &mut totals).await?;
            }
        }
        while !pending.is_empty() {
            self.complete_oldest(&mut pending, &mut totals).await?;
        }
        self.shared.metrics.updates.inc_by(totals.outcome.applied);
        self.shared.metrics.partition_epochs.inc_by(totals.versions.len() as u64);
        Ok(v1::LearnEpochResponse {
            outcome: Some((&totals.outcome).into()),
            quality: answers::quality_to_wire(&totals.quality),
            versions: totals.versions,
            problems: totals.problems.into_values().collect(),
        })
    }

    /// Returns records for the engine, and messages to forward; unserved partitions become problems in `sum`.
    #[allow(clippy::type_complexity, reason = "two lists that are used once")]
    fn sort(
        &self,
        head: EpochHead,
        message: v1::LearnEpochRequest,
        totals: &mut EpochTotals,
    ) -> Result<(Vec<(PartitionId, Record)>, BTreeMap<Ordinal, v1::LearnEpochRequest>), Problem> {
        let rows: usize = message.parts.iter().filter_map(|part| part.updates.as_ref()).map(|it| it.ids.len()).sum();
        if rows > MAX_IDS {
            let text = format!("ids: {rows} in one message is not allowed; allowed: at most 65,536");
            return Err(Problem::of(ProblemKind::Invalid, text));
        }
        let mut records = Vec::with_capacity(message.parts.len());
        let mut remote: BTreeMap<Ordinal, v1::LearnEpochRequest> = BTreeMap::new();
        for part in message.parts {
            let partition = self.shared.check_partition(part.partition)?;
            if part.part == 0 || part.part > part.parts {
                let text = format!("part: {} of {} is not allowed; allowed: 1 to parts", part.part, part.parts);
                return Err(Problem::of(ProblemKind::Invalid, text));
            }
            if let Some(updates) = &part.updates {
                columns::check_partition(&updates.ids, partition, self.shared.partitions())
                    .map_err(|invalid| Problem::of(ProblemKind::WrongPartition, invalid.to_string()).at(partition))?;
            }
            let (number, parts) = (part.part, part.parts);
            match (self.shared.engine.served_settings(partition), self.route(partition)) {
                (Some(settings), _) => {
                    let updates = columns::updates(part.updates.unwrap_or_default(), settings.rate)?;
                    if !totals.problems.contains_key(&partition) {
                        let steps = steps(head, number, parts, updates);
                        records.extend(steps.map(|command| (partition, Record::bare(command))));
                    }
                }
                (None, Some(primary)) => {
                    let message = remote.entry(primary).or_insert_with(|| v1::LearnEpochRequest {
                        run: message.run.clone(),
                        epoch: message.epoch,
                        decay: message.decay,
                        parts: Vec::new(),
                    });
                    message.parts.push(part);
                }
                // A quality has no delta without the rate of its partition, so the values are checked with another one.
                (None, None) => {
                    columns::updates(part.updates.unwrap_or_default(), 1)?;
                    totals.problems.entry(partition).or_insert_with(|| self.shared.not_primary(partition));
                }
            }
        }
        Ok((records, remote))
    }

    /// Waits for the results of the oldest message.
    async fn complete_oldest(
        &self,
        pending: &mut VecDeque<PendingMessage>,
        totals: &mut EpochTotals,
    ) -> Result<(), Status> {
        let Some(PendingMessage { results, records }) = pending.pop_front() else { return Ok(()) };
        let results =
            results.await.map_err(|_| Problem::of(ProblemKind::Unavailable, "the store has stopped").into_status())?;
        for ((partition, completes_epoch), result) in records.into_iter().zip(results) {
            let committed = match result {
                Ok(committed) => committed,
                Err(error) => {
                    let problem = self.problem(&error);
                    totals.problems.entry(partition).or_insert(problem.at(partition));
                    continue;
                }
            };
            match committed.reply {
                Reply::Applied(mut outcome) => {
                    if let Some(quality) = outcome.quality.take() {
                        totals.quality.merge(&quality);
                    }
                    totals.outcome.merge(&outcome);
                    if completes_epoch && !totals.problems.contains_key(&partition) {
                        totals.versions.push(v1::PartitionVersion::of(partition, committed.term, committed.lsn));
                    }
                }
                Reply::Refused(refusal) => {
                    totals.problems.entry(partition).or_insert(Problem::from(&refusal).at(partition));
                }
            }
        }
        Ok(())
    }

    /// Forwards parts to their primaries, each message once. The next message waits, so that parts stay in order.
    async fn forward_epoch(
        &self,
        remote: BTreeMap<Ordinal, v1::LearnEpochRequest>,
        totals: &mut EpochTotals,
    ) -> Result<(), Status> {
        let peers = &self.shared.client;
        let calls = remote.into_iter().map(|(primary, message)| async move {
            self.shared.metrics.forwarded.inc_by(message.parts.len() as u64);
            let partitions: Vec<PartitionId> = message.parts.iter().map(|part| PartitionId(part.partition)).collect();
            let call = async {
                let request = peers.request(tokio_stream::iter([message]), FORWARD_DEADLINE);
                peers.worker(primary)?.learn_epoch(request).await.map_err(|status| forward_problem(&status))
            };
            let result = self.shared.while_primary(primary, &partitions, call).await;
            (partitions, result)
        });
        for (partitions, result) in join_all(calls).await {
            let reply = match result {
                Ok(reply) => reply.into_inner(),
                Err(problem) => {
                    for partition in partitions {
                        totals.problems.entry(partition).or_insert_with(|| problem.clone().at(partition));
                    }
                    continue;
                }
            };
            let broken = |error: answers::Malformed| Status::internal(error.to_string());
            totals.outcome.merge(&reply.outcome.unwrap_or_default().try_into().map_err(broken)?);
            totals.quality.merge(&answers::quality_from_wire(&reply.quality).map_err(broken)?);
            totals.versions.extend(reply.versions);
            for problem in reply.problems {
                totals.problems.entry(PartitionId(problem.partition.unwrap_or_default())).or_insert(problem);
            }
        }
        Ok(())
    }
}

fn head(message: &v1::LearnEpochRequest) -> Result<EpochHead, Problem> {
    let run = answers::run_id(&message.run).map_err(|error| Problem::of(ProblemKind::Invalid, error.to_string()))?;
    if message.epoch == 0 {
        return Err(Problem::of(ProblemKind::Invalid, "n: 0 is not allowed; allowed: learning epochs from 1"));
    }
    Ok(EpochHead { run, n: LearningEpoch(message.epoch), decay: columns::decay("decay", message.decay)? })
}

/// Returns the records of one part. A small epoch is one record; a large one starts with its first part and ends with its last.
fn steps(head: EpochHead, part: u32, parts: u32, updates: Updates) -> impl Iterator<Item = Command> {
    let EpochHead { run, n, decay } = head;
    let (whole, rest) = if parts == 1 {
        (Some(Command::Epoch { run, n, decay, updates }), [None, None, None])
    } else {
        let begin = (part == 1).then_some(Command::EpochBegin { run, n, decay });
        let end = (part == parts).then_some(Command::EpochEnd { run, n, parts });
        (None, [begin, Some(Command::EpochPart { run, n, part, updates }), end])
    };
    whole.into_iter().chain(rest.into_iter().flatten())
}

/// Returns whether a record completes its partition's epoch.
const fn completes_epoch(command: &Command) -> bool {
    matches!(command, Command::Epoch { .. } | Command::EpochEnd { .. })
}
