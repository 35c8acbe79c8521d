//! Bands around predicted spectra that contain the measured one with a stated probability.
//!
//! The spread of random starts alone is too narrow: all starts share the error of the model. A band is calibrated by models that
//! have seen neither the held-out spectrum nor a second one, and predict the second one: their errors relative to their own spread
//! give the factor. The held-out spectrum enters neither the band nor its factor.

use serde::{Deserialize, Serialize};

use crate::error::Error;
use crate::report::{FoldReport, Report};
use crate::settings::Settings;
use crate::spectra::Spectra;
use crate::train::{Axes, Trainer};

/// Probability of a band.
pub const BAND_PROBABILITY: f64 = 0.9;
/// Most second spectra that calibrate the band of a fold.
const MAX_REFERENCES: usize = 3;
/// Least concentrations: three spectra remain for the training of a calibrating model.
pub const MIN_CALIBRATED_FOLDS: usize = 5;
/// First start number of calibrating models: no fold has as many starts.
const FIRST_START: u64 = 1 << 40;

/// A training without two spectra.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct CalibrationTask {
    /// Position of one concentration.
    pub first: usize,
    /// Position of the other one, higher.
    pub second: usize,
}

/// What a [`CalibrationTask`] returns. Neither of the two spectra enters.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct CalibrationResult {
    /// The task.
    pub task: CalibrationTask,
    /// Predicted spectra of both.
    pub predictions: [Vec<f64>; 2],
    /// Their spreads over the sources.
    pub spreads: [Vec<f64>; 2],
    /// Hash of the settings.
    pub settings: String,
}

/// A band of probability [`BAND_PROBABILITY`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Band {
    /// Lower end, per wavelength.
    pub low: Vec<f64>,
    /// Upper end, per wavelength.
    pub high: Vec<f64>,
    /// Half width in units of the spread.
    pub factor: f64,
    /// Part of the held-out spectrum that lies inside.
    pub coverage: f64,
}

/// Spectra that calibrate the band of a fold. Extrapolation is calibrated by extrapolation.
fn references(fold: usize, folds: usize) -> Vec<usize> {
    if fold == 0 {
        return vec![1, folds - 1];
    }
    if fold + 1 == folds {
        return vec![0, folds - 2];
    }
    let mut others: Vec<usize> = (1..folds - 1).filter(|k| *k != fold).collect();
    others.sort_by_key(|k| k.abs_diff(fold));
    others.truncate(MAX_REFERENCES);
    others
}

/// The tasks that calibrate the bands of all folds; none with fewer than [`MIN_CALIBRATED_FOLDS`] concentrations.
pub fn calibration_tasks(folds: usize) -> Vec<CalibrationTask> {
    if folds < MIN_CALIBRATED_FOLDS {
        return Vec::new();
    }
    let task = |fold: usize, other: usize| CalibrationTask { first: fold.min(other), second: fold.max(other) };
    let mut tasks: Vec<_> =
        (0..folds).flat_map(|fold| references(fold, folds).into_iter().map(move |other| task(fold, other))).collect();
    tasks.sort_unstable();
    tasks.dedup();
    tasks
}

impl CalibrationTask {
    /// A trainer on all spectra but the two.
    ///
    /// # Errors
    /// If a concentration does not exist, fewer than three spectra remain, or a setting is out of range.
    pub fn trainer(self, spectra: &Spectra, settings: Settings) -> Result<Trainer, Error> {
        if self.first >= self.second {
            return Err(Error::Incomplete(format!("calibration of spectra {} and {}", self.first, self.second)));
        }
        let axes = Axes::new(spectra.ppb(), spectra.nm())?;
        let start = FIRST_START + (self.first * spectra.ppb().len() + self.second) as u64;
        Trainer::new(spectra.without(self.second)?.without(self.first)?, axes, settings, start)
    }

