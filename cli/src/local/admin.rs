//! Requests to the processes of a cluster: admin service of workers, coordinator service, HTTP pages.

use crate::error::failure;
use crate::route::Endpoint;
use anyhow::{Context as _, bail, ensure};
use engram_api::ExitCode;
use engram_client::Network;
use engram_identity::{ExpectedPeer, Role};
use engram_memory::ClusterId;
use engram_proto::answers::identity;
use engram_proto::v1;
use engram_proto::v1::admin_service_client::AdminServiceClient;
use engram_proto::v1::coordinator_service_client::CoordinatorServiceClient;
use std::time::Duration;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::time::timeout;
use tonic::service::Interceptor;
use tonic::service::interceptor::InterceptedService;
use tonic::transport::{self, Channel};
use tonic::{Request, Status};

/// Deadline of a request.
const DEADLINE: Duration = Duration::from_secs(5);
/// Deadline of an override, for which the coordinator queries every worker.
const OVERRIDE_DEADLINE: Duration = Duration::from_secs(15);
/// Deadline for a worker to write its part of a snapshot: 90 GB at 50 MB/s.
const SNAPSHOT_DEADLINE: Duration = Duration::from_secs(30 * 60);
/// Size limit of an HTTP page, far above that of a metrics page.
const MAX_PAGE_BYTES: u64 = 4 << 20;

/// Returns the status of a worker.
///
/// # Errors
/// The request fails or times out.
pub(crate) async fn status(admin: &Endpoint) -> anyhow::Result<v1::WorkerStatus> {
    let call = async {
        let mut client = AdminServiceClient::new(channel(admin, Role::Worker).await?)
            .max_decoding_message_size(engram_proto::MAX_PEER_MESSAGE_BYTES);
        anyhow::Ok(client.get_worker_status(v1::GetWorkerStatusRequest {}).await?.into_inner())
    };
    timeout(DEADLINE, call).await.with_context(|| format!("{admin} does not respond"))?
}

/// Profiles the devices of a worker.
///
/// # Errors
/// The request fails or times out, or another profile is in progress.
pub(crate) async fn profile(admin: &Endpoint, request: v1::ProfileRequest) -> anyhow::Result<v1::ProfileResponse> {
    let deadline = DEADLINE + Duration::from_millis(request.duration_ms.into());
    let call = async {
        let mut client = AdminServiceClient::new(channel(admin, Role::Worker).await?)
            .max_decoding_message_size(engram_proto::MAX_PEER_MESSAGE_BYTES);
        let reply = client.profile(request).await;
        reply.map(tonic::Response::into_inner).map_err(|status| failure(exit(status.code()), status.message()))
    };
    timeout(deadline, call).await.with_context(|| format!("{admin} does not respond"))?
}

/// Makes a worker write the partitions of which it is primary to a local folder.
///
/// # Errors
/// The request fails or times out, or the worker fails to write.
pub(crate) async fn snapshot(
    admin: &Endpoint,
    folder: String,
    owner_key: String,
) -> anyhow::Result<v1::CreateSnapshotResponse> {
    let call = async {
        let mut client = AdminServiceClient::new(channel(admin, Role::Worker).await?)
            .max_decoding_message_size(engram_proto::MAX_PEER_MESSAGE_BYTES);
        let mut request = Request::new(v1::CreateSnapshotRequest { folder, owner_key });
        if let Some(trace) = engram_trace::current().and_then(|context| context.to_string().parse().ok()) {
            request.metadata_mut().insert(engram_proto::TRACE_KEY, trace);
        }
        let response = client.create_snapshot(request).await;
        let reply = response.map_err(|status| match v1::Problem::from_status(&status) {
            Some(problem) => anyhow::Error::new(engram_client::Error::Rejected(Box::new(problem))),
            None => anyhow::anyhow!("{}", status.message()),
        })?;
        anyhow::Ok(reply.into_inner())
    };
    let result = timeout(SNAPSHOT_DEADLINE, call).await;
    result
        .map_err(anyhow::Error::from)
        .flatten()
        .with_context(|| format!("the worker at {admin} failed to write a snapshot"))
}

/// Returns the status of a cluster from its coordinator.
///
/// # Errors
/// The request fails or times out.
pub(crate) async fn cluster(coordinator: &Endpoint, cluster: ClusterId) -> anyhow::Result<v1::ClusterStatus> {
    let request = v1::GetClusterStatusRequest { cluster: identity(cluster.0) };
    let call = async {
        let mut client = CoordinatorServiceClient::new(channel(coordinator, Role::Coordinator).await?)
            .max_decoding_message_size(engram_proto::MAX_PEER_MESSAGE_BYTES);
        anyhow::Ok(client.get_cluster_status(request).await?.into_inner())
    };
    timeout(DEADLINE, call).await.with_context(|| format!("{coordinator} does not respond"))?
}

/// Sets the goal of a cluster: number of workers, and workers to drain or undrain.
///
/// # Errors
/// The request fails, times out or is rejected.
pub(crate) async fn set_goal(coordinator: &Endpoint, goal: v1::SetGoalRequest) -> anyhow::Result<v1::SetGoalResponse> {
    let call = async {
        let mut client = CoordinatorServiceClient::new(channel(coordinator, Role::Coordinator).await?);
        match client.set_goal(goal).await {
            Ok(reply) => anyhow::Ok(reply.into_inner()),
            Err(status) => Err(failure(exit(status.code()), status.message())),
        }
    };
    timeout(DEADLINE, call).await.with_context(|| format!("{coordinator} does not respond"))?
}

