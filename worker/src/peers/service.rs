//! Listening side of links and heartbeats.

use super::link::{self, HELLO_DEADLINE};
use crate::shared::Shared;
use engram_identity::{Caller, Reason};
use engram_memory::Ordinal;
use engram_proto::v1::peer_service_server::PeerService;
use engram_proto::v1::{PeerFrame, PeerHeartbeat};
use futures::StreamExt as _;
use futures::stream::BoxStream;
use std::sync::Arc;
use tokio::time::timeout;
use tonic::{Extensions, Request, Response, Status, Streaming};

/// `PeerService` of this worker.
pub(crate) struct PeerEndpoint {
    pub(crate) shared: Arc<Shared>,
}

#[tonic::async_trait]
impl PeerService for PeerEndpoint {
    type ExchangeStream = BoxStream<'static, Result<PeerFrame, Status>>;
    type HeartbeatStream = BoxStream<'static, Result<PeerHeartbeat, Status>>;

    async fn exchange(&self, request: Request<Streaming<PeerFrame>>) -> Result<Response<Self::ExchangeStream>, Status> {
        let shared = Arc::clone(&self.shared);
        let (_, extensions, mut frames) = request.into_parts();
        let first_message = first_message(frames.message()).await?;
        let member = shared.setup.hello.check_caller(first_message.as_ref().and_then(|frame| frame.hello.as_ref()))?;
        check_sender(&shared, &extensions, member.ordinal)?;
        let outbox = shared.peers.links().outbox(shared.setup.hello.hello());
        let answer = outbox.frames().map(Ok).boxed();
        let link = shared.peers.links().install(member, outbox).map_err(|newest| {
            super::hello::HelloError::Superseded { caller: member.ordinal, actual: member.incarnation, newest }
        })?;
        tokio::spawn(async move {
            let reason = link::read(&shared, &link, frames).await;
            link::close_link(&shared, &link, &reason);
        });
        Ok(Response::new(answer))
    }

    async fn heartbeat(
        &self,
        request: Request<Streaming<PeerHeartbeat>>,
    ) -> Result<Response<Self::HeartbeatStream>, Status> {
        let shared = Arc::clone(&self.shared);
        let (_, extensions, mut heartbeats) = request.into_parts();
        let first_message = first_message(heartbeats.message()).await?;
        let member =
            shared.setup.hello.check_caller(first_message.as_ref().and_then(|heartbeat| heartbeat.hello.as_ref()))?;
        check_sender(&shared, &extensions, member.ordinal)?;
        super::heartbeats::accept(shared, member, first_message, heartbeats)
    }
}

/// Checks that the certificate of a stream is that of the worker in its hello.
fn check_sender(shared: &Shared, extensions: &Extensions, claimed: Ordinal) -> Result<(), Status> {
    let caller = Caller::of(extensions);
    if caller.is_worker(claimed.0) {
        return Ok(());
    }
    shared.setup.count_refusal(Reason::Sender);
    Err(Status::permission_denied(format!("the hello names worker {claimed}, the certificate {caller}")))
}

/// Receives the first message of a stream, with a deadline.
async fn first_message<T>(message: impl Future<Output = Result<Option<T>, Status>>) -> Result<Option<T>, Status> {
    timeout(HELLO_DEADLINE, message).await.map_err(|_| Status::deadline_exceeded("no hello received in time"))?
}