    /// The result of a finished trainer of this task.
    ///
    /// # Errors
    /// [`Error::Incomplete`] if training has not finished.
    pub fn result(self, spectra: &Spectra, settings: Settings, trainer: &Trainer) -> Result<CalibrationResult, Error> {
        if !trainer.finished() {
            return Err(Error::Incomplete(format!("calibration of {} and {}: in progress", self.first, self.second)));
        }
        let [a, b] = [self.first, self.second].map(|i| trainer.prediction(spectra.ppb()[i]));
        let (a, b) = (a?, b?);
        Ok(CalibrationResult {
            task: self,
            predictions: [a.spectrum, b.spectrum],
            spreads: [a.spread, b.spread],
            settings: format!("{:032x}", settings.hash()),
        })
    }

    /// Position of the other spectrum, and whether it is the second, if `fold` is one of the two.
    const fn other(self, fold: usize) -> Option<(usize, usize)> {
        if self.first == fold {
            Some((self.second, 1))
        } else if self.second == fold {
            Some((self.first, 0))
        } else {
            None
        }
    }
}

/// Errors and spreads of the models that calibrate a fold, over all wavelengths.
fn errors(spectra: &Spectra, fold: usize, results: &[CalibrationResult]) -> Vec<(f64, f64)> {
    let wanted = references(fold, spectra.ppb().len());
    let mut out = Vec::new();
    for result in results {
        let Some((other, side)) = result.task.other(fold).filter(|(other, _)| wanted.contains(other)) else { continue };
        let predicted = result.predictions[side].iter().zip(&result.spreads[side]);
        out.extend(spectra.row(other).iter().zip(predicted).map(|(y, (p, spread))| ((y - p).abs(), *spread)));
    }
    out
}

/// The value below which the share [`BAND_PROBABILITY`] of new values lies, by the rule of conformal prediction.
fn conformal_quantile(mut values: Vec<f64>, probability: f64) -> f64 {
    values.sort_by(f64::total_cmp);
    let rank = ((values.len() + 1) as f64 * probability).ceil() as usize;
    values[rank.clamp(1, values.len()) - 1]
}

/// The band of a fold; `None` if no result calibrates it.
fn band(spectra: &Spectra, fold: usize, report: &FoldReport, results: &[CalibrationResult]) -> Option<Band> {
    let errors = errors(spectra, fold, results);
    if errors.is_empty() {
        return None;
    }
    // Where all sources agree, noise remains.
    let floor = conformal_quantile(errors.iter().map(|(error, _)| *error).collect(), 0.5).max(f64::MIN_POSITIVE);
    let scale = |spread: f64| spread.hypot(floor);
    let factor =
        conformal_quantile(errors.iter().map(|(error, spread)| error / scale(*spread)).collect(), BAND_PROBABILITY);
    let end = |sign: f64| {
        let point = |(p, spread): (&f64, &f64)| p + sign * factor * scale(*spread);
        report.prediction.iter().zip(&report.spread).map(point).collect::<Vec<f64>>()
    };
    let (low, high) = (end(-1.0), end(1.0));
    let inside = (0..low.len()).filter(|&w| low[w] <= report.truth[w] && report.truth[w] <= high[w]).count();
    let coverage = inside as f64 / low.len() as f64;
    Some(Band { low, high, factor, coverage })
}

impl Report {
    /// Adds calibrated bands to all folds that `results` calibrate.
    ///
    /// # Errors
    /// [`Error::Incomplete`] if a result ran with other settings, [`Error::Length`] if a spectrum does not fit.
    pub fn calibrate(&mut self, spectra: &Spectra, results: &[CalibrationResult]) -> Result<(), Error> {
        let expected = spectra.nm().len();
        for result in results {
            if result.settings != self.settings || result.task.second >= spectra.ppb().len() {
                return Err(Error::Incomplete("a calibration ran with other settings".to_owned()));
            }
            let lengths = result.predictions.iter().chain(&result.spreads).map(Vec::len);
            if let Some(actual) = lengths.into_iter().find(|length| *length != expected) {
                return Err(Error::Length { field: "calibration", actual, expected });
            }
        }
        for (fold, report) in self.folds.iter_mut().enumerate() {
            report.band = band(spectra, fold, report, results);
        }
        Ok(())
    }

