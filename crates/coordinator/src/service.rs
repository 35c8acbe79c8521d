//! The gRPC service: heartbeat streams, death reports, proposals, orders, status.

use crate::state::{GpuFault, HeartbeatInfo, HelloOutcome, Introduction, Proposal, WorkerCertificate};
use crate::{Shared, wire};
use engram_cluster::ExpectedEntry;
use engram_identity::RootId;
use engram_mapstore::{Goal, Scale};
use engram_memory::{Incarnation, Member, Ordinal, PartitionId, Term};
use engram_proto::v1::coordinator_service_server::CoordinatorService;
use engram_proto::{protocol, v1};
use std::sync::Arc;
use tokio::sync::mpsc;
use tokio_stream::StreamExt as _;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, Streaming};

/// Views queued for a worker that does not read; it gets the newest when it does.
const VIEW_QUEUE: usize = 4;

/// Stream of views to a worker.
pub(crate) type Views = ReceiverStream<Result<v1::HeartbeatResponse, Status>>;

#[derive(Clone)]
pub(crate) struct Service {
    pub(crate) shared: Arc<Shared>,
}

#[tonic::async_trait]
impl CoordinatorService for Service {
    type HeartbeatStream = Views;

    async fn heartbeat(
        &self,
        request: Request<Streaming<v1::HeartbeatRequest>>,
    ) -> Result<Response<Self::HeartbeatStream>, Status> {
        let mut heartbeats = request.into_inner();
        let first = first_heartbeat(&mut heartbeats).await?;
        self.heartbeats(&first, heartbeats)
    }

    async fn report_death(
        &self,
        request: Request<v1::ReportDeathRequest>,
    ) -> Result<Response<v1::ReportDeathResponse>, Status> {
        let report = request.into_inner();
        self.check_cluster(&report.cluster)?;
        let store = match report.store.as_ref() {
            [] => None,
            store => Some(engram_wire::store_from_proto(store).map_err(|error| malformed(&error))?),
        };
        tracing::warn!(worker = report.ordinal, process = report.process_id, exit = report.exit, "worker died");
        let (ordinal, now_ms) = (Ordinal(report.ordinal), self.shared.now_ms());
        let changed = self.shared.state().died(ordinal, store, report.incarnation, report.process_id, now_ms);
        if changed {
            self.shared.reconsider.notify_one();
            self.shared.publish();
        }
        Ok(Response::new(v1::ReportDeathResponse {}))
    }

    async fn propose_map_changes(
        &self,
        request: Request<v1::ProposeMapChangesRequest>,
    ) -> Result<Response<v1::ProposeMapChangesResponse>, Status> {
        let request = request.into_inner();
        self.check_cluster(&request.cluster)?;
        let proposer =
            request.member.as_ref().ok_or_else(|| Status::invalid_argument("the request names no member"))?;
        let proposer = engram_wire::member_id_from_proto(proposer).map_err(|error| malformed(&error))?;
        let proposals = request.proposals.iter().map(|proposal| self.proposal(proposal)).collect::<Result<_, _>>()?;
        let mut state = self.shared.state();
        if state.is_closing() {
            return Err(Status::unavailable("this coordinator is shutting down: retry with its successor"));
        }
        state.propose(proposer.ordinal, proposals);
        let map_version = state.map().map_or(0, |map| map.version);
        drop(state);
        self.shared.reconsider.notify_one();
        Ok(Response::new(v1::ProposeMapChangesResponse { map_version }))
    }

    async fn set_goal(&self, request: Request<v1::SetGoalRequest>) -> Result<Response<v1::SetGoalResponse>, Status> {
        let request = request.into_inner();
        self.check_cluster(&request.cluster)?;
        let _exclusive = self.shared.ordering.lock().await;
        let goal = self.updated_goal(&request)?;
        let store = Arc::clone(&self.shared.store);
        let stored = goal.clone();
        let written = tokio::task::spawn_blocking(move || store.set_goal(&stored)).await;
        match written {
            Ok(Ok(())) => {}
            Ok(Err(error @ engram_mapstore::Error::NotSupported { .. })) => {
                return Err(Status::failed_precondition(error.to_string()));
            }
            Ok(Err(error)) => return Err(Status::unavailable(format!("failed to store the order: {error}"))),
            Err(_) => return Err(Status::internal("the map store panicked")),
        }
        let mut state = self.shared.state();
        state.set_goal(goal);
        let reply = v1::SetGoalResponse {
            workers: state.goal().workers(self.shared.options.workers),
            draining: state.draining(&self.shared.options).iter().map(|ordinal| ordinal.0).collect(),
        };
        drop(state);
        tracing::info!(workers = reply.workers, draining = ?reply.draining, "cluster goal changed");
        self.shared.reconsider.notify_one();
        Ok(Response::new(reply))
    }

