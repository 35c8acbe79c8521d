//! The thread of a group that reduces: it executes what the member decides, and never decides whether a step counts.

use super::{Bucket, Completion, GroupError, PeerAddress, Shared, Signal};
use engram_collective::cost::Link;
use engram_collective::executor::{Executor, Plan, Reduction};
use engram_collective::group::{Cause, MemberId, Position, Suspicion};
use engram_collective::measure::Network;
use engram_collective::message::Tag;
use engram_collective::transport::{Error, Transport, Wait};
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, SyncSender, TryRecvError};
use std::time::{Duration, Instant};
use xxhash_rust::xxh3::Xxh3;

/// Buckets of messages that are no gradients. Keys of gradients with these values are changed.
const COUNTS: u32 = u32::MAX;
const FLAGS: u32 = u32::MAX - 1;
/// Bytes of samples and digest of a member.
const COUNT_BYTES: usize = 16;
/// Elements that are divided, checked and hashed while they are in the cache.
const BLOCK: usize = 16 << 10;

/// A generation as a member sees it.
#[derive(Debug, Clone)]
pub struct Generation {
    /// Its number.
    pub number: u64,
    /// Members in rank order.
    pub members: Vec<(MemberId, PeerAddress)>,
    /// Own rank.
    pub rank: usize,
    /// Set when the generation ends.
    pub cancel: Arc<AtomicBool>,
}

/// Connects the members of a generation.
pub trait Connect: Send {
    /// Connects to all other members. `wait` has the limit of an attempt, decides how long a member that does not answer is waited for, and ends with the
    /// generation.
    ///
    /// # Errors
    /// The first member that cannot be reached, and those of `wait`.
    fn connect(&mut self, generation: &Generation, wait: &mut Wait<'_>) -> Result<Box<dyn Transport + Send>, Error>;
}

/// How a step ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// Every member holds the reduced gradient, divided by the number of samples.
    Applied(Committed),
    /// Every member skips the step: a reduced gradient is not finite.
    Skipped(Committed),
    /// The group goes on without this step of this process, which receives a state.
    Superseded,
}

/// A step that all members of a generation finished.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Committed {
    /// The step.
    pub step: u64,
    /// The generation that reduced it.
    pub generation: u64,
    /// Its members in rank order.
    pub members: Vec<MemberId>,
    /// Samples of all members.
    pub samples: u64,
}

/// One piece of work.
pub(crate) enum Work {
    Bucket(Box<dyn Bucket>),
    Finish {
        samples: u64,
        state_digest: u64,
        completion: Completion,
    },
    /// The member is part of a generation that trains.
    Generation(Generation),
    /// The member wants to know when the sums of a step are complete.
    Compute {
        step: u64,
    },
    /// The sums are complete, and the member wants them reduced.
    Reduce {
        step: u64,
    },
    Flags {
        step: u64,
        valid: bool,
    },
    Apply {
        step: u64,
        apply: bool,
        digest: SyncSender<u64>,
    },
    /// Steps of this process do not count until a state is installed.
    Supersede,
    Installed(Position),
    Fail(GroupError),
    Stop,
}

/// What happened in the engine.
#[derive(Debug, Clone, Copy)]
pub(crate) enum EngineEvent {
    Gradients { step: u64 },
    Reduced { generation: u64, step: u64, valid: bool },
    Flag { generation: u64, step: u64, from: MemberId, valid: bool },
    PeerFailed { generation: u64, suspicion: Suspicion },
}

struct Finish {
    samples: u64,
    state_digest: u64,
    completion: Completion,
    at: Instant,
}

/// A step whose buckets are all reduced.
#[derive(Clone)]
struct Prepared {
    committed: Committed,
    digest: u64,
}

pub(crate) struct Engine {
    position: Position,
    pub(super) limit: Duration,
    wait_limit: Duration,
    pub(super) connect: Box<dyn Connect>,
    pub(super) signals: Sender<Signal>,
    pub(super) shared: Arc<Shared>,
    executor: Executor,
    /// Of the generation, by elements.
    pub(super) plans: HashMap<usize, Plan>,
    pub(super) generation: Option<Generation>,
    pub(super) transport: Option<Box<dyn Transport + Send>>,
    /// Links of the generation, the same on all members.
    pub(super) network: Network,
    /// The connections of this generation failed.
    is_broken: bool,
    buckets: Vec<Box<dyn Bucket>>,
    finish: Option<Finish>,
    /// Buckets that are reduced in this generation.
    reduced: usize,
    /// The open step was reduced in an earlier generation.
    is_repeated: bool,
    /// The member wants the whole step reduced.
    is_complete: bool,
    prepared: Option<Prepared>,
    is_stale: bool,
    failing_since: Option<Instant>,
}

