//! Validation rules between fields (CEL), and the defaults that the API server fills in.
//!
//! The validation of this crate states the same rules in Rust, with locations and advice; a test of the operator checks
//! that both reject the same objects.

use serde_json::{Value, json};

use crate::kubernetes::TlsMode;
use crate::run::{DATA_FILES, JOB_VARIABLES, KUBERNETES_EVENTS, KUBERNETES_FILES};
use crate::unsupported::{self, UnsupportedField};

/// A CEL rule at one object or value of a kind.
pub(crate) struct Rule {
    /// Path of what `self` is; the root is the empty path.
    pub(crate) at: &'static str,
    pub(crate) rule: String,
    pub(crate) message: String,
    /// Cause that clients receive.
    pub(crate) reason: &'static str,
    /// Field under `at` that the error points at.
    pub(crate) field: Option<&'static str>,
}

impl Rule {
    /// Returns the entry of `x-kubernetes-validations`.
    pub(crate) fn to_json(&self) -> Value {
        let mut entry = json!({ "rule": self.rule, "message": self.message, "reason": self.reason });
        if let Some(field) = self.field {
            entry["fieldPath"] = format!(".{field}").into();
        }
        entry
    }
}

fn invalid(at: &'static str, field: &'static str, rule: &str, message: &str) -> Rule {
    let field = Some(field).filter(|field| !field.is_empty());
    Rule { at, rule: rule.into(), message: message.into(), reason: "FieldValueInvalid", field }
}

fn immutable(at: &'static str) -> Rule {
    let message = format!("{at} cannot change; give the new object another metadata.name");
    Rule { at, rule: "self == oldSelf".into(), message, reason: "FieldValueForbidden", field: None }
}

fn unsupported(later: &UnsupportedField) -> Rule {
    let UnsupportedField { parent, field, advice } = later;
    let rule = format!("!has(self.{field})");
    let message = format!("{parent}.{field} is not supported yet: {advice}");
    Rule { at: parent, rule, message, reason: "FieldValueForbidden", field: Some(field) }
}

/// Rules of an object's name, from which the names of its dependent objects are made.
fn names() -> Vec<Rule> {
    vec![
        invalid("", "", "size(self.metadata.name) <= 45", "metadata.name must be at most 45 characters"),
        invalid(
            "",
            "",
            "self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')",
            "metadata.name must be a-z, 0-9 and -, starting with a letter, not ending with -",
        ),
    ]
}

