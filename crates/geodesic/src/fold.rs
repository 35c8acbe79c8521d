//! Leave-one-out tasks: pure values that run anywhere, in any order, with the same result.

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::Xxh3;

use crate::error::Error;
use crate::settings::Settings;
use crate::spectra::Spectra;
use crate::train::{Axes, Trainer};

/// One training: a held-out concentration and a random start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Task {
    /// Position of the held-out concentration.
    pub fold: usize,
    /// Number of the random start.
    pub start: u64,
}

/// What a task returns. It is a function of the training spectra, the axes, the settings and the task; the held-out
/// spectrum does not enter.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct TaskResult {
    /// The task.
    pub task: Task,
    /// Predicted spectrum at the held-out concentration.
    pub prediction: Vec<f64>,
    /// Its standard deviation over the training spectra as sources, per wavelength.
    pub spread: Vec<f64>,
    /// Least loss of the inner validation split, standardised.
    pub validation_loss: f64,
    /// Reconstruction loss of the last step, standardised.
    pub training_loss: f64,
    /// Steps made.
    pub steps: u64,
    /// Hash of the best model's parameters.
    pub parameters: String,
    /// Hash of the settings.
    pub settings: String,
}

/// All tasks of a leave-one-out over `folds` concentrations with `starts` starts each, by start, then fold: after the
/// first `folds` tasks every fold has a result.
pub fn tasks(folds: usize, starts: u64) -> Vec<Task> {
    (0..starts).flat_map(|start| (0..folds).map(move |fold| Task { fold, start })).collect()
}

impl Task {
    /// A trainer of this task on all spectra but the held-out one.
    ///
    /// # Errors
    /// If the fold does not exist or a setting is out of range.
    pub fn trainer(self, spectra: &Spectra, settings: Settings) -> Result<Trainer, Error> {
        // The axes are the design of the experiment; everything that is computed from absorbances comes after `without`.
        let axes = Axes::new(spectra.ppb(), spectra.nm())?;
        // A stream of starts per fold, so that no two tasks share initial parameters.
        let start = self.start * spectra.ppb().len() as u64 + self.fold as u64;
        Trainer::new(spectra.without(self.fold)?, axes, settings, start)
    }

    /// Runs the whole task.
    ///
    /// # Errors
    /// As [`trainer`](Self::trainer), or if the loss is not finite.
    pub fn run(self, spectra: &Spectra, settings: Settings) -> Result<TaskResult, Error> {
        let mut trainer = self.trainer(spectra, settings)?;
        while !trainer.finished() {
            trainer.advance()?;
        }
        self.result(spectra, settings, &trainer)
    }

    /// The result of a finished trainer of this task.
    ///
    /// # Errors
    /// [`Error::Incomplete`] if training has not finished.
    pub fn result(self, spectra: &Spectra, settings: Settings, trainer: &Trainer) -> Result<TaskResult, Error> {
        if !trainer.finished() {
            return Err(Error::Incomplete(format!(
                "fold {}, start {}: training is in progress",
                self.fold, self.start
            )));
        }
        let mut hash = Xxh3::new();
        for p in trainer.best().metric.network().parameters().iter().chain(trainer.best().decoder.parameters()) {
            hash.update(&p.to_bits().to_le_bytes());
        }
        let prediction = trainer.prediction(spectra.ppb()[self.fold])?;
        Ok(TaskResult {
            task: self,
            prediction: prediction.spectrum,
            spread: prediction.spread,
            validation_loss: trainer.validation_loss(),
            training_loss: trainer.last_loss().reconstruction,
            steps: trainer.steps(),
            parameters: format!("{:032x}", hash.digest128()),
            settings: format!("{:032x}", settings.hash()),
        })
    }
}

/// What a leaking task returns: one model, trained on all spectra, predicts each of them from the others. It shows what a validation
/// without held-out spectra would report, and belongs next to the clean results under its own name only.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct LeakingResult {
    /// Number of the random start.
    pub start: u64,
    /// Predicted spectra, by concentration.
    pub predictions: Vec<Vec<f64>>,
}

