//! One batch of writes: parts to their owners in messages, answers to parts, and again what was not done.
//!
//! A part gets its number once and keeps it over every attempt, so that it is applied at most once. Parts of a partition are sent
//! in order: one that was not done holds back those behind it.

use crate::call::Failure;
use crate::client::Client;
use crate::error::{Error, PartFailure};
use crate::map::Map;
use crate::message::Message;
use crate::retry::Retry;
use crate::session::Session;
use crate::window::Generation;
use engram_memory::{Lsn, Ordinal, Outcome, PartitionId, Term};
use engram_proto::v1::{self, ProblemKind};
use futures::future::join_all;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

/// What a batch of writes did.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Written {
    /// Counts over all parts, and the first rejected ids.
    pub outcome: Outcome,
    /// Where each part stands in the log of its partition.
    pub versions: Vec<Version>,
}

/// Where a part stands in the log of its partition.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Version {
    /// Partition.
    pub partition: PartitionId,
    /// Number of its configuration.
    pub term: Term,
    /// Place in its log.
    pub lsn: Lsn,
    /// Copies that hold it.
    pub replicas: u32,
    /// Whether it was on disk when it was acknowledged.
    pub durable: bool,
}

/// What a part asks for.
#[derive(Debug, Clone)]
pub(crate) enum Body {
    Upsert(v1::UpsertPart),
    Remove(Vec<u64>),
    Reinforce(v1::Updates),
    Decay(f64),
}

/// Rows of one partition, applied together.
#[derive(Debug, Clone)]
pub(crate) struct Part {
    pub(crate) partition: PartitionId,
    pub(crate) body: Body,
    /// Its number, from the first attempt on.
    pub(crate) seat: Option<Seat>,
    /// Some attempt ended without an answer.
    maybe_executed: bool,
}

/// The number of a part in its session.
#[derive(Debug, Clone)]
pub(crate) struct Seat {
    pub(crate) generation: Arc<Generation>,
    pub(crate) seq: u64,
}

impl Part {
    pub(crate) const fn new(partition: PartitionId, body: Body) -> Self {
        Self { partition, body, seat: None, maybe_executed: false }
    }

    /// It has its final answer.
    fn settle(&self) {
        if let Some(Seat { generation, seq }) = &self.seat {
            generation.answer(self.partition, *seq);
        }
    }

