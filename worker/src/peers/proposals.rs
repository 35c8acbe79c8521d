//! What the replicas of this worker ask of the map: to a coordinator, or to the map store itself when none answers.
//!
//! No answer is needed: the map tells. What is asked for again replaces what was asked before, so that no more waits than there are
//! partitions.

use super::map_keeper::MapKeeper;
use crate::shared::Shared;
use engram_client::Network;
use engram_coordinator::wire;
use engram_mapstore::with_causes;
use engram_memory::PartitionId;
use engram_proto::answers::identity;
use engram_proto::v1;
use engram_proto::v1::coordinator_service_client::CoordinatorServiceClient;
use engram_store::peer::Proposal;
use futures::StreamExt as _;
use futures::stream::FuturesUnordered;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep, timeout};
use tonic::Code;
use tonic::transport::{Channel, Endpoint};

/// What comes within this time goes into one call: a promotion concerns many partitions at once.
const GATHER: Duration = Duration::from_millis(1);
/// How long one coordinator may take, all attempts together.
const DEADLINE: Duration = Duration::from_secs(1);
/// How often one is asked that says at once that it cannot be reached.
const ATTEMPTS: u32 = 2;
/// After this another one is asked as well: they take proposals at once, and write them afterwards.
const PATIENCE: Duration = Duration::from_millis(100);
/// How long no coordinator may answer before this worker writes the map itself: a partition that is changing hands waits meanwhile. A
/// coordinator that comes back finds what was written, and the map's compare-and-swap decides between the two.
pub(super) const UNANSWERED: Duration = Duration::from_millis(300);
/// Between attempts while nobody answers, and between own writes of the map: at most ten a second.
const RETRY: Duration = Duration::from_millis(100);

/// What is asked of the map and was not handed to anybody.
#[derive(Debug, Default)]
pub(crate) struct Proposals {
    waiting: Mutex<BTreeMap<PartitionId, Proposal>>,
    news: Notify,
}

impl Proposals {
    /// Adds proposals; the newest of a partition counts. Never blocks.
    pub(crate) fn add(&self, proposals: Vec<Proposal>) {
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        waiting.extend(proposals.into_iter().map(|proposal| (proposal.partition, proposal)));
        drop(waiting);
        self.news.notify_one();
    }

    fn take(&self) -> Vec<Proposal> {
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        std::mem::take(&mut *waiting).into_values().collect()
    }

    /// Nobody took them: they wait again, where nothing newer does.
    fn put_back(&self, proposals: Vec<Proposal>) {
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        for proposal in proposals {
            waiting.entry(proposal.partition).or_insert(proposal);
        }
    }
}

/// Hands proposals over as they come. Ends when dropped.
pub(crate) async fn hand_over(shared: Arc<Shared>) {
    let mut coordinators = Vec::new();
    let mut in_vain_since: Option<Instant> = None;
    let mut failure = None;
    loop {
        shared.proposals.news.notified().await;
        sleep(GATHER).await;
        let proposals = shared.proposals.take();
        if proposals.is_empty() {
            continue;
        }
        let asked = Instant::now();
        update(&shared, &mut coordinators);
        // Where none has been heard for as long as one may take, none is waited for: a partition without a primary is.
        let unheard = Duration::from_millis(shared.coordinators.unheard_ms());
        let patience = if unheard >= DEADLINE { PATIENCE } else { Duration::MAX };
        if timeout(patience, ask(&shared, &mut coordinators, &proposals)).await.unwrap_or(false) {
            in_vain_since = None;
            continue;
        }
        let unanswered = in_vain_since.get_or_insert(asked).elapsed().max(unheard);
        match shared.map_keeper.as_ref().filter(|_| unanswered >= UNANSWERED) {
            Some(keeper) => write(&shared, keeper, proposals, &mut failure).await,
            None => {
                shared.proposals.put_back(proposals);
                shared.proposals.news.notify_one();
            }
        }
        sleep(RETRY).await;
    }
}

