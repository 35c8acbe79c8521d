//! Learning runs whose records are in this worker's partitions: it drives them and reports their status.
//!
//! A run belongs to the primary of its partition. When the map assigns a partition to this worker, its unfinished runs continue
//! here; when a partition moves to another worker, so do its runs.

mod credentials;
mod driver_task;
mod federated;
mod fetch;
mod frame;
mod identity;
mod input;
pub(crate) mod local_files;
pub(crate) mod record;
mod removal;
mod replay;
mod service;
mod snapshot;
mod specification;
mod tasks;
mod turns;

pub(crate) use federated::{FederatedEndpoint, FederatedMetrics};
pub(crate) use service::RunEndpoint;
pub(crate) use snapshot::outgoing;

use crate::engine::device::Device;
use crate::observability::panics;
use crate::options::Options;
use crate::shared::Shared;
use driver_task::DriverTask;
use engram_api::{Code, RunKind};
use engram_learn::run::{ClientCluster, ClusterFacts, Conditions, Driver, Job, Order, Phase, RunState, Status};
use engram_learn::source::SourceOptions;
use engram_learn::task_run::ComputeDevice;
use engram_memory::{Command, OnMissing, PartitionId, RunId, run::Entry};
use engram_objects::EndpointOwner;
use engram_objects::Keys;
use engram_proto::v1::{self, Problem, ProblemKind};
use engram_trace::Span;
use futures::FutureExt as _;
use parking_lot::{Mutex, MutexGuard, RwLock};
use record::Recorder;
use std::collections::{BTreeMap, BTreeSet};
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::{Duration, SystemTime};
use tokio::sync::watch;

/// Retry hint for runs of a partition that was just activated, in milliseconds, and the pause after a failed read of an input: the partition may be
/// another worker's, which does not announce that it can be read.
const ACTIVATION_RETRY_MS: u64 = 50;
/// Interval between attempts to record a failed run, for which no caller waits.
const FAILURE_RETRY_INTERVAL: Duration = Duration::from_secs(1);
/// Longer messages of panics are shortened.
const MAX_PANIC_CHARS: usize = 200;
/// Maximum number of runs remembered as recorded.
const MAX_KNOWN_RUNS: usize = 65_536;

/// Runs driven by this worker.
#[derive(Default)]
pub(crate) struct Runs {
    active: Mutex<BTreeMap<RunId, ActiveRun>>,
    /// Serializes replacements of ended runs.
    replacing: tokio::sync::Mutex<()>,
    /// Notified when a driver ends.
    driver_ended: watch::Sender<()>,
    /// Notified when a run releases the turn at this worker.
    released: tokio::sync::Notify,
    /// Serializes changes of the turn, and holds its queue.
    pub(crate) turn: tokio::sync::Mutex<turns::queue::TurnQueue>,
    /// Runs known to be recorded. Locked during a query, so that unknown runs cause one at a time.
    recorded: tokio::sync::Mutex<BTreeSet<RunId>>,
    /// Permission to drive a run of tasks.
    pub(crate) driver_slot: tasks::run::DriverSlot,
    /// Permission to execute a task of a run.
    pub(crate) task_slot: tasks::TaskSlot,
    /// GPUs of tasks.
    task_gpus: tasks::gpus::TaskGpus,
    /// Drivers of Federated runs, which answer the clients.
    federated: federated::Drivers,
    /// Quality of the whole cluster, as the driver of an epoch announced it last.
    pub(crate) broadcast: RwLock<Option<v1::BroadcastQualityRequest>>,
    /// Credentials of the storages of runs, if supplied.
    credentials: watch::Sender<BTreeMap<RunId, Keys>>,
}

/// A run with a driver.
struct ActiveRun {
    name: String,
    status: watch::Receiver<Status>,
    orders: watch::Sender<Order>,
    driver: DriverTask,
}

/// Status of a run as the worker reports it.
#[derive(Debug, Clone)]
pub(crate) struct RunOverview {
    /// Identity of its epochs.
    pub(crate) run: RunId,
    /// Identity of its submission.
    pub(crate) uid: String,
    /// End time in milliseconds since 1970; 0 = not ended.
    pub(crate) ended_ms: u64,
    pub(crate) name: String,
    pub(crate) status: Status,
    /// `spec.managedBy` of its object; empty if there is none.
    pub(crate) managed_by: String,
    /// `spec.kind`.
    pub(crate) kind: String,
    /// Fingerprint of the specification.
    pub(crate) spec_fingerprint: String,
}

