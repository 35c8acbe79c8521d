//! The first map of a cluster that starts from a snapshot: the worker that loaded a partition becomes its primary, as
//! the only replica at first.
//!
//! The assignment follows from the number of workers. All of them must have finished, for the same number: then the
//! term of the map is above all terms of the snapshot, and the loaded state is what a primary of an earlier term would
//! have left. Re-replication proceeds from there as usual.

use super::{State, WorkerState};
use crate::Options;
use engram_cluster::{Entry, PartitionMap, Plan, assign_loaders};
use engram_memory::{Ordinal, Term};
use engram_proto::v1;
use std::collections::BTreeSet;

/// Progress of a bootstrap from a snapshot.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct BootstrapProgress {
    /// Workers that have loaded their partitions.
    pub loaded: u32,
    /// Workers in total.
    pub workers: u32,
    /// Bytes loaded by workers that have not finished.
    pub done_bytes: u64,
    /// Bytes that they load in total.
    pub total_bytes: u64,
    /// Why a worker failed: its ordinal, the error code, and the message.
    pub problem: Option<(Ordinal, String, String)>,
}

impl std::fmt::Display for BootstrapProgress {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { loaded, workers, done_bytes, total_bytes, problem } = self;
        if let Some((ordinal, code, why)) = problem {
            return write!(f, "worker {ordinal} failed to load the snapshot: {code}: {why}");
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
    /// Returns the progress, while there is no map.
    pub(crate) fn bootstrap_progress(&self, options: &Options) -> Option<BootstrapProgress> {
        (options.bootstraps && self.map().is_none()).then(|| {
            let mut progress =
                BootstrapProgress { workers: self.loading_workers(options), ..BootstrapProgress::default() };
            for (ordinal, state) in self.living().filter_map(load_of) {
                progress.loaded += u32::from(state.loaded);
                progress.done_bytes += state.done_bytes;
                progress.total_bytes += state.total_bytes;
                if !state.problem.is_empty() && progress.problem.is_none() {
                    progress.problem = Some((ordinal, state.code.clone(), state.problem.clone()));
                }
            }
            progress
        })
    }

    /// Number of workers that share the snapshot: as reported by those that have finished.
    fn loading_workers(&self, options: &Options) -> u32 {
        let finished = self.members().filter_map(load_of).find(|(_, state)| state.loaded);
        finished.map_or_else(|| self.goal.workers(options.workers), |(_, state)| state.workers)
    }

    /// Plans the first map, once all workers have loaded their share.
    pub(super) fn bootstrap(&self, options: &Options) -> Plan {
        let wait = |why: String| Plan { conditions: vec![why], ..Plan::default() };
        let workers = self.loading_workers(options);
        let done = |ordinal: u32| {
            let worker = self.workers.get(Ordinal(ordinal)).filter(|worker| worker.alive)?;
            let state = worker.report.bootstrap.as_ref().filter(|state| state.loaded)?;
            Some((worker.member, (state.workers, state.term)))
        };
        let loaded: Option<Vec<_>> = (0..workers).map(done).collect();
        let Some(loaded) = loaded.filter(|loaded| !loaded.is_empty()) else {
            return wait(self.bootstrap_progress(options).map_or_else(String::new, |progress| progress.to_string()));
        };
        let shares: BTreeSet<(u32, u64)> = loaded.iter().map(|(_, share)| *share).collect();
        let (Some(&(_, term)), 1) = (shares.first(), shares.len()) else {
            let numbers: Vec<u32> = shares.iter().map(|(workers, _)| *workers).collect();
            return wait(format!(
                "workers loaded the snapshot for {numbers:?} workers, or from different snapshots; restart with empty disks"
            ));
        };
        let entry = |loader: Ordinal| Entry::solo(Term(term + 1), loaded[loader.0 as usize].0);
        let partitions = assign_loaders(options.partitions, workers).into_iter().map(entry).collect();
        Plan { initial_map: Some(PartitionMap { cluster: options.cluster, version: 1, partitions }), ..Plan::default() }
    }
}

fn load_of(worker: &WorkerState) -> Option<(Ordinal, &v1::BootstrapStatus)> {
    worker.report.bootstrap.as_ref().map(|state| (worker.member.ordinal, state))
}
