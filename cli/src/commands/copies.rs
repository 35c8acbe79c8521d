//! How the copies of a cluster are: by its coordinator's map, and what primaries say of those who follow them.

use crate::local::admin;
use crate::output::count;
use crate::target::Target;
use engram_proto::v1;
use futures::future::join_all;
use serde::Serialize;
use std::collections::BTreeMap;

/// The copies of all partitions at one moment.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Copies {
    /// Copies that each partition shall have.
    pub(crate) wanted: u32,
    /// Partitions that have all of them in sync.
    pub(crate) whole: usize,
    /// Partitions that have fewer.
    pub(crate) short: usize,
    /// Of these, partitions with a single one where there shall be more.
    pub(crate) alone: usize,
    /// Partitions whose primary may not acknowledge yet.
    pub(crate) inactive: usize,
    /// Copies being made, by the worker that gets them.
    pub(crate) healing: BTreeMap<u32, usize>,
    /// Records that the copy in sync which is furthest behind has not acknowledged.
    pub(crate) lag: u64,
    /// Workers that are being emptied.
    pub(crate) draining: Vec<u32>,
    /// What each worker holds.
    pub(crate) workers: BTreeMap<u32, Share>,
}

/// Partitions that a worker holds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Share {
    /// As primary.
    pub(crate) leads: usize,
    /// As a copy in sync that follows.
    pub(crate) follows: usize,
}

impl Copies {
    /// Looks at a cluster; `None` for one of which only addresses are known, and where the coordinator does not answer or has no
    /// map.
    pub(crate) async fn look(target: &Target) -> Option<Self> {
        let (coordinator, cluster) = target.coordinator().await.ok()?;
        let status = admin::cluster(&coordinator, cluster).await.ok()?;
        Some(Self { lag: lag(target).await, ..Self::of(&status)? })
    }

    fn of(status: &v1::ClusterStatus) -> Option<Self> {
        let wanted = status.replication_factor.clamp(1, status.expected_workers.max(1));
        let mut copies = Self { wanted, draining: status.draining.clone(), ..Self::default() };
        for entry in &status.map.as_ref()?.partitions {
            let held = entry.isr.len();
            let whole = held >= wanted as usize;
            copies.whole += usize::from(whole);
            copies.short += usize::from(!whole);
            copies.alone += usize::from(!whole && held <= 1);
            copies.inactive += usize::from(!entry.activated);
            for learner in &entry.learners {
                *copies.healing.entry(*learner).or_default() += 1;
            }
            for member in &entry.isr {
                let share = copies.workers.entry(member.ordinal).or_default();
                let part = if member.ordinal == entry.primary { &mut share.leads } else { &mut share.follows };
                *part += 1;
            }
        }
        Some(copies)
    }

    /// In a line for people.
    pub(crate) fn told(&self) -> String {
        let partitions = self.whole + self.short;
        let mut text = format!("{} of {partitions} partitions have {} in sync", self.whole, copies(self.wanted));
        if self.alone > 0 {
            text.push_str(&format!(", {} are alone", self.alone));
        }
        if self.inactive > 0 {
            text.push_str(&format!(", {} are changing hands", self.inactive));
        }
        for (worker, partitions) in &self.healing {
            text.push_str(&format!(", {partitions} are being copied to worker {worker}"));
        }
        if self.lag > 0 {
            text.push_str(&format!(", the slowest copy lacks {} record(s)", count(self.lag)));
        }
        for worker in &self.draining {
            text.push_str(&format!(", worker {worker} is being emptied"));
        }
        text
    }
}

fn copies(wanted: u32) -> String {
    if wanted == 1 { "their one copy".into() } else { format!("all {wanted} copies") }
}

/// The largest lag that any primary tells of; one that does not answer has nobody who could tell.
async fn lag(target: &Target) -> u64 {
    let doors = target.administration();
    let statuses = join_all(doors.iter().map(|(_, door)| admin::status(door))).await;
    let partitions = statuses.into_iter().flatten().flat_map(|status| status.partition_status);
    partitions.filter(|partition| partition.primary).map(|partition| partition.lag).max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_lacks_a_copy_is_counted_and_told() {
        let member = |ordinal: &u32| v1::MemberId { ordinal: *ordinal, ..Default::default() };
        let entry = |isr: &[u32], learners: &[u32], activated| v1::MapEntry {
            primary: isr[0],
            isr: isr.iter().map(member).collect(),
            learners: learners.to_vec(),
            activated,
            ..Default::default()
        };
        let map = v1::ClusterMap {
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
        let copies = Copies::of(&status).unwrap();
        assert_eq!((copies.whole, copies.short, copies.alone, copies.inactive), (2, 1, 1, 1));
        assert_eq!(copies.workers[&0], Share { leads: 1, follows: 1 });
        assert_eq!(
            copies.told(),
            "2 of 3 partitions have all 2 copies in sync, 1 are alone, 1 are changing hands, 1 are being copied to \
             worker 2, worker 1 is being emptied"
        );
    }
}
