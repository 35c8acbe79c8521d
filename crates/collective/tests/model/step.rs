//! The possible steps, and their effects.

use crate::bounds::{Bounds, Bug};
use crate::world::{INITIAL, Node, Seat, Which, World};
use engram_collective::group::{Cause, MemberEvent, MemberId, Prepared, Service, ServiceEvent, Suspicion};

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Step {
    /// The sums of a member are complete.
    Computed(MemberId),
    /// The sums of all members have arrived at one.
    Reduced(MemberId),
    /// The oldest flag from one to another arrives.
    Flag(MemberId, MemberId),
    /// The oldest notice of a service arrives.
    Notice(Which, MemberId),
    Report(Which, MemberId),
    /// A probe is answered.
    Answer(Which, MemberId),
    /// A member has the state of another one.
    Fetched(MemberId, MemberId),
    /// The store has a record, or refuses it.
    Stored(Which),
    /// A timer of a member fires.
    Tick(MemberId),
    ServiceTick(Which),
    /// As much time passes as a service waits for a report.
    Wait,
    Kill(MemberId),
    /// A service learns that a process is dead.
    Died(Which, MemberId),
    /// A service gives up a living member that is silent.
    Silent(Which, MemberId),
    /// A process starts, with the initial state or that of a dead one.
    Start(Option<MemberId>),
    Leave(MemberId),
    Suspect(MemberId, Suspicion),
    /// Another service takes over; the one before does not know.
    Failover,
}

impl World {
    /// Adds the steps that are possible.
    pub(crate) fn options(&self, bounds: &Bounds, out: &mut Vec<Step>) {
        let living = || self.nodes.iter().filter(|(_, node)| node.is_alive);
        for (&id, node) in living() {
            if node.computing.is_some_and(|step| step <= bounds.steps) {
                out.push(Step::Computed(id));
            }
            if let Some(it) = &node.reducing
                && it.members.iter().all(|member| self.sums.contains(&(it.generation, it.step, *member)))
            {
                out.push(Step::Reduced(id));
            }
            if let Some((_, sources)) = &node.fetching {
                let sources = sources.iter().filter(|it| self.nodes.get(it).is_some_and(|node| node.is_alive));
                out.extend(sources.map(|source| Step::Fetched(id, *source)));
            }
            out.push(Step::Tick(id));
            if self.kills < bounds.kills {
                out.push(Step::Kill(id));
            }
            if self.leaves < bounds.leaves {
                out.push(Step::Leave(id));
            }
            if self.suspicions < bounds.suspicions {
                for (&peer, _) in living().filter(|(other, _)| **other != id) {
                    let causes = [Cause::Stalled, Cause::Broken];
                    out.extend(causes.map(|cause| Step::Suspect(id, Suspicion { peer, cause })));
                }
            }
        }
        out.extend(self.flags.keys().map(|(from, to)| Step::Flag(*from, *to)));
        let dead = || self.nodes.iter().filter(|(_, node)| !node.is_alive).map(|(id, _)| *id);
        for (&which, seat) in &self.seats {
            out.extend(seat.notices.keys().map(|to| Step::Notice(which, *to)));
            out.extend(seat.reports.keys().map(|from| Step::Report(which, *from)));
            let answers = seat.probes.iter().filter(|it| self.nodes[it].is_alive);
            out.extend(answers.map(|it| Step::Answer(which, *it)));
            if seat.storing.is_some() {
                out.push(Step::Stored(which));
            }
            out.push(Step::ServiceTick(which));
            let recorded = dead().filter(|it| seat.service.record().members.contains(it));
            out.extend(recorded.map(|it| Step::Died(which, it)));
            if self.silences < bounds.silences {
                out.extend(living().map(|(id, _)| Step::Silent(which, *id)));
            }
        }
        if self.waits < bounds.waits {
            out.push(Step::Wait);
        }
        if self.starts < bounds.starts {
            out.push(Step::Start(None));
            out.extend(dead().map(|it| Step::Start(Some(it))));
        }
        if self.failovers < bounds.failovers {
            out.push(Step::Failover);
        }
    }

