//! Supervision of a worker process: learns which member it is and reports its death to the coordinators.
//!
//! A death report is proof, because the supervisor has waited for the process. It names the store and the incarnation that died.

use engram_client::Network;
use engram_identity::{ExpectedPeer, Role};
use engram_memory::ClusterId;
use engram_proto::answers::identity;
use engram_proto::v1;
use engram_proto::v1::admin_service_client::AdminServiceClient;
use engram_proto::v1::coordinator_service_client::CoordinatorServiceClient;
use std::net::SocketAddr;
use std::time::Duration;
use tokio::time::{sleep, timeout};
use tonic::Status;
use tonic::transport::{Channel, Endpoint};

/// Deadline of one call.
const DEADLINE: Duration = Duration::from_secs(5);
/// Interval between attempts to identify a worker that was just started. It listens before it opens its store, so an early attempt
/// waits for it, and every death after the first connection can be reported. Nothing announces that another process listens.
pub(crate) const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// Polls the worker behind an admin listener until it reports its member id, which it does once its store is open.
pub async fn member(admin: SocketAddr, network: &Network) -> v1::MemberId {
    loop {
        if let Ok(Ok(Some(member))) = timeout(DEADLINE, fetch_member(admin, network)).await {
            return member;
        }
        sleep(POLL_INTERVAL).await;
    }
}

async fn fetch_member(admin: SocketAddr, network: &Network) -> Result<Option<v1::MemberId>, Status> {
    let mut client =
        AdminServiceClient::new(channel(&admin.to_string(), &network.for_peer(ExpectedPeer::any(Role::Worker))).await?)
            .max_decoding_message_size(engram_proto::MAX_PEER_MESSAGE_BYTES);
    Ok(client.get_worker_status(v1::GetWorkerStatusRequest {}).await?.into_inner().member)
}

/// Reports to the coordinator at `address` (`host:port`) that the process `process_id` of a worker has exited. Takes at most 5 s.
///
/// # Errors
/// The coordinator does not answer in time, or rejects the report.
pub async fn report_death(
    address: &str,
    network: &Network,
    cluster: ClusterId,
    member: &v1::MemberId,
    process_id: u32,
    exit: String,
) -> Result<(), Status> {
    let v1::MemberId { ordinal, store, incarnation } = member.clone();
    let report = v1::ReportDeathRequest { cluster: identity(cluster.0), ordinal, store, incarnation, process_id, exit };
    let send = async {
        CoordinatorServiceClient::new(channel(address, &network.for_peer(ExpectedPeer::any(Role::Coordinator))).await?)
            .report_death(report)
            .await?;
        Ok(())
    };
    timeout(DEADLINE, send)
        .await
        .unwrap_or_else(|_| Err(Status::deadline_exceeded(format!("{address} does not answer"))))
}

async fn channel(address: &str, network: &Network) -> Result<Channel, Status> {
    let endpoint = Endpoint::from_shared(format!("http://{address}"));
    let endpoint = endpoint.map_err(|error| Status::invalid_argument(format!("{address}: {error}")))?;
    let channel = network.connect(endpoint.connect_timeout(DEADLINE)).await;
    channel.map_err(|error| Status::unavailable(format!("failed to connect to {address}: {error}")))
}
