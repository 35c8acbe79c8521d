//! The thread of a member that computes: gradient sums, reductions, updates, checkpoints.
//!
//! It executes what the member's state machine decides, one piece of work after another, and reports events. It never decides whether a
//! step counts.

use super::checkpoints::Checkpoints;
use super::connections::connect;
use super::files::{CheckpointFolder, ModelFiles};
use super::priorities::PriorityUpdates;
use super::reduce::{Connections, GroupReduce, ReduceError};
use super::serve::Served;
use super::source::{Source, SourceError, StepData};
use crate::shared::Shared;
use engram_api::{Code, SumOrder};
use engram_collective::executor::Executor;
use engram_collective::group::{Cause, MemberId, Position, Suspicion};
use engram_collective::transport;
use engram_neural::GradientSum;
use engram_proto::v1;
use engram_train::job::{Evaluation, Job, evaluate};
use engram_train::{Alone, Checkpoint, LocalGradient, LocalStep, SummationOrder, TrainError, Trainer};
use std::collections::BTreeMap;
use std::net::TcpListener;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};
use tokio::sync::{mpsc, oneshot, watch};
use xxhash_rust::xxh3::Xxh3;

/// Steps between two digests of the whole state; the digests between them cover what was reduced.
const DIGEST_STEPS: u64 = 50;
/// Name of the digest among the positions in a checkpoint.
const DIGEST_CURSOR: &str = "digest";
/// Shortest time between two progress messages.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(100);

/// One piece of work.
pub(super) enum Work {
    /// Compute the gradient sums of a step, as the given rank of so many members.
    Compute { step: u64, rank: usize, members: usize },
    /// Reduce the sums of a step.
    Reduce { step: u64, generation: Generation },
    /// Send the own commit flag, receive those of the others.
    Flags { step: u64, valid: bool, cancel: Arc<AtomicBool> },
    /// Finish a step.
    Apply { step: u64, apply: bool, digest: oneshot::Sender<u64> },
    /// Replace the state.
    Install { checkpoint: Checkpoint },
    /// Copy the state.
    Copy { reply: oneshot::Sender<Checkpoint> },
    /// Measure the result and write the last checkpoint.
    Complete,
    /// Write a checkpoint of the present step, then end.
    Stop,
}

/// A generation as a member sees it.
#[derive(Clone)]
pub(super) struct Generation {
    pub(super) number: u64,
    /// Members in rank order, with their addresses for reductions.
    pub(super) members: Vec<(MemberId, String)>,
    pub(super) rank: usize,
    /// Set when the generation ends.
    pub(super) cancel: Arc<AtomicBool>,
}

/// What happened in the engine.
pub(super) enum EngineEvent {
    Gradients {
        step: u64,
    },
    Reduced {
        generation: u64,
        step: u64,
        valid: bool,
    },
    Flag {
        generation: u64,
        step: u64,
        from: MemberId,
        valid: bool,
    },
    PeerFailed {
        generation: u64,
        suspicion: Suspicion,
    },
    CaughtUp(Position),
    Failed(v1::TrainingFailure),
    /// Why the source has no data at present.
    Waiting(String),
    Progress(v1::TrainingProgress),
    Completed(v1::TrainingResult),
    Stopped,
}

/// Gradient sums of a step, kept until it is finished.
struct Kept {
    local: LocalStep,
    /// Rank and members for which they were computed.
    part: (usize, usize),
    data: Arc<StepData>,
}

/// Sums since the last progress message.
struct Meter {
    sent: Instant,
    since: Instant,
    progress: v1::TrainingProgress,
    reduced_bytes: u64,
}

pub(super) struct Engine {
    pub(super) job: Arc<Job>,
    source: Source,
    priorities: Option<PriorityUpdates>,
    pub(super) trainer: Trainer,
    position: Position,
    kept: Option<Kept>,
    reduced: Option<(GradientSum, bool)>,
    connections: Option<Connections>,
    executor: Executor,
    listener: TcpListener,
    limit: Duration,
    events: mpsc::Sender<EngineEvent>,
    meter: Meter,
    checkpoints: Checkpoints,
    served: Arc<Served>,
}