/// Rules of a `LearnerCluster`.
pub(crate) fn cluster() -> Vec<Rule> {
    let mut rules = names();
    rules.extend([
        invalid(
            "spec",
            "replicationFactor",
            "!has(self.replicationFactor) || self.replicationFactor <= self.workers",
            "replicationFactor must not exceed workers",
        ),
        invalid(
            "spec.autoscaling",
            "maxWorkers",
            "self.minWorkers <= self.maxWorkers",
            "maxWorkers must not be less than minWorkers",
        ),
        invalid(
            "spec",
            "autoscaling.minWorkers",
            "!has(self.autoscaling) || !has(self.replicationFactor) || self.autoscaling.minWorkers >= self.replicationFactor",
            "autoscaling.minWorkers must be at least replicationFactor",
        ),
        invalid(
            "spec",
            "storage.ephemeral",
            "!has(self.storage) || !has(self.storage.ephemeral) || !self.storage.ephemeral || \
             (has(self.replicationFactor) ? self.replicationFactor >= 2 : self.workers >= 2)",
            "ephemeral storage needs a replicationFactor of at least 2: with a single replica a restart would lose its memories",
        ),
        invalid(
            "spec",
            "version",
            "!has(self.version) || self.version == '' || !has(self.image) || self.image == ''",
            "version and image exclude each other: image is the whole reference",
        ),
        invalid(
            "spec",
            "access",
            "!has(self.access) || size(self.access) == 0 || \
             !(has(self.tls) && has(self.tls.mode) && self.tls.mode == 'Disabled')",
            "access excludes tls.mode: Disabled: a token sent in plaintext can be stolen",
        ),
        // A name, not a path: it becomes part of a URL of the API server.
        invalid(
            "spec.tls",
            "secretName",
            "has(self.mode) && self.mode == 'Secret' ? \
             has(self.secretName) && self.secretName.matches('^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$') : \
             !has(self.secretName) || self.secretName == ''",
            "tls.mode: Secret needs secretName, the name of a Secret; other modes have none",
        ),
        invalid(
            "spec.tls",
            "issuerRef",
            "has(self.mode) && self.mode == 'CertManager' ? has(self.issuerRef) && has(self.issuerRef.name) && \
             self.issuerRef.name.matches('^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$') : \
             !has(self.issuerRef) || !has(self.issuerRef.name) || self.issuerRef.name == ''",
            "tls.mode: CertManager needs issuerRef.name, the name of an issuer; other modes have none",
        ),
        invalid(
            "spec.tls.issuerRef",
            "kind",
            "!has(self.kind) || self.kind in ['', 'Issuer', 'ClusterIssuer'] || \
             has(self.group) && !(self.group in ['', 'cert-manager.io']) && self.kind.matches('^[A-Z][A-Za-z0-9]*$')",
            "tls.issuerRef.kind must be Issuer or ClusterIssuer, unless tls.issuerRef.group names another API group",
        ),
        invalid(
            "spec.tls.issuerRef",
            "group",
            "!has(self.group) || self.group == '' || self.group.matches('^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$')",
            "tls.issuerRef.group must be an API group: a-z, 0-9, - and .",
        ),
        invalid(
            "spec.tls",
            "certificateLifetime",
            "!(has(self.mode) && self.mode == 'CertManager') || !has(self.certificateLifetime) || \
             self.certificateLifetime.endsWith('d') || duration(self.certificateLifetime) >= duration('1h')",
            "tls.mode: CertManager needs a certificateLifetime of at least 1h, the shortest that cert-manager accepts",
        ),
        invalid(
            "spec.gpu",
            "resourceClaimTemplateName",
            "!has(self.resourceClaimTemplateName) || self.resourceClaimTemplateName == '' || \
             (!has(self.count) && !has(self.resourceName))",
            "resourceClaimTemplateName excludes count and resourceName: the template defines the devices",
        ),
        invalid(
            "spec.storage.size",
            "",
            "quantity(self).compareTo(quantity(oldSelf)) >= 0",
            "spec.storage.size can only grow",
        ),
        immutable("spec.partitions"),
        immutable("spec.learning.law"),
        immutable("spec.features"),
        // Bootstrap can be neither added, nor removed, nor changed.
        Rule {
            at: "spec",
            rule: "has(self.bootstrap) == has(oldSelf.bootstrap) && (!has(self.bootstrap) || self.bootstrap == oldSelf.bootstrap)"
                .into(),
            message: "spec.bootstrap cannot change; give the new object another metadata.name".into(),
            reason: "FieldValueForbidden",
            field: Some("bootstrap"),
        },
        invalid(
            "spec.bootstrap.snapshot",
            "url",
            "!has(self.url) || (!self.url.endsWith('{name}') && !self.url.endsWith('{name}/'))",
            "spec.bootstrap.snapshot.url must name one snapshot, without {name}",
        ),
        invalid(
            "spec.bootstrap.snapshot",
            "path",
            "!has(self.path) || !self.path.endsWith('{name}')",
            "spec.bootstrap.snapshot.path must name one snapshot, without {name}",
        ),
        immutable("spec.managedBy"),
        tls_mode(),
    ]);
    rules.extend(buffers());
    rules.extend(one_location("spec.bootstrap.snapshot"));
    rules.extend(unsupported::CLUSTER.iter().map(unsupported));
    rules
}

