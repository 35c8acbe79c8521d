//! One trait over the engines that solve boundary value problems of one dimension, and a report of their agreement.

use serde::{Deserialize, Serialize};

use crate::closed::{Features, Lattice};
use crate::error::Error;
use crate::grid::{GridLine, GridSource, Interpolation};
use crate::manifold::{Line, Manifold};
use crate::metric::Metric;
use crate::quadrature::gauss_legendre;
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
    grid: &'a dyn GridSource,
    interpolation: Interpolation,
    shooting: BatchedShooting,
}

impl<'a> GridEngine<'a> {
    /// An engine over `grid`, which must have been built from `metric`.
    ///
    /// # Errors
    /// [`Error::Stale`] if the metric has changed since.
    pub fn new(
        grid: &'a dyn GridSource,
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
        let columns = self.grid.columns_at(problem.wavelength)?;
        let line = GridLine { columns: &columns, wavelength: problem.wavelength, interpolation: self.interpolation };
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

/// Times at which a path is evaluated for its features, besides both ends.
const FEATURE_TIMES: usize = 16;

/// Features of paths [pair, wavelength] from their c(t) and c'(t).
///
/// # Errors
/// [`Error::NotSolved`] for a problem that does not converge.
pub(crate) fn path_features(
    engine: &dyn GeodesicBvp,
    metric: &dyn Metric,
    lattice: &Lattice,
    pairs: &[(usize, usize)],
) -> Result<Features, Error> {
    let rule: Vec<(f64, f64)> =
        gauss_legendre(FEATURE_TIMES).into_iter().map(|(x, weight)| (0.5 * (x + 1.0), 0.5 * weight)).collect();
    let mut times = vec![0.0];
    times.extend(rule.iter().map(|(time, _)| time));
    times.push(1.0);
    let mut out =
        Features { displacement: Vec::new(), mean: Vec::new(), velocity: Vec::new(), initial_velocity: Vec::new() };
    for &(from, to) in pairs {
        let (start, end) = (lattice.breaks()[from], lattice.breaks()[to]);
        let points: Vec<(f64, f64)> = lattice.wavelengths().iter().map(|&l| (start, l)).collect();
        for (&(_, wavelength), g) in points.iter().zip(metric.values(&points)) {
            let found = engine.solve(Problem { start, end, wavelength }, &times)?;
            if !found.converged {
                let (engine, residual) = (engine.name(), found.residual);
                return Err(Error::NotSolved { engine, start, end, wavelength, residual });
            }
            out.displacement.push(g.sqrt() * found.initial_velocity);
            out.mean.push(rule.iter().zip(&found.c[1..]).map(|((_, weight), c)| weight * c).sum());
            out.velocity.push(found.velocity.iter().fold(0.0, |most, v| v.abs().max(most)));
            out.initial_velocity.push(found.initial_velocity);
        }
    }
    Ok(out)
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
    use crate::grid::ChristoffelGrid;
    use crate::metric::MetricNetwork;
    use crate::random::Stream;

    #[test]
    fn features_of_every_engine_are_those_of_the_closed_form() {
        let metric = MetricNetwork::stress(5);
        let lattice = Lattice::new(&[-1.0, -0.3, 0.4, 1.0], &[-0.9, 0.1, 1.0], 16).unwrap();
        let pairs = [(0, 3), (2, 1)];
        let expected = lattice.features(&metric, &pairs);
        let shooting = BatchedShooting::default();
        let grid = ChristoffelGrid::build(&metric, 500, 21).unwrap();
        let on_grid = GridEngine::new(&grid, &metric, Interpolation::Hermite, shooting).unwrap();
        let engines: [(&dyn GeodesicBvp, f64); 3] = [
            (&Closed1D { metric: &metric }, 1e-9),
            (&ShootingEngine { metric: &metric, shooting }, 1e-9),
            (&on_grid, 1e-6),
        ];
        for (engine, tolerance) in engines {
            let found = path_features(engine, &metric, &lattice, &pairs).unwrap();
            let distance = |one: &[f64], other: &[f64]| {
                assert_eq!(one.len(), 6);
                one.iter().zip(other).map(|(one, other)| (one - other).abs()).fold(0.0, f64::max)
            };
            let name = engine.name();
            assert!(
                distance(&found.displacement, &expected.displacement) < tolerance,
                "{name}: {found:?} {expected:?}"
            );
            assert!(distance(&found.mean, &expected.mean) < tolerance.max(1e-7), "{name}: {found:?} {expected:?}");
            // Both take the largest of some points of the path, and not the same ones.
            assert!(distance(&found.velocity, &expected.velocity) < 5e-3, "{name}: {found:?} {expected:?}");
        }
        let hopeless = BatchedShooting { newton_steps: 1, ..shooting };
        let error = path_features(&ShootingEngine { metric: &metric, shooting: hopeless }, &metric, &lattice, &pairs);
        assert!(matches!(error, Err(Error::NotSolved { engine: "shooting", .. })), "{error:?}");
    }

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
