//! The member's side of a group: it keeps what is needed to repeat or finish a step, and obeys fences.

use std::collections::BTreeMap;

use super::{Cause, MemberId, Notice, Position, Prepared, Record, Report, Stage, Suspicion, Timing};

/// What happened at a member.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MemberEvent {
    /// A timer fired; due every [`Timing::probe_ms`].
    Tick,
    /// The local gradient sums of a step are complete.
    Gradients {
        /// The step.
        step: u64,
    },
    /// The driver computes gradient sums while it reduces those that are complete, or has ended to do so. Peers that wait for it meanwhile wait for a slow
    /// member, not for one that is cut off.
    Computes(bool),
    /// The reduction of all buckets is complete.
    Reduced {
        /// Its generation.
        generation: u64,
        /// Its step.
        step: u64,
        /// Whether this member agrees to apply it. Must depend only on the reduced values (all finite), so that all members agree: a member whose
        /// own sums are unusable contributes NaN. If members disagree, the step is skipped.
        valid: bool,
    },
    /// A connection ended or made no progress. A stalled reduction continues until it is cancelled.
    PeerFailed {
        /// Generation of the connection.
        generation: u64,
        /// The peer and the cause.
        suspicion: Suspicion,
    },
    /// A peer's commit flag arrived.
    Flag {
        /// The peer.
        from: MemberId,
        /// What it has reduced, and whether it agrees.
        flag: Prepared,
    },
    /// The driver executed [`MemberAction::Apply`]; it reports this before any other event.
    Applied {
        /// Digest of the state after the step.
        digest: u64,
    },
    /// The driver executed [`MemberAction::CatchUp`].
    CaughtUp {
        /// The position of the installed state, with the digest computed from the state.
        position: Position,
    },
    /// The service sent a message.
    Notice {
        /// Term of the service.
        term: u64,
        /// The message.
        notice: Notice,
    },
    /// The member should leave at the end of the step.
    Leave,
}

/// What the driver of a member must do, in order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MemberAction {
    /// Compute the gradient sums of a step.
    Compute {
        /// The step.
        step: u64,
    },
    /// Reduce the kept sums of a step out of place.
    Reduce {
        /// Generation for the message tags.
        generation: u64,
        /// The step.
        step: u64,
        /// Members in rank order.
        members: Vec<MemberId>,
    },
    /// Stop the running reduction; the kept sums stay.
    Cancel,
    /// Send the commit flag to a peer.
    SendFlag {
        /// The peer.
        to: MemberId,
        /// The flag.
        flag: Prepared,
    },
    /// Finish a step: apply the reduced gradient, or skip it.
    Apply {
        /// The step.
        step: u64,
        /// Whether to apply or to skip.
        apply: bool,
    },
    /// Send the status to the service.
    Report(Report),
    /// Discard running computations and replace the state, see [`Notice::CatchUp`].
    CatchUp {
        /// The position to reach.
        position: Position,
        /// Members that have it.
        sources: Vec<MemberId>,
    },
    /// The member left the group as requested; it can stop.
    Left,
    /// No step was finished for [`Timing::abort_ms`] although the group is not paused: report it to the caller.
    Stalled {
        /// The step that does not finish.
        step: u64,
    },
}

/// A member of a group.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Member {
    id: MemberId,
    timing: Timing,
    fence: (u64, u64),
    generation: u64,
    peers: Vec<MemberId>,
    stage: Stage,
    position: Position,
    skipped: bool,
    /// Step whose gradient sums were requested, and whether they are complete.
    sums: Option<(u64, bool)>,
    /// Whether gradient sums are computed during the reduction.
    computes: bool,
    prepared: Option<Prepared>,
    flags: BTreeMap<MemberId, bool>,
    last_flag: Option<Prepared>,
    /// Decision about the open step, while the driver executes it.
    applying: Option<bool>,
    suspicion: Option<Suspicion>,
    leaving: bool,
    reported_ms: u64,
    /// When the member entered the present stage.
    entered_ms: u64,
    finished_ms: u64,
    catching_up: Option<(Position, u64)>,
}

impl Member {
    /// Creates a member whose state is at `position`.
    pub const fn new(id: MemberId, position: Position, timing: Timing, now_ms: u64) -> Self {
        Self {
            id,
            timing,
            fence: (0, 0),
            generation: 0,
            peers: Vec::new(),
            stage: Stage::Outside,
            position,
            skipped: false,
            sums: None,
            computes: false,
            prepared: None,
            flags: BTreeMap::new(),
            last_flag: None,
            applying: None,
            suspicion: None,
            leaving: false,
            reported_ms: 0,
            entered_ms: now_ms,
            finished_ms: now_ms,
            catching_up: None,
        }
    }

