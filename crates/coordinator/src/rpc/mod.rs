//! The gRPC service: finds the coordinator of the cluster that a message names, and checks that the caller may do what it asks for.
//!
//! One implementation serves a single coordinator as well as a [`Host`] of many. The calls themselves are functions of the coordinator:
//! heartbeats and deaths in `heartbeats`, proposals, goals and status in `orders`, forced changes of the map in `manual_recovery`.

mod access;
mod heartbeats;
mod orders;

pub(crate) use access::Access;
pub use access::{QueryKind, TokenAuthorizer};

use crate::{Host, Shared};
use access::{Credentials, Right};
use engram_proto::v1;
use engram_proto::v1::coordinator_service_server::{CoordinatorService, CoordinatorServiceServer};
use heartbeats::first_heartbeat;
use std::sync::Arc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::service::interceptor::InterceptedService;
use tonic::{Request, Response, Status, Streaming};

/// Stream of views to a worker.
pub(crate) type Views = ReceiverStream<Result<v1::HeartbeatResponse, Status>>;

/// The layer in front of the service.
type CredentialsLayer = fn(Request<()>) -> Result<Request<()>, Status>;

/// A coordinator, and who may call it.
#[derive(Clone)]
pub(crate) struct Endpoint {
    shared: Arc<Shared>,
    access: Access,
}

impl Endpoint {
    pub(crate) const fn new(shared: Arc<Shared>, access: Access) -> Self {
        Self { shared, access }
    }

    pub(crate) const fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    pub(crate) const fn access(&self) -> &Access {
        &self.access
    }

    pub(crate) const fn access_mut(&mut self) -> &mut Access {
        &mut self.access
    }

    fn check_cluster(&self, bytes: &[u8]) -> Result<(), Status> {
        let expected = self.shared.options.cluster;
        match engram_wire::cluster_from_proto(bytes) {
            Ok(named) if named == expected => Ok(()),
            Ok(named) => Err(Status::failed_precondition(format!("this is cluster {expected}, not {named}"))),
            Err(error) => Err(Status::invalid_argument(error.to_string())),
        }
    }
}

/// The coordinators that a listener serves.
#[derive(Clone)]
pub(crate) enum Endpoints {
    /// One coordinator.
    One(Endpoint),
    /// Those of a host at the time of the call.
    Hosted(Host),
}

/// The service, with its layer and its limits.
pub(crate) fn server(endpoints: Endpoints) -> InterceptedService<CoordinatorServiceServer<Service>, CredentialsLayer> {
    let service = CoordinatorServiceServer::new(Service { endpoints });
    let service = service.max_decoding_message_size(engram_proto::MAX_PEER_MESSAGE_BYTES);
    InterceptedService::new(service, Credentials::note)
}

/// The gRPC service of all coordinators of a listener.
pub(crate) struct Service {
    endpoints: Endpoints,
}

impl Service {
    /// Returns the coordinator of the cluster that a message names, if the caller has the right.
    fn admit(&self, call: &tonic::Extensions, cluster: &[u8], right: Right) -> Result<Arc<Shared>, Status> {
        let endpoint = match &self.endpoints {
            Endpoints::One(endpoint) => endpoint.clone(),
            Endpoints::Hosted(host) => host.endpoint(cluster)?,
        };
        endpoint.access.check(Credentials::of(call)?, right)?;
        endpoint.check_cluster(cluster)?;
        Ok(endpoint.shared)
    }

    /// As [`Self::admit`], for a query that need not name the cluster where there is only one.
    fn admit_query(&self, call: &tonic::Extensions, cluster: &[u8], right: Right) -> Result<Arc<Shared>, Status> {
        let endpoint = match &self.endpoints {
            Endpoints::One(endpoint) => endpoint.clone(),
            Endpoints::Hosted(host) if cluster.is_empty() => host.only_endpoint()?,
            Endpoints::Hosted(host) => host.endpoint(cluster)?,
        };
        endpoint.access.check(Credentials::of(call)?, right)?;
        Ok(endpoint.shared)
    }
}

