//! The possible steps in a state.

use crate::bounds::Bounds;
use crate::environment_bug::EnvironmentBug;
use crate::state::{Envelope, Op, ProcessReport, World};
use engram_cluster::injected::Bug;
use engram_cluster::{Change, Entry, ExpectedEntry, Replica};
use engram_memory::{Member, Ordinal};
use std::collections::BTreeSet;
use std::sync::Arc;

/// One step.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Step {
    /// A message arrives, perhaps repeatedly.
    Deliver(Arc<Envelope>),
    /// A process reads the map, or an older one.
    Learn(Ordinal, usize),
    /// A client's operation reaches a process.
    Write(Ordinal, Op),
    /// A promise becomes durable.
    Keep(Ordinal),
    /// Logged records are in the page cache.
    Wrote(Ordinal),
    /// Logged records become durable, except for the last ones.
    Flush(Ordinal, usize),
    /// A snapshot of the committed state replaces the log.
    Snapshot(Ordinal),
    /// `.0` has a new stream to the process of `.1`.
    Connect(Ordinal, Ordinal),
    /// `.0` considers the process of `.1` dead, rightly or not.
    Suspect(Ordinal, Ordinal),
    Trust(Ordinal, Ordinal),
    /// `.0` learns which workers are leaving.
    Leaving(Ordinal, BTreeSet<Ordinal>),
    Resend(Ordinal),
    /// A proposal is applied; its proposer may be dead.
    Apply(ExpectedEntry, Change),
    /// A coordinator promotes a process.
    Promote(ProcessReport, Vec<Ordinal>),
    /// A coordinator assigns learners.
    AssignLearners(Vec<Ordinal>),
    /// Coordinators observe a process.
    Observe(Ordinal),
    /// `.0` is to transfer leadership to `.1`.
    TransferLeadership(Ordinal, Ordinal),
    /// A former primary returns its leases.
    Release(Ordinal),
    /// `.0` grants a read lease to `.1`.
    Grant(Ordinal, Ordinal),
    /// The lease of `.0` from `.1` expires for `.0`.
    ExpireHeld(Ordinal, Ordinal),
    /// The lease granted by `.0` expires for `.0`.
    ExpireGranted(Ordinal, Member),
    Read(Ordinal),
    PowerLoss(Ordinal),
    Kill(Ordinal),
    Stop(Ordinal),
    DiskLoss(Ordinal),
    Restart(Ordinal),
}

impl Bounds {
    pub(crate) fn options(&self, world: &World, out: &mut Vec<Step>) {
        let runs = |envelope: &&Arc<Envelope>| world.at(envelope.to).replica.is_some();
        out.extend(world.net.iter().filter(runs).map(|envelope| Step::Deliver(Arc::clone(envelope))));
        for ordinal in self.ordinals() {
            self.faults(world, ordinal, out);
            if let Some(replica) = &world.at(ordinal).replica {
                self.process_options(world, ordinal, replica, out);
            }
        }
        self.map_options(world, out);
    }

    fn faults(&self, world: &World, ordinal: Ordinal, out: &mut Vec<Step>) {
        let node = world.at(ordinal);
        let up = node.replica.is_some();
        if !up {
            out.push(Step::Restart(ordinal));
        }
        if world.power < self.power
            && (up || node.log != node.disk || !self.sync && node.lossless_since != node.me.incarnation)
        {
            out.push(Step::PowerLoss(ordinal));
        }
        if world.kills < self.kills && up {
            out.push(Step::Kill(ordinal));
        }
        if world.stops < self.stops && up {
            out.push(Step::Stop(ordinal));
        }
        if world.disks < self.disks {
            out.push(Step::DiskLoss(ordinal));
        }
        if self.late && world.reported[ordinal.0 as usize].member != node.me && up {
            out.push(Step::Observe(ordinal));
        }
        for holder in &node.granted {
            let process = world.at(holder.ordinal);
            let dead = process.me != *holder || process.replica.is_none();
            let over = dead || !process.held.contains(&(ordinal, node.me.store));
            let older_died = self.injects(EnvironmentBug::ProofByName) && process.me.incarnation.0 > 1;
            if over || older_died || self.injects(EnvironmentBug::ProofWithoutDeath) {
                out.push(Step::ExpireGranted(ordinal, *holder));
            }
        }
    }

