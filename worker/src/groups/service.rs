//! `GroupService`, on the listener for clients.

use super::host::HostEvent;
use super::state::GroupState;
use crate::runs;
use crate::shared::Shared;
use engram_client::group::record_id;
use engram_collective::group::MemberId;
use engram_memory::RunId;
use engram_proto::v1::group_request::Request as Received;
use engram_proto::v1::group_service_server::GroupService;
use engram_proto::v1::{self, Problem, ProblemKind};
use futures::stream::{BoxStream, StreamExt as _};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{mpsc, oneshot};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, Streaming};

/// Queued messages for a process.
const RESPONSES: usize = 256;
/// Limit of the wait for the first message of a stream.
const JOIN_DEADLINE: Duration = Duration::from_secs(10);
/// Longest name of a group, and longest address.
const MAX_NAME: usize = 128;
const MAX_ADDRESS: usize = 256;
/// Allowed detection times in milliseconds: reports, five in a detection time, keep a stream open.
const DETECT_MS: std::ops::RangeInclusive<u64> = 10..=60_000;
/// Largest group: a message names the rank of its sender with 16 bits, and every member connects to all others.
const MAX_MEMBERS: u32 = 1_024;

/// `GroupService` of this worker.
pub(crate) struct GroupEndpoint {
    pub(crate) shared: Arc<Shared>,
}

fn invalid(text: impl Into<String>) -> Status {
    Problem::of(ProblemKind::Invalid, text).into_status()
}

impl GroupEndpoint {
    /// Returns the id of a group that this worker hosts.
    #[allow(clippy::result_large_err, reason = "the service returns it")]
    fn locate(&self, name: &str) -> Result<RunId, Status> {
        if name.is_empty() || name.len() > MAX_NAME {
            return Err(invalid(format!("name has {} bytes; allowed: 1 to {MAX_NAME}", name.len())));
        }
        let run = record_id(self.shared.setup.options.cluster, name);
        let partition = runs::partition(&self.shared, run);
        if self.shared.engine.position(partition).is_none() {
            return Err(self.shared.not_primary(partition).into_status());
        }
        Ok(run)
    }
}

#[allow(clippy::result_large_err, reason = "the service returns it")]
fn check(join: &v1::JoinGroup) -> Result<MemberId, Status> {
    let Some(member) = &join.member else { return Err(invalid("member is missing")) };
    for (field, address) in [("reduce_address", &member.reduce_address), ("state_address", &member.state_address)] {
        if address.is_empty() || address.len() > MAX_ADDRESS {
            return Err(invalid(format!("member.{field} has {} bytes; allowed: 1 to {MAX_ADDRESS}", address.len())));
        }
    }
    if !DETECT_MS.contains(&join.detect_ms) {
        let (least, most) = (DETECT_MS.start(), DETECT_MS.end());
        return Err(invalid(format!("timeout is {} ms; allowed: {least} to {most} ms", join.detect_ms)));
    }
    if !(1..=MAX_MEMBERS).contains(&join.min_members) {
        return Err(invalid(format!("min_members is {}; allowed: 1 to {MAX_MEMBERS}", join.min_members)));
    }
    Ok(MemberId(member.id))
}

#[tonic::async_trait]
impl GroupService for GroupEndpoint {
    type JoinGroupStream = BoxStream<'static, Result<v1::GroupResponse, Status>>;

    async fn join_group(
        &self,
        request: Request<Streaming<v1::GroupRequest>>,
    ) -> Result<Response<Self::JoinGroupStream>, Status> {
        let mut requests = request.into_inner();
        let first = tokio::time::timeout(JOIN_DEADLINE, requests.message()).await;
        let first = first.map_err(|_| Status::deadline_exceeded("the first message did not arrive in time"))??;
        let Some(Received::Join(join)) = first.and_then(|it| it.request) else {
            return Err(invalid("the first message must join a group"));
        };
        let run = self.locate(&join.name)?;
        let member = check(&join)?;
        if self.shared.lifecycle.is_stopping() {
            return Err(Status::unavailable("the worker is stopping"));
        }
        let settings = GroupState::new(join.name.clone(), join.layout, join.detect_ms, join.min_members);
        let host = self.shared.groups.host(&self.shared, run, settings).await.map_err(Problem::into_status)?;
        let (responses, stream) = mpsc::channel(RESPONSES);
        let number = rand::random();
        let ended = |_| Status::unavailable("the host of the group ended");
        host.send(HostEvent::Joined { stream: number, join, responses }).await.map_err(ended)?;
        tokio::spawn(async move {
            while let Ok(Some(request)) = requests.message().await {
                if host.send(HostEvent::Received { member, request }).await.is_err() {
                    return;
                }
            }
            // The host may have ended.
            let _ = host.send(HostEvent::Closed { member, stream: number }).await;
        });
        Ok(Response::new(ReceiverStream::new(stream).boxed()))
    }

    async fn get_group(&self, request: Request<v1::GetGroupRequest>) -> Result<Response<v1::GroupStatus>, Status> {
        let name = request.into_inner().name;
        let run = self.locate(&name)?;
        let unknown = || Problem::of(ProblemKind::RunUnknown, format!("there is no group {name}")).into_status();
        let host = self.shared.groups.existing(run).await.ok_or_else(unknown)?;
        let (reply, status) = oneshot::channel();
        host.send(HostEvent::Status(reply)).await.map_err(|_| unknown())?;
        status.await.map(Response::new).map_err(|_| unknown())
    }
}
