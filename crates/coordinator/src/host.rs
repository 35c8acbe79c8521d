//! Several coordinators in one process behind one listener: every message names its cluster, and every TLS connection
//! does too, so that it is served with the keys of that cluster.

use crate::accept;
use crate::environment::Environment;
use crate::guard::{AuthorizedService, TokenAuthorizer};
use crate::service::{Service, Views, first_heartbeat};
use crate::state::{BootstrapProgress, GpuFault, WorkerCertificate};
use crate::{Coordinator, Error, Shared, run_failure_detector, writer};
use engram_cluster::PartitionMap;
use engram_identity::{Keys, Refusals, accept_for_clusters};
use engram_mapstore::Goal;
use engram_memory::{ClusterId, Member, Ordinal};
use engram_proto::v1;
use engram_proto::v1::coordinator_service_server::{CoordinatorService, CoordinatorServiceServer};
use futures::future::BoxFuture;
use parking_lot::RwLock;
use std::collections::BTreeMap;
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::task::AbortHandle;
use tonic::service::Routes;
use tonic::{Request, Response, Status, Streaming};

/// How long pending proposals may take to be written at shutdown.
const FINISH_TIMEOUT: Duration = Duration::from_secs(1);
/// How long the last views may take to reach the workers.
const FLUSH_DELAY: Duration = Duration::from_millis(50);

/// The coordinators of a process.
#[derive(Clone, Default)]
pub struct Host {
    clusters: Arc<RwLock<BTreeMap<ClusterId, HostedCluster>>>,
    refusals: Arc<Refusals>,
    refused_connections: Arc<AtomicU64>,
}

struct HostedCluster {
    service: AuthorizedService,
    tasks: [AbortHandle; 2],
}

impl Drop for HostedCluster {
    fn drop(&mut self) {
        for task in &self.tasks {
            task.abort();
        }
        self.service.service.shared.ended.send_replace(true);
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
            alive: state
                .members()
                .filter(|worker| worker.alive)
                .map(|worker| (worker.member.ordinal, worker.addresses.client.clone()))
                .collect(),
            conditions: state.conditions().to_vec(),
            gpu_faults: state
                .members()
                .filter(|worker| worker.alive)
                .filter_map(|worker| Some((worker.member.ordinal, worker.gpu_fault.clone()?)))
                .collect(),
            operations: state
                .members()
                .filter(|worker| worker.alive)
                .map(|worker| (worker.member.ordinal, worker.operations))
                .collect(),
            certificates: state
                .members()
                .filter(|worker| worker.alive)
                .filter_map(|worker| Some((worker.member.ordinal, worker.certificate.clone()?)))
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
        let service = AuthorizedService { service: Service { shared: Arc::clone(&shared) }, keys, authorizer: None };
        let hosted = HostedCluster { service, tasks };
        self.write().insert(shared.options.cluster, hosted);
        Handle { shared }
    }

    /// Accepts tokens instead of certificates of a cluster, for read-only calls.
    pub fn set_authorizer(&self, cluster: ClusterId, accounts: Arc<dyn TokenAuthorizer>) {
        if let Some(hosted) = self.write().get_mut(&cluster) {
            hosted.service.authorizer = Some(accounts);
        }
    }

    /// Stops the coordinator of a cluster: its workers continue with their current map.
    pub fn remove(&self, cluster: ClusterId) {
        self.write().remove(&cluster);
    }