impl Runs {
    /// Returns the GPUs of tasks and trainings. The first call may block for seconds.
    pub(crate) fn task_gpus(&self, options: &Options, device: &Device) -> &[ComputeDevice] {
        self.task_gpus.opened_by(options, device)
    }

    fn active(&self) -> MutexGuard<'_, BTreeMap<RunId, ActiveRun>> {
        self.active.lock()
    }

    /// Checks that a run is recorded in the cluster: every partition keeps state of each run that has epochs, so a client must not
    /// make up runs.
    pub(crate) async fn check_recorded(&self, shared: &Shared, run: RunId) -> Result<(), Problem> {
        let mut recorded = self.recorded.lock().await;
        if recorded.contains(&run) {
            return Ok(());
        }
        let runs = shared.client.list_runs().await.map_err(|error| crate::service::read::client_problem(&error))?;
        let ids = runs.iter().filter_map(|status| engram_proto::answers::run_id(&status.run).ok());
        *recorded = ids.take(MAX_KNOWN_RUNS).collect();
        if recorded.contains(&run) {
            return Ok(());
        }
        let text = format!("run: {run} is not recorded in this cluster; allowed: runs that were submitted");
        Err(Problem::of(ProblemKind::RunUnknown, text))
    }

    /// Starts drivers for the runs of the partitions served here, and stops those of runs that moved. Returns whether all records
    /// were readable; otherwise it must be called again.
    pub(crate) async fn reconcile(shared: &Arc<Shared>) -> bool {
        shared.runs.active().retain(|run, active| {
            let is_here = shared.engine.position(partition(shared, *run)).is_some();
            if !is_here {
                active.driver.abort();
            }
            is_here
        });
        credentials::forget_elsewhere(shared);
        let Ok((recorded, complete)) = record::all(shared).await else { return false };
        let here: BTreeMap<RunId, Entry> = recorded.into_iter().collect();
        for (run, entry) in here {
            match RunState::of(&entry) {
                Ok(state) if state.phase.is_final() => {
                    // Its driver may have died between the last record and the release of the turn.
                    let (shared, identity) = (Arc::clone(shared), state.identity(run));
                    tokio::spawn(async move {
                        // Failures are repaired by the next holder.
                        let _ = shared.client.release_turn(identity).await;
                        let _ = input::forget(&shared, run, identity).await;
                    });
                }
                Ok(state) if state.reported_phase() == Phase::Suspended => {
                    // The status of an ended driver is older than the record.
                    shared.runs.active().retain(|other, active| *other != run || !active.driver.is_finished());
                    let (peers, identity) = (shared.client.clone(), state.identity(run));
                    tokio::spawn(async move { peers.release_turn(identity).await });
                }
                Ok(state) => Self::drive(shared, run, state, entry.version),
                Err(error) => tracing::error!(%run, %error, "failed to resume run"),
            }
        }
        complete
    }

    /// Returns whether a run lost its driver before it finished: another driver wrote the record meanwhile, and may be gone too.
    pub(crate) fn is_unattended(&self) -> bool {
        let is_inactive = |phase: Phase| phase.is_final() || phase == Phase::Suspended;
        self.active().values().any(|active| active.driver.is_finished() && !is_inactive(active.status.borrow().phase))
    }

    /// Starts a driver, unless the run has one.
    pub(crate) fn drive(shared: &Arc<Shared>, run: RunId, state: RunState, version: u64) {
        let mut active = shared.runs.active();
        if active.get(&run).is_some_and(|active| !active.driver.is_finished()) {
            return;
        }
        let (status, updates) = watch::channel(first_status(&state));
        let (orders, received_orders) = watch::channel(Order::Continue);
        let name = state.name.clone();
        let spec = match spec(shared, &state) {
            Ok(spec) => spec,
            Err(error) => {
                tracing::error!(%run, %error, "failed to resume run");
                return;
            }
        };
        tracing::info!(%run, name, "driving run");
        let identity = state.identity(run);
        let shared = Arc::clone(shared);
        if let (RunKind::Snapshot, Some(location)) = (spec.kind, &spec.snapshot) {
            let location = location.clone();
            let driver = snapshot::Driver { shared, run, state, version, location, status, orders: received_orders };
            let driver = spawn_driver(&Arc::clone(&driver.shared), (run, identity), driver.run());
            active.insert(run, ActiveRun { name, status: updates, orders, driver });
            return;
        }
        if let (RunKind::Replay, Some(replay)) = (spec.kind, &spec.replay) {
            let replay = replay.clone();
            let driver = replay::ReplayDriver { shared, run, state, version, replay, status, orders: received_orders };
            let driver = spawn_driver(&Arc::clone(&driver.shared), (run, identity), driver.run());
            active.insert(run, ActiveRun { name, status: updates, orders, driver });
            return;
        }
        if let (RunKind::Federated, Some(federated)) = (spec.kind, &spec.federated) {
            let federated = federated.clone();
            let driver =
                federated::FederatedDriver { shared, run, state, version, federated, status, orders: received_orders };
            let driver = spawn_driver(&Arc::clone(&driver.shared), (run, identity), driver.run());
            active.insert(run, ActiveRun { name, status: updates, orders, driver });
            return;
        }
        if spec.kind.has_tasks() {
            let driver = tasks::run::Driver { shared, run, state, version, spec, status, orders: received_orders };
            let driver = spawn_driver(&Arc::clone(&driver.shared), (run, identity), driver.run());
            active.insert(run, ActiveRun { name, status: updates, orders, driver });
            return;
        }
        let object = input::object(&spec).cloned();
        let (mut job, is_supplied) = match job(&shared, spec) {
            Ok(job) => job,
            Err(error) => {
                tracing::error!(%run, %error, "failed to resume run");
                return;
            }
        };
        let driver = spawn_driver(&Arc::clone(&shared), (run, identity), async move {
            // The driver would fail the run without its input, so it ends and is started again.
            if let Err(problem) = input::fill(&shared, (run, identity), is_supplied, &mut job.source).await {
                tracing::warn!(%run, problem = problem.message, "failed to read run input; retrying");
                tokio::time::sleep(Duration::from_millis(ACTIVATION_RETRY_MS)).await;
                return;
            }
            let cluster = ClientCluster::new(shared.client.clone(), facts(&shared));
            let recorder = Recorder { shared: Arc::clone(&shared) };
            let overview = status.subscribe();
            let mut driver = Driver::new(run, job, (state, version), cluster, recorder, status, received_orders);
            if let Some(location) = object {
                driver =
                    driver.with_fetcher(Box::new(fetch::ObjectFetcher { shared: Arc::clone(&shared), run, location }));
            }
            driver.run().await;
            if overview.borrow().phase.is_final() {
                credentials::forget(&shared, run);
                if is_supplied {
                    // Otherwise the next primary of the partition does it.
                    let _ = input::forget(&shared, run, identity).await;
                }
            }
        });
        active.insert(run, ActiveRun { name, status: updates, orders, driver });
    }

    /// Returns name and status updates of a run with a driver here.
    pub(crate) fn watch(&self, run: RunId) -> Option<(String, watch::Receiver<Status>)> {
        self.active().get(&run).map(|active| (active.name.clone(), active.status.clone()))
    }

    /// Sends an order to a driver; returns whether the run has one here.
    pub(crate) fn order(&self, run: RunId, order: Order) -> bool {
        let active = self.active();
        let Some(active) = active.get(&run).filter(|active| !active.driver.is_finished()) else { return false };
        active.orders.send_if_modified(|last| {
            // A cancelled driver takes no further orders.
            let is_new = *last != order && *last != Order::Cancel;
            if is_new {
                *last = order;
            }
            is_new
        });
        true
    }

    /// Returns a receiver that is notified when a driver ends.
    pub(crate) fn driver_ends(&self) -> watch::Receiver<()> {
        self.driver_ended.subscribe()
    }

    /// Waits until a run has no driver here.
    async fn wait_for_driver(&self, run: RunId) {
        let running = || {
            let active = self.active();
            active.get(&run).filter(|active| !active.driver.is_finished()).map(|active| active.driver.running())
        };
        while let Some(mut running) = running() {
            // An error means that the driver has ended.
            let _ = running.wait_for(|running| !running).await;
        }
    }

    /// Starts a driver for a suspended run, once the previous one has ended.
    pub(crate) fn resume(shared: &Arc<Shared>, run: RunId, state: RunState, version: u64) {
        let shared = Arc::clone(shared);
        tokio::spawn(async move {
            shared.runs.wait_for_driver(run).await;
            if shared.engine.position(partition(&shared, run)).is_some() {
                Self::drive(&shared, run, state, version);
            }
        });
    }

    /// Aborts all drivers: others continue from the records.
    pub(crate) fn stop(&self) {
        self.active().values().for_each(|active| active.driver.abort());
    }

    /// Returns the status of every run recorded here.
    ///
    /// # Errors
    /// Not all partitions served here are readable.
    pub(crate) async fn list(shared: &Arc<Shared>) -> Result<Vec<RunOverview>, Problem> {
        let (recorded, complete) = record::all(shared).await?;
        if !complete {
            return Err(Problem::of(ProblemKind::Unavailable, "a partition was just activated")
                .retry_after(ACTIVATION_RETRY_MS));
        }
        let overview = recorded.into_iter().filter_map(|(run, entry)| Self::overview(shared, run, &entry)).collect();
        Ok(overview)
    }

    /// Returns the status of a run, from its driver, or else its record.
    pub(crate) fn overview(shared: &Shared, run: RunId, entry: &Entry) -> Option<RunOverview> {
        let state = RunState::of(entry).ok()?;
        let suspended = state.reported_phase() == Phase::Suspended;
        let is_live = |status: &Status| !state.phase.is_final() && (!suspended || status.phase == Phase::Suspended);
        let live = shared.runs.watch(run).filter(|(_, status)| is_live(&status.borrow()));
        let status = live.map_or_else(|| first_status(&state), |(_, status)| status.borrow().clone());
        let text_field = |field: &str| state.spec[field].as_str().unwrap_or_default().to_owned();
        let (managed_by, kind) = (text_field("managedBy"), text_field("kind"));
        let spec_fingerprint = engram_learn::run::spec_fingerprint(&state.spec);
        let (run, uid, ended_ms) = (state.identity(run), state.uid, state.ended_ms);
        Some(RunOverview { run, uid, ended_ms, name: state.name, status, managed_by, kind, spec_fingerprint })
    }
}

