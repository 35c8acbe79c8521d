//! Runs of kind `Federated`: drives the rounds, and serves the clients.
//!
//! The driver may die at any await. What an answer to a client states is in records of the run's partition before it is sent: the state of the rounds
//! in one record, each upload in another. The next driver continues from them, and a repeated request has the same answer.

mod blobs;
mod core;
mod endpoint;
mod items;
mod masks;
mod metrics;
mod progress;
mod versions;

pub(in crate::runs) use blobs::is_content;
pub(crate) use endpoint::FederatedEndpoint;
pub(crate) use metrics::FederatedMetrics;

use crate::runs::record::Recorder;
use crate::shared::Shared;
use blobs::{ContentName, Contents, Written};
use core::{Core, Step};
use engram_api::{Code, FederatedRun};
use engram_federated::job::Job;
use engram_federated::round::Outcome;
use engram_federated::service::Denial;
use engram_learn::run::{ClusterError, FederatedState, LogError, Order, Phase, RunLog as _, RunState, Status};
use engram_memory::RunId;
use engram_proto::v1::{self, Problem};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use tokio::sync::{mpsc, oneshot, watch};

/// Interval between attempts to write a record: as that of other runs.
const RETRY_INTERVAL: Duration = Duration::from_millis(200);
/// Requests that wait for the driver; further ones are refused with a retry hint.
const QUEUE: usize = 4_096;
/// Requests that are answered after one write of the record.
const BATCH: usize = 256;
/// Longest time between checks of deadlines: a client that disappears announces nothing.
const TICK: Duration = Duration::from_secs(1);

/// Requests to the drivers on this worker.
#[derive(Default)]
pub(in crate::runs) struct Drivers(Mutex<BTreeMap<RunId, mpsc::Sender<Request>>>);

impl Drivers {
    fn get(&self, run: RunId) -> Option<mpsc::Sender<Request>> {
        self.0.lock().get(&run).cloned()
    }
}

/// Who calls, as it states.
struct Caller {
    client: String,
    secret: Vec<u8>,
}

/// An update whose content was read and checked, if it is complete.
struct Submission {
    task: u64,
    digest: engram_federated::round::Digest,
    samples: u64,
    loss: Option<f64>,
    rate_sum: Option<f64>,
    /// Why the content cannot be used; `None` if it can.
    fault: Option<String>,
}

/// The newest model of a run, as a reader checks it.
#[derive(Debug, Clone, Default)]
struct PublishedModel {
    version: u64,
    /// SHA-256 of its 32-bit floats.
    digest: Vec<u8>,
    /// Key of the run's models.
    key: Vec<u8>,
    signature: Vec<u8>,
}

/// A request of a client to the driver.
enum Request {
    CheckIn {
        caller: Caller,
        identity_key: Option<[u8; 32]>,
        wait: Duration,
        reply: oneshot::Sender<Result<v1::CheckInResponse, Denial>>,
    },
    /// Whether the client may upload for a task; with `None`, whether it is who it states.
    Admit {
        caller: Caller,
        task: Option<u64>,
        reply: oneshot::Sender<Result<(), Denial>>,
    },
    Commit {
        caller: Caller,
        submission: Submission,
        reply: oneshot::Sender<Result<v1::CommitUpdateResponse, Denial>>,
    },
    /// Answers whether the client was revoked now.
    Revoke {
        client: String,
        reply: oneshot::Sender<Result<bool, Denial>>,
    },
    /// Asks for the newest model; the content is read from its record.
    Publish {
        reply: oneshot::Sender<Result<PublishedModel, Denial>>,
    },
    /// Reads a part of the client's correction at a version, and its length.
    Correction {
        caller: Caller,
        version: u64,
        offset: u64,
        bytes: usize,
        reply: oneshot::Sender<Result<(Vec<u8>, u64), Denial>>,
    },
    GiveUp {
        caller: Caller,
        task: u64,
        reply: oneshot::Sender<Result<(), Denial>>,
    },
    Exchange {
        caller: Caller,
        message: v1::ExchangeMasksRequest,
        reply: oneshot::Sender<Result<v1::ExchangeMasksResponse, Denial>>,
    },
}

/// Driver of one Federated run.
pub(in crate::runs) struct FederatedDriver {
    pub(in crate::runs) shared: Arc<Shared>,
    pub(in crate::runs) run: RunId,
    pub(in crate::runs) state: RunState,
    pub(in crate::runs) version: u64,
    pub(in crate::runs) federated: FederatedRun,
    pub(in crate::runs) status: watch::Sender<Status>,
    pub(in crate::runs) orders: watch::Receiver<Order>,
}

/// Why a driver stops before its run is complete.
enum Interruption {
    /// Another driver has the run.
    Superseded,
    Ordered(Order),
    Failed {
        code: &'static str,
        message: String,
    },
}

fn failed(code: Code, message: impl Into<String>) -> Interruption {
    Interruption::Failed { code: code.id(), message: message.into() }
}

/// Milliseconds since 1970 by the clock of this worker.
fn now_millis() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

