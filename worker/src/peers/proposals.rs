//! Map changes that the replicas of this worker propose: to a coordinator, or to the map store itself if no coordinator responds.
//!
//! No response is needed: the map shows the result. A new proposal of a partition replaces the previous one, so that at most one
//! per partition is queued.

use super::map_store_client::MapStoreClient;
use crate::shared::Shared;
use engram_client::Network;
use engram_mapstore::with_causes;
use engram_memory::PartitionId;
use engram_proto::answers::identity;
use engram_proto::v1;
use engram_proto::v1::coordinator_service_client::CoordinatorServiceClient;
use engram_store::peer::Proposal;
use engram_wire as wire;
use futures::StreamExt as _;
use futures::stream::FuturesUnordered;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep, timeout};
use tonic::Code;
use tonic::transport::{Channel, Endpoint};

/// Proposals within this time go into one call: a promotion concerns many partitions at once.
const BATCH_DELAY: Duration = Duration::from_millis(1);
/// Deadline for one coordinator, over all attempts.
const DEADLINE: Duration = Duration::from_secs(1);
/// Attempts at a coordinator that is unreachable.
const ATTEMPTS: u32 = 2;
/// Delay after which the next coordinator is called as well. A coordinator accepts proposals at once and writes them later.
const HEDGE_DELAY: Duration = Duration::from_millis(100);
/// Time without a coordinator's response after which this worker writes the map itself: a partition that is being transferred waits
/// meanwhile. A coordinator that returns finds the change, and the map's compare-and-swap decides between the two.
pub(super) const WRITE_AFTER_SILENCE: Duration = Duration::from_millis(300);
/// Interval between attempts without a response, and between own writes of the map: at most ten a second.
const RETRY_INTERVAL: Duration = Duration::from_millis(100);

/// Proposals that no coordinator has accepted yet.
#[derive(Debug, Default)]
pub(crate) struct Proposals {
    pending: Mutex<BTreeMap<PartitionId, Proposal>>,
    added: Notify,
}

impl Proposals {
    /// Queues proposals; the newest one of each partition counts. Never blocks.
    pub(crate) fn add(&self, proposals: Vec<Proposal>) {
        let mut pending = self.pending.lock();
        pending.extend(proposals.into_iter().map(|proposal| (proposal.partition, proposal)));
        drop(pending);
        self.added.notify_one();
    }

    fn take(&self) -> Vec<Proposal> {
        let mut pending = self.pending.lock();
        std::mem::take(&mut *pending).into_values().collect()
    }

    /// Queues proposals again that were not accepted, except those replaced by newer ones.
    fn put_back(&self, proposals: Vec<Proposal>) {
        let mut pending = self.pending.lock();
        for proposal in proposals {
            pending.entry(proposal.partition).or_insert(proposal);
        }
    }
}

/// Submits proposals as they are queued. Ends when dropped.
pub(crate) async fn submit_proposals(shared: Arc<Shared>) {
    let mut coordinators = Vec::new();
    let mut failing_since: Option<Instant> = None;
    let mut failure = None;
    loop {
        shared.peers.proposals().added.notified().await;
        sleep(BATCH_DELAY).await;
        let proposals = shared.peers.proposals().take();
        if proposals.is_empty() {
            continue;
        }
        let sent_at = Instant::now();
        update(&shared, &mut coordinators);
        // If no coordinator was heard for a full deadline, waits only briefly: a partition has no primary.
        let silence = Duration::from_millis(shared.membership.coordinators().silence_ms());
        let call_timeout = if silence >= DEADLINE { HEDGE_DELAY } else { Duration::MAX };
        if timeout(call_timeout, propose(&shared, &mut coordinators, &proposals)).await.unwrap_or(false) {
            failing_since = None;
            continue;
        }
        let failing_for = failing_since.get_or_insert(sent_at).elapsed().max(silence);
        match shared.peers.map_store().filter(|_| failing_for >= WRITE_AFTER_SILENCE) {
            Some(map_store) => write(&shared, map_store, proposals, &mut failure).await,
            None => {
                shared.peers.proposals().put_back(proposals);
                shared.peers.proposals().added.notify_one();
            }
        }
        sleep(RETRY_INTERVAL).await;
    }
}

/// One coordinator and the connection to it.
#[derive(Clone)]
struct Coordinator {
    address: String,
    channel: Option<Channel>,
}

