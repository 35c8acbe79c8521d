//! One reconcile of a cluster.

use engram_api::status::LearnerClusterStatus;

use crate::cluster::object::ClusterObject;
use crate::context::{Context, Key};
use crate::kube::stored_object::StoredObject as _;

/// One reconcile of a cluster.
pub(crate) struct Pass<'a> {
    pub(crate) context: &'a Context,
    pub(crate) key: &'a Key,
    pub(crate) object: &'a ClusterObject,
    /// Status before the reconcile.
    pub(crate) old: LearnerClusterStatus,
    /// Time for conditions.
    pub(crate) now: String,
}

impl Pass<'_> {
    /// Returns the UID of the cluster's object.
    pub(crate) fn uid(&self) -> &str {
        self.object.uid()
    }
}