    /// Returns the keys of a hosted cluster that has certificates.
    pub fn keys(&self, cluster: ClusterId) -> Option<Arc<Keys>> {
        let clusters = self.clusters.read();
        clusters.get(&cluster).and_then(|hosted| hosted.service.keys.clone())
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
        let service =
            CoordinatorServiceServer::new(self).max_decoding_message_size(engram_proto::MAX_PEER_MESSAGE_BYTES);
        let serving = tonic::transport::Server::builder()
            .http2_keepalive_interval(Some(Duration::from_secs(5)))
            .add_routes(others)
            .add_service(service)
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
            clusters.values().map(|hosted| Arc::clone(&hosted.service.service.shared)).collect()
        };
        let finished = futures::future::join_all(all.iter().map(|shared| writer::finish(shared)));
        if tokio::time::timeout(FINISH_TIMEOUT, finished).await.is_err() {
            tracing::warn!("shutdown timed out before all proposals were written");
        }
        // The written map is on its way to the workers.
        tokio::time::sleep(FLUSH_DELAY).await;
    }

    fn write(&self) -> parking_lot::RwLockWriteGuard<'_, BTreeMap<ClusterId, HostedCluster>> {
        self.clusters.write()
    }

    fn service(&self, cluster: &[u8]) -> Result<AuthorizedService, Status> {
        let cluster =
            engram_wire::cluster_from_proto(cluster).map_err(|error| Status::invalid_argument(error.to_string()))?;
        self.service_of(cluster)
    }

    fn service_of(&self, cluster: ClusterId) -> Result<AuthorizedService, Status> {
        let clusters = self.clusters.read();
        let service = clusters.get(&cluster).map(|hosted| hosted.service.clone());
        // A worker may connect before the object that announces its cluster arrives: it retries.
        service.ok_or_else(|| Status::unavailable(format!("cluster {cluster} is not coordinated here")))
    }

    /// Returns the only hosted cluster.
    fn only_service(&self) -> Result<AuthorizedService, Status> {
        let clusters = self.clusters.read();
        match clusters.values().collect::<Vec<_>>().as_slice() {
            [only] => Ok(only.service.clone()),
            all => Err(Status::invalid_argument(format!(
                "{} clusters are coordinated here: the request must name one",
                all.len()
            ))),
        }
    }
}

#[tonic::async_trait]
impl CoordinatorService for Host {
    type HeartbeatStream = Views;

    async fn heartbeat(&self, request: Request<Streaming<v1::HeartbeatRequest>>) -> Result<Response<Views>, Status> {
        let (_, extensions, mut heartbeats) = request.into_parts();
        let first = first_heartbeat(&mut heartbeats).await?;
        let hello = first.hello.as_ref().ok_or_else(|| Status::invalid_argument("the first heartbeat has no hello"))?;
        self.service(&hello.cluster)?.heartbeats(&extensions, &first, heartbeats)
    }

    async fn report_death(
        &self,
        request: Request<v1::ReportDeathRequest>,
    ) -> Result<Response<v1::ReportDeathResponse>, Status> {
        self.service(&request.get_ref().cluster)?.report_death(request).await
    }

    async fn propose_map_changes(
        &self,
        request: Request<v1::ProposeMapChangesRequest>,
    ) -> Result<Response<v1::ProposeMapChangesResponse>, Status> {
        self.service(&request.get_ref().cluster)?.propose_map_changes(request).await
    }

    async fn set_goal(&self, request: Request<v1::SetGoalRequest>) -> Result<Response<v1::SetGoalResponse>, Status> {
        self.service(&request.get_ref().cluster)?.set_goal(request).await
    }

    async fn get_cluster_status(
        &self,
        request: Request<v1::GetClusterStatusRequest>,
    ) -> Result<Response<v1::ClusterStatus>, Status> {
        let cluster = &request.get_ref().cluster;
        let service = if cluster.is_empty() { self.only_service() } else { self.service(cluster) };
        service?.get_cluster_status(request).await
    }

    async fn report_map_state(
        &self,
        request: Request<v1::ReportMapStateRequest>,
    ) -> Result<Response<v1::ReportMapStateResponse>, Status> {
        self.service(&request.get_ref().cluster)?.report_map_state(request).await
    }

    async fn rebuild_map(
        &self,
        request: Request<v1::RebuildMapRequest>,
    ) -> Result<Response<v1::RebuildMapResponse>, Status> {
        self.service(&request.get_ref().cluster)?.rebuild_map(request).await
    }

    async fn force_promote(
        &self,
        request: Request<v1::ForcePromoteRequest>,
    ) -> Result<Response<v1::ForcePromoteResponse>, Status> {
        self.service(&request.get_ref().cluster)?.force_promote(request).await
    }
}
