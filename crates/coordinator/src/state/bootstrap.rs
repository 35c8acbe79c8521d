//! The first map of a cluster that begins from a snapshot: each partition is led by who has loaded it, alone at first.
//!
//! Who loads what follows from the number of workers. All of them must have said that they are done, and for the same number: then the
//! term of the map is above all of the snapshot, and what the workers have loaded is what a primary of a term before would have left.
//! Copies are made from them as from any lone primary.

use super::{Heard, State};
use crate::Options;
use engram_cluster::{Entry, PartitionMap, Plan, loaders};
use engram_memory::{Ordinal, Term};
use engram_proto::v1;
use std::collections::BTreeSet;

/// How far the workers of a cluster are that begins from a snapshot.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Bootstrapping {
    /// Workers that have loaded what they shall lead, and all that are waited for, as far as that is known.
    pub loaded: u32,
    /// All of them.
    pub workers: u32,
    /// Bytes that were loaded by those that are not done.
    pub done_bytes: u64,
    /// Bytes that they load in all.
    pub total_bytes: u64,
    /// Why a worker cannot go on: its number, the code of the error, and the sentence.
    pub problem: Option<(Ordinal, String, String)>,
}

impl std::fmt::Display for Bootstrapping {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { loaded, workers, done_bytes, total_bytes, problem } = self;
        if let Some((ordinal, code, why)) = problem {
            return write!(f, "worker {ordinal} cannot load the snapshot: {code}: {why}");
        }
        write!(f, "{loaded} of {workers} workers have loaded the snapshot")?;
        let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
        if *total_bytes > 0 {
            write!(f, "; the others have {:.1} of {:.1} MiB", mib(*done_bytes), mib(*total_bytes))?;
        }
        Ok(())
    }
}

impl State {
    /// How far the workers are, as long as there is no map.
    pub(crate) fn bootstrapping(&self, options: &Options) -> Option<Bootstrapping> {
        (options.bootstraps && self.map.is_none()).then(|| {
            let mut told = Bootstrapping { workers: self.loading_workers(options), ..Bootstrapping::default() };
            for (ordinal, state) in self.members.values().filter(|it| it.alive).filter_map(load_of) {
                told.loaded += u32::from(state.loaded);
                told.done_bytes += state.done_bytes;
                told.total_bytes += state.total_bytes;
                if !state.problem.is_empty() && told.problem.is_none() {
                    told.problem = Some((ordinal, state.code.clone(), state.problem.clone()));
                }
            }
            told
        })
    }

    /// The number of workers that the snapshot is shared out between: what those say that are done.
    fn loading_workers(&self, options: &Options) -> u32 {
        let told = self.members.values().filter_map(load_of).find(|(_, state)| state.loaded);
        told.map_or_else(|| self.goal.workers(options.workers), |(_, state)| state.workers)
    }

    /// The first map, when all have loaded their share.
    pub(super) fn bootstrap(&self, options: &Options) -> Plan {
        let wait = |why: String| Plan { conditions: vec![why], ..Plan::default() };
        let workers = self.loading_workers(options);
        let done = |ordinal: u32| {
            let heard = self.members.get(&Ordinal(ordinal)).filter(|heard| heard.alive)?;
            let state = heard.bootstrap.as_ref().filter(|state| state.loaded)?;
            Some((heard.member, (state.workers, state.term)))
        };
        let loaded: Option<Vec<_>> = (0..workers).map(done).collect();
        let Some(loaded) = loaded.filter(|loaded| !loaded.is_empty()) else {
            return wait(self.bootstrapping(options).map_or_else(String::new, |told| told.to_string()));
        };
        let alike: BTreeSet<(u32, u64)> = loaded.iter().map(|(_, told)| *told).collect();
        let (Some(&(_, term)), 1) = (alike.first(), alike.len()) else {
            let numbers: Vec<u32> = alike.iter().map(|(workers, _)| *workers).collect();
            return wait(format!(
                "workers have loaded shares of the snapshot for {numbers:?} workers, or of two snapshots; start again with empty disks"
            ));
        };
        let entry = |loader: Ordinal| Entry::solo(Term(term + 1), loaded[loader.0 as usize].0);
        let partitions = loaders(options.partitions, workers).into_iter().map(entry).collect();
        Plan { first: Some(PartitionMap { cluster: options.cluster, version: 1, partitions }), ..Plan::default() }
    }
}

fn load_of(heard: &Heard) -> Option<(Ordinal, &v1::Bootstrap)> {
    heard.bootstrap.as_ref().map(|state| (heard.member.ordinal, state))
}