impl Coordinator {
    fn new(address: &str, network: &Network) -> Self {
        let address = address.to_owned();
        let endpoint = Endpoint::from_shared(format!("http://{address}"));
        if let Err(error) = &endpoint {
            tracing::error!(address, %error, "invalid coordinator address");
        }
        let channel = endpoint.map(|it| network.connect_lazy(it.connect_timeout(DEADLINE).tcp_nodelay(true))).ok();
        Self { address, channel }
    }

    /// Submits proposals; returns whether the coordinator accepted or rejected them. In both cases it works, and this worker must
    /// not write the map.
    async fn accepts(self, request: v1::ProposeMapChangesRequest) -> bool {
        let Some(channel) = self.channel else { return false };
        let mut client = CoordinatorServiceClient::new(channel);
        let call = async {
            // Retries, because a connection may have broken long ago, which only its use reveals.
            for _ in 0..ATTEMPTS {
                match client.propose_map_changes(request.clone()).await {
                    Ok(_) => return true,
                    Err(status) if !is_unreachable(status.code()) => {
                        tracing::warn!(
                            coordinator = self.address,
                            reason = status.message(),
                            "coordinator rejected map proposals"
                        );
                        return true;
                    }
                    Err(status) => {
                        tracing::debug!(
                            coordinator = self.address,
                            reason = status.message(),
                            "failed to submit map proposals"
                        );
                    }
                }
            }
            false
        };
        timeout(DEADLINE, call).await.unwrap_or_else(|_| {
            tracing::debug!(coordinator = self.address, "timed out submitting map proposals");
            false
        })
    }
}

/// Removes coordinators that are gone, and adds new ones.
fn update(shared: &Shared, coordinators: &mut Vec<Coordinator>) {
    let now = shared.membership.coordinators().addresses().current();
    coordinators.retain(|existing| now.contains(&existing.address));
    for address in now {
        if coordinators.iter().all(|existing| existing.address != address) {
            coordinators.push(Coordinator::new(&address, &shared.setup.to_coordinators()));
        }
    }
}

/// Submits proposals to the coordinators, starting with the one that accepted last; returns whether one accepted.
async fn propose(shared: &Shared, coordinators: &mut [Coordinator], proposals: &[Proposal]) -> bool {
    let request = v1::ProposeMapChangesRequest {
        cluster: identity(shared.setup.options.cluster.0),
        member: Some(wire::member_id_to_proto(&shared.setup.member)),
        proposals: proposals.iter().map(encode).collect(),
    };
    let calls: Vec<_> = coordinators.iter().map(|coordinator| coordinator.clone().accepts(request.clone())).collect();
    let accepted_by = first_acceptance(calls).await;
    if let Some(at) = accepted_by {
        coordinators.swap(0, at);
    }
    accepted_by.is_some()
}

/// Runs the calls one after the other, starting the next one also after a delay without a response. Returns the index of the first
/// that succeeds. A coordinator whose machine is gone does not respond before the deadline. Proposals that two have accepted are
/// written once: the map decides.
async fn first_acceptance(calls: Vec<impl Future<Output = bool>>) -> Option<usize> {
    let mut pending = calls.into_iter().enumerate().map(|(at, propose)| async move { (at, propose.await) });
    let mut sent_at = FuturesUnordered::new();
    loop {
        if sent_at.is_empty() {
            sent_at.push(pending.next()?);
        }
        if let Ok(Some((at, true))) = timeout(HEDGE_DELAY, sent_at.next()).await {
            return Some(at);
        }
        sent_at.extend(pending.next());
    }
}

/// Returns whether a status means that there was no response.
const fn is_unreachable(code: Code) -> bool {
    matches!(code, Code::Unavailable | Code::DeadlineExceeded | Code::Cancelled | Code::Unknown | Code::Internal)
}

fn encode(proposal: &Proposal) -> v1::MapChange {
    v1::MapChange {
        partition: proposal.partition.0,
        term: proposal.expected.term.0,
        activated: proposal.expected.activated,
        solo_safe: proposal.expected.solo_safe,
        // A replica never proposes a hint, the one change without a wire format: coordinators write those themselves.
        change: wire::change_to_proto(&proposal.change),
    }
}

