//! Runs of kind `Geodesic`: leave-one-out validation of the geodesic spectral model, a task per held-out concentration and start.

mod checkpoint;
mod page;
mod report;
mod source;

use super::{StageResults, Task, TaskContext, TaskError, TaskFindings, TaskRun};
use engram_api::{GeodesicRun, SpectraDecoder, SpectraEngine};
use engram_devices::ComputeDevice;
use engram_geodesic::{
    Agreement, Axes, CalibrationResult, CalibrationTask, Decoder, Engine, Error, ErrorProfile, LatentModel,
    LeakingResult, LossPoint, MIN_CALIBRATED_FOLDS, MetricFigure, Report, Settings, Spectra, StepError, TaskResult,
    Trainer, advance_all, calibration_tasks, leaking_trainer, tasks,
};
use serde::{Deserialize, Serialize};
use source::Source;

/// Steps between two reports of the progress.
const REPORT_STEPS: u64 = 10;

/// Most models of a task: a checkpoint of three fits into one message.
const MAX_MODELS: usize = 3;

/// Most training spectra of the geometry of two dimensions: its time grows with their square.
const MAX_LATENT_SPECTRA: usize = 15;

/// What a task trains.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
enum Training {
    /// A model without the held-out spectrum.
    Fold(engram_geodesic::Task),
    /// A model on all spectra, by the number of its start: the leaking variant, and the model for samples of unknown concentration.
    All(u64),
    /// A model without two spectra, for the calibration of bands.
    Calibration(CalibrationTask),
}

impl Training {
    /// Whether another training is of the same kind, on the same spectra.
    const fn differs_by_its_start(self, other: Self) -> bool {
        match (self, other) {
            (Self::Fold(one), Self::Fold(other)) => one.fold == other.fold,
            (Self::All(_), Self::All(_)) => true,
            _ => false,
        }
    }
}

/// A trainer and its loss curve.
type ModelInTraining = (Trainer, Vec<LossPoint>);

/// Result of the training of one model.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
enum Outcome {
    Fold(Box<FoldOutcome>),
    All { predictions: LeakingResult, samples: Vec<ErrorProfile> },
    Calibration(CalibrationResult),
}

/// Result of a model without the held-out spectrum.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct FoldOutcome {
    result: TaskResult,
    /// Comparison of the held-out spectrum with predictions at all concentrations.
    profile: ErrorProfile,
    losses: Vec<LossPoint>,
    metric: MetricFigure,
    /// Of the other engines with the closed form, on the trained metric.
    agreements: Vec<Agreement>,
    /// Largest difference of the prediction from that of the closed form, with another engine.
    #[serde(default)]
    from_closed_form: Option<f64>,
    /// Prediction of the geometry of two dimensions: with the first start of a fold, if it exists.
    #[serde(default)]
    latent: Option<Vec<f64>>,
}

/// The results of all tasks, by kind.
#[derive(Default)]
struct Outcomes {
    folds: Vec<FoldOutcome>,
    all: Vec<(LeakingResult, Vec<ErrorProfile>)>,
    calibrations: Vec<CalibrationResult>,
}

impl Outcomes {
    fn add(&mut self, outcome: Outcome) {
        match outcome {
            Outcome::Fold(fold) => self.folds.push(*fold),
            Outcome::All { predictions, samples } => self.all.push((predictions, samples)),
            Outcome::Calibration(calibration) => self.calibrations.push(calibration),
        }
    }
}

/// A leave-one-out validation.
pub(super) struct Geodesic {
    source: Source,
    settings: Settings,
    starts: u64,
    leaking: bool,
    bands: bool,
    gpus: bool,
}

impl Geodesic {
    /// Checks a specification and its data.
    pub(super) fn new(spec: &GeodesicRun, data: Option<&[u8]>) -> Result<Self, TaskError> {
        let source = Source::new(&spec.source, data)?;
        let settings = settings(spec);
        // Reveals settings that do not fit the spectra.
        let first = engram_geodesic::Task { fold: 0, start: 0 };
        first.trainer(&source.spectra, settings).map_err(|error| invalid("spec.geodesic", &error))?;
        let folds = source.spectra.ppb().len();
        if spec.calibrated_bands && folds < MIN_CALIBRATED_FOLDS {
            let problem = format!("true with {folds} concentrations; allowed: at least {MIN_CALIBRATED_FOLDS} of them");
            return Err(invalid("spec.geodesic.calibratedBands", &problem));
        }
        let (starts, leaking, bands) = (u64::from(spec.starts), spec.leaking_variant, spec.calibrated_bands);
        Ok(Self { source, settings, starts, leaking, bands, gpus: spec.use_gpus })
    }

    fn trainer(&self, training: Training) -> Result<Trainer, Error> {
        let spectra = &self.source.spectra;
        match training {
            Training::Fold(task) if task.fold < spectra.ppb().len() => task.trainer(spectra, self.settings),
            Training::Fold(task) => Err(Error::Incomplete(format!("fold {} does not exist", task.fold))),
            Training::All(start) => leaking_trainer(spectra, self.settings, start),
            Training::Calibration(task) => task.trainer(spectra, self.settings),
        }
    }