/// Removes the contents of a run that is removed, or will not continue.
pub(in crate::runs) async fn forget_contents(shared: &Arc<Shared>, run: RunId, identity: RunId) -> Result<(), Problem> {
    let contents = Contents::new(shared, run, identity);
    contents.sweep(|_| false).await?;
    contents.remove_orphans().await
}

/// Registration of a driver; dropping it ends the registration.
struct Registration {
    shared: Arc<Shared>,
    run: RunId,
    name: String,
    sender: mpsc::Sender<Request>,
}

impl Drop for Registration {
    fn drop(&mut self) {
        let mut drivers = self.shared.runs.federated.0.lock();
        if drivers.get(&self.run).is_some_and(|other| other.same_channel(&self.sender)) {
            drivers.remove(&self.run);
            self.shared.metrics.federated.remove_gauges(&self.name);
        }
    }
}

impl FederatedDriver {
    /// Drives the run to its end, however long the clients take. If dropped at any await, another driver can continue.
    pub(in crate::runs) async fn run(mut self) {
        let started = (Instant::now(), self.state.elapsed_ms);
        let result = self.drive_rounds(started).await;
        self.state.elapsed_ms = started.1 + started.0.elapsed().as_millis() as u64;
        let mut page = None;
        let (phase, code, message) = match result {
            Ok((row, message)) => {
                page = Some(row);
                (Phase::Succeeded, "", message)
            }
            Err(Interruption::Superseded) => return,
            Err(Interruption::Ordered(Order::Cancel)) => (Phase::Cancelled, "", "cancelled".to_owned()),
            Err(Interruption::Ordered(_)) => {
                self.state.suspended = true;
                (self.state.phase, "", String::new())
            }
            Err(Interruption::Failed { code, message }) => {
                page = self.page_of_failure(&message);
                (Phase::Failed, code, message)
            }
        };
        if phase.is_final() {
            self.state.end(phase, code, message, SystemTime::now());
        } else {
            (self.state.code, self.state.message) = (String::new(), message);
        }
        if self.write_record(page).await.is_err() {
            return;
        }
        if phase.is_final() {
            self.keep_final_model().await;
        }
        let state = &self.state;
        self.status.send_modify(|status| {
            status.phase = state.reported_phase();
            (status.epoch, status.epochs) = (state.done, state.epochs);
            (status.code, status.message) = (state.code.clone(), state.message.clone());
            (status.outputs, status.elapsed_s) = (state.outputs(), state.elapsed_ms as f64 / 1_000.0);
            status.metrics.extend(state.metrics.clone());
        });
    }

    /// The report page of a run that failed: its course until then.
    fn page_of_failure(&mut self, message: &str) -> Option<Vec<u8>> {
        let job = Job::new(&self.state.name, &self.federated).ok()?;
        progress::findings(&mut self.state, &job, message).ok()
    }

    /// Removes everything but the last model; what is left by a failure is removed with the run.
    async fn keep_final_model(&self) {
        let version = self.state.federated.as_ref().map_or(0, |federated| federated.version);
        let contents = Contents::new(&self.shared, self.run, self.state.identity(self.run));
        if let Err(problem) = contents.sweep(|name| name == ContentName::Model(version)).await {
            tracing::debug!(run = %self.run, problem = problem.message, "failed to remove contents of an ended run");
        }
    }

    /// Serves clients until the run ends. Returns the row of the report page, and why it ended early.
    async fn drive_rounds(&mut self, started: (Instant, u64)) -> Result<(Vec<u8>, String), Interruption> {
        let job = Job::new(&self.state.name, &self.federated)
            .map_err(|error| failed(Code::InvalidValue, error.to_string()))?;
        self.state.phase = Phase::Running;
        self.state.epochs = Some(job.rounds.versions);
        self.state.federated.get_or_insert_with(FederatedState::default);
        self.write_record(None).await?;
        let contents = Contents::new(&self.shared, self.run, self.state.identity(self.run));
        let mut core = Core::open(job, contents, &self.orders).await?;
        let (sender, mut requests) = mpsc::channel(QUEUE);
        self.shared.runs.federated.0.lock().insert(self.run, sender.clone());
        let name = self.state.name.clone();
        self.shared.metrics.federated.begin(&name);
        let _registration = Registration { shared: Arc::clone(&self.shared), run: self.run, name, sender };
        let outcome = self.serve_clients(&mut core, &mut requests, started).await?;
        self.finish(&core, outcome, started)
    }

    async fn serve_clients(
        &mut self,
        core: &mut Core,
        requests: &mut mpsc::Receiver<Request>,
        started: (Instant, u64),
    ) -> Result<Outcome, Interruption> {
        let mut orders = self.orders.clone();
        let mut batch = Vec::with_capacity(BATCH);
        let mut version_began = Instant::now();
        loop {
            self.show(core, started);
            if let Some(outcome) = core.outcome() {
                core.end_waits();
                return Ok(outcome);
            }
            tokio::select! {
                order = orders.wait_for(|order| *order != Order::Continue) => {
                    if let Ok(order) = order {
                        return Err(Interruption::Ordered(*order));
                    }
                }
                _ = requests.recv_many(&mut batch, BATCH) => {}
                () = tokio::time::sleep(core.time_to_deadline().min(TICK)) => {}
            }
            let requests = std::mem::take(&mut batch);
            core.handle(requests);
            core.write_state().await?;
            core.send_answers();
            core.sweep_unused().await?;
            while let Some(step) = core.aggregate_next().await? {
                self.note(core, step, &mut version_began, started).await?;
                core.send_answers();
                self.show(core, started);
            }
        }
    }

