//! The coordinators of this process: one per cluster, started when the cluster is first reconciled.

use parking_lot::{Mutex, MutexGuard};
use std::collections::{BTreeMap, BTreeSet};
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use engram_api::kubernetes_only::TopologySpread;
use engram_api::{DurabilityMode, Law};
use engram_coordinator::{Coordinator, Environment, Handle, Host, Options, Report, WorkerCertificate};
use engram_identity::{Keys, RELOAD_INTERVAL};
use engram_mapstore::{ChangeState, Goal, KubernetesStore, MapLocation, MapStore as _, Scale, with_causes};
use engram_memory::{ClusterId, Ordinal};
use kube::Client;
use serde_json::Value;

use crate::cluster::build::access_list;
use crate::cluster::coordination::SteerError;
use crate::cluster::coordination::goal::CoordinatorGoal;
use crate::cluster::observe::nodes::Nodes;
use crate::cluster::observe::observation::Observation;
use crate::cluster::plan::safety;
use crate::cluster::validate::ValidatedCluster;
use crate::context::Key;
use crate::pki::certificates::Certificates;
use crate::pki::provided_secret::{InvalidClusterId, parse_cluster_id};
use crate::pki::token_issuer::{Issuers, TokenAccess};
use crate::telemetry::metrics::Metrics;

/// Starts and stops the coordinators of clusters.
pub(crate) struct Coordinators {
    client: Client,
    host: Host,
    certificates: Arc<Certificates>,
    issuers: Arc<Issuers>,
    running: Mutex<BTreeMap<Key, RunningCoordinator>>,
    /// Map stores of clusters that are or are about to be coordinated.
    stores: Mutex<BTreeMap<Key, Arc<KubernetesStore>>>,
}

struct RunningCoordinator {
    /// Options that it was started with; the number of workers may have changed.
    options: Options,
    handle: Handle,
    /// The operator's identity in a cluster with TLS.
    own: Option<OperatorIdentity>,
}

/// Identity of this operator in a cluster with TLS.
#[derive(Clone)]
struct OperatorIdentity {
    keys: Arc<Keys>,
    /// Lifetime of its certificates.
    lifetime: Duration,
    /// Trust bundle of the cluster, if its workers' certificate is provided.
    provided_roots: Option<String>,
}

impl Coordinators {
    pub(crate) fn new(client: Client, host: Host, certificates: Arc<Certificates>, issuers: Arc<Issuers>) -> Self {
        Self { client, host, certificates, issuers, running: Mutex::default(), stores: Mutex::default() }
    }

