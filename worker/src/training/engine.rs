//! The thread of a member that computes: gradient sums, reductions, updates, checkpoints.
//!
//! It executes what the member's state machine decides, one piece of work after another, and reports events. It never decides whether a
//! step counts.

use crate::shared::Shared;
use crate::training::checkpoint::checkpoints::Checkpoints;
use crate::training::checkpoint::files::{CheckpointFolder, ModelFiles};
use crate::training::gpu::TrainingGpu;
use crate::training::host::Key;
use crate::training::metrics::wire_level;
use crate::training::serving::serve::Served;
use crate::training::step::meter::{Meter, Totals, count_priorities};
use crate::training::step::priorities::PriorityUpdates;
use crate::training::step::reduce::{Connections, ReduceError};
use crate::training::step::source::{Source, StepData};
use crate::training::step::work::{EngineEvent, Work};
use crate::training::transport::connections::Connector;
use crate::training::transport::network::slowest_link;
use crate::training::transport::remote::RemoteCheckpoints;
use engram_api::Code;
use engram_collective::executor::Executor;
use engram_collective::group::Position;
use engram_neural::{BatchError, GradientSum, Model};
use engram_proto::v1;
use engram_trace::Span;
use engram_train::job::{Evaluation, Job, Rows};
use engram_train::sharing::{Planner, Shares};
use engram_train::{Checkpoint, Ensemble, EnsembleStep, StepTimes, SummationOrder, Trainer, evaluate_all};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::time::{Instant, SystemTime};
use tokio::sync::{mpsc, oneshot, watch};
use xxhash_rust::xxh3::Xxh3;

/// Steps between two digests of the whole state; the digests between them cover what was reduced.
const DIGEST_STEPS: u64 = 50;
/// Least number of samples whose spread is compared with that of their targets: the deviation of fewer is chance.
const MIN_SPREAD_SAMPLES: u64 = 16;
/// Name of the digest among the positions in a checkpoint.
const DIGEST_CURSOR: &str = "digest";

/// A rank of a generation of so many members.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::training) struct Part {
    pub(in crate::training) generation: u64,
    pub(in crate::training) rank: usize,
    pub(in crate::training) members: usize,
}

/// Gradient sums of a step, kept until it is finished.
pub(in crate::training) struct Kept {
    /// `None` until they are computed during the reduction.
    pub(in crate::training) local: Option<EnsembleStep>,
    /// For which they are computed.
    pub(in crate::training) part: Part,
    /// Generation in which they count: that of the part, or a later one whose members all kept sums of that.
    pub(in crate::training) counts_in: u64,
    /// Its rows, and the order of additions.
    pub(in crate::training) share: (Range<usize>, SummationOrder),
    pub(in crate::training) data: Arc<StepData>,
    /// Time of the computation in nanoseconds.
    pub(in crate::training) nanoseconds: u64,
}

/// State of the thread that computes. Each piece of work takes what it needs from all of it, and no other thread sees any, therefore more than a
/// dozen fields.
pub(in crate::training) struct Engine {
    pub(in crate::training) job: Arc<Job>,
    pub(in crate::training) source: Source,
    priorities: Option<PriorityUpdates>,
    pub(in crate::training) trained: Ensemble,
    pub(in crate::training) position: Position,
    pub(in crate::training) kept: Option<Kept>,
    pub(in crate::training) reduced: Option<(GradientSum, bool)>,
    pub(in crate::training) connections: Option<Connections>,
    pub(in crate::training) executor: Executor,
    pub(in crate::training) connector: Connector,
    /// GPUs that this worker uses.
    pub(in crate::training) gpus: Vec<usize>,
    /// Computes gradients.
    pub(in crate::training) gpu: TrainingGpu,
    /// Generation with its parts of a batch; those of others are equal.
    pub(in crate::training) shares: Option<(u64, Shares)>,
    /// Parts from the next step on.
    pub(in crate::training) planned: Option<Shares>,
    /// Times of all members that came with the reduced sum.
    pub(in crate::training) times: Vec<StepTimes>,
    /// Plans the parts, on the first rank.
    pub(in crate::training) planner: Option<Planner>,
    pub(in crate::training) events: mpsc::Sender<EngineEvent>,
    pub(in crate::training) meter: Meter,
    checkpoints: Checkpoints,
    served: Arc<Served>,
    pub(in crate::training) key: Key,
    /// Step in progress with its span.
    pub(in crate::training) span: (u64, Span),
}

