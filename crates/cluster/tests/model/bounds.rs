//! One configuration of the model: what may happen how often, what is planted, and what has to hold.

use crate::drive::quiet_panics;
use crate::state::{Harm, Node, Statement, World, seen};
use crate::step::Step;
use crate::wrong::Wrong;
use engram_cluster::Entry;
use engram_cluster::injected::Bug;
use engram_cluster::replica::Rules;
use engram_memory::{Ordinal, Term};
use stateright::{Model, Property};
use std::collections::BTreeSet;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Bounds {
    /// Mode `sync`: what counts as acknowledged is durable. Otherwise a write counts in the page cache.
    pub(crate) sync: bool,
    /// The log reports later than it is told; otherwise at once.
    pub(crate) lazy: bool,
    /// Maps are read late, decisions are applied late, coordinators hear of a new process late.
    pub(crate) late: bool,
    /// Reads and read leases.
    pub(crate) leases: bool,
    /// A promotion may name any part of the candidates, and the process that serves.
    pub(crate) any_subset: bool,
    /// Coordinators promote candidates that lost something, too.
    pub(crate) careless: bool,
    /// Starts where two logs differ and one of them begins with a snapshot ([`Bounds::fork`]).
    pub(crate) forked: bool,
    pub(crate) nodes: u32,
    /// Members in sync at the start, and as many as there shall be.
    pub(crate) replicas: usize,
    pub(crate) min_in_sync: usize,
    pub(crate) ops: u8,
    pub(crate) terms: u64,
    /// Losses of power, kills that leave the page cache, orderly stops, empty disks under the old name.
    pub(crate) power: u8,
    pub(crate) kills: u8,
    pub(crate) stops: u8,
    pub(crate) disks: u8,
    /// Times that a primary hears of one who leaves.
    pub(crate) departures: u8,
    /// Hand-overs, false suspicions, new streams between two processes, snapshots, hints at learners.
    pub(crate) drains: u8,
    pub(crate) doubts: u8,
    pub(crate) reconnects: u8,
    pub(crate) snapshots: u8,
    pub(crate) hints: u8,
    pub(crate) defect: Option<Bug>,
    pub(crate) wrong: Option<Wrong>,
}

/// Two copies on three nodes, one loss of power, everything at once and on time.
pub(crate) const SYNC: Bounds = Bounds {
    sync: true,
    lazy: false,
    late: false,
    leases: false,
    any_subset: false,
    careless: false,
    forked: false,
    nodes: 3,
    replicas: 2,
    min_in_sync: 1,
    ops: 1,
    terms: 3,
    power: 1,
    kills: 0,
    stops: 0,
    disks: 0,
    departures: 0,
    drains: 0,
    doubts: 1,
    reconnects: 0,
    snapshots: 0,
    hints: 1,
    defect: None,
    wrong: None,
};

pub(crate) const REPLICATED: Bounds = Bounds { sync: false, ..SYNC };

impl Bounds {
    /// Everything that can happen, for deep walks.
    pub(crate) const fn everything(self) -> Self {
        Self {
            lazy: true,
            late: true,
            leases: true,
            any_subset: true,
            careless: true,
            nodes: self.replicas as u32 + 1,
            ops: 4,
            terms: 10,
            power: 2,
            kills: 1,
            stops: 1,
            disks: 1,
            departures: 1,
            drains: 2,
            doubts: 4,
            reconnects: 3,
            snapshots: 2,
            hints: 6,
            ..self
        }
    }

    pub(crate) fn plants(&self, wrong: Wrong) -> bool {
        self.wrong == Some(wrong)
    }

    pub(crate) fn has(&self, defect: Bug) -> bool {
        self.defect == Some(defect)
    }

    pub(crate) const fn rules(&self) -> Rules {
        Rules { keeps_all: self.sync, min_in_sync: self.min_in_sync, primary_only: false }
    }

    pub(crate) fn ordinals(&self) -> impl Iterator<Item = Ordinal> + use<> {
        (0..self.nodes).map(Ordinal)
    }

