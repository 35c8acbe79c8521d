//! What may happen in a state.

use crate::bounds::Bounds;
use crate::state::{Envelope, Op, Statement, World};
use crate::wrong::Wrong;
use engram_cluster::injected::Bug;
use engram_cluster::{Change, Entry, ExpectedEntry, Replica};
use engram_memory::{Member, Ordinal};
use std::collections::BTreeSet;
use std::sync::Arc;

/// Something that happens.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Step {
    /// A message arrives, perhaps again.
    Deliver(Arc<Envelope>),
    /// A process reads the map, or an older one.
    Learn(Ordinal, usize),
    /// A client's operation reaches a process.
    Write(Ordinal, Op),
    /// A promise is durable.
    Keep(Ordinal),
    /// What was logged is in the page cache.
    Wrote(Ordinal),
    /// What was logged is durable, but for the last records.
    Flush(Ordinal, usize),
    /// A snapshot of what is committed takes the place of the log.
    Snapshot(Ordinal),
    /// `.0` has a new stream to the process at `.1`.
    Connect(Ordinal, Ordinal),
    /// `.0` takes the process at `.1` for dead, whether it is or not.
    Suspect(Ordinal, Ordinal),
    Trust(Ordinal, Ordinal),
    /// `.0` hears who is about to be stopped, and who no longer is.
    Leaving(Ordinal, BTreeSet<Ordinal>),
    Remind(Ordinal),
    /// A proposal is applied, its proposer may be dead.
    Apply(ExpectedEntry, Change),
    /// A coordinator decides who shall serve.
    Promote(Statement, Vec<Ordinal>),
    /// A coordinator names who shall hold copies.
    Hint(Vec<Ordinal>),
    /// Coordinators hear of a process.
    Hear(Ordinal),
    /// `.0` shall hand over to `.1`.
    HandOver(Ordinal, Ordinal),
    /// Who leads no more gives its leases back.
    Release(Ordinal),
    /// `.0` grants a read lease to `.1`.
    Grant(Ordinal, Ordinal),
    /// The lease that `.0` holds from `.1` ends for `.0`.
    ExpireHeld(Ordinal, Ordinal),
    /// The lease that `.0` granted ends for `.0`.
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
        if self.late && world.stated[ordinal.0 as usize].member != node.me && up {
            out.push(Step::Hear(ordinal));
        }
        for holder in &node.granted {
            let process = world.at(holder.ordinal);
            let dead = process.me != *holder || process.replica.is_none();
            let over = dead || !process.held.contains(&(ordinal, node.me.store));
            let older_died = self.plants(Wrong::ProofByName) && process.me.incarnation.0 > 1;
            if over || older_died || self.plants(Wrong::ProofWithoutDeath) {
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
        let twice = self.plants(Wrong::NoDedupe);
        for op in (0..self.ops).filter(|_| replica.admits_writes() && node.log.len() < self.ops as usize + 1) {
            let times = node.log.iter().filter(|record| record.1 == op).count();
            if times == 0 || twice && times == 1 {
                out.push(Step::Write(me, op));
            }
        }
        if self.has(Bug::TimeoutIsFailure) {
            out.push(Step::Remind(me));
        }
        let entry = replica.entry().expect("who leads has read an entry");
        let others = || self.ordinals().filter(|other| *other != me);
        for other in others() {
            let member = entry.in_sync(other).is_some();
            if member && world.doubts < self.doubts && entry.term.0 < self.terms {
                out.push(Step::Suspect(me, other));
            }
            if self.late || !member {
                out.push(Step::Trust(me, other));
            }
            if member && world.drains < self.drains && replica.serving_term().is_some() {
                out.push(Step::HandOver(me, other));
            }
            if member && world.departures < self.departures && replica.leaving().is_empty() {
                out.push(Step::Leaving(me, [other].into()));
            }
            let new = replica.followers().any(|(place, follower)| {
                place == other && follower.member.is_some_and(|known| known != world.at(other).me)
            });
            if world.at(other).replica.is_some() && (new || world.reconnects < self.reconnects) {
                out.push(Step::Connect(me, other));
            }
        }
        if self.late && !replica.leaving().is_empty() {
            out.push(Step::Leaving(me, BTreeSet::new()));
        }
        if self.late && replica.transfer_target().is_some() {
            out.push(Step::HandOver(me, me));
        }
        if self.leases && replica.serving_term().is_some() {
            self.lease_options(world, me, replica, out);
        }
    }

    /// A lease is granted to a process, whichever term it leads, and used for the next term too.
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
                let by_place = self.plants(Wrong::LeaseByOrdinal);
                node.held.iter().any(|held| held.0 == member.ordinal && (by_place || held.1 == member.store))
            });
            if leased || self.plants(Wrong::ReadWithoutLease) {
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
        if world.hints < self.hints {
            self.hint_options(world, entry, out);
        }
        if !room {
            return;
        }
        for statement in &world.stated {
            let place = statement.member.ordinal;
            let ousted = self.plants(Wrong::RollbackActivated) && world.ousted.iter().any(|old| old.ordinal == place);
            let member = &statement.member;
            let candidate = |known: &Member| (known.ordinal, known.store) == (member.ordinal, member.store);
            let careless = self.careless && entry.candidates().any(candidate);
            let eligible =
                self.is_eligible(entry, statement) || careless || ousted || self.plants(Wrong::PromoteNonIsr);
            if eligible {
                self.promotions(entry, statement, out);
            }
        }
    }

    fn hint_options(&self, world: &World, entry: &Entry, out: &mut Vec<Step>) {
        let short = entry.isr.len() < self.replicas;
        for other in self.ordinals() {
            let fresh = entry.in_sync(other).is_none() && !entry.learners.contains(&other);
            if short && fresh && world.at(other).replica.is_some() {
                out.push(Step::Hint(vec![other]));
            }
        }
        if self.late && !entry.learners.is_empty() {
            out.push(Step::Hint(Vec::new()));
        }
    }

    /// The in-sync sets under which a process may be promoted.
    fn promotions(&self, entry: &Entry, statement: &Statement, out: &mut Vec<Step>) {
        let place = statement.member.ordinal;
        let candidates: BTreeSet<Ordinal> = entry.candidates().map(|member| member.ordinal).collect();
        if self.any_subset && candidates.contains(&place) {
            let candidates: Vec<Ordinal> = candidates.into_iter().collect();
            for set in 1..1u32 << candidates.len() {
                let part = candidates.iter().enumerate().filter(|(index, _)| set & (1 << index) != 0);
                let part: Vec<Ordinal> = part.map(|(_, ordinal)| *ordinal).collect();
                if part.contains(&place) {
                    out.push(Step::Promote(*statement, part));
                }
            }
            return;
        }
        let same_process = entry.in_sync(place) == Some(&statement.member);
        if place == entry.primary && same_process {
            return;
        }
        let base = if entry.in_sync(place).is_some() { &entry.isr } else { &entry.prev };
        let stays = |ordinal: &Ordinal| *ordinal == place || *ordinal != entry.primary;
        let mut isr: Vec<Ordinal> = base.iter().map(|member| member.ordinal).filter(stays).collect();
        if !isr.contains(&place) {
            isr = vec![place];
        }
        out.push(Step::Promote(*statement, isr));
    }
}
