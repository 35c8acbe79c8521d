//! Order between runs: `spec.dependsOn`, the graph that it makes, and when a run may start.
//!
//! The same decisions apply to `engram run`, `engram up` and the operator, which differ in how they know the state of other runs.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

use super::LearnerRunSpec;
use crate::manifest_enum::words;
use crate::object::MAX_NAME_LENGTH;

/// Delay before the first retry of a failed run, in seconds; it doubles with each further one.
const FIRST_RETRY_SECONDS: u64 = 1;
/// Longest delay before a retry, in seconds: that of a Kubernetes Job.
const LONGEST_RETRY_SECONDS: u64 = 360;

/// A run that must reach a condition before another one starts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct RunDependency {
    /// Name of the run, in the same namespace.
    #[schemars(length(max = MAX_NAME_LENGTH), extend("format" = "engram-name"), example = &"train")]
    pub run: String,

    /// Condition that the run must reach.
    #[serde(default)]
    pub condition: DependencyCondition,
}

words! {
    /// Condition that a run must reach.
    #[derive(Default)]
    pub enum DependencyCondition {
        /// The run has succeeded. If it fails, the run that depends on it fails, too, without being started.
        #[default]
        Complete,
        /// The run has ended, successfully or not.
        Ended,
    }
}

/// State of a run on which others depend.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DependencyState {
    /// It does not exist.
    Missing,
    /// It has not ended.
    Unfinished,
    /// It has succeeded.
    Complete,
    /// It has failed or was cancelled, with the reason.
    Failed(String),
}

/// Whether a run may start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Readiness {
    /// All dependencies have the conditions that the run requires.
    Ready,
    /// It waits for runs, as a message names them.
    Waiting(String),
    /// It can never start: a dependency has failed.
    Impossible(String),
}

/// Returns whether a run with these dependencies may start; `state` returns the state of a run.
pub fn readiness(dependencies: &[RunDependency], state: impl Fn(&str) -> DependencyState) -> Readiness {
    let mut waits = Vec::new();
    for RunDependency { run, condition } in dependencies {
        match (state(run), condition) {
            (DependencyState::Complete, _) | (DependencyState::Failed(_), DependencyCondition::Ended) => {}
            (DependencyState::Failed(reason), DependencyCondition::Complete) => {
                let reason = if reason.is_empty() { String::new() } else { format!(": {reason}") };
                return Readiness::Impossible(format!("run {run}, on which it depends, failed{reason}"));
            }
            (DependencyState::Missing, _) => waits.push(format!("{run} (does not exist)")),
            (DependencyState::Unfinished, _) => waits.push(run.clone()),
        }
    }
    match &waits[..] {
        [] => Readiness::Ready,
        [run] => Readiness::Waiting(format!("waits for run {run}")),
        runs => Readiness::Waiting(format!("waits for runs {}", runs.join(", "))),
    }
}

/// Returns the delay before retry number `retry`, from 1, in seconds.
pub fn retry_delay_seconds(retry: u32) -> u64 {
    let doublings = retry.saturating_sub(1).min(20);
    (FIRST_RETRY_SECONDS << doublings).min(LONGEST_RETRY_SECONDS)
}

/// Returns the names of a cycle of dependencies, beginning and ending with the same run; `None` if there is none. `graph` has the
/// names on which each run depends; names without an entry depend on nothing.
pub fn find_cycle(graph: &BTreeMap<&str, Vec<&str>>) -> Option<Vec<String>> {
    let mut finished: BTreeMap<&str, bool> = BTreeMap::new();
    for start in graph.keys() {
        // Depth first, without recursion: (run, next dependency to visit).
        let mut path: Vec<(&str, usize)> = vec![(start, 0)];
        while let Some((run, next)) = path.last_mut() {
            let run = *run;
            let dependency = graph.get(run).and_then(|names| names.get(*next)).copied();
            *next += 1;
            let Some(dependency) = dependency.filter(|_| finished.get(run) != Some(&true)) else {
                finished.insert(run, true);
                path.pop();
                continue;
            };
            if let Some(at) = path.iter().position(|(on_path, _)| *on_path == dependency) {
                let cycle = path[at..].iter().map(|(name, _)| *name).chain([dependency]);
                return Some(cycle.map(str::to_owned).collect());
            }
            path.push((dependency, 0));
        }
    }
    None
}

impl LearnerRunSpec {
    /// Returns the specification that workers receive: without the order between runs, which its submitter has carried out.
    #[must_use]
    pub fn without_order(&self) -> Self {
        Self { depends_on: Vec::new(), backoff_limit: 0, ..self.clone() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn on(run: &str, condition: DependencyCondition) -> RunDependency {
        RunDependency { run: run.into(), condition }
    }

    #[test]
    fn a_run_starts_when_its_dependencies_have_their_conditions() {
        let state = |name: &str| match name {
            "done" => DependencyState::Complete,
            "broken" => DependencyState::Failed("no such file".into()),
            "running" => DependencyState::Unfinished,
            _ => DependencyState::Missing,
        };
        let of = |dependencies: &[RunDependency]| readiness(dependencies, state);
        let complete = |run| on(run, DependencyCondition::Complete);
        assert_eq!(of(&[]), Readiness::Ready);
        assert_eq!(of(&[complete("done"), on("broken", DependencyCondition::Ended)]), Readiness::Ready);
        assert_eq!(of(&[complete("done"), complete("running")]), Readiness::Waiting("waits for run running".into()));
        assert_eq!(
            of(&[complete("running"), complete("absent")]),
            Readiness::Waiting("waits for runs running, absent (does not exist)".into())
        );
        // A failure is final, whatever else is unfinished.
        let failed = Readiness::Impossible("run broken, on which it depends, failed: no such file".into());
        assert_eq!(of(&[complete("running"), complete("broken")]), failed);
    }

    #[test]
    fn a_cycle_is_named_in_its_order() {
        let cycle = |edges: &[(&'static str, &[&'static str])]| {
            let graph = edges.iter().map(|(run, names)| (*run, names.to_vec())).collect();
            find_cycle(&graph).map(|names| names.join(" -> "))
        };
        assert_eq!(cycle(&[("a", &[]), ("b", &["a"]), ("c", &["a", "b"]), ("d", &["b", "c", "elsewhere"])]), None);
        assert_eq!(cycle(&[("a", &["a"])]).as_deref(), Some("a -> a"));
        assert_eq!(
            cycle(&[("a", &["b"]), ("b", &["c"]), ("c", &["d", "b"]), ("d", &[])]).as_deref(),
            Some("b -> c -> b")
        );
    }

    #[test]
    fn retries_back_off_to_a_limit() {
        assert_eq!([1, 2, 3, 9, 10, 100].map(retry_delay_seconds), [1, 2, 4, 256, 360, 360]);
    }
}
