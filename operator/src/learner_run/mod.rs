//! LearnerRuns: validation, queue, submission, jobs, status and cleanup.

pub(crate) mod cleanup;
pub(crate) mod dependency;
pub(crate) mod ended;
pub(crate) mod error;
pub(crate) mod jobs;
pub(crate) mod metrics;
pub mod object;
pub mod queue;
pub(crate) mod reconcile;
pub(crate) mod state;
pub(crate) mod status;
pub(crate) mod submission;

use engram_api::{LearnerRunSpec, parse_object};

use crate::cluster::validate::InvalidSpec;
use crate::kube::stored_object::StoredObject as _;
use crate::learner_run::object::RunObject;

pub use ended::{EndedRun, RunEvent, RunResult, run_event};
pub use state::{Retry, RunReport, RunState};
pub use status::{failure_message, is_backing_off, is_over, next_retry, run_status};

/// Checks a run and fills in the defaults of its spec.
///
/// # Errors
/// Returns all problems, including sources that a pod cannot read.
pub fn validate_run(run: &RunObject) -> Result<LearnerRunSpec, InvalidSpec> {
    let manifest = parse_object(&run.manifest()).map_err(|problems| {
        let sentences: Vec<&str> = problems.iter().map(|problem| problem.message()).collect();
        InvalidSpec { message: sentences.join("; ") }
    })?;
    let run =
        manifest.runs.into_iter().next().ok_or_else(|| InvalidSpec { message: "kind is not LearnerRun".into() })?;
    Ok(run.spec)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn sources_that_pods_cannot_read_are_rejected() {
        let run = |source: Value| {
            validate_run(&serde_json::from_value::<RunObject>(json!({
                "apiVersion": "engram.dev/v1alpha1", "kind": "LearnerRun", "metadata": { "name": "r", "namespace": "n" },
                "spec": { "clusterRef": { "name": "words" }, "kind": "Memory", "memory": { "source": source } },
            })).expect("an object"))
        };
        assert!(run(json!({ "example": { "name": "StateOfTheUnion" } })).is_ok());
        let columns = json!({ "key": "word", "epoch": "address" });
        let file = json!({ "name": "sales", "key": "events.csv" });
        assert!(run(json!({ "events": { "configMap": file, "columns": columns } })).is_ok());
        let stored = json!({ "url": "s3://events/a.csv", "secretRef": { "name": "s3" } });
        assert!(run(json!({ "events": { "s3": stored, "columns": columns } })).is_ok());
        assert!(run(json!({ "events": { "input": "corpus", "path": "events.csv", "columns": columns } })).is_ok());
        for (source, settings, expected) in [
            ("git", json!({ "path": "/src" }), "spec.memory.source.git is not supported yet"),
            (
                "events",
                json!({ "path": "/src/events.csv", "columns": columns }),
                "events.path without input is a local file",
            ),
            ("events", json!({ "input": "corpus", "path": "../a.csv", "columns": columns }), "inside the volume"),
        ] {
            let refused = run(json!({ source: settings })).expect_err("pods cannot read it").message;
            assert!(refused.contains(expected), "{refused}");
        }
    }
}
