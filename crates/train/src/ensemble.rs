//! An ensemble: independent models that are trained together on the same workers.
//!
//! Each member has its own seed, from which its initial parameters, its dropout and its batches follow. The sums of all members travel in one
//! reduction: their values one after the other, then a loss per member. So a member has the bits of a run that trains it alone.

use engram_neural::tree::Node;
use engram_neural::{Coverage, GradientSum, LabeledBatch, SampleErrors, WeightsError, philox};
use xxhash_rust::xxh3::Xxh3;

use crate::reduce::{LocalGradient, Reduce};
use crate::trainer::{
    Counters, LocalStep, StepOutcome, StepReport, SummationOrder, TrainError, Trainer, TrainerError, TrainerSpec,
};

/// Most members of an ensemble.
pub const MAX_MEMBERS: usize = 16;
/// Separates the seeds of members from other numbers of the same seed.
const DOMAIN: u64 = 0x656e_7365_6d62_6c65;

/// Returns the seed of a member: the seed of the run for the first, a number of 53 bits for the others. A run with this seed trains the same member.
pub fn member_seed(seed: u64, member: usize) -> u64 {
    if member == 0 {
        return seed;
    }
    let words = philox(seed ^ DOMAIN, [member as u32, 0, 0, 0]);
    (u64::from(words[0]) << 32 | u64::from(words[1])) >> 11
}

/// Returns the specifications of so many members.
pub fn member_specs(spec: &TrainerSpec, members: usize) -> Vec<TrainerSpec> {
    (0..members).map(|member| TrainerSpec { seed: member_seed(spec.seed, member), ..spec.clone() }).collect()
}

/// Models in training: one, or several independent ones.
#[derive(Debug)]
pub struct Ensemble {
    members: Vec<Trainer>,
}

/// The parts of a step that a worker keeps until the step is committed.
#[derive(Debug, Clone, PartialEq)]
pub struct EnsembleStep {
    locals: Vec<LocalStep>,
    /// Of several members: their sums.
    joined: Option<LocalGradient>,
    /// Losses and errors of the samples, member by member.
    pub samples: SampleErrors,
}

impl EnsembleStep {
    /// What the group reduces.
    pub fn gradient(&self) -> &LocalGradient {
        self.joined.as_ref().unwrap_or(&self.locals[0].gradient)
    }
}

impl From<Vec<Trainer>> for Ensemble {
    /// # Panics
    /// There are no members.
    fn from(members: Vec<Trainer>) -> Self {
        assert!(!members.is_empty(), "an ensemble has a member");
        Self { members }
    }
}

impl Ensemble {
    /// Members at step 0, of the given specifications.
    ///
    /// # Errors
    /// A specification is not valid.
    ///
    /// # Panics
    /// There are no specifications.
    pub fn new(specs: &[TrainerSpec]) -> Result<Self, TrainerError> {
        Ok(specs.iter().map(Trainer::new).collect::<Result<Vec<_>, _>>()?.into())
    }

    /// The members.
    pub fn members(&self) -> &[Trainer] {
        &self.members
    }

    /// The members, to freeze layers.
    pub fn members_mut(&mut self) -> &mut [Trainer] {
        &mut self.members
    }

    /// The first member.
    pub fn first(&self) -> &Trainer {
        &self.members[0]
    }

    /// Steps and updates of the first member, and the samples of all.
    pub fn counters(&self) -> Counters {
        let samples = self.members.iter().map(|member| member.counters().samples).sum();
        Counters { samples, ..self.first().counters() }
    }

    /// Fingerprint of the state of all members; of one member its own.
    pub fn digest(&self) -> u128 {
        if let [member] = &self.members[..] {
            return member.digest();
        }
        let mut hash = Xxh3::new();
        self.members.iter().for_each(|member| hash.update(&member.digest().to_le_bytes()));
        hash.digest128()
    }

    /// Forgets what compression lost, see [`Trainer::forget_feedback`].
    pub fn forget_feedback(&mut self) {
        self.members.iter_mut().for_each(Trainer::forget_feedback);
    }

    /// Loads weights of the same names and shapes into each member, from the file of its number or else the first one. Returns the number of tensors.
    ///
    /// # Errors
    /// A file is no safetensors file, or a value is not finite.
    pub fn warm_start(&mut self, files: &[Vec<u8>]) -> Result<usize, WeightsError> {
        let mut loaded = 0;
        for (number, member) in self.members.iter_mut().enumerate() {
            let Some(file) = files.get(number).or(files.first()) else { break };
            loaded += member.model_mut().load_safetensors(file, Coverage::Matching)?;
        }
        Ok(loaded)
    }

