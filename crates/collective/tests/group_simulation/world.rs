//! The simulated world: time, network, service and store.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};

use engram_collective::group::{
    Cause, Member, MemberAction, MemberEvent, MemberId, Notice, Position, Prepared, Record, Report, Service,
    ServiceAction, ServiceEvent, Stage, Suspicion,
};

use crate::buffers::StepBuffers;
use crate::check::{Checker, Entry};
use crate::node::{Node, Reduction};
use crate::plan::{Bug, Fault, Plan, Summary};
use crate::random::{Random, mix};

/// Most processes of a run, replacements included.
const PROCESSES: usize = 24;
/// Address of the service in the network.
pub(crate) const SERVICE: usize = PROCESSES;

#[derive(Debug, Clone)]
pub(crate) enum Payload {
    Report(Report),
    Notice(u64, Notice),
    Probe,
    Answer(usize),
    Flag(Prepared),
    Sums { generation: u64, step: u64, values: Vec<f32> },
}

#[derive(Debug, Clone)]
pub(crate) enum Item {
    Deliver {
        from: usize,
        to: usize,
        payload: Payload,
    },
    Tick(usize),
    ServiceTick,
    Gradients {
        node: usize,
        computation: u64,
    },
    Broken {
        node: usize,
        generation: u64,
        peer: usize,
    },
    /// A member requests the state of a source.
    Fetch {
        node: usize,
        position: Position,
        sources: Vec<MemberId>,
    },
    /// The state that a source had then has arrived, if it still lives.
    Fetched {
        node: usize,
        source: usize,
        history: Vec<Entry>,
    },
    Stored {
        term: u64,
        record: Record,
    },
    Fault(Fault),
    Continue(usize),
    Heal((usize, usize)),
    TakeOver,
    EndOverlap,
}

pub(crate) struct World {
    plan: Plan,
    bug: Option<Bug>,
    random: Random,
    now: u64,
    sequence: u64,
    queue: BinaryHeap<Reverse<(u64, u64)>>,
    items: BTreeMap<u64, Item>,
    nodes: Vec<Node>,
    service: Option<Service>,
    /// An older service that still runs.
    overlapped: Option<Service>,
    term: u64,
    durable: Record,
    /// Records that are being stored.
    storing: usize,
    cuts: BTreeSet<(usize, usize)>,
    checker: Checker,
    summary: Summary,
    last_commit: u64,
    /// Prints every item, for a single seed.
    trace: bool,
}

impl World {
    pub(crate) fn new(plan: Plan, bug: Option<Bug>) -> Self {
        let mut world = Self {
            random: Random(plan.seed ^ 0x5eed),
            service: Some(Service::new(Record::default(), 1, plan.settings, 0)),
            plan,
            bug,
            now: 0,
            sequence: 0,
            queue: BinaryHeap::new(),
            items: BTreeMap::new(),
            nodes: Vec::new(),
            overlapped: None,
            term: 1,
            durable: Record::default(),
            storing: 0,
            cuts: BTreeSet::new(),
            checker: Checker::default(),
            summary: Summary::default(),
            last_commit: 0,
            trace: std::env::var_os("ENGRAM_GROUP_TRACE").is_some(),
        };
        let failover = |(_, fault): &(u64, Fault)| matches!(fault, Fault::Failover { .. });
        world.checker.strict = !world.plan.faults.iter().any(failover);
        for _ in 0..world.plan.members {
            world.start(Vec::new());
        }
        world.at(1, Item::ServiceTick);
        for (at, fault) in world.plan.faults.clone() {
            world.at(at, Item::Fault(fault));
        }
        world
    }

    fn at(&mut self, time: u64, item: Item) {
        self.sequence += 1;
        self.queue.push(Reverse((time, self.sequence)));
        self.items.insert(self.sequence, item);
    }

    fn after(&mut self, delay: u64, item: Item) {
        self.at(self.now + delay, item);
    }

