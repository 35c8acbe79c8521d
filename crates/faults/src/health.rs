//! Whether a cluster is whole: every partition has all its copies, in sync, on processes that live.

use engram_proto::v1;
use engram_proto::v1::coordinator_service_client::CoordinatorServiceClient;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;
use tokio::time::{Instant, timeout};
use tonic::transport::{Channel, Endpoint};

/// How long the coordinator may take to answer one look.
const ANSWER: Duration = Duration::from_secs(1);
/// Between looks.
const LOOK: Duration = Duration::from_millis(50);
/// Looks in a row that must find the cluster whole: what is on its way to the coordinator arrives meanwhile.
const IN_A_ROW: u32 = 3;

/// Looks at a cluster through its coordinator.
#[derive(Debug, Clone)]
pub struct Health {
    coordinator: CoordinatorServiceClient<Channel>,
    copies: u32,
}

/// Processes that ended, by the ordinal of their worker: others must have taken their places.
pub type Gone = BTreeMap<u32, v1::MemberEntry>;

/// Why a cluster is not whole.
#[derive(Debug, thiserror::Error)]
#[error("the cluster is not whole after {} s: {wanting}", .after.as_secs())]
pub struct Unhealthy {
    /// How long it was waited for.
    pub after: Duration,
    /// What is wanting.
    pub wanting: String,
}

impl Health {
    /// For a cluster whose partitions have so many copies. Connects when it looks.
    ///
    /// # Panics
    /// Outside a tokio runtime.
    pub fn new(coordinator: SocketAddr, copies: u32) -> Self {
        let endpoint = Endpoint::from_shared(format!("http://{coordinator}")).expect("an address makes a URL");
        let channel = endpoint.connect_timeout(ANSWER).timeout(ANSWER).connect_lazy();
        let coordinator =
            CoordinatorServiceClient::new(channel).max_decoding_message_size(engram_proto::MAX_PEER_MESSAGE_BYTES);
        Self { coordinator, copies }
    }

    /// What the coordinator says of the cluster.
    ///
    /// # Errors
    /// It does not answer, and why.
    pub async fn status(&self) -> Result<v1::ClusterStatus, String> {
        let mut coordinator = self.coordinator.clone();
        match timeout(ANSWER, coordinator.get_cluster_status(v1::GetClusterStatusRequest::default())).await {
            Ok(Ok(status)) => Ok(status.into_inner()),
            Ok(Err(status)) => Err(format!("the coordinator: {}", status.message())),
            Err(_) => Err("the coordinator does not answer".into()),
        }
    }

    /// The process of a worker that the coordinator heard last; nothing where it does not answer.
    pub async fn process(&self, ordinal: u32) -> Gone {
        let members = self.status().await.map(|status| status.members).unwrap_or_default();
        members.into_iter().filter(|member| member.ordinal == ordinal).map(|member| (ordinal, member)).collect()
    }

    /// Waits until the cluster is whole, without any process of `gone`.
    ///
    /// # Errors
    /// It is not by the deadline.
    pub async fn wait_until_healthy(&self, gone: &Gone, deadline: Duration) -> Result<(), Unhealthy> {
        let (since, mut in_a_row) = (Instant::now(), 0);
        loop {
            let find_problem = match self.status().await {
                Ok(status) => wanting(&status, self.copies, gone),
                Err(reason) => Some(reason),
            };
            in_a_row = if find_problem.is_none() { in_a_row + 1 } else { 0 };
            if in_a_row == IN_A_ROW {
                return Ok(());
            }
            if since.elapsed() >= deadline {
                let wanting = find_problem.unwrap_or_else(|| "it was whole for a moment only".into());
                return Err(Unhealthy { after: deadline, wanting });
            }
            tokio::time::sleep(LOOK).await;
        }
    }
}

/// What a cluster lacks to be whole, the first thing found; `None` where it is whole.
pub fn wanting(status: &v1::ClusterStatus, copies: u32, gone: &Gone) -> Option<String> {
    let members: BTreeMap<u32, &v1::MemberEntry> =
        status.members.iter().map(|member| (member.ordinal, member)).collect();
    for ordinal in 0..status.expected_workers {
        match members.get(&ordinal) {
            None => return Some(format!("worker {ordinal} was not heard of")),
            Some(member) if !member.alive => return Some(format!("worker {ordinal} is silent")),
            Some(member) if gone.get(&ordinal).is_some_and(|gone| !is_later(member, gone)) => {
                return Some(format!("worker {ordinal} was not started again"));
            }
            Some(_) => {}
        }
    }
    if let Some(condition) = status.conditions.first() {
        return Some(condition.clone());
    }
    let Some(map) = &status.map else { return Some("there is no map".into()) };
    let copies = copies.min(status.expected_workers) as usize;
    for (partition, entry) in map.partitions.iter().enumerate() {
        if !entry.activated {
            return Some(format!("partition {partition} is not activated"));
        }
        if entry.isr.len() < copies {
            return Some(format!("partition {partition} has {} of {copies} copies in sync", entry.isr.len()));
        }
        let lives = |copy: &&v1::MemberId| members.get(&copy.ordinal).is_some_and(|member| member.store == copy.store);
        if let Some(copy) = entry.isr.iter().find(|copy| !lives(copy)) {
            return Some(format!(
                "partition {partition} has a copy on a disk that worker {} no longer has",
                copy.ordinal
            ));
        }
    }
    None
}

/// Whether a process of a worker came after another: on the same disk by its incarnation; another disk is another story.
fn is_later(process: &v1::MemberEntry, than: &v1::MemberEntry) -> bool {
    process.store != than.store || process.incarnation > than.incarnation
}

#[cfg(test)]
mod tests {
    use super::*;

    fn whole() -> v1::ClusterStatus {
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

    fn gone(incarnation: u64) -> Gone {
        let member = whole().members.swap_remove(1);
        Gone::from([(1, v1::MemberEntry { incarnation, ..member })])
    }

    #[test]
    fn a_cluster_that_lacks_anything_is_not_whole() {
        let lacks = |change: fn(&mut v1::ClusterStatus)| {
            let mut status = whole();
            change(&mut status);
            wanting(&status, 2, &gone(3)).expect("something is wanting")
        };
        assert_eq!(wanting(&whole(), 2, &gone(3)), None);
        assert_eq!(wanting(&whole(), 3, &BTreeMap::new()), None, "two workers hold two copies at most");
        assert!(wanting(&whole(), 2, &gone(4)).is_some_and(|it| it.contains("worker 1 was not started again")));
        let mut other_disk = gone(4);
        other_disk.get_mut(&1).unwrap().store = b"another".as_slice().into();
        assert_eq!(wanting(&whole(), 2, &other_disk), None);
        for (change, word) in [
            ((|status| drop(status.members.pop())) as fn(&mut v1::ClusterStatus), "worker 1"),
            (|status| status.members[0].alive = false, "worker 0 is silent"),
            (|status| status.conditions.push("worker 0 is getting ready".into()), "worker 0 is getting ready"),
            (|status| status.members[0].store = status.members[1].store.clone(), "no longer has"),
            (|status| status.map = None, "no map"),
            (|status| status.map.as_mut().unwrap().partitions[2].activated = false, "partition 2"),
            (|status| drop(status.map.as_mut().unwrap().partitions[1].isr.pop()), "1 of 2 copies"),
        ] {
            assert!(lacks(change).contains(word), "{word}: {}", lacks(change));
        }
    }
}
