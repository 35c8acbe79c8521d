//! What is there: the objects of one cluster, as the API server has them.

use std::sync::Arc;
use std::time::Instant;

use engram_api::status::LearnerClusterStatus;
use futures::future::try_join_all;
use kube::api::ListParams;
use serde_json::Value;

use super::asking::{Error, ask};
use super::kinds::{BUILT, CLAIM, Kind, MAP, POD, SET};
use super::lists::Known;
use super::{Context, Key};
use crate::build::GPU_RESOURCE;
use crate::names::CLUSTER_LABEL;
use crate::observed::{Claim, MapView, Observed, PodView, SetView};
use crate::validate::ValidatedCluster;

/// Looks at everything that a plan rests on: at the map, and at lists that have changed.
pub(super) async fn observe(
    context: &Context,
    cluster: &ValidatedCluster,
    status: LearnerClusterStatus,
) -> Result<Observed, Error> {
    let (name, namespace) = (&cluster.names.cluster, &cluster.namespace);
    let of_cluster = ListParams::default().labels(&format!("{CLUSTER_LABEL}={name}"));
    let of_workers = ListParams::default().labels(&cluster.names.selector());
    let key = Key { namespace: namespace.clone(), name: name.clone() };
    let list = async |kind: Kind, parameters: &ListParams| {
        let now = Instant::now();
        let changes = match context.lists.known(&key, kind, now) {
            Known::Found(found) => return Ok(found),
            Known::Unknown(changes) => changes,
        };
        let api = kind.of(&context.client, namespace);
        let found = ask(|| format!("list {} of {namespace}", kind.name), api.list(parameters)).await?;
        let found = Arc::new(found.items.iter().map(|object| kind.value(object)).collect());
        context.lists.keep(&key, kind, changes, now, &found);
        Ok::<Arc<Vec<Value>>, Error>(found)
    };
    let built = try_join_all(BUILT.map(|kind| list(kind, &of_cluster)));
    let map = map(context, &key);
    let (built, pods, claims, map) = futures::try_join!(built, list(POD, &of_workers), list(CLAIM, &of_workers), map)?;

    let is_ours = |object: &&Value| is_owned(object, &cluster.uid);
    let objects: Vec<Value> = built.iter().flat_map(|found| found.iter()).filter(is_ours).cloned().collect();
    let set = objects.iter().find(|object| object["kind"] == SET.name).map(SetView::read).transpose()?;
    let nodes = pods.iter().filter_map(|pod| pod.pointer("/spec/nodeName")?.as_str());
    let lost = context.nodes.lost(nodes);
    let resource = cluster.spec.gpu.resource_name.as_deref();
    let told = context.coordinators.report(&key).map(|(_, report)| (report.gpu_troubles, report.bootstrapping));
    let (gpu_troubles, bootstrapping) = told.unwrap_or_default();
    Ok(Observed {
        set,
        pods: pods.iter().map(|pod| PodView::read(pod, &lost)).collect::<Result<_, _>>()?,
        claims: claims.iter().map(Claim::read).collect::<Result<_, _>>()?,
        map: map.first().map(MapView::read).transpose()?,
        gpu_offered: context.nodes.offer(resource.unwrap_or(GPU_RESOURCE)),
        gpu_troubles: gpu_troubles.into_iter().map(|(ordinal, trouble)| (ordinal.0, trouble)).collect(),
        bootstrapping,
        objects,
        status,
    })
}

/// The map, if there is one. Who writes goes by what is there now; the others by what a watch has.
async fn map(context: &Context, key: &Key) -> Result<Arc<Vec<Value>>, Error> {
    let now = Instant::now();
    let changes = match context.lists.known(key, MAP, now) {
        Known::Found(found) if !context.leadership.leads() => return Ok(found),
        Known::Found(_) => None,
        Known::Unknown(changes) => Some(changes),
    };
    let api = MAP.of(&context.client, &key.namespace);
    let found = ask(|| format!("read PartitionMap {}", key.name), api.get_opt(&key.name)).await?;
    let found = Arc::new(found.iter().map(|object| MAP.value(object)).collect());
    if let Some(changes) = changes {
        context.lists.keep(key, MAP, changes, now, &found);
    }
    Ok(found)
}

/// Whether the object goes with the one that has this UID.
pub(super) fn is_owned(object: &Value, uid: &str) -> bool {
    let owners = object.pointer("/metadata/ownerReferences").and_then(Value::as_array);
    owners.is_some_and(|owners| owners.iter().any(|owner| owner["uid"] == uid))
}
