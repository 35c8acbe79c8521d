//! Order between LearnerRuns (`spec.dependsOn`): whether a run may start, by the status of the runs on which it depends.

use engram_api::status::RunPhase;
use engram_api::{DependencyState, MANAGED_BY, Readiness, find_cycle, readiness};
use std::collections::BTreeMap;

use crate::kube::stored_object::StoredObject as _;
use crate::learner_run::object::RunObject;
use crate::learner_run::{RunState, failure_message};

/// Reason of a run that waits for others.
const WAITING: &str = "WaitingForDependencies";
/// Reason of a run whose dependencies are a cycle.
const CYCLE: &str = "DependencyCycle";
/// Reason of a run that is never started, because a dependency failed.
const FAILED: &str = "DependencyFailed";

/// Returns the state of the run `object` if it must not start yet, or never; `None` if it may. `runs` are all runs of its namespace, by
/// name.
pub(crate) fn held_back(run: &RunObject, runs: &BTreeMap<&str, &RunObject>) -> Option<RunState> {
    match readiness(&run.head().depends_on, |name| state(runs.get(name).copied())) {
        Readiness::Ready => None,
        Readiness::Impossible(message) => Some(RunState::Failed { reason: FAILED, message }),
        Readiness::Waiting(message) => Some(match cycle_of(run, runs) {
            Some(cycle) => RunState::Pending {
                reason: CYCLE,
                message: format!("spec.dependsOn is a cycle: {}; delete one of these runs", cycle.join(" -> ")),
            },
            None => RunState::Pending { reason: WAITING, message },
        }),
    }
}

/// Returns the state of a run as a dependency.
fn state(run: Option<&RunObject>) -> DependencyState {
    let Some(run) = run else { return DependencyState::Missing };
    // Another controller that runs it may write no completion time.
    let is_foreign = run.head().managed_by.as_deref().is_some_and(|by| by != MANAGED_BY);
    let has_ended = run.status().completion_time.is_some() || is_foreign;
    match run.status().phase {
        Some(RunPhase::Complete) if has_ended => DependencyState::Complete,
        Some(RunPhase::Failed) if has_ended => DependencyState::Failed(failure_message(run.status())),
        _ => DependencyState::Unfinished,
    }
}

/// Returns the cycle of dependencies that `run` is part of.
fn cycle_of(run: &RunObject, runs: &BTreeMap<&str, &RunObject>) -> Option<Vec<String>> {
    // Only what this run depends on, directly or not.
    let (mut graph, mut open) = (BTreeMap::new(), vec![run.name()]);
    while let Some(name) = open.pop() {
        let dependencies = runs.get(name).map_or(&[][..], |run| &run.head().depends_on);
        let on: Vec<&str> = dependencies.iter().map(|on| on.run.as_str()).collect();
        if graph.insert(name, on.clone()).is_none() {
            open.extend(on);
        }
    }
    find_cycle(&graph)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn run(name: &str, on: &[&str], phase: &str) -> RunObject {
        let depends_on: Vec<Value> = on.iter().map(|run| json!({ "run": run })).collect();
        let failed = json!([{
            "type": "Failed", "status": "True", "reason": "RunFailed", "message": "no such file", "observedGeneration": 1,
            "lastTransitionTime": "t",
        }]);
        let ended = matches!(phase, "Complete" | "Failed").then_some("2026-11-23T01:00:00Z");
        let phase = Some(phase).filter(|phase| !phase.is_empty());
        let conditions = if phase == Some("Failed") { failed } else { json!([]) };
        serde_json::from_value::<RunObject>(json!({
            "metadata": { "name": name }, "spec": { "dependsOn": depends_on },
            "status": { "phase": phase, "completionTime": ended, "conditions": conditions },
        }))
        .expect("an object")
    }

    fn held(objects: &[RunObject], name: &str) -> Option<(&'static str, String)> {
        let by_name: BTreeMap<&str, &RunObject> = objects.iter().map(|it| (it.name(), it)).collect();
        match held_back(by_name[name], &by_name)? {
            RunState::Pending { reason, message } | RunState::Failed { reason, message } => Some((reason, message)),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_run_is_held_until_its_dependencies_are_complete() {
        let objects = [
            run("train", &[], "Running"),
            run("data", &[], "Complete"),
            run("broken", &["data"], "Failed"),
            run("evaluate", &["data", "train"], "Pending"),
            run("early", &["absent"], "Pending"),
            run("doomed", &["broken"], "Pending"),
            run("free", &["data"], "Pending"),
        ];
        assert_eq!(held(&objects, "evaluate"), Some((WAITING, "waits for run train".into())));
        assert_eq!(held(&objects, "early"), Some((WAITING, "waits for run absent (does not exist)".into())));
        let message = "run broken, on which it depends, failed: no such file".into();
        assert_eq!(held(&objects, "doomed"), Some((FAILED, message)));
        assert_eq!(held(&objects, "free"), None);
    }

    #[test]
    fn a_cycle_is_reported_by_its_runs_and_by_what_waits_for_them() {
        let objects = [
            run("a", &["b"], "Pending"),
            run("b", &["a"], "Pending"),
            run("c", &["a"], "Pending"),
            run("d", &["e"], ""),
        ];
        let (reason, message) = held(&objects, "c").unwrap();
        assert_eq!(reason, CYCLE);
        assert!(message.contains("a -> b -> a"), "{message}");
        assert_eq!(held(&objects, "d").unwrap().0, WAITING);
    }
}