    fn process_options(&self, world: &World, ordinal: Ordinal, replica: &Replica, out: &mut Vec<Step>) {
        let node = world.at(ordinal);
        for (index, entry) in world.maps.iter().enumerate() {
            let concerns = replica.primary_term().is_some() || entry.primary == ordinal;
            if concerns && replica.entry().is_none_or(|seen| seen.is_older_than(entry)) {
                out.push(Step::Learn(ordinal, index));
            }
        }
        if node.kept < node.promise {
            out.push(Step::Keep(ordinal));
        }
        if self.lazy && !self.sync {
            out.push(Step::Wrote(ordinal));
        }
        if self.lazy || node.log != node.disk {
            out.push(Step::Flush(ordinal, 0));
        }
        if self.lazy && node.log.len() > node.disk.len() + 1 {
            out.push(Step::Flush(ordinal, 1));
        }
        if world.snapshots < self.snapshots && replica.commit() > node.floor {
            out.push(Step::Snapshot(ordinal));
        }
        if self.leases {
            self.grant_options(world, ordinal, replica, out);
            let too_early = self.has(Bug::ReleaseBeforeStop) && replica.transfer_target().is_some();
            let granted = || world.nodes.iter().any(|other| other.granted.contains(&node.me));
            if (replica.primary_term().is_none() || too_early) && granted() {
                out.push(Step::Release(ordinal));
            }
        }
        if replica.primary_term().is_some() {
            self.primary_options(world, ordinal, replica, out);
        }
    }

    fn primary_options(&self, world: &World, me: Ordinal, replica: &Replica, out: &mut Vec<Step>) {
        let node = world.at(me);
        let twice = self.injects(EnvironmentBug::NoDedupe);
        for op in (0..self.ops).filter(|_| replica.admits_writes() && node.log.len() < self.ops as usize + 1) {
            let times = node.log.iter().filter(|record| record.1 == op).count();
            if times == 0 || twice && times == 1 {
                out.push(Step::Write(me, op));
            }
        }
        if self.has(Bug::TimeoutIsFailure) {
            out.push(Step::Resend(me));
        }
        let entry = replica.entry().expect("a primary has read an entry");
        let others = || self.ordinals().filter(|other| *other != me);
        for other in others() {
            let member = entry.in_sync(other).is_some();
            if member && world.suspicions < self.suspicions && entry.term.0 < self.terms {
                out.push(Step::Suspect(me, other));
            }
            if self.late || !member {
                out.push(Step::Trust(me, other));
            }
            if member && world.transfers < self.transfers && replica.serving_term().is_some() {
                out.push(Step::TransferLeadership(me, other));
            }
            if member && world.leavings < self.leavings && replica.leaving().is_empty() {
                out.push(Step::Leaving(me, [other].into()));
            }
            let new = replica.followers().any(|(ordinal, follower)| {
                ordinal == other && follower.member.is_some_and(|known| known != world.at(other).me)
            });
            if world.at(other).replica.is_some() && (new || world.reconnects < self.reconnects) {
                out.push(Step::Connect(me, other));
            }
        }
        if self.late && !replica.leaving().is_empty() {
            out.push(Step::Leaving(me, BTreeSet::new()));
        }
        if self.late && replica.transfer_target().is_some() {
            out.push(Step::TransferLeadership(me, me));
        }
        if self.leases && replica.serving_term().is_some() {
            self.lease_options(world, me, replica, out);
        }
    }