    pub(crate) fn apply(&mut self, bounds: &Bounds, step: Step) {
        match step {
            Step::Computed(id) => {
                let computed = self.node(id).computing.take();
                if let Some(step) = computed {
                    self.member_event(bounds, id, MemberEvent::Gradients { step });
                }
            }
            Step::Reduced(id) => self.reduced(bounds, id),
            Step::Flag(from, to) => {
                let Some(sent) = self.flags.get_mut(&(from, to)) else { return };
                let flag = sent.remove(0);
                if sent.is_empty() {
                    self.flags.remove(&(from, to));
                }
                self.member_event(bounds, to, MemberEvent::Flag { from, flag });
            }
            Step::Notice(which, id) => {
                let queues = &mut self.seat(which).notices;
                let Some(queue) = queues.get_mut(&id) else { return };
                let (term, notice) = queue.pop_front().expect("queues without notices are removed");
                if queue.is_empty() {
                    queues.remove(&id);
                }
                self.member_event(bounds, id, MemberEvent::Notice { term, notice });
            }
            Step::Report(which, id) => self.report(bounds, which, id),
            Step::Answer(which, id) => {
                self.seat(which).probes.remove(&id);
                self.service_event(bounds, which, ServiceEvent::ProbeAnswered(id));
            }
            Step::Fetched(id, source) => self.fetched(bounds, id, source),
            Step::Stored(which) => self.stored(bounds, which),
            Step::Tick(id) => self.member_event(bounds, id, MemberEvent::Tick),
            Step::ServiceTick(which) => self.service_event(bounds, which, ServiceEvent::Tick),
            Step::Wait => {
                self.waits += 1;
                self.now_ms += bounds.settings().timing.progress_ms();
            }
            Step::Kill(id) => {
                self.kills += 1;
                self.end(id);
            }
            Step::Silent(which, id) => {
                self.silences += 1;
                self.service_event(bounds, which, ServiceEvent::Died(id));
            }
            Step::Died(which, id) => self.service_event(bounds, which, ServiceEvent::Died(id)),
            Step::Start(of) => {
                self.starts += 1;
                let id = MemberId(self.nodes.len() as u64);
                let digests = match of {
                    Some(dead) => self.node(dead).digests.clone(),
                    None => vec![INITIAL.digest],
                };
                let now_ms = self.now_ms;
                self.nodes.insert(id, Node::new(id, digests, bounds, now_ms));
            }
            Step::Leave(id) => {
                self.leaves += 1;
                self.member_event(bounds, id, MemberEvent::Leave);
            }
            Step::Suspect(id, suspicion) => {
                self.suspicions += 1;
                let generation = self.node(id).member.report().generation;
                self.member_event(bounds, id, MemberEvent::PeerFailed { generation, suspicion });
            }
            Step::Failover => {
                self.failovers += 1;
                self.term += 1;
                let service = Service::new(self.durable.clone(), self.term, bounds.settings(), self.now_ms);
                let before = self.seats.insert(Which::Current, Seat::new(service)).expect("there is a service");
                self.seats.insert(Which::Replaced, before);
                // Members report to both: their streams to the new one are open.
                for (id, node) in &self.nodes {
                    if node.is_alive {
                        let report = node.member.report();
                        self.seats.get_mut(&Which::Current).expect("just inserted").reports.insert(*id, report);
                    }
                }
            }
        }
    }

    fn node(&mut self, id: MemberId) -> &mut Node {
        self.nodes.get_mut(&id).expect("it exists")
    }

    fn seat(&mut self, which: Which) -> &mut Seat {
        self.seats.get_mut(&which).expect("it exists")
    }

    fn reduced(&mut self, bounds: &Bounds, id: MemberId) {
        let Some(reduction) = self.node(id).reducing.take() else { return };
        let (generation, step) = (reduction.generation, reduction.step);
        self.member_event(bounds, id, MemberEvent::Reduced { generation, step, valid: true });
        if bounds.has(Bug::CommitsAlone) {
            let flag = Prepared { generation, step, valid: true };
            for from in reduction.members.into_iter().filter(|it| *it != id) {
                self.member_event(bounds, id, MemberEvent::Flag { from, flag });
            }
        }
    }

    fn fetched(&mut self, bounds: &Bounds, id: MemberId, source: MemberId) {
        let digests = self.node(source).digests.clone();
        let node = self.node(id);
        let was_fetching = node.fetching.take().is_some();
        if !was_fetching || node.member.report().generation != 0 {
            return;
        }
        node.digests = digests;
        let position = node.position();
        self.member_event(bounds, id, MemberEvent::CaughtUp { position });
    }

    fn stored(&mut self, bounds: &Bounds, which: Which) {
        let Some((term, record)) = self.seat(which).storing.take() else { return };
        if term < self.term {
            self.deposed = true;
            self.seats.remove(&which);
            return;
        }
        let generation = record.generation;
        if self.durable.generation < generation {
            self.durable = record;
        }
        self.service_event(bounds, which, ServiceEvent::Recorded { generation });
    }
}
