//! Elastic groups: processes outside of the cluster that sum gradients over TCP, with the membership in the cluster.
//!
//! ```text
//! caller ──buckets──> engine ──TCP──> engines of other members
//!    ^                  │ ^
//!    └──completion──────┘ │work
//!                       member <──notices── worker with the membership service
//! ```
//!
//! Two threads per process: the *member* runs the state machine of [`engram_collective::group`], the *engine* reduces. Buckets are reduced as they
//! are submitted, so that communication overlaps with the backward pass, and handed back once per step.
//!
//! Invariants:
//! - All buckets of a step are reduced over the members of one generation. If the generation changes, all of them are reduced again from the
//!   sums, which are only read.
//! - A step is handed back after every member of its generation holds it, so that survivors of a failure never differ.
//! - A process that missed a step receives a state before it takes part again; the step that it computed meanwhile is handed back as superseded.
//! - No wait is without a limit: a step that does not finish within the limit of the caller fails.

mod engine;
mod join;
mod links;
mod member;
mod secure;
mod state;
mod stream;
mod tcp;
mod wire;

pub use engine::{Committed, Connect, Generation, Outcome};
pub use join::GroupOptions;
pub use member::{Fetch, Outgoing, Signal};
pub use secure::{SecuredSocket, Security};
pub use state::{Provide, StateCopy, StateServer, fetch};
pub use stream::record_id;
pub use wire::{
    notice_from_wire, notice_to_wire, position_from_wire, position_to_wire, report_from_wire, report_to_wire,
};

use engine::{Engine, Work};
use engram_collective::cost::Link;
use engram_collective::group::{MemberId, Position, Timing};
use parking_lot::{Condvar, Mutex, MutexGuard};
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, Sender};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Gradient sums of some parameters, and where their reduced gradient goes.
pub trait Bucket: Send {
    /// Identifies the bucket on all members, for example a hash of the names of its parameters. Unique within a step.
    fn key(&self) -> u32;

    /// Returns the sums, and the place for the reduced gradient: as many elements, in other memory.
    fn parts(&mut self) -> (&[f32], &mut [f32]);
}

/// Receives the buckets of a finished step, on the thread of the engine.
pub type Completion = Box<dyn FnOnce(Result<Outcome, GroupError>, Vec<Box<dyn Bucket>>) + Send>;

/// Why a group failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum GroupError {
    /// A step did not finish, although the group is not paused.
    #[error(
        "step {step} did not finish within {limit_s} s: a member computes longer, or the cluster with the group's record does not answer"
    )]
    Stalled {
        /// The step.
        step: u64,
        /// The limit.
        limit_s: u64,
    },
    /// The worker rejected the process.
    #[error("{0}")]
    Rejected(String),
    /// The group was paused for too long.
    #[error("step {step} did not finish within {limit_s} s: the group has fewer members than min_members")]
    Paused {
        /// The step.
        step: u64,
        /// The limit.
        limit_s: u64,
    },
    /// The process has left the group.
    #[error("this process has left the group")]
    Left,
    /// The listeners could not be opened.
    #[error("failed to listen for members of the group: {0}")]
    Listen(String),
}

/// Where a member is reached.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PeerAddress {
    /// For reductions, HOST:PORT.
    pub reduce: String,
    /// For copies of the state, HOST:PORT.
    pub state: String,
}

/// A state of another member, to be installed by the caller.
#[derive(Debug, Clone)]
pub struct State {
    /// Where it is.
    pub position: Position,
    /// What the caller of that member provided.
    pub content: Arc<Vec<u8>>,
}

/// What the caller can do next.
#[derive(Debug)]
pub enum Readiness {
    /// The process is a member of a generation that trains.
    Ready,
    /// Install this state, then call [`Group::installed`].
    Install(State),
    /// Neither within the limit; why, as far as it is known.
    Pending(&'static str),
}

/// The membership as this process knows it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct View {
    /// Generation; 0 outside of any.
    pub generation: u64,
    /// Own rank.
    pub rank: usize,
    /// Number of members.
    pub size: usize,
    /// The last committed step.
    pub step: u64,
    /// Whether the group has too few members to train.
    pub is_paused: bool,
}

/// Sums since the start.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    steps: AtomicU64,
    skipped: AtomicU64,
    superseded: AtomicU64,
    /// Steps that were reduced more than once.
    repeated: AtomicU64,
    reduce_ns: AtomicU64,
    hidden_ns: AtomicU64,
    exposed_ns: AtomicU64,
    recoveries: AtomicU64,
    recovery_ns: AtomicU64,
    max_recovery_ns: AtomicU64,
    pub(crate) sent_bytes: AtomicU64,
    /// Slowest link of the newest generation.
    link_latency_ns: AtomicU64,
    link_bytes_per_second: AtomicU64,
}

