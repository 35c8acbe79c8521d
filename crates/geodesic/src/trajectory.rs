//! Positions along a geodesic at chosen times, and their implicit gradients.

use crate::error::{Error, in_range};
use crate::metric::{Metric, MetricNetwork};
use crate::quadrature::gauss_legendre;

/// Panels of the table of s over the path, each with [`NODES`] quadrature nodes.
const PANELS: usize = 32;
const NODES: usize = 8;
/// Newton's iteration from linear interpolation within a panel converges in three steps; the count is a bound.
const NEWTON_STEPS: usize = 8;
/// Panels of each integral of a gradient.
const GRADIENT_PANELS: usize = 8;

/// A boundary value problem: `c(0) = start`, `c(1) = end` at one wavelength, all normalised.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Problem {
    /// c at time 0.
    pub start: f64,
    /// c at time 1.
    pub end: f64,
    /// Normalised wavelength.
    pub wavelength: f64,
}

impl Problem {
    /// Refuses values that are not finite or beyond 100 in magnitude.
    ///
    /// # Errors
    /// [`Error::Range`] with the name of the field.
    pub fn check(self) -> Result<Self, Error> {
        for (field, value) in [("start", self.start), ("end", self.end), ("wavelength", self.wavelength)] {
            in_range(field, value, -100.0, 100.0, "in [-100, 100]")?;
        }
        Ok(self)
    }
}

/// A geodesic at chosen times.
#[derive(Debug, Clone, PartialEq)]
pub struct Trajectory {
    /// c(t) per time.
    pub c: Vec<f64>,
    /// c'(t) per time.
    pub velocity: Vec<f64>,
    /// c'(0).
    pub initial_velocity: f64,
    /// `s1 - s0`, the constant `sqrt(g) c'`.
    pub displacement: f64,
    /// Largest `|s(c(t)) - s0 - t (s1 - s0)|` over the times.
    pub residual: f64,
}

/// Points and weights of a composite rule on [from, to], weights signed with the direction.
fn composite(from: f64, to: f64, panels: usize) -> Vec<(f64, f64)> {
    let rule = gauss_legendre(NODES);
    let half = 0.5 * (to - from) / panels as f64;
    let panel = |p: usize| {
        let middle = from + half * (2 * p + 1) as f64;
        rule.iter().map(move |(x, w)| (middle + half * x, half * w)).collect::<Vec<_>>()
    };
    (0..panels).flat_map(panel).collect()
}

/// Integrals of sqrt(g) from `from` to each of `ends`, by one rule of [`NODES`] nodes each.
fn short_integrals(metric: &dyn Metric, l: f64, pairs: &[(f64, f64)]) -> Vec<f64> {
    let nodes: Vec<Vec<(f64, f64)>> = pairs.iter().map(|&(from, to)| composite(from, to, 1)).collect();
    let points: Vec<(f64, f64)> = nodes.iter().flatten().map(|&(c, _)| (c, l)).collect();
    let values = metric.values(&points);
    nodes.iter().zip(values.chunks(NODES)).map(|(n, g)| n.iter().zip(g).map(|((_, w), g)| w * g.sqrt()).sum()).collect()
}

/// Solves `problem` at `times` in [0, 1] by inverting s.
///
/// # Errors
/// If the problem is out of range or a time lies outside [0, 1].
pub fn trajectory(metric: &dyn Metric, problem: Problem, times: &[f64]) -> Result<Trajectory, Error> {
    let Problem { start, end, wavelength: l } = problem.check()?;
    for &t in times {
        in_range("time", t, 0.0, 1.0, "in [0, 1]")?;
    }
    let width = (end - start) / PANELS as f64;
    let knot = |k: usize| if k == PANELS { end } else { start + width * k as f64 };
    let panels: Vec<(f64, f64)> = (0..PANELS).map(|k| (knot(k), knot(k + 1))).collect();
    let mut table = vec![0.0];
    for part in short_integrals(metric, l, &panels) {
        table.push(table[table.len() - 1] + part);
    }
    let displacement = table[PANELS];
    let wanted: Vec<f64> = times.iter().map(|t| t * displacement).collect();
    let mut panel = Vec::new();
    let mut c = Vec::new();
    for y in &wanted {
        let k = table[1..PANELS].partition_point(|s| s.abs() <= y.abs());
        let span = table[k + 1] - table[k];
        let fraction = if span == 0.0 { 0.0 } else { (y - table[k]) / span };
        panel.push(k);
        c.push(knot(k) + width * fraction);
    }
    let mut residual = 0.0;
    for _ in 0..NEWTON_STEPS {
        let pairs: Vec<(f64, f64)> = panel.iter().zip(&c).map(|(&k, &c)| (knot(k), c)).collect();
        let parts = short_integrals(metric, l, &pairs);
        let errors: Vec<f64> = (0..c.len()).map(|i| table[panel[i]] + parts[i] - wanted[i]).collect();
        residual = errors.iter().fold(0.0f64, |a, e| a.max(e.abs()));
        if residual <= 4.0 * f64::EPSILON * displacement.abs() {
            break;
        }
        let g = metric.values(&c.iter().map(|&c| (c, l)).collect::<Vec<_>>());
        c.iter_mut().zip(&errors).zip(&g).for_each(|((c, e), g)| *c -= e / g.sqrt());
    }
    let points: Vec<(f64, f64)> = c.iter().map(|&c| (c, l)).chain([(start, l)]).collect();
    let mut velocity: Vec<f64> = metric.values(&points).iter().map(|g| displacement / g.sqrt()).collect();
    let initial_velocity = velocity.pop().expect("the start is the last point");
    Ok(Trajectory { c, velocity, initial_velocity, displacement, residual })
}