    fn running(&self) -> MutexGuard<'_, BTreeMap<Key, RunningCoordinator>> {
        self.running.lock()
    }

    fn stores(&self) -> MutexGuard<'_, BTreeMap<Key, Arc<KubernetesStore>>> {
        self.stores.lock()
    }

    /// Handles a watch event of a map: wakes its coordinator, unless the change is its own.
    pub(crate) fn map_changed(&self, key: &Key, map: &Value) {
        let Some(store) = self.stores().get(key).map(Arc::clone) else { return };
        store.observe(map);
        if store.change_state() == ChangeState::Changed
            && let Some(running) = self.running().get(key)
        {
            running.handle.reconsider();
        }
    }

    /// Coordinates a cluster according to `goal`, or stops coordinating it for `None`. `provided_roots` is the trust bundle of a cluster
    /// with a provided certificate; otherwise the operator's CA is trusted.
    pub(crate) async fn coordinate(
        &self,
        key: &Key,
        cluster: &ValidatedCluster,
        observed: &Observation,
        goal: Option<&CoordinatorGoal>,
        nodes: &Nodes,
        provided_roots: Option<&str>,
    ) -> Result<(), SteerError> {
        let Some(goal) = goal else {
            self.stop(key);
            return Ok(());
        };
        let options = options(cluster, observed)?;
        let running = self.running().get(key).map(|running| (running.options.clone(), running.handle.clone()));
        let (started_with, handle) = match running {
            Some((old, handle)) if (Options { workers: options.workers, ..old.clone() }) == options => (old, handle),
            _ => {
                self.stop(key);
                let surroundings = surroundings(domains(cluster, observed, nodes), goal);
                let handle = self.start(key, cluster, options.clone(), surroundings, provided_roots).await?;
                (options, handle)
            }
        };
        let map_goal = Goal {
            workers: Some(Scale { to: goal.workers, from: started_with.workers }),
            draining: ordinals(&goal.evacuating),
        };
        // The worker's supervisor may have failed to report its death.
        for exit in observed.pods.iter().flat_map(|pod| &pod.worker_exits) {
            handle.report_exit(&exit.member, &exit.exit);
        }
        if let Some(RunningCoordinator { own: Some(own), .. }) = self.running().get_mut(key) {
            own.lifetime =
                cluster.certificates().map_or(own.lifetime, |requested| self.certificates.lifetime(requested));
            if own.provided_roots.as_deref() != provided_roots {
                own.provided_roots = provided_roots.map(str::to_owned);
                self.certificates.replace(&own.keys, own.lifetime, provided_roots);
            }
        }
        handle.update(map_goal, surroundings(domains(cluster, observed, nodes), goal));
        if cluster.certificates().is_some() {
            let (issuers, access) = (Arc::clone(&self.issuers), access_list(cluster));
            self.host.set_authorizer(
                started_with.cluster,
                Arc::new(TokenAccess { issuers, cluster: started_with.cluster, access }),
            );
        }
        Ok(())
    }

    async fn start(
        &self,
        key: &Key,
        cluster: &ValidatedCluster,
        options: Options,
        surroundings: Environment,
        provided_roots: Option<&str>,
    ) -> Result<Handle, SteerError> {
        let duplicate = self
            .running()
            .iter()
            .find(|(_, running)| running.options.cluster == options.cluster)
            .map(|(key, _)| key.clone());
        if let Some(duplicate) = duplicate {
            let id = options.cluster;
            return Err(SteerError::Coordinator(format!(
                "{duplicate} has the same cluster id {id}: one of the maps was copied"
            )));
        }
        let law = match cluster.spec.learning.law {
            Law::Linear => engram_memory::Law::Linear,
        };
        let runtime = tokio::runtime::Handle::current();
        let store =
            KubernetesStore::new(self.client.clone(), runtime, map_location(key, cluster), options.cluster, law);
        let store = Arc::new(store.watched());
        // Registered before the first read, so that no watch event is missed.
        self.stores().insert(key.clone(), Arc::clone(&store));
        let started_with = options.clone();
        let own = match cluster.certificates().map(|requested| self.certificates.lifetime(requested)) {
            Some(lifetime) => {
                let keys = self.certificates.keys(key, options.cluster, lifetime, provided_roots).await?;
                Some(OperatorIdentity { keys, lifetime, provided_roots: provided_roots.map(str::to_owned) })
            }
            None => None,
        };
        // Building reads the map, which blocks.
        let built = tokio::task::spawn_blocking(move || Coordinator::build(options, store)).await;
        let coordinator = built
            .map_err(|panic| SteerError::Coordinator(panic.to_string()))?
            .map_err(|error| SteerError::Coordinator(with_causes(&error)))?;
        let handle =
            self.host.add(coordinator.with_environment(surroundings), own.as_ref().map(|own| Arc::clone(&own.keys)));
        tracing::info!(cluster = %key, id = %started_with.cluster, "started coordinator");
        self.running().insert(key.clone(), RunningCoordinator { options: started_with, handle: handle.clone(), own });
        Ok(handle)
    }

    /// Returns the cluster id and the coordinator's report, if the cluster is coordinated.
    pub(crate) fn report(&self, key: &Key) -> Option<(ClusterId, Report)> {
        let running = self.running().get(key).map(|running| (running.options.cluster, running.handle.clone()))?;
        Some((running.0, running.1.report()))
    }

    /// Returns this operator's keys in a cluster with TLS.
    pub(crate) fn operator_keys(&self, key: &Key) -> Option<Arc<Keys>> {
        self.running().get(key).and_then(|running| running.own.as_ref().map(|own| Arc::clone(&own.keys)))
    }

    /// Returns the cluster with this id whose certificates this operator signs, and their lifetime.
    pub(crate) fn cluster_of_issuer(&self, id: ClusterId) -> Option<(Key, Duration)> {
        let running = self.running();
        let entry = running.iter().find(|(_, running)| running.options.cluster == id);
        let own = |running: &RunningCoordinator| {
            running.own.as_ref().filter(|own| own.provided_roots.is_none()).map(|own| own.lifetime)
        };
        entry.and_then(|(key, running)| Some((key.clone(), own(running)?)))
    }

    /// Renews this operator's own certificates when due, until `stop` completes.
    pub(crate) async fn renew(&self, metrics: &Metrics, stop: impl Future<Output = ()>) -> anyhow::Result<()> {
        let renewing = async {
            loop {
                let own = |(key, running): (&Key, &RunningCoordinator)| Some((key.clone(), running.own.clone()?));
                let all: Vec<_> = self.running().iter().filter_map(own).collect();
                for (_, own) in &all {
                    self.certificates.renew(&own.keys, own.lifetime, own.provided_roots.as_deref());
                }
                metrics
                    .set_certificate_expiries(all.into_iter().map(|(key, own)| (key, own.keys.expires_at())).collect());
                tokio::time::sleep(RELOAD_INTERVAL).await;
            }
        };
        tokio::select! {
            () = stop => Ok(()),
            () = renewing => Ok(()),
        }
    }

    /// Returns the certificate reports of a cluster's workers; `None` if it is not coordinated here.
    pub(crate) fn certificates(&self, key: &Key) -> Option<BTreeMap<u32, WorkerCertificate>> {
        let (_, report) = self.report(key)?;
        Some(report.certificates.into_iter().map(|(ordinal, report)| (ordinal.0, report)).collect())
    }

    /// Returns whether the certificate of a cluster's workers is provided.
    pub(crate) fn is_certificate_provided(&self, key: &Key) -> bool {
        self.running().get(key).and_then(|running| running.own.as_ref()).is_some_and(|own| own.provided_roots.is_some())
    }

    /// Returns the coordinated clusters of a scope.
    pub(crate) fn keys(&self, scope: Option<&str>) -> Vec<Key> {
        self.running().keys().filter(|key| scope.is_none_or(|scope| key.namespace == scope)).cloned().collect()
    }

    /// Stops the coordinator of a cluster, if any.
    pub(crate) fn stop(&self, key: &Key) {
        self.stores().remove(key);
        let ended = self.running().remove(key);
        if let Some(running) = ended {
            self.host.remove(running.options.cluster);
            tracing::info!(cluster = %key, "stopped coordinator");
        }
    }

    /// Stops the coordinators of a scope that are not in `present`.
    pub(crate) fn retain(&self, scope: Option<&str>, present: impl Fn(&Key) -> bool) -> Vec<Key> {
        let gone: Vec<Key> = self.running().keys().filter(|key| !key.stays(scope, &present)).cloned().collect();
        for key in &gone {
            self.stop(key);
        }
        // Including stores of coordinators that failed to start.
        self.stores().retain(|key, _| key.stays(scope, &present));
        gone
    }
}