impl Engine {
    pub(crate) fn new(
        position: Position,
        (limit, wait_limit): (Duration, Duration),
        connect: Box<dyn Connect>,
        signals: Sender<Signal>,
        shared: Arc<Shared>,
    ) -> Self {
        Self {
            position,
            limit,
            wait_limit,
            connect,
            signals,
            shared,
            executor: Executor::new(),
            plans: HashMap::new(),
            generation: None,
            transport: None,
            network: Network::assumed(Link::LOOPBACK, 1),
            is_broken: false,
            buckets: Vec::new(),
            finish: None,
            reduced: 0,
            is_repeated: false,
            is_complete: false,
            prepared: None,
            is_stale: false,
            failing_since: None,
        }
    }

    /// Executes work until it is stopped.
    pub(crate) fn run(mut self, works: &Receiver<Work>) {
        loop {
            let next = if self.can_reduce() {
                match works.try_recv() {
                    Ok(work) => Some(work),
                    Err(TryRecvError::Empty) => None,
                    Err(TryRecvError::Disconnected) => break,
                }
            } else {
                match works.recv_timeout(self.wait_limit) {
                    Ok(work) => Some(work),
                    Err(RecvTimeoutError::Timeout) => {
                        self.check_limit();
                        continue;
                    }
                    Err(RecvTimeoutError::Disconnected) => break,
                }
            };
            match next {
                Some(Work::Stop) => break,
                Some(work) => self.execute_work(work),
                None => self.reduce_next(),
            }
        }
        self.complete(Err(GroupError::Left));
    }

    /// Fails a step that the caller waits for too long.
    fn check_limit(&mut self) {
        if self.finish.as_ref().is_some_and(|finish| finish.at.elapsed() >= self.wait_limit) {
            let failure = GroupError::Paused { step: self.position.step + 1, limit_s: self.wait_limit.as_secs() };
            self.shared.fail(failure.clone());
            self.complete(Err(failure));
        }
    }

    fn execute_work(&mut self, work: Work) {
        match work {
            Work::Bucket(bucket) => self.buckets.push(bucket),
            Work::Finish { samples, state_digest, completion } => {
                self.finish = Some(Finish { samples, state_digest, completion, at: Instant::now() });
                self.finished();
            }
            Work::Generation(generation) => self.start_generation(generation),
            Work::Compute { step } => {
                if self.finish.is_some() && step == self.position.step + 1 {
                    self.send(EngineEvent::Gradients { step });
                }
            }
            Work::Reduce { step } => self.is_complete = step == self.position.step + 1,
            Work::Flags { step, valid } => self.flags(step, valid),
            Work::Apply { step, apply, digest } => self.apply(step, apply, &digest),
            Work::Supersede => {
                self.is_stale = true;
                self.leave_generation();
                if self.finish.is_some() {
                    self.supersede();
                }
            }
            Work::Installed(position) => {
                (self.position, self.is_stale) = (position, false);
                (self.reduced, self.is_repeated, self.is_complete, self.prepared) = (0, false, false, None);
            }
            Work::Fail(failure) => {
                self.shared.fail(failure.clone());
                self.complete(Err(failure));
            }
            Work::Stop => {}
        }
    }

    fn send(&self, event: EngineEvent) {
        // Without a receiver the group is ending.
        let _ = self.signals.send(Signal::Engine(event));
    }

    /// The caller submitted all buckets of the open step.
    fn finished(&mut self) {
        let failure = self.shared.status().failure.clone();
        if let Some(failure) = failure {
            self.complete(Err(failure));
        } else if self.is_stale {
            self.supersede();
        } else {
            self.send(EngineEvent::Gradients { step: self.position.step + 1 });
        }
    }

    fn supersede(&mut self) {
        self.shared.counters.superseded.fetch_add(1, Ordering::Relaxed);
        self.complete(Ok(Outcome::Superseded));
    }

    fn leave_generation(&mut self) {
        (self.generation, self.transport, self.prepared) = (None, None, None);
        (self.reduced, self.is_complete) = (0, false);
    }

    fn start_generation(&mut self, generation: Generation) {
        self.is_repeated |= self.reduced > 0;
        self.leave_generation();
        self.is_broken = false;
        self.generation = Some(generation);
    }

