//! Runs that are split into tasks: their driver spreads the tasks over the workers and records every result.
//!
//! The driver may die at any await, and another continues from the record, which has a row per result. Which worker computes a task
//! does not matter, so the result is the same bytes whatever dies. Such runs change no memories and do not wait for the turn.

mod calls;
mod timeline;

use crate::runs::frame::{Interruption, RETRY_INTERVAL, conclude, failed, show_end, unless_ordered, write_record};
use crate::runs::record::Recorder;
use crate::runs::{credentials, input};
use crate::shared::Shared;
use calls::{Calls, Outcome};
use engram_api::{Code, LearnerRunSpec};
use engram_learn::run::{ClusterError, Input, LogError, Order, Phase, RunLog as _, RunState, RunningTask, Status};
use engram_learn::task_run::{
    Assignment, AssignmentAction, AssignmentEvent, MAX_INPUT_BYTES, MAX_LOSSES, MAX_RESULT_BYTES, RecordedTasks,
    StageResults, Task, TaskError, TaskFindings, TaskRun, TaskSummary, TimelineKind, page_row, result_row, task_run,
    timeline_row,
};
use engram_memory::RunId;
use engram_proto::v1::Problem;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};
use timeline::Timeline;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use xxhash_rust::xxh3::xxh3_128;

/// Interval of progress updates: workers report at this interval.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(500);
/// Most tasks of a stage: each result is a row of the record.
const MAX_TASKS: usize = 10_000;
/// Running tasks that the status message names.
const NAMED_TASKS: usize = 3;
/// Tasks in execution that a status reports.
const MAX_REPORTED_TASKS: usize = 256;
/// Longer findings are shortened: they are part of every status.
const MAX_TEXT_CHARS: usize = 500;
/// See [`MAX_TEXT_CHARS`].
const MAX_TEXTS: usize = 64;

/// Permission to drive a run of tasks: a worker drives one at a time.
pub(crate) struct DriverSlot(Arc<Semaphore>);

impl Default for DriverSlot {
    fn default() -> Self {
        Self(Arc::new(Semaphore::new(1)))
    }
}

/// Driver of one run.
pub(in crate::runs) struct Driver {
    pub(in crate::runs) shared: Arc<Shared>,
    pub(in crate::runs) run: RunId,
    pub(in crate::runs) state: RunState,
    pub(in crate::runs) version: u64,
    pub(in crate::runs) spec: LearnerRunSpec,
    pub(in crate::runs) status: watch::Sender<Status>,
    pub(in crate::runs) orders: watch::Receiver<Order>,
}

impl From<TaskError> for Interruption {
    fn from(error: TaskError) -> Self {
        let code = if matches!(error, TaskError::Invalid(_)) { Code::InvalidValue } else { Code::RunFailed };
        failed(code, error.to_string())
    }
}

/// Where a stage is.
struct Stage<'a> {
    number: u32,
    tasks: &'a [Task],
    assignment: Assignment,
    /// Tasks of earlier stages.
    earlier: u64,
    /// Losses of workers by tasks of earlier stages.
    earlier_losses: u64,
}

impl Driver {
    /// Drives the run to its end, however long the cluster takes. If dropped at any await, another driver can continue.
    pub(in crate::runs) async fn run(mut self) {
        let slot = self.wait_for_slot().await;
        let started = (Instant::now(), self.state.elapsed_ms);
        let result = match &slot {
            Ok(_) => self.drive(started).await,
            Err(Interruption::Ordered(order)) => Err(Interruption::Ordered(*order)),
            Err(_) => return,
        };
        self.state.elapsed_ms = started.1 + started.0.elapsed().as_millis() as u64;
        let Some(page) = conclude(&mut self.state, result) else { return };
        if self.record(page).await.is_err() {
            return;
        }
        if self.state.phase.is_final() {
            credentials::forget(&self.shared, self.run);
            // Otherwise the next primary of the partition does it.
            let _ = input::forget(&self.shared, self.run, self.state.identity(self.run)).await;
        }
        show_end(&self.status, &self.state);
    }

