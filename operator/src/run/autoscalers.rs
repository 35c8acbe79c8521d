//! Autoscalers of clusters with `spec.autoscaling`: run by the leader in its reconciles.

use std::collections::BTreeMap;
use std::time::{Duration, Instant, SystemTime};

use engram_api::status::LearnerClusterStatus;
use engram_api::{Autoscaling, AutoscalingStatus};
use kube::api::{Patch, PatchParams};
use parking_lot::Mutex;
use serde_json::json;

use super::api_request::{Error, request};
use super::apply::check_leader;
use super::resource_kinds::CLUSTER;
use super::{Context, Key, autoscaling_history};
use crate::autoscaling::{ClusterAutoscaler, ScalingObservation, ScalingStep};
use crate::validate::ValidatedCluster;

/// Field manager of `/scale`.
const SCALE_MANAGER: &str = "engram-operator-autoscaling";

/// State of all autoscalers, and their last decisions on every replica.
pub(super) struct Autoscalers {
    start: Instant,
    running: Mutex<BTreeMap<Key, ClusterAutoscaler>>,
    /// For KEDA, which may call a replica that is not the leader.
    published: Mutex<BTreeMap<Key, AutoscalingStatus>>,
}

impl Default for Autoscalers {
    fn default() -> Self {
        Self { start: Instant::now(), running: Mutex::default(), published: Mutex::default() }
    }
}

impl Autoscalers {
    /// Returns the last decision for a cluster.
    pub(super) fn decision(&self, key: &Key) -> Option<AutoscalingStatus> {
        self.published.lock().get(key).cloned()
    }

    /// Records the published decision for a cluster.
    pub(super) fn set_published(&self, key: &Key, status: &LearnerClusterStatus) {
        let mut published = self.published.lock();
        match &status.autoscaling {
            Some(decision) => drop(published.insert(key.clone(), decision.clone())),
            None => drop(published.remove(key)),
        }
    }

    /// Removes clusters of a scope that are not in `present`.
    pub(super) fn retain_clusters(&self, scope: Option<&str>, present: impl Fn(&Key) -> bool) {
        self.running.lock().retain(|key, _| key.stays(scope, &present));
        self.published.lock().retain(|key, _| key.stays(scope, &present));
    }

    /// Decides if a decision is due: sets it in `status` and writes the number of workers if the operator is its owner. Returns the time
    /// until the next decision; `None` without autoscaling.
    ///
    /// # Errors
    /// The number of workers can't be written.
    pub(super) async fn step(
        &self,
        context: &Context,
        key: &Key,
        cluster: &ValidatedCluster,
        status: &mut LearnerClusterStatus,
        now: &str,
    ) -> Result<Option<Duration>, Error> {
        let Some(spec) = &cluster.spec.autoscaling else {
            self.running.lock().remove(key);
            status.autoscaling = None;
            return Ok(None);
        };
        if cluster.is_suspended() || cluster.is_paused() {
            return Ok(None);
        }
        let seconds = self.start.elapsed().as_secs_f64();
        let operations = context.coordinators.report(key).map(|(_, report)| report.operations).unwrap_or_default();
        let counts = status.workers.clone().unwrap_or_default();
        let workers = cluster.spec.workers;
        self.ensure_running(context, key, cluster, spec, seconds).await?;
        let (step, wait) = {
            let mut running = self.running.lock();
            let Some(autoscaler) = running.get_mut(key) else { return Ok(None) };
            // The cached object may be older than the decision, since writing it is what triggered this reconcile.
            status.autoscaling = autoscaler.last().cloned().or(status.autoscaling.take());
            let step = autoscaler.step(&ScalingObservation {
                wall_seconds: SystemTime::UNIX_EPOCH.elapsed().map_or(0.0, |elapsed| elapsed.as_secs_f64()),
                time: now,
                monotonic_seconds: seconds,
                operations: &operations,
                workers,
                ready: u32::try_from(counts.ready).unwrap_or_default(),
                is_draining: counts.draining > 0,
            });
            (step, Duration::from_secs_f64(autoscaler.wait_seconds(seconds)))
        };
        let Some(ScalingStep { status: decision, write, is_conflict }) = step else { return Ok(Some(wait)) };
        let message = decision.message.clone();
        status.autoscaling = Some(decision);
        if is_conflict {
            context.events.publish_scaling(key, &cluster.uid, false, "AutoscalingConflict", &message).await;
        }
        if let Some(desired) = write {
            write_scale(context, key, desired).await?;
            if let Some(autoscaler) = self.running.lock().get_mut(key) {
                autoscaler.wrote(desired, workers, seconds);
            }
            tracing::info!(cluster = %key, workers, desired, message, "autoscaling");
            context.events.publish_scaling(key, &cluster.uid, true, "Autoscaled", &message).await;
        }
        let unsaved = self.running.lock().get_mut(key).and_then(|autoscaler| autoscaler.take_unsaved(seconds));
        if let Some(text) = unsaved
            && let Err(error) = autoscaling_history::write(context, cluster, &text).await
        {
            tracing::warn!(cluster = %key, %error, "failed to write the history of autoscaling; retrying in 5 minutes");
        }
        Ok(Some(wait))
    }

    /// Creates the autoscaler of a cluster unless it runs with these settings. It continues the decisions of the one before, or those that
    /// another process wrote.
    async fn ensure_running(
        &self,
        context: &Context,
        key: &Key,
        cluster: &ValidatedCluster,
        spec: &Autoscaling,
        seconds: f64,
    ) -> Result<(), Error> {
        let previous = {
            let running = self.running.lock();
            let current = running.get(key).filter(|autoscaler| !autoscaler.is_outdated(seconds));
            if current.is_some_and(|autoscaler| autoscaler.is_for(spec)) {
                return Ok(());
            }
            current.map(|autoscaler| autoscaler.history().clone())
        };
        let history = match previous {
            Some(history) => history,
            None => autoscaling_history::read(context, cluster).await?,
        };
        let created = ClusterAutoscaler::new(spec, history).map_err(Error::Autoscaling)?;
        self.running.lock().insert(key.clone(), created);
        Ok(())
    }
}

async fn write_scale(context: &Context, key: &Key, workers: u32) -> Result<(), Error> {
    check_leader(context)?;
    let api = CLUSTER.of(&context.client, &key.namespace);
    let parameters = PatchParams { field_manager: Some(SCALE_MANAGER.into()), ..PatchParams::default() };
    let patch = Patch::Merge(json!({ "spec": { "replicas": workers } }));
    request(|| format!("scale LearnerCluster {}", key.name), api.patch_scale(&key.name, &parameters, &patch))
        .await
        .map(drop)
}