    /// Whether a bucket can be reduced, or the step completed.
    fn can_reduce(&self) -> bool {
        let Some(generation) = self.generation.as_ref().filter(|_| !self.is_broken && !self.is_stale) else {
            return false;
        };
        let is_last = self.finish.is_some() && self.is_complete;
        self.prepared.is_none()
            && !generation.cancel.load(Ordering::Relaxed)
            && (self.reduced < self.buckets.len() || is_last)
    }

    fn reduce_next(&mut self) {
        let started = Instant::now();
        let result = self
            .establish()
            .and_then(|()| if self.reduced < self.buckets.len() { self.reduce_bucket() } else { self.complete_step() });
        let elapsed = started.elapsed().as_nanos() as u64;
        let counters = &self.shared.counters;
        counters.reduce_ns.fetch_add(elapsed, Ordering::Relaxed);
        if self.finish.is_none() {
            counters.hidden_ns.fetch_add(elapsed, Ordering::Relaxed);
        }
        if let Err(error) = result {
            self.failed(&error);
        }
    }

    fn failed(&mut self, error: &Error) {
        (self.transport, self.is_broken) = (None, true);
        let Some(generation) = self.generation.as_ref().filter(|_| !matches!(error, Error::Cancelled)) else { return };
        self.failing_since.get_or_insert_with(Instant::now);
        tracing::warn!(%error, generation = generation.number, "reduction failed");
        let Some((peer, _)) = error.rank().and_then(|rank| generation.members.get(rank)) else { return };
        let suspicion = Suspicion { peer: *peer, cause: Cause::Broken };
        self.send(EngineEvent::PeerFailed { generation: generation.number, suspicion });
    }

    fn reduce_bucket(&mut self) -> Result<(), Error> {
        let step = self.position.step + 1;
        let generation = self.generation.as_ref().expect("the caller checked it");
        let bucket = &mut self.buckets[self.reduced];
        let key = bucket.key().min(FLAGS - 1);
        let (sums, reduced) = bucket.parts();
        if let Some(transport) = &mut self.transport {
            let network = &self.network;
            let plan = self.plans.entry(sums.len()).or_insert_with(|| {
                let algorithm = network.choose(size_of_val(sums), true);
                Plan::new(algorithm, generation.rank, sums.len(), &network.weights(algorithm))
            });
            let mut keep_waiting = suspect(&self.signals, generation);
            let mut wait = Wait::new(self.limit, &generation.cancel, &mut keep_waiting);
            let reduction = Reduction { generation: generation.number, step, bucket: key };
            self.executor.all_reduce(&mut **transport, reduction, plan, sums, reduced, &mut wait)?;
        } else {
            reduced.copy_from_slice(sums);
        }
        self.reduced += 1;
        Ok(())
    }

    /// Exchanges samples and digests, and divides.
    fn complete_step(&mut self) -> Result<(), Error> {
        let step = self.position.step + 1;
        let Some(Finish { samples, state_digest, .. }) = self.finish else { return Ok(()) };
        let own = [samples.to_le_bytes(), state_digest.to_le_bytes()].concat();
        let all = self.exchange(step, COUNTS, &own)?;
        let number = |bytes: &[u8]| u64::from_le_bytes(bytes.try_into().expect("it has eight bytes"));
        let total: u64 = all.iter().map(|bytes| number(&bytes[..8])).fold(0, u64::saturating_add);
        // Members whose states differ get different positions: the service keeps the state of most of them.
        let mut hash = Xxh3::new();
        for value in [self.position.digest, step, total, state_digest] {
            hash.update(&value.to_le_bytes());
        }
        let divisor = total.max(1) as f32;
        let is_finite = self.buckets.iter_mut().fold(true, |is_finite, bucket| {
            let finite = divide(bucket.parts().1, divisor, &mut hash);
            is_finite && finite
        });
        let generation = self.generation.as_ref().expect("the caller checked it");
        let members = generation.members.iter().map(|(id, _)| *id).collect();
        let committed = Committed { step, generation: generation.number, members, samples: total };
        self.prepared = Some(Prepared { committed, digest: hash.digest() });
        self.send(EngineEvent::Reduced { generation: generation.number, step, valid: is_finite && total > 0 });
        Ok(())
    }

