//! Queue of runs: one run at a time changes a cluster, the others wait in the order of creation, then of name.
//!
//! Workers enforce one run at a time; the operator determines the order: it submits a run when no other is ahead. Runs that are deleted,
//! suspended, invalid or finished are not in the queue.

use engram_api::status::{RunPhase, Truth, condition};

use crate::kube::stored_object::StoredObject as _;
use crate::learner_run::object::RunObject;

/// Sort key of a run in the queue.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct QueueOrder {
    /// Creation time, RFC 3339 in whole seconds of UTC, so that text order is time order.
    pub created: String,
    /// Name of the run.
    pub name: String,
}

impl QueueOrder {
    /// Returns the key of an object.
    pub fn of(run: &RunObject) -> Self {
        Self { created: run.created(), name: run.name().to_owned() }
    }
}

/// A run in the queue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Run {
    /// Sort key.
    pub order: QueueOrder,
    /// Name of its cluster.
    pub cluster: String,
    /// Whether it was submitted: submitted runs come first.
    pub is_submitted: bool,
}

impl Run {
    /// Returns the place of a run; `None` if it is not in the queue. `submitted` is whether it was submitted, which its status may not show
    /// yet.
    pub fn of(run: &RunObject, submitted: bool) -> Option<Self> {
        let is_over = matches!(run.status().phase, Some(RunPhase::Complete | RunPhase::Failed));
        let mut conditions = run.status().conditions.iter();
        let is_invalid = conditions.any(|it| it.kind == condition::ACCEPTED && it.status == Truth::False);
        let is_submitted = submitted || run.status().phase == Some(RunPhase::Running);
        let is_suspended = run.head().suspend && !is_submitted;
        if !run.is_managed_here() || is_over || is_invalid || is_suspended || !run.needs_turn() {
            return None;
        }
        Some(Self { order: QueueOrder::of(run), cluster: run.cluster().to_owned(), is_submitted })
    }

    /// Returns whether this run is ahead of `other`.
    fn is_before(&self, other: &QueueOrder) -> bool {
        self.order.name != other.name && (self.is_submitted || self.order < *other)
    }
}

/// Queue position of a waiting run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wait {
    /// Number of runs ahead.
    pub position: u32,
    /// Name of the run that is submitted or next.
    pub first: String,
}

/// Returns the position of the run at `order` in the queue of `cluster`; `None` if no run is ahead. `all` are the runs of its namespace.
pub fn wait(all: &[Run], cluster: &str, place: &QueueOrder) -> Option<Wait> {
    let mut before: Vec<&Run> = all.iter().filter(|run| run.cluster == cluster && run.is_before(place)).collect();
    before.sort_by_key(|run| (!run.is_submitted, &run.order));
    let first = before.first()?.order.name.clone();
    Some(Wait { position: u32::try_from(before.len()).unwrap_or(u32::MAX), first })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn object(name: &str, second: u32, more: &Value) -> RunObject {
        let mut object = json!({
            "metadata": { "name": name, "creationTimestamp": format!("2026-11-23T01:00:{second:02}Z") },
            "spec": { "clusterRef": { "name": "words" } },
        });
        for part in ["metadata", "spec", "status"] {
            for (field, value) in more[part].as_object().into_iter().flatten() {
                object[part][field] = value.clone();
            }
        }
        serde_json::from_value::<RunObject>(object).expect("an object")
    }

    fn condition(accepted: bool) -> Value {
        json!({
            "type": "Accepted", "status": if accepted { "True" } else { "False" }, "reason": "Invalid", "message": "",
            "observedGeneration": 1, "lastTransitionTime": "2026-11-23T01:00:00Z",
        })
    }

    fn waits(objects: &[RunObject], handed: &[&str], name: &str) -> Option<(u32, String)> {
        let is_handed = |object: &RunObject| handed.contains(&object.name());
        let all: Vec<Run> = objects.iter().filter_map(|object| Run::of(object, is_handed(object))).collect();
        let own = objects.iter().find(|it| it.name() == name).expect("the run exists");
        let position = wait(&all, "words", &QueueOrder::of(own));
        position.map(|wait| (wait.position, wait.first))
    }

    #[test]
    fn runs_queue_by_creation_time_then_name() {
        let none = json!({});
        let all = [object("b", 1, &none), object("c", 0, &none), object("a", 1, &none)];
        assert_eq!(waits(&all, &[], "c"), None);
        assert_eq!(waits(&all, &[], "a"), Some((1, "c".into())));
        assert_eq!(waits(&all, &[], "b"), Some((2, "c".into())));
        assert_eq!(waits(&[all[0].clone(), all[2].clone()], &[], "a"), None, "c was deleted");
        // A submitted run comes first, whatever its creation time.
        assert_eq!(waits(&all, &["b"], "b"), Some((2, "c".into())), "never asked for a submitted run");
        assert_eq!(waits(&all, &["b"], "c"), Some((1, "b".into())));
        assert_eq!(waits(&all, &["b"], "a"), Some((2, "b".into())));
    }

    #[test]
    fn finished_suspended_and_foreign_runs_are_not_queued() {
        let phase = |phase: &str| json!({ "status": { "phase": phase } });
        let refused = json!({ "status": { "conditions": [condition(false)] } });
        let suspended = json!({ "spec": { "suspend": true }, "status": { "phase": "Suspended" } });
        for more in [
            phase("Complete"),
            phase("Failed"),
            refused,
            suspended,
            json!({ "spec": { "managedBy": "kueue.x-k8s.io/multikueue" } }),
            json!({ "spec": { "clusterRef": { "name": "others" } } }),
            json!({ "spec": { "kind": "Snapshot" }, "status": { "phase": "Running" } }),
            json!({ "spec": { "kind": "Geodesic" }, "status": { "phase": "Running" } }),
            json!({ "metadata": { "deletionTimestamp": "2026-11-23T01:00:09Z" } }),
        ] {
            assert_eq!(waits(&[object("a", 0, &more), object("b", 1, &json!({}))], &[], "b"), None, "{more}");
        }
        // A run that is being suspended is still ahead.
        let stopping = json!({ "spec": { "suspend": true }, "status": { "phase": "Running" } });
        let others = [object("z", 5, &stopping), object("b", 1, &json!({}))];
        assert_eq!(waits(&others, &[], "b"), Some((1, "z".into())));
    }
}
