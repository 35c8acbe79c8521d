//! A `LearnerRun` as the API server stores it.

use std::sync::LazyLock;

use engram_api::status::LearnerRunStatus;
use engram_api::{ClusterRef, ManifestEnum as _, RunDependency, RunKind};
use kube::CustomResource;
use serde::{Deserialize, Serialize};

use crate::kube::stored_object::{StoredObject, StoredSpec, StoredStatus};

/// The spec of a `LearnerRun` of the API server.
#[derive(CustomResource, Clone, Debug, Default, Serialize, Deserialize)]
#[kube(
    group = "engram.dev",
    version = "v1alpha1",
    kind = "LearnerRun",
    root = "RunObject",
    plural = "learnerruns",
    namespaced,
    status = "StoredStatus<LearnerRunStatus>",
    schema = "disabled",
    doc = "A `LearnerRun` of the API server."
)]
#[serde(transparent)]
pub struct RunSpec(StoredSpec<RunHead>);

/// What decides about a run before its spec is checked.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct RunHead {
    /// Its cluster.
    pub cluster_ref: Option<ClusterRef>,
    /// Its kind, which a newer version may know only.
    pub kind: String,
    /// Controller that runs it; absent = this operator.
    pub managed_by: Option<String>,
    /// Whether it is to be suspended.
    pub suspend: bool,
    /// Runs on which it depends.
    pub depends_on: Vec<RunDependency>,
    /// How long it is kept after its end, in seconds; absent = until it is deleted.
    pub ttl_seconds_after_finished: Option<u64>,
}

impl StoredObject for RunObject {
    type Head = RunHead;
    type Status = LearnerRunStatus;

    fn head(&self) -> &RunHead {
        &self.spec.0.head
    }

    fn status(&self) -> &LearnerRunStatus {
        static NONE: LazyLock<LearnerRunStatus> = LazyLock::new(LearnerRunStatus::default);
        self.status.as_ref().map_or(&NONE, |status| &status.0)
    }
}

impl RunObject {
    /// Returns whether this operator runs it and it is not being deleted.
    pub(crate) fn is_managed_here(&self) -> bool {
        self.is_ours(self.head().managed_by.as_deref())
    }

    /// Returns the name of its cluster.
    pub fn cluster(&self) -> &str {
        self.head().cluster_ref.as_ref().map_or("", |cluster| &cluster.name)
    }

    /// Returns the identity of a run for the workers: the UID of its object, and the number of the retry, which is another submission.
    pub(crate) fn attempt_uid(&self) -> String {
        match self.status().retries {
            Some(retry) => format!("{}-{retry}", self.uid()),
            None => self.uid().to_owned(),
        }
    }

    /// Returns whether it changes the memories of its cluster. Snapshots, jobs and runs that are split into tasks do not.
    pub fn needs_turn(&self) -> bool {
        let kind = RunKind::ALL.iter().find(|it| it.as_str() == self.head().kind);
        kind.is_none_or(|kind| !matches!(kind, RunKind::Snapshot | RunKind::Job) && !kind.has_tasks())
    }
}
