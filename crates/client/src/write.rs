//! One batch of writes: parts are sent to their primaries in messages, and retried until they have a final response.
//!
//! A part gets its number once and keeps it over every attempt, so that it is applied at most once. Parts of a
//! partition are sent in order: one without a final response holds back those behind it.

use crate::call::Failure;
use crate::client::Client;
use crate::error::{Error, PartFailure};
use crate::map::Map;
use crate::message::Message;
use crate::retry::Retry;
use crate::session::Session;
use crate::window::Generation;
use engram_memory::{Lsn, MemoryId, Ordinal, Outcome, PartitionId, Term};
use engram_proto::v1::{self, ProblemKind};
use engram_wire::WriteBody;
use futures::future::join_all;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

/// Result of a batch of writes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct WriteResult {
    /// Counts over all parts, and the first rejected ids.
    pub outcome: Outcome,
    /// Position of each part in the log of its partition.
    pub versions: Vec<Version>,
    /// Handles of the first item of each append to a buffer.
    pub first_items: Vec<(PartitionId, MemoryId)>,
}

impl WriteResult {
    /// Adds the result of other parts.
    pub(crate) fn merge(&mut self, other: Self) {
        self.outcome.merge(&other.outcome);
        self.versions.extend(other.versions);
        self.first_items.extend(other.first_items);
    }
}

/// Position of a part in the log of its partition.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Version {
    /// Partition.
    pub partition: PartitionId,
    /// Term of the partition.
    pub term: Term,
    /// Lsn in its log.
    pub lsn: Lsn,
    /// Replicas that hold it.
    pub replicas: u32,
    /// Whether it was durable when it was acknowledged.
    pub durable: bool,
}

/// Rows of one partition, applied together.
#[derive(Debug, Clone)]
pub(crate) struct Part {
    pub(crate) partition: PartitionId,
    pub(crate) body: WriteBody,
    /// Its number, from the first attempt on.
    pub(crate) number: Option<RequestNumber>,
    /// An attempt ended without a response.
    maybe_executed: bool,
}

/// The number of a part in its session.
#[derive(Debug, Clone)]
pub(crate) struct RequestNumber {
    pub(crate) generation: Arc<Generation>,
    pub(crate) seq: u64,
}

impl Part {
    pub(crate) const fn new(partition: PartitionId, body: WriteBody) -> Self {
        Self { partition, body, number: None, maybe_executed: false }
    }

    /// Marks its number as finally answered.
    fn settle(&self) {
        if let Some(RequestNumber { generation, seq }) = &self.number {
            generation.answer(self.partition, *seq);
        }
    }

    fn give_up(self, allowed: Duration, failure: &Failure) -> PartFailure {
        let error = match &self.number {
            Some(RequestNumber { generation, seq }) if self.maybe_executed => Error::OutcomeUnknown {
                session: generation.id,
                partition: self.partition,
                seq: *seq,
                last: failure.problem.message.clone(),
            },
            _ => {
                self.settle();
                Error::Deadline { after: allowed, last: Box::new(failure.problem.clone()) }
            }
        };
        PartFailure { partition: self.partition, error }
    }
}

/// Result of one round of attempts.
#[derive(Debug, Default)]
struct Round {
    written: Vec<(PartitionId, v1::PartitionResult)>,
    failed: Vec<PartFailure>,
    /// Parts to retry, in order, with their failures.
    open: Vec<(Part, Failure)>,
}

