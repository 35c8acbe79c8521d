//! Detects another operator that manages the same clusters: two releases that watch one namespace undo each other's changes.

use std::time::{Duration, Instant};

use serde_json::Value;

use crate::cluster::build::CONFIG_FILE;

/// Minimum time between reports about a cluster.
const BETWEEN: Duration = Duration::from_secs(60);

/// Whether another operator manages a cluster, too.
#[derive(Default)]
pub(crate) struct Rival {
    /// Whether the cluster's configuration has named the coordinators of this operator.
    is_ours: bool,
    reported: Option<Instant>,
}

impl Rival {
    /// Observes the coordinators in the configuration of the cluster. Returns a report if another operator has replaced those of this one, which
    /// does not happen when an operator takes over the clusters of a deleted release.
    pub(crate) fn observe(&mut self, published: &[String], ours: &[String], now: Instant) -> Option<String> {
        if published == ours {
            self.is_ours = true;
            return None;
        }
        let is_recent = self.reported.is_some_and(|at| now.saturating_duration_since(at) < BETWEEN);
        if !self.is_ours || is_recent {
            return None;
        }
        self.reported = Some(now);
        Some(format!(
            "another operator, with coordinators {}, manages this cluster, too, and both undo each other's changes; uninstall one of them, \
             or give each watchNamespaces that do not overlap",
            published.join(", ")
        ))
    }
}

/// Returns the coordinators in the configuration that a cluster's workers read; `None` if it is not published.
pub(crate) fn published_coordinators(objects: &[Value]) -> Option<Vec<String>> {
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
        let (mut rival, start) = (Rival::default(), Instant::now());
        let (ours, theirs) = (vec!["a:7440".to_owned()], vec!["b:7440".to_owned()]);
        assert_eq!(rival.observe(&theirs, &ours, start), None, "a takeover");
        assert_eq!(rival.observe(&ours, &ours, start), None);
        let report = rival.observe(&theirs, &ours, start).expect("a report");
        assert!(report.contains("coordinators b:7440") && report.contains("watchNamespaces"), "{report}");
        assert_eq!(rival.observe(&ours, &ours, start), None);
        assert_eq!(rival.observe(&theirs, &ours, start), None, "once a minute");
        assert!(rival.observe(&theirs, &ours, start + BETWEEN).is_some());
        rival = Rival::default();
        assert_eq!(rival.observe(&theirs, &ours, start + BETWEEN * 2), None, "another replica wrote meanwhile");
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
