//! Fields that are reserved and not supported on Kubernetes yet.
//!
//! One table for the validation and for the CustomResourceDefinitions, so that `engram validate`, the API server and the
//! operator reject a manifest with the same advice. A row is removed when its feature is implemented.

/// A field that is rejected.
pub(crate) struct UnsupportedField {
    /// The object that has the field.
    pub(crate) parent: &'static str,
    /// The field.
    pub(crate) field: &'static str,
    /// What to do instead.
    pub(crate) advice: &'static str,
}

const fn unsupported(parent: &'static str, field: &'static str, advice: &'static str) -> UnsupportedField {
    UnsupportedField { parent, field, advice }
}

/// Fields of a `LearnerCluster`.
pub(crate) const CLUSTER: &[UnsupportedField] = &[
    unsupported("spec", "telemetry", "remove telemetry; the workers' metrics are at port 9090, path /metrics"),
    unsupported("spec.gpu", "selector", "remove selector; scheduling.affinity can name the labels of nodes"),
    unsupported("spec.gpu", "memoryLimit", "remove memoryLimit; a worker uses the memory of its whole device"),
    unsupported("spec.tls", "trustDomain", "remove trustDomain; trust follows from the CA and the cluster's id"),
    unsupported("spec.scheduling", "queueName", "remove queueName; schedulerName names another scheduler"),
];

/// Fields of a `LearnerRun` that apply to local mode only.
pub(crate) const RUN: &[UnsupportedField] = &[
    unsupported("spec.memory.source", "git", "use example, events or synthetic; git runs in local mode only"),
    unsupported(
        "spec.replay.checkpoint.location",
        "secretRef",
        "remove secretRef; workers use the credentials of their environment",
    ),
];

impl UnsupportedField {
    /// Returns the path of the field.
    pub(crate) fn path(&self) -> String {
        format!("{}.{}", self.parent, self.field)
    }
}