    /// Returns the status of the member. One that applies a step is about to compute the next one: its peers wait for a slow member.
    pub const fn report(&self) -> Report {
        let applies = self.applying.is_some() && matches!(self.stage, Stage::Flagged);
        Report {
            member: self.id,
            generation: self.generation,
            stage: if self.computes || applies { Stage::Computing } else { self.stage },
            fence: self.fence,
            position: self.position,
            skipped: self.skipped,
            prepared: self.prepared,
            suspicion: self.suspicion,
            leaving: self.leaving,
        }
    }

    /// Handles an event.
    pub fn step(&mut self, event: MemberEvent, now_ms: u64) -> Vec<MemberAction> {
        let mut actions = Vec::new();
        match event {
            MemberEvent::Tick => self.tick(now_ms, &mut actions),
            MemberEvent::Gradients { step } => self.gradients(step, now_ms, &mut actions),
            MemberEvent::Computes(computes) => self.computes = computes && self.stage == Stage::Reducing,
            MemberEvent::Reduced { generation, step, valid } => {
                let open = self.stage == Stage::Reducing && self.generation == generation;
                if open && step == self.position.step + 1 {
                    self.prepared = Some(Prepared { generation, step, valid });
                    self.flags.insert(self.id, valid);
                    self.enter(Stage::Flagged, now_ms);
                    self.send_flags(&mut actions);
                    self.try_commit(&mut actions);
                }
            }
            MemberEvent::PeerFailed { generation, suspicion } => {
                let running = matches!(self.stage, Stage::Computing | Stage::Reducing | Stage::Flagged);
                if running && generation == self.generation {
                    self.suspect(suspicion, now_ms, &mut actions);
                }
            }
            MemberEvent::Flag { from, flag } => self.flag(from, flag, &mut actions),
            MemberEvent::Applied { digest } => self.applied(digest, now_ms, &mut actions),
            MemberEvent::CaughtUp { position } => {
                self.catching_up = None;
                self.position = position;
                self.finished_ms = now_ms;
                self.send_report(now_ms, &mut actions);
            }
            MemberEvent::Notice { term, notice } => self.notice(term, notice, now_ms, &mut actions),
            MemberEvent::Leave => {
                self.leaving = true;
                self.send_report(now_ms, &mut actions);
            }
        }
        actions
    }

    fn enter(&mut self, stage: Stage, now_ms: u64) {
        (self.stage, self.entered_ms) = (stage, now_ms);
        self.computes = false;
    }

    fn send_report(&mut self, now_ms: u64, actions: &mut Vec<MemberAction>) {
        self.reported_ms = now_ms;
        actions.push(MemberAction::Report(self.report()));
    }

    fn suspect(&mut self, suspicion: Suspicion, now_ms: u64, actions: &mut Vec<MemberAction>) {
        let broken = self.suspicion.is_some_and(|it| it.cause == Cause::Broken);
        if !broken && self.suspicion != Some(suspicion) && self.peers.contains(&suspicion.peer) {
            self.suspicion = Some(suspicion);
            self.send_report(now_ms, actions);
        }
    }

    fn tick(&mut self, now_ms: u64, actions: &mut Vec<MemberAction>) {
        if self.stage == Stage::Flagged {
            // Flags are repeated until the step is finished: a peer that already finished it answers with its own.
            self.send_flags(actions);
            let missing = self.peers.iter().find(|peer| !self.flags.contains_key(peer)).copied();
            if let Some(peer) = missing
                && now_ms.saturating_sub(self.entered_ms) >= self.timing.progress_ms()
            {
                self.suspect(Suspicion { peer, cause: Cause::Stalled }, now_ms, actions);
            }
        }
        if let Some((_, since_ms)) = self.catching_up
            && now_ms.saturating_sub(since_ms) >= self.timing.change_ms()
        {
            // The sources may be gone: the next message of the service names others.
            self.catching_up = None;
        }
        if now_ms.saturating_sub(self.reported_ms) >= self.timing.probe_ms() {
            self.send_report(now_ms, actions);
        }
        let waiting = !matches!(self.stage, Stage::Paused | Stage::Computing);
        if waiting && now_ms.saturating_sub(self.finished_ms) >= self.timing.abort_ms() {
            self.finished_ms = now_ms;
            actions.push(MemberAction::Stalled { step: self.position.step + 1 });
        }
    }

    fn gradients(&mut self, step: u64, now_ms: u64, actions: &mut Vec<MemberAction>) {
        if self.sums.is_some_and(|(requested, _)| requested == step) {
            self.sums = Some((step, true));
            if self.stage == Stage::Computing {
                self.reduce(step, now_ms, actions);
            }
        }
    }

    fn start_step(&mut self, now_ms: u64, actions: &mut Vec<MemberAction>) {
        let step = self.position.step + 1;
        self.finished_ms = now_ms;
        match self.sums {
            Some((kept, true)) if kept == step => self.reduce(step, now_ms, actions),
            Some((running, false)) if running == step => self.enter(Stage::Computing, now_ms),
            _ => {
                self.sums = Some((step, false));
                self.enter(Stage::Computing, now_ms);
                actions.push(MemberAction::Compute { step });
            }
        }
    }

