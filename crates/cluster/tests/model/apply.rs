//! The effects of a step.

use crate::bounds::Bounds;
use crate::drive::{Input, append};
use crate::environment_bug::EnvironmentBug;
use crate::state::{Body, Harm, ProcessReport, World, end_of, reached};
use crate::step::Step;
use engram_cluster::injected::Bug;
use engram_cluster::replica::{Event, Message};
use engram_cluster::{Change, Entry, ExpectedEntry, Replica};
use engram_memory::{Incarnation, Lsn, Member, Ordinal, Term};
use std::collections::VecDeque;
use std::sync::Arc;

/// Number of old entries that may still be read.
const OLD_MAPS: usize = 3;

impl Bounds {
    /// Applies a step; an impossible one has no effect.
    pub(crate) fn apply_step(&self, world: &mut World, step: &Step) {
        match step {
            Step::Deliver(envelope) => self.deliver(world, envelope.from, envelope.to, &envelope.body),
            Step::Learn(me, index) => {
                let entry = Arc::clone(&world.maps[*index]);
                self.feed(world, *me, Input::Entry(entry), None);
                self.note_keeping(world, *me);
            }
            Step::Write(me, op) => self.write(world, *me, *op),
            Step::Keep(me) => {
                let node = world.node(*me);
                node.kept = node.promise;
                let term = node.kept;
                self.event(world, *me, Event::Promised(term));
            }
            Step::Wrote(me) => self.report(world, *me, 0, Event::Written),
            Step::Flush(me, left) => {
                let node = world.node(*me);
                let durable = node.log.len().saturating_sub(*left);
                node.disk = node.log[..durable].to_vec();
                self.report(world, *me, *left, Event::Written);
                self.report(world, *me, *left, Event::Synced);
            }
            Step::Snapshot(me) => {
                world.snapshots += 1;
                let node = world.node(*me);
                node.disk.clone_from(&node.log);
                node.floor = node.replica.as_ref().map_or(node.floor, Replica::commit);
            }
            Step::Connect(me, other) => {
                world.reconnects = (world.reconnects + 1).min(self.reconnects);
                let member = world.at(*other).me;
                self.event(world, *me, Event::Connected(member));
            }
            Step::Suspect(me, other) => {
                world.suspicions += 1;
                self.event(world, *me, Event::Suspected(*other));
            }
            Step::Trust(me, other) => self.event(world, *me, Event::Trusted(*other)),
            Step::Leaving(me, leavers) => {
                world.leavings += u8::from(!leavers.is_empty());
                self.event(world, *me, Event::Leaving(leavers.clone()));
            }
            Step::Resend(me) => self.event(world, *me, Event::Resend),
            Step::Apply(expected, change) => self.apply(world, *expected, change),
            Step::Promote(report, isr) => self.promote(world, report, isr),
            Step::AssignLearners(learners) => {
                world.learner_changes += 1;
                if let Ok(next) = world.entry().apply(&Change::Learn(learners.clone())) {
                    self.replace(world, next);
                }
            }
            Step::Observe(ordinal) => world.reported[ordinal.0 as usize] = report_of(world, *ordinal),
            Step::TransferLeadership(me, to) => {
                world.transfers += u8::from(me != to);
                self.event(world, *me, Event::TransferLeadership(*to));
            }
            Step::Release(me) => self.release(world, *me),
            Step::Grant(me, holder) => {
                let member = world.at(*holder).me;
                let lease = (*me, world.at(*me).me.store);
                world.node(*holder).held.insert(lease);
                let granter = world.node(*me);
                if self.injects(EnvironmentBug::ForgetFirstGrant) {
                    granter.granted.clear();
                }
                granter.granted.insert(member);
                granter.replica.iter_mut().for_each(Replica::note_lease_granted);
            }
            Step::ExpireHeld(me, granter) => {
                world.node(*me).held.retain(|held| held.0 != *granter);
            }
            Step::ExpireGranted(me, holder) => self.end_grant(world, *me, *holder),
            Step::Read(me) => {
                // Every writer may have its response by now; a read must see all writes.
                let commit = world.at(*me).replica.as_ref().map_or(Lsn(0), Replica::commit);
                if commit < end_of(&world.committed) {
                    world.harm = Some(Harm::StaleRead);
                }
            }
            Step::PowerLoss(ordinal) => self.cut_power(world, *ordinal),
            Step::Kill(ordinal) => {
                world.kills += 1;
                world.node(*ordinal).die();
            }
            Step::Stop(ordinal) => {
                world.stops += 1;
                let node = world.node(*ordinal);
                node.kept = node.promise;
                if !self.injects(EnvironmentBug::MarkBeforeFsync) {
                    node.disk.clone_from(&node.log);
                }
                node.clean = true;
                node.die();
            }
            Step::DiskLoss(ordinal) => {
                // The worst case: processes on the new disk count from the same incarnation as on the old one.
                world.disks += 1;
                let node = world.node(*ordinal);
                let mut fresh = crate::state::Node::new(ordinal.0);
                fresh.me.store.0 = node.me.store.0 + 1;
                *node = fresh;
            }
            Step::Restart(ordinal) => {
                let node = world.node(*ordinal);
                node.clean &= self.injects(EnvironmentBug::MarkNotErased);
                self.start_process(world, *ordinal);
                if !self.late {
                    world.reported[ordinal.0 as usize] = report_of(world, *ordinal);
                }
            }
        }
    }