    /// Executes all stages. Returns the row of the report page.
    async fn drive(&mut self, started: (Instant, u64)) -> Result<Vec<u8>, Interruption> {
        let mut recorded = self.load().await?;
        let data = self.data().await?;
        self.pin(data.as_deref())?;
        let run = self.open(data.clone()).await?;
        let timeline = Timeline::new(started.0, started.1);
        let mut calls = Calls::new(&self.shared, (self.run, &self.state.spec.to_string()), data, timeline);
        let mut results: Vec<StageResults> = Vec::new();
        let (mut earlier, mut earlier_losses) = (0, 0);
        loop {
            let number = u32::try_from(results.len()).unwrap_or(u32::MAX);
            let planning = Instant::now();
            let tasks = self.plan(&run, &results).await?;
            if tasks.is_empty() {
                break;
            }
            let span = (planning, Instant::now());
            calls.timeline.add(None, TimelineKind::Plan, &format!("plan of stage {}", number + 1), span);
            let done: BTreeSet<usize> = recorded.indexes(number).map(|index| index as usize).collect();
            let costs: Vec<u64> = tasks.iter().map(|task| task.cost).collect();
            self.state.phase = Phase::Running;
            self.state.done = earlier + done.len() as u64;
            self.state.epochs = Some(earlier + tasks.len() as u64);
            let mut stage =
                Stage { number, tasks: &tasks, assignment: Assignment::new(&costs, &done), earlier, earlier_losses };
            let is_recorded = stage.assignment.is_complete();
            self.execute(&mut stage, &mut calls, &mut recorded, started).await?;
            let spans = calls.timeline.end_stage();
            if !is_recorded {
                // Before the last write of the run, which ends it.
                self.record(Some(timeline_row(number, &spans))).await?;
            }
            let results_of_stage = recorded.stage(number, tasks.len());
            results.push(results_of_stage.ok_or_else(|| failed(Code::Corrupt, "the record of the run has gaps"))?);
            earlier += tasks.len() as u64;
            earlier_losses += stage.assignment.total_losses();
        }
        self.finish(run, results, &recorded).await
    }

    /// Waits until no other run of tasks is driven here.
    async fn wait_for_slot(&mut self) -> Result<OwnedSemaphorePermit, Interruption> {
        let slot = Arc::clone(&self.shared.runs.driver_slot.0);
        if let Ok(permit) = Arc::clone(&slot).try_acquire_owned() {
            return Ok(permit);
        }
        let message = format!("waiting for another run of tasks, which worker {} drives", self.shared.ordinal());
        self.status.send_modify(|status| status.message = message);
        let permit = self.unless_ordered(slot.acquire_owned()).await?;
        Ok(permit.expect("the semaphore is never closed"))
    }

    async fn unless_ordered<T>(&self, future: impl Future<Output = T>) -> Result<T, Interruption> {
        unless_ordered(&self.orders, future).await
    }

    /// Reads the results that are recorded.
    async fn load(&self) -> Result<RecordedTasks, Interruption> {
        let recorder = Recorder { shared: Arc::clone(&self.shared) };
        let entry = loop {
            match recorder.load(self.run).await {
                Ok(Some(entry)) if entry.version == self.version => break entry,
                Ok(_) | Err(LogError::Superseded) => return Err(Interruption::Superseded),
                Err(LogError::Cluster(ClusterError::Temporary(_))) => tokio::time::sleep(RETRY_INTERVAL).await,
                Err(LogError::Cluster(ClusterError::Permanent { code, message })) => {
                    return Err(Interruption::Failed { code: code.into(), message });
                }
            }
        };
        RecordedTasks::read(&entry.rows).map_err(|error| failed(Code::Corrupt, error.to_string()))
    }

