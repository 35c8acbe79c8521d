//! Autoscalers of clusters with `spec.autoscaling`: run by the leader in its reconciles.

use std::time::{Duration, SystemTime};

use engram_api::status::LearnerClusterStatus;
use engram_api::{Autoscaling, AutoscalingStatus};
use kube::api::{Patch, PatchParams};
use serde_json::json;

use crate::cluster::apply::Applied;
use crate::cluster::autoscaling::history;
use crate::cluster::autoscaling::{ClusterAutoscaler, ScalingObservation, ScalingStep};
use crate::cluster::pass::Pass;
use crate::cluster::plan::Plan;
use crate::cluster::validate::ValidatedCluster;
use crate::context::{Context, Key};
use crate::kube::api_object::{InvalidObject, NotOwned};
use crate::kube::api_request::{RequestError, WriteError, check_leader, request};
use crate::kube::failure::{Cause, Failure};
use crate::kube::resource_kinds::CLUSTER;

/// Field manager of `/scale`.
const SCALE_MANAGER: &str = "engram-operator-autoscaling";

/// Why an autoscaler could not decide, or its decision was not written.
#[derive(Debug, thiserror::Error)]
pub(crate) enum AutoscalingError {
    #[error(transparent)]
    Write(#[from] WriteError),
    #[error(transparent)]
    NotOwned(#[from] NotOwned),
    #[error(transparent)]
    InvalidObject(#[from] InvalidObject),
    /// Its settings are invalid.
    #[error("failed to start the autoscaler: spec.autoscaling: {0}")]
    Settings(String),
}

impl From<RequestError> for AutoscalingError {
    fn from(error: RequestError) -> Self {
        Self::Write(error.into())
    }
}

impl Failure for AutoscalingError {
    fn root_cause(&self) -> Cause<'_> {
        match self {
            Self::Write(error) => error.root_cause(),
            Self::NotOwned(_) => Cause::NotOwned,
            Self::InvalidObject(_) => Cause::InvalidObject,
            Self::Settings(_) => Cause::Autoscaling,
        }
    }
}

/// The autoscaler of a cluster, and its last decision.
#[derive(Default)]
pub(crate) struct AutoscalerState {
    /// Of the leader only.
    running: Option<ClusterAutoscaler>,
    /// On every replica, for KEDA, which may call one that is not the leader.
    published: Option<AutoscalingStatus>,
}

impl AutoscalerState {
    /// Returns the last decision.
    pub(crate) const fn decision(&self) -> Option<&AutoscalingStatus> {
        self.published.as_ref()
    }

    /// Records the published decision.
    pub(crate) fn set_published(&mut self, status: &LearnerClusterStatus) {
        self.published.clone_from(&status.autoscaling);
    }
}

/// Autoscales a cluster whose plan was applied: decides if a decision is due, and requeues for the next one.
///
/// # Errors
/// The number of workers can't be written.
pub(crate) async fn autoscale(
    pass: &Pass<'_>,
    cluster: &ValidatedCluster,
    plan: &mut Plan<Applied>,
) -> Result<(), AutoscalingError> {
    if let Some(wait) = step(pass.context, pass.key, cluster, &mut plan.status, &pass.now).await? {
        plan.requeue = plan.requeue.min(wait);
    }
    Ok(())
}

/// Decides if a decision is due: sets it in `status` and writes the number of workers if the operator is its owner. Returns the time
/// until the next decision; `None` without autoscaling.
async fn step(
    context: &Context,
    key: &Key,
    cluster: &ValidatedCluster,
    status: &mut LearnerClusterStatus,
    now: &str,
) -> Result<Option<Duration>, AutoscalingError> {
    let Some(spec) = &cluster.spec.autoscaling else {
        context.clusters.with(key, |state| state.autoscaler.running = None);
        status.autoscaling = None;
        return Ok(None);
    };
    if cluster.is_suspended() || cluster.is_paused() {
        return Ok(None);
    }
    let seconds = context.started.elapsed().as_secs_f64();
    let operations = context.coordinators.report(key).map(|(_, report)| report.operations).unwrap_or_default();
    let counts = status.workers.clone().unwrap_or_default();
    let workers = cluster.spec.workers;
    ensure_running(context, key, cluster, spec, seconds).await?;
    let observation = ScalingObservation {
        wall_seconds: SystemTime::UNIX_EPOCH.elapsed().map_or(0.0, |elapsed| elapsed.as_secs_f64()),
        time: now,
        monotonic_seconds: seconds,
        operations: &operations,
        workers,
        ready: u32::try_from(counts.ready).unwrap_or_default(),
        is_draining: counts.draining > 0,
    };
    let stepped = with_running(context, key, |autoscaler| {
        // The cached object may be older than the decision, since writing it is what triggered this reconcile.
        status.autoscaling = autoscaler.last().cloned().or(status.autoscaling.take());
        (autoscaler.step(&observation), Duration::from_secs_f64(autoscaler.wait_seconds(seconds)))
    });
    let Some((step, wait)) = stepped else { return Ok(None) };
    let Some(ScalingStep { status: decision, write, is_conflict }) = step else { return Ok(Some(wait)) };
    let message = decision.message.clone();
    status.autoscaling = Some(decision);
    if is_conflict {
        context.events.publish_scaling(key, &cluster.uid, false, "AutoscalingConflict", &message).await;
    }
    if let Some(desired) = write {
        write_scale(context, key, desired).await?;
        with_running(context, key, |autoscaler| autoscaler.wrote(desired, workers, seconds));
        tracing::info!(cluster = %key, workers, desired, message, "autoscaling");
        context.events.publish_scaling(key, &cluster.uid, true, "Autoscaled", &message).await;
    }
    let unsaved = with_running(context, key, |autoscaler| autoscaler.take_unsaved(seconds)).flatten();
    if let Some(text) = unsaved
        && let Err(error) = history::write(context, cluster, &text).await
    {
        tracing::warn!(cluster = %key, %error, "failed to write the history of autoscaling; retrying in 5 minutes");
    }
    Ok(Some(wait))
}

/// Creates the autoscaler of a cluster unless it runs with these settings. It continues the decisions of the one before, or those that
/// another process wrote.
async fn ensure_running(
    context: &Context,
    key: &Key,
    cluster: &ValidatedCluster,
    spec: &Autoscaling,
    seconds: f64,
) -> Result<(), AutoscalingError> {
    let current = with_running(context, key, |autoscaler| {
        let is_current = !autoscaler.is_outdated(seconds);
        is_current.then(|| (autoscaler.is_for(spec), autoscaler.history().clone()))
    });
    let previous = match current.flatten() {
        Some((true, _)) => return Ok(()),
        previous => previous.map(|(_, history)| history),
    };
    let history = match previous {
        Some(history) => history,
        None => history::read(context, cluster).await?,
    };
    let created = ClusterAutoscaler::new(spec, history).map_err(AutoscalingError::Settings)?;
    context.clusters.with(key, |state| state.autoscaler.running = Some(created));
    Ok(())
}

/// Calls `act` with the running autoscaler of a cluster, if any.
fn with_running<R>(context: &Context, key: &Key, act: impl FnOnce(&mut ClusterAutoscaler) -> R) -> Option<R> {
    context.clusters.with(key, |state| state.autoscaler.running.as_mut().map(act))
}

async fn write_scale(context: &Context, key: &Key, workers: u32) -> Result<(), WriteError> {
    check_leader(context)?;
    let api = CLUSTER.of(&context.client, &key.namespace);
    let parameters = PatchParams { field_manager: Some(SCALE_MANAGER.into()), ..PatchParams::default() };
    let patch = Patch::Merge(json!({ "spec": { "replicas": workers } }));
    request(|| format!("scale LearnerCluster {}", key.name), api.patch_scale(&key.name, &parameters, &patch)).await?;
    Ok(())
}
