//! `MemoryService` on the client and peer listeners. The peer listener never forwards.

pub(crate) mod admin;
pub(crate) mod connections;
pub(crate) mod edge;
pub(crate) mod read;

use crate::buffers::Definitions;
use crate::membership::cluster_view::ClusterView;
use crate::shared::Shared;
use crate::write::WritePart;
use engram_memory::session::WINDOW;
use engram_proto::v1::memory_service_server::MemoryService;
use engram_proto::v1::{self, MemoryBatch, Problem, ProblemKind};
use engram_wire::WriteBody;
use futures::stream::BoxStream;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::sleep;
use tonic::{Request, Response, Status, Streaming};

/// Partitions keep sessions for a day; four renewals per day leave a margin for clocks and pauses.
const RENEW_AFTER: Duration = Duration::from_secs(6 * 60 * 60);
/// Maximum wait of a request for a newer map.
pub(crate) const MAX_MAP_WAIT: Duration = Duration::from_secs(30);

/// Listener of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Plane {
    /// Requests for other workers are forwarded.
    Client,
    /// Requests for other workers are rejected.
    Peer,
}

/// Serves the memories of one worker.
#[derive(Clone)]
pub(crate) struct Memories {
    pub(crate) shared: Arc<Shared>,
    pub(crate) plane: Plane,
}

type Batches = BoxStream<'static, Result<MemoryBatch, Status>>;

fn reply<T>(answer: Result<T, Problem>) -> Result<Response<T>, Status> {
    answer.map(Response::new).map_err(Problem::into_status)
}

impl Memories {
    /// Returns the current partition map.
    fn current_map(&self, view: &mut watch::Receiver<ClusterView>) -> Result<v1::GetPartitionMapResponse, Problem> {
        let (name, dimension) = (&self.shared.setup.options.cluster_name, self.shared.setup.shape.features.dimension);
        let unknown = || Problem::of(ProblemKind::Unavailable, "the partition map is not known yet").retry_after(100);
        view.borrow_and_update().map_reply(name, dimension).ok_or_else(unknown)
    }

    /// Runs a write under admission control.
    async fn admit_write(
        &self,
        method: &'static str,
        session: Option<v1::Session>,
        parts: Vec<WritePart>,
    ) -> Result<v1::WriteResponse, Problem> {
        self.shared.limits.admission().run(method, self.write(session, parts, &Definitions::default())).await
    }

    /// Runs a read under admission control.
    async fn admit_read<T>(
        &self,
        method: &'static str,
        read: impl Future<Output = Result<T, Problem>>,
    ) -> Result<T, Problem> {
        self.shared.limits.admission().run(method, read).await
    }
}

#[tonic::async_trait]
impl MemoryService for Memories {
    type GetMemoriesStream = Batches;
    type ScanMemoriesStream = Batches;
    type RankStream = Batches;

    async fn open_session(
        &self,
        _request: Request<v1::OpenSessionRequest>,
    ) -> Result<Response<v1::OpenSessionResponse>, Status> {
        Ok(Response::new(v1::OpenSessionResponse {
            session: Some(v1::Session {
                opened_ms: self.shared.engine.session_clock().opening_ms(),
                random: rand::random(),
            }),
            window: WINDOW as u32,
            renew_after_ms: RENEW_AFTER.as_millis() as u64,
        }))
    }

    async fn get_outcome(
        &self,
        request: Request<v1::GetOutcomeRequest>,
    ) -> Result<Response<v1::GetOutcomeResponse>, Status> {
        reply(self.shared.limits.admission().run("GetOutcome", self.outcome(request.into_inner())).await)
    }

    async fn upsert(
        &self,
        request: Request<Streaming<v1::UpsertRequest>>,
    ) -> Result<Response<v1::WriteResponse>, Status> {
        let mut messages = request.into_inner();
        let mut written = v1::WriteResponse::default();
        while let Some(message) = messages.message().await? {
            let parts = message.parts.into_iter().map(|mut part| WritePart {
                partition: part.partition.take(),
                seq: std::mem::take(&mut part.seq),
                body: WriteBody::Upsert(part),
            });
            let reply =
                self.admit_write("Upsert", message.session, parts.collect()).await.map_err(Problem::into_status)?;
            written.parts.extend(reply.parts);
        }
        Ok(Response::new(written))
    }

    async fn remove(&self, request: Request<v1::RemoveRequest>) -> Result<Response<v1::WriteResponse>, Status> {
        let message = request.into_inner();
        let parts = message.parts.into_iter().map(|part| WritePart {
            partition: part.partition,
            seq: part.seq,
            body: WriteBody::Remove(part.ids),
        });
        reply(self.admit_write("Remove", message.session, parts.collect()).await)
    }

