//! Looks at a cluster again and again: observe, validate, plan, steer, apply, status.

use std::sync::Arc;
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

use super::asking::{Error, ask};
use super::kinds::{BUILT, CLAIM, CLUSTER, Kind, MAP, POD, SET, built};
use super::observe::is_owned;
use super::watching::{changed, controller, watched};
use super::{Context, Key, apply, cert_manager, given, observe, traced};
use crate::evidence::cluster_id;
use crate::given::{awaited, believed, published, tell as tell_certified};
use crate::names::{CLUSTER_LABEL, Names, ROOTS};
use crate::plan::plan;
use crate::recall::recall;
use crate::steer::{steer, steer_on};
use crate::validate::validate;
use crate::{refused, report};

/// First and longest wait after a look that failed.
const LOOK_AGAIN: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));
/// How soon a cluster whose spec is refused is looked at again, if nothing is heard before.
const REFUSED: Duration = Duration::from_secs(60);
/// How soon a Secret is looked at again that is not there, or of no use: nobody tells of it, since nobody may list Secrets.
const AWAITED: Duration = Duration::from_secs(5);
/// How often clusters that are gone are forgotten.
pub(super) const SWEEP: Duration = Duration::from_secs(5);

/// Looks after the clusters of a namespace, or of all, until `stopped`.
pub(super) async fn run(
    context: Arc<Context>,
    scope: Option<String>,
    concurrency: u16,
    stopped: watch::Receiver<bool>,
) -> Result<()> {
    let client = &context.client;
    let mut controller = controller(&context, CLUSTER, scope.as_deref(), concurrency, stopped)
        // All of them are told of others to believe.
        .reconcile_all_on(changed(context.certificates.changes()));
    let labelled = watched().labels(CLUSTER_LABEL);
    for kind in BUILT.into_iter().chain([POD, CLAIM]) {
        let api = kind.within(client, scope.as_deref());
        let watching = Arc::clone(&context);
        let mapped = move |object: DynamicObject| {
            let cluster = of_label(object)?;
            let namespace = cluster.namespace.clone().unwrap_or_default();
            watching.lists.changed(&Key { namespace, name: cluster.name.clone() }, kind);
            Some(cluster)
        };
        controller = controller.watches_with(api, kind.resource(), labelled.clone(), mapped);
    }
    let maps = MAP.within(client, scope.as_deref());
    let watching = Arc::clone(&context);
    let mapped = move |map: DynamicObject| {
        let (key, value) = (key_of(&map), MAP.value(&map));
        watching.coordinators.map_changed(&key, &value);
        watching.lists.told(&key, MAP, Instant::now(), value);
        of_name(map)
    };
    controller = controller.watches_with(maps, MAP.resource(), watched(), mapped);

    let sweeping = sweep(Arc::clone(&context), scope.clone(), controller.store());
    let after =
        |object: Arc<DynamicObject>, error: &Error, context: Arc<Context>| after_failure(&object, error, &context);
    let looking = controller.run(look, after, Arc::clone(&context)).for_each(async |result| {
        match result {
            // What was made for a cluster that is gone goes after it.
            Ok(_) | Err(kube::runtime::controller::Error::ObjectNotFound(_)) => {}
            Err(kube::runtime::controller::Error::ReconcilerFailed(..)) => {}
            Err(error) => tracing::warn!(%error, "a watch is broken; it is tried again"),
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

/// Forgets clusters that are gone: nobody is told of the end of an object that has no finalizer.
async fn sweep(context: Arc<Context>, scope: Option<String>, store: Store<DynamicObject>) {
    if store.wait_until_ready().await.is_err() {
        return;
    }
    loop {
        tokio::time::sleep(SWEEP).await;
        let present = |key: &Key| store.get(&reference(&key.name, &key.namespace)).is_some();
        context.coordinators.end_all_but(scope.as_deref(), present);
        context.metrics.keep_only(scope.as_deref(), present);
        context.epochs.keep_only(scope.as_deref(), present);
        context.statuses.keep_only(scope.as_deref(), present);
        context.lists.keep_only(scope.as_deref(), present);
        context.failures().retain(|key, _| key.stays(scope.as_deref(), present));
    }
}

async fn look(object: Arc<DynamicObject>, context: Arc<Context>) -> Result<Action, Error> {
    let key = key_of(&object);
    let span = traced::look(CLUSTER, &key, object.metadata.uid.as_deref());
    look_once(&object, &key, &context).instrument(span).await
}

async fn look_once(object: &DynamicObject, key: &Key, context: &Context) -> Result<Action, Error> {
    let began = Instant::now();
    let result = Box::pin(look_at(object, key, context)).await;
    traced::ended(&result);
    context.metrics.looked(began.elapsed(), result.as_ref().err().map(Error::category));
    match &result {
        Ok(_) => drop(context.failures().remove(key)),
        Err(error) => {
            tracing::warn!(cluster = %key, %error, "a look at a cluster failed");
            context.events.failed(key, object.metadata.uid.as_deref().unwrap_or_default(), error).await;
        }
    }
    result
}

async fn look_at(object: &DynamicObject, key: &Key, context: &Context) -> Result<Action, Error> {
    let object = CLUSTER.value(object);
    if !is_ours(&object) {
        context.coordinators.end(key);
        return Ok(Action::await_change());
    }
    let old: LearnerClusterStatus = serde_json::from_value(object["status"].clone()).unwrap_or_default();
    let now = now();
    let cluster = match debug_span!("validate").in_scope(|| validate(&object)) {
        Ok(cluster) => cluster,
        Err(problems) => {
            let generation = object.pointer("/metadata/generation").and_then(Value::as_i64).unwrap_or_default();
            let status = refused(generation, &old, &problems, &now);
            tell(context, key, &object, &old, &status).await?;
            return Box::pin(carry_on(context, key, &object, old)).await;
        }
    };
    let observed = observe::observe(context, &cluster, old.clone()).instrument(debug_span!("observe")).await?;
    let mut offer = context.offer.clone();
    let mut certified = None;
    if cluster.certificates().is_some() {
        let mut roots = match context.certificates.roots().await {
            Ok(roots) => roots,
            // Without an authority nothing can be made for it, and nobody coordinated.
            Err(error) => {
                let mut status = old.clone();
                report::hinder(&mut status, &error.to_string(), &now);
                tell(context, key, &object, &old, &status).await?;
                return Err(error);
            }
        };
        if let Some(secret) = cluster.given_secret() {
            let id = cluster_id(&cluster, &observed);
            let needed = given::needed(&cluster, &id)?;
            let asked = cert_manager::keep(context, &cluster, &needed).await?;
            let found = asked.beside(given::look(context, &cluster, &needed, &secret).await?);
            match (believed(&roots, &found, published(&cluster.names, &observed)), found) {
                (None, Err(unfit)) => {
                    let status = awaited(&old, &id, unfit, cluster.generation, &now);
                    tell(context, key, &object, &old, &status).await?;
                    return Ok(Action::requeue(AWAITED));
                }
                (all, found) => {
                    roots = all.unwrap_or(roots);
                    certified = Some(found);
                }
            }
        }
        context.issuers.asked().await;
        offer.published = context.issuers.files();
        offer.published.insert(ROOTS.to_owned(), roots);
    }
    let trusted = certified.as_ref().and(offer.published.get(ROOTS)).map(String::as_str);
    let mut plan = debug_span!("plan").in_scope(|| plan(&cluster, &observed, &offer, &now));
    if let Some(found) = &certified {
        tell_certified(&mut plan.status, found, cluster.generation, &now);
        plan.requeue = if found.is_err() { plan.requeue.min(AWAITED) } else { plan.requeue };
    }
    let steering = steer(&cluster, &observed, &plan);
    let nodes = &context.nodes;
    let tended = context.coordinators.tend(key, &cluster, &observed, steering.as_ref(), nodes, trusted);
    let tended = tended.instrument(debug_span!("steer")).await;
    if context.leadership.leads() {
        let done = match tended {
            Ok(()) => apply::apply(context, &cluster, &plan).instrument(debug_span!("apply")).await,
            failed => failed,
        };
        if plan.writes() {
            context.lists.wrote(key);
        }
        let mut status = plan.status;
        if let Err(error) = &done {
            report::hinder(&mut status, &error.to_string(), &now);
        }
        // Of one that is not well nobody waits for such an answer.
        if report::is_at_rest(&status) {
            status.epoch = context.epochs.of(context, key).await.or(status.epoch);
        }
        match context.statuses.wait(key, &old, &status, Instant::now()) {
            Some(wait) => {
                context.metrics.saw(key, &status);
                plan.requeue = plan.requeue.min(wait);
            }
            None => tell(context, key, &object, &old, &status).await?,
        }
        done?;
    } else {
        context.metrics.saw(key, &old);
        tended?;
    }
    Ok(Action::requeue(plan.requeue))
}

/// Goes on coordinating a cluster whose spec is refused, as it was when its spec was good: an edit that is refused takes nobody's
/// failover away, whenever the operator was started. Nothing is written but the map.
async fn carry_on(context: &Context, key: &Key, object: &Value, status: LearnerClusterStatus) -> Result<Action, Error> {
    let uid = object.pointer("/metadata/uid").and_then(Value::as_str).unwrap_or_default();
    let names = Names { cluster: key.name.clone() };
    let made = async |kind: Kind, name: String| {
        let api = kind.of(&context.client, &key.namespace);
        let found = ask(|| format!("read {} {name}", kind.name), api.get_opt(&name)).await?;
        Ok::<_, Error>(found.map(|found| kind.value(&found)).filter(|found| is_owned(found, uid)))
    };
    let (config, set) = futures::try_join!(made(built("ConfigMap"), names.config()), made(SET, names.worker()))?;
    // Nothing has been made yet, and nobody runs.
    let (Some(config), Some(set)) = (config, set) else { return Ok(Action::await_change()) };
    let Some(cluster) = recall(object, &config, &set) else { return Ok(Action::await_change()) };
    let observed = observe::observe(context, &cluster, status).instrument(debug_span!("observe")).await?;
    let steering = steer_on(&cluster, &observed);
    let trusted = cluster.given_secret().and_then(|_| published(&cluster.names, &observed));
    context.coordinators.tend(key, &cluster, &observed, steering.as_ref(), &context.nodes, trusted).await?;
    Ok(Action::requeue(REFUSED))
}

/// Whether this operator looks after the object, and nobody has deleted it: what goes with it goes by its owner references.
pub(super) fn is_ours(object: &Value) -> bool {
    let manager = object.pointer("/spec/managedBy").and_then(Value::as_str);
    manager.is_none_or(|manager| manager == MANAGED_BY) && object.pointer("/metadata/deletionTimestamp").is_none()
}

/// Writes a status that says something new.
async fn tell(
    context: &Context,
    key: &Key,
    object: &Value,
    old: &LearnerClusterStatus,
    status: &LearnerClusterStatus,
) -> Result<(), Error> {
    context.metrics.saw(key, status);
    if status == old || !context.leadership.leads() {
        return Ok(());
    }
    apply::write_status(context, CLUSTER, key, status).instrument(debug_span!("status")).await?;
    context.statuses.wrote(key, Instant::now());
    let find = |status: &LearnerClusterStatus, kind: &str| {
        status.conditions.iter().find(|known| known.kind == kind).map(|known| (known.status, known.reason.clone()))
    };
    let ready = find(status, condition::READY);
    if ready != find(old, condition::READY) {
        let (truth, reason) = ready.unwrap_or((Truth::Unknown, String::new()));
        tracing::info!(cluster = %key, ready = %truth, reason, "status");
    }
    let uid = object.pointer("/metadata/uid").and_then(Value::as_str).unwrap_or_default();
    context.events.turned(key, uid, old, status).await;
    Ok(())
}

/// Each failure of a cluster doubles the wait for the next look, but for one that is over soon.
fn after_failure(object: &DynamicObject, error: &Error, context: &Context) -> Action {
    let (first, longest) = LOOK_AGAIN;
    if error.is_early() {
        return Action::requeue(first);
    }
    let mut failures = context.failures();
    let failed = failures.entry(key_of(object)).or_default();
    *failed += 1;
    Action::requeue(first.saturating_mul(1 << (*failed - 1).min(10)).min(longest))
}

/// The time as conditions have it: whole seconds.
pub(super) fn now() -> String {
    let now = Timestamp::now();
    now.round(Unit::Second).unwrap_or(now).to_string()
}
