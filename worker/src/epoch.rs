//! Learning epochs: one engine write per message, messages in order, partitions apart.

use crate::engine::Answers;
use crate::part::forwarded;
use crate::service::Memories;
use engram_memory::{Command, LearningEpoch, MAX_IDS, Ordinal, Outcome, PartitionId, Record, Reply, RunId, Updates};
use engram_proto::v1::{self, Problem, ProblemKind};
use engram_proto::{answers, columns};
use futures::future::join_all;
use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;
use tokio::sync::oneshot;
use tonic::{Status, Streaming};

/// Messages handed to the engine and not answered: the next is decoded while the log is being synced.
const AHEAD: usize = 4;
/// How long an owner may take for parts that are passed on to it.
const FORWARD_DEADLINE: Duration = Duration::from_secs(30);

/// The head of an epoch.
#[derive(Debug, Clone, Copy)]
struct Head {
    run: RunId,
    n: LearningEpoch,
    decay: u32,
}

/// Records of one message that the engine has, with what each is: the last of a partition's epoch or not.
struct Flying {
    answers: oneshot::Receiver<Answers>,
    records: Vec<(PartitionId, bool)>,
}

/// What the epoch did so far.
#[derive(Default)]
struct Sum {
    outcome: Outcome,
    versions: Vec<v1::PartitionVersion>,
    /// The first problem of each partition; what follows of it is not executed.
    problems: BTreeMap<PartitionId, Problem>,
    quality: engram_memory::QualityVector,
}

impl Memories {
    pub(crate) async fn epoch(&self, mut messages: Streaming<v1::EpochRequest>) -> Result<v1::EpochReply, Status> {
        let mut sum = Sum::default();
        let mut flying: VecDeque<Flying> = VecDeque::new();
        while let Some(message) = messages.message().await? {
            let head = head(&message).map_err(Problem::into_status)?;
            self.shared.taken_over(message.parts.iter().map(|part| PartitionId(part.partition))).await;
            let (records, elsewhere) = self.sort(head, message, &mut sum).map_err(Problem::into_status)?;
            if !records.is_empty() {
                let seats = records.iter().map(|(partition, record)| (*partition, closes(&record.command))).collect();
                let answers = self.shared.engine.submit(records).map_err(Problem::into_status)?;
                flying.push_back(Flying { answers, records: seats });
            }
            self.pass_on_epoch(elsewhere, &mut sum).await?;
            while flying.len() >= AHEAD {
                self.land(&mut flying, &mut sum).await?;
            }
        }
        while !flying.is_empty() {
            self.land(&mut flying, &mut sum).await?;
        }
        self.shared.metrics.updates.inc_by(sum.outcome.applied);
        self.shared.metrics.epoch_parts.inc_by(sum.versions.len() as u64);
        Ok(v1::EpochReply {
            outcome: Some((&sum.outcome).into()),
            quality: answers::quality_to_wire(&sum.quality),
            versions: sum.versions,
            problems: sum.problems.into_values().collect(),
        })
    }

