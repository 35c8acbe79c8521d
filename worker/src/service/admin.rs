//! `AdminService` of one worker: status, snapshots, device recordings, drain, stop.

use crate::lifecycle::drain;
use crate::observability::metrics::resident_bytes;
use crate::observability::profile;
use crate::runs::local_files;
use crate::shared::Shared;
use engram_cluster::Entry;
use engram_memory::{Digest, Lsn, Ordinal, PartitionId, Term};
use engram_proto::answers::identity;
use engram_proto::protocol;
use engram_proto::v1::admin_service_server::AdminService;
use engram_proto::v1::{self, Problem, ProblemKind};
use engram_store::{FileHead, ReplicaStatus};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use tonic::{Request, Response, Status};

/// Maximum drain in milliseconds: calls last at most a minute, so a longer one could not return its result.
const MAX_DRAIN_MS: u64 = 55_000;

pub(crate) struct Admin {
    pub(crate) shared: Arc<Shared>,
}

/// Returns the status of every partition on this worker.
pub(crate) async fn partitions(shared: &Shared) -> Result<Vec<v1::PartitionStatus>, Problem> {
    let read = shared.engine.read(|partitions| {
        partitions.iter().map(|partition| (partition, partitions.count(partition))).collect::<BTreeMap<_, _>>()
    });
    let counts = read.await?;
    let replicas = shared.engine.replicas().await?;
    let map = shared.membership.view().map.clone();
    let here = replicas.iter().filter(|it| it.role != "idle" || counts.contains_key(&it.partition));
    let status = |replica: &ReplicaStatus| {
        let entry = map.as_ref().and_then(|map| map.partitions.get(replica.partition.0 as usize));
        let memories = counts.get(&replica.partition).copied().unwrap_or(0);
        status_of(replica, entry, shared.ordinal(), shared.engine.position(replica.partition), memories)
    };
    Ok(here.map(status).collect())
}

/// Returns the status of one partition, with what the map says of its replicas.
fn status_of(
    replica: &ReplicaStatus,
    entry: Option<&Entry>,
    here: Ordinal,
    served: Option<(Term, Lsn)>,
    memories: u64,
) -> v1::PartitionStatus {
    let is_learner = entry.is_some_and(|entry| entry.in_sync(here).is_none());
    let role = if is_learner && replica.role == "backup" { "learner" } else { replica.role };
    // Lag of the slowest follower that is in sync by the map, or is not.
    let lag = |in_sync: bool| {
        let followers = replica.followers.iter();
        let of_kind = followers.filter(|(to, _)| entry.is_some_and(|entry| entry.in_sync(*to).is_some()) == in_sync);
        of_kind.map(|(_, acked)| replica.last.0.saturating_sub(acked.0)).max().unwrap_or(0)
    };
    let is_primary = matches!(role, "primary" | "activating");
    let re_replicating_to =
        entry.filter(|_| is_primary).map(|entry| entry.learners.iter().map(|learner| learner.0).collect());
    v1::PartitionStatus {
        partition: replica.partition.0,
        term: served.map_or(replica.term, |(term, _)| term).0,
        lsn: replica.applied.0,
        memories,
        primary: served.is_some(),
        state: if served.is_some() { "serving" } else { "idle" }.into(),
        role: role.into(),
        in_sync: entry.map_or(0, |entry| entry.isr.len() as u32),
        lag: lag(true),
        re_replicating_to: re_replicating_to.unwrap_or_default(),
        re_replication_lag: lag(false),
    }
}

/// Describes what recovery found, and damage found later.
fn with_damage(recovery: &str, damage: Option<&str>) -> String {
    damage.map_or_else(|| recovery.to_owned(), |damage| format!("{recovery}; later: {damage}"))
}

