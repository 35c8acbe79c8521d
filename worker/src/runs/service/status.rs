//! Status and report of a run, and the stream of its statuses.

use super::RunEndpoint;
use crate::runs::{RunOverview, Runs, phase_to_wire, record};
use crate::shared::Shared;
use engram_learn::run::{Phase, RunState, RunningTask, Status as RunProgress, report};
use engram_learn::task_run::TaskReport;
use engram_memory::RunId;
use engram_proto::answers;
use engram_proto::v1::{self, Problem, ProblemKind};
use std::time::Duration;
use tokio::sync::{mpsc, watch};
use tonic::Status;

/// Polling interval while a watched run is suspended: it has no driver that would announce a change, and may be resumed at another worker.
const SUSPENDED_POLL_INTERVAL: Duration = Duration::from_millis(500);

impl RunEndpoint {
    /// Returns when a run is no longer suspended, or the client has gone. The client watches again then.
    pub(super) async fn wait_while_suspended(
        &self,
        run: RunId,
        name: &str,
        statuses: &mpsc::Sender<Result<v1::RunStatus, Status>>,
    ) {
        while !statuses.is_closed() {
            tokio::time::sleep(SUSPENDED_POLL_INTERVAL).await;
            match self.overview(run, name).await {
                Ok(overview) if overview.status.phase == Phase::Suspended => {}
                _ => return,
            }
        }
    }

    pub(super) async fn overview(&self, run: RunId, name: &str) -> Result<RunOverview, Problem> {
        let unknown = || Problem::of(ProblemKind::RunUnknown, format!("run {name:?} does not exist in this cluster"));
        let partition = crate::runs::partition(&self.shared, run);
        let entry = record::load(&self.shared, partition, run).await?.ok_or_else(unknown)?;
        Runs::overview(&self.shared, run, &entry).ok_or_else(|| {
            Problem::of(ProblemKind::DataCorruption, format!("the record of run {name:?} cannot be read"))
        })
    }

    pub(super) async fn report(&self, run: RunId, name: &str) -> Result<String, Problem> {
        let unknown = || Problem::of(ProblemKind::RunUnknown, format!("run {name:?} does not exist in this cluster"));
        let damaged = |error: &dyn std::fmt::Display| Problem::of(ProblemKind::DataCorruption, error.to_string());
        let partition = crate::runs::partition(&self.shared, run);
        let entry = record::load(&self.shared, partition, run).await?.ok_or_else(unknown)?;
        let state = RunState::of(&entry).map_err(|error| damaged(&error))?;
        if crate::runs::spec(&self.shared, &state).is_ok_and(|spec| spec.kind.has_tasks()) {
            let report = TaskReport::new(&state, &entry.rows, &self.shared.setup.options.cluster_name);
            let report = report.map_err(|error| damaged(&error))?;
            return serde_json::to_string(&report).map_err(|error| damaged(&error));
        }
        if state.spec["kind"] == "Replay" || state.spec["kind"] == "Federated" {
            let report = TaskReport::new(&state, &entry.rows, &self.shared.setup.options.cluster_name);
            let report = report.map_err(|error| damaged(&error))?;
            return serde_json::to_string(&report).map_err(|error| damaged(&error));
        }
        if state.spec["kind"] == "Snapshot" {
            let text = format!("run {name:?} is a snapshot, which has no report; allowed: runs that learn");
            return Err(Problem::of(ProblemKind::Invalid, text));
        }
        let source = crate::runs::source(&self.shared, &state).map_err(|error| damaged(&error))?;
        let report =
            report(&entry, &source, &self.shared.setup.options.cluster_name).map_err(|error| damaged(&error))?;
        serde_json::to_string(&report).map_err(|error| damaged(&error))
    }
}

/// Sends the status now and after every change, until the run ends or the client has gone.
pub(super) async fn stream_statuses(
    service: RunEndpoint,
    run: RunId,
    mut overview: RunOverview,
    mut updates: watch::Receiver<RunProgress>,
    statuses: mpsc::Sender<Result<v1::RunStatus, Status>>,
) {
    updates.mark_changed();
    loop {
        let changed = tokio::select! {
            changed = updates.changed() => changed,
            () = statuses.closed() => return,
        };
        if changed.is_err() {
            if overview.status.phase == Phase::Suspended {
                return service.wait_while_suspended(run, &overview.name, &statuses).await;
            }
            // The driver moved to another worker, where the client watches again.
            return;
        }
        overview.status = updates.borrow_and_update().clone();
        let ended = overview.status.phase.is_final();
        if statuses.send(Ok(status_to_wire(&service.shared, &overview))).await.is_err() || ended {
            return;
        }
    }
}

pub(super) fn status_to_wire(shared: &Shared, overview: &RunOverview) -> v1::RunStatus {
    let status = &overview.status;
    v1::RunStatus {
        name: overview.name.clone(),
        run: answers::identity(overview.run.0),
        uid: overview.uid.clone(),
        ended_ms: overview.ended_ms,
        phase: phase_to_wire(status.phase).into(),
        epoch: status.epoch,
        epochs: status.epochs.unwrap_or(0),
        updates: status.updates,
        elapsed_seconds: status.elapsed_s,
        eta_seconds: status.eta_s().unwrap_or(-1.0),
        epochs_per_second: status.epochs_per_s,
        updates_per_second: status.updates_per_s,
        message: status.message.clone(),
        code: status.code.clone(),
        driver: (!status.phase.is_final() && status.phase != Phase::Suspended).then_some(shared.ordinal().0),
        metrics: status.metrics.clone().into_iter().collect(),
        outputs: status.outputs.clone().into_iter().collect(),
        label: status.label.clone(),
        managed_by: overview.managed_by.clone(),
        kind: overview.kind.clone(),
        needs_credentials: status.needs_credentials,
        spec_fingerprint: overview.spec_fingerprint.clone(),
        tasks: status.tasks.iter().map(task_to_wire).collect(),
        snapshot: status.snapshot.as_ref().map(|written| v1::SnapshotResult {
            url: written.url.clone(),
            digest: written.digest.clone(),
            memories: written.memories,
            bytes: written.bytes,
            partitions: written.partitions,
        }),
    }
}

fn task_to_wire(task: &RunningTask) -> v1::RunningTask {
    let RunningTask { number, name, worker, fraction, losses, checkpoint } = task.clone();
    v1::RunningTask { number, name, worker, fraction, losses, checkpoint }
}