    fn start(&mut self, history: Vec<Entry>) {
        let index = self.nodes.len();
        if index >= PROCESSES {
            return;
        }
        let position = Position { step: history.len() as u64, digest: history.last().map_or(0, |it| it.digest) };
        self.nodes.push(Node {
            member: Member::new(MemberId(index as u64), position, self.plan.settings.timing, self.now),
            history,
            buffers: StepBuffers::new(PROCESSES),
            alive: true,
            refuses: false,
            stopped: false,
            waiting: Vec::new(),
            computation: 0,
            computing: 0,
            fetches: false,
            reduction: None,
            reduced_steps: BTreeSet::new(),
            inbox: BTreeMap::new(),
        });
        let delay = 1 + self.random.below(20);
        self.after(delay, Item::Tick(index));
    }

    /// Runs to the end: all faults, then a quiet time in which the group must make progress and take in all living processes.
    pub(crate) fn run(mut self) -> Result<Summary, String> {
        let timing = self.plan.settings.timing;
        let healed = self.healed();
        self.run_until(healed);
        let before = self.checker.committed_step();
        self.run_until(healed + timing.abort_ms());
        if let Some(violation) = self.checker.violation {
            return Err(violation);
        }
        let after = self.checker.committed_step();
        if after < before + 3 && !self.is_too_small() {
            return Err(format!(
                "no step within 20 detection times after the last fault: {before}, {after}; {}",
                self.status()
            ));
        }
        // A member that was removed for a broken link is admitted again only after some time.
        for round in 3..6 {
            self.run_until(healed + round * timing.abort_ms());
            if self.missing() == 0 {
                break;
            }
        }
        if let Some(violation) = self.checker.violation {
            return Err(violation);
        }
        if self.missing() > 0 && matches!(self.bug, None | Some(Bug::NeverReturns)) {
            return Err(format!("{} living processes are not members; {}", self.missing(), self.status()));
        }
        self.summary.steps = self.checker.committed_step();
        self.summary.generations = self.checker.generations();
        Ok(self.summary)
    }

    /// Time at which the last fault is over.
    fn healed(&self) -> u64 {
        let duration = |fault: &Fault| match *fault {
            Fault::Stop { for_ms, .. } | Fault::Cut { for_ms, .. } if for_ms < 10_000 => for_ms,
            Fault::Failover { after_ms, .. } => after_ms,
            _ => 0,
        };
        self.plan.faults.iter().map(|(at, fault)| at + duration(fault)).max().unwrap_or(0)
    }

    /// Runs through all faults and on for a minute at most. Returns the number of living processes outside of the group when the last fault is over, and
    /// the milliseconds from then until there are none.
    pub(crate) fn time_to_rejoin(mut self) -> (usize, u64) {
        let healed = self.healed();
        self.run_until(healed);
        let missing = self.missing();
        let whole = (healed..healed + 60_000).step_by(10).find(|at| {
            self.run_until(*at);
            self.missing() == 0
        });
        (missing, whole.expect("all processes are members again") - healed)
    }

    /// Runs for some time; returns what it reached, and whether all running processes are members.
    pub(crate) fn run_for(mut self, milliseconds: u64) -> (Summary, bool) {
        self.run_until(milliseconds);
        assert_eq!(self.checker.violation, None);
        (self.summary, self.missing() == 0)
    }

    /// Number of running processes outside of the group.
    fn missing(&self) -> usize {
        let living = self.nodes.iter().filter(|it| it.alive && !it.stopped);
        living.filter(|it| !self.durable.members.contains(&it.member.report().member)).count()
    }

    fn is_too_small(&self) -> bool {
        self.nodes.iter().filter(|it| it.alive && !it.stopped).count() < self.plan.settings.min_members
    }

    fn status(&self) -> String {
        let nodes = self.nodes.iter().filter(|it| it.alive).map(|it| format!("\n  {:?}", it.member.report()));
        format!(
            "{:?} {:?}{}",
            self.plan,
            self.service.as_ref().map(|it| (it.record(), it.pause())),
            nodes.collect::<String>()
        )
    }

    fn run_until(&mut self, end: u64) {
        while let Some(Reverse((time, sequence))) = self.queue.peek().copied() {
            if time > end || self.checker.violation.is_some() {
                break;
            }
            self.queue.pop();
            self.now = time;
            if let Some(item) = self.items.remove(&sequence) {
                if self.trace && !matches!(item, Item::Tick(_) | Item::ServiceTick) {
                    println!("{time} {item:?}");
                }
                self.handle(item);
            }
        }
    }

