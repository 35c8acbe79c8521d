//! Liveness: once faults cease and messages arrive, every operation is committed, every replica is in sync, and the
//! primary can read. Without this check a core that stops forever would pass.

use crate::bounds::Bounds;
use crate::state::World;
use crate::step::Step;
use engram_cluster::{Change, Replica};
use engram_memory::{Lsn, Ordinal};
use std::collections::BTreeSet;

/// Rounds in which everything due happens once. A healthy partition needs about twenty.
const ROUNDS: usize = 60;

/// Outcome of the recovery.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Recovery {
    Recovered,
    /// More was lost than the guarantees allow: only a forced promotion helps.
    Unrecoverable,
    Stuck,
}

impl Bounds {
    /// Ends all faults, and checks whether the partition recovers.
    pub(crate) fn recover(&self, mut world: World) -> Recovery {
        world.net.clear();
        world.proposals.clear();
        for ordinal in self.ordinals() {
            if world.at(ordinal).replica.is_none() {
                self.apply_step(&mut world, &Step::Restart(ordinal));
            }
            self.apply_step(&mut world, &Step::Observe(ordinal));
            self.apply_step(&mut world, &Step::Leaving(ordinal, BTreeSet::new()));
        }
        if !world.reported.iter().any(|report| self.is_eligible(world.entry(), report)) {
            return Recovery::Unrecoverable;
        }
        for (me, other) in self.pairs() {
            self.apply_step(&mut world, &Step::Trust(me, other));
            self.apply_step(&mut world, &Step::Connect(me, other));
        }
        let is_recovered = (0..ROUNDS).any(|_| {
            self.round(&mut world);
            self.is_recovered(&world)
        });
        if is_recovered && world.harm.is_none() { Recovery::Recovered } else { Recovery::Stuck }
    }

    fn pairs(&self) -> impl Iterator<Item = (Ordinal, Ordinal)> + use<> {
        let all = self.ordinals().collect::<Vec<_>>();
        let nodes = self.nodes;
        all.into_iter()
            .flat_map(move |me| (0..nodes).map(Ordinal).filter(move |other| *other != me).map(move |other| (me, other)))
    }

    fn round(&self, world: &mut World) {
        for (me, other) in self.pairs() {
            self.apply_step(world, &Step::ExpireHeld(me, other));
        }
        self.decide(world);
        let newest = world.maps.len() - 1;
        for me in self.ordinals() {
            for holder in world.at(me).granted.clone() {
                self.apply_step(world, &Step::ExpireGranted(me, holder));
            }
            self.apply_step(world, &Step::Learn(me, newest));
            self.apply_step(world, &Step::Keep(me));
            self.apply_step(world, &Step::Flush(me, 0));
            for op in 0..self.ops {
                let node = world.at(me);
                let admits = node.replica.as_ref().is_some_and(Replica::admits_writes);
                if admits && node.log.iter().all(|record| record.1 != op) {
                    self.apply_step(world, &Step::Write(me, op));
                }
            }
            self.apply_step(world, &Step::Resend(me));
        }
        for envelope in std::mem::take(&mut world.net) {
            self.apply_step(world, &Step::Deliver(envelope));
        }
        for (expected, change) in std::mem::take(&mut world.proposals) {
            self.apply_step(world, &Step::Apply(expected, change));
        }
    }

    /// Decides like a coordinator with complete information.
    fn decide(&self, world: &mut World) {
        let entry = std::sync::Arc::clone(world.entry());
        let serves =
            |report: &&crate::state::ProcessReport| entry.served_by(&report.member) && self.is_eligible(&entry, report);
        if !world.reported.iter().any(|report| serves(&report)) {
            let eligible = world.reported.iter().find(|report| self.is_eligible(&entry, report)).copied();
            let Some(report) = eligible else { return };
            let mut isr: Vec<Ordinal> = entry.candidates().map(|member| member.ordinal).collect();
            isr.sort_unstable();
            isr.dedup();
            let promote = Change::Promote { primary: report.member, isr };
            self.apply_step(world, &Step::Apply(entry.expectation(), promote));
        } else if entry.isr.len() < self.replicas
            && entry.learners.iter().all(|learner| entry.in_sync(*learner).is_some())
        {
            let missing = self.ordinals().find(|ordinal| entry.in_sync(*ordinal).is_none());
            self.apply_step(world, &Step::AssignLearners(missing.into_iter().collect()));
        }
    }

    fn is_recovered(&self, world: &World) -> bool {
        let entry = world.entry();
        let all = world.committed.len() >= self.ops as usize;
        let in_sync = entry.isr.iter().all(|member| {
            let report = world.reported[member.ordinal.0 as usize];
            let commit = world.at(member.ordinal).replica.as_ref().map_or(Lsn(0), Replica::commit);
            self.is_eligible(entry, &report) && commit == Lsn(world.committed.len() as u64)
        });
        let primary = world.at(entry.primary).replica.as_ref();
        all && in_sync
            && entry.isr.len() >= self.replicas
            && primary.is_some_and(|replica| replica.required_leases().is_some())
    }
}
