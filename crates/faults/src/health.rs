//! Cluster health: every partition has all its replicas, in sync, on live processes.

use engram_proto::v1;
use engram_proto::v1::coordinator_service_client::CoordinatorServiceClient;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;
use tokio::time::{Instant, timeout};
use tonic::transport::{Channel, Endpoint};

/// Time limit of one status request.
const ANSWER: Duration = Duration::from_secs(1);
/// Interval between checks.
const CHECK_INTERVAL: Duration = Duration::from_millis(50);
/// Consecutive checks that must find the cluster healthy: heartbeats in flight arrive meanwhile.
const IN_A_ROW: u32 = 3;

/// Checks a cluster through its coordinator.
#[derive(Debug, Clone)]
pub struct Health {
    coordinator: CoordinatorServiceClient<Channel>,
    replicas: u32,
}

/// Ended processes by the ordinal of their worker; each must have been replaced.
pub type EndedProcesses = BTreeMap<u32, v1::MemberEntry>;

/// Reason why a cluster is not healthy.
#[derive(Debug, thiserror::Error)]
#[error("the cluster is not healthy after {} s: {problem}", .after.as_secs())]
pub struct Unhealthy {
    /// How long the caller waited.
    pub after: Duration,
    /// The problem found last.
    pub problem: String,
}

impl Health {
    /// Creates a health check for a cluster with this replication factor. Connects on the first check.
    ///
    /// # Panics Outside a tokio runtime.
    pub fn new(coordinator: SocketAddr, replicas: u32) -> Self {
        let endpoint = Endpoint::from_shared(format!("http://{coordinator}")).expect("an address makes a URL");
        let channel = endpoint.connect_timeout(ANSWER).timeout(ANSWER).connect_lazy();
        let coordinator =
            CoordinatorServiceClient::new(channel).max_decoding_message_size(engram_proto::MAX_PEER_MESSAGE_BYTES);
        Self { coordinator, replicas }
    }

    /// Requests the cluster status from the coordinator.
    ///
    /// # Errors If it does not answer, with the reason.
    pub async fn status(&self) -> Result<v1::ClusterStatus, String> {
        let mut coordinator = self.coordinator.clone();
        match timeout(ANSWER, coordinator.get_cluster_status(v1::GetClusterStatusRequest::default())).await {
            Ok(Ok(status)) => Ok(status.into_inner()),
            Ok(Err(status)) => Err(format!("the coordinator: {}", status.message())),
            Err(_) => Err("no answer from the coordinator".into()),
        }
    }

    /// Returns the process of a worker last seen by the coordinator; empty if the coordinator does not answer.
    pub async fn process(&self, ordinal: u32) -> EndedProcesses {
        let members = self.status().await.map(|status| status.members).unwrap_or_default();
        members.into_iter().filter(|member| member.ordinal == ordinal).map(|member| (ordinal, member)).collect()
    }

    /// Waits until the cluster is healthy and every process of `ended` was replaced.
    ///
    /// # Errors If it is not healthy by the deadline.
    pub async fn wait_until_healthy(&self, ended: &EndedProcesses, deadline: Duration) -> Result<(), Unhealthy> {
        let (since, mut in_a_row) = (Instant::now(), 0);
        loop {
            let problem = match self.status().await {
                Ok(status) => find_problem(&status, self.replicas, ended),
                Err(reason) => Some(reason),
            };
            in_a_row = if problem.is_none() { in_a_row + 1 } else { 0 };
            if in_a_row == IN_A_ROW {
                return Ok(());
            }
            if since.elapsed() >= deadline {
                let problem = problem.unwrap_or_else(|| "it was healthy only for a moment".into());
                return Err(Unhealthy { after: deadline, problem });
            }
            tokio::time::sleep(CHECK_INTERVAL).await;
        }
    }
}