/// What an engine starts with.
pub(in crate::training) struct Start {
    pub(in crate::training) shared: Arc<Shared>,
    pub(in crate::training) job: Arc<Job>,
    /// Run, and when it was submitted.
    pub(in crate::training) key: Key,
    /// Becomes true when the member ends.
    pub(in crate::training) ending: watch::Receiver<bool>,
    pub(in crate::training) connector: Connector,
    pub(in crate::training) events: mpsc::Sender<EngineEvent>,
    pub(in crate::training) folder: CheckpointFolder,
    pub(in crate::training) remote: Option<RemoteCheckpoints>,
    pub(in crate::training) checkpoint_every: u64,
    pub(in crate::training) served: Arc<Served>,
    /// Weights of another run, of each of its models.
    pub(in crate::training) warm_start: Option<Vec<Vec<u8>>>,
}

impl Engine {
    /// Creates an engine at its newest checkpoint, or at step 0.
    ///
    /// # Errors
    /// The specification is not valid, or the warm start does not fit.
    pub(in crate::training) fn new(start: Start) -> anyhow::Result<Self> {
        let Start { shared, job, key, ending, connector, events, folder, remote, checkpoint_every, served, warm_start } =
            start;
        let mut trained = job.models()?;
        if let Some(weights) = warm_start {
            let loaded = trained.warm_start(&weights)?;
            anyhow::ensure!(
                loaded > 0,
                "spec.replay.model.init.run: no parameter has the name and shape of one of this model"
            );
        }
        let mut position = Position { step: 0, digest: trained.digest() as u64 };
        let mut written = 0;
        let newest = match (folder.latest(), &remote) {
            (None, Some(remote)) => remote.read()?,
            (newest, _) => newest,
        };
        if let Some((step, checkpoint)) = newest {
            anyhow::ensure!(
                step <= job.steps,
                "spec.replay.steps is {}, but its newest checkpoint is of step {step}; allowed: {step} or more",
                job.steps
            );
            let (restored, cursors) = job.restore(&checkpoint)?;
            (trained, written) = (restored, step);
            position = Position { step, digest: cursors.get(DIGEST_CURSOR).copied().unwrap_or_default() };
        }
        served.set(&trained, job.spec.loss.kind);
        let yaml = serde_json::to_string_pretty(&job.spec)?;
        let model = ModelFiles { yaml, python: trained.first().model().python_source() };
        let checkpoints =
            Checkpoints { folder, remote, every: checkpoint_every, model, writer: None, written, writing: written };
        let updated = job.buffer().filter(|plan| plan.updates_priorities);
        Ok(Self {
            source: Source::new(&shared, Arc::clone(&job), events.clone(), ending),
            priorities: updated.map(|plan| PriorityUpdates::new(&shared, plan.name.clone())),
            job,
            trained,
            position,
            kept: None,
            reduced: None,
            connections: None,
            executor: Executor::new(),
            connector,
            gpu: TrainingGpu::new(Arc::clone(&shared)),
            gpus: shared.setup.device.task_gpus.iter().map(|(ordinal, _)| *ordinal).collect(),
            shares: None,
            planned: None,
            times: Vec::new(),
            planner: None,
            events,
            meter: Meter::new(),
            checkpoints,
            served,
            key,
            span: (0, Span::none()),
        })
    }

    pub(in crate::training) const fn position(&self) -> Position {
        self.position
    }

    /// Executes work until it is stopped.
    pub(in crate::training) fn run(mut self, work: &Receiver<Work>) {
        while let Ok(next) = work.recv() {
            match next {
                Work::Compute { step, generation, rank, members } => {
                    self.compute(step, Part { generation, rank, members });
                }
                Work::Reduce { step, generation } => self.reduce(step, &generation),
                Work::Flags { step, valid, cancel } => self.flags(step, valid, &cancel),
                Work::Apply { step, apply, digest } => self.apply(step, apply, digest),
                Work::Install { checkpoint } => self.install(&checkpoint),
                Work::Copy { at, reply } => self.copy(at, reply),
                Work::Complete => self.complete(),
                Work::Stop => break,
            }
        }
        self.save();
        self.checkpoints.wait();
        self.send(EngineEvent::Stopped);
    }