/// Rules of declared buffers. A name identifies a buffer, so `oldSelf` is the buffer of the same name.
fn buffers() -> Vec<Rule> {
    const AT: &str = "spec.buffers[]";
    const KIND: &str = "spec.buffers[].sampler";
    vec![
        invalid(
            AT,
            "initialPriority",
            "!has(self.initialPriority) || !has(self.maxPriority) || self.initialPriority <= self.maxPriority",
            "initialPriority must not exceed maxPriority",
        ),
        invalid(
            AT,
            "limiter.minSize",
            "!has(self.limiter) || !has(self.limiter.minSize) || self.limiter.minSize <= self.capacity",
            "limiter.minSize must not exceed capacity: the first sample would wait forever",
        ),
        invalid(
            "spec.buffers[].limiter",
            "tolerance",
            "self.tolerance >= self.samplesPerInsert",
            "limiter.tolerance must be at least samplesPerInsert: appends and samples could block each other",
        ),
        invalid(
            KIND,
            "kind",
            "self.kind == 'Prioritized' || (!has(self.alpha) && !has(self.beta))",
            "sampler.alpha and sampler.beta belong to kind Prioritized",
        ),
        invalid(
            KIND,
            "length",
            "has(self.length) == (self.kind in ['Slices', 'Groups'])",
            "sampler.length belongs to kinds Slices and Groups, which need it",
        ),
        Rule {
            at: AT,
            rule: "self == oldSelf".into(),
            message: "a declared buffer cannot change; declare another name, or remove it from the list and delete the buffer first"
                .into(),
            reason: "FieldValueForbidden",
            field: None,
        },
    ]
}

/// Rules of a snapshot location: object storage or a volume.
fn one_location(at: &'static str) -> [Rule; 3] {
    [
        invalid(at, "", "has(self.url) != has(self.volume)", &format!("{at} must have exactly one of url and volume")),
        invalid(
            at,
            "path",
            "has(self.volume) == has(self.path)",
            &format!("{at}.path, the folder in a volume, and volume must be set together"),
        ),
        invalid(
            at,
            "volume",
            "!has(self.volume) || (!has(self.endpoint) && !has(self.region) && !has(self.secretRef))",
            &format!("{at}.volume excludes endpoint, region and secretRef, which belong to object storage"),
        ),
    ]
}

/// `tls.mode` is immutable: workers with and without TLS cannot talk to each other. An absent mode means the default.
fn tls_mode() -> Rule {
    let mode = |of: &str| format!("(has({of}.tls) && has({of}.tls.mode) ? {of}.tls.mode : '{}')", TlsMode::default());
    let rule = format!("{} == {}", mode("self"), mode("oldSelf"));
    let message = "spec.tls.mode cannot change; give the new object another metadata.name";
    Rule { at: "spec", rule, message: message.into(), reason: "FieldValueForbidden", field: Some("tls.mode") }
}

/// Kinds of runs, and the block of each.
const BLOCKS: [(&str, &str); 8] = [
    ("Memory", "memory"),
    ("Snapshot", "snapshot"),
    ("Geodesic", "geodesic"),
    ("Tropical", "tropical"),
    ("Fisher", "fisher"),
    ("Replay", "replay"),
    ("Federated", "federated"),
    ("Job", "job"),
];

/// A kind has its block, and no other kind has it.
fn block_of_kind(kind: &str, block: &'static str) -> [Rule; 2] {
    let needs = format!("self.kind != '{kind}' || has(self.{block})");
    let only = format!("self.kind == '{kind}' || !has(self.{block})");
    [
        invalid("spec", block, &needs, &format!("kind {kind} needs the block {block}")),
        invalid(
            "spec",
            block,
            &only,
            &format!("only the block named by kind may be set; {block} belongs to kind {kind}"),
        ),
    ]
}

