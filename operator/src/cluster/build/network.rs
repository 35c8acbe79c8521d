//! Services, NetworkPolicy and PodDisruptionBudget of a cluster.

use k8s_openapi::api::core::v1::{Service, ServicePort, ServiceSpec};
use k8s_openapi::api::networking::v1::{
    NetworkPolicy, NetworkPolicyIngressRule, NetworkPolicyPeer, NetworkPolicyPort, NetworkPolicySpec,
};
use k8s_openapi::api::policy::v1::{PodDisruptionBudget, PodDisruptionBudgetSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use serde_json::json;

use super::{Inputs, Labels, metadata, number, selecting, selector};
use crate::cluster::validate::ValidatedCluster;
use crate::kube::api_object::{ApiObject, merge, to_json};
use crate::names::{ADMIN_PORT, CLIENT_PORT, HTTP_PORT, PEER_PORT};

const TCP: &str = "TCP";

fn service_port(name: &str, port: u16) -> ServicePort {
    ServicePort {
        name: Some(name.to_owned()),
        port: i32::from(port),
        target_port: Some(IntOrString::String(name.to_owned())),
        protocol: Some(TCP.to_owned()),
        ..ServicePort::default()
    }
}

/// Builds the headless Service: DNS names of the pods for each other and for clients that route themselves, including pods that
/// are not ready.
pub(super) fn headless_service(cluster: &ValidatedCluster) -> Service {
    let ports = [("client", CLIENT_PORT), ("peer", PEER_PORT), ("admin", ADMIN_PORT), ("http", HTTP_PORT)];
    let spec = ServiceSpec {
        cluster_ip: Some("None".to_owned()),
        publish_not_ready_addresses: Some(true),
        selector: Some(selector(cluster)),
        ports: Some(ports.map(|(name, port)| service_port(name, port)).into()),
        ..ServiceSpec::default()
    };
    Service { metadata: metadata(cluster, cluster.names.worker()), spec: Some(spec), ..Service::default() }
}

pub(super) fn client_service(cluster: &ValidatedCluster) -> Service {
    let service = cluster.spec.service.as_ref();
    let mut metadata = metadata(cluster, cluster.names.cluster.clone());
    metadata.annotations = service.and_then(|service| service.annotations.clone()).filter(|all| !all.is_empty());
    let kind =
        service.and_then(|service| service.service_type).map_or_else(|| "ClusterIP".into(), |kind| kind.to_string());
    let spec = ServiceSpec {
        type_: Some(kind),
        selector: Some(selector(cluster)),
        ports: Some(vec![service_port("client", CLIENT_PORT)]),
        ..ServiceSpec::default()
    };
    Service { metadata, spec: Some(spec), ..Service::default() }
}

/// Builds the PodDisruptionBudget. There is only one, since eviction fails for a pod with two.
pub(super) fn disruption_budget(cluster: &ValidatedCluster, inputs: &Inputs) -> PodDisruptionBudget {
    let spec = PodDisruptionBudgetSpec {
        max_unavailable: Some(IntOrString::Int(number(inputs.max_unavailable))),
        selector: Some(selecting(cluster)),
        // Pods that are not ready must not block the drain of a node.
        unhealthy_pod_eviction_policy: Some("AlwaysAllow".to_owned()),
        ..PodDisruptionBudgetSpec::default()
    };
    PodDisruptionBudget {
        metadata: metadata(cluster, cluster.names.worker()),
        spec: Some(spec),
        ..PodDisruptionBudget::default()
    }
}

fn policy_port(port: u16) -> NetworkPolicyPort {
    NetworkPolicyPort {
        port: Some(IntOrString::Int(i32::from(port))),
        protocol: Some(TCP.to_owned()),
        ..NetworkPolicyPort::default()
    }
}

fn rule(from: Option<NetworkPolicyPeer>, ports: Vec<NetworkPolicyPort>) -> NetworkPolicyIngressRule {
    NetworkPolicyIngressRule { from: from.map(|peer| vec![peer]), ports: Some(ports) }
}

fn pods_with(labels: Labels) -> NetworkPolicyPeer {
    let selector = LabelSelector { match_labels: Some(labels), ..LabelSelector::default() };
    NetworkPolicyPeer { pod_selector: Some(selector), ..NetworkPolicyPeer::default() }
}

/// Builds the NetworkPolicy: allows clients of the spec, peers of the same cluster, the operator, and scrapes of metrics.
pub(super) fn policy(cluster: &ValidatedCluster) -> Option<ApiObject> {
    let policy = cluster.spec.network_policy.as_ref();
    if policy.and_then(|policy| policy.enabled) == Some(false) {
        return None;
    }
    let operator = [("app.kubernetes.io/name".to_owned(), "engram-operator".to_owned())];
    let operator =
        NetworkPolicyPeer { namespace_selector: Some(LabelSelector::default()), ..pods_with(operator.into()) };
    // Members of training groups listen on ports that the kernel chooses, of its default range.
    let of_groups = NetworkPolicyPort { end_port: Some(60_999), ..policy_port(32_768) };
    let typed = NetworkPolicy {
        metadata: metadata(cluster, cluster.names.worker()),
        spec: Some(NetworkPolicySpec {
            pod_selector: Some(selecting(cluster)),
            policy_types: Some(vec!["Ingress".to_owned()]),
            ingress: Some(vec![
                rule(
                    Some(pods_with(selector(cluster))),
                    vec![policy_port(CLIENT_PORT), policy_port(PEER_PORT), of_groups],
                ),
                // The operator submits and watches runs as a client.
                rule(Some(operator), vec![policy_port(CLIENT_PORT), policy_port(ADMIN_PORT)]),
                rule(None, vec![policy_port(HTTP_PORT)]),
            ]),
            ..NetworkPolicySpec::default()
        }),
    };
    // Without clients in the spec, those of the same namespace.
    let configured = policy.and_then(|policy| policy.clients.as_ref()).filter(|clients| !clients.is_empty());
    let clients = configured.map_or_else(|| json!([{ "podSelector": {} }]), to_json);
    let mut content = json!({ "spec": { "ingress": [{ "from": clients, "ports": [policy_port(CLIENT_PORT)] }] } });
    merge(&mut content, &to_json(&typed));
    Some(ApiObject::of_built_kind::<NetworkPolicy>(content))
}