/// One coordinator, with the connection to it.
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
            tracing::error!(address, %error, "not the address of a coordinator");
        }
        let channel = endpoint.map(|it| network.connect_lazy(it.connect_timeout(DEADLINE).tcp_nodelay(true))).ok();
        Self { address, channel }
    }

    /// Whether it takes proposals, or refuses them: then it is there, and the map is not for this worker to write.
    async fn takes(self, request: v1::ProposeMapRequest) -> bool {
        let Some(channel) = self.channel else { return false };
        let mut client = CoordinatorServiceClient::new(channel);
        let asking = async {
            // Again where it fails: the connection may have broken long ago, and only who uses it notices.
            for _ in 0..ATTEMPTS {
                match client.propose_map(request.clone()).await {
                    Ok(_) => return true,
                    Err(status) if !is_away(status.code()) => {
                        tracing::warn!(coordinator = self.address, reason = status.message(), "proposals refused");
                        return true;
                    }
                    Err(status) => {
                        tracing::debug!(
                            coordinator = self.address,
                            reason = status.message(),
                            "proposals were not taken"
                        );
                    }
                }
            }
            false
        };
        timeout(DEADLINE, asking).await.unwrap_or_else(|_| {
            tracing::debug!(coordinator = self.address, "proposals were not answered in time");
            false
        })
    }
}

/// Drops coordinators that are gone, and adds those that are new.
fn update(shared: &Shared, coordinators: &mut Vec<Coordinator>) {
    let now = shared.roster.now();
    coordinators.retain(|known| now.contains(&known.address));
    for address in now {
        if coordinators.iter().all(|known| known.address != address) {
            coordinators.push(Coordinator::new(&address, &shared.to_coordinators()));
        }
    }
}

/// Asks the coordinators, the one that took proposals last first; whether one took them.
async fn ask(shared: &Shared, coordinators: &mut [Coordinator], proposals: &[Proposal]) -> bool {
    let request = v1::ProposeMapRequest {
        cluster: identity(shared.options.cluster.0),
        member: Some(wire::member_id_to_proto(&shared.member)),
        proposals: proposals.iter().map(encode).collect(),
    };
    let asks: Vec<_> = coordinators.iter().map(|coordinator| coordinator.clone().takes(request.clone())).collect();
    let taken = first_to_take(asks).await;
    if let Some(at) = taken {
        coordinators.swap(0, at);
    }
    taken.is_some()
}

/// Asks one after the other, the next one also where nobody has answered for a while; says who took it first. One that is gone with
/// its machine answers nothing for as long as it may take, and what two have taken is written once: the map decides.
async fn first_to_take(asks: Vec<impl Future<Output = bool>>) -> Option<usize> {
    let mut waiting = asks.into_iter().enumerate().map(|(at, ask)| async move { (at, ask.await) });
    let mut asked = FuturesUnordered::new();
    loop {
        if asked.is_empty() {
            asked.push(waiting.next()?);
        }
        if let Ok(Some((at, true))) = timeout(PATIENCE, asked.next()).await {
            return Some(at);
        }
        asked.extend(waiting.next());
    }
}

/// Whether a status says that nobody answered, rather than what.
const fn is_away(code: Code) -> bool {
    matches!(code, Code::Unavailable | Code::DeadlineExceeded | Code::Cancelled | Code::Unknown | Code::Internal)
}

fn encode(proposal: &Proposal) -> v1::MapProposal {
    v1::MapProposal {
        partition: proposal.partition.0,
        term: proposal.expected.term.0,
        activated: proposal.expected.activated,
        solo_safe: proposal.expected.solo_safe,
        // No replica asks for a hint, the one change that has no form on the wire: coordinators write those by themselves.
        change: wire::change_to_proto(&proposal.change),
    }
}