pub(crate) async fn execute(session: &Session, retry: &mut Retry, parts: Vec<Part>) -> Result<WriteResult, Error> {
    let client = session.client();
    let mut written = WriteResult::default();
    let mut failures = Vec::new();
    let mut open = interleave(parts);
    while !open.is_empty() {
        let map = client.map()?;
        let mut by_owner: BTreeMap<Ordinal, VecDeque<Part>> = BTreeMap::new();
        for part in open.drain(..) {
            let owner = map.owner(part.partition).expect("parts were split by a map of as many partitions");
            by_owner.entry(owner).or_default().push_back(part);
        }
        let rounds = by_owner.into_iter().map(|(owner, parts)| drive(session, &map, owner, parts, retry));
        let mut worst: Option<Failure> = None;
        let mut again = Vec::new();
        for round in join_all(rounds).await {
            failures.extend(round.failed);
            for (partition, reply) in round.written {
                note(&mut written, partition, reply)?;
            }
            for (part, failure) in round.open {
                // The longest requested wait decides.
                if worst.as_ref().is_none_or(|worst| worst.problem.retry_after_ms < failure.problem.retry_after_ms) {
                    worst = Some(failure.clone());
                }
                again.push((part, failure));
            }
        }
        if let Some(worst) = worst
            && let Err(error) = retry.after(client, worst).await
        {
            let Error::Deadline { after, .. } = error else { return Err(error) };
            let failed = again.drain(..).map(|(part, failure)| {
                let problem = retry.annotate(client, failure.problem.clone());
                part.give_up(after, &Failure { problem, ..failure })
            });
            failures.extend(failed);
        }
        open = again.into_iter().map(|(part, _)| part).collect();
    }
    conclude(written, failures)
}

/// Interleaves the parts of all partitions, so that a message spreads over partitions.
fn interleave(parts: Vec<Part>) -> Vec<Part> {
    let mut nth: HashMap<PartitionId, usize> = HashMap::new();
    let mut numbered: Vec<(usize, Part)> = parts
        .into_iter()
        .map(|part| {
            let count = nth.entry(part.partition).or_default();
            *count += 1;
            (*count, part)
        })
        .collect();
    numbered.sort_by_key(|(nth, part)| (*nth, part.partition));
    numbered.into_iter().map(|(_, part)| part).collect()
}

/// Sends parts to their primary, message by message.
async fn drive(session: &Session, map: &Arc<Map>, owner: Ordinal, mut parts: VecDeque<Part>, retry: &Retry) -> Round {
    let client = session.client();
    let mut round = Round::default();
    let mut held: HashMap<PartitionId, Failure> = HashMap::new();
    while !parts.is_empty() {
        if retry.remaining().is_none() {
            let late = Failure::unavailable(format!("worker {owner} was not called before the deadline"));
            round.open.extend(parts.drain(..).map(|part| (part, late.clone())));
            break;
        }
        let message = match fill(session, &mut parts, &held, &mut round, retry).await {
            Ok(message) => message,
            Err(failure) => {
                round.open.extend(parts.drain(..).map(|part| (part, failure.clone())));
                break;
            }
        };
        let reply = match (message.is_empty(), client.service_of(map, owner)) {
            (true, _) => continue,
            (_, Ok(mut service)) => {
                let sent = message.send(client, &mut service, client.attempt(retry), retry.wait_ms);
                client.while_owner(map, owner, sent).await
            }
            (_, Err(failure)) => Err(failure),
        };
        assign_results(session, message.into_parts(), reply, &mut held, &mut round).await;
    }
    round
}

/// Fills the next message: parts from the front, numbered under one session, within the limits of a message.
async fn fill(
    session: &Session,
    parts: &mut VecDeque<Part>,
    held: &HashMap<PartitionId, Failure>,
    round: &mut Round,
    retry: &Retry,
) -> Result<Message, Failure> {
    let mut message = Message::default();
    while let Some(part) = parts.front() {
        if let Some(failure) = held.get(&part.partition) {
            let part = parts.pop_front().expect("it is at the front");
            round.open.push((part, Failure { maybe_executed: false, ..failure.clone() }));
            continue;
        }
        if !message.has_capacity(part) {
            break;
        }
        let number = match &part.number {
            Some(number) => number.clone(),
            None => {
                let generation = match message.generation() {
                    Some(generation) => generation.clone(),
                    None => session.generation(retry).await?,
                };
                match generation.take(part.partition) {
                    Some(seq) => RequestNumber { generation, seq },
                    // A request without a response holds the window: continue under another session.
                    None => {
                        session.retire(&generation).await;
                        if message.is_empty() {
                            continue;
                        }
                        break;
                    }
                }
            }
        };
        if message.generation().is_some_and(|generation| !Arc::ptr_eq(generation, &number.generation)) {
            break;
        }
        let mut part = parts.pop_front().expect("it is at the front");
        part.number = Some(number);
        message.push(part);
    }
    Ok(message)
}

