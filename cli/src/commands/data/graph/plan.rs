//! What to do with each run of a graph: a pure decision from the previous runs of the same names.

use engram_api::{DependencyCondition, DependencyState, Readiness, RunDependency, readiness};
use std::collections::BTreeSet;

/// State of the cluster's run of a name before the graph is executed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Previous {
    pub(super) phase: PreviousPhase,
    /// Whether its specification is the one of the file.
    pub(super) is_same: bool,
}

/// Whether and how a previous run ended.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum PreviousPhase {
    #[default]
    Absent,
    Unfinished,
    Succeeded,
    Failed,
}

/// What to do with a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Action {
    /// Nothing: it has succeeded, and nothing that it depends on changes.
    Keep,
    /// Follow it: it has not ended.
    Follow,
    /// Continue it after a failure.
    Continue,
    /// Execute it; a run of its name that has ended is replaced.
    Execute,
    /// Nothing: `spec.suspend` is true.
    Suspend,
}

/// A run of a graph, as far as decisions need it.
#[derive(Debug, Clone)]
pub(super) struct PlannedRun {
    pub(super) name: String,
    pub(super) depends_on: Vec<RunDependency>,
    pub(super) is_suspended: bool,
    /// Whether it is of the files; other runs are only followed.
    pub(super) is_own: bool,
    pub(super) previous: Previous,
}

/// Which runs to execute again although nothing has changed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Rerun {
    Changed,
    All,
    /// This run, and the runs that depend on it.
    From(String),
}

/// Decides for each run, in an order in which every run follows its dependencies. `runs` have no cycle.
///
/// # Errors
/// A run that must be executed has a predecessor of its name that has not ended: returns its name.
pub(super) fn plan(runs: &[PlannedRun], rerun: &Rerun) -> Result<Vec<(usize, Action)>, String> {
    let mut plan: Vec<(usize, Action)> = Vec::with_capacity(runs.len());
    let mut executed: BTreeSet<&str> = BTreeSet::new();
    for index in order(runs) {
        let run = &runs[index];
        let is_forced = match rerun {
            Rerun::Changed => false,
            Rerun::All => true,
            Rerun::From(name) => *name == run.name,
        };
        let is_stale = is_forced || run.depends_on.iter().any(|on| executed.contains(on.run.as_str()));
        let action = action(run, is_stale).ok_or_else(|| run.name.clone())?;
        if matches!(action, Action::Execute | Action::Continue) {
            executed.insert(&run.name);
        }
        plan.push((index, action));
    }
    Ok(plan)
}

/// Returns what to do with one run, `None` if its predecessor has not ended. `is_stale` is whether its result is out of date.
const fn action(run: &PlannedRun, is_stale: bool) -> Option<Action> {
    let Previous { phase, is_same } = run.previous;
    let is_same = is_same && !is_stale;
    Some(match phase {
        _ if run.is_suspended && run.is_own => Action::Suspend,
        PreviousPhase::Unfinished if is_same || !run.is_own => Action::Follow,
        PreviousPhase::Unfinished => return None,
        _ if !run.is_own => Action::Keep,
        PreviousPhase::Succeeded if is_same => Action::Keep,
        PreviousPhase::Failed if is_same => Action::Continue,
        PreviousPhase::Absent | PreviousPhase::Succeeded | PreviousPhase::Failed => Action::Execute,
    })
}

/// Returns the indices of `runs`, dependencies first, otherwise in the order of the files.
fn order(runs: &[PlannedRun]) -> Vec<usize> {
    let (mut ordered, mut placed) = (Vec::with_capacity(runs.len()), BTreeSet::new());
    while ordered.len() < runs.len() {
        let before = ordered.len();
        for (index, run) in runs.iter().enumerate() {
            let is_free = |on: &RunDependency| placed.contains(&on.run) || runs.iter().all(|run| run.name != on.run);
            if !placed.contains(&run.name) && run.depends_on.iter().all(is_free) {
                placed.insert(run.name.clone());
                ordered.push(index);
            }
        }
        assert!(ordered.len() > before, "a graph without cycles always has a run whose dependencies are placed");
    }
    ordered
}

/// State of a run while a graph is executed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum RunState {
    /// Not started.
    Waiting,
    /// Started and not ended.
    Running,
    /// Held back by `spec.suspend`.
    Suspended,
    /// Succeeded in an earlier execution.
    Unchanged,
    Succeeded,
    /// Failed or cancelled, with the reason.
    Failed(String),
    /// Not started, because a run on which it depends failed.
    Skipped(String),
}

impl RunState {
    /// Returns the state as shown to users.
    pub(super) const fn as_str(&self) -> &'static str {
        match self {
            Self::Waiting => "Waiting",
            Self::Running => "Running",
            Self::Suspended => "Suspended",
            Self::Unchanged => "Unchanged",
            Self::Succeeded => "Succeeded",
            Self::Failed(_) => "Failed",
            Self::Skipped(_) => "Skipped",
        }
    }

    /// Returns the reason of a failure.
    pub(super) fn reason(&self) -> &str {
        match self {
            Self::Failed(reason) | Self::Skipped(reason) => reason,
            _ => "",
        }
    }

    fn as_dependency(&self) -> DependencyState {
        match self {
            Self::Unchanged | Self::Succeeded => DependencyState::Complete,
            Self::Failed(reason) | Self::Skipped(reason) => DependencyState::Failed(reason.clone()),
            Self::Waiting | Self::Running | Self::Suspended => DependencyState::Unfinished,
        }
    }
}