    /// Whether a node holds everything, as the map and its own statement say.
    pub(crate) fn is_eligible(&self, entry: &Entry, statement: &Statement) -> bool {
        let place = statement.member.ordinal;
        let by_place =
            self.plants(Wrong::EligibleByOrdinal) && entry.candidates().any(|member| member.ordinal == place);
        by_place || entry.holds_all(&statement.member, statement.lossless_since, self.sync)
    }
}

/// What a state of the kind `sometimes` looks like.
type Condition = fn(&Bounds, &World) -> bool;

impl Model for Bounds {
    type State = World;
    type Action = Step;

    fn init_states(&self) -> Vec<World> {
        quiet_panics();
        vec![self.start()]
    }

    fn actions(&self, world: &World, out: &mut Vec<Step>) {
        if world.harm.is_none() {
            self.options(world, out);
        }
    }

    fn next_state(&self, last: &World, step: Step) -> Option<World> {
        let mut world = last.clone();
        self.take(&mut world, &step);
        self.forget(&mut world);
        (world != *last).then_some(world)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        let mut all = vec![
            Property::<Self>::always("nothing panics", |_, world| world.harm != Some(Harm::Panicked)),
            Property::<Self>::always("no read is stale", |_, world| world.harm != Some(Harm::StaleRead)),
            Property::<Self>::always("what is committed is equal everywhere", |_, world| {
                world.harm != Some(Harm::Diverged)
            }),
            Property::<Self>::always("what is committed stays", |_, world| world.harm != Some(Harm::Truncated)),
            Property::<Self>::always("every eligible candidate holds what is committed", candidates_hold_all),
            Property::<Self>::always("who serves the map's term holds what is committed", servers_hold_all),
            Property::<Self>::always("nothing is applied twice", |_, world| {
                let ops: BTreeSet<_> = world.committed.iter().map(|record| record.1).collect();
                ops.len() == world.committed.len()
            }),
            Property::<Self>::always("one loss of power leaves an eligible candidate", one_loss_leaves_a_candidate),
        ];
        let keeps = !self.sync && self.kills + self.stops > 0;
        let reachable: [(&'static str, bool, Condition); 6] = [
            ("committed after a promotion", self.power > 0, |bounds, world| bounds.came(world, seen::PROMOTED)),
            ("committed after an addition", self.terms > 3, |bounds, world| bounds.came(world, seen::ADDED)),
            ("committed after a rollback", self.terms > 3, |bounds, world| bounds.came(world, seen::ROLLED_BACK)),
            ("committed after a hand-over", self.drains > 0, |bounds, world| bounds.came(world, seen::HANDED_OVER)),
            ("committed by a restarted member that kept its place", keeps, |bounds, world| {
                bounds.came(world, seen::KEPT_PLACE)
            }),
            ("committed after a copy", self.snapshots > 0 && self.terms > 3, |bounds, world| {
                bounds.came(world, seen::COPIED)
            }),
        ];
        let reachable = reachable.into_iter().filter(|(_, applies, _)| *applies);
        all.extend(reachable.map(|(name, _, condition)| Property::<Self>::sometimes(name, condition)));
        all
    }
}

impl Bounds {
    /// What matters has happened, and then an operation was committed: at the term that stands, or as the last one.
    fn came(&self, world: &World, what: u8) -> bool {
        let last = world.committed.last().map(|record| record.0);
        let all = world.committed.len() == self.ops as usize;
        world.seen & what == what && (all || last == Some(world.entry().term))
    }
}

fn statement_now(node: &Node) -> Statement {
    Statement { member: node.me, lossless_since: node.lossless_since }
}

fn candidates_hold_all(bounds: &Bounds, world: &World) -> bool {
    let entry = world.entry();
    bounds.ordinals().all(|ordinal| {
        !bounds.is_eligible(entry, &statement_now(world.at(ordinal))) || world.holds_all_committed(ordinal)
    })
}

fn servers_hold_all(bounds: &Bounds, world: &World) -> bool {
    let term: Term = world.entry().term;
    bounds.ordinals().all(|ordinal| world.at(ordinal).serves() != Some(term) || world.holds_all_committed(ordinal))
}

fn one_loss_leaves_a_candidate(bounds: &Bounds, world: &World) -> bool {
    world.power > 1
        || world.disks > 0
        || bounds.ordinals().any(|ordinal| bounds.is_eligible(world.entry(), &statement_now(world.at(ordinal))))
}
