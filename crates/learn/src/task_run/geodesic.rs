//! Runs of kind `Geodesic`: leave-one-out validation of the geodesic spectral model, a task per held-out concentration and start.

mod checkpoint;
mod page;
mod report;
mod source;

use super::{StageResults, Task, TaskContext, TaskError, TaskFindings, TaskRun};
use engram_api::{GeodesicRun, SpectraDecoder, SpectraTraining};
use engram_geodesic::{
    Agreement, Axes, CalibrationResult, CalibrationTask, Decoder, Error, ErrorProfile, LatentModel, LeakingResult,
    LossPoint, MIN_CALIBRATED_FOLDS, MetricFigure, Report, Settings, Spectra, TaskResult, Trainer, calibration_tasks,
    leaking_trainer, tasks,
};
use serde::{Deserialize, Serialize};
use source::Source;

/// Steps between two reports of the progress.
const REPORT_STEPS: u64 = 10;

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
    agreement: Agreement,
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

/// A leave-one-out validation.
pub(super) struct Geodesic {
    source: Source,
    settings: Settings,
    starts: u64,
    leaking: bool,
    bands: bool,
}

impl Geodesic {
    /// Checks a specification and its data.
    pub(super) fn new(spec: &GeodesicRun, data: Option<&[u8]>) -> Result<Self, TaskError> {
        let source = Source::new(&spec.source, data)?;
        let settings = settings(&spec.training);
        // Reveals settings that do not fit the spectra.
        let first = engram_geodesic::Task { fold: 0, start: 0 };
        first.trainer(&source.spectra, settings).map_err(|error| invalid("spec.geodesic", &error))?;
        let folds = source.spectra.ppb().len();
        if spec.calibrated_bands && folds < MIN_CALIBRATED_FOLDS {
            let problem = format!("true with {folds} concentrations; allowed: at least {MIN_CALIBRATED_FOLDS} of them");
            return Err(invalid("spec.geodesic.calibratedBands", &problem));
        }
        let (starts, leaking, bands) = (u64::from(spec.starts), spec.leaking_variant, spec.calibrated_bands);
        Ok(Self { source, settings, starts, leaking, bands })
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
            Training::Fold(task) => Outcome::Fold(Box::new(FoldOutcome {
                result: task.result(spectra, self.settings, trainer)?,
                profile: ErrorProfile::new(trainer, spectra.row(task.fold))?,
                losses,
                metric: trainer.metric_figure()?,
                agreement: trainer.engine_agreement()?,
                latent: if task.start == 0 { latent(spectra, task.fold) } else { None },
            })),
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

    fn trainings(&self) -> Vec<Training> {
        let folds = self.source.spectra.ppb().len();
        let on_all = if self.leaking || !self.source.samples.is_empty() { self.starts } else { 0 };
        let calibrations = if self.bands { calibration_tasks(folds) } else { Vec::new() };
        let clean = tasks(folds, self.starts).into_iter().map(Training::Fold);
        clean.chain((0..on_all).map(Training::All)).chain(calibrations.into_iter().map(Training::Calibration)).collect()
    }

    fn task(&self, training: Training) -> Task {
        let folds = self.source.spectra.ppb().len() as u64;
        let (name, spectra) = match training {
            Training::Fold(task) => (format!("fold {}, start {}", task.fold + 1, task.start + 1), folds - 1),
            Training::All(start) if self.leaking => (format!("leaking variant, start {}", start + 1), folds),
            Training::All(start) => (format!("all spectra, start {}", start + 1), folds),
            Training::Calibration(task) => {
                (format!("calibration without {} and {}", task.first + 1, task.second + 1), folds - 2)
            }
        };
        let input = serde_json::to_vec(&training).expect("numbers have a JSON form");
        // A step costs a term per ordered pair of spectra.
        Task { name, input, cost: spectra * (spectra - 1) }
    }
}

/// The held-out spectrum as the geometry of two dimensions predicts it; none with few or many spectra, or if a geodesic does not exist.
fn latent(spectra: &Spectra, fold: usize) -> Option<Vec<f64>> {
    let training = spectra.without(fold).ok().filter(|it| it.ppb().len() <= MAX_LATENT_SPECTRA)?;
    let axes = Axes::new(spectra.ppb(), spectra.nm()).ok()?;
    LatentModel::fit(&training, axes).ok()?.predict(spectra.ppb()[fold]).ok()
}

impl TaskRun for Geodesic {
    fn plan(&self, results: &[StageResults]) -> Result<Vec<Task>, TaskError> {
        let trainings = if results.is_empty() { self.trainings() } else { Vec::new() };
        Ok(trainings.into_iter().map(|training| self.task(training)).collect())
    }

    fn execute(&self, task: &Task, context: &dyn TaskContext) -> Result<Vec<u8>, TaskError> {
        let training = serde_json::from_slice(&task.input)
            .map_err(|error| TaskError::Failed(format!("the input of task {} is damaged: {error}", task.name)))?;
        let failed = |error: Error| TaskError::Failed(error.to_string());
        let (mut trainer, mut losses) = (self.trainer(training).map_err(failed)?, Vec::new());
        // A checkpoint of another version is worth less than the task.
        if let Some(Ok(resumed)) = context.resumed_from().map(|bytes| checkpoint::resume(trainer.clone(), bytes)) {
            (trainer, losses) = resumed;
        }
        while !trainer.finished() {
            if context.stop().is_set() {
                return Err(TaskError::Stopped);
            }
            trainer.advance().map_err(failed)?;
            if trainer.steps().is_multiple_of(self.settings.evaluate_every) || trainer.finished() {
                losses.push(trainer.loss_point());
            }
            let fraction = trainer.steps() as f64 / self.settings.steps as f64;
            if trainer.steps().is_multiple_of(REPORT_STEPS) {
                context.progress(fraction);
            }
            if !trainer.finished() && context.checkpoint_due() {
                context.checkpoint(checkpoint::save(&trainer, &losses), fraction);
            }
        }
        let outcome = self.outcome(training, &trainer, losses).map_err(failed)?;
        Ok(serde_json::to_vec(&outcome).expect("numbers and strings have a JSON form"))
    }

    fn finish(&self, results: &[StageResults]) -> Result<TaskFindings, TaskError> {
        let mut outcomes = Outcomes::default();
        for result in results.iter().flatten() {
            let outcome = serde_json::from_slice(result)
                .map_err(|error| TaskError::Failed(format!("a result is damaged: {error}")))?;
            match outcome {
                Outcome::Fold(fold) => outcomes.folds.push(*fold),
                Outcome::All { predictions, samples } => outcomes.all.push((predictions, samples)),
                Outcome::Calibration(calibration) => outcomes.calibrations.push(calibration),
            }
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

const fn settings(spec: &SpectraTraining) -> Settings {
    Settings {
        seed: spec.seed,
        decoder: match spec.decoder {
            SpectraDecoder::Slope => Decoder::Slope,
            SpectraDecoder::Flow => Decoder::Flow,
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
