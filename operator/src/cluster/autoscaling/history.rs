//! Past decisions of an autoscaler in a ConfigMap, so that an operator that starts continues them, and `engram autoscale explain` reads them.

use engram_forecast::history::History;
use k8s_openapi::api::core::v1::ConfigMap;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};

use crate::cluster::apply::write_object;
use crate::cluster::autoscaling::autoscalers::AutoscalingError;
use crate::cluster::build::owner;
use crate::cluster::validate::ValidatedCluster;
use crate::context::Context;
use crate::kube::api_object::{ApiObject, NotOwned};
use crate::kube::api_request::{WriteError, request};
use crate::kube::resource_kinds::built;

/// Key of the table in the ConfigMap.
const DECISIONS: &str = "decisions.csv";

/// Reads the decisions; none if there is no ConfigMap.
///
/// # Errors
/// The API server fails, or the ConfigMap is not owned by the cluster.
pub(crate) async fn read(context: &Context, cluster: &ValidatedCluster) -> Result<History, AutoscalingError> {
    let (kind, name) = (built("ConfigMap"), cluster.names.autoscaling());
    let api = kind.of(&context.client, &cluster.namespace);
    let found = request(|| format!("read ConfigMap {name}"), api.get_opt(&name)).await?;
    let Some(found) = found.map(|object| ApiObject::of(kind, object)) else { return Ok(History::default()) };
    if !found.is_owned_by(&cluster.uid) {
        return Err(NotOwned { kind: kind.name, name }.into());
    }
    let decisions = found.read::<ConfigMap>()?.data.and_then(|mut data| data.remove(DECISIONS));
    let (history, invalid) = History::parse(&decisions.unwrap_or_default());
    if invalid > 0 {
        tracing::warn!(namespace = %cluster.namespace, name, invalid, "ignored invalid lines of the history of autoscaling");
    }
    Ok(history)
}

/// Writes the decisions.
///
/// # Errors
/// The API server fails, or another replica is the leader.
pub(crate) async fn write(context: &Context, cluster: &ValidatedCluster, text: &str) -> Result<(), WriteError> {
    let name = cluster.names.autoscaling();
    write_object(context, cluster, &ApiObject::built(&object(cluster, name, text))).await.map(drop)
}

/// Returns the ConfigMap. It has no label of the cluster: its writes would trigger reconciles.
fn object(cluster: &ValidatedCluster, name: String, text: &str) -> ConfigMap {
    let labels = [
        ("app.kubernetes.io/name", "engram"),
        ("app.kubernetes.io/instance", &cluster.names.cluster),
        ("app.kubernetes.io/managed-by", "engram-operator"),
    ];
    let owner = OwnerReference { controller: None, block_owner_deletion: None, ..owner(cluster) };
    ConfigMap {
        metadata: ObjectMeta {
            name: Some(name),
            namespace: Some(cluster.namespace.clone()),
            labels: Some(labels.map(|(name, value)| (name.to_owned(), value.to_owned())).into()),
            owner_references: Some(vec![owner]),
            ..ObjectMeta::default()
        },
        data: Some([(DECISIONS.to_owned(), text.to_owned())].into()),
        ..ConfigMap::default()
    }
}
