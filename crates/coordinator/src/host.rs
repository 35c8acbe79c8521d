//! Several coordinators in one process behind one listener: every message names its cluster, and every connection over TLS too, so that
//! it is answered with the keys of that cluster.

use crate::guard::{Accounts, Guarded};
use crate::relief::Surroundings;
use crate::service::{Service, Views, first_beat};
use crate::state::{Bootstrapping, Certified, GpuTrouble};
use crate::{Coordinator, Error, Shared, watch_for_silence, wire, writer};
use engram_cluster::PartitionMap;
use engram_identity::{Keys, Refusals, accept_of};
use engram_mapstore::Goal;
use engram_memory::{ClusterId, Member, Ordinal};
use engram_proto::v1;
use engram_proto::v1::coordinator_service_server::{CoordinatorService, CoordinatorServiceServer};
use futures::future::BoxFuture;
use std::collections::BTreeMap;
use std::future::Future;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::task::AbortHandle;
use tonic::service::Routes;
use tonic::transport::server::TcpIncoming;
use tonic::{Request, Response, Status, Streaming};

/// How long what workers have asked for may take when the host ends.
const FINISHED: Duration = Duration::from_secs(1);
/// How long the last words to workers may take.
const TOLD: Duration = Duration::from_millis(50);

/// The coordinators of a process.
#[derive(Clone, Default)]
pub struct Host {
    clusters: Arc<RwLock<BTreeMap<ClusterId, Hosted>>>,
    refusals: Arc<Refusals>,
}

struct Hosted {
    service: Guarded,
    tasks: [AbortHandle; 2],
}

impl Drop for Hosted {
    fn drop(&mut self) {
        for task in &self.tasks {
            task.abort();
        }
        self.service.service.shared.ended.send_replace(true);
    }
}

/// What a host asks of one of its coordinators, and tells it.
#[derive(Clone)]
pub struct Handle {
    shared: Arc<Shared>,
}

/// What a coordinator knows.
#[derive(Debug, Clone)]
pub struct Report {
    /// The map that holds.
    pub map: Option<Arc<PartitionMap>>,
    /// Why there is no map to go on with, though there was one.
    pub lost: Option<String>,
    /// Workers that are heard, each with the `host:port` at which clients find it.
    pub alive: Vec<(Ordinal, String)>,
    /// What keeps the cluster from serving everything with all its copies, in words.
    pub conditions: Vec<String>,
    /// Workers that are heard and do without a GPU that they would use.
    pub gpu_troubles: BTreeMap<Ordinal, GpuTrouble>,
    /// Workers that are heard and have certificates.
    pub certified: BTreeMap<Ordinal, Certified>,
    /// How far the workers are of a cluster that begins from a snapshot, as long as it has no map.
    pub bootstrapping: Option<Bootstrapping>,
}

impl Handle {
    /// Tells what people want, and what is known of the workers beside their beats.
    pub fn steer(&self, goal: Goal, surroundings: Surroundings) {
        let mut state = self.shared.state();
        let changed = *state.goal() != goal;
        state.set_goal(goal);
        let changed = state.set_surroundings(surroundings) || changed;
        drop(state);
        if changed {
            self.shared.reconsider.notify_one();
        }
    }

    /// Tells that the map's store has [news](engram_mapstore::MapStore::news).
    pub fn look(&self) {
        self.shared.reconsider.notify_one();
    }

    /// Tells that this very process has ended: proof, for whoever has seen what only its end leaves behind. What is known already is no
    /// news, nor is the end of one that a later process has followed.
    pub fn ended(&self, member: &Member, exit: &str) {
        let now_ms = self.shared.now_ms();
        let news = self.shared.state().ended(member, now_ms);
        if news {
            tracing::warn!(worker = %member, exit, "worker died");
            self.shared.reconsider.notify_one();
            self.shared.publish();
        }
    }

