//! The membership service of a group: one instance at a time, next to the partition that stores the record.

use std::collections::{BTreeMap, BTreeSet};

use super::joining::Joiners;
use super::{Cause, MemberId, Notice, Position, Quorum, Record, Report, Stage, Timing};

/// Digests of this many recent steps are remembered, to recognise members that are behind: with steps of a millisecond, those of the
/// seconds that a transfer of the state takes.
const REMEMBERED_STEPS: usize = 8_192;

/// Settings of a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Settings {
    /// The timeouts.
    pub timing: Timing,
    /// Below this number of members the group pauses; at least 1.
    pub min_members: usize,
    /// What allows a new generation.
    pub quorum: Quorum,
}

/// What happened at the service.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ServiceEvent {
    /// A timer fired; due every [`Timing::probe_ms`].
    Tick,
    /// A member or a process that wants to join reported.
    Report(Report),
    /// A process answered a probe.
    ProbeAnswered(MemberId),
    /// A connection to a process was refused or its supervisor saw it exit: proof that it is dead.
    Died(MemberId),
    /// The record of this generation is durable.
    Recorded {
        /// Its generation.
        generation: u64,
    },
    /// The store rejected the record: another service has a newer term.
    Deposed,
}

/// Why a group does not train.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PauseReason {
    /// Fewer members than the minimum.
    Members {
        /// Members of the generation.
        present: usize,
        /// The minimum.
        required: usize,
    },
    /// Too few members of the previous generation confirm a new one.
    Quorum {
        /// Members that confirmed.
        present: usize,
        /// Confirmations needed.
        required: usize,
    },
    /// No reachable member has the state of this step: a new group must start from a checkpoint.
    StateLost {
        /// The recorded step.
        step: u64,
    },
}