    /// Sends `own` to all ranks; returns what all ranks sent, in rank order.
    fn exchange(&mut self, step: u64, bucket: u32, own: &[u8]) -> Result<Vec<Vec<u8>>, Error> {
        let generation = self.generation.as_ref().expect("the caller checked it");
        let Some(transport) = &mut self.transport else { return Ok(vec![own.to_vec()]) };
        let mut keep_waiting = suspect(&self.signals, generation);
        let mut wait = Wait::new(self.limit, &generation.cancel, &mut keep_waiting);
        let (number, rank) = (generation.number, generation.rank);
        let tag = |from: usize| Tag { generation: number, step, bucket, phase: 0, chunk: 0, from: from as u16 };
        let ranks = generation.members.len();
        for to in (0..ranks).filter(|to| *to != rank) {
            transport.send(to, tag(rank), own, &mut wait)?;
        }
        let mut all = Vec::with_capacity(ranks);
        for from in 0..ranks {
            let mut bytes = own.to_vec();
            if from != rank {
                transport.receive(tag(from), &mut bytes, &mut wait)?;
            }
            all.push(bytes);
        }
        Ok(all)
    }

    fn flags(&mut self, step: u64, valid: bool) {
        let Some(prepared) = self.prepared.as_ref().filter(|it| it.committed.step == step && !self.is_broken) else {
            return;
        };
        let (number, members) = (prepared.committed.generation, prepared.committed.members.clone());
        let Some(rank) = self.generation.as_ref().filter(|it| it.number == number).map(|it| it.rank) else { return };
        match self.exchange(step, FLAGS, &[u8::from(valid)]) {
            Ok(flags) => {
                for (from, flag) in
                    members.into_iter().zip(flags).enumerate().filter(|(it, _)| *it != rank).map(|it| it.1)
                {
                    self.send(EngineEvent::Flag { generation: number, step, from, valid: flag[0] == 1 });
                }
            }
            Err(error) => self.failed(&error),
        }
    }

    fn apply(&mut self, step: u64, apply: bool, digest: &SyncSender<u64>) {
        let Some(Prepared { committed, digest: reduced }) = self.prepared.take() else { return };
        if committed.step != step {
            return;
        }
        let mut hash = Xxh3::new();
        hash.update(&reduced.to_le_bytes());
        hash.update(&[u8::from(apply)]);
        self.position = Position { step, digest: hash.digest() };
        (self.reduced, self.is_complete) = (0, false);
        self.shared.reached(self.position);
        self.count(apply);
        // Without a receiver the group is ending.
        let _ = digest.send(self.position.digest);
        self.complete(Ok(if apply { Outcome::Applied(committed) } else { Outcome::Skipped(committed) }));
    }

    fn count(&mut self, apply: bool) {
        let counters = &self.shared.counters;
        let add = |counter: &std::sync::atomic::AtomicU64, value: u64| {
            counter.fetch_add(value, Ordering::Relaxed);
        };
        add(if apply { &counters.steps } else { &counters.skipped }, 1);
        add(&counters.repeated, u64::from(std::mem::take(&mut self.is_repeated)));
        if let Some(finish) = &self.finish {
            add(&counters.exposed_ns, finish.at.elapsed().as_nanos() as u64);
        }
        if let Some(since) = self.failing_since.take() {
            let elapsed = since.elapsed().as_nanos() as u64;
            add(&counters.recoveries, 1);
            counters.recovery_ns.store(elapsed, Ordering::Relaxed);
            counters.max_recovery_ns.fetch_max(elapsed, Ordering::Relaxed);
        }
    }

    /// Hands the open step back, if its buckets are complete; otherwise its buckets are kept until they are.
    fn complete(&mut self, result: Result<Outcome, GroupError>) {
        if let Some(finish) = self.finish.take() {
            (finish.completion)(result, std::mem::take(&mut self.buckets));
        }
    }
}

/// Reports members that make no progress; the reduction waits until it is cancelled.
pub(super) fn suspect(signals: &Sender<Signal>, generation: &Generation) -> impl FnMut(usize) -> bool {
    let signals = signals.clone();
    let (number, members): (u64, Vec<MemberId>) =
        (generation.number, generation.members.iter().map(|(id, _)| *id).collect());
    move |rank| {
        let suspicion = Suspicion { peer: members[rank], cause: Cause::Stalled };
        // Without a receiver the group is ending.
        let _ = signals.send(Signal::Engine(EngineEvent::PeerFailed { generation: number, suspicion }));
        true
    }
}

/// Divides, adds the results to the hash, and returns whether all are finite.
fn divide(values: &mut [f32], divisor: f32, hash: &mut Xxh3) -> bool {
    let mut is_finite = true;
    for block in values.chunks_mut(BLOCK) {
        let mut finite = true;
        for value in &mut *block {
            *value /= divisor;
            finite &= value.is_finite();
        }
        is_finite &= finite;
        hash.update(bytemuck::cast_slice(block));
    }
    is_finite
}

const _: () = assert!(COUNT_BYTES == 2 * size_of::<u64>());
