//! Talking to the processes of a local cluster: administration of workers, status of the coordinator, plain HTTP pages.

use anyhow::{Context as _, bail, ensure};
use engram_memory::ClusterId;
use engram_proto::v1;
use engram_proto::v1::admin_service_client::AdminServiceClient;
use engram_proto::v1::coordinator_service_client::CoordinatorServiceClient;
use std::net::SocketAddr;
use std::time::Duration;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tonic::transport::{Channel, Endpoint};

/// How long a process of this machine may take to answer.
const DEADLINE: Duration = Duration::from_secs(5);
/// Far more than a page of metrics has.
const MAX_PAGE_BYTES: u64 = 4 << 20;

/// What a worker says of itself.
///
/// # Errors
/// It does not answer in time.
pub(crate) async fn status(admin: SocketAddr) -> anyhow::Result<v1::WorkerStatus> {
    let ask = async {
        let mut client = AdminServiceClient::new(channel(admin).await?)
            .max_decoding_message_size(engram_proto::MAX_PEER_MESSAGE_BYTES);
        anyhow::Ok(client.get_worker_status(v1::WorkerStatusRequest {}).await?.into_inner())
    };
    timeout(DEADLINE, ask).await.with_context(|| format!("{admin} does not answer"))?
}

/// What the coordinator says of the cluster.
///
/// # Errors
/// It does not answer in time.
pub(crate) async fn cluster(coordinator: SocketAddr) -> anyhow::Result<v1::ClusterStatus> {
    let ask = async {
        let mut client = CoordinatorServiceClient::new(channel(coordinator).await?)
            .max_decoding_message_size(engram_proto::MAX_PEER_MESSAGE_BYTES);
        anyhow::Ok(client.get_cluster_status(v1::ClusterStatusRequest {}).await?.into_inner())
    };
    timeout(DEADLINE, ask).await.with_context(|| format!("{coordinator} does not answer"))?
}

/// Reports a worker's death to the coordinator: proof, where silence would only be suspicion.
///
/// # Errors
/// It does not answer in time.
pub(crate) async fn report_death(
    coordinator: SocketAddr,
    cluster: ClusterId,
    ordinal: u32,
    process_id: u32,
    exit: String,
) -> anyhow::Result<()> {
    let cluster = cluster.0.to_be_bytes().to_vec().into();
    let report = v1::DeathReport { cluster, ordinal, incarnation: 0, process_id, exit };
    let tell = async {
        CoordinatorServiceClient::new(channel(coordinator).await?).report_death(report).await?;
        anyhow::Ok(())
    };
    timeout(DEADLINE, tell).await.with_context(|| format!("{coordinator} does not answer"))?
}

async fn channel(address: SocketAddr) -> anyhow::Result<Channel> {
    let endpoint = Endpoint::from_shared(format!("http://{address}"))?.connect_timeout(DEADLINE);
    endpoint.connect().await.with_context(|| format!("failed to connect to {address}"))
}

/// Gets a page: its status code and its text.
///
/// # Errors
/// Nobody answers in time, or not in HTTP.
pub(crate) async fn page(http: SocketAddr, path: &str) -> anyhow::Result<(u16, String)> {
    let get = async {
        let mut stream = TcpStream::connect(http).await?;
        let request = format!("GET {path} HTTP/1.0\r\nHost: {http}\r\nConnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await?;
        let mut answer = Vec::new();
        stream.take(MAX_PAGE_BYTES + 1).read_to_end(&mut answer).await?;
        ensure!(answer.len() as u64 <= MAX_PAGE_BYTES, "the page is larger than {MAX_PAGE_BYTES} bytes");
        let answer = String::from_utf8(answer).context("the page is not text")?;
        let Some((head, body)) = answer.split_once("\r\n\r\n") else { bail!("the answer is not HTTP") };
        let code = head.split_whitespace().nth(1).and_then(|code| code.parse().ok()).context("no status code")?;
        anyhow::Ok((code, body.to_owned()))
    };
    timeout(DEADLINE, get).await.with_context(|| format!("{http} does not answer"))?
}
