//! The learning runs whose records live with this worker: it drives them, and answers for them.
//!
//! A run belongs to the primary of its partition. Whenever the map gives this worker partitions, the unfinished runs
//! recorded in them go on here; when a partition goes to another worker, so do its runs.

mod credentials;
mod fetch;
mod input;
mod record;
mod service;
mod snapshot;
mod turn;
mod waiting;

pub(crate) use service::Service;
pub(crate) use snapshot::outgoing;

use crate::shared::Shared;
use engram_api::RunKind;
use engram_learn::run::{Conditions, Connected, Driver, Facts, Job, Order, Phase, RunState, Status};
use engram_learn::source::SourceOptions;
use engram_memory::{OnMissing, PartitionId, RunId, run::Entry};
use engram_objects::Keys;
use engram_proto::v1::{Problem, ProblemKind};
use record::Recorder;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::watch;
use tokio::task::AbortHandle;

/// When to ask again for runs of a partition that was just taken over, in milliseconds.
const TAKE_OVER_MS: u64 = 50;
/// How often it is looked whether a driver has ended that was told to.
const LETTING_GO: Duration = Duration::from_millis(10);

/// The runs that this worker drives.
#[derive(Default)]
pub(crate) struct Runs {
    active: Mutex<BTreeMap<RunId, Active>>,
    /// One change of the turn at a time, and who waits for it.
    pub(crate) turn: tokio::sync::Mutex<waiting::Waiting>,
    /// Of the storages that runs name, where somebody handed them over.
    credentials: watch::Sender<BTreeMap<RunId, Keys>>,
}

/// A run with a driver.
struct Active {
    name: String,
    status: watch::Receiver<Status>,
    orders: watch::Sender<Order>,
    driver: AbortHandle,
}

/// What a worker says of a run.
#[derive(Debug, Clone)]
pub(crate) struct Told {
    pub(crate) run: RunId,
    pub(crate) name: String,
    pub(crate) status: Status,
    /// Who looks after the object that it was made from; empty where there is none.
    pub(crate) managed_by: String,
    /// `spec.kind`.
    pub(crate) kind: String,
}

impl Runs {
    fn active(&self) -> MutexGuard<'_, BTreeMap<RunId, Active>> {
        self.active.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Drives what is recorded in the partitions served here and not driven yet; stops what went elsewhere. Whether that was all:
    /// else it is to be called again.
    pub(crate) async fn follow(shared: &Arc<Shared>) -> bool {
        shared.runs.active().retain(|run, active| {
            let stays = shared.engine.position(partition(shared, *run)).is_some();
            if !stays {
                active.driver.abort();
            }
            stays
        });
        credentials::forget_elsewhere(shared);
        let Ok((recorded, complete)) = record::all(shared).await else { return false };
        let here: BTreeMap<RunId, Entry> = recorded.into_iter().collect();
        for (run, entry) in here {
            match RunState::of(&entry) {
                Ok(state) if state.phase.is_final() => {
                    // Its driver may have died between the last record and the return of the turn.
                    let shared = Arc::clone(shared);
                    tokio::spawn(async move {
                        // Whoever comes next asks again.
                        let _ = shared.peers.return_turn(run).await;
                        let _ = input::forget(&shared, run).await;
                    });
                }
                Ok(state) if state.told_phase() == Phase::Suspended => {
                    // One that has ended without it knows less than the record.
                    shared.runs.active().retain(|other, active| *other != run || !active.driver.is_finished());
                    let peers = shared.peers.clone();
                    tokio::spawn(async move { peers.return_turn(run).await });
                }
                Ok(state) => Self::drive(shared, run, state, entry.version),
                Err(error) => tracing::error!(%run, %error, "cannot go on with a run"),
            }
        }
        complete
    }

    /// Whether a run has lost its driver before its end: another driver wrote the record meanwhile, and may be gone too.
    pub(crate) fn is_unattended(&self) -> bool {
        let is_at_rest = |phase: Phase| phase.is_final() || phase == Phase::Suspended;
        self.active().values().any(|active| active.driver.is_finished() && !is_at_rest(active.status.borrow().phase))
    }

