//! Several coordinators in one process behind one listener: every message names its cluster, and every TLS connection
//! does too, so that it is served with the keys of that cluster.

use crate::accept;
use crate::environment::Environment;
use crate::rpc::{self, Access, Endpoint, Endpoints, TokenAuthorizer};
use crate::state::{BootstrapProgress, GpuFault, WorkerCertificate};
use crate::{Coordinator, Error, KEEPALIVE, Shared, run_failure_detector, writer};
use engram_cluster::PartitionMap;
use engram_identity::{Keys, Refusals, accept_for_clusters};
use engram_mapstore::Goal;
use engram_memory::{ClusterId, Member, Ordinal};
use futures::future::BoxFuture;
use parking_lot::RwLock;
use std::collections::BTreeMap;
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::task::AbortHandle;
use tonic::Status;
use tonic::service::Routes;

/// How long pending proposals may take to be written at shutdown.
const FINISH_TIMEOUT: Duration = Duration::from_secs(1);
/// How long the last views may take to reach the workers. No notification says when they have: the server does not, and the heartbeats
/// that do would take longer. A worker that misses its view receives it from the next coordinator.
const FLUSH_DELAY: Duration = Duration::from_millis(50);

/// The coordinators of a process.
#[derive(Clone, Default)]
pub struct Host {
    clusters: Arc<RwLock<BTreeMap<ClusterId, HostedCluster>>>,
    refusals: Arc<Refusals>,
    refused_connections: Arc<AtomicU64>,
}

struct HostedCluster {
    endpoint: Endpoint,
    tasks: [AbortHandle; 2],
}

impl Drop for HostedCluster {
    fn drop(&mut self) {
        for task in &self.tasks {
            task.abort();
        }
        self.endpoint.shared().ended.send_replace(true);
    }
}

/// Handle to a hosted coordinator.
#[derive(Clone)]
pub struct Handle {
    shared: Arc<Shared>,
}

/// State of a coordinator.
#[derive(Debug, Clone)]
pub struct Report {
    /// Current map.
    pub map: Option<Arc<PartitionMap>>,
    /// Why the map is lost, if it is.
    pub lost: Option<String>,
    /// Live workers with their client `host:port`.
    pub alive: Vec<(Ordinal, String)>,
    /// What keeps the cluster from serving everything with all its replicas.
    pub conditions: Vec<String>,
    /// Live workers that run without a GPU that they should use.
    pub gpu_faults: BTreeMap<Ordinal, GpuFault>,
    /// Reads and writes of partitions that each live worker has served since its process started.
    pub operations: BTreeMap<Ordinal, u64>,
    /// Certificates of the live workers.
    pub certificates: BTreeMap<Ordinal, WorkerCertificate>,
    /// Progress of a bootstrap from a snapshot, while there is no map.
    pub bootstrapping: Option<BootstrapProgress>,
}

impl Handle {
    /// Updates the desired state, and what is known about the workers from outside.
    pub fn update(&self, goal: Goal, surroundings: Environment) {
        let mut state = self.shared.state();
        let changed = *state.goal() != goal;
        state.set_goal(goal);
        let changed = state.set_environment(surroundings) || changed;
        drop(state);
        if changed {
            self.shared.reconsider.notify_one();
        }
    }

    /// Reconsiders the map, because its store has [news](engram_mapstore::MapStore::news).
    pub fn reconsider(&self) {
        self.shared.reconsider.notify_one();
    }

    /// Reports that this exact process has exited: proof of death. It has no effect if the death is already known or a
    /// later process has replaced it.
    pub fn report_exit(&self, member: &Member, exit: &str) {
        let now_ms = self.shared.now_ms();
        let changed = self.shared.state().ended(member, now_ms);
        if changed {
            tracing::warn!(worker = %member, exit, "worker died");
            self.shared.reconsider.notify_one();
            self.shared.publish();
        }
    }

    /// Returns the current state.
    pub fn report(&self) -> Report {
        let state = self.shared.state();
        Report {
            map: state.map().cloned().map(Arc::new),
            lost: state.lost().map(str::to_owned),
            alive: state.living().map(|worker| (worker.member.ordinal, worker.addresses.client.clone())).collect(),
            conditions: state.conditions().to_vec(),
            gpu_faults: state
                .living()
                .filter_map(|worker| Some((worker.member.ordinal, worker.report.gpu_fault.clone()?)))
                .collect(),
            operations: state.living().map(|worker| (worker.member.ordinal, worker.report.operations)).collect(),
            certificates: state
                .living()
                .filter_map(|worker| Some((worker.member.ordinal, worker.report.certificate.clone()?)))
                .collect(),
            bootstrapping: state.bootstrap_progress(&self.shared.options),
        }
    }
}

impl Host {
    /// Starts to coordinate a cluster, replacing its previous coordinator if there is one. With `keys` every process must present
    /// a certificate.
    pub fn add(&self, coordinator: Coordinator, keys: Option<Arc<Keys>>) -> Handle {
        let shared = coordinator.shared;
        let tasks = [
            tokio::spawn(writer::run(Arc::clone(&shared))).abort_handle(),
            tokio::spawn(run_failure_detector(Arc::clone(&shared))).abort_handle(),
        ];
        let endpoint = Endpoint::new(Arc::clone(&shared), Access::new(keys));
        let hosted = HostedCluster { endpoint, tasks };
        self.write().insert(shared.options.cluster, hosted);
        Handle { shared }
    }

