//! The state of the model, and what the drivers of members and services do.

use crate::bounds::{Bounds, Bug};
use crate::history::History;
use engram_collective::group::{
    Member, MemberAction, MemberEvent, MemberId, Notice, Position, Prepared, Record, Report, Service, ServiceAction,
    ServiceEvent,
};
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// Which service: the one that took over last, or the one before, which may not know of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Which {
    Current,
    Replaced,
}

/// Position of the state with which all members begin.
pub(crate) const INITIAL: Position = Position { step: 0, digest: 1 };

/// A process with a member.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Node {
    pub(crate) member: Member,
    pub(crate) is_alive: bool,
    /// Digests of its state: of the initial one, then after each step.
    pub(crate) digests: Vec<u64>,
    /// Step whose sums it computes.
    pub(crate) computing: Option<u64>,
    pub(crate) reducing: Option<Reduction>,
    pub(crate) fetching: Option<(Position, Vec<MemberId>)>,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Reduction {
    pub(crate) generation: u64,
    pub(crate) step: u64,
    pub(crate) members: Vec<MemberId>,
}

/// A service, and the streams between it and the members.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Seat {
    pub(crate) service: Service,
    pub(crate) notices: BTreeMap<MemberId, VecDeque<(u64, Notice)>>,
    /// The newest report of each member that has not arrived.
    pub(crate) reports: BTreeMap<MemberId, Report>,
    pub(crate) probes: BTreeSet<MemberId>,
    /// The record that is being stored.
    pub(crate) storing: Option<(u64, Record)>,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct World {
    pub(crate) now_ms: u64,
    pub(crate) nodes: BTreeMap<MemberId, Node>,
    pub(crate) seats: BTreeMap<Which, Seat>,
    /// The record in the store, and the newest term that wrote to it or read it.
    pub(crate) durable: Record,
    pub(crate) term: u64,
    /// Sums that were sent: by generation, step and member.
    pub(crate) sums: BTreeSet<(u64, u64, MemberId)>,
    pub(crate) flags: BTreeMap<(MemberId, MemberId), Vec<Prepared>>,
    pub(crate) history: History,
    pub(crate) deposed: bool,
    pub(crate) kills: u8,
    pub(crate) starts: u8,
    pub(crate) leaves: u8,
    pub(crate) suspicions: u8,
    pub(crate) silences: u8,
    pub(crate) waits: u8,
    pub(crate) failovers: u8,
}

/// Digest of the state after a step: it depends on who contributed, and on whether it was applied.
fn digest_after(previous: u64, generation: &Record, apply: bool) -> u64 {
    let members = generation.members.iter().fold(0, |mask, it| mask | 1 << it.0);
    let mixed = previous.rotate_left(7) ^ (members << 1 | u64::from(apply));
    mixed.wrapping_mul(0x9E37_79B9_7F4A_7C15)
}

impl Node {
    pub(crate) fn new(id: MemberId, digests: Vec<u64>, bounds: &Bounds, now_ms: u64) -> Self {
        let position = Position { step: digests.len() as u64 - 1, digest: digests[digests.len() - 1] };
        Self {
            member: Member::new(id, position, bounds.settings().timing, now_ms),
            is_alive: true,
            digests,
            computing: None,
            reducing: None,
            fetching: None,
        }
    }

    pub(crate) fn position(&self) -> Position {
        Position { step: self.digests.len() as u64 - 1, digest: self.digests[self.digests.len() - 1] }
    }
}

impl Seat {
    pub(crate) fn new(service: Service) -> Self {
        let (notices, reports, probes) = (BTreeMap::new(), BTreeMap::new(), BTreeSet::new());
        Self { service, notices, reports, probes, storing: None }
    }
}

impl World {
    /// A group whose members begin with the first step.
    pub(crate) fn start(bounds: &Bounds) -> Self {
        let position = INITIAL;
        let members: Vec<MemberId> = (0..bounds.members).map(MemberId).collect();
        let record = Record { generation: 1, members: members.clone(), position };
        let service = Service::new(record.clone(), 1, bounds.settings(), 0);
        let mut world = Self {
            now_ms: 0,
            nodes: members.iter().map(|id| (*id, Node::new(*id, vec![position.digest], bounds, 0))).collect(),
            seats: BTreeMap::from([(Which::Current, Seat::new(service))]),
            durable: record.clone(),
            term: 1,
            sums: BTreeSet::new(),
            flags: BTreeMap::new(),
            history: History::default(),
            deposed: false,
            kills: 0,
            starts: 0,
            leaves: 0,
            suspicions: 0,
            silences: 0,
            waits: 0,
            failovers: 0,
        };
        world.history.published(&record);
        for member in members {
            let notice = Notice::Publish { record: record.clone(), paused: false };
            world.member_event(bounds, member, MemberEvent::Notice { term: 1, notice });
        }
        // All have reported.
        for member in world.nodes.keys().copied().collect::<Vec<_>>() {
            world.report(bounds, Which::Current, member);
        }
        world
    }

