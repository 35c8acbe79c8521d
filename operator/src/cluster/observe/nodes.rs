//! State of nodes: readiness, resources, zones.
//!
//! Nodes are polled rather than watched: their status changes constantly, and nothing here is urgent. The time for which a node has been
//! lost is measured by this process's clock, from its first observation.

use parking_lot::{Mutex, MutexGuard};
use std::collections::{BTreeMap, BTreeSet};
use std::future::Future;
use std::time::{Duration, Instant};

use anyhow::Result;
use k8s_openapi::api::core::v1::Node;
use kube::api::ListParams;
use kube::{Api, Client};

use crate::kube::api_request::{RequestError, request};

/// Polling interval: a tenth of the shortest time after which a lost node matters.
const PERIOD: Duration = Duration::from_secs(10);
/// Page size of a list request.
const PAGE: u32 = 500;

/// Cached state of the nodes.
#[derive(Default)]
pub(crate) struct Nodes {
    states: Mutex<NodeStates>,
}

#[derive(Default)]
struct NodeStates {
    /// `None` if nodes were never read, or must not be.
    nodes: Option<BTreeMap<String, NodeState>>,
    /// Since when a node has been not ready, or missing while a pod is assigned to it.
    lost: BTreeMap<String, Instant>,
}

struct NodeState {
    ready: bool,
    zone: Option<String>,
    /// Resources with at least one allocatable unit.
    offers: BTreeSet<String>,
}

impl Nodes {
    fn state(&self) -> MutexGuard<'_, NodeStates> {
        self.states.lock()
    }

    /// Returns the lost ones of these nodes, with the milliseconds for which they have been lost.
    pub(crate) fn lost<'a>(&self, names: impl Iterator<Item = &'a str>) -> BTreeMap<String, u64> {
        let mut states = self.state();
        let NodeStates { nodes: Some(nodes), lost } = &mut *states else { return BTreeMap::new() };
        let mut result = BTreeMap::new();
        for name in names {
            if nodes.get(name).is_some_and(|node| node.ready) {
                continue;
            }
            let since = lost.entry(name.to_owned()).or_insert_with(Instant::now);
            result.insert(name.to_owned(), since.elapsed().as_millis() as u64);
        }
        result
    }

    /// Returns whether some node offers a resource; `None` if nodes cannot be read.
    pub(crate) fn offer(&self, resource: &str) -> Option<bool> {
        let states = self.state();
        states.nodes.as_ref().map(|nodes| nodes.values().any(|node| node.offers.contains(resource)))
    }

    /// Returns the zone of a node.
    pub(crate) fn zone(&self, name: &str) -> Option<String> {
        self.state().nodes.as_ref()?.get(name)?.zone.clone()
    }

    fn set(&self, nodes: BTreeMap<String, NodeState>) {
        let mut states = self.state();
        for (name, node) in &nodes {
            if node.ready {
                states.lost.remove(name);
            } else {
                states.lost.entry(name.clone()).or_insert_with(Instant::now);
            }
        }
        states.nodes = Some(nodes);
    }
}

/// Polls the nodes until `stopped`. A failure is logged once until the next success.
pub(crate) async fn follow(
    client: Client,
    nodes: std::sync::Arc<Nodes>,
    stopped: impl Future<Output = ()>,
) -> Result<()> {
    let api: Api<Node> = Api::all(client);
    let mut is_failure_logged = false;
    let poll = async {
        loop {
            match read(&api).await {
                Ok(result) => {
                    nodes.set(result);
                    is_failure_logged = false;
                }
                Err(error) if !is_failure_logged => {
                    tracing::warn!(%error, "failed to list nodes: lost nodes are not detected, and gpu.mode Auto means Disabled");
                    is_failure_logged = true;
                }
                Err(_) => {}
            }
            tokio::time::sleep(PERIOD).await;
        }
    };
    tokio::select! {
        () = poll => Ok(()),
        () = stopped => Ok(()),
    }
}

async fn read(api: &Api<Node>) -> Result<BTreeMap<String, NodeState>, RequestError> {
    let mut parameters = ListParams::default().limit(PAGE);
    let mut result = BTreeMap::new();
    loop {
        let page = request(|| "list nodes".into(), api.list(&parameters)).await?;
        result.extend(
            page.items.into_iter().map(|node| (node.metadata.name.clone().unwrap_or_default(), node_state(&node))),
        );
        match page.metadata.continue_.filter(|token| !token.is_empty()) {
            Some(token) => parameters = parameters.continue_token(&token),
            None => return Ok(result),
        }
    }
}

fn node_state(node: &Node) -> NodeState {
    let status = node.status.as_ref();
    let conditions = status.and_then(|status| status.conditions.as_ref());
    let allocatable = status.and_then(|status| status.allocatable.as_ref());
    let offered = allocatable.into_iter().flatten().filter(|(_, quantity)| !matches!(quantity.0.as_str(), "" | "0"));
    let labels = node.metadata.labels.as_ref();
    NodeState {
        ready: conditions.is_some_and(|all| all.iter().any(|it| it.type_ == "Ready" && it.status == "True")),
        zone: labels.and_then(|labels| labels.get("topology.kubernetes.io/zone")).cloned(),
        offers: offered.map(|(resource, _)| resource.clone()).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_is_lost_from_its_first_observation_until_it_is_ready() {
        let nodes = Nodes::default();
        let node = |ready| NodeState { ready, zone: None, offers: BTreeSet::from(["nvidia.com/gpu".into()]) };
        assert_eq!(
            (nodes.lost(["a"].into_iter()), nodes.offer("nvidia.com/gpu")),
            (BTreeMap::new(), None),
            "not read yet"
        );
        nodes.set(BTreeMap::from([("a".into(), node(false)), ("b".into(), node(true))]));
        let lost = nodes.lost(["a", "b", "gone"].into_iter());
        assert_eq!(lost.keys().collect::<Vec<_>>(), ["a", "gone"]);
        nodes.set(BTreeMap::from([("a".into(), node(true)), ("gone".into(), node(true))]));
        assert_eq!(nodes.lost(["a", "gone"].into_iter()), BTreeMap::new());
        assert_eq!((nodes.offer("nvidia.com/gpu"), nodes.offer("amd.com/gpu")), (Some(true), Some(false)));
    }
}
