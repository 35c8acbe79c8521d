//! The gRPC side: streams of beats, reports of deaths, proposals, orders of people, status.

use crate::state::{Certified, GpuTrouble, Greeting, Introduction, Proposal, Pulse};
use crate::{Shared, wire};
use engram_cluster::Expected;
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

/// Views waiting for a worker that does not read; it gets the newest when it does.
const VIEW_QUEUE: usize = 4;

/// What a worker is told, one after the other.
pub(crate) type Views = ReceiverStream<Result<v1::BeatReply, Status>>;

#[derive(Clone)]
pub(crate) struct Service {
    pub(crate) shared: Arc<Shared>,
}

#[tonic::async_trait]
impl CoordinatorService for Service {
    type HeartbeatStream = Views;

    async fn heartbeat(
        &self,
        request: Request<Streaming<v1::Beat>>,
    ) -> Result<Response<Self::HeartbeatStream>, Status> {
        let mut beats = request.into_inner();
        let first = first_beat(&mut beats).await?;
        self.beats(&first, beats)
    }

    async fn report_death(&self, request: Request<v1::DeathReport>) -> Result<Response<v1::DeathReply>, Status> {
        let report = request.into_inner();
        self.check_cluster(&report.cluster)?;
        let store = match report.store.as_ref() {
            [] => None,
            store => Some(wire::store_from_proto(store).map_err(|error| malformed(&error))?),
        };
        tracing::warn!(worker = report.ordinal, process = report.process_id, exit = report.exit, "worker died");
        let (ordinal, now_ms) = (Ordinal(report.ordinal), self.shared.now_ms());
        let news = self.shared.state().died(ordinal, store, report.incarnation, report.process_id, now_ms);
        if news {
            self.shared.reconsider.notify_one();
            self.shared.publish();
        }
        Ok(Response::new(v1::DeathReply {}))
    }

    async fn propose_map(
        &self,
        request: Request<v1::ProposeMapRequest>,
    ) -> Result<Response<v1::ProposeMapReply>, Status> {
        let request = request.into_inner();
        self.check_cluster(&request.cluster)?;
        let proposer =
            request.member.as_ref().ok_or_else(|| Status::invalid_argument("the request names no member"))?;
        let proposer = wire::member_id_from_proto(proposer).map_err(|error| malformed(&error))?;
        let proposals = request.proposals.iter().map(|proposal| self.proposal(proposal)).collect::<Result<_, _>>()?;
        let mut state = self.shared.state();
        if state.is_closing() {
            return Err(Status::unavailable("this coordinator ends: another one takes proposals"));
        }
        state.propose(proposer.ordinal, proposals);
        let map_version = state.map().map_or(0, |map| map.version);
        drop(state);
        self.shared.reconsider.notify_one();
        Ok(Response::new(v1::ProposeMapReply { map_version }))
    }

    async fn set_goal(&self, request: Request<v1::SetGoalRequest>) -> Result<Response<v1::SetGoalReply>, Status> {
        let request = request.into_inner();
        self.check_cluster(&request.cluster)?;
        let _alone = self.shared.ordering.lock().await;
        let goal = self.ordered(&request)?;
        let store = Arc::clone(&self.shared.store);
        let kept = goal.clone();
        let written = tokio::task::spawn_blocking(move || store.set_goal(&kept)).await;
        match written {
            Ok(Ok(())) => {}
            Ok(Err(error @ engram_mapstore::Error::NotSupported { .. })) => {
                return Err(Status::failed_precondition(error.to_string()));
            }
            Ok(Err(error)) => return Err(Status::unavailable(format!("the order was not kept: {error}"))),
            Err(_) => return Err(Status::internal("the map store panicked")),
        }
        let mut state = self.shared.state();
        state.set_goal(goal);
        let reply = v1::SetGoalReply {
            workers: state.goal().workers(self.shared.options.workers),
            draining: state.draining(&self.shared.options).iter().map(|ordinal| ordinal.0).collect(),
        };
        drop(state);
        tracing::info!(workers = reply.workers, draining = ?reply.draining, "ordered");
        self.shared.reconsider.notify_one();
        Ok(Response::new(reply))
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
        let unled = state.members().flat_map(|heard| heard.unled.iter().map(move |partition| (partition, heard)));
        let unled = unled.map(|(partition, heard)| {
            let ordinal = heard.member.ordinal;
            format!(
                "partition {partition} is served by nobody: the copy of worker {ordinal} is damaged or not complete, and no other in sync \
                 has taken over; `engram partition force-promote {partition}` tells what an order would lose"
            )
        });
        let status = v1::ClusterStatus {
            cluster: options.cluster.0.to_be_bytes().to_vec().into(),
            cluster_name: options.cluster_name.clone(),
            map: state.map().map(wire::map_to_proto),
            members: state.members().map(wire::member_to_proto).collect(),
            expected_workers: state.goal().workers(options.workers),
            conditions: state.conditions().iter().cloned().chain(unled).chain(silent).chain(behind).collect(),
            draining: state.draining(options).iter().map(|ordinal| ordinal.0).collect(),
            replication_factor: options.replication_factor,
            map_lost: state.lost().unwrap_or_default().to_owned(),
            orders: state.orders().iter().map(wire::order_to_proto).collect(),
            version: env!("CARGO_PKG_VERSION").into(),
            protocol_min: protocol::OLDEST,
            protocol_max: protocol::NEWEST,
        };
        Ok(Response::new(status))
    }