    /// Records a new version.
    async fn note(
        &mut self,
        core: &Core,
        step: Step,
        began: &mut Instant,
        started: (Instant, u64),
    ) -> Result<(), Interruption> {
        let seconds = std::mem::replace(began, Instant::now()).elapsed().as_secs_f64();
        self.state.elapsed_ms = started.1 + started.0.elapsed().as_millis() as u64;
        progress::note(&mut self.state, core, &step, seconds);
        self.shared.metrics.federated.aggregated(&self.state.name, step.updates.len(), step.seconds);
        self.write_record(None).await
    }

    fn finish(
        &mut self,
        core: &Core,
        outcome: Outcome,
        started: (Instant, u64),
    ) -> Result<(Vec<u8>, String), Interruption> {
        self.show(core, started);
        let message = match outcome {
            Outcome::Complete => String::new(),
            Outcome::Stopped => return Err(Interruption::Ordered(Order::Cancel)),
            Outcome::TooManyAborts => {
                let text = "ten rounds in sequence ended without enough updates: see spec.federated.clients.minimum and deadline";
                return Err(failed(Code::RunFailed, text));
            }
            Outcome::Exhausted { needed, epsilon, delta } => {
                let text = format!(
                    "privacy budget exhausted: the next round would spend epsilon {needed:.4} of {epsilon} at delta {delta:e}"
                );
                if self.state.done == 0 {
                    return Err(failed(Code::RunFailed, text));
                }
                text
            }
        };
        let page = progress::findings(&mut self.state, core.job(), &message)
            .map_err(|error| failed(Code::RunFailed, error.to_string()))?;
        Ok((page, message))
    }

    /// Shows the progress to those that watch the run.
    fn show(&mut self, core: &Core, started: (Instant, u64)) {
        progress::update(&mut self.state, core);
        self.shared.metrics.federated.show(&self.state.name, core.service().enrolled(), core.epsilon());
        let message = progress::message(core);
        let state = &self.state;
        let elapsed_s = (started.1 + started.0.elapsed().as_millis() as u64) as f64 / 1_000.0;
        self.status.send_if_modified(|status| {
            let is_same = status.phase == state.phase
                && (status.epoch, status.updates) == (state.done, state.updates)
                && status.message == message
                && status.metrics == state.metrics;
            (status.phase, status.message) = (state.phase, message);
            (status.epoch, status.epochs, status.updates) = (state.done, state.epochs, state.updates);
            status.elapsed_s = elapsed_s;
            status.metrics.clone_from(&state.metrics);
            status.epochs_per_s = if elapsed_s > 0.0 { state.done as f64 / elapsed_s } else { 0.0 };
            !is_same
        });
    }

    /// Writes the record of the run, with retries.
    async fn write_record(&mut self, row: Option<Vec<u8>>) -> Result<(), Interruption> {
        let recorder = Recorder { shared: Arc::clone(&self.shared) };
        loop {
            match recorder.record(self.run, self.version, self.state.encode(), row.clone()).await {
                Ok(()) => {
                    self.version += 1;
                    return Ok(());
                }
                // A write whose result was lost ends here as well: the next driver reads the record again.
                Err(LogError::Superseded) => return Err(Interruption::Superseded),
                Err(LogError::Cluster(ClusterError::Temporary(_))) => tokio::time::sleep(RETRY_INTERVAL).await,
                Err(LogError::Cluster(ClusterError::Permanent { code, message })) => {
                    return Err(Interruption::Failed { code, message });
                }
            }
        }
    }
}

/// Repeats a call while the partition cannot answer.
async fn patiently<T, F: Future<Output = Result<T, Problem>>>(call: impl Fn() -> F) -> Result<T, Interruption> {
    use engram_proto::v1::ProblemKind;
    loop {
        match call().await {
            Ok(value) => return Ok(value),
            Err(problem) => match problem.kind() {
                ProblemKind::DataCorruption | ProblemKind::Invalid | ProblemKind::BufferUnknown => {
                    return Err(failed(Code::RunFailed, problem.message));
                }
                ProblemKind::NotPrimary => return Err(Interruption::Superseded),
                _ => tokio::time::sleep(RETRY_INTERVAL).await,
            },
        }
    }
}

/// Returns whether a write that may lose was done; a full partition fails the run.
fn done(written: &Written) -> Result<bool, Interruption> {
    match written {
        Written::Done => Ok(true),
        Written::Conflict => Ok(false),
        Written::Full => Err(failed(
            Code::RunFailed,
            "the partition of the run has no room for its model and updates; remove runs that have ended, or make the model smaller",
        )),
    }
}