    /// Returns what it knows now.
    pub fn report(&self) -> Report {
        let state = self.shared.state();
        Report {
            map: state.map().cloned().map(Arc::new),
            lost: state.lost().map(str::to_owned),
            alive: state
                .members()
                .filter(|heard| heard.alive)
                .map(|heard| (heard.member.ordinal, heard.addresses.client.clone()))
                .collect(),
            conditions: state.conditions().to_vec(),
            gpu_troubles: state
                .members()
                .filter(|heard| heard.alive)
                .filter_map(|heard| Some((heard.member.ordinal, heard.gpu_trouble.clone()?)))
                .collect(),
            certified: state
                .members()
                .filter(|heard| heard.alive)
                .filter_map(|heard| Some((heard.member.ordinal, heard.certified.clone()?)))
                .collect(),
            bootstrapping: state.bootstrapping(&self.shared.options),
        }
    }
}

impl Host {
    /// Begins to coordinate a cluster, in place of another coordinator of it if there is one. With `keys` every process of it has to show
    /// a certificate.
    pub fn add(&self, coordinator: Coordinator, keys: Option<Arc<Keys>>) -> Handle {
        let shared = coordinator.shared;
        let tasks = [
            tokio::spawn(writer::run(Arc::clone(&shared))).abort_handle(),
            tokio::spawn(watch_for_silence(Arc::clone(&shared))).abort_handle(),
        ];
        let service = Guarded { service: Service { shared: Arc::clone(&shared) }, keys, accounts: None };
        let hosted = Hosted { service, tasks };
        self.write().insert(shared.options.cluster, hosted);
        Handle { shared }
    }

    /// Takes these tokens instead of certificates of a cluster, for what changes nothing.
    pub fn take_tokens(&self, cluster: ClusterId, accounts: Arc<dyn Accounts>) {
        if let Some(hosted) = self.write().get_mut(&cluster) {
            hosted.service.accounts = Some(accounts);
        }
    }

    /// Ends the coordinator of a cluster: its workers go on under the map that they have.
    pub fn remove(&self, cluster: ClusterId) {
        self.write().remove(&cluster);
    }

    /// The keys of a cluster that is coordinated here and has certificates.
    pub fn keys(&self, cluster: ClusterId) -> Option<Arc<Keys>> {
        let clusters = self.clusters.read().unwrap_or_else(PoisonError::into_inner);
        clusters.get(&cluster).and_then(|hosted| hosted.service.keys.clone())
    }

    /// Who was not let in. What the keys of its clusters count is not in it, unless they were made with this.
    pub const fn refusals(&self) -> &Arc<Refusals> {
        &self.refusals
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
        self.run_beside(listener, Routes::default(), shutdown)
    }