fn ordinal(member: Option<&v1::MemberId>) -> Option<u32> {
    member.map(|member| member.ordinal)
}

fn malformed(error: &engram_wire::Malformed) -> Status {
    Status::invalid_argument(error.to_string())
}

#[tonic::async_trait]
impl CoordinatorService for Service {
    type HeartbeatStream = Views;

    async fn heartbeat(&self, request: Request<Streaming<v1::HeartbeatRequest>>) -> Result<Response<Views>, Status> {
        let (_, call, mut heartbeats) = request.into_parts();
        let first = first_heartbeat(&mut heartbeats).await?;
        let hello = first.hello.as_ref().ok_or_else(|| Status::invalid_argument("the first heartbeat has no hello"))?;
        let shared = self.admit(&call, &hello.cluster, Right::Sender(ordinal(hello.member.as_ref())))?;
        shared.heartbeats(hello, heartbeats).map(Response::new)
    }

    async fn report_death(
        &self,
        request: Request<v1::ReportDeathRequest>,
    ) -> Result<Response<v1::ReportDeathResponse>, Status> {
        let (_, call, report) = request.into_parts();
        let shared = self.admit(&call, &report.cluster, Right::DeathReport(report.ordinal))?;
        shared.report_death(&report)?;
        Ok(Response::new(v1::ReportDeathResponse {}))
    }

    async fn propose_map_changes(
        &self,
        request: Request<v1::ProposeMapChangesRequest>,
    ) -> Result<Response<v1::ProposeMapChangesResponse>, Status> {
        let (_, call, request) = request.into_parts();
        let shared = self.admit(&call, &request.cluster, Right::Sender(ordinal(request.member.as_ref())))?;
        let map_version = shared.propose_map_changes(&request)?;
        Ok(Response::new(v1::ProposeMapChangesResponse { map_version }))
    }

    async fn set_goal(&self, request: Request<v1::SetGoalRequest>) -> Result<Response<v1::SetGoalResponse>, Status> {
        let (_, call, request) = request.into_parts();
        let shared = self.admit(&call, &request.cluster, Right::Order)?;
        shared.order_goal(&request).await.map(Response::new)
    }

    async fn get_cluster_status(
        &self,
        request: Request<v1::GetClusterStatusRequest>,
    ) -> Result<Response<v1::ClusterStatus>, Status> {
        let (_, call, request) = request.into_parts();
        let shared = self.admit_query(&call, &request.cluster, Right::Query(QueryKind::Status))?;
        Ok(Response::new(shared.status()))
    }

    async fn report_map_state(
        &self,
        request: Request<v1::ReportMapStateRequest>,
    ) -> Result<Response<v1::ReportMapStateResponse>, Status> {
        let (_, call, request) = request.into_parts();
        let shared = self.admit(&call, &request.cluster, Right::Sender(ordinal(request.member.as_ref())))?;
        shared.receive_map_state(&request)?;
        Ok(Response::new(v1::ReportMapStateResponse {}))
    }

    async fn rebuild_map(
        &self,
        request: Request<v1::RebuildMapRequest>,
    ) -> Result<Response<v1::RebuildMapResponse>, Status> {
        let (_, call, order) = request.into_parts();
        let previews = !order.write && order.accept_data_loss.trim().is_empty();
        let shared = self.admit(&call, &order.cluster, order_right(previews))?;
        shared.rebuild_map(&order).await.map(Response::new)
    }

    async fn force_promote(
        &self,
        request: Request<v1::ForcePromoteRequest>,
    ) -> Result<Response<v1::ForcePromoteResponse>, Status> {
        let (_, call, order) = request.into_parts();
        let shared = self.admit(&call, &order.cluster, order_right(order.accept_data_loss.trim().is_empty()))?;
        shared.force_promote(&order).await.map(Response::new)
    }
}

/// Returns what an order needs that may be a preview.
const fn order_right(previews: bool) -> Right {
    if previews { Right::Query(QueryKind::OrderPreview) } else { Right::Order }
}