/// Adds the gradient of `sum adjoint[k] * c(times[k])` with respect to the metric's parameters to `gradient`.
///
/// Implicit differentiation of `s(c) - s0 - t (s1 - s0) = 0`: nothing of the solver is differentiated.
///
/// # Panics
/// If the lengths of `times`, `adjoint` and the trajectory differ.
pub fn trajectory_gradient(
    metric: &MetricNetwork,
    problem: Problem,
    times: &[f64],
    solution: &Trajectory,
    adjoint: &[f64],
    gradient: &mut [f64],
) {
    assert!(times.len() == adjoint.len() && times.len() == solution.c.len(), "lengths of times and adjoints differ");
    let l = problem.wavelength;
    let root_at: Vec<f64> =
        metric.values(&solution.c.iter().map(|&c| (c, l)).collect::<Vec<_>>()).iter().map(|g| g.sqrt()).collect();
    // Points with the coefficient of d sqrt(g) there.
    let mut points = Vec::new();
    let mut whole = 0.0;
    for k in 0..times.len() {
        let scale = -adjoint[k] / root_at[k];
        points.extend(composite(problem.start, solution.c[k], GRADIENT_PANELS).iter().map(|(c, w)| (*c, scale * w)));
        whole -= scale * times[k];
    }
    points.extend(composite(problem.start, problem.end, GRADIENT_PANELS).iter().map(|(c, w)| (*c, whole * w)));
    let pass = metric.forward(1, points.iter().flat_map(|(c, _)| [*c, l]).collect());
    let to_g: Vec<f64> = points.iter().zip(&pass.g).map(|((_, a), g)| a / (2.0 * g.sqrt())).collect();
    metric.backward(&pass, &to_g, gradient);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metric::LinearRootMetric;

    fn problem(start: f64, end: f64, wavelength: f64) -> Problem {
        Problem { start, end, wavelength }
    }

    #[test]
    fn positions_equal_the_test_vectors_of_the_analytic_metric() {
        for (start, end, expected) in
            [(-1.0, 1.0, -0.025_033_236_373), (-1.0, -1.0 / 3.0, -0.716_118_051_658), (1.0, 0.0, 0.671_960_575_077)]
        {
            let t = trajectory(&LinearRootMetric { depth: 0.8 }, problem(start, end, 0.3), &[0.0, 0.37, 1.0]).unwrap();
            assert!((t.c[1] - expected).abs() < 2e-12, "{t:?}");
            assert!((t.c[0] - start).abs() < 1e-14 && (t.c[2] - end).abs() < 1e-14 && t.residual < 1e-14, "{t:?}");
        }
    }

    #[test]
    fn stress_paths_differ_from_straight_lines_and_solve_the_geodesic_equation() {
        let metric = MetricNetwork::stress(1);
        let h = 1e-3;
        let (mut bend, mut worst) = (0.0f64, 0.0f64);
        for i in 0..40 {
            let l = f64::from(i) / 20.0 - 1.0;
            let t = trajectory(&metric, problem(-1.0, 1.0, l), &[0.5 - h, 0.5, 0.5 + h]).unwrap();
            bend = bend.max(t.c[1].abs());
            let acceleration = (t.velocity[2] - t.velocity[0]) / (2.0 * h);
            let gamma = metric.jets(&[(t.c[1], l)])[0].gamma();
            worst = worst.max((acceleration + gamma * t.velocity[1] * t.velocity[1]).abs());
        }
        assert!(bend > 0.02, "largest distance from the straight line: {bend}");
        assert!(worst < 1e-4, "geodesic equation: {worst}");
    }

    #[test]
    fn implicit_gradient_of_positions_equals_central_differences() {
        let mut metric = MetricNetwork::stress(7);
        let (bvp, times, adjoint) = (problem(0.8, -0.9, 0.2), [0.1, 0.37, 0.8], [1.0, -2.0, 0.5]);
        let loss = |metric: &MetricNetwork| -> f64 {
            trajectory(metric, bvp, &times).unwrap().c.iter().zip(adjoint).map(|(c, a)| c * a).sum()
        };
        let solution = trajectory(&metric, bvp, &times).unwrap();
        let mut gradient = vec![0.0; metric.network().parameters().len()];
        trajectory_gradient(&metric, bvp, &times, &solution, &adjoint, &mut gradient);
        assert!(gradient.iter().any(|g| g.abs() > 1e-2));
        for i in (0..gradient.len()).step_by(307) {
            let mut shifted = |h: f64| {
                metric.parameters_mut()[i] += h;
                let value = loss(&metric);
                metric.parameters_mut()[i] -= h;
                value
            };
            let difference = (shifted(1e-5) - shifted(-1e-5)) / 2e-5;
            assert!((difference - gradient[i]).abs() < 1e-8, "parameter {i}: {difference} {}", gradient[i]);
        }
    }

    #[test]
    fn times_outside_the_unit_interval_are_refused() {
        let refused = trajectory(&LinearRootMetric { depth: 0.5 }, problem(0.0, 1.0, 0.0), &[1.5]);
        assert!(matches!(refused, Err(Error::Range { field: "time", .. })));
    }
}
