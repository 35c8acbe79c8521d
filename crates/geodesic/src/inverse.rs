//! Inverse use: the concentration of a measured spectrum, with an interval.
//!
//! The estimate is the concentration whose predicted spectrum is closest. The interval is a bootstrap over blocks of wavelengths and
//! over random starts: neighbouring wavelengths have correlated errors, and a model that fits a part of the spectrum only lets the
//! blocks disagree.

use serde::{Deserialize, Serialize};

use crate::error::{Error, in_range};
use crate::random::Stream;
use crate::report::Report;
use crate::train::Trainer;

/// Concentrations at which spectra are compared; a parabola refines between them.
const GRID: usize = 49;
/// Most wavelengths that are compared; more are thinned out evenly.
const MAX_WAVELENGTHS: usize = 151;
/// Width of a block in nm.
const BLOCK_NM: f64 = 20.0;
/// Most blocks, so that a profile stays a few kilobytes.
const MAX_BLOCKS: usize = 40;
/// Resamples of the bootstrap.
const RESAMPLES: u64 = 1_000;
/// Probability of the intervals in reports.
const CONFIDENCE: f64 = 0.9;

/// Squared differences between a measured spectrum and the predictions of one model, by concentration and block of wavelengths.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ErrorProfile {
    ppb: Vec<f64>,
    /// [concentration, block].
    squares: Vec<f32>,
    /// Wavelengths of each block.
    counts: Vec<u32>,
}

/// An estimated concentration.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Inversion {
    /// The estimate in ppb.
    pub ppb: f64,
    /// Lower end of the interval.
    pub low: f64,
    /// Upper end of the interval.
    pub high: f64,
    /// RMSE between the spectrum and the closest prediction: far above the noise means that the spectrum is of something else.
    pub rmse: f64,
    /// Whether the estimate lies at an end of the range of concentrations that were tried.
    pub at_limit: bool,
}

impl ErrorProfile {
    /// Compares `spectrum`, on the wavelengths of the training spectra, with the predictions of `trainer`'s best model.
    ///
    /// # Errors
    /// [`Error::Length`] for a spectrum of another length, [`Error::Range`] for a value that is not finite.
    pub fn new(trainer: &Trainer, spectrum: &[f64]) -> Result<Self, Error> {
        let nm = trainer.nm();
        if spectrum.len() != nm.len() {
            return Err(Error::Length { field: "spectrum", actual: spectrum.len(), expected: nm.len() });
        }
        if let Some(&value) = spectrum.iter().find(|a| !a.is_finite()) {
            return Err(Error::Range { field: "spectrum", value, allowed: "finite" });
        }
        let (low, high) = trainer.search_range();
        let ppb: Vec<f64> = (0..GRID).map(|i| low + (high - low) * i as f64 / (GRID - 1) as f64).collect();
        let step = nm.len().div_ceil(MAX_WAVELENGTHS);
        let wavelengths: Vec<usize> = (0..nm.len()).step_by(step).collect();
        let predicted = trainer.predict_many(&ppb, &wavelengths)?;

        let span = nm[nm.len() - 1] - nm[0];
        let blocks = ((span / BLOCK_NM) as usize).clamp(1, MAX_BLOCKS.min(wavelengths.len()));
        let block = |w: usize| (((nm[w] - nm[0]) / span * blocks as f64) as usize).min(blocks - 1);
        let mut sums = vec![0.0; GRID * blocks];
        for (sums, predicted) in sums.chunks_exact_mut(blocks).zip(predicted.chunks_exact(wavelengths.len())) {
            for (&w, p) in wavelengths.iter().zip(predicted) {
                sums[block(w)] += (spectrum[w] - p).powi(2);
            }
        }
        let mut counts = vec![0; blocks];
        wavelengths.iter().for_each(|&w| counts[block(w)] += 1);
        Ok(Self { ppb, squares: sums.into_iter().map(|sum| sum as f32).collect(), counts })
    }

