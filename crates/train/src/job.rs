//! A training run: its specification as trainer, data and batches.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;

use engram_api::{
    FeatureSubsets, LossFunction, PipelineDevices, ReplayModel, ReplayRun, ReplaySource, ReplaySync, SumOrder,
};
use engram_neural::{LeafSplit, LossKind, Parallelism, View};
use thiserror::Error;

use crate::buffer::BufferPlan;
use crate::check_parallelism::devices;
use crate::check_sums::check_sums;
use crate::dataset::{Dataset, Subsets, sample_at, training_len};
use crate::private::{NoiseSecret, check_size, privacy_spec};
pub use crate::rows::{Evaluation, Rows, evaluate, evaluate_rows, predict};
use crate::sharing::{Balance, Shares};
use crate::specification::trainer_spec;
use crate::table::TableColumns;
use crate::trainer::{SummationOrder, Trainer, TrainerError, TrainerSpec};

/// Leaves of a global batch in partition-invariant order.
pub const LEAVES: u32 = 64;
/// Leaves per worker in rank order: a fixed number, so that the result does not depend on the number of cores.
pub(crate) const LOCAL_LEAVES: u32 = 4;
/// Most parameters of a model: its state is sent between workers as a whole.
pub(crate) const MAX_PARAMETERS: usize = 64 << 20;
/// Most values of a data set in memory.
const MAX_INDICES: u64 = 1 << 30;

/// A specification that cannot be trained. The message names the field, the value and what is allowed.
#[derive(Debug, Error)]
pub enum JobError {
    /// The model, loss or optimizer.
    #[error("spec.replay.model: {0}")]
    Trainer(#[from] TrainerError),
    /// The content of a table.
    #[error("spec.replay.source: {0}")]
    Table(String),
    /// Another field.
    #[error("{field} is {value}; allowed: {allowed}")]
    Field {
        /// Path of the field.
        field: &'static str,
        /// Its value.
        value: String,
        /// What is allowed.
        allowed: String,
    },
}

/// A validated training run.
#[derive(Debug, Clone)]
pub struct Job {
    /// What is trained and how.
    pub spec: TrainerSpec,
    /// Steps until it is complete.
    pub steps: u64,
    /// Models that are trained together.
    pub ensemble: usize,
    /// Logical devices of each worker that share its part of a batch, if any.
    pub parallelism: Option<Parallelism>,
    /// Pipelines over the members of the group, if any.
    pub stages: Option<Parallelism>,
    /// Leaves of each batch of a worker, in rank order.
    leaves: u32,
    /// Samples per batch.
    pub batch: usize,
    /// Batches per step: `syncEvery` updates of `accumulate` batches.
    pub batches: usize,
    /// Whether the first rank adds all sums.
    pub parameter_server: bool,
    /// How parts follow the speed of members; `None` keeps them equal.
    pub balance: Option<Balance>,
    /// Order of additions.
    pub order: SumOrder,
    /// Paths of frozen layers.
    pub freeze: Vec<String>,
    /// With privacy: what the samples of steps and the noise follow from.
    pub(crate) noise_secret: Option<NoiseSecret>,
    source: Source,
}

#[derive(Debug, Clone)]
enum Source {
    Subsets(Subsets),
    Buffer(BufferPlan),
    /// `None` until its content is known.
    Table(Option<Arc<Dataset>>),
}

#[expect(clippy::needless_pass_by_value, reason = "callers pass numbers and texts")]
pub(crate) fn field(field: &'static str, value: impl ToString, allowed: impl Into<String>) -> JobError {
    JobError::Field { field, value: value.to_string(), allowed: allowed.into() }
}

impl Job {
    /// Validates a specification.
    ///
    /// # Errors
    /// A field of the source is absent, a dimension does not fit, or a setting is out of range.
    pub fn new(run: &ReplayRun) -> Result<Self, JobError> {
        Self::with_table(run, None)
    }

