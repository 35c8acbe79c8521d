//! The coordinators of this process: one for each cluster, made when the cluster is first seen.

use std::collections::{BTreeMap, BTreeSet};
use std::future::Future;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use engram_api::kubernetes_only::{RetainPolicy, TopologySpread};
use engram_api::{DurabilityMode, Law};
use engram_coordinator::{Certified, Coordinator, Handle, Host, Options, Report, Surroundings};
use engram_identity::{Keys, LOOK};
use engram_mapstore::{Goal, KubernetesStore, MapStore as _, News, Place, Scale, with_causes};
use engram_memory::{ClusterId, Ordinal};
use kube::Client;
use serde_json::Value;

use super::Key;
use super::asking::Error;
use super::certificates::Certificates;
use super::issuer::{Issuers, Tokens};
use super::metrics::Metrics;
use super::nodes::Nodes;
use crate::build::access_list;
use crate::evidence;
use crate::observed::Observed;
use crate::steer::Steering;
use crate::validate::ValidatedCluster;

/// Ends coordinators of clusters that are gone, and keeps one for each that is there.
pub(super) struct Coordinators {
    client: Client,
    host: Host,
    certificates: Arc<Certificates>,
    issuers: Arc<Issuers>,
    kept: Mutex<BTreeMap<Key, Kept>>,
    /// Where the maps of clusters are that are coordinated, or will be in a moment.
    stores: Mutex<BTreeMap<Key, Arc<KubernetesStore>>>,
}

struct Kept {
    /// What it was made from, but for the number of workers, which may change.
    options: Options,
    handle: Handle,
    /// Of a cluster with certificates: this operator's own.
    own: Option<Own>,
}

/// This operator in a cluster with certificates.
#[derive(Clone)]
struct Own {
    keys: Arc<Keys>,
    /// How long each is good.
    lifetime: Duration,
    /// Whom the cluster's processes believe, where somebody else signs for its workers.
    given: Option<String>,
}

impl Coordinators {
    pub(super) fn new(client: Client, host: Host, certificates: Arc<Certificates>, issuers: Arc<Issuers>) -> Self {
        Self { client, host, certificates, issuers, kept: Mutex::default(), stores: Mutex::default() }
    }

