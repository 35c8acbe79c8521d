//! Execution of one task of a run, for the worker that drives the run.
//!
//! A worker executes one task at a time: tasks use the CPU, and two at once would only take twice as long. The call reports while the
//! task runs. It is the only link between the two workers: if it ends, the task is stopped.

pub(super) mod gpus;
pub(super) mod run;

use crate::observability::panics;
use crate::runs::tasks::gpus::DevicesOfTask;
use crate::shared::Shared;
use engram_api::{Code, LearnerRunSpec, MAX_DATA_BYTES};
use engram_learn::source::StopFlag;
use engram_learn::task_run::{
    ComputeDevice, MAX_INPUT_BYTES, MAX_RESULT_BYTES, Task, TaskContext, TaskError, task_run,
};
use engram_proto::v1::run_task_response::Event;
use engram_proto::v1::{self, Problem, ProblemKind};
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot, watch};
use tonic::Status;

/// Interval of reports; a driver waits 15 s for one.
const REPORT_INTERVAL: Duration = Duration::from_millis(500);
/// Reports between checkpoints: a lost worker costs about two seconds of work.
const REPORTS_PER_CHECKPOINT: u64 = 4;
/// Retry hint for tasks of a busy worker, in milliseconds.
const BUSY_RETRY_MS: u64 = 500;
/// Reports that wait for a driver that does not read.
const REPORT_QUEUE: usize = 4;
/// Longer messages of failed tasks are shortened.
const MAX_MESSAGE_CHARS: usize = 2_000;

/// Permission to execute a task.
pub(crate) struct TaskSlot(Arc<Semaphore>);

impl Default for TaskSlot {
    fn default() -> Self {
        Self(Arc::new(Semaphore::new(1)))
    }
}

/// Reports of a task.
pub(in crate::runs) type TaskReports = mpsc::Receiver<Result<v1::RunTaskResponse, Status>>;

/// Starts a task; dropping the reports stops it.
///
/// # Errors
/// The request is invalid, the worker stops, or it executes another task.
pub(in crate::runs) fn start(shared: &Arc<Shared>, message: v1::RunTaskRequest) -> Result<TaskReports, Problem> {
    let work = Work::new(message)?;
    if shared.membership.is_leaving() {
        return Err(Problem::of(ProblemKind::Stopping, "this worker is about to stop").retry_after(BUSY_RETRY_MS));
    }
    let permit = Arc::clone(&shared.runs.task_slot.0).try_acquire_owned().map_err(|_| {
        let text = format!("worker {} executes another task", shared.ordinal());
        Problem::of(ProblemKind::Overloaded, text).retry_after(BUSY_RETRY_MS)
    })?;
    let (reports, receiver) = mpsc::channel(REPORT_QUEUE);
    tokio::spawn(execute(Arc::clone(shared), work, permit, reports));
    Ok(receiver)
}

/// A task with what it needs.
struct Work {
    spec: LearnerRunSpec,
    data: Option<Vec<u8>>,
    task: Task,
    checkpoint: Option<Vec<u8>>,
}

impl Work {
    /// Checks a request.
    fn new(message: v1::RunTaskRequest) -> Result<Self, Problem> {
        let invalid = |text: String| Problem::of(ProblemKind::Invalid, text);
        let data_bytes = message.data.as_ref().map_or(0, |data| data.len());
        let checkpoint_bytes = message.checkpoint.as_ref().map_or(0, |state| state.len());
        for (field, length, limit) in [
            ("input", message.input.len(), MAX_INPUT_BYTES),
            ("data", data_bytes, MAX_DATA_BYTES),
            ("checkpoint", checkpoint_bytes, MAX_RESULT_BYTES),
        ] {
            if length > limit {
                return Err(invalid(format!("{field}: {length} bytes are not allowed; allowed: up to {limit}")));
            }
        }
        let spec = serde_json::from_str(&message.spec_json).map_err(|error| invalid(format!("spec_json: {error}")))?;
        let task = Task { name: message.name, input: message.input.into(), cost: 1 };
        let checkpoint = message.checkpoint.map(Into::into);
        Ok(Self { spec, data: message.data.map(Into::into), task, checkpoint })
    }

    fn result(&self, context: &Context) -> Result<Vec<u8>, TaskError> {
        let result = task_run(&self.spec, self.data.as_deref())?.execute(&self.task, context)?;
        if result.len() > MAX_RESULT_BYTES {
            let length = result.len();
            return Err(TaskError::Failed(format!("the result has {length} bytes; allowed: up to {MAX_RESULT_BYTES}")));
        }
        Ok(result)
    }
}

/// Context of a task that runs on a thread for blocking work.
struct Context {
    shared: Arc<Shared>,
    /// Bits of the completed fraction.
    fraction: AtomicU64,
    stop: StopFlag,
    threads: usize,
    resumed_from: Option<Vec<u8>>,
    checkpoint_due: AtomicBool,
    checkpoints: mpsc::Sender<v1::TaskCheckpoint>,
}

impl TaskContext for Context {
    fn progress(&self, fraction: f64) {
        self.fraction.store(fraction.clamp(0.0, 1.0).to_bits(), Ordering::Relaxed);
    }

    fn stop(&self) -> &StopFlag {
        &self.stop
    }

    fn threads(&self) -> usize {
        self.threads
    }

