//! A process that is stopped on purpose: it says that it leaves, hands over what it leads, lets the others go on without its copies,
//! and ends in order. As a worker drains itself, in the proportions of a run; what it finds of the map is never late.

use crate::faults::Fault;
use crate::world::World;
use engram_cluster::Entry;
use engram_memory::{Ordinal, PartitionId};
use std::collections::BTreeSet;

impl World {
    /// A process is asked to leave, if it runs and does not do so already.
    pub(crate) fn ask_to_leave(&mut self, node: usize) -> bool {
        // Some have too little time.
        let until_us = self.now_us + self.draw.within(20_000, 5_000_000);
        let Some(process) = &mut self.nodes[node].process else { return false };
        if process.leaves_until_us.is_some() {
            return false;
        }
        process.leaves_until_us = Some(until_us);
        // It shrinks nothing any more.
        self.tell_leavers(node, BTreeSet::new());
        true
    }

    pub(crate) fn is_leaving(&self, node: usize) -> bool {
        self.nodes[node].process.as_ref().is_some_and(|process| process.leaves_until_us.is_some())
    }

    /// Does what a process that leaves has to do, and ends it when that is done, or its time is over.
    pub(crate) fn leave(&mut self, node: usize) {
        let Some(process) = &self.nodes[node].process else { return };
        let Some(until_us) = process.leaves_until_us else { return };
        let here = process.member.ordinal;
        let stays = |ordinal: Ordinal| {
            let other = &self.nodes[ordinal.0 as usize].process;
            ordinal != here && other.as_ref().is_some_and(|other| other.leaves_until_us.is_none())
        };
        let successor = |entry: &Entry| entry.isr.iter().map(|member| member.ordinal).find(|ordinal| stays(*ordinal));
        let entries = || (0..).map(PartitionId).zip(&self.authority.entries);
        let led = entries().filter(|(_, entry)| entry.primary == here);
        let led: Vec<_> = led.map(|(partition, entry)| (partition, successor(entry))).collect();
        let is_waited_for = entries().any(|(_, entry)| {
            let spared = entry.isr.len() > self.weather.min_in_sync && stays(entry.primary);
            entry.in_sync(here).is_some() && entry.primary != here && spared
        });
        let is_done = !is_waited_for && led.iter().all(|(_, successor)| successor.is_none());
        if is_done || until_us <= self.now_us {
            self.trace.note(self.now_us, &[22, node as u64, u64::from(is_done)], || {
                format!("{node} has left{}", if is_done { "" } else { ", late" })
            });
            self.stop(node, Fault::PlannedStop);
            return;
        }
        self.with(node, |store| {
            for (partition, successor) in led {
                if let Some(to) = successor {
                    store.hand_over(partition, to);
                }
            }
            Ok(())
        });
    }

    /// What a coordinator says of who leaves reaches a process.
    pub(crate) fn tell_leavers(&mut self, node: usize, leaving: BTreeSet<Ordinal>) {
        let leavers: BTreeSet<Ordinal> = if self.is_leaving(node) {
            BTreeSet::new()
        } else {
            let leads = |ordinal: &Ordinal| self.authority.entries.iter().any(|entry| entry.primary == *ordinal);
            leaving.into_iter().filter(|ordinal| !leads(ordinal)).collect()
        };
        let Some(process) = &mut self.nodes[node].process else { return };
        if process.senses.leavers != leavers {
            process.senses.leavers.clone_from(&leavers);
            self.with(node, |store| {
                store.leaving(&leavers);
                Ok(())
            });
        }
    }
}
