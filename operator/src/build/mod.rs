//! The objects of a cluster, built from values: the same values give the same objects, byte for byte.
//!
//! They are trees of JSON, as server-side apply wants them: an object claims the fields that it names and no others. A
//! test reads each into the API's own type and back, so that no field is misspelt.

mod access;
mod ca;
mod certificate;
mod config;
mod network;
mod stateful_set;

pub(crate) use access::access_list;
pub use certificate::certificate;
pub(crate) use config::{BOOTSTRAP_WORKERS, FILE as CONFIG_FILE};
pub(crate) use stateful_set::{GPU_RESOURCE, ZONE_KEY};

use std::collections::BTreeMap;

use engram_api::status::WorkerRevision;
use serde_json::{Map, Value, json};

use crate::names::{CLUSTER_LABEL, COMPONENT_LABEL, WORKER};
use crate::validate::ValidatedCluster;

/// What objects are made from beside the spec.
#[derive(Clone, Debug)]
pub struct Inputs {
    /// Identity of the data.
    pub cluster_id: String,
    /// What the workers run.
    pub worker: WorkerRevision,
    /// Pods of the StatefulSet.
    pub replicas: u32,
    /// Pods that a drain of a node may take away at once: 1, or 0 while a copy is missing somewhere.
    pub max_unavailable: u32,
    /// Devices per pod; 0 asks for none.
    pub gpus: u32,
    /// Where workers find the coordinators, each as `host:port`.
    pub coordinators: Vec<String>,
    /// Secrets with which nodes pull the worker's image.
    pub pull_secrets: Vec<String>,
    /// What everybody may know of who is who, by the name of its file: for clusters with certificates.
    pub published: BTreeMap<String, String>,
    /// Workers that the snapshot is shared out between that the cluster begins from: as many as there were to be when it was made.
    pub bootstrap_workers: u32,
}

/// Builds all objects in the order in which they are applied: what pods need comes before the StatefulSet, so that no
/// pod starts and fails for want of it.
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
    objects
}

/// The labels that select a cluster's workers. They never change: a StatefulSet's selector cannot.
fn selector(cluster: &ValidatedCluster) -> Value {
    json!({ CLUSTER_LABEL: cluster.names.cluster, COMPONENT_LABEL: WORKER })
}

/// Metadata of an object that goes with the cluster.
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

/// Lays `over` on top of `base`: objects field by field, lists of named things by name, other lists behind each other.
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

/// Adds `field` where there is something to say.
fn set(object: &mut Value, field: &str, value: Option<Value>) {
    if let (Value::Object(object), Some(value)) = (object, value) {
        object.insert(field.to_owned(), value);
    }
}

/// A text that says something.
fn text(value: Option<&String>) -> Option<Value> {
    value.filter(|text| !text.is_empty()).map(|text| text.as_str().into())
}

/// A part of the spec that is passed through.
fn free(value: Option<&Map<String, Value>>) -> Option<Value> {
    value.filter(|fields| !fields.is_empty()).map(|fields| Value::Object(fields.clone()))
}
