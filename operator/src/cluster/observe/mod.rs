//! Reads the objects of one cluster from the API server.

pub(crate) mod nodes;
pub(crate) mod object_views;
pub(crate) mod observation;
mod pod_view;
pub(crate) mod trust;

use std::sync::Arc;
use std::time::Instant;

use engram_api::status::LearnerClusterStatus;
use futures::future::try_join_all;
use kube::api::ListParams;

use crate::cluster::build::GPU_RESOURCE;
use crate::cluster::observe::observation::{ClaimView, MapView, Observation, PodView, SetView};
use crate::cluster::validate::ValidatedCluster;
use crate::context::{Context, Key};
use crate::kube::api_object::{ApiObject, InvalidObject};
use crate::kube::api_request::{RequestError, request};
use crate::kube::failure::{Cause, Failure};
use crate::kube::list_cache::Lookup;
use crate::kube::resource_kinds::{BUILT, CLAIM, Kind, MAP, POD, SET};
use crate::names::CLUSTER_LABEL;
use crate::pki::certificates::CaError;
use crate::pki::provided_secret::InvalidClusterId;

/// Why a cluster cannot be observed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ObserveError {
    #[error(transparent)]
    Request(#[from] RequestError),
    #[error(transparent)]
    InvalidObject(#[from] InvalidObject),
    #[error(transparent)]
    InvalidClusterId(#[from] InvalidClusterId),
    #[error(transparent)]
    CertificateAuthority(#[from] CaError),
}

impl Failure for ObserveError {
    fn root_cause(&self) -> Cause<'_> {
        match self {
            Self::Request(error) => error.root_cause(),
            Self::InvalidObject(_) => Cause::InvalidObject,
            Self::InvalidClusterId(_) => Cause::Coordinator,
            Self::CertificateAuthority(error) => error.root_cause(),
        }
    }
}

/// Observes everything that a plan depends on: reads the map, and lists that have changed.
pub(crate) async fn observe(
    context: &Context,
    cluster: &ValidatedCluster,
    status: LearnerClusterStatus,
) -> Result<Observation, ObserveError> {
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
        let items = Arc::new(items.items.into_iter().map(|object| ApiObject::of(kind, object)).collect());
        context.clusters.with(&key, |state| state.lists.insert(kind, changes, now, &items));
        Ok::<Arc<Vec<ApiObject>>, RequestError>(items)
    };
    let built = try_join_all(BUILT.map(|kind| list(kind, &of_cluster)));
    let map = map(context, &key);
    let (built, pods, claims, map) = futures::try_join!(built, list(POD, &of_workers), list(CLAIM, &of_workers), map)?;

    let is_ours = |object: &&ApiObject| object.is_owned_by(&cluster.uid);
    let objects: Vec<ApiObject> = built.iter().flat_map(|items| items.iter()).filter(is_ours).cloned().collect();
    let set = objects.iter().find(|object| object.kind() == SET).map(SetView::read).transpose()?;
    let mut pods = pods.iter().map(PodView::read).collect::<Result<Vec<_>, _>>()?;
    let lost = context.nodes.lost(pods.iter().filter_map(|pod| pod.node.as_deref()));
    pods.iter_mut().for_each(|pod| pod.set_lost_node(&lost));
    let resource = cluster.spec.gpu.resource_name.as_deref();
    let progress = context.coordinators.report(&key).map(|(_, report)| (report.gpu_faults, report.bootstrapping));
    let (gpu_problems, bootstrapping) = progress.unwrap_or_default();
    Ok(Observation {
        set,
        pods,
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
async fn map(context: &Context, key: &Key) -> Result<Arc<Vec<ApiObject>>, RequestError> {
    let now = Instant::now();
    let changes = match context.clusters.with(key, |state| state.lists.get(MAP, now)) {
        Lookup::Cached(items) if !context.leadership.is_leader() => return Ok(items),
        Lookup::Cached(_) => None,
        Lookup::Missing(changes) => Some(changes),
    };
    let api = MAP.of(&context.client, &key.namespace);
    let items = request(|| format!("read PartitionMap {}", key.name), api.get_opt(&key.name)).await?;
    let items = Arc::new(items.into_iter().map(|object| ApiObject::of(MAP, object)).collect());
    if let Some(changes) = changes {
        context.clusters.with(key, |state| state.lists.insert(MAP, changes, now, &items));
    }
    Ok(items)
}
