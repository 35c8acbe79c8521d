//! Execution of a graph by submitting each run to the workers when it may start; processes of jobs are started here.

use super::plan::{self, Action, Previous, PreviousPhase, RunState};
use super::{Execution, RunGraph, Selection};
use crate::commands::data::{job, run};
use crate::context::Context;
use crate::error::{Exit, failure};
use crate::local::job::stopped;
use crate::output::Output;
use crate::target::Target;
use anyhow::Context as _;
use engram_api::{ExitCode, LearnerRun, retry_delay_seconds};
use engram_client::Client;
use engram_learn::run::spec_fingerprint;
use engram_proto::v1::{ResumeMode, RunPhase, RunStatus, SubmitRunRequest};
use futures::StreamExt as _;
use futures::stream::FuturesUnordered;
use std::collections::BTreeMap;
use std::time::Duration;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;

/// Queued progress reports; a report that finds the queue full is dropped, and a newer one follows.
const REPORT_QUEUE: usize = 64;

/// Where runs are executed.
#[derive(Clone, Copy)]
pub(super) struct Executor<'a> {
    pub(super) client: &'a Client,
    pub(super) target: &'a Target,
}

impl Executor<'_> {
    /// Returns the runs of the cluster, including jobs.
    async fn runs(self) -> anyhow::Result<Vec<RunStatus>> {
        let mut runs = self.client.list_runs().await?;
        runs.extend(job::entries(self.target).await?.into_iter().map(|entry| entry.status));
        Ok(runs)
    }
}

/// Executes a graph. The first Ctrl-C cancels the runs in progress, the second detaches.
///
/// Processes of jobs end with this command in any case.
///
/// # Errors
/// As [`execute`].
pub(super) async fn execute_until_interrupted(
    executor: Executor<'_>,
    graph: &mut RunGraph,
    selection: Selection,
    context: &Context,
) -> anyhow::Result<()> {
    let names: Vec<String> = graph.runs.iter().filter(|run| run.is_own).map(|run| run.name.clone()).collect();
    let mut interrupted = signal(SignalKind::interrupt()).context("failed to listen for Ctrl-C")?;
    let mut execution = Box::pin(execute(executor, graph, selection, &context.output));
    tokio::select! {
        result = &mut execution => return result,
        Some(()) = interrupted.recv() => {}
    }
    context.output.note("cancelling the runs in progress; press Ctrl-C again to detach");
    drop(execution);
    let cancel = async {
        let client = executor.client;
        for status in client.list_runs().await? {
            if names.contains(&status.name) && !is_final(status.phase()) {
                client.cancel_run(&status.name).await?;
            }
        }
        stopped().await;
        anyhow::Ok(())
    };
    tokio::select! {
        cancelled = cancel => cancelled?,
        Some(()) = interrupted.recv() => {}
    }
    Err(Exit(ExitCode::Interrupted).into())
}

/// Executes a graph and prints its outcome.
///
/// # Errors
/// A run fails, or the cluster does not respond.
pub(super) async fn execute(
    executor: Executor<'_>,
    graph: &mut RunGraph,
    selection: Selection,
    output: &Output,
) -> anyhow::Result<()> {
    let recorded: BTreeMap<String, RunStatus> =
        executor.runs().await?.into_iter().map(|status| (status.name.clone(), status)).collect();
    graph.add_previous(|name, run| previous(recorded.get(name), run))?;
    let plan: BTreeMap<usize, Action> = graph.plan(selection, output)?.into_iter().collect();
    let states = (0..graph.runs.len()).map(|index| match plan[&index] {
        Action::Keep => match recorded.get(&graph.runs[index].name) {
            Some(status) if status.phase() != RunPhase::Succeeded => RunState::Failed(reason(status)),
            _ => RunState::Unchanged,
        },
        Action::Suspend => RunState::Suspended,
        Action::Follow if !graph.runs[index].is_own => RunState::Running,
        Action::Follow | Action::Continue | Action::Execute => RunState::Waiting,
    });
    let mut execution = Execution::new(graph, states.collect(), output);
    let (reports, mut progress) = mpsc::channel(REPORT_QUEUE);
    let mut running = FuturesUnordered::new();
    let start = |index: usize| {
        let (run, action, reports) = (graph.submissions.get(&index), plan[&index], reports.clone());
        let name = graph.runs[index].name.clone();
        async move { (index, execute_run(executor, &name, (run, action), (index, reports)).await) }
    };
    // Runs of other files, which these wait for.
    let others = (0..graph.runs.len()).filter(|index| execution.states[*index] == RunState::Running);
    running.extend(others.map(start));
    loop {
        let (skipped, ready) = plan::advance(&graph.runs, &mut execution.states);
        for index in skipped {
            let state = std::mem::replace(&mut execution.states[index], RunState::Waiting);
            execution.set(index, state);
        }
        for index in ready {
            execution.set(index, RunState::Running);
            running.push(start(index));
        }
        tokio::select! {
            ended = running.next() => match ended {
                Some((index, state)) => execution.set(index, state?),
                None => return execution.finish(),
            },
            Some((index, detail)) = progress.recv() => match detail {
                Detail::Progress(text) => execution.set_detail(index, text),
                Detail::Note(text) => execution.progress.note(output, &text),
            },
        }
    }
}

