//! Calls of a driver to the workers that execute its tasks.

use crate::runs::tasks::run::timeline::Timeline;
use crate::shared::Shared;
use engram_api::Code;
use engram_client::Client;
use engram_learn::task_run::{SpanDevice, Task, TimelineKind};
use engram_memory::{Ordinal, RunId};
use engram_proto::answers;
use engram_proto::v1::run_task_response::Event;
use engram_proto::v1::{self, ProblemKind};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Instant;
use tokio::task::{AbortHandle, JoinSet};

/// Devices of a task that its timeline has: far more than a machine has.
const MAX_DEVICES: usize = 64;

/// How a call ended.
pub(in crate::runs::tasks::run) enum Outcome {
    /// The result is there: see [`Calls::take_result`].
    Finished {
        worker: u32,
    },
    /// The task would fail on any worker.
    Failed {
        task: usize,
        code: &'static str,
        message: String,
    },
    /// The worker did not accept the task, or stops in an orderly way.
    Refused {
        worker: u32,
        task: usize,
        reason: String,
    },
    Lost {
        worker: u32,
        task: usize,
        reason: String,
    },
}

/// End of a call as its future sees it.
enum End {
    Result(Vec<u8>),
    Failed { code: &'static str, message: String },
    Refused(String),
    Lost(String),
}

/// A call in flight, or the result that it returned.
struct Call {
    /// Distinguishes the call from earlier ones to the same worker.
    number: u64,
    task: usize,
    name: String,
    started: Instant,
    progress: Arc<Progress>,
    future: AbortHandle,
    result: Option<Vec<u8>>,
}

/// What a call has reported.
#[derive(Default)]
struct Progress {
    /// Bits of the completed fraction.
    fraction: AtomicU64,
    /// When the worker began to execute the task.
    accepted: OnceLock<Instant>,
    /// The last checkpoint: the one that the task continues from, or a later one.
    checkpoint: Mutex<Option<v1::TaskCheckpoint>>,
    /// What computed the task.
    devices: OnceLock<Vec<SpanDevice>>,
}

/// Calls in flight; dropping this ends them, and with them the tasks.
pub(in crate::runs::tasks::run) struct Calls {
    peers: Client,
    /// A request without task.
    template: v1::RunTaskRequest,
    next_number: u64,
    pub(in crate::runs::tasks::run) timeline: Timeline,
    by_worker: BTreeMap<u32, Call>,
    futures: JoinSet<(u32, u64, End)>,
    /// Last checkpoints of tasks that wait for another worker, by name.
    checkpoints: BTreeMap<String, v1::TaskCheckpoint>,
    /// Executions that continued from a checkpoint.
    resumed: Arc<AtomicU64>,
}

impl Calls {
    pub(in crate::runs::tasks::run) fn new(
        shared: &Shared,
        (run, spec_json): (RunId, &str),
        data: Option<Vec<u8>>,
        timeline: Timeline,
    ) -> Self {
        let template = v1::RunTaskRequest {
            run: answers::identity(run.0),
            spec_json: spec_json.to_owned(),
            data: data.map(Into::into),
            ..v1::RunTaskRequest::default()
        };
        let peers = shared.client.clone();
        Self {
            peers,
            template,
            next_number: 0,
            timeline,
            by_worker: BTreeMap::new(),
            futures: JoinSet::new(),
            checkpoints: BTreeMap::new(),
            resumed: Arc::default(),
        }
    }

    /// Starts a task on a worker without a call.
    pub(in crate::runs::tasks::run) fn start(&mut self, worker: u32, task: usize, content: &Task) {
        let checkpoint = self.checkpoints.remove(&content.name);
        let request = v1::RunTaskRequest {
            name: content.name.clone(),
            input: content.input.clone().into(),
            checkpoint: checkpoint.as_ref().map(|checkpoint| checkpoint.state.clone()),
            ..self.template.clone()
        };
        let number = self.next_number;
        let progress = Arc::new(Progress { checkpoint: Mutex::new(checkpoint), ..Progress::default() });
        self.next_number += 1;
        let (peers, reported, resumed) = (self.peers.clone(), Arc::clone(&progress), Arc::clone(&self.resumed));
        let future = self
            .futures
            .spawn(async move { (worker, number, call(&peers, worker, request, &reported, &resumed).await) });
        let (name, started) = (content.name.clone(), Instant::now());
        self.by_worker.insert(worker, Call { number, task, name, started, progress, future, result: None });
    }

    /// Ends the call to a worker.
    pub(in crate::runs::tasks::run) fn abandon(&mut self, worker: u32) {
        if let Some(call) = self.by_worker.remove(&worker) {
            call.future.abort();
            self.keep_checkpoint(&call);
            self.add_spans(worker, &call);
            self.timeline.lose(worker);
        }
    }

    /// Keeps the checkpoint of a call without result for the next worker.
    fn keep_checkpoint(&mut self, call: &Call) {
        if let Some(checkpoint) = call.progress.checkpoint.lock().take() {
            self.checkpoints.insert(call.name.clone(), checkpoint);
        }
    }

