//! Talking to the processes of a cluster: administration of workers, status of the coordinator, plain HTTP pages.

use crate::error::said;
use crate::route::Door;
use anyhow::{Context as _, bail, ensure};
use engram_api::ExitCode;
use engram_client::Network;
use engram_identity::{Expected, Role};
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
use tonic::transport::{Channel, Endpoint};
use tonic::{Request, Status};

/// How long a process may take to answer.
const DEADLINE: Duration = Duration::from_secs(5);
/// How long the coordinator may take for an order that it asks every worker about first.
const ORDER_DEADLINE: Duration = Duration::from_secs(15);
/// How long a worker may take to write its part of a snapshot: a disk of 50 MB/s writes 90 GB in that time.
const SNAPSHOT_DEADLINE: Duration = Duration::from_secs(30 * 60);
/// Far more than a page of metrics has.
const MAX_PAGE_BYTES: u64 = 4 << 20;

/// What a worker says of itself.
///
/// # Errors
/// It does not answer in time.
pub(crate) async fn status(admin: &Door) -> anyhow::Result<v1::WorkerStatus> {
    let ask = async {
        let mut client = AdminServiceClient::new(channel(admin, Role::Worker).await?)
            .max_decoding_message_size(engram_proto::MAX_PEER_MESSAGE_BYTES);
        anyhow::Ok(client.get_worker_status(v1::WorkerStatusRequest {}).await?.into_inner())
    };
    timeout(DEADLINE, ask).await.with_context(|| format!("{admin} does not answer"))?
}

/// Records what a worker's devices do.
///
/// # Errors
/// It does not answer in time, or records for somebody else.
pub(crate) async fn profile(admin: &Door, asked: v1::ProfileRequest) -> anyhow::Result<v1::ProfileReply> {
    let patience = DEADLINE + Duration::from_millis(asked.duration_ms.into());
    let ask = async {
        let mut client = AdminServiceClient::new(channel(admin, Role::Worker).await?)
            .max_decoding_message_size(engram_proto::MAX_PEER_MESSAGE_BYTES);
        let reply = client.profile(asked).await;
        reply.map(tonic::Response::into_inner).map_err(|status| said(exit(status.code()), status.message()))
    };
    timeout(patience, ask).await.with_context(|| format!("{admin} does not answer"))?
}

/// Has a worker write what it leads into a folder of its machine.
///
/// # Errors
/// It does not answer in time, or cannot write.
pub(crate) async fn snapshot(admin: &Door, folder: String) -> anyhow::Result<v1::CreateSnapshotReply> {
    let ask = async {
        let mut client = AdminServiceClient::new(channel(admin, Role::Worker).await?)
            .max_decoding_message_size(engram_proto::MAX_PEER_MESSAGE_BYTES);
        let answer = client.create_snapshot(v1::CreateSnapshotRequest { folder }).await;
        let reply = answer.map_err(|status| match v1::Problem::from_status(&status) {
            Some(problem) => anyhow::Error::new(engram_client::Error::Refused(Box::new(problem))),
            None => anyhow::anyhow!("{}", status.message()),
        })?;
        anyhow::Ok(reply.into_inner())
    };
    let answer = timeout(SNAPSHOT_DEADLINE, ask).await;
    answer.map_err(anyhow::Error::from).flatten().with_context(|| format!("the worker at {admin} wrote no snapshot"))
}

/// What the coordinator says of the cluster.
///
/// # Errors
/// It does not answer in time.
pub(crate) async fn cluster(coordinator: &Door, cluster: ClusterId) -> anyhow::Result<v1::ClusterStatus> {
    let asked = v1::ClusterStatusRequest { cluster: identity(cluster.0) };
    let ask = async {
        let mut client = CoordinatorServiceClient::new(channel(coordinator, Role::Coordinator).await?)
            .max_decoding_message_size(engram_proto::MAX_PEER_MESSAGE_BYTES);
        anyhow::Ok(client.get_cluster_status(asked).await?.into_inner())
    };
    timeout(DEADLINE, ask).await.with_context(|| format!("{coordinator} does not answer"))?
}

/// Asks for more or fewer workers, or for workers to be emptied or used again.
///
/// # Errors
/// The coordinator does not answer in time, or refuses.
pub(crate) async fn set_goal(coordinator: &Door, goal: v1::SetGoalRequest) -> anyhow::Result<v1::SetGoalReply> {
    let ask = async {
        let mut client = CoordinatorServiceClient::new(channel(coordinator, Role::Coordinator).await?);
        match client.set_goal(goal).await {
            Ok(reply) => anyhow::Ok(reply.into_inner()),
            Err(status) => Err(said(exit(status.code()), status.message())),
        }
    };
    timeout(DEADLINE, ask).await.with_context(|| format!("{coordinator} does not answer"))?
}