/// What an engine starts with.
pub(super) struct Start {
    pub(super) shared: Arc<Shared>,
    pub(super) job: Arc<Job>,
    /// Becomes true when the member ends.
    pub(super) ending: watch::Receiver<bool>,
    pub(super) listener: TcpListener,
    pub(super) limit: Duration,
    pub(super) events: mpsc::Sender<EngineEvent>,
    pub(super) folder: CheckpointFolder,
    pub(super) checkpoint_every: u64,
    pub(super) served: Arc<Served>,
    pub(super) warm_start: Option<Vec<u8>>,
}

impl Engine {
    /// Creates an engine at its newest checkpoint, or at step 0.
    ///
    /// # Errors
    /// The specification is not valid, or the warm start does not fit.
    pub(super) fn new(start: Start) -> anyhow::Result<Self> {
        let Start { shared, job, ending, listener, limit, events, folder, checkpoint_every, served, warm_start } =
            start;
        let mut trainer = job.trainer()?;
        if let Some(weights) = warm_start {
            let loaded = trainer.model_mut().load_safetensors(&weights, engram_neural::Coverage::Matching)?;
            anyhow::ensure!(
                loaded > 0,
                "spec.replay.model.init.run: no parameter has the name and shape of one of this model"
            );
        }
        let mut position = Position { step: 0, digest: trainer.digest() as u64 };
        let mut written = 0;
        if let Some((step, checkpoint)) = folder.latest() {
            let (restored, cursors) = Trainer::restore(&job.spec, &checkpoint)?;
            (trainer, written) = (restored, step);
            position = Position { step, digest: cursors.get(DIGEST_CURSOR).copied().unwrap_or_default() };
        }
        served.set(&trainer, job.spec.loss.kind);
        let yaml = serde_json::to_string_pretty(&job.spec)?;
        let model = ModelFiles { yaml, python: trainer.model().python_source() };
        let checkpoints =
            Checkpoints { folder, every: checkpoint_every, model, writer: None, written, writing: written };
        let now = Instant::now();
        let updated = job.buffer().filter(|plan| plan.updates_priorities);
        Ok(Self {
            source: Source::new(&shared, Arc::clone(&job), events.clone(), ending),
            priorities: updated.map(|plan| PriorityUpdates::new(&shared, plan.name.clone())),
            job,
            trainer,
            position,
            kept: None,
            reduced: None,
            connections: None,
            executor: Executor::new(),
            listener,
            limit,
            events,
            meter: Meter { sent: now, since: now, progress: v1::TrainingProgress::default(), reduced_bytes: 0 },
            checkpoints,
            served,
        })
    }

    pub(super) const fn position(&self) -> Position {
        self.position
    }

    /// Executes work until it is stopped.
    pub(super) fn run(mut self, work: &Receiver<Work>) {
        while let Ok(next) = work.recv() {
            match next {
                Work::Compute { step, rank, members } => self.compute(step, (rank, members)),
                Work::Reduce { step, generation } => self.reduce(step, &generation),
                Work::Flags { step, valid, cancel } => self.flags(step, valid, &cancel),
                Work::Apply { step, apply, digest } => self.apply(step, apply, digest),
                Work::Install { checkpoint } => self.install(&checkpoint),
                Work::Copy { reply } => self.copy(reply),
                Work::Complete => self.complete(),
                Work::Stop => break,
            }
        }
        self.save();
        self.checkpoints.wait();
        self.send(EngineEvent::Stopped);
    }

    fn send(&self, event: EngineEvent) {
        // Without a receiver the member has ended, and so will this thread.
        let _ = self.events.blocking_send(event);
    }

    fn fail(&self, message: String) {
        let code = Code::RunFailed.id().to_owned();
        self.send(EngineEvent::Failed(v1::TrainingFailure { code, message }));
    }

    /// Whether gradients depend on sums over the group, so that they are computed during the reduction.
    fn is_coupled(&self) -> bool {
        self.job.spec.loss.correlation.is_some()
    }

