//! Statuses that this replica wrote and its watch has not delivered yet.
//!
//! A reconcile that starts before the watch delivers the last write sees an older status. Derived from that, the new status would lose what
//! only the last one had, move transition times, and publish events and metrics again.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use kube::api::DynamicObject;
use parking_lot::Mutex;
use serde_json::Value;

use crate::context::Key;

/// How long a write is remembered: far longer than a watch needs, and a bound for objects that are deleted before that.
const KEPT: Duration = Duration::from_secs(60);

/// A written status.
struct WrittenStatus {
    uid: String,
    version: u64,
    status: Value,
    at: Instant,
}

/// The last status written of each object of a kind, until the watch has delivered it.
#[derive(Default)]
pub(crate) struct WrittenStatuses(Mutex<BTreeMap<Key, WrittenStatus>>);

impl WrittenStatuses {
    /// Remembers the object that the API server returned for a write of its status.
    pub(crate) fn record(&self, key: &Key, written: &DynamicObject, at: Instant) {
        let version = written.metadata.resource_version.as_deref().and_then(|version| version.parse().ok());
        let (Some(version), Some(uid)) = (version, written.metadata.uid.clone()) else { return };
        let status = written.data.get("status").cloned().unwrap_or(Value::Null);
        let mut all = self.0.lock();
        all.retain(|_, written| at.saturating_duration_since(written.at) < KEPT);
        all.insert(key.clone(), WrittenStatus { uid, version, status, at });
    }

    /// Replaces the status of an object of the watch if this replica has written a newer one. Kubernetes compares versions as numbers.
    pub(crate) fn apply(&self, key: &Key, object: &mut Value) {
        let mut all = self.0.lock();
        let Some(written) = all.get(key) else { return };
        let text = |path: &str| object.pointer(path).and_then(Value::as_str).unwrap_or_default();
        let version: Option<u64> = text("/metadata/resourceVersion").parse().ok();
        if text("/metadata/uid") == written.uid && version.is_some_and(|version| version < written.version) {
            object["status"] = written.status.clone();
        } else {
            all.remove(key);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn object(uid: &str, version: &str, phase: &str) -> Value {
        json!({
            "apiVersion": "engram.dev/v1alpha1", "kind": "LearnerCluster",
            "metadata": { "name": "words", "namespace": "research", "uid": uid, "resourceVersion": version },
            "status": { "phase": phase },
        })
    }

    /// Returns the phase that a reconcile sees.
    fn seen(statuses: &WrittenStatuses, mut watched: Value) -> Value {
        let key = Key { namespace: "research".into(), name: "words".into() };
        statuses.apply(&key, &mut watched);
        watched["status"]["phase"].clone()
    }

    #[test]
    fn a_status_is_derived_from_the_last_write_until_the_watch_delivers_it() {
        let (statuses, start) = (WrittenStatuses::default(), Instant::now());
        let key = Key { namespace: "research".into(), name: "words".into() };
        let write = |version: &str, phase: &str, at: Instant| {
            let written = serde_json::from_value(object("a", version, phase)).expect("an object");
            statuses.record(&key, &written, at);
        };
        assert_eq!(seen(&statuses, object("a", "9", "Starting")), "Starting", "nothing was written");

        write("10", "Ready", start);
        assert_eq!(seen(&statuses, object("a", "9", "Starting")), "Ready", "versions are compared as numbers");
        assert_eq!(seen(&statuses, object("a", "11", "Degraded")), "Degraded", "another client wrote it since then");
        assert_eq!(seen(&statuses, object("a", "9", "Starting")), "Starting", "a delivered write is forgotten");

        write("12", "Ready", start);
        assert_eq!(seen(&statuses, object("b", "5", "Starting")), "Starting", "an object of the same name is another");

        write("13", "Ready", start);
        let other = Key { namespace: "research".into(), name: "other".into() };
        let written = serde_json::from_value(object("c", "14", "Ready")).expect("an object");
        statuses.record(&other, &written, start + KEPT);
        assert_eq!(seen(&statuses, object("a", "9", "Starting")), "Starting", "a deleted object is forgotten");
    }
}
