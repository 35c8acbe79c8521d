//! `MemoryService`, the same on the client's and on the peers' listener: on the latter nothing is passed on.

use crate::part::Body;
use crate::shared::Shared;
use crate::view::View;
use crate::write::Asked;
use engram_memory::session::WINDOW;
use engram_proto::v1::memory_service_server::MemoryService;
use engram_proto::v1::{self, MemoryBatch, Problem, ProblemKind};
use futures::stream::BoxStream;
use std::pin::pin;
use std::sync::{Arc, PoisonError};
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::sleep;
use tonic::{Request, Response, Status, Streaming};

/// Sessions live a day by the partitions' watermarks; renewing four times in it leaves room for clocks and pauses.
const RENEW_AFTER: Duration = Duration::from_secs(6 * 60 * 60);
/// How long whoever asks for a newer map is kept waiting at most.
pub(crate) const NEWS_MOST: Duration = Duration::from_secs(30);

/// Which listener a request came by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Plane {
    /// What is not this worker's is passed on.
    Client,
    /// What is not this worker's is refused.
    Peer,
}

/// The memories of one worker.
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
    /// What is known of the cluster at this moment.
    fn told(&self, view: &mut watch::Receiver<View>) -> Result<v1::PartitionMapReply, Problem> {
        let (name, dimension) = (&self.shared.options.cluster_name, self.shared.shape.features.dimension);
        let unknown = || Problem::of(ProblemKind::Unavailable, "the partition map is not known yet").retry_after(100);
        view.borrow_and_update().map_reply(name, dimension).ok_or_else(unknown)
    }

    /// A write, once there is room for it.
    async fn changes(
        &self,
        method: &'static str,
        session: Option<v1::Session>,
        asked: Vec<Asked>,
    ) -> Result<v1::WriteReply, Problem> {
        self.shared.admission.within(method, self.write(session, asked)).await
    }

    /// A read, once there is room for it.
    async fn reads<T>(
        &self,
        method: &'static str,
        read: impl Future<Output = Result<T, Problem>>,
    ) -> Result<T, Problem> {
        self.shared.admission.within(method, read).await
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
    ) -> Result<Response<v1::OpenSessionReply>, Status> {
        Ok(Response::new(v1::OpenSessionReply {
            session: Some(v1::Session { opened_ms: self.shared.clock.now_ms(), random: rand::random() }),
            window: WINDOW as u32,
            renew_after_ms: RENEW_AFTER.as_millis() as u64,
        }))
    }

    async fn get_outcome(
        &self,
        request: Request<v1::GetOutcomeRequest>,
    ) -> Result<Response<v1::GetOutcomeReply>, Status> {
        reply(self.outcome(request.into_inner()).await)
    }

    async fn upsert(&self, request: Request<Streaming<v1::UpsertRequest>>) -> Result<Response<v1::WriteReply>, Status> {
        let mut messages = request.into_inner();
        let mut written = v1::WriteReply::default();
        while let Some(message) = messages.message().await? {
            let asked = message.parts.into_iter().map(|mut part| Asked {
                partition: part.partition.take(),
                seq: std::mem::take(&mut part.seq),
                body: Body::Upsert(part),
            });
            let reply = self.changes("Upsert", message.session, asked.collect()).await.map_err(Problem::into_status)?;
            written.parts.extend(reply.parts);
        }
        Ok(Response::new(written))
    }

    async fn remove(&self, request: Request<v1::RemoveRequest>) -> Result<Response<v1::WriteReply>, Status> {
        let message = request.into_inner();
        let asked = message.parts.into_iter().map(|part| Asked {
            partition: part.partition,
            seq: part.seq,
            body: Body::Remove(part.ids),
        });
        reply(self.changes("Remove", message.session, asked.collect()).await)
    }

    async fn apply_reinforcement(
        &self,
        request: Request<v1::ReinforceRequest>,
    ) -> Result<Response<v1::WriteReply>, Status> {
        let message = request.into_inner();
        let asked = message.parts.into_iter().map(|part| Asked {
            partition: part.partition,
            seq: part.seq,
            body: Body::Reinforce(part.updates.unwrap_or_default()),
        });
        reply(self.changes("ApplyReinforcement", message.session, asked.collect()).await)
    }

    async fn apply_decay(&self, request: Request<v1::DecayRequest>) -> Result<Response<v1::WriteReply>, Status> {
        let message = request.into_inner();
        let body = Body::Decay(message.amount);
        let asked = if message.parts.is_empty() {
            vec![Asked { partition: None, seq: 0, body }]
        } else {
            let part =
                |part: &v1::DecayPart| Asked { partition: Some(part.partition), seq: part.seq, body: body.clone() };
            message.parts.iter().map(part).collect()
        };
        reply(self.changes("ApplyDecay", message.session, asked).await)
    }

    async fn learn_epoch(
        &self,
        request: Request<Streaming<v1::EpochRequest>>,
    ) -> Result<Response<v1::EpochReply>, Status> {
        self.epoch(request.into_inner()).await.map(Response::new)
    }

    async fn broadcast_quality(
        &self,
        request: Request<v1::BroadcastQualityRequest>,
    ) -> Result<Response<v1::BroadcastQualityReply>, Status> {
        let told = request.into_inner();
        let checked = engram_proto::answers::run_id(&told.run).map(drop);
        let checked = checked.and_then(|()| engram_proto::answers::quality_from_wire(&told.quality).map(drop));
        checked.map_err(|error| Problem::of(ProblemKind::Invalid, error.to_string()).into_status())?;
        let mut broadcast = self.shared.broadcast.write().unwrap_or_else(PoisonError::into_inner);
        // Broadcasts are waited for by nobody, and one may overtake another.
        if broadcast.as_ref().is_none_or(|known| known.run != told.run || known.n <= told.n) {
            *broadcast = Some(told);
        }
        Ok(Response::new(v1::BroadcastQualityReply {}))
    }

    async fn get_memories(
        &self,
        request: Request<v1::GetMemoriesRequest>,
    ) -> Result<Response<Self::GetMemoriesStream>, Status> {
        reply(self.reads("GetMemories", self.get(request.into_inner())).await)
    }

    async fn scan_memories(
        &self,
        request: Request<v1::ScanMemoriesRequest>,
    ) -> Result<Response<Self::ScanMemoriesStream>, Status> {
        reply(self.reads("ScanMemories", self.scan(request.into_inner())).await)
    }

    async fn get_quality(&self, request: Request<v1::QualityRequest>) -> Result<Response<v1::QualityReply>, Status> {
        reply(self.reads("GetQuality", self.quality(request.into_inner())).await)
    }

    async fn rank(&self, request: Request<v1::RankRequest>) -> Result<Response<Self::RankStream>, Status> {
        reply(self.reads("Rank", self.ranked(request.into_inner())).await)
    }

    async fn recall(&self, request: Request<v1::RecallRequest>) -> Result<Response<v1::RecallReply>, Status> {
        reply(self.reads("Recall", self.recalled(request.into_inner())).await)
    }

    async fn get_digest(&self, request: Request<v1::DigestRequest>) -> Result<Response<v1::DigestReply>, Status> {
        reply(self.reads("GetDigest", self.digest(request.into_inner())).await)
    }

    async fn get_partition_map(
        &self,
        request: Request<v1::PartitionMapRequest>,
    ) -> Result<Response<v1::PartitionMapReply>, Status> {
        let v1::PartitionMapRequest { newer_than, wait_ms, known } = request.into_inner();
        let mut view = self.shared.view.subscribe();
        let mut stopping = self.shared.stopping.subscribe();
        let mut time_is_up = pin!(sleep(NEWS_MOST.min(Duration::from_millis(wait_ms.into()))));
        let mut asked_now = true;
        loop {
            let told = self.told(&mut view);
            let is_known = match &told {
                Ok(map) if known == 0 => map.version <= newer_than && asked_now,
                Ok(map) => map.stamp == known,
                Err(_) => true,
            };
            if wait_ms == 0 || !is_known {
                return reply(told);
            }
            tokio::select! {
                _ = view.changed() => asked_now = false,
                () = &mut time_is_up => return reply(told),
                _ = stopping.wait_for(|stopping| *stopping) => return reply(told),
            }
        }
    }
}