    pub(in crate::training) fn send(&self, event: EngineEvent) {
        // Without a receiver the member has ended, and so will this thread.
        let _ = self.events.blocking_send(event);
    }

    pub(in crate::training) fn fail(&self, message: String) {
        let code = Code::RunFailed.id().to_owned();
        self.send(EngineEvent::Failed(v1::TrainingFailure { code, message }));
    }

    fn apply(&mut self, step: u64, apply: bool, digest: oneshot::Sender<u64>) {
        let kept = self.kept.take().and_then(|mut kept| Some((kept.local.take()?, kept)));
        let (Some((mut local, kept)), Some((sum, valid))) = (kept, self.reduced.take()) else {
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
        let (started, began) = (Instant::now(), SystemTime::now());
        let errors = std::mem::take(&mut local.samples.errors);
        let report = match self.trained.commit::<ReduceError>(local, &sum) {
            Ok(report) => report,
            Err(error) => {
                let named = kept.data.describe();
                return self.fail(format!("{}; {}: {named}", chain(&error), self.samples_name()));
            }
        };
        if let Some(switch) = self.trained.observe_times(&std::mem::take(&mut self.times)) {
            tracing::info!(step, share = switch.share, "{switch}");
        }
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
            hash.update(&self.trained.digest().to_le_bytes());
        }
        self.position = Position { step, digest: hash.digest() };
        // Without a receiver the member has ended.
        let _ = digest.send(self.position.digest);
        self.served.update(&self.trained, self.job.spec.loss.kind);
        self.meter.progress.compute_seconds += started.elapsed().as_secs_f64();
        self.record_span("update", began);
        self.span.1 = Span::none();
        if let (Some(planned), Some(open)) = (self.planned.take(), &self.connections) {
            self.shares = Some((open.generation, planned));
        }
        self.meter.add(&report, self.own_samples(kept.part, kept.data.names.len()));
        let level = self.trained.first().automatic_compression().map(|it| it.level);
        self.meter.progress.set_compression_level(wire_level(level));
        self.meter.progress.pipeline_bubble = self.trained.first().bubble().unwrap_or_default();
        let (device, is_gpu) = self.gpu.used(&mut self.trained);
        self.meter.progress.device = device;
        self.meter.progress.gpu_steps += u64::from(is_gpu);
        if let Some(open) = &self.connections {
            self.meter.note_members(open.generation, &open.members, Instant::now());
            let progress = &mut self.meter.progress;
            (progress.link_latency_seconds, progress.link_bytes_per_second) = slowest_link(open);
            progress.shared_connections = open.transport.as_ref().map_or(0, |it| it.shared_connections() as u32);
            progress.link_streams = open.transport.as_ref().map_or(0, |it| it.streams() as u32);
            progress.nccl.clone_from(&open.nccl);
        }
        if step.is_multiple_of(self.checkpoints.every) || step == self.job.steps {
            self.save();
            self.measure_spread(&kept.data);
        }
        if self.meter.is_due() || step == self.job.steps {
            self.publish_progress();
        }
    }

    /// Measures on the first rank whether predictions still vary as the targets do: of held-out samples, with a buffer of the items that it drew for
    /// this step.
    fn measure_spread(&mut self, drawn: &StepData) {
        if self.connections.as_ref().is_some_and(|open| open.rank != 0) {
            return;
        }
        let found = match self.source.dataset() {
            Some(data) => {
                let rows = Rows::held_out(self.trained.first().model(), data);
                self.measure(&rows, data.classes)
            }
            None => match drawn.batches.first() {
                Some(rows) => self.measure(rows, 0),
                None => return,
            },
        };
        if let Ok((found, _)) = found
            && found.samples >= MIN_SPREAD_SAMPLES
        {
            self.meter.progress.spread_ratio = found.spread_ratio;
        }
    }

    fn publish_progress(&mut self) {
        let sent = self.connections.as_ref().and_then(|open| Some(open.transport.as_ref()?.counters().sent));
        let totals = Totals {
            sent_bytes: sent.unwrap_or(0),
            checkpoint_step: self.checkpoints.written,
            samples: self.trained.counters().samples,
        };
        let progress = self.meter.take_message(&totals, self.priorities.as_ref());
        // The next one has the newer numbers.
        let _ = self.events.try_send(EngineEvent::Progress(progress));
    }

