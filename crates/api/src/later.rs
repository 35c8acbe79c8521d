//! What a manifest may already name and this version does not do on Kubernetes.
//!
//! One table for the checker and for the CustomResourceDefinitions, so that a manifest is refused with the same advice
//! by `engram validate`, by the API server and by the operator. A row goes when its feature comes.

/// A field that is refused.
pub(crate) struct Later {
    /// The object that has the field.
    pub(crate) parent: &'static str,
    /// The field.
    pub(crate) field: &'static str,
    /// What to do instead.
    pub(crate) advice: &'static str,
}

const fn later(parent: &'static str, field: &'static str, advice: &'static str) -> Later {
    Later { parent, field, advice }
}

/// Fields of a `LearnerCluster`.
pub(crate) const CLUSTER: &[Later] = &[
    later("spec", "telemetry", "remove telemetry; the workers' metrics are at port 9090, path /metrics"),
    later("spec.gpu", "selector", "remove selector; scheduling.affinity can name the labels of nodes"),
    later("spec.gpu", "memoryLimit", "remove memoryLimit; a worker uses the memory of its whole device"),
    later(
        "spec.tls",
        "trustDomain",
        "remove trustDomain; who is believed follows from the authority and the cluster's id",
    ),
    later("spec.scheduling", "queueName", "remove queueName; schedulerName names another scheduler"),
];

/// Fields of a `LearnerRun` that mean something on one machine only.
pub(crate) const RUN: &[Later] =
    &[later("spec.memory.source", "git", "use example, events or synthetic; git runs in local mode only")];

impl Later {
    /// Returns the path of the field.
    pub(crate) fn path(&self) -> String {
        format!("{}.{}", self.parent, self.field)
    }
}
