//! The connection of a process to the membership service of its group: opened again when it breaks or the service moves.

use super::member::Signal;
use super::wire::{notice_from_wire, report_to_wire};
use super::{PeerAddress, Security};
use crate::client::Client;
use engram_collective::group::{self, Report};
use engram_identity::SharedCertificate;
use engram_memory::{MemoryId, RunId, partition_of};
use engram_proto::v1::group_service_client::GroupServiceClient;
use engram_proto::v1::{
    self, Problem, ProblemKind, group_request::Request as Sent, group_response::Response as Received,
};
use std::sync::mpsc::Sender;
use std::time::Duration;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Status;
use xxhash_rust::xxh3::xxh3_128;

/// Messages that wait to be sent. A lost report is replaced by the next.
pub(super) const QUEUE: usize = 64;
/// Limit of an attempt to open a stream.
const OPEN_DEADLINE: Duration = Duration::from_secs(2);
/// Interval between attempts: the service moves with the primary of its partition.
const RETRY_INTERVAL: Duration = Duration::from_millis(50);

/// Why a worker of an earlier version is not used.
const NO_CERTIFICATE: &str =
    "the worker sent no certificate for the connections between the processes of the group; required with TLS";

/// Returns the id of the record of a group, by its name.
pub fn record_id(cluster: engram_memory::ClusterId, name: &str) -> RunId {
    let mut bytes = cluster.0.to_be_bytes().to_vec();
    // No run has such a name.
    bytes.extend_from_slice(b"group/");
    bytes.extend_from_slice(name.as_bytes());
    RunId(xxh3_128(&bytes))
}

/// Converts what the member sends.
pub(super) fn outgoing(report: Option<Report>) -> v1::GroupRequest {
    let request = report.map_or(Sent::ProbeAnswer(v1::GroupProbe {}), |report| Sent::Report(report_to_wire(&report)));
    v1::GroupRequest { request: Some(request) }
}

/// Keeps a stream to the service open until the receiver of the signals has ended.
pub(super) async fn keep_open(
    client: Client,
    join: v1::JoinGroup,
    signals: Sender<Signal>,
    mut reports: mpsc::Receiver<v1::GroupRequest>,
    security: Security,
) {
    loop {
        match connected(&client, &join, (&signals, &security), &mut reports).await {
            Ok(true) => return,
            Ok(false) => {}
            Err(status) if is_rejection(&status) => {
                // Without a receiver the group has ended.
                let _ = signals.send(Signal::Rejected(status.message().to_owned()));
                return;
            }
            Err(status) => {
                tracing::debug!(error = status.message(), "no connection to the membership service");
                // The map may be outdated.
                let _ = client.refreshed_map().await;
            }
        }
        if reports.is_closed() {
            return;
        }
        tokio::time::sleep(RETRY_INTERVAL).await;
    }
}

/// Whether another attempt would fail as well.
fn is_rejection(status: &Status) -> bool {
    use ProblemKind::{Denied, Invalid, RunFull, Unauthenticated, WrongCluster};
    Problem::from_status(status)
        .is_some_and(|it| matches!(it.kind(), Invalid | Denied | Unauthenticated | WrongCluster | RunFull))
        || status.code() == tonic::Code::Unimplemented
}

/// Runs one stream until it ends; returns whether the group has ended.
async fn connected(
    client: &Client,
    join: &v1::JoinGroup,
    (signals, security): (&Sender<Signal>, &Security),
    reports: &mut mpsc::Receiver<v1::GroupRequest>,
) -> Result<bool, Status> {
    let unavailable = |text: String| Status::unavailable(text);
    let map = client.map().map_err(|error| unavailable(error.to_string()))?;
    let id = MemoryId(record_id(map.cluster, &join.name).0 as u64);
    let owner = map.owner(partition_of(id, map.partition_count()));
    let owner = owner.ok_or_else(|| unavailable("the partition of the group has no primary yet".into()))?;
    let channel = client.channel_of(&map, owner).map_err(|failure| unavailable(failure.problem.message))?;
    let (outgoing, stream) = mpsc::channel(QUEUE);
    let first = v1::GroupRequest { request: Some(Sent::Join(join.clone())) };
    outgoing.try_send(first).expect("the queue is empty");
    let mut request = client.request(ReceiverStream::new(stream), OPEN_DEADLINE);
    request.metadata_mut().remove("grpc-timeout");
    let mut service = GroupServiceClient::new(channel);
    let opened = tokio::time::timeout(OPEN_DEADLINE, service.join_group(request)).await;
    let mut responses = opened.map_err(|_| unavailable("the worker does not answer".into()))??.into_inner();
    // What was queued before is outdated.
    while reports.try_recv().is_ok() {}
    loop {
        tokio::select! {
            response = responses.message() => match response? {
                Some(response) => if !forward(response, signals, security) {
                    return Ok(true);
                },
                None => return Ok(false),
            },
            report = reports.recv() => match report {
                Some(report) => if outgoing.send(report).await.is_err() {
                    return Ok(false);
                },
                None => return Ok(true),
            },
        }
    }
}

/// Returns the certificate that the processes of the group share; `None` if there is none, or it is damaged.
fn certificate(joined: v1::GroupJoined) -> Option<SharedCertificate> {
    let v1::GroupCertificate { certificate, key } = joined.certificate?;
    SharedCertificate::from_der(&certificate, &key).ok()
}

/// Passes a message to the member; returns whether it is there.
fn forward(response: v1::GroupResponse, signals: &Sender<Signal>, security: &Security) -> bool {
    let signal = match response.response {
        Some(Received::Joined(joined)) => {
            let is_secure = security.receive(certificate(joined));
            Some(if is_secure { Signal::Connected } else { Signal::Rejected(NO_CERTIFICATE.to_owned()) })
        }
        Some(Received::Probe(_)) => Some(Signal::Probe),
        Some(Received::Notice(notice)) => {
            let address = |it: v1::GroupMember| {
                (group::MemberId(it.id), PeerAddress { reduce: it.reduce_address, state: it.state_address })
            };
            notice_from_wire(notice)
                .map(|(term, notice, members)| Signal::Notice(term, notice, members.into_iter().map(address).collect()))
        }
        None => None,
    };
    signal.is_none_or(|signal| signals.send(signal).is_ok())
}
