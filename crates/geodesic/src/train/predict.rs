//! Predictions of a trained model at any concentration.

use super::{Axes, Trainer};
use crate::closed::Lattice;
use crate::engine::{GridEngine, ShootingEngine};
use crate::error::{Error, in_range};
use crate::grid::{ChristoffelGrid, Interpolation};
use crate::settings::Engine;
use crate::shooting::BatchedShooting;

/// Knots in concentration of the grid of a prediction: cubic interpolation then errs by 1e-6 on the stress metric. It has a column per
/// wavelength.
const GRID_KNOTS: usize = 500;
/// Shooting over a grid, whose interpolation errs more than the default tolerance.
pub(crate) const GRID_SHOOTING: BatchedShooting = BatchedShooting { tolerance: 1e-9, residual: 1e-8, newton_steps: 10 };

/// A predicted spectrum.
#[derive(Debug, Clone, PartialEq)]
pub struct Prediction {
    /// Mean over the training spectra as sources, per wavelength.
    pub spectrum: Vec<f64>,
    /// Standard deviation over the sources, per wavelength: how consistent the model is with itself.
    pub spread: Vec<f64>,
}

impl Trainer {
    /// Predicts the spectrum at `ppb` with the best model: the mean over all training spectra as sources.
    ///
    /// # Errors
    /// If `ppb` is the concentration of a training spectrum or not finite.
    pub fn predict(&self, ppb: f64) -> Result<Vec<f64>, Error> {
        self.prediction(ppb).map(|it| it.spectrum)
    }

    /// As [`predict`](Self::predict), with the spread over the sources.
    ///
    /// # Errors
    /// If `ppb` is the concentration of a training spectrum or not finite.
    pub fn prediction(&self, ppb: f64) -> Result<Prediction, Error> {
        let mut all = self.data.ppb().to_vec();
        let target = all.partition_point(|c| *c < ppb);
        all.insert(target, ppb);
        let sources: Vec<&[f64]> = (0..self.data.ppb().len()).map(|i| self.data.row(i)).collect();
        self.predict_from(&all, target, &sources)
    }

    /// Predicts the training spectrum number `i` with the best model from the other training spectra. The model has seen that
    /// spectrum, so its scores say nothing about new ones.
    ///
    /// # Errors
    /// [`Error::Length`] if there is no such spectrum.
    pub fn predict_seen(&self, i: usize) -> Result<Vec<f64>, Error> {
        let count = self.data.ppb().len();
        if i >= count {
            return Err(Error::Length { field: "training spectra", actual: count, expected: i + 1 });
        }
        let sources: Vec<&[f64]> = (0..count).filter(|s| *s != i).map(|s| self.data.row(s)).collect();
        self.predict_from(self.data.ppb(), i, &sources).map(|it| it.spectrum)
    }

    /// Mean prediction at position `target` of the concentrations `all`, over `sources` at the other positions.
    fn predict_from(&self, all: &[f64], target: usize, sources: &[&[f64]]) -> Result<Prediction, Error> {
        let wavelengths: Vec<usize> = (0..self.data.nm().len()).collect();
        let lattice = self.lattice(all, &wavelengths)?;
        let pairs: Vec<(usize, usize)> = (0..all.len()).filter(|i| *i != target).map(|i| (i, target)).collect();
        let differences = self.engine_differences(&lattice, &pairs)?;
        let from = |s: usize, w: usize| sources[s][w] + self.scale * differences[s * wavelengths.len() + w];
        let count = pairs.len() as f64;
        let mean = |w: usize| (0..pairs.len()).map(|s| from(s, w)).sum::<f64>() / count;
        let spectrum: Vec<f64> = wavelengths.iter().map(|w| mean(*w)).collect();
        let deviation = |w: usize| (0..pairs.len()).map(|s| (from(s, w) - spectrum[w]).powi(2)).sum::<f64>();
        let spread = wavelengths.iter().map(|w| (deviation(*w) / (count - 1.0).max(1.0)).sqrt()).collect();
        Ok(Prediction { spectrum, spread })
    }

    /// Standardised differences of the best model, with geodesics from the engine of the settings.
    fn engine_differences(&self, lattice: &Lattice, pairs: &[(usize, usize)]) -> Result<Vec<f64>, Error> {
        let metric = &self.best.metric;
        match self.settings.engine {
            Engine::ClosedForm => Ok(self.best.differences(lattice, pairs)),
            Engine::BatchedShooting => {
                let engine = ShootingEngine { metric, shooting: BatchedShooting::default() };
                self.best.differences_by(&engine, lattice, pairs)
            }
            Engine::ChristoffelGrid => {
                let grid = ChristoffelGrid::build(metric, GRID_KNOTS, lattice.wavelengths().len().max(2))?;
                let engine = GridEngine::new(&grid, metric, Interpolation::Hermite, GRID_SHOOTING)?;
                self.best.differences_by(&engine, lattice, pairs)
            }
        }
    }

    /// Returns the largest difference between `spectrum`, a prediction at `ppb` by the engine of the settings, and that of the closed
    /// form; `None` if the engine is the closed form.
    ///
    /// # Errors
    /// As [`predict`](Self::predict); [`Error::Length`] for another number of wavelengths.
    pub fn distance_from_closed_form(&self, ppb: f64, spectrum: &[f64]) -> Result<Option<f64>, Error> {
        if self.settings.engine == Engine::ClosedForm {
            return Ok(None);
        }
        let mut exact = self.clone();
        exact.settings.engine = Engine::ClosedForm;
        let exact = exact.predict(ppb)?;
        if exact.len() != spectrum.len() {
            return Err(Error::Length { field: "spectrum", actual: spectrum.len(), expected: exact.len() });
        }
        Ok(Some(exact.iter().zip(spectrum).map(|(one, other)| (one - other).abs()).fold(0.0, f64::max)))
    }

