//! Heartbeat streams: a hello, then heartbeats of the worker; views of the cluster in the other direction.

use super::{Views, malformed};
use crate::state::{GpuFault, HeartbeatInfo, HelloOutcome, Introduction, WorkerCertificate, WorkerReport};
use crate::{Shared, wire};
use engram_identity::RootId;
use engram_memory::{Incarnation, Member, Ordinal, PartitionId};
use engram_proto::{protocol, v1};
use std::sync::Arc;
use tokio::sync::mpsc;
use tokio_stream::StreamExt as _;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Status, Streaming};

/// Views queued for a worker that does not read; it gets the newest when it does.
const VIEW_QUEUE: usize = 4;

/// Reads the heartbeat that opens a stream.
pub(super) async fn first_heartbeat(
    heartbeats: &mut Streaming<v1::HeartbeatRequest>,
) -> Result<v1::HeartbeatRequest, Status> {
    heartbeats.message().await?.ok_or_else(|| Status::invalid_argument("the stream ended before a hello"))
}

impl Shared {
    /// Handles a heartbeat stream whose hello was read.
    pub(super) fn heartbeats(
        self: &Arc<Self>,
        hello: &v1::Hello,
        heartbeats: Streaming<v1::HeartbeatRequest>,
    ) -> Result<Views, Status> {
        let member = self.accept_hello(hello)?;
        let (replies, stream) = mpsc::channel(VIEW_QUEUE);
        tokio::spawn(send_views(Arc::clone(self), replies));
        tokio::spawn(receive_heartbeats(Arc::clone(self), member, heartbeats));
        self.reconsider.notify_one();
        Ok(ReceiverStream::new(stream))
    }

    fn accept_hello(&self, hello: &v1::Hello) -> Result<Member, Status> {
        let (min, max) = (hello.protocol_min, hello.protocol_max);
        if protocol::common(min, max).is_none() {
            return Err(Status::failed_precondition(format!(
                "no common protocol version: the worker speaks {min} to {max}, the coordinator {} to {}",
                protocol::OLDEST,
                protocol::NEWEST
            )));
        }
        let member = hello.member.as_ref().ok_or_else(|| Status::invalid_argument("the hello names no member"))?;
        let member = engram_wire::member_id_from_proto(member).map_err(|error| malformed(&error))?;
        let mut state = self.state();
        let max_workers = state.max_workers(&self.options);
        if member.ordinal.0 >= max_workers {
            return Err(Status::failed_precondition(format!(
                "worker {} does not belong to a cluster of {max_workers} workers",
                member.ordinal
            )));
        }
        let introduction = Introduction {
            member,
            lossless_since: Incarnation(hello.lossless_since),
            process_id: hello.process_id,
            addresses: wire::addresses(hello),
            seen_version: hello.newest_map_version,
        };
        match state.accept_hello(introduction, self.now_ms()) {
            HelloOutcome::Accepted => {
                tracing::info!(%member, "worker connected");
                Ok(member)
            }
            HelloOutcome::Superseded => Err(Status::failed_precondition(format!(
                "a newer process of worker {} with the same store is connected",
                member.ordinal
            ))),
        }
    }

    /// Handles the report that a worker's process has ended.
    pub(super) fn report_death(&self, report: &v1::ReportDeathRequest) -> Result<(), Status> {
        let store = match report.store.as_ref() {
            [] => None,
            store => Some(engram_wire::store_from_proto(store).map_err(|error| malformed(&error))?),
        };
        tracing::warn!(worker = report.ordinal, process = report.process_id, exit = report.exit, "worker died");
        let (ordinal, now_ms) = (Ordinal(report.ordinal), self.now_ms());
        let changed = self.state().died(ordinal, store, report.incarnation, report.process_id, now_ms);
        if changed {
            self.reconsider.notify_one();
            self.publish();
        }
        Ok(())
    }
}

/// Sends the view now and at every change.
async fn send_views(shared: Arc<Shared>, replies: mpsc::Sender<Result<v1::HeartbeatResponse, Status>>) {
    let mut view = shared.view.subscribe();
    view.mark_changed();
    let mut ended = shared.ended.subscribe();
    loop {
        let changed = tokio::select! {
            changed = view.changed() => changed,
            () = replies.closed() => return,
            _ = ended.wait_for(|ended| *ended) => return,
        };
        let reply = v1::HeartbeatResponse::clone(&view.borrow_and_update());
        if changed.is_err() || replies.send(Ok(reply)).await.is_err() {
            return;
        }
    }
}

/// Receives the heartbeats of one worker until its stream ends.
async fn receive_heartbeats(shared: Arc<Shared>, member: Member, mut heartbeats: Streaming<v1::HeartbeatRequest>) {
    let mut ended = shared.ended.subscribe();
    loop {
        let heartbeat = tokio::select! {
            heartbeat = heartbeats.next() => heartbeat,
            _ = ended.wait_for(|ended| *ended) => return,
        };
        let Some(Ok(heartbeat)) = heartbeat else { break };
        let report = WorkerReport {
            memories: heartbeat.memories,
            ready: heartbeat.ready,
            disk_full: heartbeat.disk_full,
            suspects: heartbeat.suspects.into_iter().map(Ordinal).collect(),
            operations: heartbeat.operations,
            leaderless: heartbeat.leaderless_partitions.into_iter().map(PartitionId).collect(),
            bootstrap: heartbeat.bootstrap,
            certificate: heartbeat.certificate.map(|it| WorkerCertificate {
                trusted_roots: it.trusted_roots.into_iter().map(RootId).collect(),
                root: RootId(it.issuer_root),
            }),
            gpu_fault: heartbeat.gpu_fault.map(|it| GpuFault { was_in_use: it.was_in_use, reason: it.reason }),
        };
        let info = HeartbeatInfo {
            leaving: heartbeat.leaving,
            queued: heartbeat.queued,
            turns: heartbeat.progress_count,
            map_version: heartbeat.map_version,
            report,
        };
        if shared.state().heartbeat(&member, info, shared.now_ms()) {
            shared.reconsider.notify_one();
            shared.publish();
        }
    }
    if shared.state().closed(&member, shared.now_ms()) {
        shared.reconsider.notify_one();
        shared.publish();
    }
}
