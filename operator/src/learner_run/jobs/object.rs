//! The Indexed Job of a run of kind `Job`.

use std::collections::BTreeMap;

use engram_api::{JobRun, LearnerRunSpec};
use k8s_openapi::api::batch::v1::{
    Job, JobSpec, PodFailurePolicy, PodFailurePolicyOnPodConditionsPattern, PodFailurePolicyRule,
};
use k8s_openapi::api::core::v1::{
    Container, PodSecurityContext, PodSpec, PodTemplateSpec, SeccompProfile, SecurityContext,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use serde_json::{Value, json};

use crate::cluster::build::{config_file, free, number, of_field, of_value, owned, projected, read_only, token};
use crate::kube::api_object::{merge, to_json};
use crate::learner_run::object::RunObject;
use crate::names::{CLIENT_PORT, Names, ROOTS};

/// Label with the name of the run of a Job and its pods.
pub const RUN_LABEL: &str = "engram.dev/run";
/// Annotation of a Job that the operator has suspended as `spec.suspend` of the run says: it alone resumes such a Job.
pub const SUSPENDED_BY_RUN: &str = "engram.dev/suspended-by-run";
/// Label that names the queue of Kueue.
pub const QUEUE_LABEL: &str = "kueue.x-k8s.io/queue-name";
/// Prefix of labels and annotations that are passed on from the run to its Job.
const QUEUE_PREFIX: &str = "kueue.x-k8s.io/";
/// Annotation of a pod with its index.
pub(crate) const INDEX_ANNOTATION: &str = "batch.kubernetes.io/job-completion-index";
/// Name of the container of the program.
pub(crate) const CONTAINER: &str = "main";
/// Mount path of the token and the trust bundle.
const CREDENTIALS: &str = "/var/run/engram";

/// A `LearnerRun` of kind `Job`.
#[derive(Clone, Debug)]
pub struct JobOwner {
    /// Name of the run, which is that of its Job.
    pub name: String,
    /// Its namespace.
    pub namespace: String,
    /// Its UID.
    pub uid: String,
    /// Its labels.
    pub labels: BTreeMap<String, String>,
    /// Its annotations.
    pub annotations: BTreeMap<String, String>,
}

impl JobOwner {
    /// Returns the owner of an object; `None` if it has no UID.
    pub fn of(run: &RunObject) -> Option<Self> {
        let ObjectMeta { name, namespace, uid, labels, annotations, .. } = run.metadata.clone();
        Some(Self {
            name: name?,
            namespace: namespace?,
            uid: uid?,
            labels: labels.unwrap_or_default(),
            annotations: annotations.unwrap_or_default(),
        })
    }

    /// Returns the queue of Kueue that admits the Job.
    pub fn queue(&self) -> Option<&str> {
        self.labels.get(QUEUE_LABEL).map(String::as_str)
    }
}

/// Builds the Job of a run. `cluster_id` is that of a cluster with TLS, whose tokens the pods present. With a queue the Job is created
/// suspended, and the queue starts it. The template of the user is merged into that of the operator, so that the result is JSON.
pub fn job(owner: &JobOwner, spec: &LearnerRunSpec, run: &JobRun, cluster_id: Option<&str>) -> Value {
    let body = JobSpec {
        completion_mode: Some("Indexed".to_owned()),
        completions: Some(number(run.replicas)),
        parallelism: Some(number(run.replicas)),
        backoff_limit: Some(number(spec.backoff_limit)),
        suspend: Some(owner.queue().is_some()),
        // A failed pod is replaced once it has ended, and one that a drain or a preemption ended is no failure of the program.
        pod_replacement_policy: Some("Failed".to_owned()),
        pod_failure_policy: Some(PodFailurePolicy { rules: vec![ignored_disruptions()] }),
        active_deadline_seconds: run.active_deadline_seconds.map(|seconds| i64::try_from(seconds).unwrap_or(i64::MAX)),
        ..JobSpec::default()
    };
    let job = Job { metadata: metadata(owner), spec: Some(body), ..Job::default() };
    let template = PodTemplateSpec {
        metadata: Some(ObjectMeta { labels: Some(labels(owner)), ..ObjectMeta::default() }),
        spec: Some(process_pod(owner, spec, run, cluster_id)),
    };
    let resources = run.resources.as_ref().map(to_json);
    let mut template = to_json(&template);
    if let Some(resources) = resources {
        merge(&mut template, &json!({ "spec": { "containers": [{ "name": CONTAINER, "resources": resources }] } }));
    }
    if let Some(over) = free(run.pod_template.as_ref()) {
        merge(&mut template, &over);
    }
    let mut content = to_json(&job);
    merge(&mut content, &json!({ "spec": { "template": template } }));
    content
}

fn ignored_disruptions() -> PodFailurePolicyRule {
    let condition =
        PodFailurePolicyOnPodConditionsPattern { type_: "DisruptionTarget".to_owned(), status: "True".to_owned() };
    PodFailurePolicyRule {
        action: "Ignore".to_owned(),
        on_pod_conditions: Some(vec![condition]),
        ..PodFailurePolicyRule::default()
    }
}

fn labels(owner: &JobOwner) -> BTreeMap<String, String> {
    [
        (RUN_LABEL, owner.name.as_str()),
        ("app.kubernetes.io/name", "engram"),
        ("app.kubernetes.io/instance", &owner.name),
        ("app.kubernetes.io/component", "job"),
        ("app.kubernetes.io/managed-by", "engram-operator"),
    ]
    .map(owned)
    .into()
}

fn metadata(owner: &JobOwner) -> ObjectMeta {
    let passed_on = |all: &BTreeMap<String, String>| -> BTreeMap<String, String> {
        all.iter().filter(|(name, _)| name.starts_with(QUEUE_PREFIX)).map(|(a, b)| (a.clone(), b.clone())).collect()
    };
    let mut labels = labels(owner);
    labels.extend(passed_on(&owner.labels));
    ObjectMeta {
        name: Some(owner.name.clone()),
        namespace: Some(owner.namespace.clone()),
        labels: Some(labels),
        annotations: Some(passed_on(&owner.annotations)).filter(|all| !all.is_empty()),
        owner_references: Some(vec![OwnerReference {
            api_version: engram_api::API_VERSION.to_owned(),
            kind: "LearnerRun".to_owned(),
            name: owner.name.clone(),
            uid: owner.uid.clone(),
            controller: Some(true),
            ..OwnerReference::default()
        }]),
        ..ObjectMeta::default()
    }
}

fn process_pod(owner: &JobOwner, spec: &LearnerRunSpec, run: &JobRun, cluster_id: Option<&str>) -> PodSpec {
    let volumes = cluster_id.map(|id| {
        let names = Names { cluster: spec.cluster_ref.name.clone() };
        let sources = vec![token("token", Some(format!("engram/{id}")), 3_600), config_file(names.ca(), ROOTS)];
        vec![projected("engram", sources)]
    });
    PodSpec {
        restart_policy: Some("Never".to_owned()),
        automount_service_account_token: Some(false),
        enable_service_links: Some(false),
        termination_grace_period_seconds: i64::try_from(run.grace_period_seconds).ok(),
        security_context: Some(PodSecurityContext {
            seccomp_profile: Some(SeccompProfile { type_: "RuntimeDefault".to_owned(), ..SeccompProfile::default() }),
            ..PodSecurityContext::default()
        }),
        containers: vec![container(owner, spec, run, cluster_id.is_some())],
        volumes,
        ..PodSpec::default()
    }
}

fn container(owner: &JobOwner, spec: &LearnerRunSpec, run: &JobRun, has_tls: bool) -> Container {
    let address = format!("{}.{}.svc:{CLIENT_PORT}", spec.cluster_ref.name, owner.namespace);
    let mut variables = vec![
        of_value("ENGRAM_ADDRESS", address),
        of_value("ENGRAM_RUN", &owner.name),
        of_value("ENGRAM_GROUP", run.group(&owner.name)),
        of_field("ENGRAM_RANK", &format!("metadata.annotations['{INDEX_ANNOTATION}']")),
        of_value("ENGRAM_WORLD_SIZE", run.replicas.to_string()),
    ];
    if has_tls {
        variables.extend([
            of_value("ENGRAM_CERTIFICATE_AUTHORITY", format!("{CREDENTIALS}/{ROOTS}")),
            of_value("ENGRAM_TOKEN_FILE", format!("{CREDENTIALS}/token")),
        ]);
    }
    variables.extend(run.env.iter().map(|variable| of_value(&variable.name, &variable.value)));
    Container {
        name: CONTAINER.to_owned(),
        image: run.image.clone(),
        command: Some(run.command.clone()),
        args: Some(run.args.clone()).filter(|args| !args.is_empty()),
        working_dir: run.working_dir.clone(),
        env: Some(variables),
        // Exit code and last lines of a failed process are in the status of its pod, which the operator reads.
        termination_message_policy: Some("FallbackToLogsOnError".to_owned()),
        security_context: Some(SecurityContext {
            allow_privilege_escalation: Some(false),
            ..SecurityContext::default()
        }),
        volume_mounts: has_tls.then(|| vec![read_only("engram", CREDENTIALS)]),
        ..Container::default()
    }
}
