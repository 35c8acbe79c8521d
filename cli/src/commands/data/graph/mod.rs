//! Runs that depend on others: executed in their order, the independent ones at the same time.
//!
//! ```text
//! files -> runs with dependencies -> plan (what changed) -> submit what is ready -> outcome -> next ...
//! ```
//!
//! Workers do not order runs; on a local cluster this command submits each run when it may start. In Kubernetes it creates all objects
//! and the operator holds them back.

mod local;
mod objects;
mod plan;

use super::run;
use crate::commands::manifest;
use crate::context::Context;
use crate::error::{failure, problem};
use crate::output::{Output, Table};
use crate::progress::Progress;
use crate::target::{Local, Target};
use engram_api::{Code, ExitCode, LearnerRun, Manifest, Requirement, find_cycle};
use engram_client::Client;
use plan::{Action, PlannedRun, Previous, Rerun, RunState};
use serde_json::json;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Suffixes of manifests in a folder.
const EXTENSIONS: [&str; 3] = ["yaml", "yml", "json"];

/// Which runs to execute again.
#[derive(Debug, Clone, Default)]
pub(crate) struct Selection {
    pub(crate) all: bool,
    pub(crate) from: Option<String>,
}

impl Selection {
    fn rerun(self) -> Rerun {
        match self {
            Self { all: true, .. } => Rerun::All,
            Self { from: Some(name), .. } => Rerun::From(name),
            Self { .. } => Rerun::Changed,
        }
    }
}

/// Returns whether these runs are executed as a graph: an order between them is declared, or retries, or one is of kind `Job`, which this
/// command executes.
pub(crate) fn is_graph(runs: &[LearnerRun]) -> bool {
    runs.iter().any(|run| !run.spec.depends_on.is_empty() || run.spec.backoff_limit > 0 || run.spec.job.is_some())
}

/// Reads the manifests at `path`: a file, or all manifests of a folder in the order of their names.
///
/// # Errors
/// A file is invalid, or the folder has no run.
pub(crate) fn read(path: &Path) -> anyhow::Result<Vec<Manifest>> {
    if !path.is_dir() {
        return Ok(vec![manifest::read(path, Requirement::Runs)?]);
    }
    let unreadable =
        |error: std::io::Error| problem(Code::SourceUnreadable, format!("failed to read {}: {error}", path.display()));
    let entries: Result<Vec<_>, _> = std::fs::read_dir(path).map_err(unreadable)?.collect();
    let is_manifest = |file: &PathBuf| {
        file.is_file() && file.extension().and_then(|it| it.to_str()).is_some_and(|it| EXTENSIONS.contains(&it))
    };
    let mut files: Vec<PathBuf> = entries.map_err(unreadable)?.into_iter().map(|entry| entry.path()).collect();
    files.retain(is_manifest);
    files.sort();
    let read = files.iter().map(|file| manifest::read(file, Requirement::Anything));
    let manifests = read.collect::<anyhow::Result<Vec<_>>>()?;
    if manifests.iter().all(|manifest| manifest.runs.is_empty()) {
        let message =
            format!("{} has no LearnerRun in a .yaml, .yml or .json file; needed: at least one", path.display());
        return Err(problem(Code::NotAManifest, message));
    }
    Ok(manifests)
}

/// A graph of runs.
pub(crate) struct RunGraph {
    runs: Vec<PlannedRun>,
    /// The runs of the files, by index; runs of the cluster on which they depend have none.
    submissions: BTreeMap<usize, LearnerRun>,
}

impl RunGraph {
    /// Builds the graph of the runs of `manifests`. On a local cluster paths become absolute.
    ///
    /// # Errors
    /// A name occurs twice, dependencies are a cycle, or a field is not supported by local clusters.
    pub(crate) fn new(manifests: &[Manifest], is_local: bool) -> anyhow::Result<Self> {
        let (mut runs, mut submissions): (Vec<PlannedRun>, _) = (Vec::new(), BTreeMap::new());
        for (manifest, object) in
            manifests.iter().flat_map(|manifest| manifest.runs.iter().map(move |run| (manifest, run)))
        {
            let name = &object.metadata.name;
            if runs.iter().any(|run| run.name == *name) {
                let message = format!("metadata.name is {name} in two of the files; names must be unique");
                return Err(problem(Code::NotAManifest, message));
            }
            let spec = if is_local { run::absolute(manifest, &object.spec)? } else { object.spec.clone() };
            submissions.insert(runs.len(), LearnerRun { spec, ..object.clone() });
            runs.push(PlannedRun {
                name: name.clone(),
                depends_on: object.spec.depends_on.clone(),
                is_suspended: object.spec.suspend,
                is_own: true,
                previous: Previous::default(),
            });
        }
        let edges = runs
            .iter()
            .map(|run| (run.name.as_str(), run.depends_on.iter().map(|on| on.run.as_str()).collect::<Vec<_>>()));
        if let Some(cycle) = find_cycle(&edges.collect()) {
            let message =
                format!("spec.dependsOn is a cycle: {}; allowed: an order without cycles", cycle.join(" -> "));
            return Err(problem(Code::Conflicting, message));
        }
        Ok(Self { runs, submissions })
    }

