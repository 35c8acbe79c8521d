//! Reconciles a LearnerCluster: validate, observe, plan, steer, apply, autoscale, report.

use std::time::Duration;

use kube::runtime::controller::Action;
use tracing::{Instrument as _, debug_span};

use crate::cluster::apply::{ApplyError, apply};
use crate::cluster::autoscaling::autoscalers::{AutoscalingError, autoscale};
use crate::cluster::coordination::SteerError;
use crate::cluster::coordination::goal::{CoordinatorGoal, coordinator_goal, coordinator_goal_of_invalid_spec};
use crate::cluster::coordination::last_valid_spec::last_valid_spec;
use crate::cluster::object::ClusterObject;
use crate::cluster::observe::observation::Observation;
use crate::cluster::observe::trust::{Trust, observe_trust};
use crate::cluster::observe::{ObserveError, observe};
use crate::cluster::pass::Pass;
use crate::cluster::plan::{Plan, plan};
use crate::cluster::report::{
    CERTIFICATE_REQUEUE, complete_status, publish_as_follower, publish_status, report, report_conflict, report_failure,
};
use crate::cluster::status::epochs::update_epochs;
use crate::cluster::status::invalid_spec_status;
use crate::cluster::validate::{InvalidSpec, ValidatedCluster, validate};
use crate::context::{Context, Key};
use crate::kube::api_object::ApiObject;
use crate::kube::api_request::{WriteError, request};
use crate::kube::conditions::now;
use crate::kube::failure::{Cause, Failure};
use crate::kube::resource_kinds::{Kind, SET, built};
use crate::kube::stored_object::StoredObject as _;
use crate::names::Names;
use crate::pki::certificates::CaError;
use crate::pki::provided_certificate::published_roots;

/// Requeue delay of a cluster with an invalid spec.
const INVALID_SPEC_REQUEUE: Duration = Duration::from_secs(60);