    /// Validates a specification and the content of its table; without it, what depends on the table is not checked and the job has no data.
    ///
    /// # Errors
    /// As [`Self::new`], or the table cannot be used.
    pub fn with_table(run: &ReplayRun, table: Option<&[u8]>) -> Result<Self, JobError> {
        if run.model.inputs.is_empty() {
            return Err(field("spec.replay.model.inputs", "[]", "one input"));
        }
        let source = match &run.source {
            ReplaySource::Synthetic(source) => Source::Subsets(generated(source, &run.model)?),
            ReplaySource::Buffer(source) => Source::Buffer(BufferPlan::new(source, run)?),
            ReplaySource::Csv(_) => Source::Table(read_table(run, "features", table)?),
            ReplaySource::Example(_) => Source::Table(read_table(run, "pixels", table)?),
        };
        let (parallelism, leaves) = devices(run)?;
        let is_staged = run.parallelism.as_ref().is_some_and(|it| it.over == PipelineDevices::Workers);
        let job = Self {
            parallelism: parallelism.filter(|_| !is_staged),
            stages: parallelism.filter(|_| is_staged),
            leaves,
            spec: TrainerSpec { privacy: privacy_spec(run, source.training_len())?, ..trainer_spec(run) },
            steps: run.steps,
            ensemble: run.ensemble as usize,
            batch: run.batch as usize,
            batches: (run.sync_every * run.accumulate) as usize,
            parameter_server: run.sync == ReplaySync::ParameterServer,
            balance: run.balance.as_ref().map(|it| Balance { every: it.every, max_ratio: it.max_ratio }),
            order: run.order,
            freeze: run.freeze.clone().unwrap_or_default(),
            noise_secret: None,
            source,
        };
        job.check(run)?;
        Ok(job)
    }

    fn check(&self, run: &ReplayRun) -> Result<(), JobError> {
        check_sums(run)?;
        if self.order == SumOrder::PartitionInvariant && self.batch < LEAVES as usize {
            let allowed = format!("{LEAVES} or more with order PartitionInvariant");
            return Err(field("spec.replay.batch", self.batch, allowed));
        }
        let is_invariant = self.order == SumOrder::PartitionInvariant;
        if is_invariant && run.accumulate > 1 && self.spec.loss.correlation.is_some() {
            let allowed = "1 with loss.correlation and order PartitionInvariant";
            return Err(field("spec.replay.accumulate", run.accumulate, allowed));
        }
        let trainer = self.trainer()?;
        let model = trainer.model();
        if model.parameter_count() > MAX_PARAMETERS {
            let allowed = format!("at most {MAX_PARAMETERS} parameters");
            return Err(field("spec.replay.model.layers", format!("{} parameters", model.parameter_count()), allowed));
        }
        self.check_stages(model)?;
        self.check_ensemble(run, model.parameter_count())?;
        check_size(run, model.parameter_count())?;
        if self.spec.loss.kind == LossKind::CrossEntropy {
            return self.check_classes(model.outputs());
        }
        if model.outputs() != 1 {
            let allowed = "a last layer with 1 output, the dimension of the target";
            return Err(field("spec.replay.model.layers", format!("{} outputs", model.outputs()), allowed));
        }
        Ok(())
    }

    /// Checks that there is an output per class.
    fn check_classes(&self, outputs: usize) -> Result<(), JobError> {
        let classes = match &self.source {
            Source::Table(table) => table.as_ref().map_or(outputs, |data| data.classes),
            Source::Subsets(_) | Source::Buffer(_) => {
                let allowed = "Mse, Huber or Bce with this source, whose target is a number";
                return Err(field("spec.replay.model.loss.kind", "CrossEntropy", allowed));
            }
        };
        if outputs < classes.max(2) {
            let allowed = format!("a last layer with {} outputs or more, one per class of the target", classes.max(2));
            return Err(field("spec.replay.model.layers", format!("{outputs} outputs"), allowed));
        }
        Ok(())
    }

    /// A trainer at step 0.
    ///
    /// # Errors
    /// The specification is not valid, or a frozen layer does not exist.
    pub fn trainer(&self) -> Result<Trainer, JobError> {
        let mut trainer = Trainer::new(&self.spec)?;
        self.freeze(&mut trainer)?;
        Ok(trainer)
    }

    /// Freezes the layers of the specification.
    ///
    /// # Errors
    /// A layer does not exist or has no parameters.
    pub fn freeze(&self, trainer: &mut Trainer) -> Result<(), JobError> {
        for path in &self.freeze {
            if trainer.model_mut().set_frozen(path, true) == 0 {
                let layer = |view: &View| Some(view.name.rsplit_once('.')?.0.to_owned());
                let names: BTreeSet<String> = trainer.model().views().iter().filter_map(layer).collect();
                let names: Vec<&str> = names.iter().map(String::as_str).collect();
                return Err(field("spec.replay.freeze", path, format!("layers with parameters: {}", names.join(", "))));
            }
        }
        Ok(())
    }