    /// Returns the content of the run's data file, which the first driver keeps with the run.
    async fn data(&self) -> Result<Option<Vec<u8>>, Interruption> {
        let Some(file) = self.spec.data_file() else { return Ok(None) };
        let ids = (self.run, self.state.identity(self.run));
        loop {
            match input::data(&self.shared, ids, file).await {
                Ok(content) => return Ok(Some(content)),
                Err(input::DataError::Unusable(problem)) => return Err(problem.into()),
                Err(input::DataError::Unavailable(Problem { message, .. })) => {
                    tracing::warn!(run = %self.run, problem = message, "failed to read run data; retrying");
                    self.unless_ordered(tokio::time::sleep(RETRY_INTERVAL)).await?;
                }
            }
        }
    }

    /// Compares the data with those that the run began with: a run that had ended has to be given them again.
    fn pin(&mut self, data: Option<&[u8]>) -> Result<(), Interruption> {
        let Some(data) = data else { return Ok(()) };
        let content = format!("{:032x}", xxh3_128(data));
        match &self.state.input {
            Some(first) if first.content != content => {
                let message = format!(
                    "the data file has fingerprint {content}, but the run began with one of {}; allowed: the same content, or a run \
                     of another name",
                    first.content
                );
                Err(failed(Code::SourceUnreadable, message))
            }
            _ => {
                self.state.input = Some(Input { content, revision: None });
                Ok(())
            }
        }
    }

    async fn open(&self, data: Option<Vec<u8>>) -> Result<Arc<dyn TaskRun>, Interruption> {
        let spec = self.spec.clone();
        Ok(blocking(move || task_run(&spec, data.as_deref())).await?.into())
    }

    /// Returns the tasks of the next stage.
    async fn plan(&self, run: &Arc<dyn TaskRun>, results: &[StageResults]) -> Result<Vec<Task>, Interruption> {
        let (run, results) = (Arc::clone(run), results.to_vec());
        let tasks = blocking(move || run.plan(&results)).await?;
        let names: BTreeSet<&str> = tasks.iter().map(|task| &*task.name).collect();
        let too_long = tasks.iter().find(|task| task.input.len() > MAX_INPUT_BYTES);
        if tasks.len() > MAX_TASKS || names.len() < tasks.len() || too_long.is_some() {
            let (count, name) = (tasks.len(), too_long.map_or("none", |task| &*task.name));
            let message = format!(
                "the plan of the run is not usable: {count} tasks with {} names, input too long: {name}; allowed: up to \
                 {MAX_TASKS} tasks with different names and inputs of {MAX_INPUT_BYTES} bytes",
                names.len()
            );
            return Err(failed(Code::RunFailed, message));
        }
        Ok(tasks)
    }

    /// Executes the tasks of a stage that are not recorded yet.
    async fn execute(
        &mut self,
        stage: &mut Stage<'_>,
        calls: &mut Calls,
        recorded: &mut RecordedTasks,
        started: (Instant, u64),
    ) -> Result<(), Interruption> {
        let (mut orders, mut view) = (self.orders.clone(), self.shared.membership.subscribe());
        let done_before = self.state.done;
        let mut progress = tokio::time::interval(PROGRESS_INTERVAL);
        let mut event = Some(AssignmentEvent::Workers(self.workers()));
        while !stage.assignment.is_complete() || event.is_some() {
            if let Some(event) = event.take() {
                let actions = stage.assignment.step(event, started.0.elapsed());
                self.apply(actions, stage, calls, recorded, started).await?;
                self.publish(stage, calls, done_before, started);
                continue;
            }
            let next_tick = stage.assignment.next_tick().map(|at| started.0 + at);
            let tick = tokio::time::sleep_until(next_tick.unwrap_or_else(|| Instant::now() + PROGRESS_INTERVAL).into());
            event = tokio::select! {
                outcome = calls.next() => self.outcome(outcome, stage)?,
                Ok(order) = orders.wait_for(|order| *order != Order::Continue) => {
                    return Err(Interruption::Ordered(*order));
                }
                Ok(()) = view.changed() => Some(AssignmentEvent::Workers(self.workers())),
                () = tick, if next_tick.is_some() => Some(AssignmentEvent::Tick),
                _ = progress.tick() => {
                    self.publish(stage, calls, done_before, started);
                    None
                }
            };
        }
        Ok(())
    }

