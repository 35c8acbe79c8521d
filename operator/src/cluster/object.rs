//! A `LearnerCluster` as the API server stores it.

use std::sync::LazyLock;

use engram_api::status::LearnerClusterStatus;
use kube::CustomResource;
use serde::{Deserialize, Serialize};

use crate::kube::stored_object::{StoredObject, StoredSpec, StoredStatus};

/// The spec of a `LearnerCluster` of the API server.
#[derive(CustomResource, Clone, Debug, Default, Serialize, Deserialize)]
#[kube(
    group = "engram.dev",
    version = "v1alpha1",
    kind = "LearnerCluster",
    root = "ClusterObject",
    plural = "learnerclusters",
    namespaced,
    status = "StoredStatus<LearnerClusterStatus>",
    schema = "disabled",
    doc = "A `LearnerCluster` of the API server."
)]
#[serde(transparent)]
pub struct ClusterSpec(StoredSpec<ClusterHead>);

/// What decides about a cluster before its spec is checked.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ClusterHead {
    /// Controller that manages it; absent = this operator.
    pub managed_by: Option<String>,
}

impl StoredObject for ClusterObject {
    type Head = ClusterHead;
    type Status = LearnerClusterStatus;

    fn head(&self) -> &ClusterHead {
        &self.spec.0.head
    }

    fn status(&self) -> &LearnerClusterStatus {
        static NONE: LazyLock<LearnerClusterStatus> = LazyLock::new(LearnerClusterStatus::default);
        self.status.as_ref().map_or(&NONE, |status| &status.0)
    }
}

impl ClusterObject {
    /// Returns whether this operator manages it and it is not being deleted.
    pub(crate) fn is_managed_here(&self) -> bool {
        self.is_ours(self.head().managed_by.as_deref())
    }
}