    /// The data, if it is generated or a table.
    pub fn dataset(&self) -> Option<Arc<Dataset>> {
        match &self.source {
            Source::Subsets(settings) => Some(Arc::new(Dataset::subsets(settings))),
            Source::Table(table) => table.clone(),
            Source::Buffer(_) => None,
        }
    }

    /// Columns that the model reads, where the samples are a table.
    pub fn table(&self) -> Option<&TableColumns> {
        match &self.source {
            Source::Table(data) => data.as_ref()?.table.as_ref(),
            Source::Subsets(_) | Source::Buffer(_) => None,
        }
    }

    /// How items are drawn, if the source is a replay buffer.
    pub const fn buffer(&self) -> Option<&BufferPlan> {
        match &self.source {
            Source::Buffer(plan) => Some(plan),
            Source::Subsets(_) | Source::Table(_) => None,
        }
    }

    /// Leaves of a member of rank `rank` among `members`, in partition-invariant order.
    pub fn leaves(rank: usize, members: usize) -> Range<u32> {
        let bound = |rank: usize| (LEAVES as usize * rank / members) as u32;
        bound(rank)..bound(rank + 1)
    }

    /// Rows of each batch that a member computes, of equal parts, and the order in which the group adds.
    pub fn part(&self, rank: usize, members: usize) -> (Range<usize>, SummationOrder) {
        self.part_of(rank, &Shares::even(self.batch, members))
    }

    /// Leaves of the part of a batch that one of so many pipelines has.
    pub(crate) fn micro_batches(&self, pipelines: usize) -> usize {
        match self.order {
            SumOrder::Rank | SumOrder::Fast => self.leaves as usize,
            SumOrder::PartitionInvariant => (LEAVES as usize / pipelines).max(1),
        }
    }

    /// Rows of each batch that a member computes, and the order in which the group adds.
    pub fn part_of(&self, rank: usize, shares: &Shares) -> (Range<usize>, SummationOrder) {
        let members = shares.sizes().len();
        match self.place(rank, members) {
            Some(place) => self.part_of_place(place),
            None => self.part_of_shares(rank, shares),
        }
    }

    /// As [`Self::part_of`] where no member is a stage.
    pub(crate) fn part_of_shares(&self, rank: usize, shares: &Shares) -> (Range<usize>, SummationOrder) {
        let members = shares.sizes().len();
        match self.order {
            SumOrder::Rank | SumOrder::Fast => (shares.rows(rank), SummationOrder::Rank { leaves: self.leaves }),
            SumOrder::PartitionInvariant => {
                let owned = Self::leaves(rank, members);
                let rows = LeafSplit::global_rows(self.batch, LEAVES, owned.clone());
                let order = SummationOrder::PartitionInvariant { leaves: LEAVES, owned, global_rows: self.batch };
                (rows, order)
            }
        }
    }

    /// Sets the secret from which the samples of steps and the noise follow, with privacy.
    pub fn set_noise_secret(&mut self, secret: NoiseSecret) {
        self.noise_secret = Some(secret);
    }

    /// Samples of the rows `rows` of each batch of a step of a model. With privacy the number of samples varies: it is the part of them that `rows`
    /// is of a batch; none without the secret.
    pub fn samples(&self, member: usize, data: &Dataset, step: u64, rows: &Range<usize>) -> Vec<Vec<usize>> {
        if let Some(privacy) = &self.spec.privacy {
            let sample = |secret: NoiseSecret| secret.sample(step, data.training_len(), privacy.sampling_rate);
            let all = self.noise_secret.map_or_else(Vec::new, sample);
            let parts = (0..self.batches).map(|micro| part(&all, micro..micro + 1, self.batches));
            return parts.map(|batch| part(batch, rows.clone(), self.batch).to_vec()).collect();
        }
        let seed = self.member_seed(member);
        let first = |micro: usize| (step * self.batches as u64 + micro as u64) * self.batch as u64;
        let sample = |position: u64| sample_at(seed, data.training_len(), position);
        (0..self.batches).map(|micro| rows.clone().map(|row| sample(first(micro) + row as u64)).collect()).collect()
    }