    fn add(&self, block: usize, errors: &mut [f64]) {
        let column = self.squares.iter().skip(block).step_by(self.counts.len());
        errors.iter_mut().zip(column).for_each(|(sum, square)| *sum += f64::from(*square));
    }
}

/// Position and value of the least of `errors`, refined by a parabola between the concentrations `ppb`.
fn least(ppb: &[f64], errors: &[f64]) -> (f64, f64) {
    let at = (0..errors.len()).reduce(|a, b| if errors[b] < errors[a] { b } else { a }).unwrap_or(0);
    if at == 0 || at + 1 == errors.len() {
        return (ppb[at], errors[at]);
    }
    let (a, b, c) = (errors[at - 1], errors[at], errors[at + 1]);
    let bend = a - 2.0 * b + c;
    let shift = if bend > 0.0 { (0.5 * (a - c) / bend).clamp(-0.5, 0.5) } else { 0.0 };
    let step = ppb[1] - ppb[0];
    (ppb[at] + shift * step, (b - 0.25 * (a - c) * shift).max(0.0))
}

/// Estimates the concentration of a spectrum from its profiles, one per random start, with an interval of probability `confidence`
/// in (0, 1).
///
/// # Errors
/// [`Error::Incomplete`] without a profile or if profiles belong to different experiments, [`Error::Range`] for the confidence.
pub fn invert(profiles: &[ErrorProfile], confidence: f64) -> Result<Inversion, Error> {
    in_range("confidence", confidence, 1e-3, 0.999, "in [0.001, 0.999]")?;
    let Some(first) = profiles.first() else {
        return Err(Error::Incomplete("there is no profile of the spectrum".to_owned()));
    };
    let blocks = first.counts.len();
    let fits = |it: &ErrorProfile| it.ppb == first.ppb && it.counts == first.counts;
    if first.ppb.len() < 3
        || blocks == 0
        || !profiles.iter().all(|it| fits(it) && it.squares.len() == blocks * it.ppb.len())
    {
        return Err(Error::Incomplete("profiles of different experiments".to_owned()));
    }
    let mut errors = vec![0.0; first.ppb.len()];
    profiles.iter().for_each(|it| (0..blocks).for_each(|block| it.add(block, &mut errors)));
    let (ppb, squares) = least(&first.ppb, &errors);
    let count = profiles.len() as f64 * first.counts.iter().sum::<u32>() as f64;

    let draws = Stream::new(blocks as u64, 5);
    let resample = |r: u64| {
        let mut errors = vec![0.0; first.ppb.len()];
        let index = r * (blocks as u64 + 1);
        let profile = &profiles[draws.below(index, profiles.len())];
        (1..=blocks as u64).for_each(|k| profile.add(draws.below(index + k, blocks), &mut errors));
        least(&first.ppb, &errors).0
    };
    let mut estimates: Vec<f64> = (0..RESAMPLES).map(resample).collect();
    estimates.sort_by(f64::total_cmp);
    let quantile = |p: f64| estimates[((RESAMPLES as f64 * p) as usize).min(estimates.len() - 1)];
    let tail = 0.5 * (1.0 - confidence);
    let at_limit = ppb <= first.ppb[0] || ppb >= first.ppb[first.ppb.len() - 1];
    // A bootstrap of few blocks may lie on one side of the estimate.
    let (low, high) = (quantile(tail).min(ppb), quantile(1.0 - tail).max(ppb));
    Ok(Inversion { ppb, low, high, rmse: (squares / count).sqrt(), at_limit })
}

