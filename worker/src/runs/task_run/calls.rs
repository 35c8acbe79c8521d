//! Calls of a driver to the workers that execute its tasks.

use crate::shared::Shared;
use engram_api::Code;
use engram_client::Client;
use engram_learn::task_run::Task;
use engram_memory::{Ordinal, RunId};
use engram_proto::answers;
use engram_proto::v1::run_task_response::Event;
use engram_proto::v1::{self, ProblemKind};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use tokio::task::{AbortHandle, JoinSet};

/// How a call ended.
pub(super) enum Outcome {
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
    /// Bits of the completed fraction.
    fraction: Arc<AtomicU64>,
    future: AbortHandle,
    result: Option<Vec<u8>>,
}

/// Calls in flight; dropping this ends them, and with them the tasks.
pub(super) struct Calls {
    peers: Client,
    /// A request without task.
    template: v1::RunTaskRequest,
    next_number: u64,
    by_worker: BTreeMap<u32, Call>,
    futures: JoinSet<(u32, u64, End)>,
}

impl Calls {
    pub(super) fn new(shared: &Shared, run: RunId, spec_json: &str, data: Option<Vec<u8>>) -> Self {
        let template = v1::RunTaskRequest {
            run: answers::identity(run.0),
            spec_json: spec_json.to_owned(),
            data: data.map(Into::into),
            ..v1::RunTaskRequest::default()
        };
        let peers = shared.peers.clone();
        Self { peers, template, next_number: 0, by_worker: BTreeMap::new(), futures: JoinSet::new() }
    }

    /// Starts a task on a worker without a call.
    pub(super) fn start(&mut self, worker: u32, task: usize, content: &Task) {
        let request = v1::RunTaskRequest {
            name: content.name.clone(),
            input: content.input.clone().into(),
            ..self.template.clone()
        };
        let (number, fraction) = (self.next_number, Arc::new(AtomicU64::new(0)));
        self.next_number += 1;
        let (peers, progress) = (self.peers.clone(), Arc::clone(&fraction));
        let future =
            self.futures.spawn(async move { (worker, number, call(&peers, worker, request, &progress).await) });
        self.by_worker.insert(worker, Call { number, task, fraction, future, result: None });
    }

    /// Ends the call to a worker.
    pub(super) fn abandon(&mut self, worker: u32) {
        if let Some(call) = self.by_worker.remove(&worker) {
            call.future.abort();
        }
    }

    /// Waits for the end of a call. Can be dropped at any await.
    pub(super) async fn next(&mut self) -> Outcome {
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
        let call = self.by_worker.get_mut(&worker).expect("checked by the caller");
        let task = call.task;
        if let End::Result(result) = end {
            call.result = Some(result);
            return Outcome::Finished { worker };
        }
        self.by_worker.remove(&worker);
        match end {
            End::Failed { code, message } => Outcome::Failed { task, code, message },
            End::Refused(reason) => Outcome::Refused { worker, task, reason },
            End::Lost(reason) => Outcome::Lost { worker, task, reason },
            End::Result(_) => Outcome::Finished { worker },
        }
    }

    /// Returns the result of a finished call.
    pub(super) fn take_result(&mut self, worker: u32) -> Option<Vec<u8>> {
        self.by_worker.remove(&worker)?.result
    }

    /// Returns the completed fraction of the task of a worker.
    pub(super) fn fraction(&self, worker: u32) -> f64 {
        self.by_worker.get(&worker).map_or(0.0, |call| f64::from_bits(call.fraction.load(Ordering::Relaxed)))
    }
}

/// Executes a task on a worker.
async fn call(peers: &Client, worker: u32, request: v1::RunTaskRequest, progress: &AtomicU64) -> End {
    let mut reports = match peers.run_task(Ordinal(worker), request).await {
        Ok(reports) => reports,
        Err(error) => return End::Refused(error.to_string()),
    };
    let mut accepted = false;
    loop {
        match reports.next().await {
            Ok(Event::Progress(fraction)) => {
                accepted = true;
                progress.store(fraction.clamp(0.0, 1.0).to_bits(), Ordering::Relaxed);
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