    fn outcome(&self, training: Training, trainer: &Trainer, losses: Vec<LossPoint>) -> Result<Outcome, Error> {
        let spectra = &self.source.spectra;
        Ok(match training {
            Training::Fold(task) => Outcome::Fold(Box::new(self.fold_outcome(task, trainer, losses)?)),
            Training::All(start) => Outcome::All {
                predictions: LeakingResult::new(spectra, start, trainer)?,
                samples: self
                    .source
                    .samples
                    .iter()
                    .map(|sample| ErrorProfile::new(trainer, &sample.absorbance))
                    .collect::<Result<_, _>>()?,
            },
            Training::Calibration(task) => Outcome::Calibration(task.result(spectra, self.settings, trainer)?),
        })
    }

    fn fold_outcome(
        &self,
        task: engram_geodesic::Task,
        trainer: &Trainer,
        losses: Vec<LossPoint>,
    ) -> Result<FoldOutcome, Error> {
        let spectra = &self.source.spectra;
        let result = task.result(spectra, self.settings, trainer)?;
        Ok(FoldOutcome {
            profile: ErrorProfile::new(trainer, spectra.row(task.fold))?,
            losses,
            metric: trainer.metric_figure()?,
            agreements: trainer.engine_agreements()?,
            from_closed_form: trainer.distance_from_closed_form(spectra.ppb()[task.fold], &result.prediction)?,
            latent: if task.start == 0 { latent(spectra, task.fold) } else { None },
            result,
        })
    }

    fn trainings(&self) -> Vec<Training> {
        let folds = self.source.spectra.ppb().len();
        let on_all = if self.leaking || !self.source.samples.is_empty() { self.starts } else { 0 };
        let calibrations = if self.bands { calibration_tasks(folds) } else { Vec::new() };
        let clean = tasks(folds, self.starts).into_iter().map(Training::Fold);
        clean.chain((0..on_all).map(Training::All)).chain(calibrations.into_iter().map(Training::Calibration)).collect()
    }

    /// Splits the trainings into those of a task each: one, or on GPUs several starts of one kind of model.
    fn groups(&self) -> Vec<Vec<Training>> {
        let mut groups: Vec<Vec<Training>> = Vec::new();
        for training in self.trainings() {
            let joins = |group: &&mut Vec<Training>| {
                self.gpus && group.len() < MAX_MODELS && group[0].differs_by_its_start(training)
            };
            match groups.iter_mut().find(joins) {
                Some(group) => group.push(training),
                None => groups.push(vec![training]),
            }
        }
        groups
    }

    fn task(&self, trainings: &[Training]) -> Task {
        let folds = self.source.spectra.ppb().len() as u64;
        let (name, spectra) = match trainings[0] {
            Training::Fold(task) => (format!("fold {}, start {}", task.fold + 1, task.start + 1), folds - 1),
            Training::All(start) if self.leaking => (format!("leaking variant, start {}", start + 1), folds),
            Training::All(start) => (format!("all spectra, start {}", start + 1), folds),
            Training::Calibration(task) => {
                (format!("calibration without {} and {}", task.first + 1, task.second + 1), folds - 2)
            }
        };
        let others = if trainings.len() > 1 { format!(" and {} more", trainings.len() - 1) } else { String::new() };
        let input = serde_json::to_vec(trainings).expect("numbers have a JSON form");
        // A step costs a term per ordered pair of spectra.
        Task { name: name + &others, input, cost: spectra * (spectra - 1) * trainings.len() as u64 }
    }

    /// Trains the models to their ends, on a GPU if the run allows it and the worker has one.
    fn train(
        &self,
        mut models: Vec<ModelInTraining>,
        context: &dyn TaskContext,
    ) -> Result<Vec<ModelInTraining>, TaskError> {
        let gpus = if self.gpus { context.gpus(u64::MAX) } else { &[] };
        let steps = |models: &[ModelInTraining]| models.iter().map(|(trainer, _)| trainer.steps()).max().unwrap_or(0);
        while models.iter().any(|(trainer, _)| !trainer.finished()) {
            if context.stop().is_set() {
                return Err(TaskError::Stopped);
            }
            advance(&mut models, gpus)?;
            let step = steps(&models);
            for (trainer, losses) in models.iter_mut().filter(|(trainer, _)| trainer.steps() == step) {
                if step.is_multiple_of(self.settings.evaluate_every) || trainer.finished() {
                    losses.push(trainer.loss_point());
                }
            }
            let fraction = step as f64 / self.settings.steps as f64;
            if step.is_multiple_of(REPORT_STEPS) {
                context.progress(fraction);
            }
            if models.iter().any(|(trainer, _)| !trainer.finished()) && context.checkpoint_due() {
                context.checkpoint(checkpoint::save(&models), fraction);
            }
        }
        Ok(models)
    }
}