fn options(cluster: &ValidatedCluster, observed: &Observation) -> Result<Options, InvalidClusterId> {
    let (spec, id) = (&cluster.spec, safety::cluster_id(cluster, observed));
    let id = parse_cluster_id(&id)?;
    let grace = Duration::from_millis(spec.restart_grace.as_millis());
    Ok(Options {
        replication_factor: spec.replication_factor,
        restart_grace: grace,
        keeps_all: spec.durability.mode == DurabilityMode::Sync,
        // Overrides go through the API server, which authorizes the caller.
        executes_orders: false,
        bootstraps: spec.bootstrap.is_some(),
        ..Options::new(id, &cluster.names.cluster, spec.partitions, spec.workers)
    })
}

/// Returns the location of the map, and whether it is deleted with the cluster.
fn map_location(key: &Key, cluster: &ValidatedCluster) -> MapLocation {
    let owner = cluster.is_data_deleted_with_it().then_some(cluster.uid.as_str());
    MapLocation::of_cluster(&key.namespace, &key.name, owner)
}

fn surroundings(domains: BTreeMap<Ordinal, String>, goal: &CoordinatorGoal) -> Environment {
    Environment { domains, relieved: ordinals(&goal.without_primaries), had_map: goal.had_map }
}

fn ordinals(of: &BTreeSet<u32>) -> BTreeSet<Ordinal> {
    of.iter().map(|&ordinal| Ordinal(ordinal)).collect()
}

/// Returns the failure domain of each worker: its node or zone.
fn domains(cluster: &ValidatedCluster, observed: &Observation, nodes: &Nodes) -> BTreeMap<Ordinal, String> {
    let spread = cluster.spec.scheduling.as_ref().and_then(|scheduling| scheduling.topology_spread);
    let by_zone = spread == Some(TopologySpread::Zone);
    let domain = |node: &String| if by_zone { nodes.zone(node) } else { None }.unwrap_or_else(|| node.clone());
    let pods = observed.pods.iter();
    pods.filter_map(|pod| Some((Ordinal(pod.ordinal), domain(pod.node.as_ref()?)))).collect()
}