    fn event(&self, world: &mut World, me: Ordinal, event: Event) {
        self.feed(world, me, Input::Event(event), None);
    }

    /// The log reports what it has, except for the last records.
    fn report(&self, world: &mut World, me: Ordinal, left: usize, how: fn(Lsn, Term) -> Event) {
        let log = &world.at(me).log;
        let log = &log[..log.len().saturating_sub(left)];
        if let Some((term, _)) = log.last() {
            let event = how(end_of(log), *term);
            self.event(world, me, event);
        }
    }

    fn deliver(&self, world: &mut World, from: Member, to: Ordinal, body: &Body) {
        match body {
            Body::Replica(message, records) => {
                let received = match message {
                    Message::Append { after, .. } => Some((*after, records.as_slice())),
                    _ => None,
                };
                self.feed(world, to, Input::Event(Event::Received(from, message.clone())), received);
            }
            Body::Snapshot(term, records) => {
                let lsn = end_of(records);
                let accepts = world.at(to).replica.as_ref().is_some_and(|replica| replica.accepts_snapshot(*term, lsn));
                if let Some((last, _)) = records.last().filter(|_| accepts) {
                    let node = world.node(to);
                    node.log.clone_from(records);
                    node.disk.clone_from(records);
                    node.floor = lsn;
                    world.reached |= reached::SNAPSHOT;
                    self.event(world, to, Event::Installed(lsn, *last));
                }
            }
        }
    }

    fn write(&self, world: &mut World, me: Ordinal, op: u8) {
        let node = world.node(me);
        let Some(term) = node.leads() else { return };
        let before = end_of(&node.log);
        node.log.push((term, op));
        self.event(world, me, Event::Appended(Lsn(before.0 + 1)));
        let mut reports = VecDeque::new();
        self.logged(world, me, &mut reports);
        reports.into_iter().for_each(|report| self.feed(world, me, report, None));
        for to in world.at(me).streams.clone() {
            append(world, me, to, before);
        }
    }

    fn cut_power(&self, world: &mut World, ordinal: Ordinal) {
        world.power += 1;
        let node = world.node(ordinal);
        node.die();
        node.log.clone_from(&node.disk);
        node.promise = if self.injects(EnvironmentBug::ForgetPromise) { Term(0) } else { node.kept };
        node.kept = node.promise;
        if !node.clean && !self.injects(EnvironmentBug::BootIdIgnored) {
            node.lossless_since = node.me.incarnation;
        }
        if self.injects(EnvironmentBug::ForgetLeaseGrant) {
            node.granted.clear();
        }
    }

    fn release(&self, world: &mut World, me: Ordinal) {
        let member = world.at(me).me;
        if !self.has(Bug::ReleaseBeforeStop) {
            world.node(me).held.clear();
        }
        for other in self.ordinals() {
            self.end_grant(world, other, member);
        }
    }

    fn end_grant(&self, world: &mut World, me: Ordinal, holder: Member) {
        let granter = world.node(me);
        if granter.granted.remove(&holder) && granter.granted.is_empty() {
            self.event(world, me, Event::GrantExpired);
        }
    }