/// Writes the proposals that match the current map into the map store, and uses the resulting map. `failure` is the last error,
/// logged once.
async fn write(shared: &Shared, map_store: &MapStoreClient, proposals: Vec<Proposal>, failure: &mut Option<String>) {
    let count = proposals.len();
    match map_store.apply(proposals).await {
        Ok(Some(map)) => {
            tracing::warn!(
                version = map.version,
                proposals = count,
                "no coordinator responds; wrote the partition map directly"
            );
            shared.membership.read_map(map);
            *failure = None;
        }
        Ok(None) => {}
        Err(error) => {
            let error = with_causes(&error);
            if failure.as_ref() != Some(&error) {
                tracing::warn!(error, "no coordinator responds; failed to write the partition map");
            }
            *failure = Some(error);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use engram_cluster::{Change, Entry};
    use engram_coordinator::{Host, Options};
    use engram_mapstore::MemoryStore;
    use engram_memory::{ClusterId, Incarnation, Member, Ordinal, StoreId};
    use std::net::SocketAddr;
    use std::sync::atomic::{AtomicU32, Ordering};
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::{TcpListener, TcpStream};

    fn member(ordinal: u32) -> Member {
        Member { ordinal: Ordinal(ordinal), store: StoreId(u128::from(ordinal) + 9), incarnation: Incarnation(1) }
    }

    #[test]
    fn the_newest_proposal_of_a_partition_counts() {
        let proposals = Proposals::default();
        let expected = Entry::first(vec![member(0)]).expectation();
        let propose = |change| Proposal { partition: PartitionId(1), expected, change };
        let remove = Change::Remove { primary: member(0), leaver: Ordinal(1) };
        proposals.add(vec![propose(Change::Activate)]);
        let old = proposals.take();
        proposals.add(vec![propose(remove.clone())]);
        proposals.put_back(old);
        assert_eq!(proposals.take(), [propose(remove)]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_silent_or_unreachable_coordinator_delays_no_proposal() {
        let after = |ms, accepts| async move {
            sleep(Duration::from_millis(ms)).await;
            accepts
        };
        for (calls, accepted_by, ms) in [
            (vec![after(5, true), after(1, true)], Some(0), 5),
            (vec![after(900, true), after(900, false), after(5, true)], Some(2), 205),
            (vec![after(10, false), after(20, false), after(30, true)], Some(2), 60),
            (vec![after(300, true), after(900, false)], Some(0), 300),
            (vec![after(900, false), after(900, false)], None, 1_000),
            (vec![], None, 0),
        ] {
            let began = Instant::now();
            assert_eq!(first_acceptance(calls).await, accepted_by);
            assert_eq!(began.elapsed().as_millis(), ms, "on the simulated clock");
        }
    }

    /// Proxies connections to `to`. Connections that exist when `break_count` rises are dropped at the next byte from the client,
    /// and not before: as if the route was lost in between and neither end was notified.
    async fn proxy(near: TcpListener, to: SocketAddr, break_count: Arc<AtomicU32>) {
        loop {
            let (mut near, _) = near.accept().await.unwrap();
            let (break_count, initial_count) = (break_count.clone(), break_count.load(Ordering::Relaxed));
            tokio::spawn(async move {
                let mut far = TcpStream::connect(to).await.unwrap();
                let (mut sent_at, mut answered) = ([0; 4_096], [0; 4_096]);
                loop {
                    tokio::select! {
                        Ok(count @ 1..) = near.read(&mut sent_at) => {
                            if break_count.load(Ordering::Relaxed) > initial_count {
                                return;
                            }
                            far.write_all(&sent_at[..count]).await.unwrap();
                        }
                        Ok(count @ 1..) = far.read(&mut answered) => near.write_all(&answered[..count]).await.unwrap(),
                        else => return,
                    }
                }
            });
        }
    }

    #[tokio::test]
    async fn a_connection_that_broke_unnoticed_loses_no_proposal() {
        let cluster = ClusterId(1);
        let host = Host::default();
        let options = Options::new(cluster, "words", 4, 1);
        host.add(engram_coordinator::Coordinator::build(options, Arc::new(MemoryStore::default())).unwrap(), None);
        let served = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let proxied = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (to, address) = (served.local_addr().unwrap(), proxied.local_addr().unwrap());
        tokio::spawn(host.run(served, std::future::pending()));
        let break_count = Arc::new(AtomicU32::new(0));
        tokio::spawn(proxy(proxied, to, break_count.clone()));

        let coordinator = Coordinator::new(&address.to_string(), &Network::default());
        let member = Some(wire::member_id_to_proto(&member(0)));
        let request = v1::ProposeMapChangesRequest { cluster: identity(cluster.0), member, proposals: Vec::new() };
        for round in 0..4 {
            assert!(coordinator.clone().accepts(request.clone()).await, "round {round}");
            break_count.fetch_add(1, Ordering::Relaxed);
        }
    }
}