    /// The same, and `others` on the same listener: for callers in clear and for those without a certificate, too.
    ///
    /// # Errors
    /// The listener fails.
    pub fn run_beside<'a>(
        self,
        listener: TcpListener,
        others: Routes,
        shutdown: impl Future<Output = ()> + Send + 'a,
    ) -> BoxFuture<'a, Result<(), Error>> {
        self.run_until(listener, others, Box::pin(shutdown))
    }

    /// Not generic, as for one coordinator.
    fn run_until(
        self,
        listener: TcpListener,
        others: Routes,
        shutdown: BoxFuture<'_, ()>,
    ) -> BoxFuture<'_, Result<(), Error>> {
        Box::pin(self.serve(listener, others, shutdown))
    }

    async fn serve(self, listener: TcpListener, others: Routes, shutdown: BoxFuture<'_, ()>) -> Result<(), Error> {
        let (host, known) = (self.clone(), self.clone());
        let incoming = TcpIncoming::from(listener).with_nodelay(Some(true));
        let refusals = Arc::clone(&self.refusals);
        let incoming = accept_of(incoming, move |cluster| known.keys(cluster), refusals);
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

    /// Finishes what workers have asked for: who ends in the middle leaves partitions that are changing hands to wait until it is
    /// asked for again.
    async fn finish(&self) {
        let all: Vec<Arc<Shared>> = {
            let clusters = self.clusters.read().unwrap_or_else(PoisonError::into_inner);
            clusters.values().map(|hosted| Arc::clone(&hosted.service.service.shared)).collect()
        };
        let finished = futures::future::join_all(all.iter().map(|shared| writer::finish(shared)));
        if tokio::time::timeout(FINISHED, finished).await.is_err() {
            tracing::warn!("what workers asked for is not all written");
        }
        // What was written is on its way to them.
        tokio::time::sleep(TOLD).await;
    }

    fn write(&self) -> std::sync::RwLockWriteGuard<'_, BTreeMap<ClusterId, Hosted>> {
        self.clusters.write().unwrap_or_else(PoisonError::into_inner)
    }

    fn service(&self, cluster: &[u8]) -> Result<Guarded, Status> {
        let cluster = wire::cluster_from_proto(cluster).map_err(|error| Status::invalid_argument(error.to_string()))?;
        self.service_of(cluster)
    }

    fn service_of(&self, cluster: ClusterId) -> Result<Guarded, Status> {
        let clusters = self.clusters.read().unwrap_or_else(PoisonError::into_inner);
        let found = clusters.get(&cluster).map(|hosted| hosted.service.clone());
        // A worker may be faster than the object that announces its cluster: it comes again.
        found.ok_or_else(|| Status::unavailable(format!("cluster {cluster} is not coordinated here")))
    }

    /// The only cluster.
    fn only_service(&self) -> Result<Guarded, Status> {
        let clusters = self.clusters.read().unwrap_or_else(PoisonError::into_inner);
        match clusters.values().collect::<Vec<_>>().as_slice() {
            [only] => Ok(only.service.clone()),
            all => Err(Status::invalid_argument(format!(
                "{} clusters are coordinated here: the request must say which is meant",
                all.len()
            ))),
        }
    }
}

#[tonic::async_trait]
impl CoordinatorService for Host {
    type HeartbeatStream = Views;

    async fn heartbeat(&self, request: Request<Streaming<v1::Beat>>) -> Result<Response<Views>, Status> {
        let (_, extensions, mut beats) = request.into_parts();
        let first = first_beat(&mut beats).await?;
        let hello = first.hello.as_ref().ok_or_else(|| Status::invalid_argument("the first beat has no hello"))?;
        self.service(&hello.cluster)?.beats(&extensions, &first, beats)
    }

    async fn report_death(&self, request: Request<v1::DeathReport>) -> Result<Response<v1::DeathReply>, Status> {
        self.service(&request.get_ref().cluster)?.report_death(request).await
    }

    async fn propose_map(
        &self,
        request: Request<v1::ProposeMapRequest>,
    ) -> Result<Response<v1::ProposeMapReply>, Status> {
        self.service(&request.get_ref().cluster)?.propose_map(request).await
    }

    async fn set_goal(&self, request: Request<v1::SetGoalRequest>) -> Result<Response<v1::SetGoalReply>, Status> {
        self.service(&request.get_ref().cluster)?.set_goal(request).await
    }

    async fn get_cluster_status(
        &self,
        request: Request<v1::ClusterStatusRequest>,
    ) -> Result<Response<v1::ClusterStatus>, Status> {
        let named = &request.get_ref().cluster;
        let service = if named.is_empty() { self.only_service() } else { self.service(named) };
        service?.get_cluster_status(request).await
    }

    async fn testify(&self, request: Request<v1::Testimony>) -> Result<Response<v1::TestifyReply>, Status> {
        self.service(&request.get_ref().cluster)?.testify(request).await
    }

    async fn rebuild_map(
        &self,
        request: Request<v1::RebuildMapRequest>,
    ) -> Result<Response<v1::RebuildMapReply>, Status> {
        self.service(&request.get_ref().cluster)?.rebuild_map(request).await
    }

    async fn force_promote(
        &self,
        request: Request<v1::ForcePromoteRequest>,
    ) -> Result<Response<v1::ForcePromoteReply>, Status> {
        self.service(&request.get_ref().cluster)?.force_promote(request).await
    }
}