    /// Returns the event of the end of a call.
    fn outcome(&self, outcome: Outcome, stage: &Stage<'_>) -> Result<Option<AssignmentEvent>, Interruption> {
        let name = |task: usize| &*stage.tasks[task].name;
        match outcome {
            Outcome::Finished { worker } => Ok(Some(AssignmentEvent::Finished(worker))),
            Outcome::Failed { task, code, message } => {
                Err(Interruption::Failed { code: code.into(), message: format!("task {}: {message}", name(task)) })
            }
            Outcome::Refused { worker, task, reason } => {
                tracing::debug!(run = %self.run, worker, task = name(task), reason, "worker did not accept task");
                Ok(Some(AssignmentEvent::Refused(worker)))
            }
            Outcome::Lost { worker, task, reason } => {
                tracing::warn!(run = %self.run, worker, task = name(task), reason, "lost the worker of a task");
                Ok(Some(AssignmentEvent::Lost(worker)))
            }
        }
    }

    async fn apply(
        &mut self,
        actions: Vec<AssignmentAction>,
        stage: &Stage<'_>,
        calls: &mut Calls,
        recorded: &mut RecordedTasks,
        started: (Instant, u64),
    ) -> Result<(), Interruption> {
        for action in actions {
            match action {
                AssignmentAction::Start { worker, task } => calls.start(worker, task, &stage.tasks[task]),
                AssignmentAction::Abandon(worker) => calls.abandon(worker),
                AssignmentAction::Record { worker, task } => {
                    let Some(result) = calls.take_result(worker) else { continue };
                    let index = u32::try_from(task).unwrap_or(u32::MAX);
                    self.state.done += 1;
                    self.state.elapsed_ms = started.1 + started.0.elapsed().as_millis() as u64;
                    let writing = Instant::now();
                    self.record(Some(result_row(stage.number, index, &result))).await?;
                    let (name, span) = (&stage.tasks[task].name, (writing, Instant::now()));
                    calls.timeline.add(None, TimelineKind::Record, name, span);
                    recorded.insert(stage.number, index, result);
                }
                AssignmentAction::GiveUp { task } => {
                    let name = &stage.tasks[task].name;
                    let message =
                        format!("task {name}: more than {MAX_LOSSES} workers were lost while they executed it");
                    return Err(failed(Code::RunFailed, message));
                }
            }
        }
        Ok(())
    }

    /// Returns the live workers, this one included.
    fn workers(&self) -> BTreeSet<u32> {
        let view = self.shared.membership.view();
        let alive = view.members.iter().filter(|member| member.alive && !member.leaving);
        alive.map(|member| member.ordinal).chain([self.shared.ordinal().0]).collect()
    }

    /// Publishes the progress.
    fn publish(&self, stage: &Stage<'_>, calls: &Calls, done_before: u64, started: (Instant, u64)) {
        let running: Vec<(u32, usize, f64)> =
            stage.assignment.running().map(|(worker, task)| (worker, task, calls.fraction(worker))).collect();
        let fractions: f64 = running.iter().map(|(.., fraction)| fraction).sum();
        let elapsed_s = started.0.elapsed().as_secs_f64();
        let rate = ((self.state.done - done_before) as f64 + fractions) / elapsed_s.max(1e-3);
        let message = message(&running, stage);
        let tasks = running.iter().take(MAX_REPORTED_TASKS).map(|&(worker, task, fraction)| RunningTask {
            number: stage.earlier + task as u64 + 1,
            name: stage.tasks[task].name.clone(),
            worker,
            fraction,
            losses: stage.assignment.losses(task),
            checkpoint: calls.checkpoint(worker),
        });
        let (tasks, losses) = (tasks.collect(), stage.assignment.total_losses());
        self.status.send_modify(|status| {
            (status.phase, status.epoch, status.epochs) = (self.state.phase, self.state.done, self.state.epochs);
            (status.epochs_per_s, status.message) = (rate, message);
            status.elapsed_s = started.1 as f64 / 1_000.0 + elapsed_s;
            status.metrics.insert("running_tasks".into(), running.len() as f64);
            status.metrics.insert("reassigned_tasks".into(), (stage.earlier_losses + losses) as f64);
            status.metrics.insert("resumed_tasks".into(), calls.resumed() as f64);
            status.tasks = tasks;
        });
    }

