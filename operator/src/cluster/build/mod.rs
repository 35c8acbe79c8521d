//! Builders of a cluster's objects: pure and deterministic.
//!
//! Objects are built as the API's types, which serialize exactly the fields that are set: server-side apply owns these. Parts that a user
//! wrote into the spec for Kubernetes alone are merged into the content, whatever their version knows.

mod access;
mod ca;
mod certificate;
mod config;
mod network;
mod stateful_set;
mod volumes;

pub(crate) use access::access_list;
pub use certificate::certificate;
pub(crate) use config::{FILE as CONFIG_FILE, OF_WORKERS, PublishedSettings};
pub(crate) use stateful_set::{GPU_RESOURCE, ZONE_KEY, of_field, of_value, read_only};
pub(crate) use volumes::{config_file, projected, token};

use std::collections::BTreeMap;

use engram_api::status::WorkerRevision;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, ObjectMeta, OwnerReference};
use serde_json::{Map, Value};

use crate::cluster::validate::ValidatedCluster;
use crate::kube::api_object::ApiObject;
use crate::names::{CLUSTER_LABEL, COMPONENT_LABEL, CONTENT_HASH, WORKER};

/// Labels by name.
type Labels = BTreeMap<String, String>;

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
pub fn objects(cluster: &ValidatedCluster, inputs: &Inputs) -> Vec<ApiObject> {
    let mut objects = vec![
        ApiObject::built(&access::service_account(cluster, inputs)),
        ApiObject::built(&access::role(cluster)),
        ApiObject::built(&access::role_binding(cluster)),
        ApiObject::built(&config::config_map(cluster, inputs)),
    ];
    if cluster.certificates().is_some() {
        objects.push(ApiObject::built(&ca::config_map(cluster, inputs)));
        objects.push(ApiObject::built(&access::client_account(cluster)));
    }
    objects.extend(network::policy(cluster));
    objects.push(ApiObject::built(&network::headless_service(cluster)));
    objects.push(ApiObject::built(&network::client_service(cluster)));
    objects.push(ApiObject::built(&network::disruption_budget(cluster, inputs)));
    objects.push(stateful_set::stateful_set(cluster, inputs));
    objects.iter_mut().for_each(annotate_with_hash);
    objects
}

/// Adds the hash of an object's content. Without it, a field that was removed from the spec would look like a default of the API server.
fn annotate_with_hash(object: &mut ApiObject) {
    let hash = xxhash_rust::xxh3::xxh3_64(object.content().to_string().as_bytes());
    object.annotate(CONTENT_HASH, format!("{hash:016x}"));
}

/// Returns the labels that select a cluster's workers. They never change, since a StatefulSet's selector is immutable.
fn selector(cluster: &ValidatedCluster) -> Labels {
    [(CLUSTER_LABEL, cluster.names.cluster.as_str()), (COMPONENT_LABEL, WORKER)].map(owned).into()
}

fn selecting(cluster: &ValidatedCluster) -> LabelSelector {
    LabelSelector { match_labels: Some(selector(cluster)), ..LabelSelector::default() }
}

pub(crate) fn owned((name, value): (&str, &str)) -> (String, String) {
    (name.to_owned(), value.to_owned())
}

/// Returns the labels of every object of a cluster.
fn labels(cluster: &ValidatedCluster) -> Labels {
    let mut labels = selector(cluster);
    labels.extend(
        [
            ("app.kubernetes.io/name", "engram"),
            ("app.kubernetes.io/instance", &cluster.names.cluster),
            ("app.kubernetes.io/component", WORKER),
            ("app.kubernetes.io/managed-by", "engram-operator"),
        ]
        .map(owned),
    );
    labels
}

/// Returns the reference to a cluster that owns an object.
pub(crate) fn owner(cluster: &ValidatedCluster) -> OwnerReference {
    OwnerReference {
        api_version: engram_api::API_VERSION.to_owned(),
        kind: "LearnerCluster".to_owned(),
        name: cluster.names.cluster.clone(),
        uid: cluster.uid.clone(),
        controller: Some(true),
        block_owner_deletion: Some(true),
    }
}

/// Returns the metadata of an object that is owned by the cluster.
fn metadata(cluster: &ValidatedCluster, name: String) -> ObjectMeta {
    ObjectMeta {
        name: Some(name),
        namespace: Some(cluster.namespace.clone()),
        labels: Some(labels(cluster)),
        owner_references: Some(vec![owner(cluster)]),
        ..ObjectMeta::default()
    }
}

/// Returns a non-empty text.
fn text(value: Option<&String>) -> Option<String> {
    value.filter(|text| !text.is_empty()).cloned()
}

/// Returns a non-empty free-form part of the spec.
pub(crate) fn free(value: Option<&Map<String, Value>>) -> Option<Value> {
    value.filter(|fields| !fields.is_empty()).map(|fields| Value::Object(fields.clone()))
}

/// Returns a number of the API, which are signed.
pub(crate) fn number(number: impl TryInto<i32>) -> i32 {
    number.try_into().unwrap_or(i32::MAX)
}
