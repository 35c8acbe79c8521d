//! What the replicas of this worker ask of the map: to a coordinator, or to the map store itself when none answers.
//!
//! No answer is needed: the map tells. What is asked for again replaces what was asked before, so that no more waits than there are
//! partitions.

use crate::shared::Shared;
use engram_client::Network;
use engram_cluster::PartitionMap;
use engram_coordinator::wire;
use engram_mapstore::{Error, FileStore, MapStore as _};
use engram_memory::{ClusterId, PartitionId};
use engram_proto::answers::identity;
use engram_proto::v1;
use engram_proto::v1::coordinator_service_client::CoordinatorServiceClient;
use engram_store::peer::Proposal;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep, timeout};
use tonic::Code;
use tonic::transport::{Channel, Endpoint};

/// What comes within this time goes into one call: a promotion concerns many partitions at once.
const GATHER: Duration = Duration::from_millis(1);
/// How long one coordinator may take.
const DEADLINE: Duration = Duration::from_secs(1);
/// How long no coordinator may answer before this worker writes the map itself: a partition that is changing hands waits meanwhile. A
/// coordinator that comes back finds what was written, and the map's compare-and-swap decides between the two.
pub(super) const UNANSWERED: Duration = Duration::from_millis(300);
/// Between attempts while nobody answers, and between own writes of the map: at most ten a second.
const RETRY: Duration = Duration::from_millis(100);
/// Attempts to write over what others write meanwhile; then what is still wanted is asked for again.
const CONFLICTS: usize = 8;

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
    loop {
        shared.proposals.news.notified().await;
        sleep(GATHER).await;
        let proposals = shared.proposals.take();
        if proposals.is_empty() {
            continue;
        }
        let asked = Instant::now();
        update(&shared, &mut coordinators);
        if ask(&shared, &mut coordinators, &proposals).await {
            in_vain_since = None;
            continue;
        }
        let unanswered = in_vain_since.get_or_insert(asked).elapsed();
        let store = shared.options.map_folder.clone().filter(|_| unanswered >= UNANSWERED);
        match store {
            Some(folder) => write(&shared, folder, proposals).await,
            None => {
                shared.proposals.put_back(proposals);
                shared.proposals.news.notify_one();
            }
        }
        sleep(RETRY).await;
    }
}

/// One coordinator, with the connection to it.
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
}

/// Drops coordinators that are gone, and adds those that are new.
fn update(shared: &Shared, coordinators: &mut Vec<Coordinator>) {
    let now = shared.roster.now();
    coordinators.retain(|known| now.contains(&known.address));
    for address in now {
        if coordinators.iter().all(|known| known.address != address) {
            coordinators.push(Coordinator::new(&address, &shared.network));
        }
    }
}