    /// Computes the sums of the next step: as many batches for each member, one member after the other. See [`Trainer::prepare`].
    ///
    /// # Errors
    /// As [`Trainer::prepare`].
    pub fn prepare<R: Reduce>(
        &mut self,
        batches: &[LabeledBatch<'_>],
        order: &SummationOrder,
        reduce: &mut R,
    ) -> Result<EnsembleStep, TrainError<R::Error>>
    where
        R::Error: std::error::Error + 'static,
    {
        let each = batches.len() / self.members.len();
        let mut locals = Vec::with_capacity(self.members.len());
        let mut samples = SampleErrors::default();
        for (number, member) in self.members.iter_mut().enumerate() {
            let mut local = member.prepare(&batches[number * each..(number + 1) * each], order, reduce)?;
            let own = std::mem::take(&mut local.samples);
            samples.losses.extend(own.losses);
            samples.errors.extend(own.errors);
            locals.push(local);
        }
        let joined = (locals.len() > 1).then(|| join(&locals));
        Ok(EnsembleStep { locals, joined, samples })
    }

    /// Applies or skips the reduced sums of a step in every member.
    ///
    /// # Errors
    /// The sums of a member are not finite and there is no loss scaling. Members before it have made the step: the run cannot go on.
    ///
    /// # Panics
    /// `local` belongs to another step.
    pub fn commit<E: std::error::Error + 'static>(
        &mut self,
        local: EnsembleStep,
        reduced: &GradientSum,
    ) -> Result<StepReport, TrainError<E>> {
        if let [member] = &mut self.members[..] {
            let local = local.locals.into_iter().next().expect("a part per member");
            return member.commit(local, reduced);
        }
        let parts = part(reduced, self.members.len());
        let mut reports = Vec::with_capacity(self.members.len());
        for ((member, local), sum) in self.members.iter_mut().zip(local.locals).zip(&parts) {
            reports.push(member.commit(local, sum)?);
        }
        Ok(summary(&reports))
    }
}

/// The report of all members: mean loss, largest norm, samples of all; applied if one member applied it.
fn summary(reports: &[StepReport]) -> StepReport {
    let applied = reports.iter().find(|report| report.outcome == StepOutcome::Applied);
    let first = applied.unwrap_or(&reports[0]);
    StepReport {
        samples: reports.iter().map(|report| report.samples).sum(),
        loss: reports.iter().map(|report| report.loss).sum::<f64>() / reports.len() as f64,
        gradient_norm: reports.iter().map(|report| report.gradient_norm).fold(0.0, f64::max),
        ..*first
    }
}

/// Joins the sums of members, which cover the same rows.
///
/// # Panics
/// A sum is compressed: settings that do so exclude ensembles.
fn join(locals: &[LocalStep]) -> LocalGradient {
    let sums = |at: usize| locals.iter().map(move |local| sum_at(&local.gradient, at));
    match &locals[0].gradient {
        LocalGradient::Sum(_) => LocalGradient::Sum(concatenated(sums(0))),
        LocalGradient::Subtrees { leaves, sums: nodes } => {
            let joined = |(at, (node, _)): (usize, &(Node, GradientSum))| (*node, concatenated(sums(at)));
            LocalGradient::Subtrees { leaves: *leaves, sums: nodes.iter().enumerate().map(joined).collect() }
        }
        LocalGradient::Stages { leaves, sums: nodes } => {
            let joined = |(at, (node, _)): (usize, &(Node, GradientSum))| (*node, concatenated(sums(at)));
            LocalGradient::Stages { leaves: *leaves, sums: nodes.iter().enumerate().map(joined).collect() }
        }
        LocalGradient::Compressed(_) | LocalGradient::LowRank(_) | LocalGradient::Private(_) => {
            unreachable!("ensembles exclude compression and privacy")
        }
    }
}

/// The sum, or that of the subtree number `at`.
fn sum_at(gradient: &LocalGradient, at: usize) -> &GradientSum {
    match gradient {
        LocalGradient::Sum(sum) => sum,
        LocalGradient::Subtrees { sums, .. } | LocalGradient::Stages { sums, .. } => &sums[at].1,
        LocalGradient::Compressed(_) | LocalGradient::LowRank(_) | LocalGradient::Private(_) => {
            unreachable!("ensembles exclude compression and privacy")
        }
    }
}

