//! Faults that are injected one by one, within what the cluster must survive.

use crate::faults::Fault;
use crate::world::{Event, World};
use engram_cluster::{Change, Entry};
use engram_memory::{Incarnation, Member, Ordinal, PartitionId};
use engram_store::Durability;

/// Suffix of snapshot names.
const SNAPSHOT_SUFFIX: &str = ".snap";
/// Largest clock step: outlasts every session.
const FAR_STEP_MS: u64 = 40 * 24 * 60 * 60 * 1_000;
/// Largest clock step that sessions are not affected by.
pub(crate) const NEAR_STEP_MS: i64 = 30 * 60 * 1_000;

impl World {
    pub(crate) fn inject(&mut self) {
        if self.is_calm {
            return;
        }
        let wait_us = self.draw.within(10_000, self.plan.fault_every_us);
        self.at(wait_us, Event::Inject);
        let fault = self.draw.pick(&self.plan.faults);
        let node = self.draw.below(self.nodes.len() as u64) as usize;
        self.try_inject(fault, node);
    }

    /// Injects a fault, if possible and allowed.
    pub(crate) fn try_inject(&mut self, fault: Fault, node: usize) {
        if !self.is_calm && self.may_inject() && self.inject_at(fault, node) {
            self.trace.note(self.now_us, &[20, fault as u64, node as u64], || format!("{fault:?} at {node}"));
            self.count(fault);
        }
    }

    /// Mode async promises something for one fault at a time: the next one waits until the cluster has recovered.
    fn may_inject(&self) -> bool {
        let names_all = |entry: &Entry| {
            let runs =
                |member: &Member| self.nodes[member.ordinal.0 as usize].process.as_ref().map(|process| process.member);
            entry.activated
                && entry.isr.len() == self.plan.replicas as usize
                && entry.isr.iter().all(|member| runs(member) == Some(*member))
        };
        self.plan.durability != Durability::Async || self.map_store.entries.iter().all(names_all)
    }

    /// Cuts the direction from a node to the map.
    pub(crate) fn mute(&mut self, node: usize) {
        let map_index = self.map_index();
        self.count(Fault::OneWayPartition);
        self.network.set_cut(node, map_index, true);
        let wait_us = self.draw.within(300_000, 4_000_000);
        self.at(wait_us, Event::RestoreLink { from: node, to: map_index });
    }

    /// Cuts the directions from the map and most others to a node, and sometimes back.
    pub(crate) fn deafen(&mut self, node: usize) {
        let map_index = self.map_index();
        let lasts_us = self.draw.within(300_000, 3_000_000);
        self.count(Fault::OneWayPartition);
        for other in (0..=map_index).filter(|other| *other != node) {
            if other != map_index && self.draw.chance(300) {
                continue;
            }
            let both = other != map_index || self.draw.chance(500);
            for (from, to) in [(other, node), (node, other)].into_iter().take(1 + usize::from(both)) {
                self.network.set_cut(from, to, true);
                self.at(lasts_us, Event::RestoreLink { from, to });
            }
        }
    }

    /// Plans a fault of a node that a new entry names.
    pub(crate) fn strike_changed(&mut self, change: &Change, next: &Entry) {
        if self.draw.chance(self.plan.strike_changed) {
            let all = || next.isr.iter().map(|member| member.ordinal).chain(next.learners.iter().copied());
            let named: Vec<Ordinal> = match change {
                // A newcomer in progress, or its primary: without them no other replica has what they had.
                Change::Learn(learners) if !learners.is_empty() && self.draw.chance(700) => learners.clone(),
                Change::Add { primary, .. } if self.draw.chance(700) => vec![primary.ordinal],
                _ => all().collect(),
            };
            let (fault, victim) = (self.draw.pick(&self.plan.strikes), self.draw.pick(&named));
            let wait_us = self.draw.below(self.plan.strike_within_us);
            self.at(wait_us, Event::Strike(fault, victim.0 as usize));
        }
    }

