//! One trait over the engines that solve boundary value problems of one dimension, and a report of their agreement.

use serde::{Deserialize, Serialize};

use crate::error::Error;
use crate::grid::{ChristoffelGrid, GridLine, Interpolation};
use crate::manifold::{Line, Manifold};
use crate::metric::Metric;
use crate::shooting::BatchedShooting;
use crate::trajectory::{Problem, trajectory};

/// A geodesic between two concentrations, from any engine. It is an answer only if `converged`.
#[derive(Debug, Clone, PartialEq)]
pub struct Solution {
    /// c'(0).
    pub initial_velocity: f64,
    /// c(t) per time; empty without convergence.
    pub c: Vec<f64>,
    /// c'(t) per time; empty without convergence.
    pub velocity: Vec<f64>,
    /// Closed form: largest error of s; shooting: distance of the end point.
    pub residual: f64,
    /// Whether the residual is within the engine's limit.
    pub converged: bool,
}

/// Solves boundary value problems of one dimension.
pub trait GeodesicBvp {
    /// Name in reports.
    fn name(&self) -> &'static str;

    /// Solves `problem` at increasing `times` in [0, 1].
    ///
    /// # Errors
    /// If an argument is out of range. A problem that does not converge is not an error: its [`Solution`] says so.
    fn solve(&self, problem: Problem, times: &[f64]) -> Result<Solution, Error>;
}

/// The closed form.
#[derive(Clone, Copy)]
pub struct Closed1D<'a> {
    /// The metric.
    pub metric: &'a dyn Metric,
}

impl GeodesicBvp for Closed1D<'_> {
    fn name(&self) -> &'static str {
        "closed form"
    }

    fn solve(&self, problem: Problem, times: &[f64]) -> Result<Solution, Error> {
        let found = trajectory(self.metric, problem, times)?;
        let converged = found.residual <= 1e-12 * (1.0 + found.displacement.abs());
        Ok(Solution {
            initial_velocity: found.initial_velocity,
            c: found.c,
            velocity: found.velocity,
            residual: found.residual,
            converged,
        })
    }
}

/// Shooting with the metric's own derivatives.
#[derive(Clone, Copy)]
pub struct ShootingEngine<'a> {
    /// The metric.
    pub metric: &'a dyn Metric,
    /// Tolerances.
    pub shooting: BatchedShooting,
}

impl GeodesicBvp for ShootingEngine<'_> {
    fn name(&self) -> &'static str {
        "shooting"
    }

    fn solve(&self, problem: Problem, times: &[f64]) -> Result<Solution, Error> {
        let problem = problem.check()?;
        shoot(&self.shooting, &Line { metric: self.metric, wavelength: problem.wavelength }, problem, times)
    }
}

/// Shooting with Christoffel symbols from a grid.
#[derive(Debug, Clone, Copy)]
pub struct GridEngine<'a> {
    grid: &'a ChristoffelGrid,
    interpolation: Interpolation,
    shooting: BatchedShooting,
}

impl<'a> GridEngine<'a> {
    /// An engine over `grid`, which must have been built from `metric`.
    ///
    /// # Errors
    /// [`Error::Stale`] if the metric has changed since.
    pub fn new(
        grid: &'a ChristoffelGrid,
        metric: &dyn Metric,
        interpolation: Interpolation,
        shooting: BatchedShooting,
    ) -> Result<Self, Error> {
        grid.check_version(metric)?;
        Ok(Self { grid, interpolation, shooting })
    }
}

impl GeodesicBvp for GridEngine<'_> {
    fn name(&self) -> &'static str {
        "christoffel grid"
    }

    fn solve(&self, problem: Problem, times: &[f64]) -> Result<Solution, Error> {
        let problem = problem.check()?;
        let line = GridLine { grid: self.grid, wavelength: problem.wavelength, interpolation: self.interpolation };
        shoot(&self.shooting, &line, problem, times)
    }
}

