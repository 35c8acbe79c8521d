//! Reconciles LearnerClusters: observe, validate, plan, coordinate, apply, update status.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use anyhow::Result;
use engram_api::MANAGED_BY;
use engram_api::status::{LearnerClusterStatus, Truth, condition};
use futures::StreamExt as _;
use k8s_openapi::jiff::{Timestamp, Unit};
use kube::api::DynamicObject;
use kube::runtime::controller::Action;
use kube::runtime::reflector::{ObjectRef, Store};
use serde_json::Value;
use tokio::sync::watch;
use tracing::{Instrument as _, debug_span};

use super::api_request::{Error, request};
use super::controllers::{controller, on_change, watcher_config};
use super::observe::is_owned;
use super::resource_kinds::{BUILT, CLAIM, CLUSTER, Kind, MAP, POD, SET, built};
use super::rivals::published_coordinators;
use super::{Context, Key, apply, cert_manager, observe, provided_secret, reconcile_span};
use crate::coordinator_goal::{coordinator_goal, coordinator_goal_of_invalid_spec};
use crate::last_valid_spec::last_valid_spec;
use crate::names::{CLUSTER_LABEL, Names, ROOTS};
use crate::plan::plan;
use crate::provided_certificate::{
    awaiting_certificate_status, published_roots, set_certificate_condition, trust_bundle,
};
use crate::safety::cluster_id;
use crate::validate::validate;
use crate::{cluster_status, invalid_spec_status};

/// First and maximum back-off after a failed reconcile.
const RETRY_BACKOFF: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));
/// Requeue delay of a cluster with an invalid spec.
const INVALID_SPEC_REQUEUE: Duration = Duration::from_secs(60);
/// Polling interval for a missing or invalid Secret: the operator is not allowed to watch Secrets.
const CERTIFICATE_REQUEUE: Duration = Duration::from_secs(5);
/// Interval at which state of deleted objects is removed.
pub(super) const SWEEP_PERIOD: Duration = Duration::from_secs(5);

/// Runs the LearnerCluster controller for a namespace, or for all, until `stopped`.
pub(super) async fn run(
    context: Arc<Context>,
    scope: Option<String>,
    concurrency: u16,
    stopped: watch::Receiver<bool>,
) -> Result<()> {
    let client = &context.client;
    let mut controller = controller(&context, CLUSTER, scope.as_deref(), concurrency, stopped)
        // All clusters receive a changed trust bundle.
        .reconcile_all_on(on_change(context.certificates.changes()));
    let labelled = watcher_config().labels(CLUSTER_LABEL);
    for kind in BUILT.into_iter().chain([POD, CLAIM]) {
        let api = kind.within(client, scope.as_deref());
        let watch_context = Arc::clone(&context);
        let mapped = move |object: DynamicObject| {
            let cluster = of_label(object)?;
            let namespace = cluster.namespace.clone().unwrap_or_default();
            watch_context.lists.changed(&Key { namespace, name: cluster.name.clone() }, kind);
            Some(cluster)
        };
        controller = controller.watches_with(api, kind.resource(), labelled.clone(), mapped);
    }
    let maps = MAP.within(client, scope.as_deref());
    let watch_context = Arc::clone(&context);
    let mapped = move |map: DynamicObject| {
        let (key, value) = (key_of(&map), MAP.value(&map));
        watch_context.coordinators.map_changed(&key, &value);
        watch_context.lists.update_from_watch(&key, MAP, Instant::now(), value);
        of_name(map)
    };
    controller = controller.watches_with(maps, MAP.resource(), watcher_config(), mapped);

    let sweeping = sweep(Arc::clone(&context), scope.clone(), controller.store());
    let after =
        |object: Arc<DynamicObject>, error: &Error, context: Arc<Context>| after_failure(&object, error, &context);
    let looking = controller.run(reconcile, after, Arc::clone(&context)).for_each(async |result| {
        match result {
            // A dependent object of a deleted cluster.
            Ok(_) | Err(kube::runtime::controller::Error::ObjectNotFound(_)) => {}
            Err(kube::runtime::controller::Error::ReconcilerFailed(..)) => {}
            Err(error) => tracing::warn!(%error, "watch failed; retrying"),
        }
    });
    tokio::select! {
        () = looking => Ok(()),
        () = sweeping => Ok(()),
    }
}