/// What a run in progress reports.
enum Detail {
    Progress(String),
    Note(String),
}

/// Returns the previous run of a name.
fn previous(recorded: Option<&RunStatus>, run: Option<&LearnerRun>) -> Previous {
    let Some(status) = recorded else { return Previous::default() };
    let phase = match status.phase() {
        RunPhase::Succeeded => PreviousPhase::Succeeded,
        RunPhase::Failed | RunPhase::Cancelled => PreviousPhase::Failed,
        _ => PreviousPhase::Unfinished,
    };
    let fingerprint =
        run.and_then(|run| serde_json::to_value(run.spec.without_order()).ok()).map(|spec| spec_fingerprint(&spec));
    let is_same = fingerprint.is_none_or(|fingerprint| fingerprint == status.spec_fingerprint);
    Previous { phase, is_same }
}

/// Returns the progress of a run: `epoch 3/50`.
fn detail(status: &RunStatus) -> String {
    let total = if status.epochs == 0 { String::new() } else { format!("/{}", status.epochs) };
    format!("{} {}{total}", run::step(status), status.epoch)
}

/// Executes a run, with its retries, or follows it. Returns its outcome.
async fn execute_run(
    executor: Executor<'_>,
    name: &str,
    (run, action): (Option<&LearnerRun>, Action),
    (index, reports): (usize, mpsc::Sender<(usize, Detail)>),
) -> anyhow::Result<RunState> {
    let client = executor.client;
    if let Some((run, job)) = run.and_then(|run| Some((run, run.spec.job.as_ref()?))) {
        let local = if let Target::Local(local) = executor.target { Some(local) } else { None };
        // A newer report follows one that is dropped.
        let on_progress = |status: &RunStatus| drop(reports.try_send((index, Detail::Progress(detail(status)))));
        let last = job::execute_job(local, run, job, on_progress).await?;
        let is_success = last.phase() == RunPhase::Succeeded;
        return Ok(if is_success { RunState::Succeeded } else { RunState::Failed(reason(&last)) });
    }
    let limit = run.map_or(0, |run| run.spec.backoff_limit);
    let mut retry = 0;
    loop {
        match run {
            Some(run) if action != Action::Follow || retry > 0 => {
                submit(client, run, action == Action::Continue || retry > 0).await?;
            }
            _ => {}
        }
        let mut watch = client.watch_run(name);
        let mut last = RunStatus::default();
        while let Some(status) = watch.next().await? {
            // A newer report follows.
            let _ = reports.try_send((index, Detail::Progress(detail(&status))));
            last = status;
        }
        match last.phase() {
            RunPhase::Succeeded => return Ok(RunState::Succeeded),
            RunPhase::Cancelled => return Ok(RunState::Failed("cancelled".into())),
            _ if retry >= limit => return Ok(RunState::Failed(reason(&last))),
            _ => {}
        }
        retry += 1;
        let seconds = retry_delay_seconds(retry);
        let text = format!("run {name}: failed: {}; retry {retry} of {limit} in {seconds} s", reason(&last));
        let _ = reports.try_send((index, Detail::Note(text)));
        tokio::time::sleep(Duration::from_secs(seconds)).await;
    }
}

/// Submits a run, replacing or continuing the run of its name that has ended.
async fn submit(client: &Client, run: &LearnerRun, continues: bool) -> anyhow::Result<()> {
    let name = run.metadata.name.clone();
    let spec_json = serde_json::to_string(&run.spec.without_order()).context("failed to serialize the run")?;
    let uid = format!("{:032x}", rand::random::<u128>());
    let resume = if continues { ResumeMode::Unfinished } else { ResumeMode::Unspecified }.into();
    let request = SubmitRunRequest { name, spec_json, resume, uid: uid.clone(), ..SubmitRunRequest::default() };
    let status = client.submit(request).await?.status.unwrap_or_default();
    if status.uid == uid {
        return Ok(());
    }
    let message = format!("another client has submitted run {} meanwhile, which has not ended", run.metadata.name);
    Err(failure(ExitCode::Conflict, message))
}

/// Returns why a run failed.
fn reason(status: &RunStatus) -> String {
    let code = if status.code.is_empty() { String::new() } else { format!("{}: ", status.code) };
    match status.phase() {
        RunPhase::Cancelled => "cancelled".into(),
        _ => format!("{code}{}", status.message),
    }
}

const fn is_final(phase: RunPhase) -> bool {
    matches!(phase, RunPhase::Succeeded | RunPhase::Failed | RunPhase::Cancelled)
}
