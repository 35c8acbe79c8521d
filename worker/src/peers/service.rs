//! The listening side of the links and of the beats.

use super::link::{self, HELLO_DEADLINE};
use crate::shared::Shared;
use engram_identity::{Caller, Reason};
use engram_memory::Ordinal;
use engram_proto::v1::peer_service_server::PeerService;
use engram_proto::v1::{PeerBeat, PeerFrame};
use futures::StreamExt as _;
use futures::stream::BoxStream;
use std::sync::Arc;
use tokio::time::timeout;
use tonic::{Extensions, Request, Response, Status, Streaming};

/// What workers ask of this one.
pub(crate) struct Service {
    pub(crate) shared: Arc<Shared>,
}

#[tonic::async_trait]
impl PeerService for Service {
    type ExchangeStream = BoxStream<'static, Result<PeerFrame, Status>>;
    type BeatStream = BoxStream<'static, Result<PeerBeat, Status>>;

    async fn exchange(&self, request: Request<Streaming<PeerFrame>>) -> Result<Response<Self::ExchangeStream>, Status> {
        let shared = Arc::clone(&self.shared);
        let (_, extensions, mut frames) = request.into_parts();
        let first = first(frames.message()).await?;
        let member = shared.greeter.check_caller(first.as_ref().and_then(|frame| frame.hello.as_ref()))?;
        check_sender(&shared, &extensions, member.ordinal)?;
        let outbox = shared.links.outbox(shared.greeter.hello());
        let answer = outbox.frames().map(Ok).boxed();
        let link = shared.links.install(member, outbox).map_err(|newest| super::hello::Refused::Superseded {
            caller: member.ordinal,
            found: member.incarnation,
            newest,
        })?;
        tokio::spawn(async move {
            let reason = link::read(&shared, &link, frames).await;
            link::ended(&shared, &link, &reason);
        });
        Ok(Response::new(answer))
    }

    async fn beat(&self, request: Request<Streaming<PeerBeat>>) -> Result<Response<Self::BeatStream>, Status> {
        let shared = Arc::clone(&self.shared);
        let (_, extensions, mut beats) = request.into_parts();
        let first = first(beats.message()).await?;
        let member = shared.greeter.check_caller(first.as_ref().and_then(|beat| beat.hello.as_ref()))?;
        check_sender(&shared, &extensions, member.ordinal)?;
        super::beats::answer(shared, member, first, beats)
    }
}

/// Whether a stream is of the worker that its hello names.
fn check_sender(shared: &Shared, extensions: &Extensions, says: Ordinal) -> Result<(), Status> {
    let caller = Caller::of(extensions);
    if caller.is_worker(says.0) {
        return Ok(());
    }
    shared.count_refusal(Reason::Sender);
    Err(Status::permission_denied(format!("the hello is of worker {says}, the certificate of {caller}")))
}

/// The first message of a stream, which has to come soon.
async fn first<T>(message: impl Future<Output = Result<Option<T>, Status>>) -> Result<Option<T>, Status> {
    timeout(HELLO_DEADLINE, message).await.map_err(|_| Status::deadline_exceeded("no hello came"))?
}