fn of_label(object: DynamicObject) -> Option<ObjectRef<DynamicObject>> {
    let name = object.metadata.labels?.remove(CLUSTER_LABEL)?;
    Some(reference(&name, &object.metadata.namespace?))
}

fn of_name(object: DynamicObject) -> Option<ObjectRef<DynamicObject>> {
    Some(reference(&object.metadata.name?, &object.metadata.namespace?))
}

fn reference(name: &str, namespace: &str) -> ObjectRef<DynamicObject> {
    ObjectRef::new_with(name, CLUSTER.resource()).within(namespace)
}

pub(super) fn key_of(object: &DynamicObject) -> Key {
    let text = |text: &Option<String>| text.clone().unwrap_or_default();
    Key { namespace: text(&object.metadata.namespace), name: text(&object.metadata.name) }
}

/// Removes the state of deleted clusters: without finalizers a deletion triggers no reconcile.
async fn sweep(context: Arc<Context>, scope: Option<String>, store: Store<DynamicObject>) {
    if store.wait_until_ready().await.is_err() {
        return;
    }
    context.unlisted.fetch_sub(1, Ordering::Relaxed);
    loop {
        tokio::time::sleep(SWEEP_PERIOD).await;
        let present = |key: &Key| store.get(&reference(&key.name, &key.namespace)).is_some();
        context.coordinators.retain(scope.as_deref(), present);
        context.metrics.keep_only(scope.as_deref(), present);
        context.events.keep_only(scope.as_deref(), present);
        context.epochs.keep_only(scope.as_deref(), present);
        context.autoscalers.retain_clusters(scope.as_deref(), present);
        context.statuses.keep_only(scope.as_deref(), present);
        context.rivals.keep_only(scope.as_deref(), present);
        context.lists.keep_only(scope.as_deref(), present);
        context.failures().retain(|key, _| key.stays(scope.as_deref(), present));
    }
}

async fn reconcile(object: Arc<DynamicObject>, context: Arc<Context>) -> Result<Action, Error> {
    let key = key_of(&object);
    let span = reconcile_span::reconcile_span(CLUSTER, &key, object.metadata.uid.as_deref());
    reconcile_and_record(&object, &key, &context).instrument(span).await
}

async fn reconcile_and_record(object: &DynamicObject, key: &Key, context: &Context) -> Result<Action, Error> {
    let began = Instant::now();
    let result = deletion_as_success(Box::pin(reconcile_cluster(object, key, context)).await);
    reconcile_span::record_outcome(&result);
    context.metrics.count_reconcile(began.elapsed(), result.as_ref().err().map(Error::category));
    match &result {
        Ok(_) => drop(context.failures().remove(key)),
        Err(error) => {
            tracing::warn!(cluster = %key, %error, "reconcile failed");
            context.events.publish_failure(key, object.metadata.uid.as_deref().unwrap_or_default(), error).await;
        }
    }
    result
}

/// Returns the result of a reconcile. One that failed because its object or namespace is being deleted is repeated until the object is gone.
pub(super) fn deletion_as_success(result: Result<Action, Error>) -> Result<Action, Error> {
    match result {
        Err(error) if error.is_deletion() => {
            tracing::debug!(%error, "reconcile ended by a deletion");
            Ok(Action::requeue(SWEEP_PERIOD))
        }
        result => result,
    }
}