/// Rules of a data file.
fn data_file(at: &'static str) -> [Rule; 4] {
    [
        invalid(
            at,
            "",
            "has(self.path) != has(self.configMap)",
            &format!("{at} must have exactly one of path and configMap"),
        ),
        invalid(
            at,
            "input",
            "!has(self.input) || has(self.path)",
            &format!("{at}.input needs path, the file in that volume"),
        ),
        invalid(
            at,
            "path",
            "!has(self.input) || !has(self.path) || (!self.path.startsWith('/') && !self.path.matches('(^|/)[.][.](/|$)'))",
            &format!("{at}.path must stay inside the volume that input names"),
        ),
        Rule {
            at,
            rule: "!has(self.path) || has(self.input)".into(),
            message: format!("{at}.path without input is not supported yet in Kubernetes: use {KUBERNETES_FILES}"),
            reason: "FieldValueForbidden",
            field: Some("path"),
        },
    ]
}

/// Rules of a `LearnerRun`.
pub(crate) fn run() -> Vec<Rule> {
    const REPORT: &str = "spec.memory";
    const SYNTHETIC: &str = "has(self.source.synthetic)";
    const EVENTS: &str = "spec.memory.source.events";
    let mut rules = names();
    rules.extend(BLOCKS.iter().flat_map(|(kind, block)| block_of_kind(kind, block)));
    rules.extend(DATA_FILES.iter().flat_map(|at| data_file(at)));
    rules.extend([
        invalid(
            "spec.tropical",
            "",
            "has(self.decode) || has(self.classify) || has(self.graph)",
            "spec.tropical must have decode, classify, graph, or several of them",
        ),
        invalid(
            "spec.tropical",
            "graph",
            "!has(self.graph) || !has(self.classify) || !has(self.classify.data) || !has(self.classify.data.csv)",
            "spec.tropical.graph excludes classify.data.csv: one file per run",
        ),
        invalid(
            REPORT,
            "report",
            &format!("{SYNTHETIC} || !has(self.report) || (!has(self.report.inversion) && !has(self.report.coverage))"),
            "report.inversion and report.coverage need a synthetic source",
        ),
        invalid(
            REPORT,
            "report",
            &format!("!{SYNTHETIC} || !has(self.report) || (!has(self.report.topK) && !has(self.report.skip))"),
            "report.topK and report.skip need a source of real events, not synthetic",
        ),
        invalid(
            "spec",
            "until",
            "!has(self.until) || has(self.until.separation) || has(self.until.convergence)",
            "until must have separation, convergence, or both",
        ),
        invalid(
            "spec",
            "until",
            "!has(self.until) || (has(self.memory) && has(self.memory.source.synthetic))",
            "until needs a synthetic source; epochs limits others",
        ),
        invalid(
            EVENTS,
            "",
            "[has(self.path), has(self.configMap), has(self.s3)].filter(present, present).size() == 1",
            "spec.memory.source.events must have exactly one of path, configMap and s3",
        ),
        invalid(
            EVENTS,
            "input",
            "!has(self.input) || has(self.path)",
            "spec.memory.source.events.input needs path, the file in that volume",
        ),
        invalid(
            EVENTS,
            "path",
            "!has(self.input) || !has(self.path) || (!self.path.startsWith('/') && !self.path.matches('(^|/)[.][.](/|$)'))",
            "spec.memory.source.events.path must stay inside the volume that input names",
        ),
        invalid(
            "spec.memory.source.events.s3",
            "url",
            "self.url.matches('^s3://[^/]+/(.*[^/}])$')",
            "spec.memory.source.events.s3.url must name one object, s3://BUCKET/KEY, without {name}",
        ),
        invalid(
            EVENTS,
            "columns",
            "has(self.columns.id) != has(self.columns.key)",
            "spec.memory.source.events.columns must have exactly one of id and key",
        ),
        invalid(
            EVENTS,
            "columns",
            "has(self.columns.epoch) != has(self.columns.time)",
            "spec.memory.source.events.columns must have exactly one of epoch and time",
        ),
        Rule {
            at: EVENTS,
            rule: "!has(self.path) || has(self.input)".into(),
            message: format!(
                "spec.memory.source.events.path without input is not supported yet in Kubernetes: use {KUBERNETES_EVENTS}"
            ),
            reason: "FieldValueForbidden",
            field: Some("path"),
        },
        invalid(
            "",
            "spec.dependsOn",
            "!has(self.spec.dependsOn) || self.spec.dependsOn.all(it, it.run != self.metadata.name)",
            "a run cannot depend on itself",
        ),
        immutable("spec.managedBy"),
        started_run_is_immutable(),
    ]);
    rules.extend(job());
    rules.extend(one_location("spec.snapshot"));
    rules.extend(one_location("spec.replay.checkpoint.location"));
    rules.extend(unsupported::RUN.iter().map(unsupported));
    rules
}