    fn is_cut(&self, a: usize, b: usize) -> bool {
        self.cuts.contains(&(a.min(b), a.max(b)))
    }

    fn send(&mut self, from: usize, to: usize, payload: Payload) {
        let loss = self.plan.loss;
        if self.is_cut(from, to) || self.random.chance(loss) {
            return;
        }
        let slow = self.random.below(50) == 0;
        let delay = 1 + self.random.below(if slow { 60 } else { 4 });
        self.after(delay, Item::Deliver { from, to, payload });
    }

    /// Returns the process that an item concerns.
    fn target(item: &Item) -> Option<usize> {
        match item {
            Item::Deliver { to, .. } if *to != SERVICE => Some(*to),
            Item::Tick(node)
            | Item::Gradients { node, .. }
            | Item::Broken { node, .. }
            | Item::Fetch { node, .. }
            | Item::Fetched { node, .. } => Some(*node),
            _ => None,
        }
    }

    fn handle(&mut self, item: Item) {
        if let Some(index) = Self::target(&item) {
            if !self.nodes[index].alive {
                if self.nodes[index].refuses && matches!(item, Item::Deliver { payload: Payload::Probe, .. }) {
                    self.service_event(ServiceEvent::Died(MemberId(index as u64)), false);
                }
                return;
            }
            if self.nodes[index].stopped {
                self.handle_stopped(index, item);
                return;
            }
        }
        match item {
            Item::Deliver { from, to: SERVICE, payload } => self.deliver_to_service(from, &payload),
            Item::Deliver { from, to, payload } => self.deliver(from, to, payload),
            Item::Tick(node) => self.tick(node),
            Item::ServiceTick => {
                let period = self.plan.settings.timing.probe_ms();
                self.after(period, Item::ServiceTick);
                self.service_event(ServiceEvent::Tick, false);
                self.service_event(ServiceEvent::Tick, true);
            }
            Item::Gradients { node, computation } => {
                if self.nodes[node].computation == computation {
                    let sums = self.nodes[node].buffers.sums_mut();
                    sums.fill(0.0);
                    sums[node] = 1.0;
                    let step = self.nodes[node].computing;
                    self.member_event(node, MemberEvent::Gradients { step });
                }
            }
            Item::Broken { node, generation, peer } => {
                let suspicion = Suspicion { peer: MemberId(peer as u64), cause: Cause::Broken };
                self.member_event(node, MemberEvent::PeerFailed { generation, suspicion });
            }
            Item::Fetch { node, position, sources } => self.fetch(node, position, &sources),
            Item::Fetched { node, source, history } => self.fetched(node, source, history),
            Item::Stored { term, record } => self.stored(term, record),
            Item::Fault(fault) => self.fault(fault),
            Item::Continue(node) => {
                self.nodes[node].stopped = false;
                for item in std::mem::take(&mut self.nodes[node].waiting) {
                    self.handle(item);
                }
            }
            Item::Heal(pair) => {
                self.cuts.remove(&pair);
            }
            Item::TakeOver => {
                self.term += 1;
                self.service = Some(Service::new(self.durable.clone(), self.term, self.plan.settings, self.now));
            }
            Item::EndOverlap => self.overlapped = None,
        }
    }

    fn handle_stopped(&mut self, index: usize, item: Item) {
        if self.bug == Some(Bug::HeartbeatWithoutProgress) {
            match item {
                Item::Tick(_) => {
                    let report = self.nodes[index].member.report();
                    self.send(index, SERVICE, Payload::Report(report));
                    self.after(self.plan.settings.timing.probe_ms(), Item::Tick(index));
                    return;
                }
                Item::Deliver { payload: Payload::Probe, .. } => {
                    self.send(index, SERVICE, Payload::Answer(index));
                    return;
                }
                _ => {}
            }
        }
        self.nodes[index].waiting.push(item);
    }