    /// Starts a driver, unless the run has one.
    pub(crate) fn drive(shared: &Arc<Shared>, run: RunId, state: RunState, version: u64) {
        let mut active = shared.runs.active();
        if active.get(&run).is_some_and(|active| !active.driver.is_finished()) {
            return;
        }
        let (status, watched) = watch::channel(first_status(&state));
        let (orders, ordered) = watch::channel(Order::GoOn);
        let name = state.name.clone();
        let spec = match spec(shared, &state) {
            Ok(spec) => spec,
            Err(error) => {
                tracing::error!(%run, %error, "cannot go on with a run");
                return;
            }
        };
        tracing::info!(%run, name, "drives a run");
        let shared = Arc::clone(shared);
        if let (RunKind::Snapshot, Some(place)) = (spec.kind, &spec.snapshot) {
            let place = place.clone();
            let driver = snapshot::Driver { shared, run, state, version, place, status, orders: ordered };
            let driver = tokio::spawn(driver.run()).abort_handle();
            active.insert(run, Active { name, status: watched, orders, driver });
            return;
        }
        let place = input::place(&spec).cloned();
        let (mut job, handed_over) = match job(&shared, spec) {
            Ok(job) => job,
            Err(error) => {
                tracing::error!(%run, %error, "cannot go on with a run");
                return;
            }
        };
        let driver = tokio::spawn(async move {
            // Without it the driver would fail the run; so it ends, and is started again.
            if let Err(problem) = input::fill(&shared, run, handed_over, &mut job.source).await {
                tracing::warn!(%run, problem = problem.message, "the input of a run cannot be read yet");
                tokio::time::sleep(Duration::from_millis(TAKE_OVER_MS)).await;
                return;
            }
            let cluster = Connected::new(shared.peers.clone(), facts(&shared));
            let recorder = Recorder { shared: Arc::clone(&shared) };
            let told = status.subscribe();
            let mut driver = Driver::new(run, job, (state, version), cluster, recorder, status, ordered);
            if let Some(place) = place {
                driver = driver.fetched_by(Box::new(fetch::Storage { shared: Arc::clone(&shared), run, place }));
            }
            driver.run().await;
            if told.borrow().phase.is_final() {
                credentials::forget(&shared, run);
                if handed_over {
                    // The next primary of the partition does it otherwise.
                    let _ = input::forget(&shared, run).await;
                }
            }
        });
        let driver = driver.abort_handle();
        active.insert(run, Active { name, status: watched, orders, driver });
    }

    /// Follows a run that has a driver here.
    pub(crate) fn watch(&self, run: RunId) -> Option<(String, watch::Receiver<Status>)> {
        self.active().get(&run).map(|active| (active.name.clone(), active.status.clone()))
    }

    /// Orders something of a run; whether it has a driver here.
    pub(crate) fn order(&self, run: RunId, order: Order) -> bool {
        let active = self.active();
        let Some(active) = active.get(&run).filter(|active| !active.driver.is_finished()) else { return false };
        active.orders.send_if_modified(|last| {
            // Who was told to stop for good does.
            let is_new = *last != order && *last != Order::Cancel;
            if is_new {
                *last = order;
            }
            is_new
        });
        true
    }

    /// Whether a run has a driver here that has not ended.
    fn is_driven(&self, run: RunId) -> bool {
        self.active().get(&run).is_some_and(|active| !active.driver.is_finished())
    }

    /// Starts a driver for a run that was suspended, once the one before has let go of it.
    pub(crate) fn resume(shared: &Arc<Shared>, run: RunId, state: RunState, version: u64) {
        let shared = Arc::clone(shared);
        tokio::spawn(async move {
            while shared.runs.is_driven(run) {
                tokio::time::sleep(LETTING_GO).await;
            }
            if shared.engine.position(partition(&shared, run)).is_some() {
                Self::drive(&shared, run, state, version);
            }
        });
    }

    /// Stops all drivers, at once: another goes on from the record.
    pub(crate) fn stop(&self) {
        self.active().values().for_each(|active| active.driver.abort());
    }

    /// The status of every run recorded here.
    ///
    /// # Errors
    /// Not all that is served here can be read now.
    pub(crate) async fn list(shared: &Arc<Shared>) -> Result<Vec<Told>, Problem> {
        let (recorded, complete) = record::all(shared).await?;
        if !complete {
            return Err(
                Problem::of(ProblemKind::Unavailable, "a partition was just taken over").retry_after(TAKE_OVER_MS)
            );
        }
        let told = recorded.into_iter().filter_map(|(run, entry)| Self::told(shared, run, &entry)).collect();
        Ok(told)
    }

