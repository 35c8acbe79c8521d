//! Reads the objects of one cluster from the API server.

pub(crate) mod nodes;
pub(crate) mod object_views;
pub(crate) mod observation;
mod pod_view;

use std::sync::Arc;
use std::time::Instant;

use engram_api::status::LearnerClusterStatus;
use futures::future::try_join_all;
use kube::api::ListParams;
use serde_json::Value;

use crate::cluster::build::GPU_RESOURCE;
use crate::cluster::observe::observation::{ClaimView, MapView, Observation, PodView, SetView};
use crate::cluster::validate::ValidatedCluster;
use crate::context::{Context, Key};
use crate::kube::api_request::{Error, request};
use crate::kube::list_cache::Lookup;
use crate::kube::resource_kinds::{BUILT, CLAIM, Kind, MAP, POD, SET};
use crate::names::CLUSTER_LABEL;

/// Observes everything that a plan depends on: reads the map, and lists that have changed.
pub(crate) async fn observe(
    context: &Context,
    cluster: &ValidatedCluster,
    status: LearnerClusterStatus,
) -> Result<Observation, Error> {
    let (name, namespace) = (&cluster.names.cluster, &cluster.namespace);
    let of_cluster = ListParams::default().labels(&format!("{CLUSTER_LABEL}={name}"));
    let of_workers = ListParams::default().labels(&cluster.names.selector());
    let key = Key { namespace: namespace.clone(), name: name.clone() };
    let list = async |kind: Kind, parameters: &ListParams| {
        let now = Instant::now();
        let changes = match context.clusters.with(&key, |state| state.lists.get(kind, now)) {
            Lookup::Cached(items) => return Ok(items),
            Lookup::Missing(changes) => changes,
        };
        let api = kind.of(&context.client, namespace);
        let items = request(|| format!("list {} of {namespace}", kind.name), api.list(parameters)).await?;
        let items = Arc::new(items.items.iter().map(|object| kind.value(object)).collect());
        context.clusters.with(&key, |state| state.lists.insert(kind, changes, now, &items));
        Ok::<Arc<Vec<Value>>, Error>(items)
    };
    let built = try_join_all(BUILT.map(|kind| list(kind, &of_cluster)));
    let map = map(context, &key);
    let (built, pods, claims, map) = futures::try_join!(built, list(POD, &of_workers), list(CLAIM, &of_workers), map)?;

    let is_ours = |object: &&Value| is_owned(object, &cluster.uid);
    let objects: Vec<Value> = built.iter().flat_map(|items| items.iter()).filter(is_ours).cloned().collect();
    let set = objects.iter().find(|object| object["kind"] == SET.name).map(SetView::read).transpose()?;
    let nodes = pods.iter().filter_map(|pod| pod.pointer("/spec/nodeName")?.as_str());
    let lost = context.nodes.lost(nodes);
    let resource = cluster.spec.gpu.resource_name.as_deref();
    let progress = context.coordinators.report(&key).map(|(_, report)| (report.gpu_faults, report.bootstrapping));
    let (gpu_problems, bootstrapping) = progress.unwrap_or_default();
    Ok(Observation {
        set,
        pods: pods.iter().map(|pod| PodView::read(pod, &lost)).collect::<Result<_, _>>()?,
        claims: claims.iter().map(ClaimView::read).collect::<Result<_, _>>()?,
        map: map.first().map(MapView::read).transpose()?,
        gpu_offered: context.nodes.offer(resource.unwrap_or(GPU_RESOURCE)),
        gpu_problems: gpu_problems.into_iter().map(|(ordinal, problem)| (ordinal.0, problem)).collect(),
        bootstrapping,
        objects,
        status,
    })
}

/// Reads the map, if any. The leader always reads it; other replicas may use the cached one.
async fn map(context: &Context, key: &Key) -> Result<Arc<Vec<Value>>, Error> {
    let now = Instant::now();
    let changes = match context.clusters.with(key, |state| state.lists.get(MAP, now)) {
        Lookup::Cached(items) if !context.leadership.is_leader() => return Ok(items),
        Lookup::Cached(_) => None,
        Lookup::Missing(changes) => Some(changes),
    };
    let api = MAP.of(&context.client, &key.namespace);
    let items = request(|| format!("read PartitionMap {}", key.name), api.get_opt(&key.name)).await?;
    let items = Arc::new(items.iter().map(|object| MAP.value(object)).collect());
    if let Some(changes) = changes {
        context.clusters.with(key, |state| state.lists.insert(MAP, changes, now, &items));
    }
    Ok(items)
}

/// Returns whether the object is owned by the one with this UID.
pub(crate) fn is_owned(object: &Value, uid: &str) -> bool {
    let owners = object.pointer("/metadata/ownerReferences").and_then(Value::as_array);
    owners.is_some_and(|owners| owners.iter().any(|owner| owner["uid"] == uid))
}