    /// Injects a fault; false if it is impossible or not allowed.
    fn inject_at(&mut self, fault: Fault, node: usize) -> bool {
        let runs = self.nodes[node].process.is_some();
        match fault {
            Fault::PowerLoss => return self.lose_power(node),
            Fault::EmptyDisk => return self.replace_disk(node),
            Fault::Partition | Fault::OneWayPartition => return self.cut(fault, node),
            Fault::LinkBreak => {
                if self.draw.chance(250) {
                    self.break_heartbeats(node);
                } else {
                    let other = self.other(node);
                    self.break_link(node, other);
                }
                return true;
            }
            Fault::ClockStep => {
                let offset_ms = self.draw.below(2 * FAR_STEP_MS) as i64 - FAR_STEP_MS as i64;
                // One clock at a time is wrong by days: the others still agree.
                let mut others = self.nodes.iter().enumerate().filter(|(other, _)| *other != node);
                let offset_ms =
                    if others.any(|(_, other)| other.has_far_clock()) { offset_ms % NEAR_STEP_MS } else { offset_ms };
                let now_us = self.now_us;
                self.nodes[node].step_clock(offset_ms, now_us);
                return true;
            }
            Fault::LeadershipTransfer => return self.transfer_leadership(),
            Fault::DriverDeath => return self.replace_driver(),
            Fault::CoordinatorRestart => {
                let down_us = self.draw.within(10_000, 3_000_000);
                self.coordinator.down_until_us.get_or_insert(self.now_us + down_us);
                return true;
            }
            Fault::CoordinatorPause => {
                self.coordinator.paused_until_us = self.now_us + self.draw.within(100_000, 3_000_000);
                return true;
            }
            Fault::Drain => {
                let ordinal = Ordinal(node as u32);
                self.coordinator.draining.insert(ordinal);
                let wait_us = self.draw.within(500_000, 4_000_000);
                self.at(wait_us, Event::Undrain(ordinal));
                return true;
            }
            _ if !runs => return false,
            Fault::PlannedStop => return self.start_leaving(node),
            Fault::BitFlip => return self.flip_bits(node),
            Fault::Kill => self.end(node, "killed"),
            Fault::KillMidway => {
                let changes = self.draw.below(12);
                self.nodes[node].disk.stop_after(changes);
                self.nodes[node].disk_suffers = true;
                let wait_us = self.draw.below(30_000);
                self.at(wait_us, Event::End(node));
            }
            Fault::WriteError => {
                let changes = self.draw.below(30);
                self.nodes[node].disk.stop_after(changes);
                self.nodes[node].disk_suffers = true;
            }
            Fault::SyncFailure => {
                self.nodes[node].disk.fail_syncs(1);
                self.nodes[node].disk_suffers = true;
            }
            Fault::DiskFull => {
                let left = self.draw.below(40_000);
                let used = self.nodes[node].used_bytes();
                self.nodes[node].disk.set_capacity(Some(used + left));
                self.nodes[node].disk_suffers = true;
                let wait_us = self.draw.within(100_000, 2_000_000);
                self.at(wait_us, Event::Space(node));
            }
            Fault::OrderlyStop | Fault::OrderlyPowerOff => self.stop(node, fault),
            Fault::Pause => {
                let long_us = if self.draw.chance(500) { 300_000 } else { 4_000_000 };
                self.nodes[node].paused_until_us = self.now_us + self.draw.within(10_000, long_us);
            }
            Fault::FalseSuspicion => {
                let until_us = self.now_us + self.draw.within(50_000, 2_000_000);
                let other = self.other(node);
                self.nodes[node].false_suspicion = Some((Ordinal(other as u32), until_us));
            }
            _ => return false,
        }
        true
    }

    /// The heartbeat stream to the coordinator breaks, and is opened again soon.
    fn break_heartbeats(&mut self, node: usize) {
        if let Some(member) = self.nodes[node].process.as_ref().map(|process| process.member) {
            let wait_us = self.delay_us();
            self.at(wait_us, Event::Closed { to: self.map_index(), member });
        }
    }

    fn other(&mut self, node: usize) -> usize {
        let count = self.nodes.len() as u64;
        (node + 1 + self.draw.below(count - 1) as usize) % count as usize
    }

    fn lose_power(&mut self, node: usize) -> bool {
        if self.plan.durability == Durability::Sync {
            // A power loss of the whole site.
            let all = self.draw.chance(250);
            let now_us = self.now_us;
            for victim in (0..self.nodes.len()).filter(|other| all || *other == node) {
                let ran = self.nodes[victim].process.is_some();
                self.nodes[victim].lose_power(now_us);
                if ran {
                    self.process_ended(victim);
                }
            }
            return true;
        }
        if !self.is_spare(node, true) {
            return false;
        }
        self.purge(|event| matches!(event, Event::Propose { .. }));
        let (ran, now_us) = (self.nodes[node].process.is_some(), self.now_us);
        self.nodes[node].lose_power(now_us);
        if ran {
            self.process_ended(node);
        }
        true
    }

    fn replace_disk(&mut self, node: usize) -> bool {
        if !self.is_spare(node, false) {
            return false;
        }
        // A map change in flight might make this disk the only one that counts, which no protocol survives.
        self.purge(|event| matches!(event, Event::Propose { .. }));
        let seed = self.draw.next();
        let ran = self.nodes[node].process.is_some();
        self.nodes[node].replace_disk(seed);
        self.nodes[node].vanished = ran && self.draw.chance(500);
        self.nodes[node].known = None;
        if ran {
            self.process_ended(node);
        }
        true
    }