/// Rules of a job. Workers have the program in their image; a pod of the user needs one of its own.
fn job() -> [Rule; 2] {
    let reserved = format!("!self.name.startsWith('{JOB_VARIABLES}')");
    [
        invalid("spec.job", "image", "has(self.image)", "spec.job.image must name the image of the program"),
        invalid(
            "spec.job.env[]",
            "name",
            &reserved,
            &format!("spec.job.env must not set names that start with {JOB_VARIABLES}, which are reserved"),
        ),
    ]
}

/// The spec of a started run is immutable, apart from `suspend` and its time to live.
fn started_run_is_immutable() -> Rule {
    let same = |field: &str| {
        format!(
            "has(self.spec.{field}) == has(oldSelf.spec.{field}) && \
             (!has(self.spec.{field}) || self.spec.{field} == oldSelf.spec.{field})"
        )
    };
    let blocks =
        ["memory", "snapshot", "geodesic", "tropical", "fisher", "replay", "federated", "job", "until", "dependsOn"]
            .map(same)
            .join(" && ");
    let rule = format!(
        "!has(oldSelf.status) || !has(oldSelf.status.startTime) || \
         (self.spec.clusterRef == oldSelf.spec.clusterRef && self.spec.kind == oldSelf.spec.kind && {blocks})"
    );
    let message =
        "a run that has started can change suspend and ttlSecondsAfterFinished only; a new run needs a new name";
    Rule { at: "", rule, message: message.into(), reason: "FieldValueForbidden", field: None }
}

/// Defaults of settings that exist only in Kubernetes.
pub(crate) fn defaults() -> Vec<(&'static str, Value)> {
    vec![
        ("spec.upgrade", json!("Manual")),
        ("spec.updateStrategy", json!({ "type": "Rolling" })),
        ("spec.updateStrategy.type", json!("Rolling")),
        ("spec.storage", json!({ "size": "50Gi", "retainPolicy": "Retain", "ephemeral": false })),
        ("spec.storage.size", json!("50Gi")),
        ("spec.storage.retainPolicy", json!("Retain")),
        ("spec.storage.ephemeral", json!(false)),
        ("spec.storage.onNodeLoss", json!({ "action": "Replace", "after": "5m" })),
        ("spec.storage.onNodeLoss.action", json!("Replace")),
        ("spec.storage.onNodeLoss.after", json!("5m")),
        ("spec.service", json!({ "type": "ClusterIP" })),
        ("spec.service.type", json!("ClusterIP")),
        ("spec.networkPolicy", json!({ "enabled": true })),
        ("spec.networkPolicy.enabled", json!(true)),
        ("spec.scheduling", json!({ "topologySpread": "Node" })),
        ("spec.scheduling.topologySpread", json!("Node")),
        ("spec.paused", json!(false)),
        ("spec.suspend", json!(false)),
        ("spec.managedBy", json!(crate::MANAGED_BY)),
    ]
}