/// Makes a step with every model that has not finished: on the first GPU that can, or on the CPU.
fn advance(models: &mut [ModelInTraining], gpus: &[ComputeDevice]) -> Result<(), TaskError> {
    let failed = |error: Error| TaskError::Failed(error.to_string());
    let mut error = None;
    for gpu in gpus {
        let mut trainers: Vec<&mut Trainer> = models.iter_mut().map(|(trainer, _)| trainer).collect();
        let made = gpu.geodesic(|kernels| match advance_all(&mut trainers, kernels) {
            Ok(()) => Ok(()),
            Err(StepError::Device(error)) => Err(error),
            Err(StepError::Model(model)) => {
                error = Some(model);
                Ok(())
            }
        });
        if let Some(error) = error {
            return Err(failed(error));
        }
        if made.is_some() {
            return Ok(());
        }
    }
    models.iter_mut().try_for_each(|(trainer, _)| trainer.advance()).map_err(failed)
}

/// The held-out spectrum as the geometry of two dimensions predicts it; none with few or many spectra, or if a geodesic does not exist.
fn latent(spectra: &Spectra, fold: usize) -> Option<Vec<f64>> {
    let training = spectra.without(fold).ok().filter(|it| it.ppb().len() <= MAX_LATENT_SPECTRA)?;
    let axes = Axes::new(spectra.ppb(), spectra.nm()).ok()?;
    LatentModel::fit(&training, axes).ok()?.predict(spectra.ppb()[fold]).ok()
}

impl TaskRun for Geodesic {
    fn plan(&self, results: &[StageResults]) -> Result<Vec<Task>, TaskError> {
        let groups = if results.is_empty() { self.groups() } else { Vec::new() };
        Ok(groups.iter().map(|group| self.task(group)).collect())
    }

    fn execute(&self, task: &Task, context: &dyn TaskContext) -> Result<Vec<u8>, TaskError> {
        let trainings: Vec<Training> = serde_json::from_slice(&task.input)
            .map_err(|error| TaskError::Failed(format!("the input of task {} is damaged: {error}", task.name)))?;
        let failed = |error: Error| TaskError::Failed(error.to_string());
        let mut models = Vec::new();
        for &training in &trainings {
            models.push((self.trainer(training).map_err(failed)?, Vec::new()));
        }
        // A checkpoint of another version is worth less than the task.
        if let Some(Ok(resumed)) = context.resumed_from().map(|bytes| checkpoint::resume(&models, bytes)) {
            models = resumed;
        }
        let models = self.train(models, context)?;
        let outcome = |(&training, (trainer, losses))| self.outcome(training, &trainer, losses);
        let outcomes: Vec<Outcome> =
            trainings.iter().zip(models).map(outcome).collect::<Result<_, _>>().map_err(failed)?;
        Ok(serde_json::to_vec(&outcomes).expect("numbers and strings have a JSON form"))
    }

    fn finish(&self, results: &[StageResults]) -> Result<TaskFindings, TaskError> {
        let mut outcomes = Outcomes::default();
        for result in results.iter().flatten() {
            let of_task: Vec<Outcome> = serde_json::from_slice(result)
                .map_err(|error| TaskError::Failed(format!("a result is damaged: {error}")))?;
            of_task.into_iter().for_each(|outcome| outcomes.add(outcome));
        }
        let report = self.report(&outcomes).map_err(|error| TaskError::Failed(error.to_string()))?;
        report::findings(self, &report, &outcomes)
    }
}

impl Geodesic {
    fn report(&self, outcomes: &Outcomes) -> Result<Report, Error> {
        let spectra = &self.source.spectra;
        let clean: Vec<TaskResult> = outcomes.folds.iter().map(|it| it.result.clone()).collect();
        let mut report = Report::new(spectra, &self.settings, &clean, self.source.noise_level)?;
        report.calibrate(spectra, &outcomes.calibrations)?;
        let profiles = |fold: usize| {
            let own = outcomes.folds.iter().filter(|it| it.result.task.fold == fold);
            own.map(|it| it.profile.clone()).collect()
        };
        report.invert_folds(&(0..spectra.ppb().len()).map(profiles).collect::<Vec<_>>())?;
        Ok(report)
    }
}

fn invalid(field: &str, error: &dyn std::fmt::Display) -> TaskError {
    TaskError::Invalid(format!("{field}: {error}"))
}

const fn settings(run: &GeodesicRun) -> Settings {
    let spec = &run.training;
    Settings {
        seed: spec.seed,
        decoder: match spec.decoder {
            SpectraDecoder::Slope => Decoder::Slope,
            SpectraDecoder::Flow => Decoder::Flow,
        },
        engine: match run.engine {
            SpectraEngine::ClosedForm => Engine::ClosedForm,
            SpectraEngine::BatchedShooting => Engine::BatchedShooting,
            SpectraEngine::ChristoffelGrid => Engine::ChristoffelGrid,
        },
        nodes: spec.nodes as usize,
        steps: spec.steps,
        stride: spec.stride as usize,
        validation_stride: spec.validation_stride as usize,
        evaluate_every: spec.evaluate_every,
        patience: spec.patience,
        metric_rate: spec.metric_rate,
        decoder_rate: spec.decoder_rate,
        clip: spec.clip,
        weight_decay: spec.weight_decay,
        smoothness: spec.smoothness,
        range: spec.range,
        length: spec.length,
    }
}

#[cfg(test)]
mod tests;
