//! Reconciles a LearnerCluster: observe, validate, plan, steer, apply, report.

use std::time::Duration;

use engram_api::MANAGED_BY;
use engram_api::status::LearnerClusterStatus;
use k8s_openapi::jiff::{Timestamp, Unit};
use kube::api::DynamicObject;
use kube::runtime::controller::Action;
use serde_json::Value;
use tracing::{Instrument as _, debug_span};

use crate::cluster::apply::apply;
use crate::cluster::coordinator_goal::{coordinator_goal, coordinator_goal_of_invalid_spec};
use crate::cluster::last_valid_spec::last_valid_spec;
use crate::cluster::observe::{is_owned, observe};
use crate::cluster::plan::plan;
use crate::cluster::report::{publish_as_follower, publish_status, report, report_rival};
use crate::cluster::status::invalid_spec_status;
use crate::cluster::trust::{Trust, observe_trust};
use crate::cluster::validate::{InvalidSpec, validate};
use crate::context::{Context, Key};
use crate::kube::api_request::{Error, request};
use crate::kube::resource_kinds::{CLUSTER, Kind, SET, built};
use crate::names::Names;
use crate::pki::provided_certificate::published_roots;

/// Requeue delay of a cluster with an invalid spec.
const INVALID_SPEC_REQUEUE: Duration = Duration::from_secs(60);

/// One reconcile of a cluster.
pub(crate) struct Pass<'a> {
    pub(crate) context: &'a Context,
    pub(crate) key: &'a Key,
    pub(crate) object: Value,
    /// Status before the reconcile.
    pub(crate) old: LearnerClusterStatus,
    /// Time for conditions.
    pub(crate) now: String,
}

impl Pass<'_> {
    /// Returns the UID of the cluster's object.
    pub(crate) fn uid(&self) -> &str {
        self.object.pointer("/metadata/uid").and_then(Value::as_str).unwrap_or_default()
    }
}

/// Reconciles a cluster in these steps:
/// 1. *validate* its spec; with an invalid one only coordination continues, by the last valid spec
/// 2. *observe* objects, pods, claims, the map and certificates
/// 3. *plan* what to apply, and the status, from these alone
/// 4. *steer* the coordinator, on every replica
/// 5. *apply* the plan, if this replica is the leader
/// 6. *report* the status of the applied plan, metrics and events
///
/// # Errors
/// A request failed; what was applied before stays, and the next reconcile continues from there.
pub(crate) async fn reconcile_cluster(object: &DynamicObject, key: &Key, context: &Context) -> Result<Action, Error> {
    let mut object = CLUSTER.value(object);
    context.written_clusters.apply(key, &mut object);
    if !is_ours(&object) {
        context.coordinators.stop(key);
        return Ok(Action::await_change());
    }
    let old: LearnerClusterStatus = serde_json::from_value(object["status"].clone()).unwrap_or_default();
    let pass = Pass { context, key, object, old, now: now() };
    let cluster = match debug_span!("validate").in_scope(|| validate(&pass.object)) {
        Ok(cluster) => cluster,
        Err(problems) => return Box::pin(reconcile_invalid_spec(&pass, &problems)).await,
    };
    let observed = observe(context, &cluster, pass.old.clone()).instrument(debug_span!("observe")).await?;
    let trust = match observe_trust(&pass, &cluster, &observed).await? {
        Trust::Complete(trust) => trust,
        Trust::Awaiting(status, requeue) => {
            publish_status(&pass, &status).await?;
            return Ok(Action::requeue(requeue));
        }
    };
    let offer = trust.offer(&context.offer);
    let mut plan = debug_span!("plan").in_scope(|| plan(&cluster, &observed, &offer, &pass.now));
    trust.set_condition(&mut plan, cluster.generation, &pass.now);
    let goal = coordinator_goal(&cluster, &observed, &plan);
    let steering = context.coordinators.coordinate(
        key,
        &cluster,
        &observed,
        goal.as_ref(),
        &context.nodes,
        trust.provided_roots(),
    );
    let steered = steering.instrument(debug_span!("update coordinator")).await;
    if !context.leadership.is_leader() {
        publish_as_follower(&pass);
        steered?;
        return Ok(Action::requeue(plan.requeue));
    }
    report_rival(&pass, &cluster.uid, &observed.objects).await;
    let applied = match steered {
        Ok(()) => apply(context, &cluster, plan).instrument(debug_span!("apply")).await,
        Err(error) => plan.unapplied(error),
    };
    report(&pass, &cluster, applied).await
}

/// Reports an invalid spec, and continues to coordinate the cluster according to its last valid one, so that an invalid edit does not
/// disable failover. Writes nothing but the status and the map.
async fn reconcile_invalid_spec(pass: &Pass<'_>, problems: &InvalidSpec) -> Result<Action, Error> {
    let Pass { context, key, object, old, now } = pass;
    let generation = object.pointer("/metadata/generation").and_then(Value::as_i64).unwrap_or_default();
    publish_status(pass, &invalid_spec_status(generation, old, problems, now)).await?;
    let names = Names { cluster: key.name.clone() };
    let made = async |kind: Kind, name: String| {
        let api = kind.of(&context.client, &key.namespace);
        let state = request(|| format!("read {} {name}", kind.name), api.get_opt(&name)).await?;
        Ok::<_, Error>(state.map(|state| kind.value(&state)).filter(|state| is_owned(state, pass.uid())))
    };
    let (config, set) = futures::try_join!(made(built("ConfigMap"), names.config()), made(SET, names.worker()))?;
    // The cluster was never created.
    let (Some(config), Some(set)) = (config, set) else { return Ok(Action::await_change()) };
    let Some(cluster) = last_valid_spec(object, &config, &set) else { return Ok(Action::await_change()) };
    let observed = observe(context, &cluster, old.clone()).instrument(debug_span!("observe")).await?;
    let goal = coordinator_goal_of_invalid_spec(&cluster, &observed);
    let trusted = cluster.provided_secret().and_then(|_| published_roots(&cluster.names, &observed));
    context.coordinators.coordinate(key, &cluster, &observed, goal.as_ref(), &context.nodes, trusted).await?;
    Ok(Action::requeue(INVALID_SPEC_REQUEUE))
}

/// Returns whether this operator manages the object and it is not being deleted; garbage collection deletes its dependents.
pub(crate) fn is_ours(object: &Value) -> bool {
    let manager = object.pointer("/spec/managedBy").and_then(Value::as_str);
    manager.is_none_or(|manager| manager == MANAGED_BY) && object.pointer("/metadata/deletionTimestamp").is_none()
}

/// Returns the current time for conditions, in whole seconds.
pub(crate) fn now() -> String {
    let now = Timestamp::now();
    now.round(Unit::Second).unwrap_or(now).to_string()
}