/// The values of all sums, then their losses. Samples are those of one member.
fn concatenated<'a>(sums: impl Iterator<Item = &'a GradientSum> + Clone) -> GradientSum {
    let mut values = Vec::with_capacity(sums.clone().map(|sum| sum.values.len() + 1).sum());
    sums.clone().for_each(|sum| values.extend_from_slice(&sum.values));
    values.extend(sums.clone().map(|sum| sum.loss as f32));
    let samples = sums.clone().next().map_or(0, |sum| sum.samples);
    GradientSum { values, samples, loss: sums.map(|sum| sum.loss).sum() }
}

/// The sum of each of so many members.
fn part(reduced: &GradientSum, members: usize) -> Vec<GradientSum> {
    let (values, losses) = reduced.values.split_at(reduced.values.len() - members);
    let parts = values.chunks(values.len() / members).zip(losses);
    let sum = |(values, loss): (&[f32], &f32)| GradientSum {
        values: values.to_vec(),
        samples: reduced.samples,
        loss: f64::from(*loss),
    };
    parts.map(sum).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::time::Duration;

    use super::*;
    use crate::job::{Job, Rows};
    use crate::{Alone, InProcess};

    fn job(changes: &[(&str, serde_json::Value)]) -> Job {
        let mut spec = serde_json::json!({
            "source": { "synthetic": { "features": 30, "samples": 400, "largest": 20 } },
            "model": {
                "inputs": [{ "field": "mask", "dim": 30 }],
                "layers": [{ "dense": 8, "activation": "Relu" }, { "dropout": 0.2 }, { "dense": 1 }],
                "loss": { "kind": "Mse", "target": "score", "correlation": { "weight": 0.1, "target": 0.9 } },
            },
            "optimizer": { "rate": 0.01 },
            "batch": 64,
            "steps": 6,
        });
        changes.iter().for_each(|(name, value)| spec[*name] = value.clone());
        Job::new(&serde_json::from_value(spec).unwrap()).unwrap()
    }

    /// Trains on so many workers for the steps `steps`.
    fn train(job: &Job, mut workers: Vec<Ensemble>, steps: std::ops::Range<u64>) -> Vec<Ensemble> {
        let data = job.dataset().unwrap();
        let count = workers.len();
        std::thread::scope(|scope| {
            let group = InProcess::group(count, Duration::from_secs(60));
            for (rank, (trained, mut reduce)) in workers.iter_mut().zip(group).enumerate() {
                let (steps, data) = (steps.clone(), &data);
                scope.spawn(move || {
                    for step in steps {
                        let (rows, order) = job.part(rank, count);
                        let all: Vec<(usize, Rows)> = (0..job.ensemble)
                            .flat_map(|member| job.samples(member, data, step, &rows))
                            .enumerate()
                            .map(|(at, samples)| (at, Rows::of(trained.first().model(), data, &samples)))
                            .collect();
                        let first = |at: usize| at % job.batches * job.batch + rows.start;
                        let batches: Vec<LabeledBatch<'_>> =
                            all.iter().map(|(at, rows)| rows.labeled(first(*at)).unwrap()).collect();
                        let local = trained.prepare(&batches, &order, &mut reduce).unwrap();
                        let reduced = reduce.gradient(local.gradient()).unwrap();
                        trained.commit::<crate::InProcessError>(local, &reduced).unwrap();
                    }
                });
            }
        });
        workers
    }

    fn fresh(job: &Job, workers: usize) -> Vec<Ensemble> {
        (0..workers).map(|_| job.models().unwrap()).collect()
    }

    #[test]
    fn every_member_has_the_bits_of_a_run_with_its_seed_that_trains_it_alone() {
        let options = [
            vec![],
            vec![("order", "PartitionInvariant".into())],
            vec![("syncEvery", 2.into()), ("accumulate", 2.into())],
            vec![("precision", "F16".into())],
        ];
        for options in options {
            let with = |more: &[(&'static str, serde_json::Value)]| job(&[&options[..], more].concat());
            let ensemble = with(&[("ensemble", 3.into())]);
            let trained = train(&ensemble, fresh(&ensemble, 2), 0..6);
            assert_eq!(trained[0].digest(), trained[1].digest());
            for (number, member) in trained[0].members().iter().enumerate() {
                let alone = with(&[("seed", ensemble.member_seed(number).into())]);
                let alone = train(&alone, fresh(&alone, 2), 0..6);
                assert_eq!(member.digest(), alone[0].digest(), "member {number} with {options:?}");
            }
            let digests: std::collections::BTreeSet<u128> = trained[0].members().iter().map(Trainer::digest).collect();
            assert_eq!(digests.len(), 3, "members are independent");
        }
    }

    #[test]
    fn ensemble_of_one_is_the_run_without_ensemble() {
        let (one, none) = (job(&[("ensemble", 1.into())]), job(&[]));
        let trained = train(&one, fresh(&one, 1), 0..6).remove(0);
        let mut alone = none.trainer().unwrap();
        let data = none.dataset().unwrap();
        for step in 0..6 {
            let (rows, order) = none.part(0, 1);
            let rows = Rows::of(alone.model(), &data, &none.samples(0, &data, step, &rows)[0]);
            alone.step(&[rows.labeled(0).unwrap()], &order, &mut Alone).unwrap();
        }
        assert_eq!(trained.digest(), alone.digest());
        let saved = trained.checkpoint(1, 1, BTreeMap::new()).unwrap();
        assert_eq!(saved, alone.checkpoint(1, 1, BTreeMap::new()).unwrap());
    }

    #[test]
    fn restored_ensemble_continues_with_the_same_bits_and_other_ensembles_are_refused() {
        let ensemble = job(&[("ensemble", 3.into()), ("precision", "F16".into())]);
        let half = train(&ensemble, fresh(&ensemble, 1), 0..3).remove(0);
        let saved = half.checkpoint(1, 1, BTreeMap::from([("digest".to_owned(), 9)])).unwrap();
        let (restored, cursors) = Ensemble::restore(&ensemble.spec, 3, &saved).unwrap();
        assert_eq!((cursors["digest"], restored.digest()), (9, half.digest()));
        let expected = train(&ensemble, vec![half], 3..6).remove(0).digest();
        assert_eq!(train(&ensemble, vec![restored], 3..6)[0].digest(), expected);
        assert_eq!(saved.weights().unwrap().len(), 3);
        let refused = |seed, members| {
            Ensemble::restore(&TrainerSpec { seed, ..ensemble.spec.clone() }, members, &saved).unwrap_err().to_string()
        };
        assert!(refused(42, 2).contains("it has 3 models, expected 2"), "{}", refused(42, 2));
        assert!(refused(43, 3).contains("of member 1, expected seed"), "{}", refused(43, 3));
        let mut damaged = saved.clone();
        damaged.files.get_mut("optimizer-2.safetensors").unwrap()[100] ^= 1;
        let text = Ensemble::restore(&ensemble.spec, 3, &damaged).unwrap_err().to_string();
        assert!(text.starts_with("optimizer-2.safetensors: chunk 0"), "{text}");
    }

    #[test]
    fn settings_that_exclude_ensembles_are_refused() {
        let refused = |more: serde_json::Value| {
            let mut spec = serde_json::json!({
                "source": { "synthetic": { "features": 60, "samples": 200, "largest": 20 } },
                "model": {
                    "inputs": [{ "field": "mask", "dim": 60 }],
                    "layers": [{ "dense": 100_000, "activation": "Relu" }, { "dense": 1 }],
                    "loss": { "kind": "Mse", "target": "score" },
                },
                "optimizer": { "rate": 0.01 }, "batch": 64, "steps": 10,
            });
            spec.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            Job::new(&serde_json::from_value(spec).unwrap()).unwrap_err().to_string()
        };
        let named = |members: u32, allowed: &str| format!("spec.replay.ensemble is {members}; allowed: {allowed}");
        assert_eq!(refused(serde_json::json!({ "ensemble": 17 })), named(17, "1 to 16"));
        assert_eq!(refused(serde_json::json!({ "ensemble": 0 })), named(0, "1 to 16"));
        let compressed = serde_json::json!({ "ensemble": 2, "compression": { "kind": "Bf16" } });
        assert_eq!(refused(compressed), named(2, "1 with compression"));
        let text = refused(serde_json::json!({ "ensemble": 11 }));
        assert_eq!(text, named(11, "1 to 10: all models together have at most 67108864 parameters"));
    }
}