    async fn testify(&self, request: Request<v1::Testimony>) -> Result<Response<v1::TestifyReply>, Status> {
        let request = request.into_inner();
        self.check_cluster(&request.cluster)?;
        self.shared.testify(&request)?;
        Ok(Response::new(v1::TestifyReply {}))
    }

    async fn rebuild_map(
        &self,
        request: Request<v1::RebuildMapRequest>,
    ) -> Result<Response<v1::RebuildMapReply>, Status> {
        let request = request.into_inner();
        self.check_cluster(&request.cluster)?;
        self.shared.rebuild_map(&request).await.map(Response::new)
    }

    async fn force_promote(
        &self,
        request: Request<v1::ForcePromoteRequest>,
    ) -> Result<Response<v1::ForcePromoteReply>, Status> {
        let request = request.into_inner();
        self.check_cluster(&request.cluster)?;
        self.shared.force_promote(&request).await.map(Response::new)
    }
}

/// The beat that opens a stream.
pub(crate) async fn first_beat(beats: &mut Streaming<v1::Beat>) -> Result<v1::Beat, Status> {
    beats.message().await?.ok_or_else(|| Status::invalid_argument("the stream ended before a hello"))
}

impl Service {
    /// Takes a stream of beats whose first was read.
    pub(crate) fn beats(&self, first: &v1::Beat, beats: Streaming<v1::Beat>) -> Result<Response<Views>, Status> {
        let member = self.greet(first.hello.as_ref())?;
        let (replies, stream) = mpsc::channel(VIEW_QUEUE);
        tokio::spawn(tell(Arc::clone(&self.shared), replies));
        tokio::spawn(listen(Arc::clone(&self.shared), member, beats));
        self.shared.reconsider.notify_one();
        Ok(Response::new(ReceiverStream::new(stream)))
    }