    /// Predicts spectra [concentration, wavelength] at increasing concentrations `targets`, at the wavelengths of the given
    /// positions. At the concentration of a training spectrum that spectrum itself is one of the sources, so that the prediction is
    /// continuous in concentration.
    ///
    /// # Errors
    /// If the targets are not increasing or not finite.
    pub(crate) fn predict_many(&self, targets: &[f64], wavelengths: &[usize]) -> Result<Vec<f64>, Error> {
        for &target in targets {
            in_range("ppb", target, f64::MIN, f64::MAX, "finite")?;
        }
        let known = self.data.ppb();
        let mut breaks: Vec<f64> = known.iter().chain(targets).copied().collect();
        breaks.sort_by(f64::total_cmp);
        breaks.dedup();
        let place = |ppb: &f64| breaks.partition_point(|b| b < ppb);
        let (sources, ends): (Vec<usize>, Vec<usize>) =
            (known.iter().map(place).collect(), targets.iter().map(place).collect());
        let pair = |&end: &usize| sources.iter().map(move |&source| (source, end)).filter(|(a, b)| a != b);
        let pairs: Vec<(usize, usize)> = ends.iter().flat_map(pair).collect();
        let lattice = self.lattice(&breaks, wavelengths)?;
        let differences = self.best.differences(&lattice, &pairs);
        let mut parts = differences.chunks_exact(wavelengths.len());
        let mut out = vec![0.0; targets.len() * wavelengths.len()];
        for (end, out) in ends.iter().zip(out.chunks_exact_mut(wavelengths.len())) {
            for (i, source) in sources.iter().enumerate() {
                let row = self.data.row(i);
                let part = if source == end { None } else { parts.next() };
                for (at, (out, &w)) in out.iter_mut().zip(wavelengths).enumerate() {
                    *out += row[w] + part.map_or(0.0, |part| self.scale * part[at]);
                }
            }
            out.iter_mut().for_each(|a| *a /= known.len() as f64);
        }
        Ok(out)
    }

    /// The range of concentrations in which an unknown one is sought, in ppb: that of the experiment and a tenth of it on both
    /// sides, without negative ones unless the experiment has them.
    pub(crate) fn search_range(&self) -> (f64, f64) {
        let (middle, half) = self.axes.ppb;
        let (low, high) = (middle - 1.2 * half, middle + 1.2 * half);
        (if middle >= half { low.max(0.0) } else { low }, high)
    }

    /// Scaling of the axes.
    pub(crate) const fn axes(&self) -> &Axes {
        &self.axes
    }

    /// Wavelengths in nm.
    pub(crate) fn nm(&self) -> &[f64] {
        self.data.nm()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::generate::{Generator, Noise};
    use crate::settings::{Decoder, Settings};

    #[test]
    fn every_engine_predicts_what_the_closed_form_predicts() {
        let (ppb, nm) = ([0.0, 15.0, 30.0, 60.0], (0..41).map(|i| 200.0 + 15.0 * f64::from(i)).collect::<Vec<_>>());
        let data = Generator::Mixed.spectra(&ppb, &nm, &Noise::default(), 0).unwrap();
        for engine in [Engine::ClosedForm, Engine::BatchedShooting, Engine::ChristoffelGrid] {
            let settings = Settings { engine, steps: 20, stride: 4, evaluate_every: 10, ..Settings::default() };
            let mut trainer = Trainer::new(data.clone(), Axes::new(&ppb, &nm).unwrap(), settings, 1).unwrap();
            while !trainer.finished() {
                trainer.advance().unwrap();
            }
            let spectrum = trainer.predict(20.0).unwrap();
            let distance = trainer.distance_from_closed_form(20.0, &spectrum).unwrap();
            assert_eq!(distance.is_none(), engine == Engine::ClosedForm);
            assert!(distance.is_none_or(|it| it > 0.0 && it < 1e-4), "{engine:?}: {distance:?}");
        }
        let flow = Settings { decoder: Decoder::Flow, engine: Engine::BatchedShooting, ..Settings::default() };
        assert!(matches!(flow.check(), Err(Error::Unsupported { engine: "BatchedShooting", .. })));
    }

    #[test]
    fn predictions_depend_on_every_source_spectrum_and_their_spread_is_reported() {
        let (ppb, nm) = ([0.0, 15.0, 30.0, 60.0], (0..41).map(|i| 200.0 + 15.0 * f64::from(i)).collect::<Vec<_>>());
        let data = Generator::Mixed.spectra(&ppb, &nm, &Noise::default(), 0).unwrap();
        for decoder in [Decoder::Slope, Decoder::Flow] {
            check_sources(&ppb, &nm, &data, decoder);
        }
    }

    fn check_sources(ppb: &[f64], nm: &[f64], data: &crate::spectra::Spectra, decoder: Decoder) {
        let settings = Settings { decoder, steps: 20, stride: 4, evaluate_every: 10, nodes: 4, ..Settings::default() };
        let mut trainer = Trainer::new(data.clone(), Axes::new(ppb, nm).unwrap(), settings, 1).unwrap();
        while !trainer.finished() {
            trainer.advance().unwrap();
        }
        let original = trainer.prediction(20.0).unwrap();
        assert!(original.spread.iter().any(|spread| *spread > 1e-6));
        for source in 0..4 {
            let exchanged = data.with_row(source, data.row((source + 1) % 4)).unwrap();
            let mut other = trainer.clone();
            other.data = exchanged;
            assert_ne!(other.prediction(20.0).unwrap(), original, "{decoder:?}, source {source}");
        }
    }
}
