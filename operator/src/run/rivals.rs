//! Detects another operator that manages the same clusters: two releases that watch one namespace undo each other's changes.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use serde_json::Value;

use super::Key;
use crate::build::CONFIG_FILE;

/// Minimum time between reports about a cluster.
const BETWEEN: Duration = Duration::from_secs(60);

/// Clusters whose configuration names the coordinators of this operator, with the time of the last report about another operator.
#[derive(Default)]
pub(super) struct Rivals(Mutex<BTreeMap<Key, Option<Instant>>>);

impl Rivals {
    /// Observes the coordinators in the configuration of a cluster. Returns a report if another operator has replaced those of this one, which
    /// does not happen when an operator takes over the clusters of a deleted release.
    pub(super) fn observe(&self, key: &Key, published: &[String], ours: &[String], now: Instant) -> Option<String> {
        let mut all = self.0.lock();
        if published == ours {
            all.entry(key.clone()).or_default();
            return None;
        }
        let reported = all.get_mut(key)?;
        if reported.is_some_and(|at| now.saturating_duration_since(at) < BETWEEN) {
            return None;
        }
        *reported = Some(now);
        Some(format!(
            "another operator, with coordinators {}, manages this cluster, too, and both undo each other's changes; uninstall one of them, \
             or give each watchNamespaces that do not overlap",
            published.join(", ")
        ))
    }

    /// Forgets a cluster that this replica does not write.
    pub(super) fn forget(&self, key: &Key) {
        self.0.lock().remove(key);
    }

    /// Removes clusters of a scope that are not in `present`.
    pub(super) fn keep_only(&self, scope: Option<&str>, present: impl Fn(&Key) -> bool) {
        self.0.lock().retain(|key, _| key.stays(scope, &present));
    }
}

/// Returns the coordinators in the configuration that a cluster's workers read; `None` if it is not published.
pub(super) fn published_coordinators(objects: &[Value]) -> Option<Vec<String>> {
    let settings = objects.iter().find_map(|object| object.pointer("/data")?.get(CONFIG_FILE)?.as_str())?;
    let settings: Value = serde_json::from_str(settings).ok()?;
    serde_json::from_value(settings.get("coordinators")?.clone()).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_second_operator_is_reported_and_a_takeover_is_not() {
        let (rivals, start) = (Rivals::default(), Instant::now());
        let key = Key { namespace: "research".into(), name: "words".into() };
        let (ours, theirs) = (vec!["a:7440".to_owned()], vec!["b:7440".to_owned()]);
        assert_eq!(rivals.observe(&key, &theirs, &ours, start), None, "a takeover");
        assert_eq!(rivals.observe(&key, &ours, &ours, start), None);
        let report = rivals.observe(&key, &theirs, &ours, start).expect("a report");
        assert!(report.contains("coordinators b:7440") && report.contains("watchNamespaces"), "{report}");
        assert_eq!(rivals.observe(&key, &ours, &ours, start), None);
        assert_eq!(rivals.observe(&key, &theirs, &ours, start), None, "once a minute");
        assert!(rivals.observe(&key, &theirs, &ours, start + BETWEEN).is_some());
        rivals.forget(&key);
        assert_eq!(rivals.observe(&key, &theirs, &ours, start + BETWEEN * 2), None, "another replica wrote meanwhile");
    }

    #[test]
    fn coordinators_are_read_from_the_configuration_of_the_workers() {
        let config = |text: &str| json!({ "kind": "ConfigMap", "data": { CONFIG_FILE: text } });
        let objects = [json!({ "kind": "Service" }), config(r#"{"coordinators":["a:7440","b:7440"]}"#)];
        assert_eq!(published_coordinators(&objects), Some(vec!["a:7440".into(), "b:7440".into()]));
        assert_eq!(published_coordinators(&[config("{")]), None);
        assert_eq!(published_coordinators(&[]), None);
    }
}
