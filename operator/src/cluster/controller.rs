//! The controller of LearnerClusters: which changes cause a reconcile, what a failed one costs, and what is forgotten with its cluster.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use anyhow::Result;
use futures::StreamExt as _;
use kube::api::DynamicObject;
use kube::runtime::controller::Action;
use kube::runtime::reflector::{ObjectRef, Store};
use tokio::sync::watch;
use tracing::Instrument as _;

use crate::cluster::reconcile::reconcile_cluster;
use crate::context::{Context, Key};
use crate::kube::api_request::Error;
use crate::kube::controllers::{controller, on_change, watcher_config};
use crate::kube::resource_kinds::{BUILT, CLAIM, CLUSTER, MAP, POD};
use crate::names::CLUSTER_LABEL;
use crate::telemetry::reconcile_span;

/// First and maximum back-off after a failed reconcile.
const RETRY_BACKOFF: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));
/// Interval at which state of deleted objects is removed.
pub(crate) const SWEEP_PERIOD: Duration = Duration::from_secs(5);

/// Runs the LearnerCluster controller for a namespace, or for all, until `stopped`.
pub(crate) async fn run(
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
            let key = Key { namespace, name: cluster.name.clone() };
            watch_context.clusters.with(&key, |state| state.lists.changed(kind));
            Some(cluster)
        };
        controller = controller.watches_with(api, kind.resource(), labelled.clone(), mapped);
    }
    let maps = MAP.within(client, scope.as_deref());
    let watch_context = Arc::clone(&context);
    let mapped = move |map: DynamicObject| {
        let (key, value) = (key_of(&map), MAP.value(&map));
        watch_context.coordinators.map_changed(&key, &value);
        watch_context.clusters.with(&key, |state| state.lists.update_from_watch(MAP, Instant::now(), value));
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

pub(crate) fn key_of(object: &DynamicObject) -> Key {
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
        context.clusters.sweep(scope.as_deref(), present, Instant::now());
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
        Ok(_) => context.clusters.with(key, |state| state.failures = 0),
        Err(error) => {
            tracing::warn!(cluster = %key, %error, "reconcile failed");
            context.events.publish_failure(key, object.metadata.uid.as_deref().unwrap_or_default(), error).await;
        }
    }
    result
}

/// Returns the result of a reconcile. One that failed because its object or namespace is being deleted is repeated until the object is gone.
pub(crate) fn deletion_as_success(result: Result<Action, Error>) -> Result<Action, Error> {
    match result {
        Err(error) if error.is_deletion() => {
            tracing::debug!(%error, "reconcile ended by a deletion");
            Ok(Action::requeue(SWEEP_PERIOD))
        }
        result => result,
    }
}

/// Returns the back-off after a failure: doubled with each consecutive failure, except for a kind that is not discovered yet.
fn after_failure(object: &DynamicObject, error: &Error, context: &Context) -> Action {
    let (first, longest) = RETRY_BACKOFF;
    if error.is_kind_not_ready() {
        return Action::requeue(first);
    }
    let failed = context.clusters.with(&key_of(object), |state| {
        state.failures = state.failures.saturating_add(1);
        state.failures
    });
    Action::requeue(first.saturating_mul(1 << (failed - 1).min(10)).min(longest))
}