    /// Summarizes the results. Returns the row of the report page.
    async fn finish(
        &mut self,
        run: Arc<dyn TaskRun>,
        results: Vec<StageResults>,
        recorded: &RecordedTasks,
    ) -> Result<Vec<u8>, Interruption> {
        self.status.send_modify(|status| "writing the report".clone_into(&mut status.message));
        let findings = blocking(move || run.finish(&results)).await?;
        if findings.page.len() > MAX_RESULT_BYTES {
            let length = findings.page.len();
            return Err(failed(
                Code::RunFailed,
                format!("the report has {length} bytes; allowed: up to {MAX_RESULT_BYTES}"),
            ));
        }
        let page = page_row(&findings.page);
        self.state.metrics.extend(findings.metrics.clone());
        self.state.tasks = Some(TaskSummary::new(shortened(findings), recorded.digest()));
        self.status.send_modify(|status| {
            status.metrics.remove("running_tasks");
            status.tasks.clear();
        });
        Ok(page)
    }

    async fn record(&mut self, row: Option<Vec<u8>>) -> Result<(), Interruption> {
        write_record(&self.shared, (self.run, &mut self.version), &self.state, row).await
    }
}

/// Runs a computation on a thread for blocking work.
async fn blocking<T: Send + 'static>(
    compute: impl FnOnce() -> Result<T, TaskError> + Send + 'static,
) -> Result<T, Interruption> {
    match tokio::task::spawn_blocking(compute).await {
        Ok(result) => Ok(result?),
        // The caller reports it as it reports a panic of its own.
        Err(error) if error.is_panic() => std::panic::resume_unwind(error.into_panic()),
        Err(error) => Err(failed(Code::RunFailed, error.to_string())),
    }
}

/// Returns the message of a running stage: the tasks with their workers.
fn message(running: &[(u32, usize, f64)], stage: &Stage<'_>) -> String {
    let one = |(worker, task, fraction): &(u32, usize, f64)| {
        let (name, percent) = (&stage.tasks[*task].name, fraction * 100.0);
        let number = stage.earlier + *task as u64 + 1;
        format!("task {number}, {name}, on worker {worker} ({percent:.0} %)")
    };
    let mut parts: Vec<String> = running.iter().take(NAMED_TASKS).map(one).collect();
    if running.len() > NAMED_TASKS {
        parts.push(format!("{} more", running.len() - NAMED_TASKS));
    }
    match parts.is_empty() {
        true if stage.assignment.is_complete() => String::new(),
        true => "waiting for a worker".into(),
        false => parts.join("; "),
    }
}

/// Limits the size of findings, which are part of the run's state and of every status.
fn shortened(findings: TaskFindings) -> TaskFindings {
    let text = |text: String| text.chars().take(MAX_TEXT_CHARS).collect::<String>();
    TaskFindings {
        metrics: findings.metrics.into_iter().take(MAX_TEXTS).collect(),
        outputs: findings.outputs.into_iter().take(MAX_TEXTS).map(|(name, value)| (name, text(value))).collect(),
        summary: findings.summary.into_iter().take(MAX_TEXTS).map(text).collect(),
        page: findings.page,
    }
}
