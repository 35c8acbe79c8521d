//! Past decisions of an autoscaler in a ConfigMap, so that an operator that starts continues them, and `engram autoscale explain` reads them.

use engram_forecast::history::History;
use serde_json::{Value, json};

use crate::cluster::apply::write_object;
use crate::cluster::observe::is_owned;
use crate::cluster::validate::ValidatedCluster;
use crate::context::Context;
use crate::kube::api_request::{Error, request};
use crate::kube::resource_kinds::built;

/// Key of the table in the ConfigMap.
const DECISIONS: &str = "decisions.csv";

/// Reads the decisions; none if there is no ConfigMap.
///
/// # Errors
/// The API server fails, or the ConfigMap is not owned by the cluster.
pub(crate) async fn read(context: &Context, cluster: &ValidatedCluster) -> Result<History, Error> {
    let (kind, name) = (built("ConfigMap"), cluster.names.autoscaling());
    let api = kind.of(&context.client, &cluster.namespace);
    let found = request(|| format!("read ConfigMap {name}"), api.get_opt(&name)).await?;
    let Some(found) = found.map(|object| kind.value(&object)) else { return Ok(History::default()) };
    if !is_owned(&found, &cluster.uid) {
        return Err(Error::NotOwned { kind: kind.name.to_owned(), name });
    }
    let (history, invalid) = History::parse(found["data"][DECISIONS].as_str().unwrap_or_default());
    if invalid > 0 {
        tracing::warn!(namespace = %cluster.namespace, name, invalid, "ignored invalid lines of the history of autoscaling");
    }
    Ok(history)
}

/// Writes the decisions.
///
/// # Errors
/// The API server fails, or another replica is the leader.
pub(crate) async fn write(context: &Context, cluster: &ValidatedCluster, text: &str) -> Result<(), Error> {
    let name = cluster.names.autoscaling();
    write_object(context, cluster, built("ConfigMap"), &name, &object(cluster, &name, text)).await.map(drop)
}

/// Returns the ConfigMap. It has no label of the cluster: its writes would trigger reconciles.
fn object(cluster: &ValidatedCluster, name: &str, text: &str) -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "name": name,
            "namespace": cluster.namespace,
            "labels": {
                "app.kubernetes.io/name": "engram",
                "app.kubernetes.io/instance": cluster.names.cluster,
                "app.kubernetes.io/managed-by": "engram-operator",
            },
            "ownerReferences": [{
                "apiVersion": engram_api::API_VERSION,
                "kind": "LearnerCluster",
                "name": cluster.names.cluster,
                "uid": cluster.uid,
            }],
        },
        "data": { DECISIONS: text },
    })
}
