//! Runs of kind `Geodesic`: leave-one-out validation of the geodesic spectral model, a task per held-out concentration and start.

mod report;

use super::{StageResults, Task, TaskContext, TaskError, TaskFindings, TaskRun};
use engram_api::{GeodesicRun, SpectraName, SpectraSource, SpectraTraining, SyntheticSpectra};
use engram_geodesic::{
    Error, Generator, LeakingResult, Noise, REFERENCE_PPB, Report, Settings, Spectra, TaskResult, Trainer,
    leaking_trainer, noise_level, tasks,
};
use serde::{Deserialize, Serialize};

/// Most cells of a table, so that the predictions of a task fit into its result.
const MAX_CELLS: usize = 100_000;
/// Most concentrations: each is a fold.
const MAX_FOLDS: usize = 64;
/// Steps between two reports of the progress.
const REPORT_STEPS: u64 = 10;
/// Range of the wavelengths of generated spectra in nm.
const SYNTHETIC_NM: (f64, f64) = (200.0, 800.0);

/// What a task trains.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
enum Training {
    /// A model without the held-out spectrum.
    Fold(engram_geodesic::Task),
    /// A model on all spectra, by the number of its start.
    Leaking(u64),
}

/// A leave-one-out validation.
pub(super) struct Geodesic {
    spectra: Spectra,
    settings: Settings,
    starts: u64,
    leaking: bool,
    /// What the spectra are, for the report.
    source: String,
    noise_level: Option<f64>,
}

impl Geodesic {
    /// Checks a specification and its data.
    pub(super) fn new(spec: &GeodesicRun, data: Option<&[u8]>) -> Result<Self, TaskError> {
        let (spectra, source, noise_level) = match &spec.source {
            SpectraSource::Synthetic(synthetic) => generated(synthetic)?,
            SpectraSource::Csv(_) => (table(data.unwrap_or_default())?, "a CSV file".to_owned(), None),
        };
        let settings = settings(&spec.training);
        // Reveals settings that do not fit the spectra.
        let first = engram_geodesic::Task { fold: 0, start: 0 };
        first.trainer(&spectra, settings).map_err(|error| invalid("spec.geodesic", &error))?;
        let (starts, leaking) = (u64::from(spec.starts), spec.leaking_variant);
        Ok(Self { spectra, settings, starts, leaking, source, noise_level })
    }

    fn trainer(&self, training: Training) -> Result<Trainer, Error> {
        match training {
            Training::Fold(task) if task.fold < self.spectra.ppb().len() => task.trainer(&self.spectra, self.settings),
            Training::Fold(task) => Err(Error::Incomplete(format!("fold {} does not exist", task.fold))),
            Training::Leaking(start) => leaking_trainer(&self.spectra, self.settings, start),
        }
    }

    fn result(&self, training: Training, trainer: &Trainer) -> Result<Vec<u8>, Error> {
        let json = match training {
            Training::Fold(task) => serde_json::to_vec(&task.result(&self.spectra, self.settings, trainer)?),
            Training::Leaking(start) => serde_json::to_vec(&LeakingResult::new(&self.spectra, start, trainer)?),
        };
        Ok(json.expect("numbers and strings have a JSON form"))
    }

    fn tasks(&self) -> Vec<Task> {
        let folds = self.spectra.ppb().len() as u64;
        let task = |training: Training| {
            let (name, spectra) = match training {
                Training::Fold(task) => (format!("fold {}, start {}", task.fold + 1, task.start + 1), folds - 1),
                Training::Leaking(start) => (format!("leaking variant, start {}", start + 1), folds),
            };
            let input = serde_json::to_vec(&training).expect("numbers have a JSON form");
            // A step costs a term per ordered pair of spectra.
            Task { name, input, cost: spectra * (spectra - 1) }
        };
        let clean = tasks(self.spectra.ppb().len(), self.starts).into_iter().map(Training::Fold);
        let leaking = (0..if self.leaking { self.starts } else { 0 }).map(Training::Leaking);
        clean.chain(leaking).map(task).collect()
    }
}

impl TaskRun for Geodesic {
    fn plan(&self, results: &[StageResults]) -> Result<Vec<Task>, TaskError> {
        Ok(if results.is_empty() { self.tasks() } else { Vec::new() })
    }