impl Counters {
    fn set_link(&self, link: &Link) {
        self.link_latency_ns.store((link.alpha * 1e9) as u64, Ordering::Relaxed);
        self.link_bytes_per_second.store((1.0 / link.beta) as u64, Ordering::Relaxed);
    }
}

/// Figures of a member since its start.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct GroupStatistics {
    /// Committed steps, without skipped ones.
    pub steps: u64,
    /// Steps that all members skipped, since a reduced gradient was not finite.
    pub skipped: u64,
    /// Steps of this process that the group finished without it.
    pub superseded: u64,
    /// Steps that were reduced again over other members.
    pub repeated: u64,
    /// Time in reductions, the wait for other members included.
    pub reduce_seconds: f64,
    /// Part of it before the last bucket was submitted: hidden behind the backward pass.
    pub hidden_seconds: f64,
    /// Time from the last bucket to the end of the step.
    pub exposed_seconds: f64,
    /// Changes of the membership during a step.
    pub recoveries: u64,
    /// Time from the first sign of a failure to the next committed step: of the last one, and the longest.
    pub last_recovery_seconds: f64,
    /// See [`Self::last_recovery_seconds`].
    pub max_recovery_seconds: f64,
    /// Bytes of messages sent to other members.
    pub sent_bytes: u64,
    /// Latency of the slowest link between members, measured when the newest generation was formed; 0 before.
    pub link_latency_seconds: f64,
    /// Bytes per second of the slowest link, see [`Self::link_latency_seconds`].
    pub link_bytes_per_second: f64,
}

#[derive(Debug, Default)]
pub(crate) struct Status {
    view: View,
    install: Option<State>,
    is_installing: bool,
    failure: Option<GroupError>,
    has_left: bool,
    /// Positions after the last steps, for copies of the state.
    history: VecDeque<Position>,
}

/// Steps whose positions are remembered: a caller is at most one step behind the group.
const HISTORY: usize = 8;

/// What threads and callers share.
#[derive(Debug, Default)]
pub(crate) struct Shared {
    status: Mutex<Status>,
    changed: Condvar,
    pub(crate) counters: Counters,
}

impl Shared {
    fn status(&self) -> MutexGuard<'_, Status> {
        self.status.lock()
    }

    fn change(&self, change: impl FnOnce(&mut Status)) {
        change(&mut self.status());
        self.changed.notify_all();
    }

    /// Keeps the first failure.
    fn fail(&self, failure: GroupError) {
        self.change(|status| {
            status.failure.get_or_insert(failure);
        });
    }

    fn reached(&self, position: Position) {
        self.change(|status| {
            status.view.step = position.step;
            status.history.push_back(position);
            if status.history.len() > HISTORY {
                status.history.pop_front();
            }
        });
    }
}

/// What a group is made of.
pub struct Parts {
    /// Identifies this process; a restarted one has another id.
    pub id: MemberId,
    /// Of the state that the caller has.
    pub position: Position,
    /// The timeouts.
    pub timing: Timing,
    /// Connects the members of a generation.
    pub connect: Box<dyn Connect>,
    /// Sends messages to the membership service.
    pub outgoing: Outgoing,
    /// Fetches a state from other members.
    pub fetch: Fetch,
    /// Longest wait for the end of a step, also while the group is paused.
    pub wait_limit: Duration,
}

/// This process in a group.
pub struct Group {
    shared: Arc<Shared>,
    signals: Sender<Signal>,
    work: Sender<Work>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    timing: Timing,
}

impl std::fmt::Debug for Group {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Group").field("view", &self.view()).finish_non_exhaustive()
    }
}

impl Group {
    /// Starts the threads. Messages of the membership service are sent to the returned channel.
    ///
    /// # Errors
    /// The operating system starts no thread.
    pub fn start(parts: Parts) -> std::io::Result<(Self, Sender<Signal>)> {
        let shared = Arc::<Shared>::default();
        Self::start_with(parts, shared)
    }

    fn start_with(parts: Parts, shared: Arc<Shared>) -> std::io::Result<(Self, Sender<Signal>)> {
        let Parts { id, position, timing, connect, outgoing, fetch, wait_limit } = parts;
        shared.reached(position);
        let (signals, received) = mpsc::channel();
        let (work, works) = mpsc::channel();
        let limit = Duration::from_millis(timing.progress_ms());
        let engine = Engine::new(position, (limit, wait_limit), connect, signals.clone(), Arc::clone(&shared));
        let member =
            member::Driver::new(id, position, (timing, wait_limit), work.clone(), outgoing, fetch, Arc::clone(&shared));
        let threads = vec![
            std::thread::Builder::new().name("group-reduce".into()).spawn(move || engine.run(&works))?,
            std::thread::Builder::new().name("group-member".into()).spawn({
                let signals = signals.clone();
                move || member.run(&received, &signals)
            })?,
        ];
        let group = Self { shared, signals: signals.clone(), work, threads: Mutex::new(threads), timing };
        Ok((group, signals))
    }