/// Asks one coordinator after the other, the one that answered last first; whether one took the proposals.
async fn ask(shared: &Shared, coordinators: &mut [Coordinator], proposals: &[Proposal]) -> bool {
    let request = v1::ProposeMapRequest {
        cluster: identity(shared.options.cluster.0),
        member: Some(wire::member_id_to_proto(&shared.member)),
        proposals: proposals.iter().map(encode).collect(),
    };
    for at in 0..coordinators.len() {
        let Some(channel) = coordinators[at].channel.clone() else { continue };
        let mut client = CoordinatorServiceClient::new(channel);
        let reason = match timeout(DEADLINE, client.propose_map(request.clone())).await {
            Ok(Ok(_)) => {
                coordinators.swap(0, at);
                return true;
            }
            // Whoever refuses is there: the map is not for this worker to write.
            Ok(Err(status)) if !is_away(status.code()) => {
                tracing::warn!(coordinator = coordinators[at].address, reason = status.message(), "proposals refused");
                return true;
            }
            Ok(Err(status)) => status.message().to_owned(),
            Err(_) => "no answer in time".to_owned(),
        };
        tracing::debug!(coordinator = coordinators[at].address, reason, "proposals were not taken");
    }
    false
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

/// Writes what still fits into the map store, and takes the map that is there then.
async fn write(shared: &Arc<Shared>, folder: PathBuf, proposals: Vec<Proposal>) {
    let (cluster, count) = (shared.options.cluster, proposals.len());
    let written = tokio::task::spawn_blocking(move || compare_and_swap(&folder, cluster, &proposals)).await;
    match written {
        Ok(Ok(Some(map))) => {
            tracing::warn!(version = map.version, proposals = count, "no coordinator answers: wrote the map here");
            shared.read_map(map);
        }
        Ok(Ok(None)) => {}
        Ok(Err(error)) => tracing::warn!(%error, "no coordinator answers, and the map cannot be written"),
        Err(error) => tracing::error!(%error, "the map store panicked"),
    }
}

/// The map after those of the proposals that fit the entries that are there; `None`: there is no map.
fn compare_and_swap(folder: &Path, cluster: ClusterId, proposals: &[Proposal]) -> Result<Option<PartitionMap>, Error> {
    let store = FileStore::open(folder, cluster)?;
    let mut current = store.get()?;
    for _ in 0..CONFLICTS {
        let Some(map) = current else { return Ok(None) };
        let Some(next) = applied(&map, proposals) else { return Ok(Some(map)) };
        match store.compare_and_swap(Some(map.version), next) {
            Ok(map) => return Ok(Some(map)),
            Err(Error::Conflict { found, .. }) => current = found.map(|found| *found),
            Err(error) => return Err(error),
        }
    }
    Ok(current)
}

/// The map with every proposal whose entry is the one that it expects; `None`: none is.
fn applied(map: &PartitionMap, proposals: &[Proposal]) -> Option<PartitionMap> {
    let mut next = map.clone();
    let mut changed = false;
    for proposal in proposals {
        let Some(entry) = next.partitions.get_mut(proposal.partition.0 as usize) else { continue };
        if entry.expected() != proposal.expected {
            continue;
        }
        if let Ok(after) = entry.changed(&proposal.change) {
            changed |= *entry != after;
            *entry = after;
        }
    }
    changed.then_some(next)
}

/// The map as the store has it now.
pub(super) fn read_map(folder: &Path, cluster: ClusterId) -> Result<Option<PartitionMap>, Error> {
    FileStore::open(folder, cluster)?.get()
}

#[cfg(test)]
mod tests {
    use super::*;
    use engram_cluster::{Change, Entry};
    use engram_memory::{Incarnation, Member, Ordinal, StoreId};

    fn member(ordinal: u32) -> Member {
        Member { ordinal: Ordinal(ordinal), store: StoreId(u128::from(ordinal) + 9), incarnation: Incarnation(1) }
    }

    #[test]
    fn what_fits_the_entries_that_are_there_is_written_and_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        let cluster = ClusterId(5);
        let first = Entry::first(vec![member(0), member(1)]);
        let expected = first.expected();
        let map = PartitionMap { cluster, version: 0, partitions: vec![first; 3] };
        FileStore::open(folder.path(), cluster).unwrap().compare_and_swap(None, map).unwrap();
        let promote = |partition, to: u32| Proposal {
            partition: PartitionId(partition),
            expected,
            change: Change::Promote { primary: member(to), isr: vec![Ordinal(to)] },
        };
        // A stranger is no candidate.
        let written = compare_and_swap(folder.path(), cluster, &[promote(0, 1), promote(2, 7)]).unwrap().unwrap();
        assert_eq!(written.version, 2);
        assert_eq!(written.partitions[0].primary, Ordinal(1));
        assert_eq!(written.partitions[1..], [written.partitions[1].clone(), written.partitions[1].clone()]);
        let again = compare_and_swap(folder.path(), cluster, &[promote(0, 1)]).unwrap().unwrap();
        assert_eq!(again, written, "a proposal on an entry that has moved on writes nothing");
        assert_eq!(read_map(folder.path(), cluster).unwrap(), Some(written));
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
}
