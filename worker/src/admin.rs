//! Administration of one worker: status, snapshots, an orderly stop.

use crate::metrics::resident_bytes;
use crate::shared::Shared;
use engram_memory::PartitionId;
use engram_proto::answers::identity;
use engram_proto::v1::admin_service_server::AdminService;
use engram_proto::v1::{self, Problem, ProblemKind};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use tonic::{Request, Response, Status};

pub(crate) struct Admin {
    pub(crate) shared: Arc<Shared>,
}

#[tonic::async_trait]
impl AdminService for Admin {
    async fn get_worker_status(
        &self,
        _request: Request<v1::WorkerStatusRequest>,
    ) -> Result<Response<v1::WorkerStatus>, Status> {
        let shared = &self.shared;
        let read = shared.engine.read(|partitions| {
            partitions.iter().map(|partition| (partition, partitions.count(partition))).collect::<Vec<_>>()
        });
        let counts = read.await.map_err(Problem::into_status)?;
        let status = |(partition, memories): (PartitionId, u64)| {
            let position = shared.engine.position(partition);
            let (term, lsn) = position.unwrap_or_default();
            let state = if position.is_some() { "serving" } else { "idle" };
            v1::PartitionStatus {
                partition: partition.0,
                term: term.0,
                lsn: lsn.0,
                memories,
                primary: position.is_some(),
                state: state.into(),
            }
        };
        let partition_status: Vec<v1::PartitionStatus> = counts.into_iter().map(status).collect();
        let served = partition_status.iter().filter(|status| status.primary);
        let limits = served.filter_map(|status| shared.engine.settings(PartitionId(status.partition)));
        let capacity = limits.map(|settings| settings.limit).fold(0_u64, u64::saturating_add);
        let stats = shared.engine.stats();
        Ok(Response::new(v1::WorkerStatus {
            member: Some(shared.member.into()),
            cluster: identity(shared.options.cluster.0),
            cluster_name: shared.options.cluster_name.clone(),
            memories: stats.memories,
            capacity,
            partitions: partition_status.iter().filter(|status| status.primary).count() as u32,
            map_version: shared.view.borrow().version(),
            device: shared.device.0.clone(),
            device_threads: shared.device.1 as u32,
            device_bytes: stats.memory_bytes,
            log_bytes: stats.log_bytes,
            last_snapshot_ms: shared.last_snapshot_ms.load(Ordering::Relaxed),
            uptime_ms: shared.started.elapsed().as_millis() as u64,
            updates_total: shared.metrics.updates.get(),
            epochs_total: shared.metrics.epoch_parts.get(),
            resident_bytes: resident_bytes(),
            recovery: shared.recovery.clone(),
            partition_status,
            version: env!("CARGO_PKG_VERSION").into(),
        }))
    }

    async fn create_snapshot(
        &self,
        request: Request<v1::CreateSnapshotRequest>,
    ) -> Result<Response<v1::CreateSnapshotReply>, Status> {
        let folder = PathBuf::from(request.into_inner().folder);
        if !folder.is_absolute() {
            let text = format!("folder: '{}' is not allowed; allowed: an absolute path", folder.display());
            return Err(Problem::of(ProblemKind::Invalid, text).into_status());
        }
        let written = self.shared.engine.snapshot(folder).await.map_err(|error| {
            let kind = match &error {
                engram_store::Error::DiskFull { .. } => ProblemKind::DiskFull,
                _ => ProblemKind::Unavailable,
            };
            Problem::of(kind, error.to_string()).into_status()
        })?;
        // The digest is of one moment only if nothing was written meanwhile; otherwise there is none to tell.
        let read = self.shared.engine.read(|partitions| partitions.digest());
        let digest = read.await.map_err(Problem::into_status)?;
        let digest = digest.map_err(|error| crate::engine::device_problem(&error).into_status())?;
        let still = written
            .iter()
            .all(|info| self.shared.engine.position(info.partition).is_none_or(|(_, lsn)| lsn == info.lsn));
        Ok(Response::new(v1::CreateSnapshotReply {
            partitions: written.len() as u32,
            memories: written.iter().map(|info| info.memories).sum(),
            bytes: written.iter().map(|info| info.bytes).sum(),
            digest: if still { identity(digest.0) } else { Default::default() },
            versions: written
                .iter()
                .map(|info| v1::PartitionVersion::of(info.partition, info.term, info.lsn))
                .collect(),
        }))
    }

    async fn stop(&self, _request: Request<v1::StopRequest>) -> Result<Response<v1::StopReply>, Status> {
        self.shared.asked_to_stop.notify_one();
        Ok(Response::new(v1::StopReply {}))
    }
}