/// Writes what still fits into the map store, and takes the map that is there then. `failure` is the last one, told once.
async fn write(shared: &Shared, keeper: &MapKeeper, proposals: Vec<Proposal>, failure: &mut Option<String>) {
    let count = proposals.len();
    match keeper.change(proposals).await {
        Ok(Some(map)) => {
            tracing::warn!(version = map.version, proposals = count, "no coordinator answers: wrote the map here");
            shared.read_map(map);
            *failure = None;
        }
        Ok(None) => {}
        Err(error) => {
            let error = with_causes(&error);
            if failure.as_ref() != Some(&error) {
                tracing::warn!(error, "no coordinator answers, and the map cannot be written");
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
        let expected = Entry::first(vec![member(0)]).expected();
        let ask = |change| Proposal { partition: PartitionId(1), expected, change };
        let remove = Change::Remove { primary: member(0), leaver: Ordinal(1) };
        proposals.add(vec![ask(Change::Activate)]);
        let old = proposals.take();
        proposals.add(vec![ask(remove.clone())]);
        proposals.put_back(old);
        assert_eq!(proposals.take(), [ask(remove)]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_coordinator_that_is_silent_or_away_holds_nothing_up() {
        let after = |ms, takes| async move {
            sleep(Duration::from_millis(ms)).await;
            takes
        };
        for (asks, taken, ms) in [
            (vec![after(5, true), after(1, true)], Some(0), 5),
            (vec![after(900, true), after(900, false), after(5, true)], Some(2), 205),
            (vec![after(10, false), after(20, false), after(30, true)], Some(2), 60),
            (vec![after(300, true), after(900, false)], Some(0), 300),
            (vec![after(900, false), after(900, false)], None, 1_000),
            (vec![], None, 0),
        ] {
            let began = Instant::now();
            assert_eq!(first_to_take(asks).await, taken);
            assert_eq!(began.elapsed().as_millis(), ms, "of the simulated clock");
        }
    }

    /// Passes connections on to `to`. Those that are there when `breaks` grows end at the next byte that they bring, and not before: so it is
    /// where the way was lost in between, and neither end was told.
    async fn pass_on(near: TcpListener, to: SocketAddr, breaks: Arc<AtomicU32>) {
        loop {
            let (mut near, _) = near.accept().await.unwrap();
            let (breaks, at_first) = (breaks.clone(), breaks.load(Ordering::Relaxed));
            tokio::spawn(async move {
                let mut far = TcpStream::connect(to).await.unwrap();
                let (mut asked, mut answered) = ([0; 4_096], [0; 4_096]);
                loop {
                    tokio::select! {
                        Ok(count @ 1..) = near.read(&mut asked) => {
                            if breaks.load(Ordering::Relaxed) > at_first {
                                return;
                            }
                            far.write_all(&asked[..count]).await.unwrap();
                        }
                        Ok(count @ 1..) = far.read(&mut answered) => near.write_all(&answered[..count]).await.unwrap(),
                        else => return,
                    }
                }
            });
        }
    }

    #[tokio::test]
    async fn a_connection_that_broke_unnoticed_costs_no_proposal() {
        let cluster = ClusterId(1);
        let host = Host::default();
        let options = Options::new(cluster, "words", 4, 1);
        host.add(engram_coordinator::Coordinator::build(options, Arc::new(MemoryStore::default())).unwrap(), None);
        let served = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let passed = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (to, address) = (served.local_addr().unwrap(), passed.local_addr().unwrap());
        tokio::spawn(host.run(served, std::future::pending()));
        let breaks = Arc::new(AtomicU32::new(0));
        tokio::spawn(pass_on(passed, to, breaks.clone()));

        let coordinator = Coordinator::new(&address.to_string(), &Network::default());
        let member = Some(wire::member_id_to_proto(&member(0)));
        let request = v1::ProposeMapRequest { cluster: identity(cluster.0), member, proposals: Vec::new() };
        for round in 0..4 {
            assert!(coordinator.clone().takes(request.clone()).await, "round {round}");
            breaks.fetch_add(1, Ordering::Relaxed);
        }
    }
}