fn spawn_driver(
    shared: &Arc<Shared>,
    ids: (RunId, RunId),
    driver: impl Future<Output = ()> + Send + 'static,
) -> DriverTask {
    DriverTask::spawn(shared.runs.driver_ended.clone(), guarded(Arc::clone(shared), ids, driver))
}

/// Runs a driver. One that panics would panic again, so its run fails.
async fn guarded(shared: Arc<Shared>, (run, identity): (RunId, RunId), driver: impl Future<Output = ()>) {
    let mut span = Span::agreed(engram_wire::run_trace(run), None, "run");
    span.set("engram.run.id", run.to_string());
    let Err(payload) = AssertUnwindSafe(driver).catch_unwind().await else { return };
    span.fail("the driver panicked");
    drop(span);
    let panic = panics::message(&*payload);
    tracing::error!(%run, panic, "the driver of a run panicked");
    while let Err(problem) = fail(&shared, run, panic).await {
        tracing::warn!(%run, problem = problem.message, "failed to record a failed run; retrying");
        tokio::time::sleep(FAILURE_RETRY_INTERVAL).await;
    }
    credentials::forget(&shared, run);
    let _ = shared.client.release_turn(identity).await;
    let _ = input::forget(&shared, run, identity).await;
    shared.runs.active().remove(&run);
}