/// Assigns the responses to the parts of a message.
async fn assign_results(
    session: &Session,
    parts: Vec<Part>,
    reply: Result<v1::WriteResponse, Failure>,
    held: &mut HashMap<PartitionId, Failure>,
    round: &mut Round,
) {
    let (mut replies, whole) = match reply {
        Ok(reply) => {
            let keyed = reply.parts.into_iter().map(|part| ((part.partition, part.seq), part));
            (keyed.collect::<HashMap<_, _>>(), None)
        }
        Err(failure) => (HashMap::new(), Some(failure)),
    };
    for mut part in parts {
        let Some(number) = part.number.clone() else { continue };
        let result = replies.remove(&(part.partition.0, number.seq));
        let failure = match result.as_ref().and_then(|result| result.result.as_ref()) {
            Some(v1::partition_result::Result::Outcome(_)) => {
                part.settle();
                round.written.extend(result.map(|result| (part.partition, result)));
                continue;
            }
            Some(v1::partition_result::Result::Problem(problem)) => Failure::of(problem.clone()),
            None => whole.clone().unwrap_or_else(Failure::timed_out),
        };
        part.maybe_executed |= failure.maybe_executed;
        if failure.retryable {
            held.insert(part.partition, failure.clone());
            round.open.push((part, failure));
            continue;
        }
        part.settle();
        if consumes_number(failure.problem.kind()) {
            session.retire(&number.generation).await;
        }
        round.failed.push(PartFailure { partition: part.partition, error: Error::rejected(failure.problem) });
    }
}

/// Whether a write consumes its number without reaching the window of the partition. Enough of those close the window
/// permanently, so the next write starts another session.
const fn consumes_number(kind: ProblemKind) -> bool {
    use ProblemKind::{Denied, OutOfWindow, SessionExpired, Unauthenticated};
    matches!(kind, SessionExpired | OutOfWindow | Denied | Unauthenticated)
}

fn note(written: &mut WriteResult, partition: PartitionId, reply: v1::PartitionResult) -> Result<(), Error> {
    if let Some(v1::partition_result::Result::Outcome(outcome)) = reply.result {
        let outcome = Outcome::try_from(outcome)?;
        written.first_items.extend(outcome.first.map(|first| (partition, first)));
        written.outcome.merge(&outcome);
        written.versions.push(Version {
            partition,
            term: Term(reply.term),
            lsn: Lsn(reply.lsn),
            replicas: reply.replicas,
            durable: reply.durable,
        });
    }
    Ok(())
}

/// Returns one error if all failures are alike; otherwise the errors of all parts.
fn conclude(written: WriteResult, mut failures: Vec<PartFailure>) -> Result<WriteResult, Error> {
    let alike = failures.iter().all(|failure| matches!(failure.error, Error::Rejected(_) | Error::Deadline { .. }))
        && failures.windows(2).all(|pair| pair[0].error.kind() == pair[1].error.kind());
    match failures.len() {
        0 => Ok(written),
        1 if written.versions.is_empty() => Err(failures.swap_remove(0).error),
        _ if written.versions.is_empty() && alike => Err(failures.swap_remove(0).error),
        _ => Err(Error::Partial { written: Box::new(written), failures }),
    }
}

impl Client {
    /// Returns the capacity of one message in bytes of parts: below the limit, since sizes are estimated.
    pub(crate) const fn message_bytes() -> usize {
        engram_proto::MAX_MESSAGE_BYTES - (512 << 10)
    }
}

/// Returns the error of a part that fails after one attempt with this response.
#[cfg(test)]
pub(crate) async fn error_after(
    session: &Session,
    partitions: u32,
    response: Result<v1::WriteResponse, Failure>,
) -> Error {
    let opened = engram_memory::SessionId { opened_ms: 1, random: 2 };
    let generation = Arc::new(Generation::new(opened, tokio::time::Instant::now(), partitions));
    let partition = PartitionId(0);
    let seq = generation.take(partition).expect("the first of a window");
    let part = Part { number: Some(RequestNumber { generation, seq }), ..Part::new(partition, WriteBody::Decay(0.5)) };
    let mut round = Round::default();
    assign_results(session, vec![part], response, &mut HashMap::new(), &mut round).await;
    let (part, failure) = round.open.pop().expect("the part is retryable");
    part.give_up(Duration::from_secs(1), &failure).error
}