    /// A lease is granted to a process in any term, and also counts in its next term.
    fn grant_options(&self, world: &World, me: Ordinal, replica: &Replica, out: &mut Vec<Step>) {
        for other in self.ordinals() {
            let holder = world.at(other);
            if holder.held.iter().any(|held| held.0 == me) {
                out.push(Step::ExpireHeld(other, me));
            } else if holder.replica.is_some() && replica.may_grant_lease(holder.me) {
                out.push(Step::Grant(me, other));
            }
        }
    }

    fn lease_options(&self, world: &World, me: Ordinal, replica: &Replica, out: &mut Vec<Step>) {
        let node = world.at(me);
        if let Some(required) = replica.required_leases() {
            let leased = required.iter().all(|member| {
                let by_ordinal = self.injects(EnvironmentBug::LeaseByOrdinal);
                node.held.iter().any(|held| held.0 == member.ordinal && (by_ordinal || held.1 == member.store))
            });
            if leased || self.injects(EnvironmentBug::ReadWithoutLease) {
                out.push(Step::Read(me));
            }
        }
    }

    fn map_options(&self, world: &World, out: &mut Vec<Step>) {
        let entry = world.entry();
        let room = entry.term.0 < self.terms;
        for (expected, change) in &world.proposals {
            if room || matches!(change, Change::Activate) {
                out.push(Step::Apply(*expected, change.clone()));
            }
        }
        if world.learner_changes < self.learner_changes {
            self.learner_options(world, entry, out);
        }
        if !room {
            return;
        }
        for report in &world.reported {
            let ordinal = report.member.ordinal;
            let previous_isr = self.injects(EnvironmentBug::RollbackActivated)
                && world.previous_isr.iter().any(|old| old.ordinal == ordinal);
            let member = &report.member;
            let candidate = |known: &Member| (known.ordinal, known.store) == (member.ordinal, member.store);
            let careless = self.careless && entry.candidates().any(candidate);
            let eligible = self.is_eligible(entry, report)
                || careless
                || previous_isr
                || self.injects(EnvironmentBug::PromoteNonIsr);
            if eligible {
                self.promotions(entry, report, out);
            }
        }
    }

    fn learner_options(&self, world: &World, entry: &Entry, out: &mut Vec<Step>) {
        let short = entry.isr.len() < self.replicas;
        for other in self.ordinals() {
            let fresh = entry.in_sync(other).is_none() && !entry.learners.contains(&other);
            if short && fresh && world.at(other).replica.is_some() {
                out.push(Step::AssignLearners(vec![other]));
            }
        }
        if self.late && !entry.learners.is_empty() {
            out.push(Step::AssignLearners(Vec::new()));
        }
    }

    /// Returns the in-sync sets with which a process may be promoted.
    fn promotions(&self, entry: &Entry, report: &ProcessReport, out: &mut Vec<Step>) {
        let ordinal = report.member.ordinal;
        let candidates: BTreeSet<Ordinal> = entry.candidates().map(|member| member.ordinal).collect();
        if self.any_subset && candidates.contains(&ordinal) {
            let candidates: Vec<Ordinal> = candidates.into_iter().collect();
            for set in 1..1u32 << candidates.len() {
                let part = candidates.iter().enumerate().filter(|(index, _)| set & (1 << index) != 0);
                let part: Vec<Ordinal> = part.map(|(_, ordinal)| *ordinal).collect();
                if part.contains(&ordinal) {
                    out.push(Step::Promote(*report, part));
                }
            }
            return;
        }
        let same_process = entry.in_sync(ordinal) == Some(&report.member);
        if ordinal == entry.primary && same_process {
            return;
        }
        let base = if entry.in_sync(ordinal).is_some() { &entry.isr } else { &entry.prev };
        let stays = |other: &Ordinal| *other == ordinal || *other != entry.primary;
        let mut isr: Vec<Ordinal> = base.iter().map(|member| member.ordinal).filter(stays).collect();
        if !isr.contains(&ordinal) {
            isr = vec![ordinal];
        }
        out.push(Step::Promote(*report, isr));
    }
}
