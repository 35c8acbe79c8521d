//! A planned stop: the process announces that it leaves, transfers its leadership, lets the others continue without its
//! replicas, and stops in order. Like the drain of a worker, in the time scale of a run; its view of the map is never
//! late.

use crate::faults::Fault;
use crate::world::World;
use engram_cluster::Entry;
use engram_memory::{Ordinal, PartitionId};
use std::collections::BTreeSet;

impl World {
    /// Starts the drain of a process, if it runs and is not draining.
    pub(crate) fn start_leaving(&mut self, node: usize) -> bool {
        // Some have too little time.
        let until_us = self.now_us + self.draw.within(20_000, 5_000_000);
        let Some(process) = &mut self.nodes[node].process else { return false };
        if process.leaves_until_us.is_some() {
            return false;
        }
        process.leaves_until_us = Some(until_us);
        // It removes no more members.
        self.set_leaving(node, BTreeSet::new());
        true
    }

    pub(crate) fn is_leaving(&self, node: usize) -> bool {
        self.nodes[node].process.as_ref().is_some_and(|process| process.leaves_until_us.is_some())
    }

    /// Continues the drain of a process, and stops it when done or at its deadline.
    pub(crate) fn leave(&mut self, node: usize) {
        let Some(process) = &self.nodes[node].process else { return };
        let Some(until_us) = process.leaves_until_us else { return };
        let here = process.member.ordinal;
        let stays = |ordinal: Ordinal| {
            let other = &self.nodes[ordinal.0 as usize].process;
            ordinal != here && other.as_ref().is_some_and(|other| other.leaves_until_us.is_none())
        };
        let successor = |entry: &Entry| entry.isr.iter().map(|member| member.ordinal).find(|ordinal| stays(*ordinal));
        let entries = || (0..).map(PartitionId).zip(&self.map_store.entries);
        let own_partitions = entries().filter(|(_, entry)| entry.primary == here);
        let own_partitions: Vec<_> = own_partitions.map(|(partition, entry)| (partition, successor(entry))).collect();
        let is_required = entries().any(|(_, entry)| {
            let spared = entry.isr.len() > self.plan.min_in_sync && stays(entry.primary);
            entry.in_sync(here).is_some() && entry.primary != here && spared
        });
        let is_done = !is_required && own_partitions.iter().all(|(_, successor)| successor.is_none());
        if is_done || until_us <= self.now_us {
            self.trace.note(self.now_us, &[22, node as u64, u64::from(is_done)], || {
                format!("{node} has left{}", if is_done { "" } else { ", late" })
            });
            self.stop(node, Fault::PlannedStop);
            return;
        }
        self.with(node, |store| {
            for (partition, successor) in own_partitions {
                if let Some(to) = successor {
                    store.transfer_leadership(partition, to);
                }
            }
            Ok(())
        });
    }

    /// Delivers the coordinator's list of leaving workers to a process.
    pub(crate) fn set_leaving(&mut self, node: usize, leaving: BTreeSet<Ordinal>) {
        let leaving: BTreeSet<Ordinal> = if self.is_leaving(node) {
            BTreeSet::new()
        } else {
            let leads = |ordinal: &Ordinal| self.map_store.entries.iter().any(|entry| entry.primary == *ordinal);
            leaving.into_iter().filter(|ordinal| !leads(ordinal)).collect()
        };
        let Some(process) = &mut self.nodes[node].process else { return };
        if process.liveness.leaving != leaving {
            process.liveness.leaving.clone_from(&leaving);
            self.with(node, |store| {
                store.set_leaving(&leaving);
                Ok(())
            });
        }
    }
}