    fn execute(&self, task: &Task, context: &dyn TaskContext) -> Result<Vec<u8>, TaskError> {
        let training = serde_json::from_slice(&task.input)
            .map_err(|error| TaskError::Failed(format!("the input of task {} is damaged: {error}", task.name)))?;
        let failed = |error: Error| TaskError::Failed(error.to_string());
        let mut trainer = self.trainer(training).map_err(failed)?;
        while !trainer.finished() {
            if context.stop().is_set() {
                return Err(TaskError::Stopped);
            }
            trainer.advance().map_err(failed)?;
            if trainer.steps().is_multiple_of(REPORT_STEPS) {
                context.progress(trainer.steps() as f64 / self.settings.steps as f64);
            }
        }
        self.result(training, &trainer).map_err(failed)
    }

    fn finish(&self, results: &[StageResults]) -> Result<TaskFindings, TaskError> {
        let damaged = |error: serde_json::Error| TaskError::Failed(format!("a result is damaged: {error}"));
        let clean = self.spectra.ppb().len() * self.starts as usize;
        let (clean, leaking) = results.first().map(|stage| stage.split_at(clean.min(stage.len()))).unwrap_or_default();
        let clean = clean.iter().map(|it| serde_json::from_slice::<TaskResult>(it)).collect::<Result<Vec<_>, _>>();
        let leaking = leaking.iter().map(|it| serde_json::from_slice(it)).collect::<Result<Vec<_>, _>>();
        let clean = clean.map_err(damaged)?;
        let report = Report::new(&self.spectra, &self.settings, &clean, self.noise_level);
        let report = report.map_err(|error| TaskError::Failed(error.to_string()))?;
        report::findings(self, &report, &clean, &leaking.map_err(damaged)?)
    }
}

/// Returns generated spectra, what they are, and their noise level if it is known.
fn generated(spec: &SyntheticSpectra) -> Result<(Spectra, String, Option<f64>), TaskError> {
    let generator = match spec.name {
        SpectraName::S1 => Generator::Linear,
        SpectraName::S2 => Generator::Hump,
        SpectraName::S3 => Generator::Convex,
        SpectraName::S4 => Generator::Mixed,
    };
    let noise = Noise {
        additive: spec.noise,
        gain: spec.gain,
        offset: spec.offset,
        slope: spec.slope,
        shift_nm: spec.shift_nm,
        concentration: spec.concentration,
    };
    let step = (SYNTHETIC_NM.1 - SYNTHETIC_NM.0) / f64::from(spec.wavelengths.max(2) - 1);
    let nm: Vec<f64> = (0..spec.wavelengths).map(|i| SYNTHETIC_NM.0 + step * f64::from(i)).collect();
    let draw = |seed: u64| {
        let spectra = generator.spectra(&REFERENCE_PPB, &nm, &noise, seed);
        spectra.map_err(|error| invalid("spec.geodesic.source.synthetic", &error))
    };
    let spectra = draw(spec.seed)?;
    // Two replicates differ by their noise only.
    let replicate = draw(spec.seed.wrapping_add(1))?;
    let all = |spectra: &Spectra| (0..REFERENCE_PPB.len()).flat_map(|i| spectra.row(i).to_vec()).collect::<Vec<_>>();
    let level = noise_level(&all(&spectra), &all(&replicate));
    let source = format!("generated spectra {} with noise {} and seed {}", spec.name, spec.noise, spec.seed);
    Ok((spectra, source, Some(level)))
}

/// Reads a table of spectra.
fn table(data: &[u8]) -> Result<Spectra, TaskError> {
    const FIELD: &str = "spec.geodesic.source.csv";
    let text = std::str::from_utf8(data).map_err(|error| invalid(FIELD, &error))?;
    // Excel writes a mark of the byte order.
    let spectra = Spectra::from_csv(text.trim_start_matches('\u{feff}')).map_err(|error| invalid(FIELD, &error))?;
    let (folds, cells) = (spectra.ppb().len(), spectra.ppb().len() * spectra.nm().len());
    if !(4..=MAX_FOLDS).contains(&folds) {
        return Err(invalid(FIELD, &format!("it has {folds} concentrations; allowed: 4 to {MAX_FOLDS}")));
    }
    if cells > MAX_CELLS {
        return Err(invalid(FIELD, &format!("it has {cells} absorbances; allowed: up to {MAX_CELLS}")));
    }
    Ok(spectra)
}

fn invalid(field: &str, error: &dyn std::fmt::Display) -> TaskError {
    TaskError::Invalid(format!("{field}: {error}"))
}

const fn settings(spec: &SpectraTraining) -> Settings {
    Settings {
        seed: spec.seed,
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