    /// Adds the runs of the cluster on which runs of the files depend, and the previous runs of all names. `previous` returns that of a
    /// name and specification; without a specification, of any.
    ///
    /// # Errors
    /// A run depends on one that neither the files nor the cluster have.
    fn add_previous(&mut self, previous: impl Fn(&str, Option<&LearnerRun>) -> Previous) -> anyhow::Result<()> {
        for (index, run) in self.runs.iter_mut().enumerate() {
            run.previous = previous(&run.name, self.submissions.get(&index));
        }
        let edges = self.runs.iter().flat_map(|run| run.depends_on.iter().map(|on| (run.name.clone(), on.run.clone())));
        for (name, dependency) in edges.collect::<Vec<_>>() {
            if self.runs.iter().any(|run| run.name == dependency) {
                continue;
            }
            let previous = previous(&dependency, None);
            if previous.phase == plan::PreviousPhase::Absent {
                let message = format!(
                    "spec.dependsOn of run {name} has {dependency}, but neither the files nor the cluster have a run of that name"
                );
                return Err(problem(Code::Conflicting, message));
            }
            let depends_on = Vec::new();
            self.runs.push(PlannedRun { name: dependency, depends_on, is_suspended: false, is_own: false, previous });
        }
        Ok(())
    }

    /// Decides what to do with each run.
    fn plan(&self, selection: Selection, output: &Output) -> anyhow::Result<Vec<(usize, Action)>> {
        let rerun = selection.rerun();
        if let Rerun::From(name) = &rerun
            && !self.runs.iter().any(|run| run.is_own && run.name == *name)
        {
            let names: Vec<&str> = self.runs.iter().filter(|run| run.is_own).map(|run| run.name.as_str()).collect();
            let message = format!("--rerun-from is {name}; allowed: a run of the file: {}", names.join(", "));
            return Err(failure(ExitCode::Usage, message));
        }
        let plan = plan::plan(&self.runs, &rerun).map_err(|name| {
            let message = format!(
                "run {name} has not ended and must be executed again: wait for it, or cancel it ({})",
                output.command_line(&format!("describe run {name}"))
            );
            failure(ExitCode::Conflict, message)
        })?;
        let plural = if self.submissions.len() == 1 { "" } else { "s" };
        let mut text = format!("graph of {} run{plural}:", self.submissions.len());
        for (index, action) in plan.iter().filter(|(index, _)| self.runs[*index].is_own) {
            let run = &self.runs[*index];
            let after = if run.depends_on.is_empty() {
                String::new()
            } else {
                format!("after {}", plan::dependency_list(&run.depends_on))
            };
            let what = match action {
                Action::Keep => "unchanged",
                Action::Follow => "in progress",
                Action::Continue => "continues",
                Action::Execute => "",
                Action::Suspend => "suspended",
            };
            let parts: Vec<&str> = [what, after.as_str()].into_iter().filter(|part| !part.is_empty()).collect();
            text.push_str(format!("\n  {:<24} {}", run.name, parts.join(", ")).trim_end());
        }
        output.note(text);
        Ok(plan)
    }
}

/// Progress and outcome of an execution.
struct Execution<'a> {
    graph: &'a RunGraph,
    states: Vec<RunState>,
    /// Last known progress of running runs: `epoch 3/50`.
    details: BTreeMap<usize, String>,
    progress: Progress,
    output: &'a Output,
}