fn shoot(
    shooting: &BatchedShooting,
    manifold: &dyn Manifold,
    problem: Problem,
    times: &[f64],
) -> Result<Solution, Error> {
    for (i, &value) in times.iter().enumerate() {
        if !(0.0..=1.0).contains(&value) || (i > 0 && value < times[i - 1]) {
            return Err(Error::Order { axis: "times in [0, 1]", index: i, value });
        }
    }
    let shot = shooting.solve(&[(manifold, &[problem.start], &[problem.end])])?.remove(0);
    let path = if shot.converged {
        shooting.path(manifold, &[problem.start], &shot.initial_velocity, times).unwrap_or_default()
    } else {
        Vec::new()
    };
    Ok(Solution {
        initial_velocity: shot.initial_velocity[0],
        c: path.iter().map(|s| s[0]).collect(),
        velocity: path.iter().map(|s| s[1]).collect(),
        residual: shot.residual,
        converged: shot.converged && path.len() == times.len(),
    })
}

/// How far one engine is from the reference engine.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Agreement {
    /// Name of the engine.
    pub engine: String,
    /// Name of the reference engine.
    pub reference: String,
    /// Problems that both solved.
    pub compared: usize,
    /// Problems that one of them did not solve.
    pub unsolved: usize,
    /// Largest |c(t) - reference| over problems and times.
    pub max_position: f64,
    /// Largest relative difference of c'(0).
    pub max_velocity: f64,
    /// Largest residual of a compared solution.
    pub max_residual: f64,
}

/// Compares `engine` with `reference` on `problems` at `times`.
///
/// # Errors
/// If a problem or a time is out of range.
pub fn agreement(
    reference: &dyn GeodesicBvp,
    engine: &dyn GeodesicBvp,
    problems: &[Problem],
    times: &[f64],
) -> Result<Agreement, Error> {
    let mut out = Agreement {
        engine: engine.name().to_owned(),
        reference: reference.name().to_owned(),
        compared: 0,
        unsolved: 0,
        max_position: 0.0,
        max_velocity: 0.0,
        max_residual: 0.0,
    };
    for &problem in problems {
        let (a, b) = (reference.solve(problem, times)?, engine.solve(problem, times)?);
        if !a.converged || !b.converged {
            out.unsolved += 1;
            continue;
        }
        out.compared += 1;
        out.max_residual = out.max_residual.max(b.residual);
        let scale = a.initial_velocity.abs().max(f64::MIN_POSITIVE);
        out.max_velocity = out.max_velocity.max((a.initial_velocity - b.initial_velocity).abs() / scale);
        for (x, y) in a.c.iter().zip(&b.c) {
            out.max_position = out.max_position.max((x - y).abs());
        }
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metric::MetricNetwork;
    use crate::random::Stream;

    #[test]
    fn engines_agree_on_the_stress_metric_and_a_stale_grid_is_refused() {
        let mut metric = MetricNetwork::stress(5);
        let draw = |i: u64| 2.0 * Stream::new(4, 4).uniform(i) - 1.0;
        // Wavelengths of the grid, so that only the interpolation in c is measured.
        let problems: Vec<Problem> = (0..4)
            .map(|i| Problem { start: draw(2 * i), end: draw(2 * i + 1), wavelength: -1.0 + 0.1 * (4 * i + 1) as f64 })
            .collect();
        let times = [0.25, 0.5, 1.0];
        let grid = ChristoffelGrid::build(&metric, 500, 21).unwrap();
        let closed = Closed1D { metric: &metric };
        let shooting = ShootingEngine { metric: &metric, shooting: BatchedShooting::default() };
        let exact = agreement(&closed, &shooting, &problems, &times).unwrap();
        assert!(exact.compared == 4 && exact.max_position < 1e-8 && exact.max_velocity < 1e-8, "{exact:?}");
        let loose = BatchedShooting { tolerance: 1e-9, residual: 1e-8, ..BatchedShooting::default() };
        let engine = GridEngine::new(&grid, &metric, Interpolation::Hermite, loose).unwrap();
        let on_grid = agreement(&closed, &engine, &problems, &times).unwrap();
        assert!(on_grid.compared == 4 && on_grid.max_velocity < 1e-6, "{on_grid:?}");
        let weight = &mut metric.parameters_mut()[0];
        *weight = weight.next_up();
        assert!(matches!(GridEngine::new(&grid, &metric, Interpolation::Hermite, loose), Err(Error::Stale { .. })));
    }
}