    /// Numbers of the draws that are the rows `rows` of a batch of a model from a replay buffer; `batch` counts all batches of the run.
    ///
    /// Draws of neighbouring numbers come from neighbouring partitions. The rows of a batch are its draws in a random order, so that the
    /// samples that are missing when a member dies in a step are spread over the buffer. Which draw is a row depends on the seed and the
    /// batch alone: the rows are the same for any number of members.
    pub fn draws(&self, member: usize, batch: u64, rows: &Range<usize>) -> Vec<u32> {
        let (seed, first) = (self.member_seed(member), batch * self.batch as u64);
        rows.clone().map(|row| sample_at(seed, self.batch, first + row as u64) as u32).collect()
    }
}

/// The part of `all` that `range` is of `whole`.
fn part<T>(all: &[T], range: Range<usize>, whole: usize) -> &[T] {
    &all[range.start * all.len() / whole..range.end * all.len() / whole]
}

impl Source {
    /// Number of samples to train on; `None` of a buffer, and of a table that is not known yet.
    fn training_len(&self) -> Option<usize> {
        match self {
            Self::Subsets(settings) => Some(training_len(settings.samples)),
            Self::Table(data) => data.as_ref().map(|data| data.training_len()),
            Self::Buffer(_) => None,
        }
    }
}

/// Reads the table of a source whose input has the given name, of which the model must use input and target.
fn read_table(run: &ReplayRun, name: &str, table: Option<&[u8]>) -> Result<Option<Arc<Dataset>>, JobError> {
    let input = &run.model.inputs[0];
    if input.field != name {
        return Err(field(
            "spec.replay.model.inputs[0].field",
            &input.field,
            format!("{name}, the input of this source"),
        ));
    }
    let first = run.model.layers.first();
    if first.is_some_and(|it| it.feature_bag.or(it.feature_attention).is_some()) {
        let allowed = "a layer that reads numbers; featureBag and featureAttention read feature numbers";
        return Err(field("spec.replay.model.layers[0]", "set", allowed));
    }
    let Some(content) = table else { return Ok(None) };
    let is_class = run.model.loss.kind == LossFunction::CrossEntropy;
    // Means and variances of the columns would be a release without noise.
    let read = if run.privacy.is_some() { Dataset::unscaled_table } else { Dataset::table };
    let data = read(content, &run.model.loss.target, is_class, run.seed).map_err(JobError::Table)?;
    if data.features as u64 != input.dim {
        let allowed = format!("{}, the columns of the table without the target", data.features);
        return Err(field("spec.replay.model.inputs[0].dim", input.dim, allowed));
    }
    Ok(Some(Arc::new(data)))
}

/// The generator of a source, of which the model must use input and target.
fn generated(source: &FeatureSubsets, model: &ReplayModel) -> Result<Subsets, JobError> {
    let source = subsets(source)?;
    let input = &model.inputs[0];
    if input.field != "mask" {
        return Err(field("spec.replay.model.inputs[0].field", &input.field, "mask, the input of this source"));
    }
    if input.dim != source.features as u64 {
        let allowed = format!("{}, the features of the source", source.features);
        return Err(field("spec.replay.model.inputs[0].dim", input.dim, allowed));
    }
    if model.loss.target != "score" {
        let allowed = "score, the target of this source";
        return Err(field("spec.replay.model.loss.target", &model.loss.target, allowed));
    }
    Ok(source)
}

fn subsets(source: &FeatureSubsets) -> Result<Subsets, JobError> {
    let FeatureSubsets { features, samples, smallest, largest, noise, seed } = *source;
    if largest > features {
        return Err(field("spec.replay.source.synthetic.largest", largest, format!("at most features, {features}")));
    }
    if smallest > largest {
        return Err(field("spec.replay.source.synthetic.smallest", smallest, format!("at most largest, {largest}")));
    }
    if samples * largest > MAX_INDICES {
        let allowed = format!("at most {MAX_INDICES} divided by largest, {}", MAX_INDICES / largest);
        return Err(field("spec.replay.source.synthetic.samples", samples, allowed));
    }
    let sizes = (smallest as usize, largest as usize);
    Ok(Subsets { features: features as usize, samples: samples as usize, sizes, noise, seed })
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn job(changes: &[(&str, serde_json::Value)]) -> Result<Job, JobError> {
        let mut spec = serde_json::json!({
            "source": { "synthetic": { "features": 60, "samples": 200, "largest": 20 } },
            "model": {
                "inputs": [{ "field": "mask", "dim": 60 }],
                "layers": [{ "dense": 8, "activation": "Relu" }, { "dense": 1, "activation": "Sigmoid" }],
                "loss": { "kind": "Mse", "target": "score" },
            },
            "optimizer": { "rate": 0.01 },
            "batch": 64,
            "steps": 10,
        });
        for (at, value) in changes {
            match spec.pointer_mut(at) {
                Some(place) => *place = value.clone(),
                None => spec[&at[1..]] = value.clone(),
            }
        }
        Job::new(&serde_json::from_value(spec).unwrap())
    }

    #[test]
    fn errors_name_the_field_or_the_layer_with_both_dimensions() {
        let refused = |at: &str, value: serde_json::Value| job(&[(at, value)]).unwrap_err().to_string();
        let text = refused("/model/inputs/0/dim", 50.into());
        assert_eq!(text, "spec.replay.model.inputs[0].dim is 50; allowed: 60, the features of the source");
        let text = refused("/model/loss/target", "label".into());
        assert_eq!(text, "spec.replay.model.loss.target is label; allowed: score, the target of this source");
        let text = refused("/model/layers/1", serde_json::json!({ "dense": 1, "inputs": 9 }));
        assert!(text.contains("layer 1: inputs is 9, but the layer below gives 8"), "{text}");
        let text = refused("/model/layers/1", serde_json::json!({ "dense": 3 }));
        assert!(text.contains("3 outputs") && text.contains("1 output"), "{text}");
        let text = refused("/model/layers/0", serde_json::json!({ "residual": [{ "dense": 8 }] }));
        assert!(text.contains("layer 0") && text.contains("60") && text.contains('8'), "{text}");
        let text = refused("/source/synthetic/largest", 61.into());
        assert!(text.contains("largest is 61"), "{text}");
    }

    #[test]
    fn members_compute_disjoint_rows_of_each_batch_and_steps_continue_the_sequence() {
        let job = job(&[]).unwrap();
        let data = job.dataset().unwrap();
        let whole = job.samples(0, &data, 3, &(0..64));
        let parts: Vec<usize> =
            (0..3).flat_map(|rank| job.samples(0, &data, 3, &job.part(rank, 3).0).remove(0)).collect();
        assert_eq!(whole[0], parts);
        let mut pass: Vec<usize> = (0..3).flat_map(|step| job.samples(0, &data, step, &(0..64)).remove(0)).collect();
        pass.extend_from_slice(&job.samples(0, &data, 3, &(0..64))[0]);
        let mut first: Vec<usize> = pass[..180].to_vec();
        first.sort_unstable();
        assert_eq!(first, (0..180).collect::<Vec<_>>(), "the first pass visits every training sample once");
    }

    #[test]
    fn tropical_layers_of_a_manifest_are_trained_also_within_residual_blocks() {
        let layers = serde_json::json!([
            { "dense": 16, "activation": "Tanh" },
            { "tropical": 12, "activation": "Tanh" },
            { "residual": [{ "tropical": 12 }] },
            { "dense": 1 },
        ]);
        let job = job(&[("/model/layers", layers)]).unwrap();
        let data = job.dataset().unwrap();
        let mut trainer = job.trainer().unwrap();
        let before = trainer.model().clone();
        let loss = job.spec.loss.kind;
        for step in 0..150 {
            let (range, order) = job.part(0, 1);
            let rows = Rows::of(trainer.model(), &data, &job.samples(0, &data, step, &range)[0]);
            trainer.step(&[rows.labeled(0).unwrap()], &order, &mut crate::Alone).unwrap();
        }
        for name in ["layers.1.weight", "layers.1.bias", "layers.2.layers.0.weight"] {
            assert_ne!(trainer.model().tensor(name), before.tensor(name), "{name}");
        }
        let (before, after) =
            (evaluate(&before, loss, &data).unwrap(), evaluate(trainer.model(), loss, &data).unwrap());
        assert!(after.squared_error < 0.5 * before.squared_error, "{before:?} {after:?}");
    }

    #[test]
    fn training_raises_the_correlation_on_held_out_samples() {
        let job = job(&[]).unwrap();
        let data = job.dataset().unwrap();
        let mut trainer = job.trainer().unwrap();
        let loss = job.spec.loss.kind;
        let before = evaluate(trainer.model(), loss, &data).unwrap();
        for step in 0..150 {
            let (range, order) = job.part(0, 1);
            let rows = Rows::of(trainer.model(), &data, &job.samples(0, &data, step, &range)[0]);
            trainer.step(&[rows.labeled(0).unwrap()], &order, &mut crate::Alone).unwrap();
        }
        let after = evaluate(trainer.model(), loss, &data).unwrap();
        assert!(after.squared_error < 0.5 * before.squared_error, "{before:?} {after:?}");
        assert!(after.correlation > 0.5 && after.spread_ratio > 0.3, "{after:?}");
    }
}