    /// Accepts tokens instead of certificates of a cluster, for read-only calls.
    pub fn set_authorizer(&self, cluster: ClusterId, accounts: Arc<dyn TokenAuthorizer>) {
        if let Some(hosted) = self.write().get_mut(&cluster) {
            hosted.endpoint.access_mut().set_authorizer(accounts);
        }
    }

    /// Stops the coordinator of a cluster: its workers continue with their current map.
    pub fn remove(&self, cluster: ClusterId) {
        self.write().remove(&cluster);
    }

    /// Returns the keys of a hosted cluster that has certificates.
    pub fn keys(&self, cluster: ClusterId) -> Option<Arc<Keys>> {
        let clusters = self.clusters.read();
        clusters.get(&cluster).and_then(|hosted| hosted.endpoint.access().keys().cloned())
    }

    /// Counters of rejected connections. The keys of the hosted clusters count separately, unless they were created
    /// with these.
    pub const fn refusals(&self) -> &Arc<Refusals> {
        &self.refusals
    }

    /// Counter of connections refused because too few file descriptors were free.
    pub const fn refused_connections(&self) -> &Arc<AtomicU64> {
        &self.refused_connections
    }

    /// Serves on `listener` until `shutdown` completes.
    ///
    /// # Errors
    /// The listener fails.
    pub fn run<'a>(
        self,
        listener: TcpListener,
        shutdown: impl Future<Output = ()> + Send + 'a,
    ) -> BoxFuture<'a, Result<(), Error>> {
        self.run_with(listener, Routes::default(), shutdown)
    }

    /// Serves, and also `others` on the same listener: for plaintext callers and callers without a certificate, too.
    ///
    /// # Errors
    /// The listener fails.
    pub fn run_with<'a>(
        self,
        listener: TcpListener,
        others: Routes,
        shutdown: impl Future<Output = ()> + Send + 'a,
    ) -> BoxFuture<'a, Result<(), Error>> {
        self.run_until(listener, others, Box::pin(shutdown))
    }

    /// Not generic, like [`Coordinator::run`].
    fn run_until(
        self,
        listener: TcpListener,
        others: Routes,
        shutdown: BoxFuture<'_, ()>,
    ) -> BoxFuture<'_, Result<(), Error>> {
        Box::pin(self.serve(listener, others, shutdown))
    }

    async fn serve(self, listener: TcpListener, others: Routes, shutdown: BoxFuture<'_, ()>) -> Result<(), Error> {
        let (host, lookup) = (self.clone(), self.clone());
        let refusals = Arc::clone(&self.refusals);
        let incoming = accept::incoming(listener, Arc::clone(&self.refused_connections));
        let incoming = accept_for_clusters(incoming, move |cluster| lookup.keys(cluster), refusals);
        let serving = tonic::transport::Server::builder()
            .http2_keepalive_interval(Some(KEEPALIVE))
            .add_routes(others)
            .add_service(rpc::server(Endpoints::Hosted(self)))
            .serve_with_incoming(incoming);
        tokio::pin!(serving);
        let result = tokio::select! {
            served = &mut serving => served.map_err(Error::from),
            () = shutdown => tokio::select! {
                served = &mut serving => served.map_err(Error::from),
                () = host.finish() => Ok(()),
            },
        };
        host.write().clear();
        result
    }

    /// Writes pending proposals before shutdown, so that leadership transfers in progress do not have to wait for a
    /// retry.
    async fn finish(&self) {
        let all: Vec<Arc<Shared>> = {
            let clusters = self.clusters.read();
            clusters.values().map(|hosted| Arc::clone(hosted.endpoint.shared())).collect()
        };
        let finished = futures::future::join_all(all.iter().map(|shared| writer::finish(shared)));
        if tokio::time::timeout(FINISH_TIMEOUT, finished).await.is_err() {
            tracing::warn!("shutdown timed out before all proposals were written");
        }
        tokio::time::sleep(FLUSH_DELAY).await;
    }

    fn write(&self) -> parking_lot::RwLockWriteGuard<'_, BTreeMap<ClusterId, HostedCluster>> {
        self.clusters.write()
    }

    /// Returns the coordinator of a cluster.
    pub(crate) fn endpoint(&self, cluster: &[u8]) -> Result<Endpoint, Status> {
        let cluster =
            engram_wire::cluster_from_proto(cluster).map_err(|error| Status::invalid_argument(error.to_string()))?;
        let clusters = self.clusters.read();
        let endpoint = clusters.get(&cluster).map(|hosted| hosted.endpoint.clone());
        // A worker may connect before the object that announces its cluster arrives: it retries.
        endpoint.ok_or_else(|| Status::unavailable(format!("cluster {cluster} is not coordinated here")))
    }

    /// Returns the only hosted coordinator.
    pub(crate) fn only_endpoint(&self) -> Result<Endpoint, Status> {
        let clusters = self.clusters.read();
        match clusters.values().collect::<Vec<_>>().as_slice() {
            [only] => Ok(only.endpoint.clone()),
            all => Err(Status::invalid_argument(format!(
                "{} clusters are coordinated here: the request must name one",
                all.len()
            ))),
        }
    }
}