    async fn apply_reinforcement(
        &self,
        request: Request<v1::ApplyReinforcementRequest>,
    ) -> Result<Response<v1::WriteResponse>, Status> {
        let message = request.into_inner();
        let parts = message.parts.into_iter().map(|part| WritePart {
            partition: part.partition,
            seq: part.seq,
            body: WriteBody::Reinforce(part.updates.unwrap_or_default()),
        });
        reply(self.admit_write("ApplyReinforcement", message.session, parts.collect()).await)
    }

    async fn apply_decay(
        &self,
        request: Request<v1::ApplyDecayRequest>,
    ) -> Result<Response<v1::WriteResponse>, Status> {
        let message = request.into_inner();
        let body = WriteBody::Decay(message.amount);
        let parts = if message.parts.is_empty() {
            vec![WritePart { partition: None, seq: 0, body }]
        } else {
            let part =
                |part: &v1::DecayPart| WritePart { partition: Some(part.partition), seq: part.seq, body: body.clone() };
            message.parts.iter().map(part).collect()
        };
        reply(self.admit_write("ApplyDecay", message.session, parts).await)
    }

    async fn learn_epoch(
        &self,
        request: Request<Streaming<v1::LearnEpochRequest>>,
    ) -> Result<Response<v1::LearnEpochResponse>, Status> {
        self.epoch(request.into_inner()).await.map(Response::new)
    }

    async fn broadcast_quality(
        &self,
        request: Request<v1::BroadcastQualityRequest>,
    ) -> Result<Response<v1::BroadcastQualityResponse>, Status> {
        let received = request.into_inner();
        let validated = engram_proto::answers::run_id(&received.run).map(drop);
        let validated = validated.and_then(|()| engram_proto::answers::quality_from_wire(&received.quality).map(drop));
        validated.map_err(|error| Problem::of(ProblemKind::Invalid, error.to_string()).into_status())?;
        let mut broadcast = self.shared.runs.broadcast.write();
        // Broadcasts are not awaited, so one may overtake another.
        if broadcast.as_ref().is_none_or(|current| current.run != received.run || current.epoch <= received.epoch) {
            *broadcast = Some(received);
        }
        Ok(Response::new(v1::BroadcastQualityResponse {}))
    }

    async fn get_memories(
        &self,
        request: Request<v1::GetMemoriesRequest>,
    ) -> Result<Response<Self::GetMemoriesStream>, Status> {
        reply(self.admit_read("GetMemories", Box::pin(self.get(request.into_inner()))).await)
    }

    async fn scan_memories(
        &self,
        request: Request<v1::ScanMemoriesRequest>,
    ) -> Result<Response<Self::ScanMemoriesStream>, Status> {
        reply(self.admit_read("ScanMemories", self.scan(request.into_inner())).await)
    }

    async fn get_quality(
        &self,
        request: Request<v1::GetQualityRequest>,
    ) -> Result<Response<v1::GetQualityResponse>, Status> {
        reply(self.admit_read("GetQuality", self.quality(request.into_inner())).await)
    }

    async fn rank(&self, request: Request<v1::RankRequest>) -> Result<Response<Self::RankStream>, Status> {
        reply(self.admit_read("Rank", self.ranked(request.into_inner())).await)
    }

    async fn recall(&self, request: Request<v1::RecallRequest>) -> Result<Response<v1::RecallResponse>, Status> {
        reply(self.admit_read("Recall", self.recalled(request.into_inner())).await)
    }

    async fn get_digest(
        &self,
        request: Request<v1::GetDigestRequest>,
    ) -> Result<Response<v1::GetDigestResponse>, Status> {
        reply(self.admit_read("GetDigest", self.digest(request.into_inner())).await)
    }

    async fn get_partition_map(
        &self,
        request: Request<v1::GetPartitionMapRequest>,
    ) -> Result<Response<v1::GetPartitionMapResponse>, Status> {
        let v1::GetPartitionMapRequest { newer_than, wait_ms, known_stamp } = request.into_inner();
        let mut view = self.shared.membership.subscribe();
        let mut stopping = self.shared.lifecycle.stopping();
        let mut timeout = pin!(sleep(MAX_MAP_WAIT.min(Duration::from_millis(wait_ms.into()))));
        let mut first_check = true;
        loop {
            let response = self.current_map(&mut view);
            let is_known = match &response {
                Ok(map) if known_stamp == 0 => map.version <= newer_than && first_check,
                Ok(map) => map.stamp == known_stamp,
                Err(_) => true,
            };
            if wait_ms == 0 || !is_known {
                return reply(response);
            }
            tokio::select! {
                _ = view.changed() => first_check = false,
                () = &mut timeout => return reply(response),
                _ = stopping.wait_for(|stopping| *stopping) => return reply(response),
            }
        }
    }
}