/// Records that a run failed by a panic, unless it has ended or moved.
async fn fail(shared: &Shared, run: RunId, panic: &str) -> Result<(), Problem> {
    let partition = partition(shared, run);
    if shared.engine.position(partition).is_none() {
        return Ok(());
    }
    let Some(entry) = record::load(shared, partition, run).await? else { return Ok(()) };
    let Ok(mut state) = RunState::of(&entry) else { return Ok(()) };
    if state.phase.is_final() {
        return Ok(());
    }
    let panic: String = panic.chars().take(MAX_PANIC_CHARS).collect();
    let message = format!("the driver of the run panicked, which is a bug of Engram: {panic}");
    state.end(Phase::Failed, Code::RunFailed.id(), message, SystemTime::now());
    let command = Command::RunRecord { run, expected: entry.version, state: state.encode(), row: None };
    // Of two writers the other wins.
    record::write(shared, partition, command).await.map(drop)
}

/// Derives the status from a record.
fn first_status(state: &RunState) -> Status {
    let elapsed_s = state.elapsed_ms as f64 / 1_000.0;
    let per_second = |count: u64| if elapsed_s > 0.0 { count as f64 / elapsed_s } else { 0.0 };
    let mut status = Status {
        phase: state.reported_phase(),
        epoch: state.done,
        epochs: state.epochs,
        updates: state.updates,
        elapsed_s,
        epochs_per_s: per_second(state.done),
        updates_per_s: per_second(state.updates),
        message: state.message.clone(),
        code: state.code.clone(),
        snapshot: state.snapshot.as_ref().and_then(|snapshot| snapshot.written.clone()),
        metrics: state.metrics.clone(),
        outputs: state.outputs(),
        ..Status::default()
    };
    let experiment = state.result.as_ref().and_then(|result| result.experiment.as_ref());
    if let Some(experiment) = experiment {
        status.metrics.insert("separation".into(), experiment.separation);
        status.metrics.extend(experiment.convergence_factor.map(|factor| ("convergence".into(), factor)));
        status.metrics.insert("inversion_ratio".into(), experiment.inversion_ratio);
    }
    status
}

