//! The thread of a group that runs the member's state machine, and passes its decisions to the engine.

use super::engine::{EngineEvent, Generation, Work};
use super::{GroupError, PeerAddress, Shared, State};
use engram_collective::group::{
    Member, MemberAction, MemberEvent, MemberId, Notice, Position, Prepared, Report, Stage, Timing,
};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, sync_channel};
use std::time::{Duration, Instant};

/// Sends the status of the member, or `None` as answer to a probe, to the membership service. A lost one is replaced by the next.
pub type Outgoing = Box<dyn FnMut(Option<Report>) + Send>;
/// Fetches a state at a position, or a later one, from members with these addresses, and passes it to the callback; does not block.
pub type Fetch = Box<dyn FnMut(Position, Vec<PeerAddress>, Box<dyn FnOnce(Option<State>) + Send>) + Send>;

/// What a member receives.
#[derive(Debug)]
pub enum Signal {
    /// A connection to the membership service is open.
    Connected,
    /// The service sent a message under a term, which names members with these addresses.
    Notice(u64, Notice, Vec<(MemberId, PeerAddress)>),
    /// The service requests a sign of life.
    Probe,
    /// The service rejected the process.
    Rejected(String),
    /// The caller installed a state.
    Installed(Position),
    /// The caller wants to leave.
    Leave,
    /// The caller ends the group.
    Stop,
    #[doc(hidden)]
    Fetched(Option<State>),
    #[doc(hidden)]
    #[allow(private_interfaces, reason = "only the engine sends it")]
    Engine(EngineEvent),
}

pub(crate) struct Driver {
    id: MemberId,
    member: Member,
    timing: Timing,
    started: Instant,
    work: Sender<Work>,
    outgoing: Outgoing,
    fetch: Fetch,
    shared: Arc<Shared>,
    generation: Option<Generation>,
    addresses: BTreeMap<MemberId, PeerAddress>,
    /// Generation and step of the flags that the engine exchanges.
    flagged: Option<(u64, u64)>,
    is_fetching: bool,
    wait_limit: Duration,
    /// The step that does not finish, and how often that was found.
    stalled: (u64, u32),
}

impl Driver {
    pub(crate) fn new(
        id: MemberId,
        position: Position,
        (timing, wait_limit): (Timing, Duration),
        work: Sender<Work>,
        outgoing: Outgoing,
        fetch: Fetch,
        shared: Arc<Shared>,
    ) -> Self {
        Self {
            id,
            member: Member::new(id, position, timing, 0),
            timing,
            started: Instant::now(),
            work,
            outgoing,
            fetch,
            shared,
            generation: None,
            addresses: BTreeMap::new(),
            flagged: None,
            is_fetching: false,
            wait_limit,
            stalled: (0, 0),
        }
    }

    /// Handles signals until it is stopped.
    pub(crate) fn run(mut self, signals: &Receiver<Signal>, own: &Sender<Signal>) {
        let interval = Duration::from_millis(self.timing.probe_ms());
        let mut next = Instant::now() + interval;
        loop {
            let is_running = match signals.recv_timeout(next.saturating_duration_since(Instant::now())) {
                Ok(Signal::Stop) | Err(RecvTimeoutError::Disconnected) => false,
                Ok(signal) => self.signal(signal, own),
                Err(RecvTimeoutError::Timeout) => {
                    next = Instant::now() + interval;
                    self.step(MemberEvent::Tick, own)
                }
            };
            if !is_running {
                self.cancel();
                break;
            }
        }
    }

    fn now_ms(&self) -> u64 {
        self.started.elapsed().as_millis() as u64
    }

    fn cancel(&self) {
        if let Some(generation) = &self.generation {
            generation.cancel.store(true, Ordering::Relaxed);
        }
    }

    fn work(&self, work: Work) -> bool {
        self.work.send(work).is_ok()
    }

    fn signal(&mut self, signal: Signal, own: &Sender<Signal>) -> bool {
        match signal {
            Signal::Connected => {
                (self.outgoing)(Some(self.member.report()));
                true
            }
            Signal::Probe => {
                (self.outgoing)(None);
                true
            }
            Signal::Notice(term, notice, addresses) => self.notice(term, notice, addresses, own),
            Signal::Rejected(message) => self.fail(GroupError::Rejected(message)),
            Signal::Installed(position) => {
                self.work(Work::Installed(position)) && self.step(MemberEvent::CaughtUp { position }, own)
            }
            Signal::Fetched(state) => {
                self.is_fetching = false;
                if let Some(state) = state {
                    self.shared.change(|status| status.install = Some(state));
                }
                true
            }
            Signal::Leave => self.step(MemberEvent::Leave, own),
            Signal::Engine(event) => self.engine_event(event, own),
            Signal::Stop => false,
        }
    }

    fn engine_event(&mut self, event: EngineEvent, own: &Sender<Signal>) -> bool {
        let event = match event {
            EngineEvent::Gradients { step } => MemberEvent::Gradients { step },
            EngineEvent::Reduced { generation, step, valid } => MemberEvent::Reduced { generation, step, valid },
            EngineEvent::Flag { generation, step, from, valid } => {
                MemberEvent::Flag { from, flag: Prepared { generation, step, valid } }
            }
            EngineEvent::PeerFailed { generation, suspicion } => MemberEvent::PeerFailed { generation, suspicion },
        };
        self.step(event, own)
    }