    fn reduce(&mut self, step: u64, now_ms: u64, actions: &mut Vec<MemberAction>) {
        self.enter(Stage::Reducing, now_ms);
        let members = self.peers.clone();
        actions.push(MemberAction::Reduce { generation: self.generation, step, members });
    }

    fn send_flags(&self, actions: &mut Vec<MemberAction>) {
        if let Some(flag) = self.prepared {
            let others = self.peers.iter().filter(|peer| **peer != self.id);
            actions.extend(others.map(|&to| MemberAction::SendFlag { to, flag }));
        }
    }

    fn flag(&mut self, from: MemberId, flag: Prepared, actions: &mut Vec<MemberAction>) {
        let running = matches!(self.stage, Stage::Computing | Stage::Reducing | Stage::Flagged);
        if !running || flag.generation != self.generation || !self.peers.contains(&from) {
            return;
        }
        if flag.step == self.position.step + 1 {
            self.flags.insert(from, flag.valid);
            self.try_commit(actions);
        } else if let Some(own) = self.last_flag
            && own.step == flag.step
            && own.generation == flag.generation
        {
            // The peer misses the own flag of a step that is finished here.
            actions.push(MemberAction::SendFlag { to: from, flag: own });
        }
    }

    fn try_commit(&mut self, actions: &mut Vec<MemberAction>) {
        if self.stage == Stage::Flagged && self.flags.len() == self.peers.len() {
            let apply = self.flags.values().all(|valid| *valid);
            self.apply(apply, actions);
        }
    }

    fn apply(&mut self, apply: bool, actions: &mut Vec<MemberAction>) {
        if self.applying.is_none() {
            self.applying = Some(apply);
            actions.push(MemberAction::Apply { step: self.position.step + 1, apply });
        }
    }

    fn applied(&mut self, digest: u64, now_ms: u64, actions: &mut Vec<MemberAction>) {
        let Some(applied) = self.applying.take() else { return };
        self.skipped = !applied;
        self.position = Position { step: self.position.step + 1, digest };
        self.last_flag = self.prepared.take();
        self.flags.clear();
        self.sums = None;
        if self.stage == Stage::Flagged {
            self.start_step(now_ms, actions);
        }
        self.send_report(now_ms, actions);
    }

    fn notice(&mut self, term: u64, notice: Notice, now_ms: u64, actions: &mut Vec<MemberAction>) {
        if term < self.fence.0 {
            return;
        }
        match notice {
            Notice::Fence { generation } => {
                if generation > self.generation && (term, generation) >= self.fence {
                    self.fence = (term, generation);
                    if self.stage == Stage::Reducing {
                        actions.push(MemberAction::Cancel);
                    }
                    if self.stage != Stage::Outside {
                        self.enter(Stage::Fenced, now_ms);
                    }
                }
                self.send_report(now_ms, actions);
            }
            Notice::Finish { generation, step, apply } => {
                let open = self.prepared.is_some_and(|it| it.step == step && it.generation == self.generation);
                if self.fence == (term, generation) && self.stage == Stage::Fenced && open {
                    self.apply(apply, actions);
                } else {
                    self.send_report(now_ms, actions);
                }
            }
            Notice::CatchUp { position, sources } => {
                if position == self.position || self.catching_up.is_some_and(|(running, _)| running == position) {
                    return;
                }
                self.leave_generation(now_ms, actions);
                self.catching_up = Some((position, now_ms));
                actions.push(MemberAction::CatchUp { position, sources });
            }
            Notice::Release => {
                self.leave_generation(now_ms, actions);
                actions.push(MemberAction::Left);
            }
            Notice::Publish { record, paused } => self.publish(term, record, paused, now_ms, actions),
        }
    }

    fn leave_generation(&mut self, now_ms: u64, actions: &mut Vec<MemberAction>) {
        if self.stage == Stage::Reducing {
            actions.push(MemberAction::Cancel);
        }
        self.generation = 0;
        self.peers.clear();
        self.prepared = None;
        self.last_flag = None;
        self.flags.clear();
        self.applying = None;
        self.suspicion = None;
        // Sums of another history are invalid: they were computed from another state.
        self.sums = None;
        self.enter(Stage::Outside, now_ms);
    }

    fn publish(&mut self, term: u64, record: Record, paused: bool, now_ms: u64, actions: &mut Vec<MemberAction>) {
        let newer = record.generation > self.generation && (term, record.generation) >= self.fence;
        if newer && record.position == self.position && record.members.contains(&self.id) {
            if self.stage == Stage::Reducing {
                actions.push(MemberAction::Cancel);
            }
            self.fence = (term, record.generation);
            self.generation = record.generation;
            self.peers = record.members;
            self.prepared = None;
            self.last_flag = None;
            self.flags.clear();
            self.suspicion = None;
            if paused {
                self.enter(Stage::Paused, now_ms);
            } else {
                self.start_step(now_ms, actions);
            }
        }
        self.send_report(now_ms, actions);
    }
}