    fn compute(&mut self, step: u64, part: (usize, usize)) {
        // After the last step the group waits for the driver.
        if step != self.position.step + 1 || step > self.job.steps {
            return;
        }
        self.reduced = None;
        let is_ready = if self.is_coupled() { self.part_data(part).is_some() } else { self.prepare_alone(part) };
        if is_ready {
            self.send(EngineEvent::Gradients { step });
        }
    }

    /// Returns the data of the next step; `None` after a failure, which is reported, or when the member ends.
    fn part_data(&mut self, part: (usize, usize)) -> Option<Arc<StepData>> {
        let (started, rows) = (Instant::now(), self.job.part(part.0, part.1).0);
        let data = self.source.step_data(self.trainer.model(), self.trainer.counters().step, &rows);
        let progress = &mut self.meter.progress;
        // Generated samples are part of the computation.
        let seconds =
            if self.job.buffer().is_some() { &mut progress.draw_seconds } else { &mut progress.compute_seconds };
        *seconds += started.elapsed().as_secs_f64();
        match data {
            Ok(data) => Some(data),
            Err(SourceError::Ended) => None,
            Err(SourceError::Failed(message)) => {
                self.fail(format!("step {}: {message}", self.position.step + 1));
                None
            }
        }
    }

    /// Computes the gradient sums without communication; returns whether it succeeded.
    fn prepare_alone(&mut self, part: (usize, usize)) -> bool {
        let Some(data) = self.part_data(part) else { return false };
        let started = Instant::now();
        match prepare(&self.job, &data, &mut self.trainer, part, &mut Alone) {
            Ok(local) => {
                self.kept = Some(Kept { local, part, data });
                self.meter.progress.compute_seconds += started.elapsed().as_secs_f64();
                true
            }
            Err(error) => {
                let (step, named) = (self.position.step + 1, data.describe());
                self.fail(format!("step {step}: {}; {}: {named}", chain(&error), self.samples_name()));
                false
            }
        }
    }

    /// What the numbers of samples in a message are.
    fn samples_name(&self) -> String {
        self.job.buffer().map_or_else(|| "samples".to_owned(), |plan| format!("items of buffer {}", plan.name))
    }

    fn reduce(&mut self, step: u64, generation: &Generation) {
        if step != self.position.step + 1 {
            return;
        }
        let part = (generation.rank, generation.members.len());
        // Survivors of a failure reduce the sums that they kept. In the order of a tree no leaf may be missing, and after a join no row
        // may count twice.
        let is_stale = self.kept.as_ref().is_none_or(|kept| match self.job.order {
            SumOrder::PartitionInvariant => kept.part != part,
            SumOrder::Rank => kept.part.1 < part.1,
        });
        let data = if self.is_coupled() { self.part_data(part) } else { None };
        let is_ready = if self.is_coupled() { data.is_some() } else { !is_stale || self.prepare_alone(part) };
        if !is_ready {
            return;
        }
        let started = Instant::now();
        if !self.establish(generation) {
            return;
        }
        let computed = self.meter.progress.compute_seconds;
        match self.reduce_over(step, generation, part, data) {
            Ok(sum) => {
                let scaled = self.job.spec.scaler.is_some() || self.job.spec.precision == engram_neural::Precision::F16;
                let valid = scaled || (sum.loss.is_finite() && sum.values.iter().all(|value| value.is_finite()));
                self.reduced = Some((sum, valid));
                self.send(EngineEvent::Reduced { generation: generation.number, step, valid });
            }
            Err(error) => self.reduction_failed(generation, &error),
        }
        let in_compute = self.meter.progress.compute_seconds - computed;
        self.meter.progress.reduce_seconds += (started.elapsed().as_secs_f64() - in_compute).max(0.0);
    }

