//! Curves of a trained model for reports: its metric, its geodesics next to straight lines, its losses.

use serde::{Deserialize, Serialize};

use crate::engine::{Agreement, Closed1D, GeodesicBvp, GridEngine, ShootingEngine, agreement};
use crate::error::Error;
use crate::grid::{ChristoffelGrid, Interpolation};
use crate::metric::Metric;
use crate::shooting::BatchedShooting;
use crate::train::{GRID_SHOOTING, Trainer};
use crate::trajectory::{Problem, trajectory};

/// Concentrations of a metric curve, and times of a geodesic.
const POINTS: usize = 33;
/// Wavelengths that are shown, evenly spaced.
const WAVELENGTHS: usize = 5;
/// Knots in concentration of the compared grid, those of the reference.
const GRID_ROWS: usize = 2_000;

/// Losses at one evaluation of the inner validation split.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct LossPoint {
    /// Steps made.
    pub step: u64,
    /// Reconstruction loss of the last step, standardised.
    pub training: f64,
    /// Least validation loss so far, standardised.
    pub validation: f64,
}

/// The metric of a trained model along the concentration axis.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct MetricFigure {
    /// Concentrations in ppb.
    pub ppb: Vec<f64>,
    /// Wavelengths in nm.
    pub nm: Vec<f64>,
    /// g(c, l), per wavelength and concentration, in units of the normalised axis.
    pub g: Vec<Vec<f64>>,
    /// The Christoffel symbol, per wavelength and concentration.
    pub gamma: Vec<Vec<f64>>,
    /// Times in [0, 1].
    pub times: Vec<f64>,
    /// Concentration in ppb on the geodesic from the first to the last concentration, per wavelength and time.
    pub paths: Vec<Vec<f64>>,
}

impl Trainer {
    /// The losses after the last step.
    pub fn loss_point(&self) -> LossPoint {
        LossPoint { step: self.steps(), training: self.last_loss().reconstruction, validation: self.validation_loss() }
    }

    /// How far shooting and the Christoffel grid, which do not use the closed form, are from the closed form on the trained metric: from
    /// the lowest to the highest concentration and back, at a few wavelengths.
    ///
    /// # Errors
    /// If a problem is out of range.
    pub fn engine_agreements(&self) -> Result<Vec<Agreement>, Error> {
        let metric = &self.best().metric;
        let ends = |i: usize| if i.is_multiple_of(2) { (-1.0, 1.0) } else { (1.0, -1.0) };
        let problem = |i: usize| {
            let (start, end) = ends(i);
            Problem { start, end, wavelength: 2.0 * i as f64 / (WAVELENGTHS - 1) as f64 - 1.0 }
        };
        let problems: Vec<Problem> = (0..WAVELENGTHS).map(problem).collect();
        let shooting = ShootingEngine { metric, shooting: BatchedShooting::default() };
        let grid = ChristoffelGrid::build(metric, GRID_ROWS, WAVELENGTHS)?;
        let on_grid = GridEngine::new(&grid, metric, Interpolation::Hermite, GRID_SHOOTING)?;
        let engines: [&dyn GeodesicBvp; 2] = [&shooting, &on_grid];
        let compared = |engine| agreement(&Closed1D { metric }, engine, &problems, &[0.25, 0.5, 0.75]);
        engines.into_iter().map(compared).collect()
    }

    /// The metric of the best model at a few wavelengths.
    ///
    /// # Errors
    /// If a geodesic cannot be computed.
    pub fn metric_figure(&self) -> Result<MetricFigure, Error> {
        let all = self.nm();
        let nm: Vec<f64> = (0..WAVELENGTHS).map(|i| all[i * (all.len() - 1) / (WAVELENGTHS - 1)]).collect();
        let times: Vec<f64> = (0..POINTS).map(|i| i as f64 / (POINTS - 1) as f64).collect();
        let c: Vec<f64> = times.iter().map(|t| 2.0 * t - 1.0).collect();
        let metric = &self.best().metric;
        let (mut g, mut gamma, mut paths) = (Vec::new(), Vec::new(), Vec::new());
        for &wavelength in &nm {
            let l = self.axes().l(wavelength);
            let jets = metric.jets(&c.iter().map(|&c| (c, l)).collect::<Vec<_>>());
            g.push(jets.iter().map(|jet| jet.g).collect());
            gamma.push(jets.iter().map(|jet| jet.gamma()).collect());
            let path = trajectory(metric, Problem { start: -1.0, end: 1.0, wavelength: l }, &times)?;
            paths.push(path.c.iter().map(|c| self.axes().ppb(*c)).collect());
        }
        Ok(MetricFigure { ppb: c.iter().map(|c| self.axes().ppb(*c)).collect(), nm, g, gamma, times, paths })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::generate::{Generator, Noise};
    use crate::settings::Settings;
    use crate::train::Axes;

    #[test]
    fn figures_show_the_trained_metric_and_its_geodesics() {
        let (ppb, nm) = ([0.0, 15.0, 30.0, 60.0], (0..61).map(|i| 200.0 + 10.0 * f64::from(i)).collect::<Vec<_>>());
        let data = Generator::Mixed.spectra(&ppb, &nm, &Noise::default(), 0).unwrap();
        let settings = Settings { steps: 60, stride: 4, evaluate_every: 10, ..Settings::default() };
        let mut trainer = Trainer::new(data, Axes::new(&ppb, &nm).unwrap(), settings, 1).unwrap();
        while !trainer.finished() {
            trainer.advance().unwrap();
        }
        let figure = trainer.metric_figure().unwrap();
        assert_eq!((figure.nm.len(), figure.ppb.len(), figure.ppb[0], figure.ppb[32]), (5, 33, 0.0, 60.0));
        for path in &figure.paths {
            assert!((path[0], path[32]) == (0.0, 60.0) && path.is_sorted(), "{path:?}");
        }
        assert!(figure.paths.iter().any(|path| (path[16] - 30.0).abs() > 1e-3), "no path bends");
        // Gamma is the derivative of ln sqrt(g).
        let log = |k: usize| 0.5 * figure.g[2][k].ln();
        assert!(((log(17) - log(15)) / (4.0 / 32.0) - figure.gamma[2][16]).abs() < 1e-2);
        assert_eq!(trainer.loss_point().step, 60);
        let agreements = trainer.engine_agreements().unwrap();
        let names: Vec<&str> = agreements.iter().map(|it| &*it.engine).collect();
        assert_eq!(names, ["shooting", "christoffel grid"]);
        for (agreement, tolerance) in agreements.iter().zip([1e-8, 1e-6]) {
            assert!(
                agreement.compared == 5 && agreement.max_position < tolerance && agreement.max_velocity < tolerance,
                "{agreement:?}"
            );
        }
    }
}
