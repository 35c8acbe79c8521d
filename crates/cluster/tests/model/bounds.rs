//! One configuration of the model: how often each event may happen, which bug is injected, and which properties must
//! hold.

use crate::drive::quiet_panics;
use crate::environment_bug::EnvironmentBug;
use crate::state::{Harm, Node, ProcessReport, World, reached};
use crate::step::Step;
use engram_cluster::Entry;
use engram_cluster::injected::Bug;
use engram_cluster::replica::Rules;
use engram_memory::{Ordinal, Term};
use stateright::{Model, Property};
use std::collections::BTreeSet;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Bounds {
    /// Mode `sync`: acknowledged means durable. Otherwise the page cache suffices.
    pub(crate) sync: bool,
    /// The log reports with a delay; otherwise at once.
    pub(crate) lazy: bool,
    /// Maps are read late, decisions are applied late, coordinators observe new processes late.
    pub(crate) late: bool,
    /// Reads and read leases.
    pub(crate) leases: bool,
    /// A promotion may name any subset of the candidates, and the current primary.
    pub(crate) any_subset: bool,
    /// Coordinators also promote candidates that lost records.
    pub(crate) careless: bool,
    /// Starts with two diverging logs, one of which begins with a snapshot ([`Bounds::fork`]).
    pub(crate) forked: bool,
    pub(crate) nodes: u32,
    /// Members in sync at the start, and the desired number.
    pub(crate) replicas: usize,
    pub(crate) min_in_sync: usize,
    pub(crate) ops: u8,
    pub(crate) terms: u64,
    /// Power losses, kills that keep the page cache, orderly stops, empty disks under the old name.
    pub(crate) power: u8,
    pub(crate) kills: u8,
    pub(crate) stops: u8,
    pub(crate) disks: u8,
    /// Times a primary learns of a leaving worker.
    pub(crate) leavings: u8,
    /// Leadership transfers, false suspicions, new streams between two processes, snapshots, learner assignments.
    pub(crate) transfers: u8,
    pub(crate) suspicions: u8,
    pub(crate) reconnects: u8,
    pub(crate) snapshots: u8,
    pub(crate) learner_changes: u8,
    pub(crate) bug: Option<Bug>,
    pub(crate) environment_bug: Option<EnvironmentBug>,
}

/// Two replicas on three nodes, one power loss, no delays.
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
    leavings: 0,
    transfers: 0,
    suspicions: 1,
    reconnects: 0,
    snapshots: 0,
    learner_changes: 1,
    bug: None,
    environment_bug: None,
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
            leavings: 1,
            transfers: 2,
            suspicions: 4,
            reconnects: 3,
            snapshots: 2,
            learner_changes: 6,
            ..self
        }
    }

    pub(crate) fn injects(&self, bug: EnvironmentBug) -> bool {
        self.environment_bug == Some(bug)
    }

    pub(crate) fn has(&self, bug: Bug) -> bool {
        self.bug == Some(bug)
    }

    pub(crate) const fn rules(&self) -> Rules {
        Rules { keeps_all: self.sync, min_in_sync: self.min_in_sync, primary_only: false }
    }

    pub(crate) fn ordinals(&self) -> impl Iterator<Item = Ordinal> + use<> {
        (0..self.nodes).map(Ordinal)
    }

    /// Whether a node holds everything, according to the map and its own report.
    pub(crate) fn is_eligible(&self, entry: &Entry, report: &ProcessReport) -> bool {
        let ordinal = report.member.ordinal;
        let by_ordinal = self.injects(EnvironmentBug::EligibleByOrdinal)
            && entry.candidates().any(|member| member.ordinal == ordinal);
        by_ordinal || entry.holds_all(&report.member, report.lossless_since, self.sync)
    }
}

/// Condition of a `sometimes` property.
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
        self.apply_step(&mut world, &step);
        self.forget(&mut world);
        (world != *last).then_some(world)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        let mut all = vec![
            Property::<Self>::always("nothing panics", |_, world| world.harm != Some(Harm::Panicked)),
            Property::<Self>::always("no read is stale", |_, world| world.harm != Some(Harm::StaleRead)),
            Property::<Self>::always("committed records are equal everywhere", |_, world| {
                world.harm != Some(Harm::Diverged)
            }),
            Property::<Self>::always("committed records stay", |_, world| world.harm != Some(Harm::Truncated)),
            Property::<Self>::always("every eligible candidate holds all committed records", candidates_hold_all),
            Property::<Self>::always("the primary of the map's term holds all committed records", servers_hold_all),
            Property::<Self>::always("no operation is applied twice", |_, world| {
                let ops: BTreeSet<_> = world.committed.iter().map(|record| record.1).collect();
                ops.len() == world.committed.len()
            }),
            Property::<Self>::always("an eligible candidate survives one power loss", one_loss_leaves_a_candidate),
        ];
        let keeps = !self.sync && self.kills + self.stops > 0;
        let reachable: [(&'static str, bool, Condition); 6] = [
            ("committed after a promotion", self.power > 0, |bounds, world| {
                bounds.committed_after(world, reached::PROMOTED)
            }),
            ("committed after an addition", self.terms > 3, |bounds, world| {
                bounds.committed_after(world, reached::ADDED)
            }),
            ("committed after a rollback", self.terms > 3, |bounds, world| {
                bounds.committed_after(world, reached::ROLLED_BACK)
            }),
            ("committed after a leadership transfer", self.transfers > 0, |bounds, world| {
                bounds.committed_after(world, reached::TRANSFERRED)
            }),
            ("committed by a restarted member that stayed eligible", keeps, |bounds, world| {
                bounds.committed_after(world, reached::STAYED_ELIGIBLE)
            }),
            ("committed after a snapshot transfer", self.snapshots > 0 && self.terms > 3, |bounds, world| {
                bounds.committed_after(world, reached::SNAPSHOT)
            }),
        ];
        let reachable = reachable.into_iter().filter(|(_, applies, _)| *applies);
        all.extend(reachable.map(|(name, _, condition)| Property::<Self>::sometimes(name, condition)));
        all
    }
}

impl Bounds {
    /// Whether an event has happened and an operation was committed afterwards: in the current term, or as the last
    /// one.
    fn committed_after(&self, world: &World, event: u8) -> bool {
        let last = world.committed.last().map(|record| record.0);
        let all = world.committed.len() == self.ops as usize;
        world.reached & event == event && (all || last == Some(world.entry().term))
    }
}

fn current_report(node: &Node) -> ProcessReport {
    ProcessReport { member: node.me, lossless_since: node.lossless_since }
}

fn candidates_hold_all(bounds: &Bounds, world: &World) -> bool {
    let entry = world.entry();
    bounds.ordinals().all(|ordinal| {
        !bounds.is_eligible(entry, &current_report(world.at(ordinal))) || world.holds_all_committed(ordinal)
    })
}

fn servers_hold_all(bounds: &Bounds, world: &World) -> bool {
    let term: Term = world.entry().term;
    bounds.ordinals().all(|ordinal| world.at(ordinal).serves() != Some(term) || world.holds_all_committed(ordinal))
}

fn one_loss_leaves_a_candidate(bounds: &Bounds, world: &World) -> bool {
    world.power > 1
        || world.disks > 0
        || bounds.ordinals().any(|ordinal| bounds.is_eligible(world.entry(), &current_report(world.at(ordinal))))
}