    pub(crate) fn has_dead(&self) -> bool {
        self.nodes.values().any(|node| !node.is_alive)
    }

    /// Lets a service see the newest report of a member.
    pub(crate) fn report(&mut self, bounds: &Bounds, which: Which, member: MemberId) {
        let report = self.seats.get_mut(&which).and_then(|seat| seat.reports.remove(&member));
        if let Some(mut report) = report {
            if bounds.has(Bug::ForgetsPrepared) {
                report.prepared = None;
            }
            self.service_event(bounds, which, ServiceEvent::Report(report));
        }
    }

    pub(crate) fn member_event(&mut self, bounds: &Bounds, id: MemberId, event: MemberEvent) {
        let Some(node) = self.nodes.get_mut(&id).filter(|node| node.is_alive) else { return };
        let actions = node.member.step(event, self.now_ms);
        for action in actions {
            self.member_action(bounds, id, action);
        }
        let node = &self.nodes[&id];
        if node.member.report().generation == self.durable.generation && self.durable.members.contains(&id) {
            self.history.trains_after(&node.digests);
        }
    }

    fn member_action(&mut self, bounds: &Bounds, id: MemberId, action: MemberAction) {
        let node = self.nodes.get_mut(&id).expect("it exists");
        match action {
            MemberAction::Compute { step } => node.computing = Some(step),
            MemberAction::Reduce { generation, step, members } => {
                node.reducing = Some(Reduction { generation, step, members });
                self.sums.insert((generation, step, id));
            }
            MemberAction::Cancel => node.reducing = None,
            MemberAction::SendFlag { to, flag } => {
                let sent = self.flags.entry((id, to)).or_default();
                if !sent.contains(&flag) {
                    sent.push(flag);
                }
            }
            MemberAction::Apply { apply, .. } => {
                let generation = node.member.report().generation;
                let record = self.history.record(generation).cloned().unwrap_or_default();
                let digest = digest_after(node.position().digest, &record, apply);
                node.digests.push(digest);
                (node.computing, node.reducing) = (None, None);
                let position = node.position();
                self.history.finished(id, generation, position);
                self.member_event(bounds, id, MemberEvent::Applied { digest });
            }
            MemberAction::Report(report) => {
                for seat in self.seats.values_mut() {
                    seat.reports.insert(id, report);
                }
            }
            MemberAction::CatchUp { position, sources } => {
                (node.computing, node.reducing) = (None, None);
                node.fetching = Some((position, sources));
            }
            MemberAction::Left => self.end(id),
            MemberAction::Stalled { .. } => {}
        }
    }

    /// Ends a process, and what is sent to it.
    pub(crate) fn end(&mut self, id: MemberId) {
        let node = self.nodes.get_mut(&id).expect("it exists");
        node.is_alive = false;
        (node.computing, node.reducing, node.fetching) = (None, None, None);
        self.flags.retain(|(_, to), _| *to != id);
        for seat in self.seats.values_mut() {
            seat.notices.remove(&id);
        }
    }

    pub(crate) fn service_event(&mut self, bounds: &Bounds, which: Which, event: ServiceEvent) {
        let Some(seat) = self.seats.get_mut(&which) else { return };
        let actions = seat.service.step(event, self.now_ms);
        for action in actions {
            self.service_action(bounds, which, action);
        }
    }

    fn service_action(&mut self, bounds: &Bounds, which: Which, action: ServiceAction) {
        let seat = self.seats.get_mut(&which).expect("it acts");
        match action {
            ServiceAction::Send { to, term, notice } => {
                if let Notice::Publish { record, .. } = &notice {
                    self.history.published(record);
                }
                if self.nodes.get(&to).is_some_and(|node| node.is_alive) {
                    let queue = seat.notices.entry(to).or_default();
                    // A repetition arrives with the first one.
                    if queue.back() != Some(&(term, notice.clone())) {
                        queue.push_back((term, notice));
                    }
                }
            }
            ServiceAction::Probe(member) => {
                seat.probes.insert(member);
            }
            ServiceAction::Record { term, record } => {
                let generation = record.generation;
                seat.storing = Some((term, record));
                if bounds.has(Bug::PublishesBeforeRecord) {
                    self.service_event(bounds, which, ServiceEvent::Recorded { generation });
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