/// Why a reconcile failed: the step, with its error. An invalid spec is reported, and planning cannot fail.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ReconcileError {
    #[error(transparent)]
    Observe(#[from] ObserveError),
    #[error(transparent)]
    Steer(#[from] SteerError),
    #[error(transparent)]
    Apply(#[from] ApplyError),
    #[error(transparent)]
    Autoscale(#[from] AutoscalingError),
    /// Its state was not reported.
    #[error(transparent)]
    Report(#[from] WriteError),
}

impl Failure for ReconcileError {
    fn root_cause(&self) -> Cause<'_> {
        match self {
            Self::Observe(error) => error.root_cause(),
            Self::Steer(error) => error.root_cause(),
            Self::Apply(error) => error.root_cause(),
            Self::Autoscale(error) => error.root_cause(),
            Self::Report(error) => error.root_cause(),
        }
    }
}

/// Reconciles a cluster in these steps:
/// 1. *validate* its spec; with an invalid one only coordination continues, by the last valid spec
/// 2. *observe* objects, pods, claims, the map and certificates
/// 3. *plan* what to apply, and the status, from these alone
/// 4. *steer* the coordinator, on every replica; the others are the leader's
/// 5. *apply* the plan
/// 6. *count epochs* that the workers of an idle cluster have completed
/// 7. *autoscale* by their load
/// 8. *report* the status of the applied plan, metrics and events
///
/// # Errors
/// A request failed; what was applied before stays, and the next reconcile continues from there.
pub(crate) async fn reconcile_cluster(
    object: &ClusterObject,
    key: &Key,
    context: &Context,
) -> Result<Action, ReconcileError> {
    if !object.is_managed_here() {
        context.coordinators.stop(key);
        return Ok(Action::await_change());
    }
    let written = context.written_clusters.newer(key, &object.metadata);
    let old = written.unwrap_or_else(|| object.status().clone());
    let pass = Pass { context, key, object, old, now: now() };
    let cluster = match debug_span!("validate").in_scope(|| validate(pass.object)) {
        Ok(cluster) => cluster,
        Err(problems) => return Box::pin(reconcile_invalid_spec(&pass, &problems)).await,
    };
    let observed = observe(context, &cluster, pass.old.clone()).instrument(debug_span!("observe")).await?;
    let trust = match observe_trust(context, &cluster, &observed).await {
        Err(error @ ObserveError::CertificateAuthority(CaError::Unavailable(_))) => {
            report_failure(&pass, &error.to_string()).await?;
            return Err(error.into());
        }
        trust => trust?,
    };
    if !trust.is_complete() {
        return wait_for_certificate(&pass, &cluster, &trust).await;
    }
    let offer = context.offer.with_published(trust.published());
    let mut plan = debug_span!("plan").in_scope(|| plan(&cluster, &observed, &offer, &pass.now));
    plan.apply_first(trust.missing_certificate());
    let goal = coordinator_goal(&cluster, &observed, &plan);
    let steering = steer(&pass, &cluster, &observed, goal.as_ref(), trust.provided_roots());
    let steered = steering.instrument(debug_span!("update coordinator")).await;
    if !context.leadership.is_leader() {
        publish_as_follower(&pass);
        steered?;
        return Ok(Action::requeue(plan.requeue));
    }
    report_conflict(&pass, &cluster.uid, &observed.objects).await;
    let mut applied = match steered {
        Ok(()) => apply(context, &cluster, plan).instrument(debug_span!("apply")).await,
        Err(error) => plan.unapplied(error),
    };
    complete_status(&pass, &cluster, &trust, &mut applied);
    update_epochs(context, key, &mut applied.status).await;
    let autoscaled = autoscale(&pass, &cluster, &mut applied).await;
    let requeue = report(&pass, &applied).await?;
    applied.stage.result?;
    autoscaled?;
    Ok(Action::requeue(requeue))
}

/// Gives the coordinator of the cluster its goal.
async fn steer(
    pass: &Pass<'_>,
    cluster: &ValidatedCluster,
    observed: &Observation,
    goal: Option<&CoordinatorGoal>,
    provided_roots: Option<&str>,
) -> Result<(), SteerError> {
    let Pass { context, key, .. } = pass;
    context.coordinators.coordinate(key, cluster, observed, goal, &context.nodes, provided_roots).await
}

/// Requests the certificate of a new cluster, which has nothing to coordinate yet, and reports what it waits for.
async fn wait_for_certificate(
    pass: &Pass<'_>,
    cluster: &ValidatedCluster,
    trust: &Trust,
) -> Result<Action, ReconcileError> {
    if !pass.context.leadership.is_leader() {
        publish_as_follower(pass);
        return Ok(Action::requeue(CERTIFICATE_REQUEUE));
    }
    let mut plan = Plan::unchanged(pass.old.clone(), CERTIFICATE_REQUEUE);
    plan.apply_first(trust.missing_certificate());
    let mut applied = apply(pass.context, cluster, plan).instrument(debug_span!("apply")).await;
    complete_status(pass, cluster, trust, &mut applied);
    publish_status(pass, &applied.status).await?;
    applied.stage.result?;
    Ok(Action::requeue(applied.requeue))
}

/// Reports an invalid spec, and continues to coordinate the cluster according to its last valid one, so that an invalid edit does not
/// disable failover. Writes nothing but the status and the map.
async fn reconcile_invalid_spec(pass: &Pass<'_>, problems: &InvalidSpec) -> Result<Action, ReconcileError> {
    let Pass { context, key, object, old, now } = pass;
    publish_status(pass, &invalid_spec_status(object.generation(), old, problems, now)).await?;
    let names = Names { cluster: key.name.clone() };
    let made = async |kind: Kind, name: String| {
        let api = kind.of(&context.client, &key.namespace);
        let state = request(|| format!("read {} {name}", kind.name), api.get_opt(&name)).await?;
        let state = state.map(|state| ApiObject::of(kind, state));
        Ok::<_, ObserveError>(state.filter(|state| state.is_owned_by(pass.uid())))
    };
    let (config, set) = futures::try_join!(made(built("ConfigMap"), names.config()), made(SET, names.worker()))?;
    // The cluster was never created.
    let (Some(config), Some(set)) = (config, set) else { return Ok(Action::await_change()) };
    let Some(cluster) = last_valid_spec(object, &config, &set) else { return Ok(Action::await_change()) };
    let observed = observe(context, &cluster, old.clone()).instrument(debug_span!("observe")).await?;
    let goal = coordinator_goal_of_invalid_spec(&cluster, &observed);
    let trusted = cluster.provided_secret().and_then(|_| published_roots(&cluster.names, &observed));
    steer(pass, &cluster, &observed, goal.as_ref(), trusted.as_deref()).await?;
    Ok(Action::requeue(INVALID_SPEC_REQUEUE))
}