    fn apply(&self, world: &mut World, expected: ExpectedEntry, change: &Change) {
        let old = Arc::clone(world.entry());
        if expected != old.expectation() {
            return;
        }
        let Ok(mut next) = old.apply(change) else { return };
        match change {
            Change::Activate => {
                world.previous_isr.clone_from(&old.prev);
                if self.injects(EnvironmentBug::StalePrev) {
                    next.prev.clone_from(&old.prev);
                }
            }
            Change::Add { newcomer, .. } => {
                world.reached |= reached::ADDED;
                if self.injects(EnvironmentBug::AddWithoutIncarnation) {
                    let now = world.at(newcomer.ordinal).me;
                    next.isr.iter_mut().filter(|member| member.ordinal == now.ordinal).for_each(|member| *member = now);
                }
            }
            Change::Promote { .. } => world.reached |= how_promoted(&old, change),
            Change::Remove { .. } | Change::Learn(_) => {}
        }
        self.replace(world, next);
    }

    fn promote(&self, world: &mut World, report: &ProcessReport, isr: &[Ordinal]) {
        let old = Arc::clone(world.entry());
        let change = Change::Promote { primary: report.member, isr: isr.to_vec() };
        if self.late {
            world.proposals.insert((old.expectation(), change));
            return;
        }
        match old.apply(&change) {
            Ok(mut next) => {
                if self.injects(EnvironmentBug::StalePrev) && !old.prev.is_empty() {
                    next.prev.clone_from(&old.prev);
                }
                if self.injects(EnvironmentBug::PromoteRelabels) {
                    let others = next.isr.iter_mut().filter(|member| member.ordinal != next.primary);
                    others.for_each(|member| *member = old.in_sync(member.ordinal).copied().unwrap_or(*member));
                }
                world.reached |= how_promoted(&old, &change);
                self.replace(world, next);
            }
            Err(_) if self.environment_bug.is_some() => self.replace(world, forced(&old, report.member)),
            Err(_) => {}
        }
    }

    fn replace(&self, world: &mut World, next: Entry) {
        world.maps.push(Arc::new(next));
        let old = world.maps.len() - 1;
        world.maps.drain(..old.saturating_sub(if self.late { OLD_MAPS } else { 0 }));
    }

    /// Notes that a restarted process stayed eligible.
    fn note_keeping(&self, world: &mut World, me: Ordinal) {
        let node = world.at(me);
        let restarted = node.me.incarnation > Incarnation(1) && node.lossless_since < node.me.incarnation;
        if !self.sync && restarted && node.leads() == Some(world.entry().term) && !world.entry().solo_safe {
            world.reached |= reached::STAYED_ELIGIBLE;
        }
    }

    /// Drops messages and proposals without effect: fewer states, the same behavior.
    pub(crate) fn forget(&self, world: &mut World) {
        let may_reset =
            world.disks < self.disks || self.injects(EnvironmentBug::ForgetPromise) || self.has(Bug::AcceptOldTerm);
        let resumes = self.has(Bug::RestartSameTerm);
        let nodes = &world.nodes;
        world.net.retain(|envelope| {
            let to = &nodes[envelope.to.0 as usize];
            let term = envelope.body.term();
            if envelope.body.is_from_primary() {
                may_reset || term >= to.promise
            } else {
                to.leads() == Some(term) || resumes && term >= to.promise
            }
        });
        let now = Arc::clone(world.entry());
        world.proposals.retain(|(expected, _)| expected.term == now.term && *expected >= now.expectation());
    }
}

fn report_of(world: &World, ordinal: Ordinal) -> ProcessReport {
    let node = world.at(ordinal);
    ProcessReport { member: node.me, lossless_since: node.lossless_since }
}

fn how_promoted(old: &Entry, change: &Change) -> u8 {
    let Change::Promote { primary, isr } = change else { return 0 };
    let transferred = primary.ordinal != old.primary && isr.contains(&old.primary);
    match (old.in_sync(primary.ordinal).is_some(), transferred) {
        (false, _) => reached::ROLLED_BACK,
        (true, true) => reached::TRANSFERRED,
        (true, false) => reached::PROMOTED,
    }
}

/// Returns the entry that a coordinator without rules would write.
fn forced(old: &Entry, primary: Member) -> Entry {
    Entry {
        term: Term(old.term.0 + 1),
        primary: primary.ordinal,
        isr: vec![primary],
        solo_safe: false,
        activated: false,
        prev: if old.activated { old.isr.clone() } else { old.prev.clone() },
        learners: Vec::new(),
    }
}