/// Returns the first problem of a cluster; `None` = it is healthy.
pub fn find_problem(status: &v1::ClusterStatus, replicas: u32, ended: &EndedProcesses) -> Option<String> {
    let members: BTreeMap<u32, &v1::MemberEntry> =
        status.members.iter().map(|member| (member.ordinal, member)).collect();
    for ordinal in 0..status.expected_workers {
        match members.get(&ordinal) {
            None => return Some(format!("worker {ordinal} is not known")),
            Some(member) if !member.alive => return Some(format!("worker {ordinal} is silent")),
            Some(member) if ended.get(&ordinal).is_some_and(|ended| !is_later(member, ended)) => {
                return Some(format!("worker {ordinal} was not restarted"));
            }
            Some(_) => {}
        }
    }
    if let Some(condition) = status.conditions.first() {
        return Some(condition.clone());
    }
    let Some(map) = &status.map else { return Some("there is no map".into()) };
    let replicas = replicas.min(status.expected_workers) as usize;
    for (partition, entry) in map.partitions.iter().enumerate() {
        if !entry.activated {
            return Some(format!("partition {partition} is not activated"));
        }
        if entry.isr.len() < replicas {
            return Some(format!("partition {partition} has {} of {replicas} replicas in sync", entry.isr.len()));
        }
        let lives = |copy: &&v1::MemberId| members.get(&copy.ordinal).is_some_and(|member| member.store == copy.store);
        if let Some(copy) = entry.isr.iter().find(|copy| !lives(copy)) {
            return Some(format!(
                "partition {partition} has a replica on a disk that worker {} no longer has",
                copy.ordinal
            ));
        }
    }
    None
}

/// Whether one process of a worker replaced the other: on the same disk it has a later incarnation.
fn is_later(process: &v1::MemberEntry, than: &v1::MemberEntry) -> bool {
    process.store != than.store || process.incarnation > than.incarnation
}

#[cfg(test)]
mod tests {
    use super::*;

    fn healthy() -> v1::ClusterStatus {
        let store = |ordinal: u32| ordinal.to_be_bytes().to_vec().into();
        let member = |ordinal| {
            let store = store(ordinal);
            v1::MemberEntry { ordinal, store, incarnation: 4, alive: true, ..Default::default() }
        };
        let id = |ordinal| v1::MemberId { ordinal, store: store(ordinal), ..Default::default() };
        let entry = v1::MapEntry { isr: vec![id(0), id(1)], activated: true, ..Default::default() };
        v1::ClusterStatus {
            members: vec![member(0), member(1)],
            expected_workers: 2,
            map: Some(v1::PartitionMap { partitions: vec![entry; 3], ..Default::default() }),
            ..Default::default()
        }
    }

    fn ended(incarnation: u64) -> EndedProcesses {
        let member = healthy().members.swap_remove(1);
        EndedProcesses::from([(1, v1::MemberEntry { incarnation, ..member })])
    }

    #[test]
    fn every_missing_part_makes_a_cluster_unhealthy() {
        let lacks = |change: fn(&mut v1::ClusterStatus)| {
            let mut status = healthy();
            change(&mut status);
            find_problem(&status, 2, &ended(3)).expect("a problem")
        };
        assert_eq!(find_problem(&healthy(), 2, &ended(3)), None);
        assert_eq!(find_problem(&healthy(), 3, &BTreeMap::new()), None, "two workers hold at most two replicas");
        assert!(find_problem(&healthy(), 2, &ended(4)).is_some_and(|it| it.contains("worker 1 was not restarted")));
        let mut other_disk = ended(4);
        other_disk.get_mut(&1).unwrap().store = b"another".as_slice().into();
        assert_eq!(find_problem(&healthy(), 2, &other_disk), None);
        for (change, word) in [
            ((|status| drop(status.members.pop())) as fn(&mut v1::ClusterStatus), "worker 1"),
            (|status| status.members[0].alive = false, "worker 0 is silent"),
            (|status| status.conditions.push("worker 0 is starting".into()), "worker 0 is starting"),
            (|status| status.members[0].store = status.members[1].store.clone(), "no longer has"),
            (|status| status.map = None, "no map"),
            (|status| status.map.as_mut().unwrap().partitions[2].activated = false, "partition 2"),
            (|status| drop(status.map.as_mut().unwrap().partitions[1].isr.pop()), "1 of 2 replicas"),
        ] {
            assert!(lacks(change).contains(word), "{word}: {}", lacks(change));
        }
    }
}
