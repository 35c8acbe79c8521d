//! The coordinators of this process: one for each cluster, made when the cluster is first seen.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use engram_api::kubernetes_only::{RetainPolicy, TopologySpread};
use engram_api::{DurabilityMode, Law};
use engram_coordinator::{Coordinator, Handle, Host, Options, Report, Surroundings};
use engram_mapstore::{Goal, KubernetesStore, Place, Scale, with_causes};
use engram_memory::{ClusterId, Ordinal};
use kube::Client;
use serde_json::{Value, json};

use super::Key;
use super::asking::Error;
use super::nodes::Nodes;
use crate::evidence;
use crate::observed::Observed;
use crate::steer::Steering;
use crate::validate::ValidatedCluster;

/// Ends coordinators of clusters that are gone, and keeps one for each that is there.
pub(super) struct Coordinators {
    client: Client,
    host: Host,
    kept: Mutex<BTreeMap<Key, Kept>>,
}

struct Kept {
    /// What it was made from, but for the number of workers, which may change.
    options: Options,
    handle: Handle,
}

impl Coordinators {
    pub(super) fn new(client: Client, host: Host) -> Self {
        Self { client, host, kept: Mutex::default() }
    }

    fn kept(&self) -> MutexGuard<'_, BTreeMap<Key, Kept>> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Coordinates a cluster as `steering` says; not at all where it says nothing.
    pub(super) async fn tend(
        &self,
        key: &Key,
        cluster: &ValidatedCluster,
        observed: &Observed,
        steering: Option<&Steering>,
        nodes: &Nodes,
    ) -> Result<(), Error> {
        let Some(steering) = steering else {
            self.end(key);
            return Ok(());
        };
        let options = options(cluster, observed)?;
        let kept = self.kept().get(key).map(|kept| (kept.options.clone(), kept.handle.clone()));
        let (made_from, handle) = match kept {
            Some((old, handle)) if (Options { workers: options.workers, ..old.clone() }) == options => (old, handle),
            _ => {
                self.end(key);
                let handle = self.begin(key, cluster, options.clone()).await?;
                (options, handle)
            }
        };
        let ordinals = |of: &std::collections::BTreeSet<u32>| of.iter().map(|&ordinal| Ordinal(ordinal)).collect();
        let goal = Goal {
            workers: Some(Scale { to: steering.workers, from: made_from.workers }),
            draining: ordinals(&steering.emptied),
        };
        // Its supervisor may have been killed with it, or found nobody to tell.
        for ended in observed.pods.iter().flat_map(|pod| &pod.ended) {
            handle.ended(&ended.member, &ended.exit);
        }
        let domains = domains(cluster, observed, nodes);
        handle.steer(goal, Surroundings { domains, relieved: ordinals(&steering.relieved) });
        Ok(())
    }

    async fn begin(&self, key: &Key, cluster: &ValidatedCluster, options: Options) -> Result<Handle, Error> {
        let twin =
            self.kept().iter().find(|(_, kept)| kept.options.cluster == options.cluster).map(|(key, _)| key.clone());
        if let Some(twin) = twin {
            let id = options.cluster;
            return Err(Error::Coordinator(format!("{twin} has the same cluster id {id}: one of the maps is a copy")));
        }
        let law = match cluster.spec.learning.law {
            Law::Linear => engram_memory::Law::Linear,
        };
        let runtime = tokio::runtime::Handle::current();
        let store = KubernetesStore::new(self.client.clone(), runtime, place(key, cluster), options.cluster, law);
        let made_from = options.clone();
        // The store waits for the API server.
        let built = tokio::task::spawn_blocking(move || Coordinator::build(options, Arc::new(store))).await;
        let coordinator = built
            .map_err(|panic| Error::Coordinator(panic.to_string()))?
            .map_err(|error| Error::Coordinator(with_causes(&error)))?;
        let handle = self.host.add(coordinator);
        tracing::info!(cluster = %key, id = %made_from.cluster, "coordinating");
        self.kept().insert(key.clone(), Kept { options: made_from, handle: handle.clone() });
        Ok(handle)
    }