async fn reconcile_cluster(object: &DynamicObject, key: &Key, context: &Context) -> Result<Action, Error> {
    let mut object = CLUSTER.value(object);
    context.written_clusters.apply(key, &mut object);
    if !is_ours(&object) {
        context.coordinators.stop(key);
        return Ok(Action::await_change());
    }
    let old: LearnerClusterStatus = serde_json::from_value(object["status"].clone()).unwrap_or_default();
    let now = now();
    let cluster = match debug_span!("validate").in_scope(|| validate(&object)) {
        Ok(cluster) => cluster,
        Err(problems) => {
            let generation = object.pointer("/metadata/generation").and_then(Value::as_i64).unwrap_or_default();
            let status = invalid_spec_status(generation, &old, &problems, &now);
            publish_status(context, key, &object, &old, &status).await?;
            return Box::pin(reconcile_invalid_spec(context, key, &object, old)).await;
        }
    };
    let observed = observe::observe(context, &cluster, old.clone()).instrument(debug_span!("observe")).await?;
    let mut offer = context.offer.clone();
    let mut certificate_state = None;
    if cluster.certificates().is_some() {
        let mut roots = match context.certificates.roots().await {
            Ok(roots) => roots,
            // Without a CA the cluster can be neither created nor coordinated.
            Err(error) => {
                let mut status = old.clone();
                cluster_status::set_reconcile_failed(&mut status, &error.to_string(), &now);
                publish_status(context, key, &object, &old, &status).await?;
                return Err(error);
            }
        };
        if let Some(secret) = cluster.provided_secret() {
            let id = cluster_id(&cluster, &observed);
            let needed = provided_secret::needed(&cluster, &id)?;
            let issuance = cert_manager::ensure(context, &cluster, &needed).await?;
            let state = issuance.combine(provided_secret::read_secret(context, &cluster, &needed, &secret).await?);
            match (trust_bundle(&roots, &state, published_roots(&cluster.names, &observed)), state) {
                (None, Err(unfit)) => {
                    let status = awaiting_certificate_status(&old, &id, unfit, cluster.generation, &now);
                    publish_status(context, key, &object, &old, &status).await?;
                    return Ok(Action::requeue(CERTIFICATE_REQUEUE));
                }
                (all, state) => {
                    roots = all.unwrap_or(roots);
                    certificate_state = Some(state);
                }
            }
        }
        context.issuers.wait_for_first_read().await;
        offer.published = context.issuers.files();
        offer.published.insert(ROOTS.to_owned(), roots);
    }
    let trusted = certificate_state.as_ref().and(offer.published.get(ROOTS)).map(String::as_str);
    let mut plan = debug_span!("plan").in_scope(|| plan(&cluster, &observed, &offer, &now));
    if let Some(state) = &certificate_state {
        set_certificate_condition(&mut plan.status, state, cluster.generation, &now);
        plan.requeue = if state.is_err() { plan.requeue.min(CERTIFICATE_REQUEUE) } else { plan.requeue };
    }
    let goal = coordinator_goal(&cluster, &observed, &plan);
    let nodes = &context.nodes;
    let coordinated = context.coordinators.coordinate(key, &cluster, &observed, goal.as_ref(), nodes, trusted);
    let coordinated = coordinated.instrument(debug_span!("update coordinator")).await;
    if context.leadership.is_leader() {
        report_rival(context, key, &cluster.uid, &observed.objects).await;
        let done = match coordinated {
            Ok(()) => apply::apply(context, &cluster, &plan).instrument(debug_span!("apply")).await,
            failed => failed,
        };
        if plan.writes() {
            context.lists.invalidate_all(key);
        }
        let mut status = plan.status;
        if let Err(error) = &done {
            cluster_status::set_reconcile_failed(&mut status, &error.to_string(), &now);
        }
        // Queried only for idle clusters, since a worker that does not respond delays the reconcile.
        if cluster_status::is_idle(&status) {
            status.epoch = context.epochs.of(context, key).await.or(status.epoch);
        }
        let autoscaled = context.autoscalers.step(context, key, &cluster, &mut status, &now).await;
        let autoscaled = autoscaled.map(|wait| plan.requeue = wait.map_or(plan.requeue, |wait| plan.requeue.min(wait)));
        match context.statuses.wait(key, &old, &status, Instant::now()) {
            Some(wait) => {
                context.metrics.set_cluster_status(key, &status);
                plan.requeue = plan.requeue.min(wait);
            }
            None => publish_status(context, key, &object, &old, &status).await?,
        }
        done?;
        autoscaled?;
    } else {
        context.rivals.forget(key);
        context.metrics.set_cluster_status(key, &old);
        context.autoscalers.set_published(key, &old);
        coordinated?;
    }
    Ok(Action::requeue(plan.requeue))
}

/// Reports another operator that manages the same cluster.
async fn report_rival(context: &Context, key: &Key, uid: &str, objects: &[Value]) {
    let Some(published) = published_coordinators(objects) else { return };
    let report = context.rivals.observe(key, &published, &context.offer.coordinators, Instant::now());
    if let Some(report) = report {
        tracing::warn!(cluster = %key, report, "conflict with another operator");
        context.events.publish_conflict(key, uid, &report).await;
    }
}