/// Orders that a lost map is made anew from what workers have seen.
///
/// # Errors
/// The coordinator does not answer in time, or cannot.
pub(crate) async fn rebuild_map(
    coordinator: &Door,
    order: v1::RebuildMapRequest,
) -> anyhow::Result<v1::RebuildMapReply> {
    let ask = async {
        let client = CoordinatorServiceClient::new(channel(coordinator, Role::Coordinator).await?);
        let mut client = client.max_decoding_message_size(engram_proto::MAX_PEER_MESSAGE_BYTES);
        let reply = client.rebuild_map(order).await;
        reply.map(tonic::Response::into_inner).map_err(|status| said(exit(status.code()), status.message()))
    };
    timeout(ORDER_DEADLINE, ask).await.with_context(|| format!("{coordinator} does not answer"))?
}

/// Orders that a copy leads that is not in sync.
///
/// # Errors
/// As [`rebuild_map`].
pub(crate) async fn force_promote(
    coordinator: &Door,
    order: v1::ForcePromoteRequest,
) -> anyhow::Result<v1::ForcePromoteReply> {
    let ask = async {
        let mut client = CoordinatorServiceClient::new(channel(coordinator, Role::Coordinator).await?);
        let reply = client.force_promote(order).await;
        reply.map(tonic::Response::into_inner).map_err(|status| said(exit(status.code()), status.message()))
    };
    timeout(ORDER_DEADLINE, ask).await.with_context(|| format!("{coordinator} does not answer"))?
}

/// How a command ends that the coordinator refused.
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

/// Puts the caller's token on calls, where there is one.
struct Carrying(Network);

impl Interceptor for Carrying {
    fn call(&mut self, mut request: Request<()>) -> Result<Request<()>, Status> {
        if let Some(token) = self.0.authorization() {
            request.metadata_mut().insert("authorization", token);
        }
        Ok(request)
    }
}

async fn channel(door: &Door, role: Role) -> anyhow::Result<InterceptedService<Channel, Carrying>> {
    let endpoint = Endpoint::from_shared(format!("http://{door}"))?.connect_timeout(DEADLINE);
    let network = door.route.network().to(Expected::any(role));
    let connected = network.connect(endpoint).await;
    let channel = connected
        .map_err(|error| door.route.failure(error.into()))
        .with_context(|| format!("failed to connect to {door}"))?;
    Ok(InterceptedService::new(channel, Carrying(network)))
}

/// Gets a page: its status code and its text.
///
/// # Errors
/// Nobody answers in time, or not in HTTP.
pub(crate) async fn page(http: &Door, path: &str) -> anyhow::Result<(u16, String)> {
    let get = async {
        let mut stream = http.route.open(&http.address).await?;
        let request = format!("GET {path} HTTP/1.0\r\nHost: {http}\r\nConnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await?;
        // As long as it says: the end of a connection through an API server takes its time.
        let mut answer = Vec::new();
        while !is_whole(&answer) && answer.len() as u64 <= MAX_PAGE_BYTES && stream.read_buf(&mut answer).await? > 0 {}
        ensure!(answer.len() as u64 <= MAX_PAGE_BYTES, "the page is larger than {MAX_PAGE_BYTES} bytes");
        let answer = String::from_utf8(answer).context("the page is not text")?;
        let Some((head, body)) = answer.split_once("\r\n\r\n") else { bail!("the answer is not HTTP") };
        let code = head.split_whitespace().nth(1).and_then(|code| code.parse().ok()).context("no status code")?;
        anyhow::Ok((code, body.to_owned()))
    };
    timeout(DEADLINE, get).await.with_context(|| format!("{http} does not answer"))?
}

/// Whether an answer of HTTP has all the bytes that its head tells of. One that does not tell ends with its connection.
fn is_whole(answer: &[u8]) -> bool {
    let Some(head) = answer.windows(4).position(|bytes| bytes == b"\r\n\r\n") else { return false };
    let text = String::from_utf8_lossy(&answer[..head]).to_ascii_lowercase();
    let length = text.lines().find_map(|line| line.strip_prefix("content-length:")?.trim().parse::<usize>().ok());
    length.is_some_and(|length| answer.len() >= head + 4 + length)
}

#[cfg(test)]
mod tests {
    use super::is_whole;

    #[test]
    fn an_answer_is_whole_when_it_is_as_long_as_it_says() {
        assert!(!is_whole(b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n"));
        assert!(!is_whole(b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\no"));
        assert!(is_whole(b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok"));
        assert!(!is_whole(b"HTTP/1.0 200 OK\r\n\r\nok"), "only the end of the connection tells");
    }
}