    /// Connects to the members of a generation, unless it is so already; returns whether it is.
    fn establish(&mut self, generation: &Generation) -> bool {
        if self.connections.as_ref().is_some_and(|open| open.generation == generation.number) {
            return true;
        }
        self.connections = None;
        match connect(generation, &self.listener, self.limit) {
            Ok(connections) => {
                self.connections = Some(connections);
                // The time until the group was formed is no training.
                self.meter.since = Instant::now();
                true
            }
            Err(error) => {
                self.reduction_failed(generation, &ReduceError::Transport(error));
                false
            }
        }
    }

    fn reduce_over(
        &mut self,
        step: u64,
        generation: &Generation,
        part: (usize, usize),
        data: Option<Arc<StepData>>,
    ) -> Result<GradientSum, TrainError<ReduceError>> {
        let (job, events) = (Arc::clone(&self.job), self.events.clone());
        let number = generation.number;
        let mut suspect = |suspicion| {
            let _ = events.blocking_send(EngineEvent::PeerFailed { generation: number, suspicion });
        };
        let leaves = |rank: usize| match job.part(rank, part.1).1 {
            SummationOrder::Rank { leaves } => leaves as usize * job.sync_every,
            SummationOrder::PartitionInvariant { owned, .. } => owned.len() * job.sync_every,
        };
        let connections = self.connections.as_mut().expect("the caller established them");
        let mut reduce = GroupReduce {
            connections,
            executor: &mut self.executor,
            step,
            leaves: &leaves,
            cancel: &generation.cancel,
            limit: self.limit,
            suspect: &mut suspect,
        };
        if let Some(data) = data {
            let started = Instant::now();
            let local = prepare(&job, &data, &mut self.trainer, part, &mut reduce)?;
            self.kept = Some(Kept { local, part, data });
            self.meter.progress.compute_seconds += started.elapsed().as_secs_f64();
        }
        let kept = self.kept.as_ref().expect("the sums were computed above or before");
        engram_train::Reduce::gradient(&mut reduce, &kept.local.gradient).map_err(TrainError::Reduce)
    }

