//! Writes of statuses, and statuses that this replica wrote and its watch has not delivered yet.
//!
//! A reconcile that starts before the watch delivers the last write sees an older status. Derived from that, the new status would lose what
//! only the last one had, move transition times, and publish events and metrics again.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::Api;
use kube::api::{Patch, PatchParams};
use parking_lot::Mutex;
use serde::Serialize;
use serde_json::json;

use crate::context::{Context, Key};
use crate::kube::api_request::{WriteError, check_leader, request};
use crate::kube::stored_object::StoredObject;

/// Field manager of statuses.
const MANAGER: &str = "engram-operator-status";

/// How long a write is remembered: far longer than a watch needs, and a bound for objects that are deleted before that.
const KEPT: Duration = Duration::from_secs(60);

/// Writes the status of an object.
pub(crate) async fn write_status<O: StoredObject>(
    context: &Context,
    key: &Key,
    status: &O::Status,
) -> Result<O, WriteError> {
    check_leader(context)?;
    let kind = O::kind(&());
    let api: Api<O> = Api::namespaced(context.client.clone(), &key.namespace);
    let object = json!({
        "apiVersion": engram_api::API_VERSION,
        "kind": kind,
        "metadata": { "name": key.name },
        "status": status,
    });
    let parameters = PatchParams::apply(MANAGER).force();
    let patch = Patch::Apply(&object);
    let written = api.patch_status(&key.name, &parameters, &patch);
    Ok(request(|| format!("write the status of {kind} {}", key.name), written).await?)
}

/// A written status.
struct WrittenStatus<S> {
    uid: String,
    version: u64,
    status: S,
    at: Instant,
}

/// The last status written of each object of a kind, until the watch has delivered it.
pub(crate) struct WrittenStatuses<S>(Mutex<BTreeMap<Key, WrittenStatus<S>>>);

impl<S> Default for WrittenStatuses<S> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<S: Clone + Serialize> WrittenStatuses<S> {
    /// Remembers the object that the API server returned for a write of its status.
    pub(crate) fn record(&self, key: &Key, written: &impl StoredObject<Status = S>, at: Instant) {
        let version = written.meta().resource_version.as_deref().and_then(|version| version.parse().ok());
        let (Some(version), Some(uid)) = (version, written.meta().uid.clone()) else { return };
        let status = written.status().clone();
        let mut all = self.0.lock();
        all.retain(|_, written| at.saturating_duration_since(written.at) < KEPT);
        all.insert(key.clone(), WrittenStatus { uid, version, status, at });
    }

    /// Returns the status of an object of the watch if this replica has written a newer one. Kubernetes compares versions as numbers.
    pub(crate) fn newer(&self, key: &Key, watched: &ObjectMeta) -> Option<S> {
        let mut all = self.0.lock();
        let written = all.get(key)?;
        let version: Option<u64> = watched.resource_version.as_deref().and_then(|version| version.parse().ok());
        if watched.uid.as_deref() == Some(&written.uid) && version.is_some_and(|version| version < written.version) {
            return Some(written.status.clone());
        }
        all.remove(key);
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::object::ClusterObject;
    use engram_api::status::{ClusterPhase, LearnerClusterStatus};
    use serde_json::json;

    fn object(uid: &str, version: &str, phase: &str) -> ClusterObject {
        let object = json!({
            "apiVersion": "engram.dev/v1alpha1", "kind": "LearnerCluster",
            "metadata": { "name": "words", "namespace": "research", "uid": uid, "resourceVersion": version },
            "status": { "phase": phase },
        });
        serde_json::from_value(object).expect("an object")
    }

    /// Returns the phase that a reconcile sees.
    fn seen(statuses: &WrittenStatuses<LearnerClusterStatus>, watched: &ClusterObject) -> String {
        let key = Key { namespace: "research".into(), name: "words".into() };
        let status = statuses.newer(&key, &watched.metadata).unwrap_or_else(|| watched.status().clone());
        status.phase.map_or_else(String::new, |phase: ClusterPhase| phase.to_string())
    }

    #[test]
    fn a_status_is_derived_from_the_last_write_until_the_watch_delivers_it() {
        let (statuses, start) = (WrittenStatuses::default(), Instant::now());
        let key = Key { namespace: "research".into(), name: "words".into() };
        let write = |version: &str, phase: &str, at: Instant| {
            statuses.record(&key, &object("a", version, phase), at);
        };
        assert_eq!(seen(&statuses, &object("a", "9", "Starting")), "Starting", "nothing was written");

        write("10", "Ready", start);
        assert_eq!(seen(&statuses, &object("a", "9", "Starting")), "Ready", "versions are compared as numbers");
        assert_eq!(seen(&statuses, &object("a", "11", "Degraded")), "Degraded", "another client wrote it since then");
        assert_eq!(seen(&statuses, &object("a", "9", "Starting")), "Starting", "a delivered write is forgotten");

        write("12", "Ready", start);
        assert_eq!(seen(&statuses, &object("b", "5", "Starting")), "Starting", "an object of the same name is another");

        write("13", "Ready", start);
        let other = Key { namespace: "research".into(), name: "other".into() };
        statuses.record(&other, &object("c", "14", "Ready"), start + KEPT);
        assert_eq!(seen(&statuses, &object("a", "9", "Starting")), "Starting", "a deleted object is forgotten");
    }
}