    fn gpus(&self, operations: u64) -> &[ComputeDevice] {
        self.shared.runs.task_gpus.for_operations(operations, &self.shared.setup.options, &self.shared.setup.device)
    }

    fn resumed_from(&self) -> Option<&[u8]> {
        self.resumed_from.as_deref()
    }

    fn checkpoint_due(&self) -> bool {
        self.checkpoint_due.swap(false, Ordering::Relaxed)
    }

    fn checkpoint(&self, state: Vec<u8>, fraction: f64) {
        if state.len() <= MAX_RESULT_BYTES {
            // The next one supersedes a checkpoint for which there is no room.
            let _ = self.checkpoints.try_send(v1::TaskCheckpoint { state: state.into(), fraction });
        }
    }
}

/// Stops the task when its call ends in any way.
struct StopOnDrop(Arc<Context>);

impl Drop for StopOnDrop {
    fn drop(&mut self) {
        self.0.stop.set();
    }
}

async fn execute(
    shared: Arc<Shared>,
    mut work: Work,
    permit: OwnedSemaphorePermit,
    reports: mpsc::Sender<Result<v1::RunTaskResponse, Status>>,
) {
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let threads = shared.setup.options.threads.unwrap_or(cores).max(1);
    let (checkpoints, mut received) = mpsc::channel(1);
    let context = Arc::new(Context {
        shared: Arc::clone(&shared),
        fraction: AtomicU64::new(0),
        stop: StopFlag::default(),
        threads,
        resumed_from: work.checkpoint.take(),
        checkpoint_due: AtomicBool::new(false),
        checkpoints,
    });
    let _stop = StopOnDrop(Arc::clone(&context));
    let (sender, mut outcome) = oneshot::channel();
    let for_task = Arc::clone(&context);
    tokio::task::spawn_blocking(move || {
        let (gpus, threads) = (&for_task.shared.runs.task_gpus, for_task.threads);
        let before = DevicesOfTask::begin(gpus);
        let outcome = std::panic::catch_unwind(AssertUnwindSafe(|| work.result(&for_task)));
        let devices = before.used(gpus, threads);
        // The worker is free before the driver receives the result and sends the next task.
        drop(permit);
        let _ = sender.send((outcome.map_err(|payload| panics::message(&*payload).to_owned()), devices));
    });
    let mut stopping = shared.lifecycle.stopping();
    let mut interval = tokio::time::interval(REPORT_INTERVAL);
    let mut reported: u64 = 0;
    loop {
        tokio::select! {
            biased;
            ended = &mut outcome => {
                let (outcome, devices) = ended.map_or_else(|closed| (Err(closed), None), |(outcome, it)| (Ok(outcome), Some(it)));
                if let Some(devices) = devices {
                    let _ = reports.send(Ok(v1::RunTaskResponse { event: Some(Event::Devices(devices)) })).await;
                }
                let _ = reports.send(last_report(outcome)).await;
                return;
            }
            () = reports.closed() => return,
            () = stopped(&mut stopping) => {
                let problem = Problem::of(ProblemKind::Stopping, "this worker is stopping");
                let _ = reports.send(Err(problem.into_status())).await;
                return;
            }
            Some(checkpoint) = received.recv() => {
                // A driver that does not read receives a later one.
                let _ = reports.try_send(Ok(v1::RunTaskResponse { event: Some(Event::Checkpoint(checkpoint)) }));
            }
            _ = interval.tick() => {
                // The first one soon, since many tasks are short.
                if reported % REPORTS_PER_CHECKPOINT == 1 {
                    context.checkpoint_due.store(true, Ordering::Relaxed);
                }
                reported += 1;
                let fraction = f64::from_bits(context.fraction.load(Ordering::Relaxed));
                // A driver that does not read needs no further report.
                let _ = reports.try_send(Ok(v1::RunTaskResponse { event: Some(Event::Progress(fraction)) }));
            }
        }
    }
}

/// Waits until the worker stops.
async fn stopped(stopping: &mut watch::Receiver<bool>) {
    // The sender lives as long as the worker.
    let _ = stopping.wait_for(|stopping| *stopping).await;
}

/// What became of a task; a panic is its message.
type Outcome = Result<Result<Result<Vec<u8>, TaskError>, String>, oneshot::error::RecvError>;

fn last_report(outcome: Outcome) -> Result<v1::RunTaskResponse, Status> {
    let failure = |code: Code, message: &str| {
        let message = message.chars().take(MAX_MESSAGE_CHARS).collect();
        Event::Failure(v1::TaskFailure { code: code.id().to_owned(), message })
    };
    let event = match outcome {
        Ok(Ok(Ok(result))) => Event::Result(result.into()),
        Ok(Ok(Err(TaskError::Invalid(message)))) => failure(Code::InvalidValue, &message),
        Ok(Ok(Err(TaskError::Failed(message)))) => failure(Code::RunFailed, &message),
        Ok(Ok(Err(TaskError::Stopped))) | Err(_) => {
            return Err(Problem::of(ProblemKind::Stopping, "the task was stopped").into_status());
        }
        Ok(Err(panic)) => failure(Code::RunFailed, &format!("the task panicked, which is a bug of Engram: {panic}")),
    };
    Ok(v1::RunTaskResponse { event: Some(event) })
}