    fn reduction_failed(&mut self, generation: &Generation, error: &(dyn std::error::Error + 'static)) {
        self.connections = None;
        match transport_error(error) {
            Some(transport::Error::Cancelled) => {}
            Some(failed) => {
                tracing::warn!(error = chain(failed), generation = generation.number, "reduction failed");
                let Some((peer, _)) = failed.rank().and_then(|rank| generation.members.get(rank)) else { return };
                let suspicion = Suspicion { peer: *peer, cause: Cause::Broken };
                self.send(EngineEvent::PeerFailed { generation: generation.number, suspicion });
            }
            None => self.fail(format!("step {}: {}", self.position.step + 1, chain(error))),
        }
    }

    fn flags(&mut self, step: u64, valid: bool, cancel: &Arc<AtomicBool>) {
        let started = Instant::now();
        let events = self.events.clone();
        let Some(connections) = &mut self.connections else { return };
        let (number, members) = (connections.generation, connections.members.clone());
        let mut suspect = |suspicion| {
            let _ = events.blocking_send(EngineEvent::PeerFailed { generation: number, suspicion });
        };
        let rank = connections.rank;
        let mut reduce = GroupReduce {
            connections,
            executor: &mut self.executor,
            step,
            leaves: &|_| 0,
            cancel,
            limit: self.limit,
            suspect: &mut suspect,
        };
        match reduce.flags(valid) {
            Ok(flags) => {
                for (from, valid) in
                    members.iter().zip(flags).enumerate().filter(|(it, _)| *it != rank).map(|(_, it)| it)
                {
                    self.send(EngineEvent::Flag { generation: number, step, from: *from, valid });
                }
            }
            Err(error) => {
                let members = members.into_iter().map(|id| (id, String::new())).collect();
                let generation = Generation { number, members, rank, cancel: Arc::clone(cancel) };
                self.reduction_failed(&generation, &error);
            }
        }
        self.meter.progress.reduce_seconds += started.elapsed().as_secs_f64();
    }

    fn apply(&mut self, step: u64, apply: bool, digest: oneshot::Sender<u64>) {
        let (Some(mut kept), Some((sum, valid))) = (self.kept.take(), self.reduced.take()) else {
            return self.fail(format!("step {step}: the reduced gradient is missing, which is a bug of Engram"));
        };
        if !apply || !valid {
            return self.fail(format!(
                "step {step}: the loss {} or a gradient is not finite; lower spec.replay.optimizer.rate or set clip; {}: {}",
                sum.loss / sum.samples.max(1) as f64,
                self.samples_name(),
                kept.data.describe()
            ));
        }
        let started = Instant::now();
        let errors = std::mem::take(&mut kept.local.samples.errors);
        let report = match self.trainer.commit::<ReduceError>(kept.local, &sum) {
            Ok(report) => report,
            Err(error) => {
                let named = kept.data.describe();
                return self.fail(format!("{}; {}: {named}", chain(&error), self.samples_name()));
            }
        };
        if let Some(priorities) = &self.priorities {
            priorities.queue(kept.data.names.clone(), errors);
        }
        let mut hash = Xxh3::new();
        for number in
            [self.position.digest, step, report.loss.to_bits(), report.gradient_norm.to_bits(), report.samples]
        {
            hash.update(&number.to_le_bytes());
        }
        if step.is_multiple_of(DIGEST_STEPS) || step == self.job.steps {
            hash.update(&self.trainer.digest().to_le_bytes());
        }
        self.position = Position { step, digest: hash.digest() };
        // Without a receiver the member has ended.
        let _ = digest.send(self.position.digest);
        self.served.update(&self.trainer, self.job.spec.loss.kind);
        self.meter.progress.compute_seconds += started.elapsed().as_secs_f64();
        self.measure(&report, kept.data.names.len() as u64);
        if step.is_multiple_of(self.checkpoints.every) || step == self.job.steps {
            self.save();
        }
    }

    fn measure(&mut self, report: &engram_train::StepReport, own_samples: u64) {
        let Meter { sent, since, progress, reduced_bytes } = &mut self.meter;
        progress.step = report.step + 1;
        progress.steps += 1;
        progress.samples += report.samples;
        progress.own_samples += own_samples;
        (progress.loss, progress.gradient_norm) = (report.loss, report.gradient_norm);
        progress.learning_rate = report.rate.into();
        let is_last = progress.step == self.job.steps;
        if sent.elapsed() < PROGRESS_INTERVAL && !is_last {
            return;
        }
        progress.wall_seconds = since.elapsed().as_secs_f64();
        let bytes =
            self.connections.as_ref().and_then(|open| Some(open.transport.as_ref()?.counters().sent)).unwrap_or(0);
        progress.reduced_bytes = bytes.saturating_sub(*reduced_bytes);
        *reduced_bytes = bytes;
        progress.checkpoint_step = self.checkpoints.written;
        progress.total_samples = self.trainer.counters().samples;
        count_priorities(self.priorities.as_ref(), progress);
        let full = std::mem::take(progress);
        (*sent, *since) = (Instant::now(), Instant::now());
        // The next one has the newer numbers.
        let _ = self.events.try_send(EngineEvent::Progress(full));
    }

    fn install(&mut self, checkpoint: &Checkpoint) {
        match Trainer::restore(&self.job.spec, checkpoint) {
            Ok((trainer, cursors)) => {
                let step = trainer.counters().step;
                self.position = Position { step, digest: cursors.get(DIGEST_CURSOR).copied().unwrap_or_default() };
                self.trainer = trainer;
                (self.kept, self.reduced) = (None, None);
                self.served.set(&self.trainer, self.job.spec.loss.kind);
                self.send(EngineEvent::CaughtUp(self.position));
            }
            // The service repeats the request.
            Err(error) => tracing::error!(error = chain(&error), "rejected the state of another member"),
        }
    }

    fn snapshot(&self) -> Result<Checkpoint, engram_train::CheckpointError> {
        let (generation, world) =
            self.connections.as_ref().map_or((0, 1), |it| (it.generation, it.members.len() as u32));
        let cursors = BTreeMap::from([(DIGEST_CURSOR.to_owned(), self.position.digest)]);
        self.trainer.checkpoint(generation, world, cursors)
    }

    fn copy(&self, reply: oneshot::Sender<Checkpoint>) {
        match self.snapshot() {
            // The receiver may have gone.
            Ok(checkpoint) => drop(reply.send(checkpoint)),
            Err(error) => tracing::error!(error = chain(&error), "failed to copy the training state"),
        }
    }

    /// Copies the state and starts to write it, unless an earlier checkpoint is still being written.
    fn save(&mut self) {
        let step = self.position.step;
        if step == 0 || step == self.checkpoints.writing {
            return;
        }
        let started = Instant::now();
        if step == self.job.steps {
            self.checkpoints.wait();
        }
        match self.snapshot() {
            Ok(checkpoint) => self.checkpoints.start(step, checkpoint),
            Err(error) => tracing::error!(error = chain(&error), "failed to copy the training state"),
        }
        let stall = &mut self.meter.progress.checkpoint_stall_seconds;
        *stall = stall.max(started.elapsed().as_secs_f64());
    }

    fn complete(&mut self) {
        self.save();
        self.checkpoints.wait();
        self.served.set(&self.trainer, self.job.spec.loss.kind);
        if let Some(priorities) = &mut self.priorities {
            priorities.finish();
            let mut last = v1::TrainingProgress { step: self.position.step, ..v1::TrainingProgress::default() };
            count_priorities(Some(priorities), &mut last);
            self.send(EngineEvent::Progress(last));
        }
        let loss = self.job.spec.loss.kind;
        // A buffer holds no samples out.
        let result = self
            .source
            .dataset()
            .map_or_else(|| Ok(Evaluation::default()), |data| evaluate(self.trainer.model(), loss, data));
        let result = match result {
            Ok(result) => result,
            Err(error) => return self.fail(chain(&error)),
        };
        self.send(EngineEvent::Completed(v1::TrainingResult {
            step: self.position.step,
            digest: format!("{:032x}", self.trainer.digest()),
            samples: self.trainer.counters().samples,
            parameters: self.trainer.model().parameter_count() as u64,
            held_out: result.samples,
            squared_error: result.squared_error,
            correlation: result.correlation,
            spread_ratio: result.spread_ratio,
            checkpoint: self.checkpoints.folder.step(self.position.step).display().to_string(),
        }));
    }
}

/// Moves what became of updated priorities into a progress message.
fn count_priorities(updates: Option<&PriorityUpdates>, progress: &mut v1::TrainingProgress) {
    let Some(updates) = updates else { return };
    let counts = updates.take_counts();
    progress.priorities_changed += counts.changed;
    progress.priorities_stale += counts.stale;
    progress.priorities_skipped += counts.skipped;
}

/// Computes the gradient sums of the next step over the data of a part of each of its batches.
fn prepare<R: engram_train::Reduce>(
    job: &Job,
    data: &StepData,
    trainer: &mut Trainer,
    part: (usize, usize),
    reduce: &mut R,
) -> Result<LocalStep, TrainError<R::Error>>
where
    R::Error: std::error::Error + 'static,
{
    let (rows, order) = job.part(part.0, part.1);
    let labeled: Result<Vec<_>, _> =
        data.batches.iter().enumerate().map(|(micro, batch)| batch.labeled(micro * job.batch + rows.start)).collect();
    let local = trainer.prepare(&labeled?, &order, reduce)?;
    debug_assert!(matches!(local.gradient, LocalGradient::Sum(_) | LocalGradient::Subtrees { .. }));
    Ok(local)
}

/// Returns the failure of the transport within an error.
fn transport_error<'a>(error: &'a (dyn std::error::Error + 'static)) -> Option<&'a transport::Error> {
    let mut next = Some(error);
    while let Some(error) = next {
        if let Some(ReduceError::Transport(found)) = error.downcast_ref::<ReduceError>() {
            return Some(found);
        }
        next = error.source();
    }
    None
}

/// Returns an error with its causes.
pub(super) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text.push_str(": ");
        text.push_str(&error.to_string());
        cause = error.source();
    }
    text
}
