//! Replication state of a cluster: from the coordinator's partition map and the lag that primaries report.

use crate::local::admin;
use crate::output::count;
use crate::target::Target;
use engram_proto::v1;
use futures::future::join_all;
use serde::Serialize;
use std::collections::BTreeMap;

/// Replication state of all partitions.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Replication {
    /// Configured replicas per partition.
    pub(crate) replicas: u32,
    /// Partitions with all replicas in sync.
    pub(crate) healthy: usize,
    /// Partitions with fewer in-sync replicas than configured.
    pub(crate) under_replicated: usize,
    /// Under-replicated partitions with a single replica.
    pub(crate) single_replica: usize,
    /// Partitions whose primary cannot acknowledge writes yet.
    pub(crate) activating: usize,
    /// Replicas being created, by worker.
    pub(crate) learners: BTreeMap<u32, usize>,
    /// Records that the slowest in-sync replica has not acknowledged.
    pub(crate) lag: u64,
    /// Workers that are being drained.
    pub(crate) draining: Vec<u32>,
    /// Partitions of each worker.
    pub(crate) workers: BTreeMap<u32, Share>,
}

/// Number of partitions of a worker, by role.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Share {
    /// Partitions with the worker as primary.
    pub(crate) primaries: usize,
    /// Partitions with the worker as in-sync backup.
    pub(crate) backups: usize,
}

impl Replication {
    /// Reads the state of a cluster; `None` if the coordinator is unknown, does not answer or has no map.
    pub(crate) async fn read(target: &Target) -> Option<Self> {
        let (coordinator, cluster) = target.coordinator().await.ok()?;
        let status = admin::cluster(&coordinator, cluster).await.ok()?;
        Some(Self { lag: lag(target).await, ..Self::of(&status)? })
    }

    fn of(status: &v1::ClusterStatus) -> Option<Self> {
        let replicas = status.replication_factor.clamp(1, status.expected_workers.max(1));
        let mut state = Self { replicas, draining: status.draining.clone(), ..Self::default() };
        for entry in &status.map.as_ref()?.partitions {
            let held = entry.isr.len();
            let is_healthy = held >= replicas as usize;
            state.healthy += usize::from(is_healthy);
            state.under_replicated += usize::from(!is_healthy);
            state.single_replica += usize::from(!is_healthy && held <= 1);
            state.activating += usize::from(!entry.activated);
            for learner in &entry.learners {
                *state.learners.entry(*learner).or_default() += 1;
            }
            for member in &entry.isr {
                let share = state.workers.entry(member.ordinal).or_default();
                let count = if member.ordinal == entry.primary { &mut share.primaries } else { &mut share.backups };
                *count += 1;
            }
        }
        Some(state)
    }

    /// Describes the state in one line.
    pub(crate) fn describe(&self) -> String {
        let partitions = self.healthy + self.under_replicated;
        let mut text =
            format!("{} of {partitions} partitions have {} in sync", self.healthy, all_replicas(self.replicas));
        if self.single_replica > 0 {
            text.push_str(&format!(", {} have a single replica", self.single_replica));
        }
        if self.activating > 0 {
            text.push_str(&format!(", {} are activating", self.activating));
        }
        for (worker, partitions) in &self.learners {
            text.push_str(&format!(", {partitions} are being replicated to worker {worker}"));
        }
        if self.lag > 0 {
            text.push_str(&format!(", the slowest replica lags by {} record(s)", count(self.lag)));
        }
        for worker in &self.draining {
            text.push_str(&format!(", worker {worker} is being drained"));
        }
        text
    }
}

fn all_replicas(replicas: u32) -> String {
    if replicas == 1 { "their replica".into() } else { format!("all {replicas} replicas") }
}

/// Returns the largest lag that any primary reports. Workers that do not answer are ignored.
async fn lag(target: &Target) -> u64 {
    let admin_endpoints = target.admin_endpoints();
    let statuses = join_all(admin_endpoints.iter().map(|(_, endpoint)| admin::status(endpoint))).await;
    let partitions = statuses.into_iter().flatten().flat_map(|status| status.partition_status);
    partitions.filter(|partition| partition.primary).map(|partition| partition.lag).max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn under_replicated_partitions_are_counted_and_described() {
        let member = |ordinal: &u32| v1::MemberId { ordinal: *ordinal, ..Default::default() };
        let entry = |isr: &[u32], learners: &[u32], activated| v1::MapEntry {
            primary: isr[0],
            isr: isr.iter().map(member).collect(),
            learners: learners.to_vec(),
            activated,
            ..Default::default()
        };
        let map = v1::PartitionMap {
            partitions: vec![entry(&[0, 1], &[], true), entry(&[1], &[2], true), entry(&[2, 0], &[], false)],
            ..Default::default()
        };
        let status = v1::ClusterStatus {
            map: Some(map),
            expected_workers: 3,
            replication_factor: 2,
            draining: vec![1],
            ..Default::default()
        };
        let state = Replication::of(&status).unwrap();
        assert_eq!((state.healthy, state.under_replicated, state.single_replica, state.activating), (2, 1, 1, 1));
        assert_eq!(state.workers[&0], Share { primaries: 1, backups: 1 });
        assert_eq!(
            state.describe(),
            "2 of 3 partitions have all 2 replicas in sync, 1 have a single replica, 1 are activating, 1 are being replicated to \
             worker 2, worker 1 is being drained"
        );
    }
}