    /// Submits a bucket of the open step: it may be reduced at once. All members submit buckets of the same keys in the same order.
    ///
    /// # Errors
    /// The group failed or was left.
    pub fn submit(&self, bucket: Box<dyn Bucket>) -> Result<(), GroupError> {
        self.check()?;
        self.work.send(Work::Bucket(bucket)).map_err(|_| GroupError::Left)
    }

    /// Ends the open step: all its buckets are submitted. The sums are of `samples` samples; the reduced gradient is divided by the samples of all
    /// members. `state_digest` is that of the state before this step, or 0: members with another one receive the state of the majority.
    ///
    /// # Errors
    /// The group failed or was left; the completion is dropped.
    pub fn finish(&self, samples: u64, state_digest: u64, completion: Completion) -> Result<(), GroupError> {
        self.check()?;
        self.work.send(Work::Finish { samples, state_digest, completion }).map_err(|_| GroupError::Left)
    }

    fn check(&self) -> Result<(), GroupError> {
        let status = self.shared.status();
        match &status.failure {
            Some(failure) => Err(failure.clone()),
            None if status.has_left => Err(GroupError::Left),
            None => Ok(()),
        }
    }

    /// Waits until the process is a member, or a state must be installed.
    ///
    /// # Errors
    /// The group failed or was left.
    pub fn wait_ready(&self, limit: Duration) -> Result<Readiness, GroupError> {
        let end = Instant::now() + limit;
        let mut status = self.shared.status();
        loop {
            if let Some(failure) = &status.failure {
                return Err(failure.clone());
            }
            if status.has_left {
                return Err(GroupError::Left);
            }
            if let Some(state) = status.install.take() {
                status.is_installing = true;
                return Ok(Readiness::Install(state));
            }
            if status.view.generation > 0 && !status.view.is_paused && !status.is_installing {
                return Ok(Readiness::Ready);
            }
            if self.shared.changed.wait_until(&mut status, end).timed_out() {
                return Ok(Readiness::Pending(match (&status.view, status.is_installing) {
                    (_, true) => "a state is being installed",
                    (view, _) if view.is_paused => "the group has fewer members than min_members",
                    _ => "the process is not a member yet",
                }));
            }
        }
    }

    /// The caller installed a state.
    pub fn installed(&self, position: Position) {
        self.shared.change(|status| {
            status.is_installing = false;
            status.history.clear();
        });
        self.shared.reached(position);
        // Without a receiver the group has ended, which the next call reports.
        let _ = self.signals.send(Signal::Installed(position));
    }

    /// Returns the position after `step`, if it is one of the last ones.
    pub fn position_after(&self, step: u64) -> Option<Position> {
        self.shared.status().history.iter().rev().find(|position| position.step == step).copied()
    }

    /// Returns the membership.
    pub fn view(&self) -> View {
        self.shared.status().view.clone()
    }

    /// Returns the timeouts.
    pub const fn timing(&self) -> Timing {
        self.timing
    }

    /// Returns figures since the start.
    pub fn statistics(&self) -> GroupStatistics {
        let counters = &self.shared.counters;
        let count = |it: &AtomicU64| it.load(Ordering::Relaxed);
        let seconds = |it: &AtomicU64| count(it) as f64 / 1e9;
        GroupStatistics {
            steps: count(&counters.steps),
            skipped: count(&counters.skipped),
            superseded: count(&counters.superseded),
            repeated: count(&counters.repeated),
            reduce_seconds: seconds(&counters.reduce_ns),
            hidden_seconds: seconds(&counters.hidden_ns),
            exposed_seconds: seconds(&counters.exposed_ns),
            recoveries: count(&counters.recoveries),
            last_recovery_seconds: seconds(&counters.recovery_ns),
            max_recovery_seconds: seconds(&counters.max_recovery_ns),
            sent_bytes: count(&counters.sent_bytes),
            link_latency_seconds: seconds(&counters.link_latency_ns),
            link_bytes_per_second: count(&counters.link_bytes_per_second) as f64,
        }
    }

    /// Leaves the group at the end of the open step, and waits at most `limit` for it.
    pub fn leave(&self, limit: Duration) {
        if self.signals.send(Signal::Leave).is_err() {
            return;
        }
        let end = Instant::now() + limit;
        let mut status = self.shared.status();
        while !status.has_left && status.failure.is_none() {
            if self.shared.changed.wait_until(&mut status, end).timed_out() {
                break;
            }
        }
        drop(status);
        self.stop();
    }

    /// Ends the threads without a message to the other members, which find it as a failure.
    pub fn stop(&self) {
        self.shared.change(|status| status.has_left = true);
        // They may have ended already.
        let _ = self.signals.send(Signal::Stop);
        let _ = self.work.send(Work::Stop);
        let own = std::thread::current().id();
        for thread in self.threads.lock().drain(..).filter(|thread| thread.thread().id() != own) {
            // A panic of a thread was printed.
            let _ = thread.join();
        }
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        self.stop();
    }
}