/// Skips waiting runs whose dependencies have failed, until nothing changes. Returns their indices, and those of the waiting runs that
/// can start now.
pub(super) fn advance(runs: &[PlannedRun], states: &mut [RunState]) -> (Vec<usize>, Vec<usize>) {
    let mut skipped = Vec::new();
    loop {
        let before = skipped.len();
        let mut ready = Vec::new();
        for (index, run) in runs.iter().enumerate().filter(|(_, run)| run.is_own) {
            if states[index] != RunState::Waiting {
                continue;
            }
            let state = |name: &str| {
                let at = runs.iter().position(|run| run.name == name);
                at.map_or(DependencyState::Missing, |at| states[at].as_dependency())
            };
            match readiness(&run.depends_on, state) {
                Readiness::Ready => ready.push(index),
                Readiness::Waiting(_) => {}
                Readiness::Impossible(reason) => {
                    states[index] = RunState::Skipped(reason);
                    skipped.push(index);
                }
            }
        }
        if skipped.len() == before {
            return (skipped, ready);
        }
    }
}

/// Describes the dependencies of a run: `load, train (ended)`.
pub(super) fn dependency_list(dependencies: &[RunDependency]) -> String {
    let one = |on: &RunDependency| match on.condition {
        DependencyCondition::Complete => on.run.clone(),
        DependencyCondition::Ended => format!("{} (ended)", on.run),
    };
    dependencies.iter().map(one).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(name: &str, on: &[&str], phase: PreviousPhase, is_same: bool) -> PlannedRun {
        let complete = |run: &&str| RunDependency { run: (*run).into(), condition: DependencyCondition::Complete };
        PlannedRun {
            name: name.into(),
            depends_on: on.iter().map(complete).collect(),
            is_suspended: false,
            is_own: true,
            previous: Previous { phase, is_same },
        }
    }

    fn actions(runs: &[PlannedRun], rerun: &Rerun) -> Vec<(String, Action)> {
        let plan = plan(runs, rerun).unwrap();
        plan.into_iter().map(|(index, action)| (runs[index].name.clone(), action)).collect()
    }

    #[test]
    fn only_what_changed_and_what_depends_on_it_is_executed_again() {
        use Action::{Continue, Execute, Keep};
        use PreviousPhase::{Absent, Failed, Succeeded};
        let runs = [
            run("report", &["left", "right"], Absent, false),
            run("left", &["load"], Succeeded, true),
            run("right", &["load"], Failed, true),
            run("load", &[], Succeeded, true),
        ];
        let named = |list: &[(&str, Action)]| -> Vec<(String, Action)> {
            list.iter().map(|(name, action)| ((*name).to_owned(), *action)).collect()
        };
        assert_eq!(
            actions(&runs, &Rerun::Changed),
            named(&[("load", Keep), ("left", Keep), ("right", Continue), ("report", Execute)])
        );
        assert_eq!(
            actions(&runs, &Rerun::From("left".into())),
            named(&[("load", Keep), ("left", Execute), ("right", Continue), ("report", Execute)])
        );
        assert!(actions(&runs, &Rerun::All).iter().all(|(_, action)| *action == Execute));
        let mut changed = runs;
        changed[3].previous.is_same = false;
        assert!(actions(&changed, &Rerun::Changed).iter().all(|(_, action)| *action == Execute));
    }

    #[test]
    fn a_run_that_has_not_ended_is_followed_if_it_is_the_same_and_never_replaced() {
        let same = [run("a", &[], PreviousPhase::Unfinished, true)];
        assert_eq!(plan(&same, &Rerun::Changed), Ok(vec![(0, Action::Follow)]));
        assert_eq!(plan(&same, &Rerun::All), Err("a".into()));
        let other = [run("a", &[], PreviousPhase::Unfinished, false)];
        assert_eq!(plan(&other, &Rerun::Changed), Err("a".into()));
    }

    #[test]
    fn a_failure_skips_what_depends_on_it_and_nothing_else() {
        let absent = |name, on: &[&str]| run(name, on, PreviousPhase::Absent, false);
        let mut runs = vec![
            absent("a", &[]),
            absent("b", &["a"]),
            absent("c", &["b"]),
            absent("d", &["a"]),
            absent("cleanup", &["c"]),
        ];
        runs[4].depends_on[0].condition = DependencyCondition::Ended;
        let mut states = vec![RunState::Waiting; 5];
        assert_eq!(advance(&runs, &mut states), (vec![], vec![0]));
        states[0] = RunState::Succeeded;
        assert_eq!(advance(&runs, &mut states), (vec![], vec![1, 3]));
        states[1] = RunState::Failed("no such file".into());
        assert_eq!(advance(&runs, &mut states), (vec![2], vec![3, 4]));
        assert_eq!(states[2].reason(), "run b, on which it depends, failed: no such file");
    }
}
