//! Execution of a graph in Kubernetes: all objects are created, and the operator starts each when its dependencies have ended.

use super::plan::{Action, Previous, PreviousPhase, RunState};
use super::{Execution, RunGraph, Selection};
use crate::context::Context;
use crate::kubernetes::Cluster;
use crate::kubernetes::runs::{ObjectState, RunObject};
use engram_api::LearnerRun;
use std::collections::BTreeMap;
use std::time::Duration;

/// Poll interval of the objects' status, which the operator renews every second.
const POLL_INTERVAL: Duration = Duration::from_millis(500);

/// Creates the objects of a graph, dependencies first, and follows them until all have ended.
///
/// # Errors
/// A run fails, or the API server rejects a request.
pub(super) async fn execute(
    cluster: &Cluster,
    graph: &mut RunGraph,
    selection: Selection,
    no_wait: bool,
    context: &Context,
) -> anyhow::Result<()> {
    let names = graph
        .runs
        .iter()
        .flat_map(|run| std::iter::once(run.name.clone()).chain(run.depends_on.iter().map(|on| on.run.clone())));
    let mut existing: BTreeMap<String, RunObject> = BTreeMap::new();
    for name in names.collect::<Vec<_>>() {
        if let Some(object) = cluster.run_object(&name).await? {
            existing.insert(name, object);
        }
    }
    graph.add_previous(|name, run| previous(existing.get(name), run))?;
    let plan = graph.plan(selection, &context.output)?;
    for (index, action) in &plan {
        let Some(run) = graph.submissions.get(index) else { continue };
        match action {
            Action::Keep | Action::Follow => {}
            Action::Suspend if existing.contains_key(&run.metadata.name) => {}
            Action::Suspend | Action::Continue | Action::Execute => drop(cluster.recreate_run(run).await?),
        }
    }
    if no_wait {
        let list = context.output.command_line("list runs");
        context.output.note(format!("created the runs; show their progress: {list}"));
        return Ok(());
    }
    let states = vec![RunState::Waiting; graph.runs.len()];
    let mut execution = Execution::new(graph, states, &context.output);
    for (index, action) in plan {
        match action {
            Action::Keep => execution.states[index] = RunState::Unchanged,
            Action::Suspend => execution.states[index] = RunState::Suspended,
            Action::Follow | Action::Continue | Action::Execute => {}
        }
    }
    loop {
        let is_open = |index: &usize| matches!(execution.states[*index], RunState::Waiting | RunState::Running);
        let open: Vec<usize> = graph.submissions.keys().copied().filter(is_open).collect();
        let mut is_moving = false;
        for index in open {
            let Some(object) = cluster.run_object(&graph.runs[index].name).await? else {
                execution.set(index, RunState::Failed("the object was deleted".into()));
                continue;
            };
            is_moving |= !waits_for_suspended(graph, &execution.states, index);
            let state = match object.state {
                ObjectState::Waiting => RunState::Waiting,
                ObjectState::Running(detail) => {
                    execution.set(index, RunState::Running);
                    execution.set_detail(index, detail);
                    continue;
                }
                ObjectState::Complete => RunState::Succeeded,
                ObjectState::Skipped(reason) => RunState::Skipped(reason),
                ObjectState::Failed(reason) => RunState::Failed(reason),
            };
            execution.set(index, state);
        }
        if !is_moving {
            return execution.finish();
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}

/// Returns whether a waiting run waits for a suspended one, so that it does not start.
fn waits_for_suspended(graph: &RunGraph, states: &[RunState], index: usize) -> bool {
    states[index] == RunState::Waiting
        && graph.runs[index].depends_on.iter().any(|on| {
            let at = graph.runs.iter().position(|run| run.name == on.run);
            at.is_some_and(|at| states[at] == RunState::Suspended || waits_for_suspended(graph, states, at))
        })
}

fn previous(existing: Option<&RunObject>, run: Option<&LearnerRun>) -> Previous {
    let Some(object) = existing else { return Previous::default() };
    let phase = match &object.state {
        ObjectState::Complete => PreviousPhase::Succeeded,
        ObjectState::Failed(_) | ObjectState::Skipped(_) => PreviousPhase::Failed,
        ObjectState::Waiting | ObjectState::Running(_) => PreviousPhase::Unfinished,
    };
    Previous { phase, is_same: run.is_none_or(|run| object.is_same(&run.spec)) }
}