    /// Records for the engine, and messages for other owners; what nobody serves goes into `sum`.
    #[allow(clippy::type_complexity, reason = "two lists that are used once")]
    fn sort(
        &self,
        head: Head,
        message: v1::EpochRequest,
        sum: &mut Sum,
    ) -> Result<(Vec<(PartitionId, Record)>, BTreeMap<Ordinal, v1::EpochRequest>), Problem> {
        let rows: usize = message.parts.iter().filter_map(|part| part.updates.as_ref()).map(|it| it.ids.len()).sum();
        if rows > MAX_IDS {
            let text = format!("ids: {rows} in one message is not allowed; allowed: at most 65,536");
            return Err(Problem::of(ProblemKind::Invalid, text));
        }
        let mut records = Vec::with_capacity(message.parts.len());
        let mut elsewhere: BTreeMap<Ordinal, v1::EpochRequest> = BTreeMap::new();
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
                    if !sum.problems.contains_key(&partition) {
                        let steps = steps(head, number, parts, updates);
                        records.extend(steps.map(|command| (partition, Record::bare(command))));
                    }
                }
                (None, Some(owner)) => {
                    let message = elsewhere.entry(owner).or_insert_with(|| v1::EpochRequest {
                        run: message.run.clone(),
                        n: message.n,
                        decay: message.decay,
                        parts: Vec::new(),
                    });
                    message.parts.push(part);
                }
                // Without its rate a quality has no delta, and the partition may be served the next moment.
                (None, None) => {
                    columns::updates(part.updates.unwrap_or_default(), 1)?;
                    sum.problems.entry(partition).or_insert_with(|| self.shared.not_primary(partition));
                }
            }
        }
        Ok((records, elsewhere))
    }

    /// Takes the answers of the oldest message.
    async fn land(&self, flying: &mut VecDeque<Flying>, sum: &mut Sum) -> Result<(), Status> {
        let Some(Flying { answers, records }) = flying.pop_front() else { return Ok(()) };
        let answers =
            answers.await.map_err(|_| Problem::of(ProblemKind::Unavailable, "the store has ended").into_status())?;
        for ((partition, closes), answer) in records.into_iter().zip(answers) {
            let committed = match answer {
                Ok(committed) => committed,
                Err(error) => {
                    let problem = self.problem(&error);
                    sum.problems.entry(partition).or_insert(problem.at(partition));
                    continue;
                }
            };
            match committed.reply {
                Reply::Applied(mut outcome) => {
                    if let Some(quality) = outcome.quality.take() {
                        sum.quality.merge(&quality);
                    }
                    sum.outcome.merge(&outcome);
                    if closes && !sum.problems.contains_key(&partition) {
                        sum.versions.push(v1::PartitionVersion::of(partition, committed.term, committed.lsn));
                    }
                }
                Reply::Refused(refusal) => {
                    sum.problems.entry(partition).or_insert(Problem::from(&refusal).at(partition));
                }
            }
        }
        Ok(())
    }

    /// Passes parts to their owners, each message once; the next message waits, so that parts stay in order.
    async fn pass_on_epoch(&self, elsewhere: BTreeMap<Ordinal, v1::EpochRequest>, sum: &mut Sum) -> Result<(), Status> {
        let peers = &self.shared.peers;
        let calls = elsewhere.into_iter().map(|(owner, message)| async move {
            self.shared.metrics.forwarded.inc_by(message.parts.len() as u64);
            let partitions: Vec<PartitionId> = message.parts.iter().map(|part| PartitionId(part.partition)).collect();
            let call = async {
                let request = peers.request(tokio_stream::iter([message]), FORWARD_DEADLINE);
                peers.worker(owner)?.learn_epoch(request).await.map_err(|status| forwarded(&status))
            };
            let answer = self.shared.while_owned(owner, &partitions, call).await;
            (partitions, answer)
        });
        for (partitions, answer) in join_all(calls).await {
            let reply = match answer {
                Ok(reply) => reply.into_inner(),
                Err(problem) => {
                    for partition in partitions {
                        sum.problems.entry(partition).or_insert_with(|| problem.clone().at(partition));
                    }
                    continue;
                }
            };
            let broken = |error: answers::Malformed| Status::internal(error.to_string());
            sum.outcome.merge(&reply.outcome.unwrap_or_default().try_into().map_err(broken)?);
            sum.quality.merge(&answers::quality_from_wire(&reply.quality).map_err(broken)?);
            sum.versions.extend(reply.versions);
            for problem in reply.problems {
                sum.problems.entry(PartitionId(problem.partition.unwrap_or_default())).or_insert(problem);
            }
        }
        Ok(())
    }
}

fn head(message: &v1::EpochRequest) -> Result<Head, Problem> {
    let run = answers::run_id(&message.run).map_err(|error| Problem::of(ProblemKind::Invalid, error.to_string()))?;
    if message.n == 0 {
        return Err(Problem::of(ProblemKind::Invalid, "n: 0 is not allowed; allowed: learning epochs from 1"));
    }
    Ok(Head { run, n: LearningEpoch(message.n), decay: columns::decay("decay", message.decay)? })
}

/// The records of one part: a small epoch is one record, a large one is begun with its first part and ended with its last.
fn steps(head: Head, part: u32, parts: u32, updates: Updates) -> impl Iterator<Item = Command> {
    let Head { run, n, decay } = head;
    let (whole, rest) = if parts == 1 {
        (Some(Command::Epoch { run, n, decay, updates }), [None, None, None])
    } else {
        let begin = (part == 1).then_some(Command::EpochBegin { run, n, decay });
        let end = (part == parts).then_some(Command::EpochEnd { run, n, parts });
        (None, [begin, Some(Command::EpochPart { run, n, part, updates }), end])
    };
    whole.into_iter().chain(rest.into_iter().flatten())
}

/// Whether a record ends its partition's epoch.
const fn closes(command: &Command) -> bool {
    matches!(command, Command::Epoch { .. } | Command::EpochEnd { .. })
}
