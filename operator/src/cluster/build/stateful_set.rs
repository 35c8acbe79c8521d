//! The StatefulSet of the workers: template revision 1.
//!
//! A later revision gets a separate file, so that a new operator builds unchanged objects for pinned clusters.

use engram_api::kubernetes_only::{RetainPolicy, TopologySpread};
use k8s_openapi::api::apps::v1::{
    StatefulSet, StatefulSetPersistentVolumeClaimRetentionPolicy, StatefulSetSpec, StatefulSetUpdateStrategy,
};
use k8s_openapi::api::core::v1::{
    Capabilities, Container, ContainerPort, EnvVar, EnvVarSource, ExecAction, HTTPGetAction, Lifecycle,
    LifecycleHandler, ObjectFieldSelector, PersistentVolumeClaim, PersistentVolumeClaimSpec, PodResourceClaim,
    PodSecurityContext, PodSpec, PodTemplateSpec, Probe, ResourceClaim, ResourceRequirements, SeccompProfile,
    SecurityContext, Toleration, TopologySpreadConstraint, VolumeMount, VolumeResourceRequirements,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use serde_json::{Value, json};

use super::volumes::{bootstrap_secret, volumes};
use super::{Inputs, free, labels, metadata, number, selecting, selector, text};
use crate::cluster::validate::ValidatedCluster;
use crate::kube::api_object::{ApiObject, merge, to_json};
use crate::names::{ADMIN_PORT, CLIENT_PORT, CLUSTER_ID_LABEL, GRACE_SECONDS, HTTP_PORT, PEER_PORT, USER, WORKER};

/// Default extended resource of GPUs.
pub(crate) const GPU_RESOURCE: &str = "nvidia.com/gpu";

/// Node label of the zone.
pub(crate) const ZONE_KEY: &str = "topology.kubernetes.io/zone";

pub(super) fn stateful_set(cluster: &ValidatedCluster, inputs: &Inputs) -> ApiObject {
    let names = &cluster.names;
    let spec = StatefulSetSpec {
        service_name: Some(names.worker()),
        replicas: Some(number(inputs.replicas)),
        // Workers start independently of each other.
        pod_management_policy: Some("Parallel".to_owned()),
        // The operator deletes pods itself.
        update_strategy: Some(StatefulSetUpdateStrategy {
            type_: Some("OnDelete".to_owned()),
            ..StatefulSetUpdateStrategy::default()
        }),
        revision_history_limit: Some(3),
        selector: selecting(cluster),
        volume_claim_templates: (!cluster.is_ephemeral()).then(|| vec![claim(cluster, inputs)]),
        persistent_volume_claim_retention_policy: (!cluster.is_ephemeral()).then(|| retention(cluster)),
        ..StatefulSetSpec::default()
    };
    let set = StatefulSet { metadata: metadata(cluster, names.worker()), spec: Some(spec), ..StatefulSet::default() };
    let mut content = to_json(&set);
    // The type has an empty template, of which nothing is serialized but the field.
    merge(&mut content, &json!({ "spec": { "template": template(cluster, inputs) } }));
    ApiObject::of_built_kind::<StatefulSet>(content)
}

fn claim(cluster: &ValidatedCluster, inputs: &Inputs) -> PersistentVolumeClaim {
    let storage = cluster.spec.storage.as_ref();
    let size = storage.and_then(|storage| storage.size).map(|size| ("storage".to_owned(), Quantity(size.to_string())));
    let mut labels = selector(cluster);
    labels.insert(CLUSTER_ID_LABEL.to_owned(), inputs.cluster_id.clone());
    PersistentVolumeClaim {
        metadata: ObjectMeta { name: Some("data".to_owned()), labels: Some(labels), ..ObjectMeta::default() },
        spec: Some(PersistentVolumeClaimSpec {
            access_modes: Some(vec!["ReadWriteOnce".to_owned()]),
            resources: Some(VolumeResourceRequirements {
                requests: Some(size.into_iter().collect()),
                ..VolumeResourceRequirements::default()
            }),
            storage_class_name: text(storage.and_then(|storage| storage.storage_class_name.as_ref())),
            ..PersistentVolumeClaimSpec::default()
        }),
        ..PersistentVolumeClaim::default()
    }
}

fn retention(cluster: &ValidatedCluster) -> StatefulSetPersistentVolumeClaimRetentionPolicy {
    let policy = cluster.spec.storage.as_ref().and_then(|storage| storage.retain_policy);
    let when_deleted = if policy == Some(RetainPolicy::Delete) { "Delete" } else { "Retain" };
    StatefulSetPersistentVolumeClaimRetentionPolicy {
        when_deleted: Some(when_deleted.to_owned()),
        when_scaled: Some("Retain".to_owned()),
    }
}

/// Returns the template of the pods: what the user wrote for Kubernetes alone around what the operator sets.
fn template(cluster: &ValidatedCluster, inputs: &Inputs) -> Value {
    let scheduling = cluster.spec.scheduling.as_ref();
    let template = PodTemplateSpec {
        metadata: Some(ObjectMeta { labels: Some(labels(cluster)), ..ObjectMeta::default() }),
        spec: Some(worker_pod(cluster, inputs)),
    };
    let resources = cluster.spec.resources.as_ref().map_or_else(|| json!({}), to_json);
    let mut content = json!({ "spec": { "containers": [{ "name": WORKER, "resources": resources }] } });
    if let Some(affinity) = free(scheduling.and_then(|it| it.affinity.as_ref())) {
        merge(&mut content, &json!({ "spec": { "affinity": affinity } }));
    }
    merge(&mut content, &to_json(&template));
    if let Some(tolerations) = scheduling.and_then(|scheduling| scheduling.tolerations.as_ref()) {
        merge(&mut content, &json!({ "spec": { "tolerations": tolerations } }));
    }
    if let Some(over) = &cluster.spec.pod_template {
        merge(&mut content, &Value::Object(over.clone()));
    }
    content
}

fn worker_pod(cluster: &ValidatedCluster, inputs: &Inputs) -> PodSpec {
    let (scheduling, gpu) = (cluster.spec.scheduling.as_ref(), &cluster.spec.gpu);
    let resource_claims = text(gpu.resource_claim_template_name.as_ref()).map(|template| {
        vec![PodResourceClaim {
            name: "gpu".to_owned(),
            resource_claim_template_name: Some(template),
            ..PodResourceClaim::default()
        }]
    });
    PodSpec {
        service_account_name: Some(cluster.names.worker()),
        automount_service_account_token: Some(false),
        enable_service_links: Some(false),
        termination_grace_period_seconds: Some(GRACE_SECONDS),
        security_context: Some(PodSecurityContext {
            run_as_non_root: Some(true),
            run_as_user: Some(USER),
            run_as_group: Some(USER),
            fs_group: Some(USER),
            fs_group_change_policy: Some("OnRootMismatch".to_owned()),
            seccomp_profile: Some(SeccompProfile { type_: "RuntimeDefault".to_owned(), ..SeccompProfile::default() }),
            ..PodSecurityContext::default()
        }),
        containers: vec![container(cluster, inputs)],
        volumes: Some(volumes(cluster)),
        tolerations: Some(tolerations(cluster, inputs)),
        topology_spread_constraints: Some(vec![spread(cluster)]),
        priority_class_name: text(scheduling.and_then(|it| it.priority_class_name.as_ref())),
        scheduler_name: text(scheduling.and_then(|it| it.scheduler_name.as_ref())),
        runtime_class_name: text(gpu.runtime_class_name.as_ref()),
        resource_claims,
        ..PodSpec::default()
    }
}

fn probe(path: &str, period: i32, failures: i32) -> Probe {
    Probe {
        http_get: Some(HTTPGetAction {
            path: Some(path.to_owned()),
            port: IntOrString::String("http".to_owned()),
            ..HTTPGetAction::default()
        }),
        period_seconds: Some(period),
        timeout_seconds: Some(2),
        failure_threshold: Some(failures),
        ..Probe::default()
    }
}

fn container_port(name: &str, port: u16) -> ContainerPort {
    ContainerPort {
        name: Some(name.to_owned()),
        container_port: i32::from(port),
        protocol: Some("TCP".to_owned()),
        ..ContainerPort::default()
    }
}

/// Returns a variable with a field of the pod.
pub(crate) fn of_field(name: &str, path: &str) -> EnvVar {
    let field_ref = ObjectFieldSelector { field_path: path.to_owned(), ..ObjectFieldSelector::default() };
    let source = EnvVarSource { field_ref: Some(field_ref), ..EnvVarSource::default() };
    EnvVar { name: name.to_owned(), value_from: Some(source), ..EnvVar::default() }
}

/// Returns a variable with a text.
pub(crate) fn of_value(name: &str, value: impl Into<String>) -> EnvVar {
    EnvVar { name: name.to_owned(), value: Some(value.into()), ..EnvVar::default() }
}

fn container(cluster: &ValidatedCluster, inputs: &Inputs) -> Container {
    let mut environment = vec![
        of_field("POD_NAME", "metadata.name"),
        of_field("POD_NAMESPACE", "metadata.namespace"),
        of_field("POD_UID", "metadata.uid"),
        of_field("POD_IP", "status.podIP"),
        of_field("NODE_NAME", "spec.nodeName"),
        of_value("ENGRAM_CLUSTER", &cluster.names.cluster),
    ];
    environment.extend(inputs.traces.iter().map(|(name, value)| of_value(name, value)));
    let ports = [("client", CLIENT_PORT), ("peer", PEER_PORT), ("admin", ADMIN_PORT), ("http", HTTP_PORT)];
    let drain = ["/engram-worker", "drain", "--deadline=45s"].map(str::to_owned);
    Container {
        name: WORKER.to_owned(),
        image: Some(inputs.worker.image.clone()),
        ports: Some(ports.map(|(name, port)| container_port(name, port)).into()),
        env: Some(environment),
        resources: Some(resources(cluster, inputs)),
        security_context: Some(SecurityContext {
            allow_privilege_escalation: Some(false),
            read_only_root_filesystem: Some(true),
            capabilities: Some(Capabilities { drop: Some(vec!["ALL".to_owned()]), ..Capabilities::default() }),
            ..SecurityContext::default()
        }),
        // Recovery precedes serving and may take up to ten minutes.
        startup_probe: Some(probe("/startupz", 2, 300)),
        readiness_probe: Some(probe("/readyz", 2, 2)),
        // Liveness depends on the process's event loops only, not on peers, map or GPUs.
        liveness_probe: Some(probe("/livez", 5, 6)),
        lifecycle: Some(Lifecycle {
            pre_stop: Some(LifecycleHandler {
                exec: Some(ExecAction { command: Some(drain.into()) }),
                ..LifecycleHandler::default()
            }),
            ..Lifecycle::default()
        }),
        volume_mounts: Some(mounts(cluster)),
        ..Container::default()
    }
}

/// Mount path of the volumes for runs.
const RUN_INPUTS: &str = "/inputs";
/// Mount path of the volumes for snapshots.
const SNAPSHOTS: &str = "/snapshots";

fn mount(name: &str, path: &str) -> VolumeMount {
    VolumeMount { name: name.to_owned(), mount_path: path.to_owned(), ..VolumeMount::default() }
}

/// Returns a mount that cannot be written to.
pub(crate) fn read_only(name: &str, path: &str) -> VolumeMount {
    VolumeMount { read_only: Some(true), ..mount(name, path) }
}

fn mounts(cluster: &ValidatedCluster) -> Vec<VolumeMount> {
    let mut mounts = vec![
        mount("data", "/var/lib/engram"),
        read_only("config", "/etc/engram"),
        mount("tmp", "/tmp"),
        read_only("tokens", "/var/run/secrets/kubernetes.io/serviceaccount"),
    ];
    if cluster.certificates().is_some() {
        mounts.push(read_only("ca", "/etc/engram-ca"));
        let is_provided = cluster.provided_secret().is_some();
        mounts.push(VolumeMount { read_only: is_provided.then_some(true), ..mount("identity", "/run/engram") });
    }
    mounts.extend(
        cluster
            .spec
            .inputs
            .iter()
            .flatten()
            .map(|input| read_only(&format!("input-{}", input.name), &format!("{RUN_INPUTS}/{}", input.name))),
    );
    mounts.extend(
        cluster
            .spec
            .snapshot_volumes
            .iter()
            .flatten()
            .map(|volume| mount(&format!("snapshots-{}", volume.name), &format!("{SNAPSHOTS}/{}", volume.name))),
    );
    if bootstrap_secret(cluster).is_some() {
        mounts.push(read_only("bootstrap", "/bootstrap"));
    }
    mounts
}

/// Default resource requests. Without a CPU request heartbeats are late on a busy node, and the worker is repeatedly declared dead. The memory
/// is several times that of an empty worker, and small enough for three workers on a laptop.
const REQUESTS: [(&str, &str); 2] = [("cpu", "250m"), ("memory", "256Mi")];

/// Returns the resources that the operator adds to those of the spec.
fn resources(cluster: &ValidatedCluster, inputs: &Inputs) -> ResourceRequirements {
    let configured = cluster.spec.resources.as_ref();
    // Kubernetes treats a limit without a request as a request.
    let is_configured = |name: &str| {
        let has = |amounts: Option<&_>| {
            amounts.is_some_and(|all: &std::collections::BTreeMap<String, _>| all.contains_key(name))
        };
        configured.is_some_and(|resources| has(resources.requests.as_ref()) || has(resources.limits.as_ref()))
    };
    let amount = |(name, amount): (&str, &str)| (name.to_owned(), Quantity(amount.to_owned()));
    let requests: std::collections::BTreeMap<_, _> =
        REQUESTS.into_iter().filter(|(name, _)| !is_configured(name)).map(amount).collect();
    let mut resources = ResourceRequirements {
        requests: Some(requests).filter(|all| !all.is_empty()),
        ..ResourceRequirements::default()
    };
    let gpu = &cluster.spec.gpu;
    if cluster.claims_gpu() {
        resources.claims = Some(vec![ResourceClaim { name: "gpu".to_owned(), ..ResourceClaim::default() }]);
    } else if inputs.gpus > 0 {
        let name = gpu.resource_name.as_deref().unwrap_or(GPU_RESOURCE);
        resources.limits = Some([amount((name, &inputs.gpus.to_string()))].into());
    }
    resources
}

fn toleration(key: String, effect: &str) -> Toleration {
    Toleration {
        key: Some(key),
        operator: Some("Exists".to_owned()),
        effect: Some(effect.to_owned()),
        ..Toleration::default()
    }
}

fn tolerations(cluster: &ValidatedCluster, inputs: &Inputs) -> Vec<Toleration> {
    // Without a time limit: an outage of the control plane taints all nodes and must not evict pods.
    let mut all: Vec<Toleration> =
        ["not-ready", "unreachable"].map(|taint| toleration(format!("node.kubernetes.io/{taint}"), "NoExecute")).into();
    if inputs.gpus > 0 {
        let name = cluster.spec.gpu.resource_name.as_deref().unwrap_or(GPU_RESOURCE);
        all.push(toleration(name.to_owned(), "NoSchedule"));
    }
    all
}

/// Spreads workers over nodes or zones.
fn spread(cluster: &ValidatedCluster) -> TopologySpreadConstraint {
    let zones = cluster.spec.scheduling.as_ref().and_then(|scheduling| scheduling.topology_spread);
    let key = match zones {
        Some(TopologySpread::Zone) => ZONE_KEY,
        Some(TopologySpread::Node) | None => "kubernetes.io/hostname",
    };
    TopologySpreadConstraint {
        max_skew: 1,
        topology_key: key.to_owned(),
        when_unsatisfiable: "ScheduleAnyway".to_owned(),
        label_selector: Some(selecting(cluster)),
        ..TopologySpreadConstraint::default()
    }
}
