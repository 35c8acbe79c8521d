//! The last step of a reconcile: the status, metrics and events of a cluster.

use std::time::Instant;

use engram_api::status::{LearnerClusterStatus, Truth, condition};
use kube::runtime::controller::Action;
use serde_json::Value;
use tracing::{Instrument as _, debug_span};

use crate::cluster::autoscaling::autoscalers;
use crate::cluster::plan::{Applied, Plan};
use crate::cluster::reconcile::Pass;
use crate::cluster::rival::published_coordinators;
use crate::cluster::status::epochs::completed_epochs;
use crate::cluster::status::{is_idle, set_reconcile_failed};
use crate::cluster::validate::ValidatedCluster;
use crate::cluster::{apply, rival::Rival};
use crate::kube::api_request::Error;
use crate::kube::resource_kinds::CLUSTER;

/// Reports an applied plan: writes the status at once, or later if only counters changed. Then fails as the plan did.
pub(crate) async fn report(pass: &Pass<'_>, cluster: &ValidatedCluster, plan: Plan<Applied>) -> Result<Action, Error> {
    let Pass { context, key, old, now, .. } = pass;
    let Plan { mut status, mut requeue, stage: Applied { result }, .. } = plan;
    if let Err(error) = &result {
        set_reconcile_failed(&mut status, &error.to_string(), now);
    }
    // Queried only for idle clusters, since a worker that does not respond delays the reconcile.
    if is_idle(&status) {
        status.epoch = completed_epochs(context, key).await.or(status.epoch);
    }
    let autoscaled = autoscalers::step(context, key, cluster, &mut status, now).await;
    if let Ok(Some(wait)) = autoscaled {
        requeue = requeue.min(wait);
    }
    match context.clusters.with(key, |state| state.throttle.wait(old, &status, Instant::now())) {
        Some(wait) => {
            context.metrics.set_cluster_status(key, &status);
            requeue = requeue.min(wait);
        }
        None => publish_status(pass, &status).await?,
    }
    result?;
    autoscaled?;
    Ok(Action::requeue(requeue))
}

/// Publishes what a replica that is not the leader knows: the status that the leader wrote.
pub(crate) fn publish_as_follower(pass: &Pass<'_>) {
    let Pass { context, key, old, .. } = pass;
    context.metrics.set_cluster_status(key, old);
    context.clusters.with(key, |state| {
        state.rival = Rival::default();
        state.autoscaler.set_published(old);
    });
}

/// Reports another operator that manages the same cluster.
pub(crate) async fn report_rival(pass: &Pass<'_>, uid: &str, objects: &[Value]) {
    let Pass { context, key, .. } = pass;
    let Some(published) = published_coordinators(objects) else { return };
    let ours = &context.offer.coordinators;
    if let Some(report) = context.clusters.with(key, |state| state.rival.observe(&published, ours, Instant::now())) {
        tracing::warn!(cluster = %key, report, "conflict with another operator");
        context.events.publish_conflict(key, uid, &report).await;
    }
}

/// Writes a changed status, and publishes metrics and events.
pub(crate) async fn publish_status(pass: &Pass<'_>, status: &LearnerClusterStatus) -> Result<(), Error> {
    let Pass { context, key, old, .. } = pass;
    context.metrics.set_cluster_status(key, status);
    context.clusters.with(key, |state| state.autoscaler.set_published(status));
    if status == old || !context.leadership.is_leader() {
        return Ok(());
    }
    let written = apply::write_status(context, CLUSTER, key, status).instrument(debug_span!("status")).await?;
    context.written_clusters.record(key, &written, Instant::now());
    let events = context.clusters.with(key, |state| {
        state.throttle.wrote(Instant::now());
        state.lifecycle.observe(old, status)
    });
    let find = |status: &LearnerClusterStatus, kind: &str| {
        status.conditions.iter().find(|entry| entry.kind == kind).map(|entry| (entry.status, entry.reason.clone()))
    };
    let ready = find(status, condition::READY);
    if ready != find(old, condition::READY) {
        let (truth, reason) = ready.unwrap_or((Truth::Unknown, String::new()));
        tracing::info!(cluster = %key, ready = %truth, reason, "status");
    }
    context.events.publish_new_problems(key, pass.uid(), old, status).await;
    context.events.publish_lifecycle(key, pass.uid(), events).await;
    Ok(())
}
