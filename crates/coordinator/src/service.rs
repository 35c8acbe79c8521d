//! The gRPC side: streams of beats, reports of deaths, status.

use crate::state::Greeting;
use crate::{Shared, wire};
use engram_memory::{Member, Ordinal};
use engram_proto::v1;
use engram_proto::v1::coordinator_service_server::CoordinatorService;
use std::sync::Arc;
use tokio::sync::mpsc;
use tokio_stream::StreamExt as _;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, Streaming};

/// The version of the protocol between members that this build speaks.
pub(crate) const PROTOCOL: u32 = 1;
/// Views waiting for a worker that does not read; it gets the newest when it does.
const VIEW_QUEUE: usize = 4;

pub(crate) struct Service {
    pub(crate) shared: Arc<Shared>,
}

#[tonic::async_trait]
impl CoordinatorService for Service {
    type HeartbeatStream = ReceiverStream<Result<v1::BeatReply, Status>>;

    async fn heartbeat(
        &self,
        request: Request<Streaming<v1::Beat>>,
    ) -> Result<Response<Self::HeartbeatStream>, Status> {
        let mut beats = request.into_inner();
        let first =
            beats.message().await?.ok_or_else(|| Status::invalid_argument("the stream ended before a hello"))?;
        let member = self.greet(first.hello.as_ref())?;
        let (replies, stream) = mpsc::channel(VIEW_QUEUE);
        tokio::spawn(tell(Arc::clone(&self.shared), replies));
        tokio::spawn(listen(Arc::clone(&self.shared), member, beats));
        self.shared.reconsider.notify_one();
        Ok(Response::new(ReceiverStream::new(stream)))
    }

    async fn report_death(&self, request: Request<v1::DeathReport>) -> Result<Response<v1::DeathReply>, Status> {
        let report = request.into_inner();
        self.check_cluster(&report.cluster)?;
        let changed = self.shared.state().died(Ordinal(report.ordinal), report.incarnation);
        tracing::warn!(worker = report.ordinal, process = report.process_id, exit = report.exit, "worker died");
        if changed {
            self.shared.publish();
        }
        Ok(Response::new(v1::DeathReply {}))
    }

    async fn get_cluster_status(
        &self,
        _request: Request<v1::ClusterStatusRequest>,
    ) -> Result<Response<v1::ClusterStatus>, Status> {
        let options = &self.shared.options;
        let state = self.shared.state();
        let silent = state.members().filter(|heard| !heard.alive);
        let silent = silent.map(|heard| format!("worker {} does not answer", heard.member.ordinal));
        let behind = state.members().filter(|heard| heard.alive && !heard.ready);
        let behind = behind.map(|heard| format!("worker {} is getting ready", heard.member.ordinal));
        let status = v1::ClusterStatus {
            cluster: options.cluster.0.to_be_bytes().to_vec().into(),
            cluster_name: options.cluster_name.clone(),
            map: state.map().map(wire::map_to_proto),
            members: state.members().map(wire::member_to_proto).collect(),
            expected_workers: options.workers,
            conditions: state.conditions().iter().cloned().chain(silent).chain(behind).collect(),
        };
        Ok(Response::new(status))
    }
}

impl Service {
    fn greet(&self, hello: Option<&v1::Hello>) -> Result<Member, Status> {
        let hello = hello.ok_or_else(|| Status::invalid_argument("the first beat has no hello"))?;
        self.check_cluster(&hello.cluster)?;
        if hello.protocol_min > PROTOCOL || hello.protocol_max < PROTOCOL {
            let (min, max) = (hello.protocol_min, hello.protocol_max);
            return Err(Status::failed_precondition(format!(
                "protocol versions do not meet: the worker speaks {min} to {max}, the coordinator {PROTOCOL}"
            )));
        }
        let member = hello.member.as_ref().ok_or_else(|| Status::invalid_argument("the hello names no member"))?;
        let member = wire::member_id_from_proto(member).map_err(|error| Status::invalid_argument(error.to_string()))?;
        let workers = self.shared.options.workers;
        if member.ordinal.0 >= workers {
            return Err(Status::failed_precondition(format!(
                "worker {} does not belong to a cluster of {workers} workers",
                member.ordinal
            )));
        }
        match self.shared.state().greet(member, wire::addresses(hello)) {
            Greeting::Welcome => {
                tracing::info!(%member, "worker said hello");
                Ok(member)
            }
            Greeting::Superseded => Err(Status::failed_precondition(format!(
                "a newer process of worker {} on the same store was heard",
                member.ordinal
            ))),
        }
    }

    fn check_cluster(&self, bytes: &[u8]) -> Result<(), Status> {
        let expected = self.shared.options.cluster;
        match wire::cluster_from_proto(bytes) {
            Ok(found) if found == expected => Ok(()),
            Ok(found) => Err(Status::failed_precondition(format!("this is cluster {expected}, not {found}"))),
            Err(error) => Err(Status::invalid_argument(error.to_string())),
        }
    }
}

/// Sends the view now and at every change.
async fn tell(shared: Arc<Shared>, replies: mpsc::Sender<Result<v1::BeatReply, Status>>) {
    let mut view = shared.view.subscribe();
    view.mark_changed();
    loop {
        let changed = tokio::select! {
            changed = view.changed() => changed,
            () = replies.closed() => return,
        };
        let reply = v1::BeatReply::clone(&view.borrow_and_update());
        if changed.is_err() || replies.send(Ok(reply)).await.is_err() {
            return;
        }
    }
}

/// Takes the beats of one worker until its stream ends.
async fn listen(shared: Arc<Shared>, member: Member, mut beats: Streaming<v1::Beat>) {
    while let Some(Ok(beat)) = beats.next().await {
        if shared.state().beat(&member, beat.memories, beat.ready) {
            shared.publish();
        }
    }
    if shared.state().lost(&member) {
        tracing::warn!(%member, "the worker's heartbeat stream ended");
        shared.publish();
    }
}