    /// What is known of a run: by its driver, else by its record.
    pub(crate) fn told(shared: &Shared, run: RunId, entry: &Entry) -> Option<Told> {
        let state = RunState::of(entry).ok()?;
        let suspended = state.told_phase() == Phase::Suspended;
        let is_live = |status: &Status| !state.phase.is_final() && (!suspended || status.phase == Phase::Suspended);
        let live = shared.runs.watch(run).filter(|(_, status)| is_live(&status.borrow()));
        let status = live.map_or_else(|| first_status(&state), |(_, status)| status.borrow().clone());
        let said = |field: &str| state.spec[field].as_str().unwrap_or_default().to_owned();
        let (managed_by, kind) = (said("managedBy"), said("kind"));
        Some(Told { run, name: state.name, status, managed_by, kind })
    }
}

/// The status that a record stands for.
fn first_status(state: &RunState) -> Status {
    let elapsed_s = state.elapsed_ms as f64 / 1_000.0;
    let per_second = |count: u64| if elapsed_s > 0.0 { count as f64 / elapsed_s } else { 0.0 };
    let mut status = Status {
        phase: state.told_phase(),
        epoch: state.done,
        epochs: state.epochs,
        updates: state.updates,
        elapsed_s,
        epochs_per_s: per_second(state.done),
        updates_per_s: per_second(state.updates),
        message: state.message.clone(),
        code: state.code.clone(),
        snapshot: state.snapshot.as_ref().and_then(|snapshot| snapshot.written.clone()),
        ..Status::default()
    };
    let experiment = state.result.as_ref().and_then(|result| result.experiment.as_ref());
    if let Some(found) = experiment {
        status.metrics.insert("separation".into(), found.separation);
        status.metrics.extend(found.convergence_factor.map(|factor| ("convergence".into(), factor)));
        status.metrics.insert("inversion_ratio".into(), found.inversion_ratio);
    }
    status
}

fn facts(shared: &Shared) -> Facts {
    let spec = &shared.options.spec;
    Facts {
        name: shared.options.cluster_name.clone(),
        workers: spec.workers,
        partitions: shared.partitions(),
        rate: spec.learning.rate,
        initial_weight: spec.learning.initial_weight,
    }
}

/// Reads the specification of a run and fills in what it leaves to the cluster.
fn spec(shared: &Shared, state: &RunState) -> Result<engram_api::LearnerRunSpec, serde_json::Error> {
    let spec: engram_api::LearnerRunSpec = serde_json::from_value(state.spec.clone())?;
    Ok(spec.effective(Some(&shared.options.spec)))
}

/// Where the epochs of a run come from, without content that was handed over. Its paths are absolute: whoever submitted it made them so.
pub(crate) fn source(shared: &Shared, state: &RunState) -> Result<SourceOptions, serde_json::Error> {
    use serde::de::Error as _;
    let memory = spec(shared, state)?.memory.ok_or_else(|| serde_json::Error::missing_field("memory"))?;
    Ok(input::source(&memory.source, shared.options.inputs.as_deref()))
}

/// What a driver is to do, and whether its source is content that was handed over.
fn job(shared: &Shared, spec: engram_api::LearnerRunSpec) -> Result<(Job, bool), serde_json::Error> {
    use serde::de::Error as _;
    let handed_over = input::is_handed_over(&spec);
    let memory = spec.memory.ok_or_else(|| serde_json::Error::missing_field("memory"))?;
    let source = input::source(&memory.source, shared.options.inputs.as_deref());
    let report = &memory.report;
    let predictable = source.is_predictable();
    let job = Job {
        epochs: memory.epochs,
        decay: memory.decay.unwrap_or(shared.options.spec.learning.decay),
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
    Ok((job, handed_over))
}

/// The partition of a run.
pub(crate) fn partition(shared: &Shared, run: RunId) -> PartitionId {
    RunState::partition(run, shared.partitions())
}

/// The phase as it travels.
pub(crate) const fn phase_to_wire(phase: Phase) -> engram_proto::v1::RunPhase {
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