    async fn get_cluster_status(
        &self,
        _request: Request<v1::GetClusterStatusRequest>,
    ) -> Result<Response<v1::ClusterStatus>, Status> {
        let options = &self.shared.options;
        let state = self.shared.state();
        let silent = state.members().filter(|worker| !worker.alive);
        let silent = silent.map(|worker| format!("worker {} sends no heartbeats", worker.member.ordinal));
        let starting = state.members().filter(|worker| worker.alive && !worker.ready);
        let starting = starting.map(|worker| format!("worker {} is starting", worker.member.ordinal));
        let leaderless =
            state.members().flat_map(|worker| worker.leaderless.iter().map(move |partition| (partition, worker)));
        let leaderless = leaderless.map(|(partition, worker)| {
            let ordinal = worker.member.ordinal;
            format!(
                "partition {partition} is leaderless: the replica of worker {ordinal} is damaged or incomplete, and no other in-sync replica \
                 took over; `engram partition force-promote {partition}` shows what a forced promotion would lose"
            )
        });
        let status = v1::ClusterStatus {
            cluster: options.cluster.0.to_be_bytes().to_vec().into(),
            cluster_name: options.cluster_name.clone(),
            map: state.map().map(engram_wire::map_to_proto),
            members: state.members().map(wire::member_to_proto).collect(),
            expected_workers: state.goal().workers(options.workers),
            conditions: state.conditions().iter().cloned().chain(leaderless).chain(silent).chain(starting).collect(),
            draining: state.draining(options).iter().map(|ordinal| ordinal.0).collect(),
            replication_factor: options.replication_factor,
            map_lost: state.lost().unwrap_or_default().to_owned(),
            overrides: state.orders().iter().map(wire::order_to_proto).collect(),
            version: env!("CARGO_PKG_VERSION").into(),
            protocol_min: protocol::OLDEST,
            protocol_max: protocol::NEWEST,
        };
        Ok(Response::new(status))
    }

    async fn report_map_state(
        &self,
        request: Request<v1::ReportMapStateRequest>,
    ) -> Result<Response<v1::ReportMapStateResponse>, Status> {
        let request = request.into_inner();
        self.check_cluster(&request.cluster)?;
        self.shared.receive_map_state(&request)?;
        Ok(Response::new(v1::ReportMapStateResponse {}))
    }

    async fn rebuild_map(
        &self,
        request: Request<v1::RebuildMapRequest>,
    ) -> Result<Response<v1::RebuildMapResponse>, Status> {
        let request = request.into_inner();
        self.check_cluster(&request.cluster)?;
        self.shared.rebuild_map(&request).await.map(Response::new)
    }

    async fn force_promote(
        &self,
        request: Request<v1::ForcePromoteRequest>,
    ) -> Result<Response<v1::ForcePromoteResponse>, Status> {
        let request = request.into_inner();
        self.check_cluster(&request.cluster)?;
        self.shared.force_promote(&request).await.map(Response::new)
    }
}

/// Reads the heartbeat that opens a stream.
pub(crate) async fn first_heartbeat(
    heartbeats: &mut Streaming<v1::HeartbeatRequest>,
) -> Result<v1::HeartbeatRequest, Status> {
    heartbeats.message().await?.ok_or_else(|| Status::invalid_argument("the stream ended before a hello"))
}

impl Service {
    /// Handles a heartbeat stream whose first message was read.
    pub(crate) fn heartbeats(
        &self,
        first: &v1::HeartbeatRequest,
        heartbeats: Streaming<v1::HeartbeatRequest>,
    ) -> Result<Response<Views>, Status> {
        let member = self.accept_hello(first.hello.as_ref())?;
        let (replies, stream) = mpsc::channel(VIEW_QUEUE);
        tokio::spawn(send_views(Arc::clone(&self.shared), replies));
        tokio::spawn(receive_heartbeats(Arc::clone(&self.shared), member, heartbeats));
        self.shared.reconsider.notify_one();
        Ok(Response::new(ReceiverStream::new(stream)))
    }