    /// Adds the transfer and the execution of a call that ends now; a task that was not accepted has neither.
    fn add_spans(&mut self, worker: u32, call: &Call) {
        let Some(&accepted) = call.progress.accepted.get() else { return };
        let transfer = (call.started, accepted);
        self.timeline.add(Some(worker), TimelineKind::Transfer, &call.name, transfer);
        self.timeline.add(Some(worker), TimelineKind::Task, &call.name, (accepted, Instant::now()));
        self.timeline.set_devices(call.progress.devices.get().cloned().unwrap_or_default());
    }

    /// Waits for the end of a call. Can be dropped at any await.
    pub(in crate::runs::tasks::run) async fn next(&mut self) -> Outcome {
        loop {
            let Some(end) = self.futures.join_next().await else { return std::future::pending().await };
            match end {
                Ok((worker, number, end)) => {
                    if self.by_worker.get(&worker).is_some_and(|call| call.number == number) {
                        return self.end(worker, end);
                    }
                }
                Err(error) if error.is_panic() => std::panic::resume_unwind(error.into_panic()),
                // Abandoned.
                Err(_) => {}
            }
        }
    }

    fn end(&mut self, worker: u32, end: End) -> Outcome {
        let mut call = self.by_worker.remove(&worker).expect("checked by the caller");
        let task = call.task;
        self.add_spans(worker, &call);
        if let End::Result(result) = end {
            call.result = Some(result);
            self.by_worker.insert(worker, call);
            return Outcome::Finished { worker };
        }
        self.keep_checkpoint(&call);
        if matches!(end, End::Lost(_)) {
            self.timeline.lose(worker);
        }
        match end {
            End::Failed { code, message } => Outcome::Failed { task, code, message },
            End::Refused(reason) => Outcome::Refused { worker, task, reason },
            End::Lost(reason) => Outcome::Lost { worker, task, reason },
            End::Result(_) => Outcome::Finished { worker },
        }
    }

    /// Returns the result of a finished call.
    pub(in crate::runs::tasks::run) fn take_result(&mut self, worker: u32) -> Option<Vec<u8>> {
        self.by_worker.remove(&worker)?.result
    }

    /// Returns the completed fraction of the task of a worker.
    pub(in crate::runs::tasks::run) fn fraction(&self, worker: u32) -> f64 {
        self.by_worker.get(&worker).map_or(0.0, |call| f64::from_bits(call.progress.fraction.load(Ordering::Relaxed)))
    }

    /// Returns the fraction from which another worker would continue the task of a worker.
    pub(in crate::runs::tasks::run) fn checkpoint(&self, worker: u32) -> f64 {
        let checkpoint = |call: &Call| call.progress.checkpoint.lock().as_ref().map(|it| it.fraction.clamp(0.0, 1.0));
        self.by_worker.get(&worker).and_then(checkpoint).unwrap_or(0.0)
    }

    /// Returns the number of executions that continued from a checkpoint.
    pub(in crate::runs::tasks::run) fn resumed(&self) -> u64 {
        self.resumed.load(Ordering::Relaxed)
    }
}

/// Executes a task on a worker.
async fn call(
    peers: &Client,
    worker: u32,
    request: v1::RunTaskRequest,
    progress: &Progress,
    resumed: &AtomicU64,
) -> End {
    let resumes = u64::from(request.checkpoint.is_some());
    let mut reports = match peers.run_task(Ordinal(worker), request).await {
        Ok(reports) => reports,
        Err(error) => return End::Refused(error.to_string()),
    };
    let mut accepted = false;
    loop {
        match reports.next().await {
            Ok(Event::Progress(fraction)) => {
                if !accepted {
                    resumed.fetch_add(resumes, Ordering::Relaxed);
                }
                accepted = true;
                progress.accepted.get_or_init(Instant::now);
                progress.fraction.store(fraction.clamp(0.0, 1.0).to_bits(), Ordering::Relaxed);
            }
            Ok(Event::Checkpoint(checkpoint)) => *progress.checkpoint.lock() = Some(checkpoint),
            Ok(Event::Devices(found)) => {
                progress.devices.get_or_init(|| found.devices.into_iter().take(MAX_DEVICES).map(span_device).collect());
            }
            Ok(Event::Result(result)) => return End::Result(result.into()),
            Ok(Event::Failure(failure)) => {
                let code = Code::find(&failure.code).unwrap_or(Code::RunFailed).id();
                return End::Failed { code, message: failure.message };
            }
            Err(error) if !accepted || error.kind() == ProblemKind::Stopping => return End::Refused(error.to_string()),
            Err(error) => return End::Lost(error.to_string()),
        }
    }
}

fn span_device(device: v1::TaskDevice) -> SpanDevice {
    let v1::TaskDevice { name, memory_bytes, busy_us, computations } = device;
    SpanDevice { name, memory_bytes, busy_us, computations }
}
