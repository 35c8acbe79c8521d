//! What has to come in the end: when faults cease and messages arrive, every operation is committed, every copy is there, and
//! the primary reads. Without this a core that stops for ever would pass.

use crate::bounds::Bounds;
use crate::state::World;
use crate::step::Step;
use engram_cluster::{Change, Replica};
use engram_memory::{Lsn, Ordinal};
use std::collections::BTreeSet;

/// Rounds in which everything that is due happens once. A healthy partition needs about twenty.
const ROUNDS: usize = 60;

/// How it ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Healing {
    Healed,
    /// More was lost than is promised: a person decides.
    Hopeless,
    Stuck,
}

impl Bounds {
    /// Lets the faults cease.
    pub(crate) fn heal(&self, mut world: World) -> Healing {
        world.net.clear();
        world.proposals.clear();
        for ordinal in self.ordinals() {
            if world.at(ordinal).replica.is_none() {
                self.take(&mut world, &Step::Restart(ordinal));
            }
            self.take(&mut world, &Step::Hear(ordinal));
            self.take(&mut world, &Step::Leaving(ordinal, BTreeSet::new()));
        }
        if !world.stated.iter().any(|statement| self.is_eligible(world.entry(), statement)) {
            return Healing::Hopeless;
        }
        for (me, other) in self.pairs() {
            self.take(&mut world, &Step::Trust(me, other));
            self.take(&mut world, &Step::Connect(me, other));
        }
        let whole = (0..ROUNDS).any(|_| {
            self.round(&mut world);
            self.is_whole(&world)
        });
        if whole && world.harm.is_none() { Healing::Healed } else { Healing::Stuck }
    }

    fn pairs(&self) -> impl Iterator<Item = (Ordinal, Ordinal)> + use<> {
        let all = self.ordinals().collect::<Vec<_>>();
        let nodes = self.nodes;
        all.into_iter()
            .flat_map(move |me| (0..nodes).map(Ordinal).filter(move |other| *other != me).map(move |other| (me, other)))
    }

    fn round(&self, world: &mut World) {
        for (me, other) in self.pairs() {
            self.take(world, &Step::ExpireHeld(me, other));
        }
        self.decide(world);
        let newest = world.maps.len() - 1;
        for me in self.ordinals() {
            for holder in world.at(me).granted.clone() {
                self.take(world, &Step::ExpireGranted(me, holder));
            }
            self.take(world, &Step::Learn(me, newest));
            self.take(world, &Step::Keep(me));
            self.take(world, &Step::Flush(me, 0));
            for op in 0..self.ops {
                let node = world.at(me);
                let admits = node.replica.as_ref().is_some_and(Replica::admits_writes);
                if admits && node.log.iter().all(|record| record.1 != op) {
                    self.take(world, &Step::Write(me, op));
                }
            }
            self.take(world, &Step::Remind(me));
        }
        for envelope in std::mem::take(&mut world.net) {
            self.take(world, &Step::Deliver(envelope));
        }
        for (expected, change) in std::mem::take(&mut world.proposals) {
            self.take(world, &Step::Apply(expected, change));
        }
    }

    /// What a coordinator decides that sees everything.
    fn decide(&self, world: &mut World) {
        let entry = std::sync::Arc::clone(world.entry());
        let serves = |statement: &&crate::state::Statement| {
            entry.served_by(&statement.member) && self.is_eligible(&entry, statement)
        };
        if !world.stated.iter().any(|statement| serves(&statement)) {
            let eligible = world.stated.iter().find(|statement| self.is_eligible(&entry, statement)).copied();
            let Some(statement) = eligible else { return };
            let mut isr: Vec<Ordinal> = entry.candidates().map(|member| member.ordinal).collect();
            isr.sort_unstable();
            isr.dedup();
            let promote = Change::Promote { primary: statement.member, isr };
            self.take(world, &Step::Apply(entry.expectation(), promote));
        } else if entry.isr.len() < self.replicas
            && entry.learners.iter().all(|learner| entry.in_sync(*learner).is_some())
        {
            let missing = self.ordinals().find(|ordinal| entry.in_sync(*ordinal).is_none());
            self.take(world, &Step::Hint(missing.into_iter().collect()));
        }
    }

    fn is_whole(&self, world: &World) -> bool {
        let entry = world.entry();
        let all = world.committed.len() >= self.ops as usize;
        let copies = entry.isr.iter().all(|member| {
            let statement = world.stated[member.ordinal.0 as usize];
            let commit = world.at(member.ordinal).replica.as_ref().map_or(Lsn(0), Replica::commit);
            self.is_eligible(entry, &statement) && commit == Lsn(world.committed.len() as u64)
        });
        let primary = world.at(entry.primary).replica.as_ref();
        all && copies && entry.isr.len() >= self.replicas && primary.is_some_and(|replica| replica.required_leases().is_some())
    }
}