    fn deliver_to_service(&mut self, from: usize, payload: &Payload) {
        let event = match payload {
            Payload::Report(report) => ServiceEvent::Report(*report),
            Payload::Answer(node) => ServiceEvent::ProbeAnswered(MemberId(*node as u64)),
            _ => return,
        };
        // Reports reach the service that the sender knows.
        let old =
            self.overlapped.is_some() && (self.service.is_none() || mix(from as u64 ^ self.now).is_multiple_of(3));
        self.service_event(event, old);
    }

    fn service_event(&mut self, event: ServiceEvent, old: bool) {
        let service = if old { &mut self.overlapped } else { &mut self.service };
        let Some(service) = service else { return };
        let actions = service.step(event, self.now);
        for action in actions {
            match action {
                ServiceAction::Send { to, term, notice } => {
                    if let Notice::Publish { record, .. } = &notice {
                        self.checker.published(record);
                    }
                    self.send(SERVICE, to.0 as usize, Payload::Notice(term, notice));
                }
                ServiceAction::Probe(member) => self.send(SERVICE, member.0 as usize, Payload::Probe),
                ServiceAction::Record { term, record } => {
                    let delay = 1 + self.random.below(20);
                    self.storing += 1;
                    if self.bug == Some(Bug::PublishesBeforeRecord) {
                        let generation = record.generation;
                        self.after(delay + 400, Item::Stored { term, record });
                        self.service_event(ServiceEvent::Recorded { generation }, old);
                    } else {
                        self.after(delay, Item::Stored { term, record });
                    }
                }
                ServiceAction::Removed(_)
                | ServiceAction::Left(_)
                | ServiceAction::Committed(_)
                | ServiceAction::Paused(_)
                | ServiceAction::Resumed { .. } => {}
            }
        }
    }

    fn stored(&mut self, term: u64, record: Record) {
        // The term of the store rises when another worker takes over.
        self.storing -= 1;
        let old = term < self.term;
        let generation = record.generation;
        if old {
            self.summary.deposed += 1;
            self.service_event(ServiceEvent::Deposed, true);
            return;
        }
        if self.durable.generation < generation {
            self.durable = record;
        }
        let gone = self.service.is_none();
        self.service_event(ServiceEvent::Recorded { generation }, gone);
    }

    fn fault(&mut self, fault: Fault) {
        match fault {
            Fault::Kill { member, broken } if self.may_lose(member) => {
                self.nodes[member].alive = false;
                self.nodes[member].refuses = broken;
                let generation = self.nodes[member].member.report().generation;
                for node in 0..self.nodes.len() {
                    if broken && node != member && !self.is_cut(node, member) {
                        let delay = 1 + self.random.below(5);
                        self.after(delay, Item::Broken { node, generation, peer: member });
                    }
                }
            }
            Fault::Stop { member, for_ms } if member < self.nodes.len() && !self.nodes[member].stopped => {
                self.nodes[member].stopped = true;
                if self.bug != Some(Bug::HeartbeatWithoutProgress) {
                    self.after(for_ms, Item::Continue(member));
                }
            }
            Fault::Cut { between: (a, b), for_ms } if a != b => {
                let pair = (a.min(b), a.max(b));
                self.cuts.insert(pair);
                self.after(for_ms, Item::Heal(pair));
            }
            Fault::Failover { after_ms, overlap } => {
                let service = self.service.take();
                if overlap && service.is_some() {
                    self.overlapped = service;
                    self.after(after_ms + 500, Item::EndOverlap);
                }
                self.after(after_ms, Item::TakeOver);
            }
            Fault::Start { from } => {
                let history =
                    from.and_then(|it| self.nodes.get(it)).filter(|it| !it.alive).map(|it| it.history.clone());
                self.start(history.unwrap_or_default());
            }
            Fault::Leave { member } if self.may_lose(member) => {
                self.member_event(member, MemberEvent::Leave);
            }
            _ => {}
        }
    }

    /// Whether the group keeps its state without this process: another running process is a member of the durable generation.
    fn may_lose(&self, member: usize) -> bool {
        let keeps = |(index, node): (usize, &Node)| {
            let report = node.member.report();
            let inside = report.generation == self.durable.generation && !report.leaving;
            index != member && node.alive && inside && self.durable.members.contains(&report.member)
        };
        // A generation without the other process may be about to become durable.
        let settled = self.storing == 0;
        settled && member < self.nodes.len() && self.nodes[member].alive && self.nodes.iter().enumerate().any(keeps)
    }

