//! The last step of a reconcile: the status, metrics and events of a cluster.

use std::time::{Duration, Instant};

use engram_api::status::{LearnerClusterStatus, Truth, condition};
use tracing::{Instrument as _, debug_span};

use crate::cluster::apply::Applied;
use crate::cluster::build::PublishedSettings;
use crate::cluster::object::ClusterObject;
use crate::cluster::observe::trust::Trust;
use crate::cluster::operator_conflict::OperatorConflict;
use crate::cluster::pass::Pass;
use crate::cluster::plan::Plan;
use crate::cluster::status::set_reconcile_failed;
use crate::cluster::validate::ValidatedCluster;
use crate::kube::api_object::ApiObject;
use crate::kube::api_request::WriteError;
use crate::kube::written_statuses::write_status;
use crate::pki::provided_certificate::{CertificateProblem, awaiting_certificate_status, set_certificate_condition};

/// Polling interval for a missing or invalid Secret: the operator is not allowed to watch Secrets.
pub(crate) const CERTIFICATE_REQUEUE: Duration = Duration::from_secs(5);

/// Adds what the plan did not know to its status: the state of the certificate, and the step that failed.
pub(crate) fn complete_status(pass: &Pass<'_>, cluster: &ValidatedCluster, trust: &Trust, plan: &mut Plan<Applied>) {
    let Plan { status, requeue, stage: Applied { result, rejected_certificate }, .. } = plan;
    if let Some(soon) = report_certificate(trust, status, rejected_certificate.take(), cluster.generation, &pass.now) {
        *requeue = soon.min(*requeue);
    }
    if let Err(error) = result {
        set_reconcile_failed(status, &error.to_string(), &pass.now);
    }
}

/// Reports the certificate in `status`; `rejected` is why its Certificate could not be applied. Returns when to observe an invalid
/// certificate again.
fn report_certificate(
    trust: &Trust,
    status: &mut LearnerClusterStatus,
    rejected: Option<CertificateProblem>,
    generation: i64,
    now: &str,
) -> Option<Duration> {
    let observed = trust.certificate()?;
    let state = observed.usable_certificate(rejected);
    match state {
        Err(problem) if !observed.has_roots() => {
            *status = awaiting_certificate_status(status, observed.cluster_id(), problem, generation, now);
            return Some(CERTIFICATE_REQUEUE);
        }
        _ => set_certificate_condition(status, &state, generation, now),
    }
    state.is_err().then_some(CERTIFICATE_REQUEUE)
}

/// Reports an applied plan: writes the status at once, or later if only counters changed. Returns the requeue delay.
pub(crate) async fn report(pass: &Pass<'_>, plan: &Plan<Applied>) -> Result<Duration, WriteError> {
    let Pass { context, key, old, .. } = pass;
    let Plan { status, requeue, .. } = plan;
    match context.clusters.with(key, |state| state.throttle.wait(old, status, Instant::now())) {
        Some(wait) => {
            context.metrics.set_cluster_status(key, status);
            Ok(wait.min(*requeue))
        }
        None => {
            publish_status(pass, status).await?;
            Ok(*requeue)
        }
    }
}

/// Reports a cluster that cannot be observed, for a reason that its user should know.
pub(crate) async fn report_failure(pass: &Pass<'_>, reason: &str) -> Result<(), WriteError> {
    let mut status = pass.old.clone();
    set_reconcile_failed(&mut status, reason, &pass.now);
    publish_status(pass, &status).await
}

/// Publishes what a replica that is not the leader knows: the status that the leader wrote.
pub(crate) fn publish_as_follower(pass: &Pass<'_>) {
    let Pass { context, key, old, .. } = pass;
    context.metrics.set_cluster_status(key, old);
    context.clusters.with(key, |state| {
        state.conflict = OperatorConflict::default();
        state.autoscaler.set_published(old);
    });
}

/// Reports another operator that manages the same cluster.
pub(crate) async fn report_conflict(pass: &Pass<'_>, uid: &str, objects: &[ApiObject]) {
    let Pass { context, key, .. } = pass;
    let published = PublishedSettings::find(objects).and_then(|settings| settings.coordinators);
    let Some(published) = published else { return };
    let ours = &context.offer.coordinators;
    if let Some(report) = context.clusters.with(key, |state| state.conflict.observe(&published, ours, Instant::now())) {
        tracing::warn!(cluster = %key, report, "conflict with another operator");
        context.events.publish_conflict(key, uid, &report).await;
    }
}

/// Writes a changed status, and publishes metrics and events.
pub(crate) async fn publish_status(pass: &Pass<'_>, status: &LearnerClusterStatus) -> Result<(), WriteError> {
    let Pass { context, key, old, .. } = pass;
    context.metrics.set_cluster_status(key, status);
    context.clusters.with(key, |state| state.autoscaler.set_published(status));
    if status == old || !context.leadership.is_leader() {
        return Ok(());
    }
    let writing = write_status::<ClusterObject>(context, key, status);
    let written = writing.instrument(debug_span!("status")).await?;
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