    fn accept_hello(&self, hello: Option<&v1::Hello>) -> Result<Member, Status> {
        let hello = hello.ok_or_else(|| Status::invalid_argument("the first heartbeat has no hello"))?;
        self.check_cluster(&hello.cluster)?;
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
        let mut state = self.shared.state();
        let max_workers = state.max_workers(&self.shared.options);
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
        match state.accept_hello(introduction, self.shared.now_ms()) {
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

    fn proposal(&self, message: &v1::MapChange) -> Result<Proposal, Status> {
        let partition = PartitionId(message.partition);
        let partitions = self.shared.options.partitions;
        if partition.0 >= partitions {
            return Err(Status::invalid_argument(format!(
                "partition {partition} does not exist: there are {partitions}, numbered from 0"
            )));
        }
        let change = engram_wire::change_from_proto(message.change.as_ref()).map_err(|error| malformed(&error))?;
        let (activated, solo_safe) = (message.activated, message.solo_safe);
        Ok(Proposal { partition, expected: ExpectedEntry { term: Term(message.term), activated, solo_safe }, change })
    }

    /// Returns the goal after an order, if it is valid.
    fn updated_goal(&self, request: &v1::SetGoalRequest) -> Result<Goal, Status> {
        let options = &self.shared.options;
        let state = self.shared.state();
        let mut goal = state.goal().clone();
        let max_workers = state.max_workers(options).max(request.workers);
        drop(state);
        if request.workers > 0 {
            if request.workers < options.replication_factor {
                return Err(Status::invalid_argument(format!(
                    "workers: {} cannot hold {} replicas of each partition; allowed: at least {}",
                    request.workers, options.replication_factor, options.replication_factor
                )));
            }
            goal.workers = Some(Scale { to: request.workers, from: options.workers });
        }
        let unknown = request.drain.iter().chain(&request.undrain).find(|ordinal| **ordinal >= max_workers);
        if let Some(ordinal) = unknown {
            return Err(Status::invalid_argument(format!(
                "worker {ordinal} does not exist: there are {max_workers}, numbered from 0"
            )));
        }
        if let Some(both) = request.drain.iter().find(|ordinal| request.undrain.contains(ordinal)) {
            return Err(Status::invalid_argument(format!("worker {both} cannot be drained and undrained at once")));
        }
        goal.draining.extend(request.drain.iter().map(|&ordinal| Ordinal(ordinal)));
        goal.draining.retain(|ordinal| !request.undrain.contains(&ordinal.0));
        Ok(goal)
    }

    fn check_cluster(&self, bytes: &[u8]) -> Result<(), Status> {
        let expected = self.shared.options.cluster;
        match engram_wire::cluster_from_proto(bytes) {
            Ok(named) if named == expected => Ok(()),
            Ok(named) => Err(Status::failed_precondition(format!("this is cluster {expected}, not {named}"))),
            Err(error) => Err(Status::invalid_argument(error.to_string())),
        }
    }
}

fn malformed(error: &engram_wire::Malformed) -> Status {
    Status::invalid_argument(error.to_string())
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
        let info = HeartbeatInfo {
            memories: heartbeat.memories,
            ready: heartbeat.ready,
            leaving: heartbeat.leaving,
            disk_full: heartbeat.disk_full,
            suspects: heartbeat.suspects.into_iter().map(Ordinal).collect(),
            queued: heartbeat.queued,
            turns: heartbeat.progress_count,
            map_version: heartbeat.map_version,
            operations: heartbeat.operations,
            leaderless: heartbeat.leaderless_partitions.into_iter().map(PartitionId).collect(),
            bootstrap: heartbeat.bootstrap,
            certificate: heartbeat.certificate.map(|it| WorkerCertificate {
                trusted_roots: it.trusted_roots.into_iter().map(RootId).collect(),
                root: RootId(it.issuer_root),
            }),
            gpu_fault: heartbeat.gpu_fault.map(|it| GpuFault { was_in_use: it.was_in_use, reason: it.reason }),
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