/// Continues to coordinate a cluster with an invalid spec according to its last valid one, so that an invalid edit does not disable
/// failover. Writes nothing but the map.
async fn reconcile_invalid_spec(
    context: &Context,
    key: &Key,
    object: &Value,
    status: LearnerClusterStatus,
) -> Result<Action, Error> {
    let uid = object.pointer("/metadata/uid").and_then(Value::as_str).unwrap_or_default();
    let names = Names { cluster: key.name.clone() };
    let made = async |kind: Kind, name: String| {
        let api = kind.of(&context.client, &key.namespace);
        let state = request(|| format!("read {} {name}", kind.name), api.get_opt(&name)).await?;
        Ok::<_, Error>(state.map(|state| kind.value(&state)).filter(|state| is_owned(state, uid)))
    };
    let (config, set) = futures::try_join!(made(built("ConfigMap"), names.config()), made(SET, names.worker()))?;
    // The cluster was never created.
    let (Some(config), Some(set)) = (config, set) else { return Ok(Action::await_change()) };
    let Some(cluster) = last_valid_spec(object, &config, &set) else { return Ok(Action::await_change()) };
    let observed = observe::observe(context, &cluster, status).instrument(debug_span!("observe")).await?;
    let goal = coordinator_goal_of_invalid_spec(&cluster, &observed);
    let trusted = cluster.provided_secret().and_then(|_| published_roots(&cluster.names, &observed));
    context.coordinators.coordinate(key, &cluster, &observed, goal.as_ref(), &context.nodes, trusted).await?;
    Ok(Action::requeue(INVALID_SPEC_REQUEUE))
}

/// Returns whether this operator manages the object and it is not being deleted; garbage collection deletes its dependents.
pub(super) fn is_ours(object: &Value) -> bool {
    let manager = object.pointer("/spec/managedBy").and_then(Value::as_str);
    manager.is_none_or(|manager| manager == MANAGED_BY) && object.pointer("/metadata/deletionTimestamp").is_none()
}

/// Writes a changed status, and publishes metrics and events.
async fn publish_status(
    context: &Context,
    key: &Key,
    object: &Value,
    old: &LearnerClusterStatus,
    status: &LearnerClusterStatus,
) -> Result<(), Error> {
    context.metrics.set_cluster_status(key, status);
    context.autoscalers.set_published(key, status);
    if status == old || !context.leadership.is_leader() {
        return Ok(());
    }
    let written = apply::write_status(context, CLUSTER, key, status).instrument(debug_span!("status")).await?;
    context.written_clusters.record(key, &written, Instant::now());
    context.statuses.wrote(key, Instant::now());
    let find = |status: &LearnerClusterStatus, kind: &str| {
        status.conditions.iter().find(|entry| entry.kind == kind).map(|entry| (entry.status, entry.reason.clone()))
    };
    let ready = find(status, condition::READY);
    if ready != find(old, condition::READY) {
        let (truth, reason) = ready.unwrap_or((Truth::Unknown, String::new()));
        tracing::info!(cluster = %key, ready = %truth, reason, "status");
    }
    let uid = object.pointer("/metadata/uid").and_then(Value::as_str).unwrap_or_default();
    context.events.publish_new_problems(key, uid, old, status).await;
    context.events.publish_lifecycle(key, uid, old, status).await;
    Ok(())
}

/// Returns the back-off after a failure: doubled with each consecutive failure, except for a kind that is not discovered yet.
fn after_failure(object: &DynamicObject, error: &Error, context: &Context) -> Action {
    let (first, longest) = RETRY_BACKOFF;
    if error.is_kind_not_ready() {
        return Action::requeue(first);
    }
    let mut failures = context.failures();
    let failed = failures.entry(key_of(object)).or_default();
    *failed += 1;
    Action::requeue(first.saturating_mul(1 << (*failed - 1).min(10)).min(longest))
}

/// Returns the current time for conditions, in whole seconds.
pub(super) fn now() -> String {
    let now = Timestamp::now();
    now.round(Unit::Second).unwrap_or(now).to_string()
}