fn facts(shared: &Shared) -> ClusterFacts {
    let spec = &shared.setup.options.spec;
    ClusterFacts {
        name: shared.setup.options.cluster_name.clone(),
        workers: spec.workers,
        partitions: shared.partitions(),
        rate: spec.learning.rate,
        initial_weight: spec.learning.initial_weight,
    }
}

/// Parses the specification of a run and fills in cluster defaults.
fn spec(shared: &Shared, state: &RunState) -> Result<engram_api::LearnerRunSpec, serde_json::Error> {
    let spec: engram_api::LearnerRunSpec = serde_json::from_value(state.spec.clone())?;
    Ok(spec.effective(Some(&shared.setup.options.spec)))
}

/// Returns the source of a run's epochs, without supplied content. Its paths are absolute, because the client made them so.
pub(crate) fn source(shared: &Shared, state: &RunState) -> Result<SourceOptions, serde_json::Error> {
    use serde::de::Error as _;
    let memory = spec(shared, state)?.memory.ok_or_else(|| serde_json::Error::missing_field("memory"))?;
    Ok(input::source(&memory.source, shared.setup.options.inputs.as_deref()))
}

/// Returns the job of a driver, and whether its source is supplied content.
fn job(shared: &Shared, spec: engram_api::LearnerRunSpec) -> Result<(Job, bool), serde_json::Error> {
    use serde::de::Error as _;
    let is_supplied = input::is_supplied(&spec);
    let memory = spec.memory.ok_or_else(|| serde_json::Error::missing_field("memory"))?;
    let source = input::source(&memory.source, shared.setup.options.inputs.as_deref());
    let report = &memory.report;
    let predictable = source.is_predictable();
    let job = Job {
        epochs: memory.epochs,
        decay: memory.decay.unwrap_or(shared.setup.options.spec.learning.decay),
        on_missing: match memory.on_missing {
            engram_api::OnMissing::Create => OnMissing::Create,
            engram_api::OnMissing::Report => OnMissing::Report,
        },
        top_k: if predictable { report.top_k().iter().map(|&k| k as u32).collect() } else { Vec::new() },
        skip: report.skip(),
        exact_inversion: report.inversion() == engram_api::Inversion::Exact,
        coverage: !predictable && report.coverage(),
        until: spec.until.map_or_else(Conditions::default, |until| Conditions {
            separation: until.separation,
            convergence: until.convergence,
        }),
        source,
    };
    Ok((job, is_supplied))
}

/// Returns who chose the endpoint in a run's specification: a client.
pub(crate) fn endpoint_owner(shared: &Shared) -> EndpointOwner {
    EndpointOwner::Client { allowed: shared.setup.options.spec.storage_endpoints.clone() }
}

/// Returns the partition of a run.
pub(crate) fn partition(shared: &Shared, run: RunId) -> PartitionId {
    RunState::partition(run, shared.partitions())
}

/// Converts a phase to the wire format.
pub(crate) const fn phase_to_wire(phase: Phase) -> v1::RunPhase {
    use engram_proto::v1::RunPhase;
    match phase {
        Phase::Queued => RunPhase::Queued,
        Phase::Running => RunPhase::Running,
        Phase::Succeeded => RunPhase::Succeeded,
        Phase::Failed => RunPhase::Failed,
        Phase::Cancelled => RunPhase::Cancelled,
        Phase::Suspended => RunPhase::Suspended,
    }
}