    fn notice(
        &mut self,
        term: u64,
        notice: Notice,
        addresses: Vec<(MemberId, PeerAddress)>,
        own: &Sender<Signal>,
    ) -> bool {
        self.addresses.extend(addresses);
        let published = match &notice {
            Notice::Publish { record, paused } => Some((record.clone(), *paused)),
            _ => None,
        };
        let known = self.member.report().generation;
        // The engine must know the generation before it is asked to reduce.
        let mut next = None;
        if let Some((record, paused)) = &published
            && let Some(rank) =
                record.members.iter().position(|it| *it == self.id).filter(|_| record.generation > known)
        {
            let address = |id: &MemberId| self.addresses.get(id).cloned().unwrap_or_default();
            let members = record.members.iter().map(|id| (*id, address(id))).collect();
            next = Some((Generation { number: record.generation, members, rank, cancel: Arc::default() }, *paused));
        }
        let mut actions = VecDeque::from(self.member.step(MemberEvent::Notice { term, notice }, self.now_ms()));
        if let Some((generation, paused)) = next.filter(|(it, _)| self.member.report().generation == it.number) {
            // It ends the reduction of the previous generation, and must not end one of this.
            actions.retain(|action| *action != MemberAction::Cancel);
            self.enter(generation, paused);
        }
        let is_running = self.execute_actions(&mut actions, own);
        if matches!(self.member.report().stage, Stage::Fenced | Stage::Outside) {
            // An exchange of flags ends as well: the service finishes the step or repeats it.
            self.cancel();
        }
        is_running
    }

    /// Enters a generation that the state machine accepted.
    fn enter(&mut self, generation: Generation, paused: bool) {
        self.cancel();
        let (number, rank, size) = (generation.number, generation.rank, generation.members.len());
        self.generation = Some(generation.clone());
        if !paused {
            // The engine ends with the group only.
            let _ = self.work.send(Work::Generation(generation));
        }
        self.shared.change(|status| {
            let view = &mut status.view;
            (view.generation, view.rank, view.size, view.is_paused) = (number, rank, size, paused);
        });
        tracing::info!(generation = number, rank, size, paused, "member of a generation");
    }

    /// Passes an event to the state machine and executes its actions; returns whether the member goes on.
    fn step(&mut self, event: MemberEvent, own: &Sender<Signal>) -> bool {
        let mut actions = VecDeque::from(self.member.step(event, self.now_ms()));
        self.execute_actions(&mut actions, own)
    }

    fn execute_actions(&mut self, actions: &mut VecDeque<MemberAction>, own: &Sender<Signal>) -> bool {
        while let Some(action) = actions.pop_front() {
            let is_running = match action {
                MemberAction::Compute { step } => self.work(Work::Compute { step }),
                MemberAction::Reduce { step, .. } => self.work(Work::Reduce { step }),
                MemberAction::Cancel => {
                    self.cancel();
                    true
                }
                MemberAction::SendFlag { flag, .. } => self.exchange_flags(flag),
                MemberAction::Apply { step, apply } => {
                    let (digest, applied) = sync_channel(1);
                    if !self.work(Work::Apply { step, apply, digest }) {
                        return false;
                    }
                    // The state machine must see nothing before this.
                    let Ok(digest) = applied.recv() else { return false };
                    actions.extend(self.member.step(MemberEvent::Applied { digest }, self.now_ms()));
                    true
                }
                MemberAction::Report(report) => {
                    (self.outgoing)(Some(report));
                    true
                }
                MemberAction::CatchUp { position, sources } => self.catch_up(position, &sources, own),
                MemberAction::Left => {
                    self.shared.change(|status| status.has_left = true);
                    false
                }
                MemberAction::Stalled { step } => self.stalled(step),
            };
            if !is_running {
                return false;
            }
        }
        true
    }

    /// Fails the step at the limit: until then another member may compute, or the membership service may move. A process outside of the group waits as
    /// long as its caller does.
    fn stalled(&mut self, step: u64) -> bool {
        if self.member.report().generation == 0 {
            return true;
        }
        let times = if self.stalled.0 == step { self.stalled.1 + 1 } else { 1 };
        self.stalled = (step, times);
        let waited = Duration::from_millis(self.timing.abort_ms()) * times;
        tracing::warn!(step, seconds = waited.as_secs_f64(), "a step does not finish");
        waited < self.wait_limit || self.fail(GroupError::Stalled { step, limit_s: self.wait_limit.as_secs() })
    }

    /// Ends the open step with a failure.
    fn fail(&self, failure: GroupError) -> bool {
        self.cancel();
        self.work(Work::Fail(failure))
    }

    /// Lets the engine exchange flags, once per step and generation: the connections lose nothing.
    fn exchange_flags(&mut self, flag: Prepared) -> bool {
        let exchange = (flag.generation, flag.step);
        let is_current = self.generation.as_ref().is_some_and(|it| it.number == flag.generation);
        if !is_current || self.flagged.replace(exchange) == Some(exchange) {
            return true;
        }
        self.work(Work::Flags { step: flag.step, valid: flag.valid })
    }

    fn catch_up(&mut self, position: Position, sources: &[MemberId], own: &Sender<Signal>) -> bool {
        self.shared.change(|status| status.view.generation = 0);
        if !self.work(Work::Supersede) {
            return false;
        }
        if !std::mem::replace(&mut self.is_fetching, true) {
            let addresses = sources.iter().filter_map(|id| self.addresses.get(id)).cloned().collect();
            let own = own.clone();
            // Without a receiver the group has ended.
            (self.fetch)(position, addresses, Box::new(move |state| drop(own.send(Signal::Fetched(state)))));
        }
        true
    }
}