    fn deliver(&mut self, from: usize, to: usize, payload: Payload) {
        match payload {
            Payload::Notice(term, notice) => {
                self.summary.finished_by_service += u64::from(matches!(notice, Notice::Finish { .. }));
                self.member_event(to, MemberEvent::Notice { term, notice });
            }
            Payload::Probe => self.send(to, SERVICE, Payload::Answer(to)),
            Payload::Flag(flag) => self.member_event(to, MemberEvent::Flag { from: MemberId(from as u64), flag }),
            Payload::Sums { generation, step, values } => {
                let node = &mut self.nodes[to];
                if generation >= node.member.report().generation {
                    node.inbox.insert((generation, step, from), values);
                    self.try_reduce(to);
                }
            }
            Payload::Report(_) | Payload::Answer(_) => {}
        }
    }

    fn tick(&mut self, index: usize) {
        let timing = self.plan.settings.timing;
        self.after(timing.probe_ms(), Item::Tick(index));
        self.member_event(index, MemberEvent::Tick);
        let report = self.nodes[index].member.report();
        if let Some(reduction) = &self.nodes[index].reduction {
            let (generation, step) = (reduction.generation, reduction.step);
            let stalled = self.now - reduction.since_ms >= timing.progress_ms() && !reduction.done;
            let inbox = &self.nodes[index].inbox;
            let missing = reduction
                .members
                .iter()
                .find(|it| it.0 != index as u64 && !inbox.contains_key(&(generation, step, it.0 as usize)));
            if let Some(&peer) = missing.filter(|_| stalled && self.bug != Some(Bug::HeartbeatWithoutProgress)) {
                let suspicion = Suspicion { peer, cause: Cause::Stalled };
                self.member_event(index, MemberEvent::PeerFailed { generation, suspicion });
            }
            if matches!(report.stage, Stage::Reducing | Stage::Flagged) {
                self.send_sums(index);
            }
        }
    }

    fn send_sums(&mut self, index: usize) {
        let Some(reduction) = &self.nodes[index].reduction else { return };
        let (generation, step, members) = (reduction.generation, reduction.step, reduction.members.clone());
        let values = self.nodes[index].buffers.reduction().0.to_vec();
        for member in members.into_iter().filter(|it| it.0 != index as u64) {
            self.send(index, member.0 as usize, Payload::Sums { generation, step, values: values.clone() });
        }
    }

    fn try_reduce(&mut self, index: usize) {
        let bug = self.bug;
        let node = &mut self.nodes[index];
        let Some(reduction) = node.reduction.as_mut().filter(|it| !it.done) else { return };
        let (generation, step) = (reduction.generation, reduction.step);
        let key = |it: &MemberId| (generation, step, it.0 as usize);
        let others = reduction.members.iter().filter(|it| it.0 != index as u64);
        if !others.clone().all(|it| node.inbox.contains_key(&key(it))) {
            return;
        }
        reduction.done = true;
        let (sums, target) = node.buffers.reduction();
        target.copy_from_slice(sums);
        for other in others {
            target.iter_mut().zip(&node.inbox[&key(other)]).for_each(|(sum, value)| *sum += value);
        }
        if bug == Some(Bug::DropsGradientsAlone) && reduction.members.len() == 1 {
            target.fill(0.0);
        }
        if bug == Some(Bug::ReducesInPlace) {
            let reduced = target.to_vec();
            node.buffers.sums_mut().copy_from_slice(&reduced);
        }
        // As a check for infinite values, it depends on the reduced gradient alone.
        let valid = !mix(generation << 32 | step).is_multiple_of(50);
        let others: Vec<MemberId> = reduction.members.iter().copied().filter(|it| it.0 != index as u64).collect();
        self.member_event(index, MemberEvent::Reduced { generation, step, valid });
        if bug == Some(Bug::CommitsAlone) {
            let flag = Prepared { generation, step, valid };
            others.into_iter().for_each(|from| self.member_event(index, MemberEvent::Flag { from, flag }));
        }
    }