    fn greet(&self, hello: Option<&v1::Hello>) -> Result<Member, Status> {
        let hello = hello.ok_or_else(|| Status::invalid_argument("the first beat has no hello"))?;
        self.check_cluster(&hello.cluster)?;
        let (min, max) = (hello.protocol_min, hello.protocol_max);
        if protocol::common(min, max).is_none() {
            return Err(Status::failed_precondition(format!(
                "protocol versions do not meet: the worker speaks {min} to {max}, the coordinator {} to {}",
                protocol::OLDEST,
                protocol::NEWEST
            )));
        }
        let member = hello.member.as_ref().ok_or_else(|| Status::invalid_argument("the hello names no member"))?;
        let member = wire::member_id_from_proto(member).map_err(|error| malformed(&error))?;
        let mut state = self.shared.state();
        let places = state.places(&self.shared.options);
        if member.ordinal.0 >= places {
            return Err(Status::failed_precondition(format!(
                "worker {} does not belong to a cluster of {places} workers",
                member.ordinal
            )));
        }
        let introduction = Introduction {
            member,
            lossless_since: Incarnation(hello.lossless_since),
            process_id: hello.process_id,
            addresses: wire::addresses(hello),
            seen_version: hello.seen_version,
        };
        match state.greet(introduction, self.shared.now_ms()) {
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

    fn proposal(&self, message: &v1::MapProposal) -> Result<Proposal, Status> {
        let partition = PartitionId(message.partition);
        let partitions = self.shared.options.partitions;
        if partition.0 >= partitions {
            return Err(Status::invalid_argument(format!(
                "partition {partition} does not exist: there are {partitions}, numbered from 0"
            )));
        }
        let change = wire::change_from_proto(message.change.as_ref()).map_err(|error| malformed(&error))?;
        let (activated, solo_safe) = (message.activated, message.solo_safe);
        Ok(Proposal { partition, expected: Expected { term: Term(message.term), activated, solo_safe }, change })
    }

    /// What holds after an order, if it can be carried out.
    fn ordered(&self, request: &v1::SetGoalRequest) -> Result<Goal, Status> {
        let options = &self.shared.options;
        let state = self.shared.state();
        let mut goal = state.goal().clone();
        let places = state.places(options).max(request.workers);
        drop(state);
        if request.workers > 0 {
            if request.workers < options.replication_factor {
                return Err(Status::invalid_argument(format!(
                    "workers: {} cannot hold {} copies of each partition; allowed are {} and more",
                    request.workers, options.replication_factor, options.replication_factor
                )));
            }
            goal.workers = Some(Scale { to: request.workers, from: options.workers });
        }
        let stranger = request.drain.iter().chain(&request.undrain).find(|ordinal| **ordinal >= places);
        if let Some(ordinal) = stranger {
            return Err(Status::invalid_argument(format!(
                "worker {ordinal} does not exist: there are {places}, numbered from 0"
            )));
        }
        if let Some(both) = request.drain.iter().find(|ordinal| request.undrain.contains(ordinal)) {
            return Err(Status::invalid_argument(format!("worker {both} cannot be emptied and kept at once")));
        }
        goal.draining.extend(request.drain.iter().map(|&ordinal| Ordinal(ordinal)));
        goal.draining.retain(|ordinal| !request.undrain.contains(&ordinal.0));
        Ok(goal)
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

fn malformed(error: &wire::Malformed) -> Status {
    Status::invalid_argument(error.to_string())
}

/// Sends the view now and at every change.
async fn tell(shared: Arc<Shared>, replies: mpsc::Sender<Result<v1::BeatReply, Status>>) {
    let mut view = shared.view.subscribe();
    view.mark_changed();
    let mut ended = shared.ended.subscribe();
    loop {
        let changed = tokio::select! {
            changed = view.changed() => changed,
            () = replies.closed() => return,
            _ = ended.wait_for(|ended| *ended) => return,
        };
        let reply = v1::BeatReply::clone(&view.borrow_and_update());
        if changed.is_err() || replies.send(Ok(reply)).await.is_err() {
            return;
        }
    }
}

/// Takes the beats of one worker until its stream ends.
async fn listen(shared: Arc<Shared>, member: Member, mut beats: Streaming<v1::Beat>) {
    let mut ended = shared.ended.subscribe();
    loop {
        let beat = tokio::select! {
            beat = beats.next() => beat,
            _ = ended.wait_for(|ended| *ended) => return,
        };
        let Some(Ok(beat)) = beat else { break };
        let pulse = Pulse {
            memories: beat.memories,
            ready: beat.ready,
            leaving: beat.leaving,
            suspects: beat.suspects.into_iter().map(Ordinal).collect(),
            queued: beat.queued,
            turns: beat.turns,
            map_version: beat.map_version,
            unled: beat.unled.into_iter().map(PartitionId).collect(),
            bootstrap: beat.bootstrap,
            certified: beat
                .certified
                .map(|it| Certified { believed: it.believed.into_iter().map(RootId).collect(), root: RootId(it.root) }),
            gpu_trouble: beat.gpu_trouble.map(|it| GpuTrouble { given_up: it.given_up, why: it.why }),
        };
        if shared.state().beat(&member, pulse, shared.now_ms()) {
            shared.reconsider.notify_one();
            shared.publish();
        }
    }
    if shared.state().closed(&member, shared.now_ms()) {
        shared.reconsider.notify_one();
        shared.publish();
    }
}
