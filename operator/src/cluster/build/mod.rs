//! Builders of a cluster's objects: pure and deterministic.
//!
//! Objects are JSON for server-side apply, which owns exactly the fields that an object sets. A test converts each object to
//! the API's types and back, to detect misspelt fields.

mod access;
mod ca;
mod certificate;
mod config;
mod job;
mod network;
mod stateful_set;

pub(crate) use access::access_list;
pub use certificate::certificate;
pub(crate) use config::{BOOTSTRAP_WORKERS, FILE as CONFIG_FILE};
pub(crate) use job::{CONTAINER, INDEX_ANNOTATION};
pub use job::{JobOwner, QUEUE_LABEL, RUN_LABEL, SUSPENDED_BY_RUN, job};
pub(crate) use stateful_set::{GPU_RESOURCE, ZONE_KEY};

use std::collections::BTreeMap;

use engram_api::status::WorkerRevision;
use serde_json::{Map, Value, json};

use crate::cluster::validate::ValidatedCluster;
use crate::names::{CLUSTER_LABEL, COMPONENT_LABEL, CONTENT_HASH, WORKER};

/// Inputs of the builders, apart from the spec.
#[derive(Clone, Debug)]
pub struct Inputs {
    /// Cluster id.
    pub cluster_id: String,
    /// Revision of the workers.
    pub worker: WorkerRevision,
    /// Pods of the StatefulSet.
    pub replicas: u32,
    /// Disruption budget: 1, or 0 while a partition is under-replicated.
    pub max_unavailable: u32,
    /// GPUs per pod.
    pub gpus: u32,
    /// Addresses of the coordinators, each `host:port`.
    pub coordinators: Vec<String>,
    /// Image pull secrets of the workers.
    pub pull_secrets: Vec<String>,
    /// Environment variables of the workers for traces.
    pub traces: Vec<(String, String)>,
    /// Published files of clusters with TLS, by name: trust bundle and token issuer.
    pub published: BTreeMap<String, String>,
    /// Number of workers that bootstrap the cluster from its snapshot; constant since its creation.
    pub bootstrap_workers: u32,
}

/// Builds all objects in the order in which they are applied: dependencies of pods come before the StatefulSet.
pub fn objects(cluster: &ValidatedCluster, inputs: &Inputs) -> Vec<Value> {
    let mut objects =
        vec![access::service_account(cluster, inputs), access::role(cluster), access::role_binding(cluster)];
    objects.push(config::config_map(cluster, inputs));
    if cluster.certificates().is_some() {
        objects.extend([ca::config_map(cluster, inputs), access::client_account(cluster)]);
    }
    objects.extend(network::policy(cluster));
    objects.extend([network::headless_service(cluster), network::client_service(cluster)]);
    objects.push(network::disruption_budget(cluster, inputs));
    objects.push(stateful_set::stateful_set(cluster, inputs));
    objects.iter_mut().for_each(annotate_with_hash);
    objects
}

/// Adds the hash of an object's content. Without it, a field that was removed from the spec would look like a default of the API server.
fn annotate_with_hash(object: &mut Value) {
    let hash = xxhash_rust::xxh3::xxh3_64(object.to_string().as_bytes());
    merge(&mut object["metadata"], &json!({ "annotations": { CONTENT_HASH: format!("{hash:016x}") } }));
}

/// Returns the labels that select a cluster's workers. They never change, since a StatefulSet's selector is immutable.
fn selector(cluster: &ValidatedCluster) -> Value {
    json!({ CLUSTER_LABEL: cluster.names.cluster, COMPONENT_LABEL: WORKER })
}

/// Returns the metadata of an object that is owned by the cluster.
fn metadata(cluster: &ValidatedCluster, name: &str) -> Value {
    let mut labels = selector(cluster);
    let common = json!({
        "app.kubernetes.io/name": "engram",
        "app.kubernetes.io/instance": cluster.names.cluster,
        "app.kubernetes.io/component": WORKER,
        "app.kubernetes.io/managed-by": "engram-operator",
    });
    merge(&mut labels, &common);
    json!({
        "name": name,
        "namespace": cluster.namespace,
        "labels": labels,
        "ownerReferences": [{
            "apiVersion": engram_api::API_VERSION,
            "kind": "LearnerCluster",
            "name": cluster.names.cluster,
            "uid": cluster.uid,
            "controller": true,
            "blockOwnerDeletion": true,
        }],
    })
}

/// Merges `over` into `base`: objects by field, lists of named items by name; other lists are concatenated.
fn merge(base: &mut Value, over: &Value) {
    match (base, over) {
        (Value::Object(base), Value::Object(over)) => {
            for (name, value) in over {
                merge(base.entry(name.clone()).or_insert(Value::Null), value);
            }
        }
        (Value::Array(base), Value::Array(over)) => {
            for item in over {
                let name = item.get("name").filter(|name| name.is_string());
                match base.iter_mut().find(|existing| name.is_some() && existing.get("name") == name) {
                    Some(existing) => merge(existing, item),
                    None => base.push(item.clone()),
                }
            }
        }
        (base, over) => *base = over.clone(),
    }
}

/// Sets `field` if there is a value.
fn set(object: &mut Value, field: &str, value: Option<Value>) {
    if let (Value::Object(object), Some(value)) = (object, value) {
        object.insert(field.to_owned(), value);
    }
}

/// Returns a non-empty text as a value.
fn text(value: Option<&String>) -> Option<Value> {
    value.filter(|text| !text.is_empty()).map(|text| text.as_str().into())
}

/// Returns a non-empty free-form part of the spec.
fn free(value: Option<&Map<String, Value>>) -> Option<Value> {
    value.filter(|fields| !fields.is_empty()).map(|fields| Value::Object(fields.clone()))
}
