//! What the process above a worker does for the cluster: it knows who the worker is, and reports its end.
//!
//! A report is proof: whoever sends it has seen the process end. It names the disk and the incarnation that died, never a later one.

use engram_client::Network;
use engram_identity::{Expected, Role};
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

/// How long a process may take to answer.
const DEADLINE: Duration = Duration::from_secs(5);
/// Between attempts to learn who a worker that was just started is: it listens before it reads its disk, so whoever knocks by then is
/// answered before anybody hears of it, and no death goes unreported for being early.
pub(crate) const ASK: Duration = Duration::from_millis(5);

/// Asks the worker behind an admin listener who it is, until it says so: it answers when its store is open.
pub async fn member(admin: SocketAddr, network: &Network) -> v1::MemberId {
    loop {
        if let Ok(Ok(Some(member))) = timeout(DEADLINE, ask(admin, network)).await {
            return member;
        }
        sleep(ASK).await;
    }
}

async fn ask(admin: SocketAddr, network: &Network) -> Result<Option<v1::MemberId>, Status> {
    let mut client =
        AdminServiceClient::new(channel(&admin.to_string(), &network.to(Expected::any(Role::Worker))).await?)
            .max_decoding_message_size(engram_proto::MAX_PEER_MESSAGE_BYTES);
    Ok(client.get_worker_status(v1::WorkerStatusRequest {}).await?.into_inner().member)
}

/// Reports to the coordinator at `address` (`host:port`) that the process `process_id` of a worker has ended: proof, where silence
/// would only be suspicion. Takes 5 s at most.
///
/// # Errors
/// The coordinator does not answer in time, or refuses.
pub async fn report_death(
    address: &str,
    network: &Network,
    cluster: ClusterId,
    member: &v1::MemberId,
    process_id: u32,
    exit: String,
) -> Result<(), Status> {
    let v1::MemberId { ordinal, store, incarnation } = member.clone();
    let report = v1::DeathReport { cluster: identity(cluster.0), ordinal, store, incarnation, process_id, exit };
    let tell = async {
        CoordinatorServiceClient::new(channel(address, &network.to(Expected::any(Role::Coordinator))).await?)
            .report_death(report)
            .await?;
        Ok(())
    };
    timeout(DEADLINE, tell)
        .await
        .unwrap_or_else(|_| Err(Status::deadline_exceeded(format!("{address} does not answer"))))
}

async fn channel(address: &str, network: &Network) -> Result<Channel, Status> {
    let endpoint = Endpoint::from_shared(format!("http://{address}"));
    let endpoint = endpoint.map_err(|error| Status::invalid_argument(format!("{address}: {error}")))?;
    let channel = network.connect(endpoint.connect_timeout(DEADLINE)).await;
    channel.map_err(|error| Status::unavailable(format!("failed to connect to {address}: {error}")))
}
