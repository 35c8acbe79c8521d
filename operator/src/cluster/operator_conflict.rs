//! Detects another operator that manages the same clusters: two releases that watch one namespace undo each other's changes.

use std::time::{Duration, Instant};

/// Minimum time between reports about a cluster.
const BETWEEN: Duration = Duration::from_secs(60);

/// Whether another operator manages a cluster, too.
#[derive(Default)]
pub(crate) struct OperatorConflict {
    /// Whether the cluster's configuration has named the coordinators of this operator.
    is_ours: bool,
    reported: Option<Instant>,
}

impl OperatorConflict {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_operator_is_reported_and_a_takeover_is_not() {
        let (mut conflict, start) = (OperatorConflict::default(), Instant::now());
        let (ours, theirs) = (vec!["a:7440".to_owned()], vec!["b:7440".to_owned()]);
        assert_eq!(conflict.observe(&theirs, &ours, start), None, "a takeover");
        assert_eq!(conflict.observe(&ours, &ours, start), None);
        let report = conflict.observe(&theirs, &ours, start).expect("a report");
        assert!(report.contains("coordinators b:7440") && report.contains("watchNamespaces"), "{report}");
        assert_eq!(conflict.observe(&ours, &ours, start), None);
        assert_eq!(conflict.observe(&theirs, &ours, start), None, "once a minute");
        assert!(conflict.observe(&theirs, &ours, start + BETWEEN).is_some());
        conflict = OperatorConflict::default();
        assert_eq!(conflict.observe(&theirs, &ours, start + BETWEEN * 2), None, "another replica wrote meanwhile");
    }
}