    fn give_up(self, allowed: Duration, failure: &Failure) -> PartFailure {
        let error = match &self.seat {
            Some(Seat { generation, seq }) if self.maybe_executed => Error::Unknown {
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

/// What one round of attempts brought.
#[derive(Debug, Default)]
struct Round {
    written: Vec<(PartitionId, v1::PartitionReply)>,
    failed: Vec<PartFailure>,
    /// To be sent again, in order, each with what it met.
    open: Vec<(Part, Failure)>,
}

pub(crate) async fn execute(session: &Session, retry: &mut Retry, parts: Vec<Part>) -> Result<Written, Error> {
    let client = session.client();
    let mut written = Written::default();
    let mut failures = Vec::new();
    let mut open = interleaved(parts);
    while !open.is_empty() {
        let map = client.map()?;
        let mut by_owner: BTreeMap<Ordinal, VecDeque<Part>> = BTreeMap::new();
        for part in open.drain(..) {
            let owner = map.owner(part.partition).expect("parts were split by a map of as many partitions");
            by_owner.entry(owner).or_default().push_back(part);
        }
        let rounds = by_owner.into_iter().map(|(owner, parts)| drive(session, &map, owner, parts, retry));
        let mut met: Option<Failure> = None;
        let mut again = Vec::new();
        for round in join_all(rounds).await {
            failures.extend(round.failed);
            for (partition, reply) in round.written {
                note(&mut written, partition, reply)?;
            }
            for (part, failure) in round.open {
                // The longest wait asked for decides.
                if met.as_ref().is_none_or(|met| met.problem.retry_after_ms < failure.problem.retry_after_ms) {
                    met = Some(failure.clone());
                }
                again.push((part, failure));
            }
        }
        if let Some(met) = met
            && let Err(error) = retry.after(client, met).await
        {
            let Error::Deadline { after, .. } = error else { return Err(error) };
            let given_up = again.drain(..).map(|(part, failure)| {
                let problem = retry.told(client, failure.problem.clone());
                part.give_up(after, &Failure { problem, ..failure })
            });
            failures.extend(given_up);
        }
        open = again.into_iter().map(|(part, _)| part).collect();
    }
    conclude(written, failures)
}

/// First the first part of every partition, then the second, ...: a message then spreads over partitions.
fn interleaved(parts: Vec<Part>) -> Vec<Part> {
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

/// Sends parts to their owner, message after message.
async fn drive(session: &Session, map: &Arc<Map>, owner: Ordinal, mut parts: VecDeque<Part>, retry: &Retry) -> Round {
    let client = session.client();
    let mut round = Round::default();
    let mut held: HashMap<PartitionId, Failure> = HashMap::new();
    while !parts.is_empty() {
        if retry.left().is_none() {
            let late = Failure { maybe_executed: false, ..Failure::timed_out() };
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
                let sent = message.send(client, &mut service, client.attempt(retry));
                client.while_owner(map, owner, sent).await
            }
            (_, Err(failure)) => Err(failure),
        };
        sort_out(session, message.into_parts(), reply, &mut held, &mut round).await;
    }
    round
}

/// The next message: parts from the front, numbered under one session, within the limits of a message.
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
        if !message.has_room(part) {
            break;
        }
        let seat = match &part.seat {
            Some(seat) => seat.clone(),
            None => {
                let generation = match message.generation() {
                    Some(generation) => generation.clone(),
                    None => session.generation(retry).await?,
                };
                match generation.take(part.partition) {
                    Some(seq) => Seat { generation, seq },
                    // A request without an answer holds the window: go on under another session.
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
        if message.generation().is_some_and(|generation| !Arc::ptr_eq(generation, &seat.generation)) {
            break;
        }
        let mut part = parts.pop_front().expect("it is at the front");
        part.seat = Some(seat);
        message.push(part);
    }
    Ok(message)
}

/// Gives every part of a message its answer.
async fn sort_out(
    session: &Session,
    parts: Vec<Part>,
    reply: Result<v1::WriteReply, Failure>,
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
        let Some(seat) = part.seat.clone() else { continue };
        let answer = replies.remove(&(part.partition.0, seat.seq));
        let failure = match answer.as_ref().and_then(|answer| answer.result.as_ref()) {
            Some(v1::partition_reply::Result::Outcome(_)) => {
                part.settle();
                round.written.extend(answer.map(|answer| (part.partition, answer)));
                continue;
            }
            Some(v1::partition_reply::Result::Problem(problem)) => Failure::of(problem.clone()),
            None => whole.clone().unwrap_or_else(Failure::timed_out),
        };
        part.maybe_executed |= failure.maybe_executed;
        if failure.retryable {
            held.insert(part.partition, failure.clone());
            round.open.push((part, failure));
            continue;
        }
        part.settle();
        if loses_number(failure.problem.kind()) {
            session.retire(&seat.generation).await;
        }
        round.failed.push(PartFailure { partition: part.partition, error: Error::refused(failure.problem) });
    }
}

/// Whether a number is lost with its write: the partition never saw it, or sees none of its session any more. Enough of those close the
/// window for good, so that the next write begins another session.
const fn loses_number(kind: ProblemKind) -> bool {
    use ProblemKind::{Denied, OutOfWindow, SessionExpired, Unauthenticated};
    matches!(kind, SessionExpired | OutOfWindow | Denied | Unauthenticated)
}

fn note(written: &mut Written, partition: PartitionId, reply: v1::PartitionReply) -> Result<(), Error> {
    if let Some(v1::partition_reply::Result::Outcome(outcome)) = reply.result {
        written.outcome.merge(&outcome.try_into()?);
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

/// One reason for all is that reason; anything else is told part by part.
fn conclude(written: Written, mut failures: Vec<PartFailure>) -> Result<Written, Error> {
    let alike = failures.iter().all(|failure| matches!(failure.error, Error::Refused(_) | Error::Deadline { .. }))
        && failures.windows(2).all(|pair| pair[0].error.kind() == pair[1].error.kind());
    match failures.len() {
        0 => Ok(written),
        1 if written.versions.is_empty() => Err(failures.swap_remove(0).error),
        _ if written.versions.is_empty() && alike => Err(failures.swap_remove(0).error),
        _ => Err(Error::Partial { written: Box::new(written), failures }),
    }
}

impl Client {
    /// How many bytes of parts one message holds: below the limit, since parts are estimated.
    pub(crate) const fn message_bytes() -> usize {
        engram_proto::MAX_MESSAGE_BYTES - (512 << 10)
    }
}

/// What becomes of a part that is given up after one attempt with this answer.
#[cfg(test)]
pub(crate) async fn given_up_after(
    session: &Session,
    partitions: u32,
    answer: Result<v1::WriteReply, Failure>,
) -> Error {
    let opened = engram_memory::SessionId { opened_ms: 1, random: 2 };
    let generation = Arc::new(Generation::new(opened, tokio::time::Instant::now(), partitions));
    let partition = PartitionId(0);
    let seq = generation.take(partition).expect("the first of a window");
    let part = Part { seat: Some(Seat { generation, seq }), ..Part::new(partition, Body::Decay(0.5)) };
    let mut round = Round::default();
    sort_out(session, vec![part], answer, &mut HashMap::new(), &mut round).await;
    let (part, failure) = round.open.pop().expect("it may be tried again");
    part.give_up(Duration::from_secs(1), &failure).error
}
