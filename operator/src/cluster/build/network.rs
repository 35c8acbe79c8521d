//! Services, NetworkPolicy and PodDisruptionBudget of a cluster.

use serde_json::{Value, json};

use super::{Inputs, metadata, selector, set};
use crate::cluster::validate::ValidatedCluster;
use crate::names::{ADMIN_PORT, CLIENT_PORT, HTTP_PORT, PEER_PORT};

/// Builds the headless Service: DNS names of the pods for each other and for clients that route themselves, including pods that
/// are not ready.
pub(super) fn headless_service(cluster: &ValidatedCluster) -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(cluster, &cluster.names.worker()),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": true,
            "selector": selector(cluster),
            "ports": [
                { "name": "client", "port": CLIENT_PORT, "targetPort": "client", "protocol": "TCP" },
                { "name": "peer", "port": PEER_PORT, "targetPort": "peer", "protocol": "TCP" },
                { "name": "admin", "port": ADMIN_PORT, "targetPort": "admin", "protocol": "TCP" },
                { "name": "http", "port": HTTP_PORT, "targetPort": "http", "protocol": "TCP" },
            ],
        },
    })
}

pub(super) fn client_service(cluster: &ValidatedCluster) -> Value {
    let service = cluster.spec.service.as_ref();
    let mut metadata = metadata(cluster, &cluster.names.cluster);
    let annotations = service.and_then(|service| service.annotations.as_ref()).filter(|all| !all.is_empty());
    set(&mut metadata, "annotations", annotations.map(|annotations| json!(annotations)));
    let kind =
        service.and_then(|service| service.service_type).map_or_else(|| "ClusterIP".into(), |kind| kind.to_string());
    json!({
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata,
        "spec": {
            "type": kind,
            "selector": selector(cluster),
            "ports": [{ "name": "client", "port": CLIENT_PORT, "targetPort": "client", "protocol": "TCP" }],
        },
    })
}

/// Builds the PodDisruptionBudget. There is only one, since eviction fails for a pod with two.
pub(super) fn disruption_budget(cluster: &ValidatedCluster, inputs: &Inputs) -> Value {
    json!({
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": metadata(cluster, &cluster.names.worker()),
        "spec": {
            "maxUnavailable": inputs.max_unavailable,
            "selector": { "matchLabels": selector(cluster) },
            // Pods that are not ready must not block the drain of a node.
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
        },
    })
}

/// Builds the NetworkPolicy: allows clients of the spec, peers of the same cluster, the operator, and scrapes of metrics.
pub(super) fn policy(cluster: &ValidatedCluster) -> Option<Value> {
    let policy = cluster.spec.network_policy.as_ref();
    if policy.and_then(|policy| policy.enabled) == Some(false) {
        return None;
    }
    let clients: Vec<Value> = policy
        .and_then(|policy| policy.clients.as_ref())
        .filter(|clients| !clients.is_empty())
        .map_or_else(|| vec![json!({ "podSelector": {} })], |clients| clients.iter().map(|peer| json!(peer)).collect());
    let peers = json!([{ "podSelector": { "matchLabels": selector(cluster) } }]);
    let operator = json!([{ "namespaceSelector": {}, "podSelector": { "matchLabels": {
        "app.kubernetes.io/name": "engram-operator",
    } } }]);
    let port = |number: u16| json!([{ "port": number, "protocol": "TCP" }]);
    Some(json!({
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata(cluster, &cluster.names.worker()),
        "spec": {
            "podSelector": { "matchLabels": selector(cluster) },
            "policyTypes": ["Ingress"],
            "ingress": [
                { "from": clients, "ports": port(CLIENT_PORT) },
                { "from": peers, "ports": [
                    { "port": CLIENT_PORT, "protocol": "TCP" },
                    { "port": PEER_PORT, "protocol": "TCP" },
                    // Members of training groups listen on ports that the kernel chooses, of its default range.
                    { "port": 32_768, "endPort": 60_999, "protocol": "TCP" },
                ] },
                // The operator submits and watches runs as a client.
                { "from": operator, "ports": [
                    { "port": CLIENT_PORT, "protocol": "TCP" },
                    { "port": ADMIN_PORT, "protocol": "TCP" },
                ] },
                { "ports": port(HTTP_PORT) },
            ],
        },
    }))
}
