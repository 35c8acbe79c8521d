//! One configuration of the model: how often each event may happen, which bug is injected, and which properties must hold.

use crate::history::Harm;
use crate::step::Step;
use crate::world::World;
use engram_collective::group::{Quorum, Settings, Timing};
use stateright::{Model, Property};

/// A bug of a driver.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Bug {
    /// A member takes its own flag for those of its peers.
    CommitsAlone,
    /// A generation is published before its record is durable.
    PublishesBeforeRecord,
    /// Reports don't say that a reduced gradient is complete.
    ForgetsPrepared,
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Bounds {
    pub(crate) members: u64,
    /// Steps that a member computes.
    pub(crate) steps: u64,
    /// Members that are killed, processes that join, members that leave.
    pub(crate) kills: u8,
    pub(crate) starts: u8,
    pub(crate) leaves: u8,
    /// Suspicions of living members by others, and living members that a service gives up.
    pub(crate) suspicions: u8,
    pub(crate) silences: u8,
    /// Times that as much time passes as the service waits for a report.
    pub(crate) waits: u8,
    /// Times that another service takes over.
    pub(crate) failovers: u8,
    pub(crate) bug: Option<Bug>,
}

/// Two members, no faults.
pub(crate) const TWO: Bounds = Bounds {
    members: 2,
    steps: 1,
    kills: 0,
    starts: 0,
    leaves: 0,
    suspicions: 0,
    silences: 0,
    waits: 0,
    failovers: 0,
    bug: None,
};
pub(crate) const THREE: Bounds = Bounds { members: 3, ..TWO };

impl Bounds {
    pub(crate) fn has(&self, bug: Bug) -> bool {
        self.bug == Some(bug)
    }

    pub(crate) const fn settings(&self) -> Settings {
        Settings { timing: Timing::new(100), min_members: 1, quorum: Quorum::StoreTerm }
    }
}

impl Model for Bounds {
    type State = World;
    type Action = Step;

    fn init_states(&self) -> Vec<World> {
        vec![World::start(self)]
    }

    fn actions(&self, world: &World, out: &mut Vec<Step>) {
        if world.history.harm.is_none() {
            world.options(self, out);
        }
    }

    fn next_state(&self, last: &World, step: Step) -> Option<World> {
        let mut world = last.clone();
        world.apply(self, step);
        (world != *last).then_some(world)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        let mut all = vec![
            Property::<Self>::always("a generation has one record", |_, it| it.history.harm != Some(Harm::TwoRecords)),
            Property::<Self>::always("a step has one outcome", |_, it| it.history.harm != Some(Harm::SecondHistory)),
            Property::<Self>::always("no committed step is lost", |_, it| it.history.harm != Some(Harm::LostStep)),
            Property::<Self>::always("members of a generation have one state", |_, it| {
                it.history.harm != Some(Harm::OtherState)
            }),
            Property::<Self>::sometimes("all steps are committed", |bounds, it| {
                it.history.committed_steps() == bounds.steps
            }),
        ];
        if self.kills > 0 {
            all.push(Property::<Self>::sometimes("survivors commit a step", |bounds, it| {
                it.has_dead() && it.durable.generation > 1 && it.history.committed_steps() == bounds.steps
            }));
        }
        if self.starts > 0 {
            all.push(Property::<Self>::sometimes("a process that joined is a member", |bounds, it| {
                it.durable.members.iter().any(|member| member.0 >= bounds.members)
            }));
        }
        if self.failovers > 0 {
            all.push(Property::<Self>::sometimes("a service is deposed", |_, it| it.deposed));
        }
        all
    }
}