    /// Flips bits where other replicas hold everything: of a snapshot of a running process, or of any file after an
    /// orderly stop, which sealed the log.
    fn flip_bits(&mut self, node: usize) -> bool {
        if !self.is_spare(node, false) {
            return false;
        }
        // A map change in flight might make this disk the only one that counts.
        self.purge(|event| matches!(event, Event::Propose { .. }));
        if self.draw.chance(400) {
            return self.nodes[node].flip_bits(SNAPSHOT_SUFFIX, &mut self.draw);
        }
        let suffers = self.nodes[node].disk_suffers;
        self.stop(node, Fault::OrderlyStop);
        !suffers && self.nodes[node].flip_bits("", &mut self.draw)
    }

    /// Stops a process in order, and perhaps cuts the power of its machine.
    pub(crate) fn stop(&mut self, node: usize, fault: Fault) {
        let now_us = self.now_us;
        self.nodes[node].set_time(now_us);
        let Some(process) = self.nodes[node].take() else { return };
        let stopped = process.store.stop();
        if let Err(error) = &stopped
            && !self.nodes[node].disk_suffers
        {
            self.fail(format!("node {node} failed to stop in order: {error}"));
        }
        self.nodes[node].kill();
        if fault == Fault::OrderlyPowerOff && (stopped.is_ok() || self.plan.durability == Durability::Sync) {
            self.nodes[node].lose_power(now_us);
            // It truthfully reports no loss. A failed start would revoke that.
            self.nodes[node].lost_power = false;
            self.nodes[node].disk.set_capacity(None);
        }
        self.process_ended(node);
    }

    fn cut(&mut self, fault: Fault, node: usize) -> bool {
        let map_index = self.map_index();
        let lasts_us = self.draw.within(50_000, 4_000_000);
        let others: Vec<usize> = match self.draw.below(4) {
            // From one other, from the map only, from everything.
            0 | 1 => vec![self.other(node)],
            2 => vec![map_index],
            _ => (0..=map_index).filter(|other| *other != node).collect(),
        };
        let outward = self.draw.chance(500);
        for other in others {
            for (from, to) in [(node, other), (other, node)] {
                if fault == Fault::Partition || (from == node) == outward {
                    self.network.set_cut(from, to, true);
                    self.at(lasts_us, Event::RestoreLink { from, to });
                }
            }
        }
        true
    }

    fn transfer_leadership(&mut self) -> bool {
        let partition = PartitionId(self.draw.below(u64::from(self.plan.partitions)) as u32);
        let entry = self.map_store.entry(partition);
        let node = entry.primary.0 as usize;
        let members: Vec<Ordinal> = entry.isr.iter().map(|member| member.ordinal).collect();
        if members.len() < 2 {
            return false;
        }
        let to = self.draw.pick(&members);
        self.with(node, |store| {
            store.transfer_leadership(partition, to);
            Ok(())
        });
        // The successor may never become eligible.
        self.at(2_000_000, Event::KeepPartition { node, partition });
        true
    }

    /// Whether every partition survives the loss of a node's disk, or of what it had not synced.
    fn is_spare(&self, node: usize, keeps_disk: bool) -> bool {
        (0..self.plan.partitions).map(PartitionId).all(|partition| {
            let entry = self.map_store.entry(partition);
            let alone = entry.isr.iter().all(|member| member.ordinal.0 as usize == node);
            let has_all =
                |member: &Member| member.ordinal.0 as usize != node && self.holds_all(partition, entry, member);
            // The coordinator may remove any surplus replica, assuming that all are equal.
            let incomplete = entry.isr.iter().filter(|member| !has_all(member)).count();
            let stays = entry.isr.is_empty() || incomplete < entry.isr.len().min(self.plan.replicas as usize);
            let was_there = entry.prev.is_empty() || entry.prev.iter().any(has_all);
            // A single replica with `solo_safe` has everything on disk.
            (keeps_disk && alone && entry.activated && entry.solo_safe) || (stays && was_there)
        })
    }

    /// Whether a member's disk still has everything acknowledged.
    fn holds_all(&self, partition: PartitionId, entry: &Entry, member: &Member) -> bool {
        let node = &self.nodes[member.ordinal.0 as usize];
        if node.is_damaged(partition) {
            return false;
        }
        let keeps_all = self.plan.durability == Durability::Sync;
        let Some((known, lossless_since)) = node.known else { return false };
        let lossless_since = if node.lost_power { Incarnation(u64::MAX) } else { lossless_since };
        known.store == member.store && entry.holds_all(&known, lossless_since, keeps_all)
    }
}