    fn install(&mut self, checkpoint: &Checkpoint) {
        match self.job.restore(checkpoint) {
            Ok((trained, cursors)) => {
                let step = trained.counters().step;
                self.position = Position { step, digest: cursors.get(DIGEST_CURSOR).copied().unwrap_or_default() };
                self.trained = trained;
                self.trained.forget_feedback();
                (self.kept, self.reduced) = (None, None);
                self.served.set(&self.trained, self.job.spec.loss.kind);
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
        let checkpoint = self.trained.checkpoint(generation, world, cursors)?;
        match self.job.table() {
            Some(table) => checkpoint.with_table(table),
            None => Ok(checkpoint),
        }
    }

    fn copy(&self, at: Option<Position>, reply: oneshot::Sender<Checkpoint>) {
        if at.is_some_and(|at| at != self.position) {
            return;
        }
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
            Ok(checkpoint) => {
                let is_first = self.connections.as_ref().is_none_or(|open| open.rank == 0);
                self.checkpoints.start(step, checkpoint, is_first);
            }
            Err(error) => tracing::error!(error = chain(&error), "failed to copy the training state"),
        }
        let stall = &mut self.meter.progress.checkpoint_stall_seconds;
        *stall = stall.max(started.elapsed().as_secs_f64());
    }

    fn complete(&mut self) {
        self.save();
        self.checkpoints.wait();
        self.served.set(&self.trained, self.job.spec.loss.kind);
        if let Some(priorities) = &mut self.priorities {
            priorities.finish();
            let mut last = v1::TrainingProgress { step: self.position.step, ..v1::TrainingProgress::default() };
            count_priorities(Some(priorities), &mut last);
            self.send(EngineEvent::Progress(last));
        }
        let (result, deviation) = match self.evaluation() {
            Ok(result) => result,
            Err(error) => return self.fail(error),
        };
        // Baselines are fitted without noise.
        let data = self.source.dataset().filter(|_| self.job.spec.privacy.is_none());
        let ridge = data.and_then(engram_train::baseline::ridge);
        let boosted = data.and_then(engram_train::boosted::boosted_trees);
        self.send(EngineEvent::Completed(v1::TrainingResult {
            step: self.position.step,
            digest: format!("{:032x}", self.trained.digest()),
            samples: self.trained.counters().samples,
            parameters: self.trained.first().model().parameter_count() as u64,
            held_out: result.samples,
            squared_error: result.squared_error,
            correlation: result.correlation,
            spread_ratio: result.spread_ratio,
            checkpoint: self.checkpoints.folder.step(self.position.step).display().to_string(),
            accuracy: result.accuracy,
            classes: result.classes,
            ridge: ridge.as_ref().map(baseline),
            boosted: boosted.as_ref().map(baseline),
            deviation,
        }));
    }

    /// Measures the models on held-out samples; without any the evaluation is empty.
    fn evaluation(&mut self) -> Result<(Evaluation, f64), String> {
        if let Some(data) = self.source.dataset() {
            let rows = Rows::held_out(self.trained.first().model(), data);
            return self.measure(&rows, data.classes).map_err(|error| chain(&error));
        }
        let Some(rows) = self.source.held_out()? else { return Ok((Evaluation::default(), 0.0)) };
        self.measure(&rows, 0).map_err(|error| chain(&error))
    }

    fn measure(&self, rows: &Rows, classes: usize) -> Result<(Evaluation, f64), BatchError> {
        let models: Vec<&Model> = self.trained.members().iter().map(Trainer::model).collect();
        evaluate_all(&models, self.job.spec.loss.kind, rows, classes)
    }
}

fn baseline(found: &Evaluation) -> v1::TrainingBaseline {
    let Evaluation { squared_error, correlation, accuracy, .. } = *found;
    v1::TrainingBaseline { squared_error, correlation, accuracy }
}

/// Returns an error with its causes.
pub(in crate::training) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text.push_str(": ");
        text.push_str(&error.to_string());
        cause = error.source();
    }
    text
}
