//! The nodes: which are lost and for how long, what devices they offer, which zone they are in.
//!
//! They are read now and then and not watched: their leases make them change all the time, and nothing here is urgent. How long a
//! node has been lost is counted from when this process saw it first, by its own clock.

use std::collections::{BTreeMap, BTreeSet};
use std::future::Future;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::Result;
use k8s_openapi::api::core::v1::Node;
use kube::api::ListParams;
use kube::{Api, Client};

use super::asking::{Error, ask};

/// How often nodes are looked at: a tenth of the shortest time after which a lost one matters.
const PERIOD: Duration = Duration::from_secs(10);
/// Nodes of one answer.
const PAGE: u32 = 500;

/// What is known of the nodes.
#[derive(Default)]
pub(super) struct Nodes {
    known: Mutex<Known>,
}

#[derive(Default)]
struct Known {
    /// `None`: never read, or not allowed to.
    nodes: Option<BTreeMap<String, Seen>>,
    /// Since when a node has been not ready, or unknown while a pod is said to be on it.
    lost: BTreeMap<String, Instant>,
}

struct Seen {
    ready: bool,
    zone: Option<String>,
    /// Resources of which it offers at least one.
    offers: BTreeSet<String>,
}

impl Nodes {
    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// For how many milliseconds which of these nodes have been lost.
    pub(super) fn lost<'a>(&self, names: impl Iterator<Item = &'a str>) -> BTreeMap<String, u64> {
        let mut known = self.known();
        let Known { nodes: Some(nodes), lost } = &mut *known else { return BTreeMap::new() };
        let mut found = BTreeMap::new();
        for name in names {
            if nodes.get(name).is_some_and(|node| node.ready) {
                continue;
            }
            let since = lost.entry(name.to_owned()).or_insert_with(Instant::now);
            found.insert(name.to_owned(), since.elapsed().as_millis() as u64);
        }
        found
    }

    /// Whether some node offers a resource; `None` where nodes cannot be read.
    pub(super) fn offer(&self, resource: &str) -> Option<bool> {
        let known = self.known();
        known.nodes.as_ref().map(|nodes| nodes.values().any(|node| node.offers.contains(resource)))
    }

    /// The zone that a node says it is in.
    pub(super) fn zone(&self, name: &str) -> Option<String> {
        self.known().nodes.as_ref()?.get(name)?.zone.clone()
    }

    fn take(&self, nodes: BTreeMap<String, Seen>) {
        let mut known = self.known();
        for (name, node) in &nodes {
            if node.ready {
                known.lost.remove(name);
            } else {
                known.lost.entry(name.clone()).or_insert_with(Instant::now);
            }
        }
        known.nodes = Some(nodes);
    }
}

/// Looks at the nodes until `stopped`. Without the right to read them it says so once, and goes on without.
pub(super) async fn follow(
    client: Client,
    nodes: std::sync::Arc<Nodes>,
    stopped: impl Future<Output = ()>,
) -> Result<()> {
    let api: Api<Node> = Api::all(client);
    let mut told = false;
    let look = async {
        loop {
            match read(&api).await {
                Ok(found) => {
                    nodes.take(found);
                    told = false;
                }
                Err(error) if !told => {
                    tracing::warn!(%error, "nodes cannot be read: no lost node is noticed, and gpu.mode Auto means Disabled");
                    told = true;
                }
                Err(_) => {}
            }
            tokio::time::sleep(PERIOD).await;
        }
    };
    tokio::select! {
        () = look => Ok(()),
        () = stopped => Ok(()),
    }
}

async fn read(api: &Api<Node>) -> Result<BTreeMap<String, Seen>, Error> {
    let mut parameters = ListParams::default().limit(PAGE);
    let mut found = BTreeMap::new();
    loop {
        let page = ask(|| "list nodes".into(), api.list(&parameters)).await?;
        found.extend(page.items.into_iter().map(|node| (node.metadata.name.clone().unwrap_or_default(), seen(&node))));
        match page.metadata.continue_.filter(|token| !token.is_empty()) {
            Some(token) => parameters = parameters.continue_token(&token),
            None => return Ok(found),
        }
    }
}

fn seen(node: &Node) -> Seen {
    let status = node.status.as_ref();
    let conditions = status.and_then(|status| status.conditions.as_ref());
    let allocatable = status.and_then(|status| status.allocatable.as_ref());
    let offered = allocatable.into_iter().flatten().filter(|(_, quantity)| !matches!(quantity.0.as_str(), "" | "0"));
    let labels = node.metadata.labels.as_ref();
    Seen {
        ready: conditions.is_some_and(|all| all.iter().any(|it| it.type_ == "Ready" && it.status == "True")),
        zone: labels.and_then(|labels| labels.get("topology.kubernetes.io/zone")).cloned(),
        offers: offered.map(|(resource, _)| resource.clone()).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_is_lost_from_when_it_was_seen_so_until_it_is_ready_again() {
        let nodes = Nodes::default();
        let node = |ready| Seen { ready, zone: None, offers: BTreeSet::from(["nvidia.com/gpu".into()]) };
        assert_eq!(
            (nodes.lost(["a"].into_iter()), nodes.offer("nvidia.com/gpu")),
            (BTreeMap::new(), None),
            "not read yet"
        );
        nodes.take(BTreeMap::from([("a".into(), node(false)), ("b".into(), node(true))]));
        let lost = nodes.lost(["a", "b", "gone"].into_iter());
        assert_eq!(lost.keys().collect::<Vec<_>>(), ["a", "gone"]);
        nodes.take(BTreeMap::from([("a".into(), node(true)), ("gone".into(), node(true))]));
        assert_eq!(nodes.lost(["a", "gone"].into_iter()), BTreeMap::new());
        assert_eq!((nodes.offer("nvidia.com/gpu"), nodes.offer("amd.com/gpu")), (Some(true), Some(false)));
    }
}