/// What the driver of the service must do, in order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ServiceAction {
    /// Send a message.
    Send {
        /// The receiver.
        to: MemberId,
        /// Term of the service.
        term: u64,
        /// The message.
        notice: Notice,
    },
    /// Request a sign of life from a process.
    Probe(MemberId),
    /// Store the record durably under this term, then report [`ServiceEvent::Recorded`]; report [`ServiceEvent::Deposed`] if a newer term exists.
    Record {
        /// Term of the service.
        term: u64,
        /// The record.
        record: Record,
    },
    /// A member was removed because it failed.
    Removed(MemberId),
    /// A member leaves as it asked.
    Left(MemberId),
    /// All members finished this step.
    Committed(Position),
    /// The group stopped training.
    Paused(PauseReason),
    /// The group trains.
    Resumed {
        /// Its generation.
        generation: u64,
    },
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Probe {
    since_ms: u64,
    sent: u64,
    cause: Option<(MemberId, Cause)>,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Change {
    since_ms: u64,
    sent_ms: u64,
    reports: BTreeMap<MemberId, Report>,
    /// The last request to finish a step or to catch up, and when it was sent: repeated at the pace of reports.
    requested: Option<(Option<u64>, Position, u64)>,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Phase {
    Stable,
    Changing(Change),
    Recording { record: Record, sent_ms: u64 },
    Deposed,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Strike {
    at_ms: u64,
    generation: u64,
    pair: (MemberId, MemberId),
}

/// Exclusion of a living member whose link to a peer failed repeatedly. It doubles each time: one that lives behind a link that flaps must not cost the
/// others a stall every few steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Quarantine {
    until_ms: u64,
    lasts_ms: u64,
}

/// The membership service.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Service {
    settings: Settings,
    term: u64,
    record: Record,
    phase: Phase,
    /// The newest report of each process, and when it arrived.
    reports: BTreeMap<MemberId, (Report, u64)>,
    probes: BTreeMap<MemberId, Probe>,
    removed: BTreeSet<MemberId>,
    /// Members that confirmed the present generation.
    confirmed: BTreeSet<MemberId>,
    strikes: Vec<Strike>,
    /// Removed for a broken link to a peer. Kept for a while after it is over, so that the next one is longer.
    quarantine: BTreeMap<MemberId, Quarantine>,
    joiners: Joiners,
    digests: BTreeMap<u64, u64>,
    committed: u64,
    /// A change is due although no member was removed.
    reform: bool,
    joined_ms: u64,
    pause: Option<PauseReason>,
}

impl Service {
    /// Creates the service of `term` from the durable record; a new group has no members and the position of its initial state.
    pub fn new(record: Record, term: u64, settings: Settings, now_ms: u64) -> Self {
        // A member counts as heard at the start: a new service must not suspect all of them.
        Self {
            settings,
            term,
            committed: record.position.step,
            digests: BTreeMap::from([(record.position.step, record.position.digest)]),
            reports: BTreeMap::new(),
            record,
            phase: Phase::Stable,
            probes: BTreeMap::new(),
            removed: BTreeSet::new(),
            confirmed: BTreeSet::new(),
            strikes: Vec::new(),
            quarantine: BTreeMap::new(),
            joiners: Joiners::new(settings.timing),
            reform: false,
            joined_ms: now_ms,
            pause: None,
        }
    }

    /// Returns the recorded membership.
    pub const fn record(&self) -> &Record {
        &self.record
    }

    /// Returns why the group does not train, if it does not.
    pub const fn pause(&self) -> Option<PauseReason> {
        self.pause
    }

    /// Handles an event.
    pub fn step(&mut self, event: ServiceEvent, now_ms: u64) -> Vec<ServiceAction> {
        let mut actions = Vec::new();
        if matches!(self.phase, Phase::Deposed) {
            return actions;
        }
        match event {
            ServiceEvent::Tick => self.tick(now_ms, &mut actions),
            ServiceEvent::Report(report) => self.report(report, now_ms, &mut actions),
            ServiceEvent::ProbeAnswered(member) => self.answered(member, now_ms, &mut actions),
            ServiceEvent::Died(member) => self.remove(member, &mut actions),
            ServiceEvent::Recorded { generation } => self.recorded(generation, now_ms, &mut actions),
            ServiceEvent::Deposed => self.phase = Phase::Deposed,
        }
        self.advance(now_ms, &mut actions);
        actions
    }

    fn send(&self, to: MemberId, notice: Notice, actions: &mut Vec<ServiceAction>) {
        actions.push(ServiceAction::Send { to, term: self.term, notice });
    }

    fn is_member(&self, member: MemberId) -> bool {
        self.record.members.contains(&member)
    }

    fn tick(&mut self, now_ms: u64, actions: &mut Vec<ServiceAction>) {
        let timing = self.settings.timing;
        for member in self.record.members.clone() {
            let heard_ms = self.reports.get(&member).map_or(self.joined_ms, |(_, at_ms)| *at_ms);
            if now_ms.saturating_sub(heard_ms) >= timing.silence_ms() {
                self.probe(member, None, now_ms, actions);
            }
        }
        let mut dead = Vec::new();
        for (member, probe) in &mut self.probes {
            let due = now_ms.saturating_sub(probe.since_ms) / timing.probe_ms();
            if due >= 2 {
                dead.push(*member);
            } else if due >= probe.sent {
                probe.sent += 1;
                actions.push(ServiceAction::Probe(*member));
            }
        }
        for member in dead {
            self.remove(member, actions);
        }
        self.quarantine.retain(|_, it| it.until_ms + timing.abort_ms() > now_ms);
        // A process outside of the group that does not report is forgotten.
        let (record, silence_ms) = (&self.record, timing.progress_ms());
        self.reports
            .retain(|member, (_, at_ms)| record.members.contains(member) || now_ms.saturating_sub(*at_ms) < silence_ms);
        let reports = &self.reports;
        self.joiners.retain(|member| reports.contains_key(&member) && !record.members.contains(&member));
    }

    fn probe(
        &mut self,
        member: MemberId,
        cause: Option<(MemberId, Cause)>,
        now_ms: u64,
        actions: &mut Vec<ServiceAction>,
    ) {
        if self.removed.contains(&member) || self.probes.contains_key(&member) {
            return;
        }
        self.probes.insert(member, Probe { since_ms: now_ms, sent: 1, cause });
        actions.push(ServiceAction::Probe(member));
    }

    fn remove(&mut self, member: MemberId, actions: &mut Vec<ServiceAction>) {
        self.forget(member);
        if self.is_member(member) && self.removed.insert(member) {
            actions.push(ServiceAction::Removed(member));
        }
    }

    fn forget(&mut self, member: MemberId) {
        self.probes.remove(&member);
        self.reports.remove(&member);
        if let Phase::Changing(change) = &mut self.phase {
            change.reports.remove(&member);
        }
    }

    fn answered(&mut self, member: MemberId, now_ms: u64, actions: &mut Vec<ServiceAction>) {
        let Some(probe) = self.probes.remove(&member) else { return };
        let Some((reporter, cause)) = probe.cause else { return };
        let stage = self.reports.get(&member).map(|(report, _)| report.stage);
        if cause == Cause::Stalled && matches!(stage, Some(Stage::Computing | Stage::Paused)) {
            // It is slow, not cut off: its peers wait.
            return;
        }
        self.strike(reporter, member, now_ms, actions);
    }

    /// A link between two living members failed. The first time they reconnect in a new generation; the second time one of them is removed.
    fn strike(&mut self, reporter: MemberId, member: MemberId, now_ms: u64, actions: &mut Vec<ServiceAction>) {
        let pair = (reporter.min(member), reporter.max(member));
        let (generation, abort_ms) = (self.record.generation, self.settings.timing.abort_ms());
        self.strikes.retain(|it| now_ms.saturating_sub(it.at_ms) < abort_ms);
        if self.strikes.iter().any(|it| it.pair == pair && it.generation == generation) {
            return;
        }
        let repeated = self.strikes.iter().any(|it| it.pair == pair);
        self.strikes.push(Strike { at_ms: now_ms, generation, pair });
        self.reform = true;
        let (previous, left) = (self.record.members.len(), self.candidates(now_ms).len().saturating_sub(1));
        let allowed = left >= self.settings.min_members.max(1)
            && (self.settings.quorum == Quorum::StoreTerm || 2 * left > previous);
        if repeated && allowed {
            let failures = |it: MemberId| self.strikes.iter().filter(|s| s.pair.0 == it || s.pair.1 == it).count();
            let rank = |it: MemberId| self.record.members.iter().position(|member| *member == it);
            let worse = |it: MemberId| (failures(it), rank(it));
            let victim = if worse(pair.0) > worse(pair.1) { pair.0 } else { pair.1 };
            let before = self.quarantine.get(&victim).map(|it| 2 * it.lasts_ms);
            let lasts_ms = before.unwrap_or(self.settings.timing.change_ms()).min(abort_ms);
            self.quarantine.insert(victim, Quarantine { until_ms: now_ms + lasts_ms, lasts_ms });
            self.remove(victim, actions);
        }
    }

    fn report(&mut self, report: Report, now_ms: u64, actions: &mut Vec<ServiceAction>) {
        let member = report.member;
        if report.leaving {
            if !self.is_member(member) {
                self.send(member, Notice::Release, actions);
            }
            self.forget(member);
            if self.is_member(member) && self.removed.insert(member) {
                actions.push(ServiceAction::Left(member));
            }
            return;
        }
        if self.quarantine.get(&member).is_some_and(|it| it.until_ms > now_ms) && !self.is_paused() {
            return;
        }
        let previous = self.reports.insert(member, (report, now_ms));
        // A report ends a probe for silence. A suspicion by a peer needs an answer to the probe itself.
        if self.probes.get(&member).is_some_and(|probe| probe.cause.is_none()) {
            self.probes.remove(&member);
        }
        // A member that was silent reports again before a generation without it exists: it still has the state.
        self.removed.remove(&member);
        if !self.is_member(member) {
            if previous.is_none() {
                self.joined_ms = now_ms;
            }
            if matches!(self.phase, Phase::Stable) {
                self.joiner_report(&report, now_ms, actions);
            }
        } else {
            self.member_report(&report, now_ms, actions);
        }
        if let Phase::Changing(change) = &mut self.phase
            && report.fence == (self.term, self.record.generation + 1)
        {
            change.reports.insert(member, report);
        }
    }

    fn member_report(&mut self, report: &Report, now_ms: u64, actions: &mut Vec<ServiceAction>) {
        let generation = self.record.generation;
        if report.generation == generation {
            self.confirmed.insert(report.member);
            self.observe(report.position);
        } else if matches!(self.phase, Phase::Stable) {
            if report.position == self.record.position && !self.confirmed.contains(&report.member) {
                let notice = Notice::Publish { record: self.record.clone(), paused: self.is_paused() };
                self.send(report.member, notice, actions);
            } else {
                // It lost the state of its generation.
                self.reform = true;
            }
        }
        if report.fence.1 > generation && matches!(self.phase, Phase::Stable) {
            // An earlier service began a change that it did not finish.
            self.reform = true;
        }
        if let Some(suspicion) = report.suspicion
            && report.generation == generation
            && self.is_member(suspicion.peer)
        {
            let cause = Some((report.member, suspicion.cause));
            self.probe(suspicion.peer, cause, now_ms, actions);
        }
        let all_finished = |step: u64| {
            self.record.members.iter().all(|member| {
                self.reports.get(member).is_some_and(|(it, _)| it.generation == generation && it.position.step >= step)
            })
        };
        let committed = (self.committed..report.position.step).take_while(|step| all_finished(step + 1)).count();
        for _ in 0..committed {
            self.committed += 1;
            if let Some(&digest) = self.digests.get(&self.committed) {
                actions.push(ServiceAction::Committed(Position { step: self.committed, digest }));
            }
        }
    }

    fn observe(&mut self, position: Position) {
        let known = *self.digests.entry(position.step).or_insert(position.digest);
        // Replicas with different states: the change keeps the state of most members.
        self.reform |= known != position.digest;
        while self.digests.len() > REMEMBERED_STEPS {
            self.digests.pop_first();
        }
    }

    /// Whether a process outside of the group has a recent committed state.
    fn is_ready(&self, report: &Report) -> bool {
        self.digests.get(&report.position.step) == Some(&report.position.digest)
    }

    /// Returns the position of the newest member.
    fn newest(&self) -> Option<Position> {
        let members = self.record.members.iter().filter_map(|it| self.reports.get(it));
        let current = members.filter(|(it, _)| it.generation == self.record.generation);
        current.map(|(it, _)| it.position).max_by_key(|it| it.step)
    }

    /// Lets a joiner fetch the state while the group trains.
    fn joiner_report(&mut self, report: &Report, now_ms: u64, actions: &mut Vec<ServiceAction>) {
        let Some(newest) = self.newest() else { return };
        if self.joiners.report(report, self.is_ready(report), newest, now_ms) {
            let has_newest = |it: &&(Report, u64)| it.0.position == newest && it.0.generation == self.record.generation;
            let members = self.record.members.iter().filter_map(|it| self.reports.get(it));
            let sources = members.filter(has_newest).map(|(it, _)| it.member).collect();
            self.send(report.member, Notice::CatchUp { position: newest, sources }, actions);
        }
    }

    fn is_paused(&self) -> bool {
        self.record.members.len() < self.settings.min_members
    }

    fn set_pause(&mut self, pause: Option<PauseReason>, actions: &mut Vec<ServiceAction>) {
        if self.pause != pause {
            self.pause = pause;
            actions.push(match pause {
                Some(reason) => ServiceAction::Paused(reason),
                None => ServiceAction::Resumed { generation: self.record.generation },
            });
        }
    }

    /// Processes that join in the next generation.
    fn joiners(&self, now_ms: u64) -> impl Iterator<Item = MemberId> {
        // A group that is paused loses nothing by a stop.
        let newest = self.newest().filter(|_| !self.is_paused());
        let is_admitted = move |it: &Report| newest.is_none_or(|newest| self.joiners.is_admitted(it, newest, now_ms));
        let outside = self.reports.values().filter(|(it, _)| !self.is_member(it.member));
        outside.filter(move |(it, _)| self.is_ready(it) && is_admitted(it)).map(|(it, _)| it.member)
    }

    fn advance(&mut self, now_ms: u64, actions: &mut Vec<ServiceAction>) {
        let timing = self.settings.timing;
        match &mut self.phase {
            Phase::Stable => {
                let settled = now_ms.saturating_sub(self.joined_ms) >= timing.probe_ms();
                let present = self.joiners(now_ms).count();
                let joining = settled && present > 0;
                let enough = !self.record.members.is_empty() || present >= self.settings.min_members;
                if joining && !enough {
                    // The first generation has to wait for more processes.
                    let required = self.settings.min_members;
                    self.set_pause(Some(PauseReason::Members { present, required }), actions);
                }
                if !self.removed.is_empty() || self.reform || (joining && enough) {
                    self.reform = false;
                    let change =
                        Change { since_ms: now_ms, sent_ms: now_ms, reports: BTreeMap::new(), requested: None };
                    self.phase = Phase::Changing(change);
                    self.send_fences(now_ms, actions);
                }
            }
            Phase::Changing(change) => {
                if now_ms.saturating_sub(change.sent_ms) >= timing.probe_ms() {
                    change.sent_ms = now_ms;
                    self.send_fences(now_ms, actions);
                }
                self.try_form(now_ms, actions);
            }
            Phase::Recording { record, sent_ms } => {
                if now_ms.saturating_sub(*sent_ms) >= timing.progress_ms() {
                    *sent_ms = now_ms;
                    actions.push(ServiceAction::Record { term: self.term, record: record.clone() });
                }
            }
            Phase::Deposed => {}
        }
    }

    /// Processes that may be part of the next generation.
    fn candidates(&self, now_ms: u64) -> Vec<MemberId> {
        let members = self.record.members.iter().copied().filter(|it| !self.removed.contains(it));
        members.chain(self.joiners(now_ms)).collect()
    }

    fn send_fences(&self, now_ms: u64, actions: &mut Vec<ServiceAction>) {
        let generation = self.record.generation + 1;
        // A removed member that still runs should stop, too.
        for member in self.candidates(now_ms).into_iter().chain(self.removed.iter().copied()) {
            self.send(member, Notice::Fence { generation }, actions);
        }
    }

    fn try_form(&mut self, now_ms: u64, actions: &mut Vec<ServiceAction>) {
        let Phase::Changing(change) = &self.phase else { return };
        let timing = self.settings.timing;
        let waited_ms = now_ms.saturating_sub(change.since_ms);
        let candidates = self.candidates(now_ms);
        let complete = !candidates.is_empty() && candidates.iter().all(|it| change.reports.contains_key(it));
        // Without a candidate, members that died are a reason to pause: the caller may start from a checkpoint.
        let is_new = candidates.is_empty() && self.record.members.is_empty();
        if is_new || !(complete || waited_ms >= timing.progress_ms()) {
            return;
        }
        let generation = self.record.generation;
        let fenced: Vec<Report> = candidates.iter().filter_map(|it| change.reports.get(it)).copied().collect();
        let survivors: Vec<Report> = fenced.iter().filter(|it| self.is_member(it.member)).copied().collect();
        let previous = self.record.members.len();
        let required = match self.settings.quorum {
            Quorum::Majority => previous / 2 + usize::from(previous > 0),
            Quorum::StoreTerm => usize::from(previous > 0),
        };
        if survivors.len() < required {
            let present = survivors.len();
            self.set_pause(Some(PauseReason::Quorum { present, required }), actions);
            return;
        }
        let base = self.base(&survivors);
        let Some(base) = base else {
            self.set_pause(Some(PauseReason::StateLost { step: self.record.position.step }), actions);
            return;
        };
        let open = open_step(&survivors, base, generation);
        let due = self.is_request_due(open.map(|(step, _)| step), base, now_ms);
        if let Some((step, apply)) = open {
            if !due {
                return;
            }
            let notice = Notice::Finish { generation: generation + 1, step, apply };
            let open = survivors.iter().filter(|it| it.position.step + 1 == step && it.generation == generation);
            for report in open.filter(|it| it.prepared.is_some_and(|p| p.step == step && p.generation == generation)) {
                self.send(report.member, notice.clone(), actions);
            }
            return;
        }
        let (ready, behind): (Vec<Report>, Vec<Report>) = fenced.iter().partition(|it| it.position == base);
        let sources: Vec<MemberId> = ready.iter().map(|it| it.member).collect();
        if !behind.is_empty() && waited_ms < timing.change_ms() {
            for report in behind.iter().filter(|_| due) {
                self.send(report.member, Notice::CatchUp { position: base, sources: sources.clone() }, actions);
            }
            return;
        }
        for report in &behind {
            if !self.record.members.contains(&report.member) {
                self.joiners.missed(report.member, now_ms);
            }
        }
        // Survivors keep their order; joiners follow.
        let record = Record { generation: generation + 1, members: sources, position: base };
        actions.push(ServiceAction::Record { term: self.term, record: record.clone() });
        self.phase = Phase::Recording { record, sent_ms: now_ms };
    }

    fn is_request_due(&mut self, open: Option<u64>, base: Position, now_ms: u64) -> bool {
        let probe_ms = self.settings.timing.probe_ms();
        let Phase::Changing(change) = &mut self.phase else { return false };
        let recent = |(step, position, at_ms)| step == open && position == base && now_ms < at_ms + probe_ms;
        let due = !change.requested.is_some_and(recent);
        if due {
            change.requested = Some((open, base, now_ms));
        }
        due
    }

    /// Returns the position from which a new generation starts: the newest step of the survivors, and there the digest of most of them.
    fn base(&self, survivors: &[Report]) -> Option<Position> {
        if self.record.members.is_empty() {
            return Some(self.record.position);
        }
        let inside = survivors.iter().filter(|it| it.generation > 0 || self.is_ready(it));
        let newest = inside.clone().map(|it| it.position.step).max()?;
        let at_newest = || inside.clone().filter(|it| it.position.step == newest).map(|it| it.position);
        let votes = |position: Position| at_newest().filter(|it| *it == position).count();
        // On a tie the lowest rank.
        let chosen = at_newest().rev().max_by_key(|it| votes(*it))?;
        (newest >= self.record.position.step).then_some(chosen)
    }

    fn recorded(&mut self, generation: u64, now_ms: u64, actions: &mut Vec<ServiceAction>) {
        let Phase::Recording { record, .. } = &self.phase else { return };
        if record.generation != generation {
            return;
        }
        let dropped: Vec<MemberId> =
            self.record.members.iter().filter(|it| !record.members.contains(it)).copied().collect();
        for member in dropped {
            if !self.removed.contains(&member) {
                actions.push(ServiceAction::Removed(member));
            }
        }
        self.record = record.clone();
        self.phase = Phase::Stable;
        self.removed.retain(|it| self.record.members.contains(it));
        self.confirmed.clear();
        self.probes.clear();
        self.reform = false;
        self.committed = self.record.position.step;
        self.digests.retain(|step, _| *step < self.record.position.step);
        self.digests.insert(self.record.position.step, self.record.position.digest);
        self.joined_ms = now_ms;
        let (present, required) = (self.record.members.len(), self.settings.min_members);
        let pause = self.is_paused().then_some(PauseReason::Members { present, required });
        if pause.is_none() && self.pause.is_none() {
            actions.push(ServiceAction::Resumed { generation });
        }
        self.set_pause(pause, actions);
        for member in self.record.members.clone() {
            let notice = Notice::Publish { record: self.record.clone(), paused: self.is_paused() };
            self.send(member, notice, actions);
        }
    }
}

/// Returns the step that must be finished before a new generation starts, and whether it is applied.
///
/// If a survivor finished a step that another holds reduced, the other finishes it with the same outcome. If all survivors hold the reduced gradient
/// of the next step, they finish it: a member that can't be reached may have applied it.
fn open_step(survivors: &[Report], base: Position, generation: u64) -> Option<(u64, bool)> {
    let prepared = |report: &Report, step: u64| {
        report.generation == generation
            && report.position.step + 1 == step
            && report.prepared.is_some_and(|it| it.step == step && it.generation == generation)
    };
    let finished = survivors.iter().find(|it| it.position == base && it.generation == generation);
    if let Some(finished) = finished
        && survivors.iter().any(|it| prepared(it, base.step))
    {
        return Some((base.step, !finished.skipped));
    }
    let next = base.step + 1;
    let valid = |report: &Report| report.prepared.is_some_and(|it| it.valid);
    let open = !survivors.is_empty() && survivors.iter().all(|it| prepared(it, next));
    open.then(|| (next, survivors.iter().all(valid)))
}
