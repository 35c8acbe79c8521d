//! Whose turn it is: one run at a time changes a cluster, and the others wait in the order in which they were created, then by name.
//!
//! The workers hold to "one at a time" by themselves, whoever submits runs; the order is made here, where the objects are: a run is handed
//! over when no other is before it, and one that is deleted, suspended, refused or done is before nobody.

use engram_api::MANAGED_BY;
use engram_api::status::condition;
use serde_json::Value;

/// What the queue needs to know of a run.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Place {
    /// When the object was created, RFC 3339 in whole seconds of UTC: the text has the order of the time.
    pub created: String,
    /// Its name.
    pub name: String,
}

impl Place {
    /// Reads that of an object.
    pub fn of(object: &Value) -> Self {
        let text = |path: &str| object.pointer(path).and_then(Value::as_str).unwrap_or_default().to_owned();
        Self { created: text("/metadata/creationTimestamp"), name: text("/metadata/name") }
    }
}

/// A run as the queue sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Run {
    /// Its place.
    pub place: Place,
    /// Name of its cluster.
    pub cluster: String,
    /// Whether it has the turn, or was handed over to take it.
    pub is_handed_over: bool,
}

impl Run {
    /// Reads a `LearnerRun`; `None` where it waits for no turn. `handed` says whether it was handed over a moment ago, and its status may
    /// not say so yet.
    pub fn of(object: &Value, handed: bool) -> Option<Self> {
        let text = |path: &str| object.pointer(path).and_then(Value::as_str).unwrap_or_default();
        let is_foreign = !matches!(text("/spec/managedBy"), "" | MANAGED_BY);
        let is_gone = object.pointer("/metadata/deletionTimestamp").is_some();
        let phase = text("/status/phase");
        let is_over = matches!(phase, "Complete" | "Failed");
        let conditions = object.pointer("/status/conditions").and_then(Value::as_array);
        let is_refused = conditions
            .is_some_and(|all| all.iter().any(|it| it["type"] == condition::ACCEPTED && it["status"] == "False"));
        let is_handed_over = handed || phase == "Running";
        let is_held = object.pointer("/spec/suspend") == Some(&Value::Bool(true)) && !is_handed_over;
        if is_foreign || is_gone || is_over || is_refused || is_held || !needs_turn(object) {
            return None;
        }
        Some(Self { place: Place::of(object), cluster: text("/spec/clusterRef/name").to_owned(), is_handed_over })
    }

    /// Whether this run is before `other`.
    fn is_before(&self, other: &Place) -> bool {
        self.place.name != other.name && (self.is_handed_over || self.place < *other)
    }
}

/// Whether a run changes its cluster: a snapshot does not.
pub fn needs_turn(object: &Value) -> bool {
    object.pointer("/spec/kind").is_none_or(|kind| kind != "Snapshot")
}

/// Why a run waits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wait {
    /// Runs before it.
    pub position: u32,
    /// Name of the one that has the turn, or is to have it next.
    pub first: String,
}

/// Why the run at `place` waits for its turn at `cluster`; `None` where nobody is before it. `all` are the runs of its namespace.
pub fn wait(all: &[Run], cluster: &str, place: &Place) -> Option<Wait> {
    let mut before: Vec<&Run> = all.iter().filter(|run| run.cluster == cluster && run.is_before(place)).collect();
    before.sort_by_key(|run| (!run.is_handed_over, &run.place));
    let first = before.first()?.place.name.clone();
    Some(Wait { position: u32::try_from(before.len()).unwrap_or(u32::MAX), first })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn object(name: &str, second: u32, more: &Value) -> Value {
        let mut object = json!({
            "metadata": { "name": name, "creationTimestamp": format!("2026-11-23T01:00:{second:02}Z") },
            "spec": { "clusterRef": { "name": "words" } },
        });
        for part in ["metadata", "spec", "status"] {
            for (field, value) in more[part].as_object().into_iter().flatten() {
                object[part][field] = value.clone();
            }
        }
        object
    }

    fn waits(objects: &[Value], handed: &[&str], name: &str) -> Option<(u32, String)> {
        let is_handed = |object: &Value| handed.iter().any(|name| object["metadata"]["name"] == *name);
        let all: Vec<Run> = objects.iter().filter_map(|object| Run::of(object, is_handed(object))).collect();
        let own = objects.iter().find(|it| it["metadata"]["name"] == name).expect("it is there");
        let found = wait(&all, "words", &Place::of(own));
        found.map(|wait| (wait.position, wait.first))
    }

    #[test]
    fn runs_wait_in_the_order_of_their_creation_then_of_their_names() {
        let none = json!({});
        let all = [object("b", 1, &none), object("c", 0, &none), object("a", 1, &none)];
        assert_eq!(waits(&all, &[], "c"), None);
        assert_eq!(waits(&all, &[], "a"), Some((1, "c".into())));
        assert_eq!(waits(&all, &[], "b"), Some((2, "c".into())));
        assert_eq!(waits(&[all[0].clone(), all[2].clone()], &[], "a"), None, "c was deleted");
        // Who has the turn keeps it, and everybody else knows who that is.
        assert_eq!(waits(&all, &["b"], "b"), Some((2, "c".into())), "asked of nobody who was handed over");
        assert_eq!(waits(&all, &["b"], "c"), Some((1, "b".into())));
        assert_eq!(waits(&all, &["b"], "a"), Some((2, "b".into())));
    }

    #[test]
    fn a_run_that_needs_no_turn_is_before_nobody() {
        let phase = |phase: &str| json!({ "status": { "phase": phase } });
        let refused = json!({ "status": { "conditions": [{ "type": "Accepted", "status": "False" }] } });
        let suspended = json!({ "spec": { "suspend": true }, "status": { "phase": "Suspended" } });
        for more in [
            phase("Complete"),
            phase("Failed"),
            refused,
            suspended,
            json!({ "spec": { "managedBy": "kueue.x-k8s.io/multikueue" } }),
            json!({ "spec": { "clusterRef": { "name": "others" } } }),
            json!({ "spec": { "kind": "Snapshot" }, "status": { "phase": "Running" } }),
            json!({ "metadata": { "deletionTimestamp": "2026-11-23T01:00:09Z" } }),
        ] {
            assert_eq!(waits(&[object("a", 0, &more), object("b", 1, &json!({}))], &[], "b"), None, "{more}");
        }
        // While it is on its way to be suspended it still has the turn.
        let stopping = json!({ "spec": { "suspend": true }, "status": { "phase": "Running" } });
        let others = [object("z", 5, &stopping), object("b", 1, &json!({}))];
        assert_eq!(waits(&others, &[], "b"), Some((1, "z".into())));
    }
}