#[tonic::async_trait]
impl AdminService for Admin {
    async fn get_worker_status(
        &self,
        _request: Request<v1::GetWorkerStatusRequest>,
    ) -> Result<Response<v1::WorkerStatus>, Status> {
        let shared = &self.shared;
        let partition_status = partitions(shared).await.map_err(Problem::into_status)?;
        let served = partition_status.iter().filter(|status| status.primary);
        let limits = served.filter_map(|status| shared.engine.served_settings(PartitionId(status.partition)));
        let capacity = limits.map(|settings| settings.limit).fold(0_u64, u64::saturating_add);
        let stats = shared.engine.stats();
        Ok(Response::new(v1::WorkerStatus {
            member: Some(shared.setup.member.into()),
            cluster: identity(shared.setup.options.cluster.0),
            cluster_name: shared.setup.options.cluster_name.clone(),
            memories: stats.memories,
            capacity,
            partitions: partition_status.iter().filter(|status| status.primary).count() as u32,
            map_version: shared.membership.view().version(),
            device: shared.setup.device.name(stats.gpu.as_ref()),
            gpu: shared.setup.device.gpu(stats.gpu.as_ref()),
            device_threads: shared.setup.device.threads as u32,
            device_bytes: stats.memory_bytes,
            log_bytes: stats.log_bytes,
            last_snapshot_ms: shared.lifecycle.last_snapshot_ms(),
            uptime_ms: shared.lifecycle.uptime().as_millis() as u64,
            updates_total: shared.metrics.updates.get(),
            epochs_total: shared.metrics.partition_epochs.get(),
            resident_bytes: resident_bytes(),
            recovery: with_damage(&shared.setup.recovery, stats.damage.as_deref()),
            partition_status,
            version: env!("CARGO_PKG_VERSION").into(),
            protocol_min: protocol::OLDEST,
            protocol_max: protocol::NEWEST,
            disk_format: FileHead::VERSION,
        }))
    }

    async fn create_snapshot(
        &self,
        request: Request<v1::CreateSnapshotRequest>,
    ) -> Result<Response<v1::CreateSnapshotResponse>, Status> {
        let v1::CreateSnapshotRequest { folder, owner_key } = request.into_inner();
        let options = &self.shared.setup.options;
        let checked =
            local_files::check_snapshot_folder(options.local_files.as_ref(), &options.state_dir, &folder, &owner_key);
        let folder = checked.map_err(Problem::into_status)?;
        let span = engram_trace::Span::child("snapshot");
        let written = self.shared.engine.snapshot(folder).await;
        drop(span);
        let written = written.map_err(|error| {
            let kind = match &error {
                engram_store::Error::DiskFull { .. } => ProblemKind::DiskFull,
                _ => ProblemKind::Unavailable,
            };
            Problem::of(kind, error.to_string()).into_status()
        })?;
        let mut digest = Digest::default();
        written.iter().for_each(|info| digest.merge(info.digest));
        Ok(Response::new(v1::CreateSnapshotResponse {
            partitions: written.len() as u32,
            memories: written.iter().map(|info| info.memories).sum(),
            bytes: written.iter().map(|info| info.bytes).sum(),
            digest: identity(digest.0),
            versions: written
                .iter()
                .map(|info| v1::PartitionVersion::of(info.partition, info.term, info.lsn))
                .collect(),
        }))
    }

    async fn stop(&self, _request: Request<v1::StopRequest>) -> Result<Response<v1::StopResponse>, Status> {
        self.shared.lifecycle.request_stop();
        Ok(Response::new(v1::StopResponse {}))
    }

    async fn drain(&self, request: Request<v1::DrainRequest>) -> Result<Response<v1::DrainResponse>, Status> {
        let v1::DrainRequest { deadline_ms, cancel } = request.into_inner();
        if cancel {
            drain::cancel(&self.shared);
            return Ok(Response::new(v1::DrainResponse::default()));
        }
        if !(1..=MAX_DRAIN_MS).contains(&deadline_ms) {
            let text = format!("deadline_ms: {deadline_ms} is not allowed; allowed: 1 to {MAX_DRAIN_MS}");
            return Err(Problem::of(ProblemKind::Invalid, text).into_status());
        }
        let drained = drain::drain(&self.shared, Duration::from_millis(deadline_ms)).await;
        let remaining = drained.remaining.iter().map(|partition| partition.0).collect();
        Ok(Response::new(v1::DrainResponse { transferred: drained.transferred, remaining }))
    }

    async fn profile(&self, request: Request<v1::ProfileRequest>) -> Result<Response<v1::ProfileResponse>, Status> {
        profile::record(&self.shared, request.into_inner()).await.map(Response::new).map_err(Problem::into_status)
    }
}
