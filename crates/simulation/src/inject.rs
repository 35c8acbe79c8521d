//! Faults that are injected one by one, and which of them a cluster can be asked to survive.

use crate::faults::Fault;
use crate::world::{Event, World};
use engram_cluster::{Change, Entry};
use engram_memory::{Incarnation, Member, Ordinal, PartitionId};
use engram_store::Durability;

/// Names of snapshots end so.
const SNAPSHOT_SUFFIX: &str = ".snap";

impl World {
    pub(crate) fn inject(&mut self) {
        if self.is_calm {
            return;
        }
        let wait_us = self.draw.within(10_000, self.weather.fault_every_us);
        self.at(wait_us, Event::Inject);
        let fault = self.draw.pick(&self.weather.faults);
        let node = self.draw.below(self.nodes.len() as u64) as usize;
        self.try_strike(fault, node);
    }

    /// Lets a fault happen, if it can and may.
    pub(crate) fn try_strike(&mut self, fault: Fault, node: usize) {
        if !self.is_calm && self.may_strike() && self.strike(fault, node) {
            self.trace.note(self.now_us, &[20, fault as u64, node as u64], || format!("{fault:?} at {node}"));
            self.count(fault);
        }
    }

    /// Mode async promises something for one fault at a time: the next one waits until the last has healed.
    fn may_strike(&self) -> bool {
        let names_all = |entry: &Entry| {
            let runs = |member: &Member| self.nodes[member.ordinal.0 as usize].process.as_ref().map(|it| it.member);
            entry.activated
                && entry.isr.len() == self.weather.copies as usize
                && entry.isr.iter().all(|member| runs(member) == Some(*member))
        };
        self.weather.durability != Durability::Async || self.authority.entries.iter().all(names_all)
    }

    /// Cuts what a node says to the map.
    pub(crate) fn mute(&mut self, node: usize) {
        let map_place = self.map_place();
        self.count(Fault::OneWayPartition);
        self.network.set_cut(node, map_place, true);
        let wait_us = self.draw.within(300_000, 4_000_000);
        self.at(wait_us, Event::Mend { from: node, to: map_place });
    }

    /// Cuts what the map and most others say to a node, and sometimes what it says.
    pub(crate) fn deafen(&mut self, node: usize) {
        let map_place = self.map_place();
        let lasts_us = self.draw.within(300_000, 3_000_000);
        self.count(Fault::OneWayPartition);
        for other in (0..=map_place).filter(|other| *other != node) {
            if other != map_place && self.draw.chance(300) {
                continue;
            }
            let both = other != map_place || self.draw.chance(500);
            for (from, to) in [(other, node), (node, other)].into_iter().take(1 + usize::from(both)) {
                self.network.set_cut(from, to, true);
                self.at(lasts_us, Event::Mend { from, to });
            }
        }
    }

    /// Plans a fault of somebody whom a new entry names.
    pub(crate) fn strike_changed(&mut self, change: &Change, next: &Entry) {
        if self.draw.chance(self.weather.strike_changed) {
            let all = || next.isr.iter().map(|member| member.ordinal).chain(next.learners.iter().copied());
            let named: Vec<Ordinal> = match change {
                // A newcomer on its way, and who had it come: without them nobody else has what they had.
                Change::Learn(learners) if !learners.is_empty() && self.draw.chance(700) => learners.clone(),
                Change::Add { primary, .. } if self.draw.chance(700) => vec![primary.ordinal],
                _ => all().collect(),
            };
            let (fault, victim) = (self.draw.pick(&self.weather.strikes), self.draw.pick(&named));
            let wait_us = self.draw.below(self.weather.strike_within_us);
            self.at(wait_us, Event::Strike(fault, victim.0 as usize));
        }
    }