impl<'a> Execution<'a> {
    fn new(graph: &'a RunGraph, states: Vec<RunState>, output: &'a Output) -> Self {
        let progress = Progress::new(output, "runs", Some(graph.submissions.len() as u64));
        Self { graph, states, details: BTreeMap::new(), progress, output }
    }

    /// Sets the state of a run and reports the change.
    fn set(&mut self, index: usize, state: RunState) {
        if self.states[index] == state {
            return;
        }
        let reason = if state.reason().is_empty() { String::new() } else { format!(": {}", state.reason()) };
        let text = format!("run {}: {}{reason}", self.graph.runs[index].name, state.as_str().to_lowercase());
        self.progress.note(self.output, &text);
        self.states[index] = state;
        self.show();
    }

    /// Sets the details of a running run.
    fn set_detail(&mut self, index: usize, detail: String) {
        self.details.insert(index, detail);
        self.show();
    }

    fn show(&mut self) {
        let is_open = |state: &RunState| matches!(state, RunState::Waiting | RunState::Running | RunState::Suspended);
        let own = || self.graph.submissions.keys().copied();
        let done = own().filter(|index| !is_open(&self.states[*index])).count();
        let running: Vec<String> = own()
            .filter(|index| self.states[*index] == RunState::Running)
            .map(|index| format!("{} {}", self.graph.runs[index].name, self.details.get(&index).map_or("", |it| it)))
            .collect();
        self.progress.set(done as u64, running.join(", ").trim_end());
    }

    /// Prints the outcome of every run.
    ///
    /// # Errors
    /// A run has failed or was not executed.
    fn finish(self) -> anyhow::Result<()> {
        let Self { graph, states, output, progress, .. } = self;
        drop(progress);
        let mut table = Table::new(&["run", "state", "after", "message"]);
        let mut items = Vec::new();
        for index in graph.submissions.keys().copied() {
            let (run, state) = (&graph.runs[index], &states[index]);
            let after = plan::dependency_list(&run.depends_on);
            table.row([run.name.as_str(), state.as_str(), after.as_str(), state.reason()]);
            let names: Vec<&str> = run.depends_on.iter().map(|on| on.run.as_str()).collect();
            items.push(
                json!({ "run": run.name, "state": state.as_str(), "dependsOn": names, "message": state.reason() }),
            );
        }
        output.list(&items, &table)?;
        let own = || graph.submissions.keys().map(|index| &states[*index]);
        let failed = own().filter(|state| matches!(state, RunState::Failed(_))).count();
        let skipped = own().filter(|state| matches!(state, RunState::Skipped(_))).count();
        let open = own().filter(|state| matches!(state, RunState::Waiting | RunState::Suspended)).count();
        if failed + skipped > 0 {
            return Err(problem(Code::RunFailed, format!("{failed} runs failed, {skipped} were skipped")));
        }
        if open > 0 {
            output.note(format!("{open} runs are suspended, or depend on suspended runs, and were not executed"));
        }
        Ok(())
    }
}

/// Executes a graph with the command `run`.
///
/// # Errors
/// A run fails, or the cluster does not respond.
pub(crate) async fn execute_files(
    manifests: &[Manifest],
    (selection, no_wait): (Selection, bool),
    (target, client): (&Target, &Client),
    context: &Context,
) -> anyhow::Result<()> {
    let is_local = matches!(target, Target::Local(_));
    let mut graph = RunGraph::new(manifests, is_local)?;
    if let Target::Kubernetes(cluster) = target {
        return objects::execute(cluster, &mut graph, selection, no_wait, context).await;
    }
    if no_wait {
        let message = "--no-wait excludes dependsOn, backoffLimit and kind Job on a local cluster: this command submits each run when it may \
                       start, and processes of jobs belong to it";
        return Err(problem(Code::NotSupported, message));
    }
    let executor = local::Executor { client, target };
    local::execute_until_interrupted(executor, &mut graph, selection, context).await
}

/// Executes the graph of a manifest with the command `up`, which handles signals.
///
/// # Errors
/// A run fails, or the cluster does not respond.
pub(crate) async fn execute(
    client: &Client,
    local: &Local,
    manifest: &Manifest,
    context: &Context,
) -> anyhow::Result<()> {
    let mut graph = RunGraph::new(std::slice::from_ref(manifest), true)?;
    let target = Target::Local(local.clone());
    let executor = local::Executor { client, target: &target };
    local::execute(executor, &mut graph, Selection::default(), &context.output).await
}