    /// As in the driver of a training: one member at a time is the source of the whole state.
    fn fetch(&mut self, index: usize, position: Position, sources: &[MemberId]) {
        if self.bug == Some(Bug::TrustsStepNumber) && self.nodes[index].position().step > 0 {
            self.nodes[index].fetches = false;
            self.member_event(index, MemberEvent::CaughtUp { position });
            return;
        }
        let reachable = |source: &usize| {
            let node = &self.nodes[*source];
            node.alive && !node.stopped && !self.is_cut(index, *source)
        };
        let candidates: Vec<usize> = sources.iter().map(|it| it.0 as usize).filter(reachable).collect();
        if candidates.is_empty() {
            self.nodes[index].fetches = false;
            return;
        }
        let source = candidates[self.random.below(candidates.len() as u64) as usize];
        let history = self.nodes[source].history.clone();
        self.after(self.plan.fetch_ms, Item::Fetched { node: index, source, history });
    }

    fn fetched(&mut self, index: usize, source: usize, history: Vec<Entry>) {
        self.nodes[index].fetches = false;
        let is_inside = self.nodes[index].member.report().generation != 0;
        if !self.nodes[source].alive || self.is_cut(index, source) || is_inside {
            return;
        }
        self.nodes[index].computation += 1;
        self.nodes[index].history = history;
        self.summary.transfers += 1;
        let position = self.nodes[index].position();
        self.member_event(index, MemberEvent::CaughtUp { position });
    }

    fn member_event(&mut self, index: usize, event: MemberEvent) {
        let actions = self.nodes[index].member.step(event, self.now);
        for action in actions {
            match action {
                MemberAction::Compute { step } => {
                    self.nodes[index].computation += 1;
                    self.nodes[index].computing = step;
                    let computation = self.nodes[index].computation;
                    let delay = 5 + self.random.below(40);
                    self.after(delay, Item::Gradients { node: index, computation });
                }
                MemberAction::Reduce { generation, step, members } => {
                    let since_ms = self.now;
                    let node = &mut self.nodes[index];
                    self.summary.repeated_reductions += u64::from(!node.reduced_steps.insert(step));
                    node.inbox.retain(|(it, _, _), _| *it >= generation);
                    node.reduction = Some(Reduction { generation, step, members, since_ms, done: false });
                    self.send_sums(index);
                    self.try_reduce(index);
                }
                MemberAction::Cancel => self.nodes[index].reduction = None,
                MemberAction::SendFlag { to, flag } => self.send(index, to.0 as usize, Payload::Flag(flag)),
                MemberAction::Apply { step, apply } => self.apply(index, step, apply),
                MemberAction::Report(_) if self.bug == Some(Bug::NeverReturns) && index >= self.plan.members => {}
                MemberAction::Report(report) => self.send(index, SERVICE, Payload::Report(report)),
                MemberAction::CatchUp { position, sources } => {
                    self.nodes[index].computation += 1;
                    if !std::mem::replace(&mut self.nodes[index].fetches, true) {
                        let delay = 1 + self.random.below(10);
                        self.after(delay, Item::Fetch { node: index, position, sources });
                    }
                }
                MemberAction::Left => self.nodes[index].alive = false,
                MemberAction::Stalled { .. } => {}
            }
        }
        let report = self.nodes[index].member.report();
        if report.generation == self.durable.generation && self.durable.members.contains(&report.member) {
            let history = std::mem::take(&mut self.nodes[index].history);
            self.checker.history(report.member, &history);
            self.nodes[index].history = history;
        }
    }

    fn apply(&mut self, index: usize, step: u64, apply: bool) {
        let node = &mut self.nodes[index];
        let generation = node.member.report().generation;
        node.buffers.commit(step, apply);
        let gradient = apply.then(|| node.buffers.committed(step).expect("just committed").to_vec());
        node.push(gradient);
        let entry = node.history[node.history.len() - 1].clone();
        self.checker.finished(MemberId(index as u64), generation, step, &entry);
        if self.checker.committed_step() == step {
            if self.last_commit > 0 {
                self.summary.longest_gap_ms = self.summary.longest_gap_ms.max(self.now - self.last_commit);
            }
            self.last_commit = self.now;
        }
        self.member_event(index, MemberEvent::Applied { digest: entry.digest });
    }
}