impl Report {
    /// Estimates the concentration of each held-out spectrum from the profiles of its fold, by fold.
    ///
    /// # Errors
    /// As [`invert`], or [`Error::Incomplete`] if the number of folds differs.
    pub fn invert_folds(&mut self, profiles: &[Vec<ErrorProfile>]) -> Result<(), Error> {
        if profiles.len() != self.folds.len() {
            let problem = format!("profiles of {} folds, there are {}", profiles.len(), self.folds.len());
            return Err(Error::Incomplete(problem));
        }
        for (fold, profiles) in self.folds.iter_mut().zip(profiles) {
            fold.inversion = Some(invert(profiles, CONFIDENCE)?);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::generate::{Generator, Noise};
    use crate::settings::Settings;
    use crate::spectra::{REFERENCE_PPB, Spectra};
    use crate::train::Axes;
    use std::sync::LazyLock;

    fn trained(start: u64) -> Trainer {
        let nm: Vec<f64> = (0..61).map(|i| 200.0 + 10.0 * f64::from(i)).collect();
        let noise = Noise { additive: 0.005, ..Noise::default() };
        let data = Generator::Mixed.spectra(&REFERENCE_PPB, &nm, &noise, 3).unwrap();
        let axes = Axes::new(&REFERENCE_PPB, &nm).unwrap();
        let settings = Settings { steps: 150, stride: 2, nodes: 4, ..Settings::default() };
        let mut trainer = Trainer::new(data, axes, settings, start).unwrap();
        while !trainer.finished() {
            trainer.advance().unwrap();
        }
        trainer
    }

    /// Two trained starts.
    static TRAINED: LazyLock<[Trainer; 2]> = LazyLock::new(|| [trained(1), trained(2)]);

    #[test]
    fn concentrations_of_new_spectra_are_found_within_their_intervals() {
        let trainers = &*TRAINED;
        let noise = Noise { additive: 0.005, ..Noise::default() };
        let (mut inside, mut worst, truths) = (0, 0.0f64, [5.0, 15.0, 25.0, 34.0, 47.0, 55.0]);
        let new: Spectra = Generator::Mixed.spectra(&truths, trainers[0].nm(), &noise, 9).unwrap();
        for (i, truth) in truths.iter().enumerate() {
            let profile = |trainer: &Trainer| ErrorProfile::new(trainer, new.row(i)).unwrap();
            let found = invert(&trainers.each_ref().map(profile), 0.9).unwrap();
            assert!(found.low <= found.ppb && found.ppb <= found.high && !found.at_limit, "{found:?}");
            worst = worst.max((found.ppb - truth).abs());
            inside += usize::from(found.low <= *truth && *truth <= found.high);
        }
        assert!(worst < 4.0 && inside >= 3, "worst {worst} ppb, {inside} of 6 inside");
    }

    #[test]
    fn predictions_are_continuous_at_training_concentrations() {
        let trainer = &TRAINED[0];
        let all: Vec<usize> = (0..61).collect();
        let around = trainer.predict_many(&[30.0 - 1e-9, 30.0, 30.0 + 1e-9], &all).unwrap();
        let gap =
            |a: usize, b: usize| (0..61).map(|w| (around[a * 61 + w] - around[b * 61 + w]).abs()).fold(0.0, f64::max);
        assert!(gap(0, 1) < 1e-6 && gap(1, 2) < 1e-6, "{} {}", gap(0, 1), gap(1, 2));
        let one = trainer.predict_many(&[25.0], &all).unwrap();
        assert_eq!(one, trainer.predict(25.0).unwrap());
    }

    #[test]
    fn spectra_and_profiles_that_do_not_fit_are_refused() {
        let trainer = &TRAINED[0];
        assert!(matches!(ErrorProfile::new(trainer, &[0.0; 3]), Err(Error::Length { expected: 61, .. })));
        assert!(matches!(ErrorProfile::new(trainer, &[f64::NAN; 61]), Err(Error::Range { field: "spectrum", .. })));
        let profile = ErrorProfile::new(trainer, &[0.3; 61]).unwrap();
        assert!(matches!(invert(&[], 0.9), Err(Error::Incomplete(_))));
        assert!(matches!(invert(std::slice::from_ref(&profile), 1.0), Err(Error::Range { field: "confidence", .. })));
        let mut other = profile.clone();
        other.squares.pop();
        assert!(matches!(invert(&[profile, other], 0.9), Err(Error::Incomplete(_))));
    }
}