    /// The identity of a cluster, and what its coordinator knows, if it is coordinated.
    pub(super) fn report(&self, key: &Key) -> Option<(ClusterId, Report)> {
        let kept = self.kept().get(key).map(|kept| (kept.options.cluster, kept.handle.clone()))?;
        Some((kept.0, kept.1.report()))
    }

    /// The clusters of a scope that are coordinated.
    pub(super) fn keys(&self, scope: Option<&str>) -> Vec<Key> {
        self.kept().keys().filter(|key| scope.is_none_or(|scope| key.namespace == scope)).cloned().collect()
    }

    /// Ends the coordinator of a cluster, if there is one.
    pub(super) fn end(&self, key: &Key) {
        let ended = self.kept().remove(key);
        if let Some(kept) = ended {
            self.host.remove(kept.options.cluster);
            tracing::info!(cluster = %key, "no longer coordinating");
        }
    }

    /// Ends those of a scope that are not in `present`.
    pub(super) fn end_all_but(&self, scope: Option<&str>, present: impl Fn(&Key) -> bool) -> Vec<Key> {
        let gone: Vec<Key> = self
            .kept()
            .keys()
            .filter(|key| scope.is_none_or(|scope| key.namespace == scope) && !present(key))
            .cloned()
            .collect();
        for key in &gone {
            self.end(key);
        }
        gone
    }
}

fn options(cluster: &ValidatedCluster, observed: &Observed) -> Result<Options, Error> {
    let (spec, id) = (&cluster.spec, evidence::cluster_id(cluster, observed));
    let id: ClusterId =
        id.parse().map_err(|_| Error::Coordinator(format!("cluster id {id:?} is not 32 hexadecimal digits")))?;
    let grace = Duration::from_millis(spec.restart_grace.as_millis());
    Ok(Options {
        replication_factor: spec.replication_factor,
        restart_grace: grace,
        keeps_all: spec.durability.mode == DurabilityMode::Sync,
        ..Options::new(id, &cluster.names.cluster, spec.partitions, spec.workers)
    })
}

/// Where the map is, and whether it goes with the cluster.
fn place(key: &Key, cluster: &ValidatedCluster) -> Place {
    let retained =
        cluster.spec.storage.as_ref().and_then(|storage| storage.retain_policy) != Some(RetainPolicy::Delete);
    let owner = json!({
        "apiVersion": engram_api::API_VERSION, "kind": "LearnerCluster", "name": key.name, "uid": cluster.uid,
        "controller": true, "blockOwnerDeletion": true,
    });
    let labels = json!({
        "app.kubernetes.io/name": "engram",
        "app.kubernetes.io/instance": key.name,
        "app.kubernetes.io/managed-by": "engram-operator",
        crate::names::CLUSTER_LABEL: key.name,
    });
    let Value::Object(labels) = labels else { unreachable!("it is written as an object") };
    // Data in the pods ends with them, and so does the map.
    let goes_along = !retained || cluster.is_ephemeral();
    let owners = if goes_along { vec![owner] } else { Vec::new() };
    Place { namespace: key.namespace.clone(), name: key.name.clone(), labels, owners }
}

/// What fails together with each worker: its node, or the zone of it.
fn domains(cluster: &ValidatedCluster, observed: &Observed, nodes: &Nodes) -> BTreeMap<Ordinal, String> {
    let spread = cluster.spec.scheduling.as_ref().and_then(|scheduling| scheduling.topology_spread);
    let by_zone = spread == Some(TopologySpread::Zone);
    let domain = |node: &String| if by_zone { nodes.zone(node) } else { None }.unwrap_or_else(|| node.clone());
    let pods = observed.pods.iter();
    pods.filter_map(|pod| Some((Ordinal(pod.ordinal), domain(pod.node.as_ref()?)))).collect()
}