    /// Lets a fault happen; false when it cannot, or must not.
    fn strike(&mut self, fault: Fault, node: usize) -> bool {
        let runs = self.nodes[node].process.is_some();
        match fault {
            Fault::PowerLoss => return self.lose_power(node),
            Fault::EmptyDisk => return self.replace_disk(node),
            Fault::Partition | Fault::OneWayPartition => return self.cut(fault, node),
            Fault::LinkBreak => {
                if self.draw.chance(250) {
                    self.break_beats(node);
                } else {
                    let other = self.other(node);
                    self.break_link(node, other);
                }
                return true;
            }
            Fault::ClockStep => {
                // Clocks that are more than an hour apart refuse sessions, which is not what is looked for here.
                let offset_ms = self.draw.below(3_600_000) as i64 - 1_800_000;
                let now_us = self.now_us;
                self.nodes[node].step_clock(offset_ms, now_us);
                return true;
            }
            Fault::HandOver => return self.hand_over(),
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
            Fault::PlannedStop => return self.ask_to_leave(node),
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
                self.nodes[node].misled = Some((Ordinal(other as u32), until_us));
            }
            _ => return false,
        }
        true
    }

    /// The stream of beats to the coordinator breaks, and is opened again soon.
    fn break_beats(&mut self, node: usize) {
        if let Some(member) = self.nodes[node].process.as_ref().map(|process| process.member) {
            let wait_us = self.delay_us();
            self.at(wait_us, Event::Closed { to: self.map_place(), member });
        }
    }

    fn other(&mut self, node: usize) -> usize {
        let count = self.nodes.len() as u64;
        (node + 1 + self.draw.below(count - 1) as usize) % count as usize
    }

    fn lose_power(&mut self, node: usize) -> bool {
        if self.weather.durability == Durability::Sync {
            // One building, one cable.
            let all = self.draw.chance(250);
            let now_us = self.now_us;
            for victim in (0..self.nodes.len()).filter(|other| all || *other == node) {
                let ran = self.nodes[victim].process.is_some();
                self.nodes[victim].lose_power(now_us);
                if ran {
                    self.was_ended(victim);
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
            self.was_ended(node);
        }
        true
    }

    fn replace_disk(&mut self, node: usize) -> bool {
        if !self.is_spare(node, false) {
            return false;
        }
        // A change of the map that is under way might make the disk the only one that counts, which no protocol survives.
        self.purge(|event| matches!(event, Event::Propose { .. }));
        let seed = self.draw.next();
        let ran = self.nodes[node].process.is_some();
        self.nodes[node].replace_disk(seed);
        self.nodes[node].vanished = ran && self.draw.chance(500);
        self.nodes[node].known = None;
        if ran {
            self.was_ended(node);
        }
        true
    }

    /// Flips bits where others hold all of it: of a snapshot beside a process that runs, or of any file after one that ended in
    /// order, and so sealed its log.
    fn flip_bits(&mut self, node: usize) -> bool {
        if !self.is_spare(node, false) {
            return false;
        }
        // A change of the map that is under way might make the disk the only one that counts.
        self.purge(|event| matches!(event, Event::Propose { .. }));
        if self.draw.chance(400) {
            return self.nodes[node].flip_bits(SNAPSHOT_SUFFIX, &mut self.draw);
        }
        let suffers = self.nodes[node].disk_suffers;
        self.stop(node, Fault::OrderlyStop);
        !suffers && self.nodes[node].flip_bits("", &mut self.draw)
    }

    /// Ends a process in order, and perhaps the machine's power behind it.
    pub(crate) fn stop(&mut self, node: usize, fault: Fault) {
        let now_us = self.now_us;
        self.nodes[node].tell_time(now_us);
        let Some(process) = self.nodes[node].take() else { return };
        let stopped = process.store.stop();
        if let Err(error) = &stopped
            && !self.nodes[node].disk_suffers
        {
            self.fail(format!("node {node} does not stop in order: {error}"));
        }
        self.nodes[node].kill();
        if fault == Fault::OrderlyPowerOff && (stopped.is_ok() || self.weather.durability == Durability::Sync) {
            self.nodes[node].lose_power(now_us);
            // It says that it lost nothing, and is right. A start that fails would take the word back.
            self.nodes[node].lost_power = false;
            self.nodes[node].disk.set_capacity(None);
        }
        self.was_ended(node);
    }

    fn cut(&mut self, fault: Fault, node: usize) -> bool {
        let map_place = self.map_place();
        let lasts_us = self.draw.within(50_000, 4_000_000);
        let others: Vec<usize> = match self.draw.below(4) {
            // From one other, from the map alone, from everybody.
            0 | 1 => vec![self.other(node)],
            2 => vec![map_place],
            _ => (0..=map_place).filter(|other| *other != node).collect(),
        };
        let outward = self.draw.chance(500);
        for other in others {
            for (from, to) in [(node, other), (other, node)] {
                if fault == Fault::Partition || (from == node) == outward {
                    self.network.set_cut(from, to, true);
                    self.at(lasts_us, Event::Mend { from, to });
                }
            }
        }
        true
    }

    fn hand_over(&mut self) -> bool {
        let partition = PartitionId(self.draw.below(u64::from(self.weather.partitions)) as u32);
        let entry = self.authority.entry(partition);
        let node = entry.primary.0 as usize;
        let members: Vec<Ordinal> = entry.isr.iter().map(|member| member.ordinal).collect();
        if members.len() < 2 {
            return false;
        }
        let to = self.draw.pick(&members);
        self.with(node, |store| {
            store.hand_over(partition, to);
            Ok(())
        });
        // The successor may never become able.
        self.at(2_000_000, Event::KeepPartition { node, partition });
        true
    }

    /// Whether every partition can do without what a node holds: without its disk, or without what it had not synced.
    fn is_spare(&self, node: usize, keeps_disk: bool) -> bool {
        (0..self.weather.partitions).map(PartitionId).all(|partition| {
            let entry = self.authority.entry(partition);
            let alone = entry.isr.iter().all(|member| member.ordinal.0 as usize == node);
            let has_all =
                |member: &Member| member.ordinal.0 as usize != node && self.holds_all(partition, entry, member);
            // The coordinator may drop any copy above the number wanted, which it takes to be as good as the others.
            let lacking = entry.isr.iter().filter(|member| !has_all(member)).count();
            let stays = entry.isr.is_empty() || lacking < entry.isr.len().min(self.weather.copies as usize);
            let was_there = entry.prev.is_empty() || entry.prev.iter().any(has_all);
            // Who is alone and says so has all of it on its disk.
            (keeps_disk && alone && entry.activated && entry.solo_safe) || (stays && was_there)
        })
    }

    /// Whether a member's disk still has all that was acknowledged.
    fn holds_all(&self, partition: PartitionId, entry: &Entry, member: &Member) -> bool {
        let node = &self.nodes[member.ordinal.0 as usize];
        if node.is_damaged(partition) {
            return false;
        }
        let keeps_all = self.weather.durability == Durability::Sync;
        let Some((known, lossless_since)) = node.known else { return false };
        let lossless_since = if node.lost_power { Incarnation(u64::MAX) } else { lossless_since };
        known.store == member.store && entry.holds_all(&known, lossless_since, keeps_all)
    }
}