    fn kept(&self) -> MutexGuard<'_, BTreeMap<Key, Kept>> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn stores(&self) -> MutexGuard<'_, BTreeMap<Key, Arc<KubernetesStore>>> {
        self.stores.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A watch has this map of a cluster, or had it last: its coordinator takes or reads it, unless it is its own doing.
    pub(super) fn map_changed(&self, key: &Key, map: &Value) {
        let Some(store) = self.stores().get(key).map(Arc::clone) else { return };
        store.tell(map);
        if store.news() == News::Changed
            && let Some(kept) = self.kept().get(key)
        {
            kept.handle.look();
        }
    }

    /// Coordinates a cluster as `steering` says; not at all where it says nothing. Its processes believe whom is `given`; where that is nobody,
    /// this operator's authority.
    pub(super) async fn tend(
        &self,
        key: &Key,
        cluster: &ValidatedCluster,
        observed: &Observed,
        steering: Option<&Steering>,
        nodes: &Nodes,
        given: Option<&str>,
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
                let surroundings = surroundings(domains(cluster, observed, nodes), steering);
                let handle = self.begin(key, cluster, options.clone(), surroundings, given).await?;
                (options, handle)
            }
        };
        let goal = Goal {
            workers: Some(Scale { to: steering.workers, from: made_from.workers }),
            draining: ordinals(&steering.emptied),
        };
        // Its supervisor may have been killed with it, or found nobody to tell.
        for ended in observed.pods.iter().flat_map(|pod| &pod.ended) {
            handle.ended(&ended.member, &ended.exit);
        }
        if let Some(Kept { own: Some(own), .. }) = self.kept().get_mut(key) {
            own.lifetime = cluster.certificates().map_or(own.lifetime, |asked| self.certificates.lifetime(asked));
            if own.given.as_deref() != given {
                own.given = given.map(str::to_owned);
                self.certificates.replace(&own.keys, own.lifetime, given);
            }
        }
        handle.steer(goal, surroundings(domains(cluster, observed, nodes), steering));
        if cluster.certificates().is_some() {
            let (issuers, access) = (Arc::clone(&self.issuers), access_list(cluster));
            self.host.take_tokens(made_from.cluster, Arc::new(Tokens { issuers, cluster: made_from.cluster, access }));
        }
        Ok(())
    }

    async fn begin(
        &self,
        key: &Key,
        cluster: &ValidatedCluster,
        options: Options,
        surroundings: Surroundings,
        given: Option<&str>,
    ) -> Result<Handle, Error> {
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
        let store = Arc::new(store.watched());
        // It is told of changes from before it is read.
        self.stores().insert(key.clone(), Arc::clone(&store));
        let made_from = options.clone();
        let own = match cluster.certificates().map(|asked| self.certificates.lifetime(asked)) {
            Some(lifetime) => {
                let keys = self.certificates.keys(key, options.cluster, lifetime, given).await?;
                Some(Own { keys, lifetime, given: given.map(str::to_owned) })
            }
            None => None,
        };
        // The store waits for the API server.
        let built = tokio::task::spawn_blocking(move || Coordinator::build(options, store)).await;
        let coordinator = built
            .map_err(|panic| Error::Coordinator(panic.to_string()))?
            .map_err(|error| Error::Coordinator(with_causes(&error)))?;
        let handle = self.host.add(coordinator.surrounded(surroundings), own.as_ref().map(|own| Arc::clone(&own.keys)));
        tracing::info!(cluster = %key, id = %made_from.cluster, "coordinating");
        self.kept().insert(key.clone(), Kept { options: made_from, handle: handle.clone(), own });
        Ok(handle)
    }

    /// The identity of a cluster, and what its coordinator knows, if it is coordinated.
    pub(super) fn report(&self, key: &Key) -> Option<(ClusterId, Report)> {
        let kept = self.kept().get(key).map(|kept| (kept.options.cluster, kept.handle.clone()))?;
        Some((kept.0, kept.1.report()))
    }

    /// This operator's keys in a cluster with certificates.
    pub(super) fn own_keys(&self, key: &Key) -> Option<Arc<Keys>> {
        self.kept().get(key).and_then(|kept| kept.own.as_ref().map(|own| Arc::clone(&own.keys)))
    }

    /// The cluster of this identity that gets its certificates here, and how long one is good.
    pub(super) fn certified(&self, id: ClusterId) -> Option<(Key, Duration)> {
        let kept = self.kept();
        let found = kept.iter().find(|(_, kept)| kept.options.cluster == id);
        let own = |kept: &Kept| kept.own.as_ref().filter(|own| own.given.is_none()).map(|own| own.lifetime);
        found.and_then(|(key, kept)| Some((key.clone(), own(kept)?)))
    }

    /// Renews this operator's own certificates, each when it is due, until `stop` completes.
    pub(super) async fn renew(&self, metrics: &Metrics, stop: impl Future<Output = ()>) -> anyhow::Result<()> {
        let renewing = async {
            loop {
                let own = |(key, kept): (&Key, &Kept)| Some((key.clone(), kept.own.clone()?));
                let all: Vec<_> = self.kept().iter().filter_map(own).collect();
                for (_, own) in &all {
                    self.certificates.renew(&own.keys, own.lifetime, own.given.as_deref());
                }
                metrics.certified(all.into_iter().map(|(key, own)| (key, own.keys.until())).collect());
                tokio::time::sleep(LOOK).await;
            }
        };
        tokio::select! {
            () = stop => Ok(()),
            () = renewing => Ok(()),
        }
    }

    /// Whom the workers of a cluster say that they believe, and who signed for them; `None` where it is not coordinated here.
    pub(super) fn certificates(&self, key: &Key) -> Option<BTreeMap<u32, Certified>> {
        let (_, report) = self.report(key)?;
        Some(report.certified.into_iter().map(|(ordinal, said)| (ordinal.0, said)).collect())
    }

    /// Whether somebody else signs for the workers of a cluster.
    pub(super) fn certified_by_others(&self, key: &Key) -> bool {
        self.kept().get(key).and_then(|kept| kept.own.as_ref()).is_some_and(|own| own.given.is_some())
    }

    /// The clusters of a scope that are coordinated.
    pub(super) fn keys(&self, scope: Option<&str>) -> Vec<Key> {
        self.kept().keys().filter(|key| scope.is_none_or(|scope| key.namespace == scope)).cloned().collect()
    }

    /// Ends the coordinator of a cluster, if there is one.
    pub(super) fn end(&self, key: &Key) {
        self.stores().remove(key);
        let ended = self.kept().remove(key);
        if let Some(kept) = ended {
            self.host.remove(kept.options.cluster);
            tracing::info!(cluster = %key, "no longer coordinating");
        }
    }

    /// Ends those of a scope that are not in `present`.
    pub(super) fn end_all_but(&self, scope: Option<&str>, present: impl Fn(&Key) -> bool) -> Vec<Key> {
        let gone: Vec<Key> = self.kept().keys().filter(|key| !key.stays(scope, &present)).cloned().collect();
        for key in &gone {
            self.end(key);
        }
        // And of those that never came to be coordinated.
        self.stores().retain(|key, _| key.stays(scope, &present));
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
        // Whoever orders has rights of their own, and the API server looks at those.
        carries_out_orders: false,
        bootstraps: spec.bootstrap.is_some(),
        ..Options::new(id, &cluster.names.cluster, spec.partitions, spec.workers)
    })
}

/// Where the map is, and whether it goes with the cluster.
fn place(key: &Key, cluster: &ValidatedCluster) -> Place {
    let retained =
        cluster.spec.storage.as_ref().and_then(|storage| storage.retain_policy) != Some(RetainPolicy::Delete);
    // Data in the pods ends with them, and so does the map.
    let goes_along = !retained || cluster.is_ephemeral();
    Place::of_cluster(&key.namespace, &key.name, goes_along.then_some(&cluster.uid))
}

fn surroundings(domains: BTreeMap<Ordinal, String>, steering: &Steering) -> Surroundings {
    Surroundings { domains, relieved: ordinals(&steering.relieved), had_map: steering.had_map }
}

fn ordinals(of: &BTreeSet<u32>) -> BTreeSet<Ordinal> {
    of.iter().map(|&ordinal| Ordinal(ordinal)).collect()
}

/// What fails together with each worker: its node, or the zone of it.
fn domains(cluster: &ValidatedCluster, observed: &Observed, nodes: &Nodes) -> BTreeMap<Ordinal, String> {
    let spread = cluster.spec.scheduling.as_ref().and_then(|scheduling| scheduling.topology_spread);
    let by_zone = spread == Some(TopologySpread::Zone);
    let domain = |node: &String| if by_zone { nodes.zone(node) } else { None }.unwrap_or_else(|| node.clone());
    let pods = observed.pods.iter();
    pods.filter_map(|pod| Some((Ordinal(pod.ordinal), domain(pod.node.as_ref()?)))).collect()
}