    /// Mean coverage of the calibrated bands over the folds that have one; with `interior`, without the ends of the axis.
    pub fn coverage(&self, interior: bool) -> Option<f64> {
        let folds = self.folds.iter().filter(|fold| !(interior && fold.extrapolation));
        let covered: Vec<f64> = folds.filter_map(|fold| Some(fold.band.as_ref()?.coverage)).collect();
        (!covered.is_empty()).then(|| covered.iter().sum::<f64>() / covered.len() as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fold::tasks;
    use crate::generate::{Generator, Noise};
    use crate::random::Stream;
    use crate::spectra::REFERENCE_PPB;

    fn spectra() -> Spectra {
        let nm: Vec<f64> = (0..41).map(|i| 200.0 + 15.0 * f64::from(i)).collect();
        Generator::Mixed.spectra(&REFERENCE_PPB, &nm, &Noise { additive: 0.01, ..Noise::default() }, 1).unwrap()
    }

    fn calibrated(spectra: &Spectra, settings: Settings) -> Report {
        let results: Vec<_> = tasks(6, 1).into_iter().map(|task| task.run(spectra, settings).unwrap()).collect();
        let calibrate = |task: CalibrationTask| {
            let mut trainer = task.trainer(spectra, settings).unwrap();
            while !trainer.finished() {
                trainer.advance().unwrap();
            }
            task.result(spectra, settings, &trainer).unwrap()
        };
        // Those of the interior folds.
        let wanted = calibration_tasks(6).into_iter().filter(|task| task.first > 0 && task.second < 5);
        let calibrations: Vec<_> = wanted.map(calibrate).collect();
        let mut report = Report::new(spectra, &settings, &results, None).unwrap();
        report.calibrate(spectra, &calibrations).unwrap();
        report
    }

    #[test]
    fn bands_of_interior_folds_cover_about_their_probability() {
        let settings = Settings { steps: 120, stride: 2, evaluate_every: 20, nodes: 4, ..Settings::default() };
        let report = calibrated(&spectra(), settings);
        let coverage = report.coverage(true).unwrap();
        assert!((0.8..=0.99).contains(&coverage), "{coverage}");
        assert!(report.folds[0].band.is_none() && report.folds[2].band.is_some());
        // The spread of the models alone would cover far less.
        let fold = &report.folds[2];
        let inside = (0..41).filter(|&w| (fold.truth[w] - fold.prediction[w]).abs() <= fold.spread[w]).count();
        assert!((inside as f64) < 0.8 * 41.0, "{inside}");
    }

    #[test]
    fn random_held_out_spectrum_changes_no_bit_of_its_band() {
        let settings = Settings { steps: 10, stride: 4, evaluate_every: 5, nodes: 2, ..Settings::default() };
        let original = spectra();
        let random: Vec<f64> = (0..41).map(|i| Stream::new(77, 1).normal(i)).collect();
        let replaced = original.with_row(2, &random).unwrap();
        let bits = |report: &Report, fold: usize| {
            let band = report.folds[fold].band.clone().unwrap();
            band.low.iter().chain(&band.high).map(|a| a.to_bits()).collect::<Vec<_>>()
        };
        let (original, replaced) = (calibrated(&original, settings), calibrated(&replaced, settings));
        assert_eq!(bits(&original, 2), bits(&replaced, 2));
        assert_ne!(bits(&original, 3), bits(&replaced, 3));
    }

    #[test]
    fn extrapolation_is_calibrated_by_extrapolation_and_pairs_are_trained_once() {
        let pairs: Vec<_> = calibration_tasks(6).into_iter().map(|it| (it.first, it.second)).collect();
        assert_eq!(pairs, [(0, 1), (0, 5), (1, 2), (1, 3), (1, 4), (2, 3), (2, 4), (3, 4), (4, 5)]);
        assert!(calibration_tasks(4).is_empty());
        assert_eq!(conformal_quantile((1..=9).map(f64::from).collect(), 0.9), 9.0);
        assert_eq!(conformal_quantile((1..=99).map(f64::from).collect(), 0.9), 90.0);
    }
}