/// Rebuilds a lost partition map from the states that workers report.
///
/// # Errors
/// The request fails or times out.
pub(crate) async fn rebuild_map(
    coordinator: &Endpoint,
    request: v1::RebuildMapRequest,
) -> anyhow::Result<v1::RebuildMapResponse> {
    let call = async {
        let client = CoordinatorServiceClient::new(channel(coordinator, Role::Coordinator).await?);
        let mut client = client.max_decoding_message_size(engram_proto::MAX_PEER_MESSAGE_BYTES);
        let reply = client.rebuild_map(request).await;
        reply.map(tonic::Response::into_inner).map_err(|status| failure(exit(status.code()), status.message()))
    };
    timeout(OVERRIDE_DEADLINE, call).await.with_context(|| format!("{coordinator} does not respond"))?
}

/// Promotes a replica that is not in sync.
///
/// # Errors
/// The request fails or times out.
pub(crate) async fn force_promote(
    coordinator: &Endpoint,
    request: v1::ForcePromoteRequest,
) -> anyhow::Result<v1::ForcePromoteResponse> {
    let call = async {
        let mut client = CoordinatorServiceClient::new(channel(coordinator, Role::Coordinator).await?);
        let reply = client.force_promote(request).await;
        reply.map(tonic::Response::into_inner).map_err(|status| failure(exit(status.code()), status.message()))
    };
    timeout(OVERRIDE_DEADLINE, call).await.with_context(|| format!("{coordinator} does not respond"))?
}

/// Returns the exit code for a gRPC status.
const fn exit(code: tonic::Code) -> ExitCode {
    match code {
        tonic::Code::InvalidArgument => ExitCode::Usage,
        tonic::Code::FailedPrecondition | tonic::Code::Aborted => ExitCode::Conflict,
        tonic::Code::NotFound => ExitCode::NotFound,
        tonic::Code::Unavailable | tonic::Code::DeadlineExceeded | tonic::Code::ResourceExhausted => ExitCode::NotReady,
        tonic::Code::PermissionDenied | tonic::Code::Unauthenticated => ExitCode::Denied,
        _ => ExitCode::Failed,
    }
}

/// Adds the caller's token to requests, if there is one.
struct TokenInterceptor(Network);

impl Interceptor for TokenInterceptor {
    fn call(&mut self, mut request: Request<()>) -> Result<Request<()>, Status> {
        if let Some(token) = self.0.authorization() {
            request.metadata_mut().insert("authorization", token);
        }
        Ok(request)
    }
}

async fn channel(endpoint: &Endpoint, role: Role) -> anyhow::Result<InterceptedService<Channel, TokenInterceptor>> {
    let target = transport::Endpoint::from_shared(format!("http://{endpoint}"))?.connect_timeout(DEADLINE);
    let network = endpoint.route.network().for_peer(ExpectedPeer::any(role));
    let channel = network.connect(target).await;
    let channel = channel
        .map_err(|error| endpoint.route.explain(error.into()))
        .with_context(|| format!("failed to connect to {endpoint}"))?;
    Ok(InterceptedService::new(channel, TokenInterceptor(network)))
}

/// Requests an HTTP page and returns status code and body.
///
/// # Errors
/// The request fails or times out.
pub(crate) async fn page(http: &Endpoint, path: &str) -> anyhow::Result<(u16, String)> {
    let get = async {
        let mut stream = http.route.open(&http.address).await?;
        let request = format!("GET {path} HTTP/1.0\r\nHost: {http}\r\nConnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await?;
        // Stops at Content-Length: the API server delays the end of forwarded connections.
        let mut response = Vec::new();
        while !is_complete(&response)
            && response.len() as u64 <= MAX_PAGE_BYTES
            && stream.read_buf(&mut response).await? > 0
        {}
        ensure!(response.len() as u64 <= MAX_PAGE_BYTES, "the page is larger than {MAX_PAGE_BYTES} bytes");
        let response = String::from_utf8(response).context("the page is not text")?;
        let Some((head, body)) = response.split_once("\r\n\r\n") else { bail!("the response is not HTTP") };
        let code = head.split_whitespace().nth(1).and_then(|code| code.parse().ok()).context("no status code")?;
        anyhow::Ok((code, body.to_owned()))
    };
    timeout(DEADLINE, get).await.with_context(|| format!("{http} does not respond"))?
}

/// Whether an HTTP response has all bytes of its Content-Length. Without one it ends with the connection.
fn is_complete(response: &[u8]) -> bool {
    let Some(head) = response.windows(4).position(|bytes| bytes == b"\r\n\r\n") else { return false };
    let text = String::from_utf8_lossy(&response[..head]).to_ascii_lowercase();
    let length = text.lines().find_map(|line| line.strip_prefix("content-length:")?.trim().parse::<usize>().ok());
    length.is_some_and(|length| response.len() >= head + 4 + length)
}

#[cfg(test)]
mod tests {
    use super::is_complete;

    #[test]
    fn response_is_complete_at_its_content_length() {
        assert!(!is_complete(b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n"));
        assert!(!is_complete(b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\no"));
        assert!(is_complete(b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok"));
        assert!(!is_complete(b"HTTP/1.0 200 OK\r\n\r\nok"), "without Content-Length the connection must close");
    }
}
