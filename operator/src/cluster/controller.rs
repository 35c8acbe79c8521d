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

use crate::cluster::object::ClusterObject;
use crate::cluster::reconcile::{ReconcileError, reconcile_cluster};
use crate::context::{Context, Key};
use crate::kube::api_object::ApiObject;
use crate::kube::controllers::{SWEEP_PERIOD, controller, deletion_as_success, on_change, watcher_config};
use crate::kube::failure::Failure;
use crate::kube::resource_kinds::{BUILT, CLAIM, CLUSTER, MAP, POD};
use crate::names::CLUSTER_LABEL;
use crate::telemetry::reconcile_span;

/// First and maximum back-off after a failed reconcile.
const RETRY_BACKOFF: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));

/// Runs the LearnerCluster controller for a namespace, or for all, until `stopped`.
pub(crate) async fn run(
    context: Arc<Context>,
    scope: Option<String>,
    concurrency: u16,
    stopped: watch::Receiver<bool>,
) -> Result<()> {
    let client = &context.client;
    let mut controller = controller(&context, scope.as_deref(), concurrency, stopped)
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
        let key = Key::of(&map);
        let reference = reference(&key.name, &key.namespace);
        let object = ApiObject::of(MAP, map);
        watch_context.coordinators.map_changed(&key, object.content());
        watch_context.clusters.with(&key, |state| state.lists.update_from_watch(MAP, Instant::now(), object));
        Some(reference)
    };
    controller = controller.watches_with(maps, MAP.resource(), watcher_config(), mapped);

    let sweeping = sweep(Arc::clone(&context), scope.clone(), controller.store());
    let after = |object: Arc<ClusterObject>, error: &ReconcileError, context: Arc<Context>| {
        after_failure(&object, error, &context)
    };
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

fn of_label(object: DynamicObject) -> Option<ObjectRef<ClusterObject>> {
    let name = object.metadata.labels?.remove(CLUSTER_LABEL)?;
    Some(reference(&name, &object.metadata.namespace?))
}

fn reference(name: &str, namespace: &str) -> ObjectRef<ClusterObject> {
    ObjectRef::new(name).within(namespace)
}

/// Removes the state of deleted clusters: without finalizers a deletion triggers no reconcile.
async fn sweep(context: Arc<Context>, scope: Option<String>, store: Store<ClusterObject>) {
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

async fn reconcile(object: Arc<ClusterObject>, context: Arc<Context>) -> Result<Action, ReconcileError> {
    let key = Key::of(&*object);
    let span = reconcile_span::reconcile_span(CLUSTER, &key, object.metadata.uid.as_deref());
    reconcile_and_record(&object, &key, &context).instrument(span).await
}

async fn reconcile_and_record(object: &ClusterObject, key: &Key, context: &Context) -> Result<Action, ReconcileError> {
    let began = Instant::now();
    let result = deletion_as_success(Box::pin(reconcile_cluster(object, key, context)).await);
    reconcile_span::record_outcome(&result);
    context.metrics.count_reconcile(began.elapsed(), result.as_ref().err().map(|error| error.root_cause().category()));
    match &result {
        Ok(_) => context.clusters.with(key, |state| state.failures = 0),
        Err(error) => {
            tracing::warn!(cluster = %key, %error, "reconcile failed");
            context.events.publish_failure(key, object.metadata.uid.as_deref().unwrap_or_default(), error).await;
        }
    }
    result
}

/// Returns the back-off after a failure: doubled with each consecutive failure, except for a kind that is not discovered yet.
fn after_failure(object: &ClusterObject, error: &ReconcileError, context: &Context) -> Action {
    let (first, longest) = RETRY_BACKOFF;
    if error.root_cause().is_kind_not_ready() {
        return Action::requeue(first);
    }
    let failed = context.clusters.with(&Key::of(object), |state| {
        state.failures = state.failures.saturating_add(1);
        state.failures
    });
    Action::requeue(first.saturating_mul(1 << (failed - 1).min(10)).min(longest))
}