/// A trainer of the leaking model of a start.
///
/// # Errors
/// If a setting is out of range or there are too few spectra or wavelengths.
pub fn leaking_trainer(spectra: &Spectra, settings: Settings, start: u64) -> Result<Trainer, Error> {
    Trainer::new(spectra.clone(), Axes::new(spectra.ppb(), spectra.nm())?, settings, u64::MAX - start)
}

impl LeakingResult {
    /// The predictions of a finished [`leaking_trainer`].
    ///
    /// # Errors
    /// [`Error::Incomplete`] if training has not finished.
    pub fn new(spectra: &Spectra, start: u64, trainer: &Trainer) -> Result<Self, Error> {
        if !trainer.finished() {
            return Err(Error::Incomplete(format!("leaking start {start}: training is in progress")));
        }
        let predictions = (0..spectra.ppb().len()).map(|i| trainer.predict_seen(i)).collect::<Result<_, _>>()?;
        Ok(Self { start, predictions })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::generate::{Generator, Noise};
    use crate::random::Stream;
    use crate::spectra::REFERENCE_PPB;

    fn settings() -> Settings {
        Settings { steps: 40, evaluate_every: 10, stride: 4, ..Settings::default() }
    }

    fn spectra() -> Spectra {
        let nm: Vec<f64> = (0..61).map(|i| 200.0 + 10.0 * f64::from(i)).collect();
        Generator::Mixed.spectra(&REFERENCE_PPB, &nm, &Noise { additive: 0.005, ..Noise::default() }, 1).unwrap()
    }

    #[test]
    fn random_held_out_spectrum_changes_no_bit_of_its_fold() {
        let spectra = spectra();
        for fold in [0, 3, 5] {
            let random: Vec<f64> = (0..61).map(|i| 1e3 * Stream::new(77, 1).normal(i)).collect();
            let replaced = spectra.with_row(fold, &random).unwrap();
            let task = Task { fold, start: 0 };
            let bits = |spectra: &Spectra| {
                let result = task.run(spectra, settings()).unwrap();
                (
                    result.prediction.iter().map(|p| p.to_bits()).collect::<Vec<_>>(),
                    serde_json::to_string(&result).unwrap(),
                )
            };
            assert_eq!(bits(&spectra), bits(&replaced), "fold {fold}");
            // The same replacement in a training spectrum changes the result.
            let other = spectra.with_row((fold + 1) % 6, &random).unwrap();
            assert_ne!(bits(&spectra).1, bits(&other).1, "fold {fold}");
        }
    }

    #[test]
    fn tasks_give_the_same_results_in_any_order_and_on_any_thread() {
        let spectra = spectra();
        let all = tasks(6, 1);
        let forward: Vec<TaskResult> = all[..3].iter().map(|t| t.run(&spectra, settings()).unwrap()).collect();
        let mut backward: Vec<TaskResult> = std::thread::scope(|scope| {
            let run = |t: &Task| t.run(&spectra, settings()).unwrap();
            let threads: Vec<_> = all[..3].iter().rev().map(|t| scope.spawn(move || run(t))).collect();
            threads.into_iter().map(|t| t.join().unwrap()).collect()
        });
        backward.reverse();
        assert_eq!(forward, backward);
    }

    #[test]
    fn leaking_predictions_depend_on_the_held_out_spectrum() {
        let spectra = spectra();
        let random: Vec<f64> = (0..61).map(|i| Stream::new(77, 1).normal(i)).collect();
        let predicted = |spectra: &Spectra| {
            let mut trainer = leaking_trainer(spectra, settings(), 0).unwrap();
            assert!(matches!(LeakingResult::new(spectra, 0, &trainer), Err(Error::Incomplete(_))));
            while !trainer.finished() {
                trainer.advance().unwrap();
            }
            LeakingResult::new(spectra, 0, &trainer).unwrap()
        };
        let (clean, replaced) = (predicted(&spectra), predicted(&spectra.with_row(3, &random).unwrap()));
        assert_eq!((clean.predictions.len(), clean.predictions[3].len()), (6, 61));
        assert_ne!(clean.predictions[3], replaced.predictions[3]);
    }
}
