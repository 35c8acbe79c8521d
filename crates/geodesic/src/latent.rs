//! A geometry of two dimensions: concentration and a latent of the spectrum.
//!
//! The latents of spectra are their coordinates along the principal components of the training spectra. For each component
//! the training spectra are points (c, u) of a plane with the learned metric `exp(2 phi) (dc^2 + du^2)`, `phi = u a(c)`. The metric is learned so
//! that the geodesic from the first to the last point passes through all others; the latent at another concentration is where that
//! geodesic, continued if need be, crosses it. The boundary value problem is solved by [`BatchedShooting`], its gradient is implicit.

use crate::baseline::solve;
use crate::error::{Error, in_range};
use crate::integrate::{State, initial, integrate};
use crate::manifold::{Manifold, TensorJet};
use crate::quadrature::gauss_legendre;
use crate::shooting::BatchedShooting;
use crate::spectra::Spectra;
use crate::train::Axes;

/// Most principal components. The spectra that the model is for have about three.
const MAX_COMPONENTS: usize = 3;
/// Centres of the bumps of a(c), uniform over [-1.2, 1.2].
const BUMPS: usize = 13;
/// Widths of the bumps on the axis [-1, 1], of which an inner leave-one-out chooses.
pub const LATENT_WIDTHS: [f64; 3] = [0.25, 0.5, 1.0];
/// Weight of the squared weights of the bumps, against squared errors of latents whose largest is [`LATENT_RANGE`]. A larger one that an
/// inner leave-one-out chooses does not predict noisy spectra better.
const RIDGE: f64 = 1e-10;
/// Largest latent after scaling: small enough for moderate slopes also of paths that are continued beyond noisy spectra.
const LATENT_RANGE: f64 = 0.01;
/// Most steps of Levenberg and Marquardt.
const FIT_STEPS: usize = 12;
/// Most Newton steps to the time at which a path crosses a concentration.
const CROSSING_STEPS: usize = 30;
/// Quadrature nodes of a gradient between two crossings.
const NODES: usize = 6;
const TOLERANCE: f64 = 1e-9;

/// The metric `exp(2 u a(c)) (dc^2 + du^2)` with `a` a sum of Gaussian bumps.
#[derive(Debug, Clone, PartialEq)]
pub struct LatentMetric {
    width: f64,
    weights: Vec<f64>,
}

impl LatentMetric {
    /// The flat metric.
    fn flat(width: f64) -> Self {
        Self { width, weights: vec![0.0; BUMPS] }
    }

    /// Value, first and second derivative of bump `m` at `c`.
    fn bump(&self, m: usize, c: f64) -> [f64; 3] {
        let z = (c + 1.2 - 2.4 * m as f64 / (BUMPS - 1) as f64) / self.width;
        let value = (-0.5 * z * z).exp();
        [value, -z / self.width * value, (z * z - 1.0) / (self.width * self.width) * value]
    }

    /// a and its first and second derivative at `c`.
    fn slope(&self, c: f64) -> [f64; 3] {
        let mut sum = [0.0; 3];
        for (m, weight) in self.weights.iter().enumerate() {
            sum.iter_mut().zip(self.bump(m, c)).for_each(|(s, b)| *s += weight * b);
        }
        sum
    }

    /// Change of x'' per weight `m` at position `x` with velocity `v`.
    fn force(&self, m: usize, x: &[f64], v: &[f64]) -> [f64; 2] {
        let [value, first, _] = self.bump(m, x[0]);
        let p = [x[1] * first, value];
        let (along, square) = (p[0] * v[0] + p[1] * v[1], v[0] * v[0] + v[1] * v[1]);
        [0, 1].map(|k| square * p[k] - 2.0 * v[k] * along)
    }
}

impl Manifold for LatentMetric {
    fn dimension(&self) -> usize {
        2
    }

    fn jet(&self, x: &[f64]) -> TensorJet {
        let [a, a1, a2] = self.slope(x[0]);
        let g = (2.0 * x[1] * a).exp();
        let (first, second) = ([x[1] * a1, a], [x[1] * a2, a1, a1, 0.0]);
        let mut jet = TensorJet { g: vec![g, 0.0, 0.0, g], first: vec![0.0; 8], second: vec![0.0; 16] };
        for m in 0..2 {
            for diagonal in [0, 3] {
                jet.first[m * 4 + diagonal] = 2.0 * first[m] * g;
            }
            for n in 0..2 {
                for diagonal in [0, 3] {
                    jet.second[(m * 2 + n) * 4 + diagonal] = (2.0 * second[m * 2 + n] + 4.0 * first[m] * first[n]) * g;
                }
            }
        }
        jet
    }
}

/// One principal component: its latents, its learned metric, and the geodesic through its latents.
#[derive(Debug, Clone, PartialEq)]
pub struct LatentPath {
    /// Normalised concentrations of the training spectra.
    c: Vec<f64>,
    /// Latents of the training spectra, scaled.
    u: Vec<f64>,
    metric: LatentMetric,
    velocity: Vec<f64>,
    /// Distance of the end of the geodesic from the last training spectrum.
    pub residual: f64,
    /// Largest distance between a training latent and the geodesic, as a part of the largest latent.
    pub miss: f64,
}

/// Errors of a path at the inner points, and their derivatives by weight.
struct Errors {
    velocity: Vec<f64>,
    residual: f64,
    values: Vec<f64>,
    jacobian: Vec<Vec<f64>>,
}

impl Errors {
    fn objective(&self, metric: &LatentMetric) -> f64 {
        let squares = |values: &[f64]| values.iter().map(|x| x * x).sum::<f64>();
        squares(&self.values) + RIDGE * squares(&metric.weights)
    }
}

/// Continues a path from time `from` to the time at which it crosses concentration `c`; none if it does not get there.
fn cross(metric: &LatentMetric, state: &State, from: f64, c: f64) -> Option<(f64, State)> {
    let (mut t, mut at) = (from, state.clone());
    for _ in 0..CROSSING_STEPS {
        let (distance, speed) = (c - at[0], at[2]);
        if distance.abs() <= 1e-12 {
            break;
        }
        if speed <= 1e-9 {
            return None;
        }
        t = (t + distance / speed).max(from);
        at = integrate(metric, state.clone(), (from, t), TOLERANCE, &mut 0)?;
    }
    ((at[0] - c).abs() <= 1e-8).then_some((t, at))
}

/// The geodesic from the first to the last point, with its errors at the points between; none if it does not exist.
fn errors(metric: &LatentMetric, c: &[f64], u: &[f64]) -> Option<Errors> {
    let last = c.len() - 1;
    let shooting = BatchedShooting { tolerance: TOLERANCE, residual: 1e-7, ..BatchedShooting::default() };
    let problem: (&dyn Manifold, &[f64], &[f64]) = (metric, &[c[0], u[0]], &[c[last], u[last]]);
    let shot = shooting.solve(&[problem]).ok()?.remove(0);
    if !shot.converged {
        return None;
    }
    let mut state = initial(&[c[0], u[0]], &shot.initial_velocity);
    let mut time = 0.0;
    // Integral of Phi^-1 times the force of each weight, up to each crossing.
    let mut sums = vec![[0.0; 4]; BUMPS];
    let mut crossings = Vec::new();
    for point in &c[1..] {
        let (end, crossed) = cross(metric, &state, time, *point)?;
        let (middle, half) = (0.5 * (time + end), 0.5 * (end - time));
        for (x, weight) in gauss_legendre(NODES) {
            let node = middle + half * x;
            state = integrate(metric, state, (time, node), TOLERANCE, &mut 0)?;
            time = node;
            add_forces(metric, &state, half * weight, &mut sums);
        }
        (time, state) = (end, crossed);
        crossings.push((state.clone(), sums.clone()));
    }
    // The change of the end point at a fixed initial velocity is undone by a change of that velocity.
    let (end, at_end) = crossings.pop()?;
    let jacobian = vec![vec![end[4 + 2], end[4 + 3]], vec![end[8 + 2], end[8 + 3]]];
    let back: Vec<Vec<f64>> = at_end
        .iter()
        .map(|sum| solve(jacobian.clone(), applied(&end, sum)[..2].iter().map(|x| -x).collect()))
        .collect();
    let (mut values, mut rows) = (Vec::new(), Vec::new());
    for ((state, sums), wanted) in crossings.iter().zip(&u[1..last]) {
        values.push(state[1] - wanted);
        let change = |(sum, back): (&[f64; 4], &Vec<f64>)| {
            let mut at = applied(state, sum);
            for k in 0..2 {
                at[k] += state[4 + 4 * k + 2] * back[0] + state[4 + 4 * k + 3] * back[1];
            }
            // At the same concentration, not at the same time.
            at[1] - state[3] / state[2] * at[0]
        };
        rows.push(sums.iter().zip(&back).map(change).collect());
    }
    Some(Errors { velocity: shot.initial_velocity, residual: shot.residual, values, jacobian: rows })
}

/// Adds `weight Phi^-1 (0, force)` of every bump at a state.
fn add_forces(metric: &LatentMetric, state: &State, weight: f64, sums: &mut [[f64; 4]]) {
    let phi = || (0..4).map(|i| state[4 + 4 * i..8 + 4 * i].to_vec()).collect::<Vec<_>>();
    let columns = [2, 3].map(|k| solve(phi(), (0..4).map(|i| f64::from(u8::from(i == k))).collect()));
    for (m, sum) in sums.iter_mut().enumerate() {
        let force = metric.force(m, &state[..2], &state[2..4]);
        for (i, s) in sum.iter_mut().enumerate() {
            *s += weight * (columns[0][i] * force[0] + columns[1][i] * force[1]);
        }
    }
}

/// `Phi sum` at a state.
fn applied(state: &State, sum: &[f64; 4]) -> [f64; 4] {
    [0, 1, 2, 3].map(|i| (0..4).map(|j| state[4 + 4 * i + j] * sum[j]).sum())
}

impl LatentPath {
    /// Learns the metric of one component from points with increasing `c`, at least 3.
    ///
    /// # Errors
    /// [`Error::Incomplete`] if no geodesic connects the first and the last point.
    fn fit(c: &[f64], u: &[f64], width: f64) -> Result<Self, Error> {
        let refuse = || Error::Incomplete("no geodesic connects the latents of the first and the last spectrum".into());
        let mut metric = LatentMetric::flat(width);
        let mut now = errors(&metric, c, u).ok_or_else(refuse)?;
        let mut damping = 1e-6;
        for _ in 0..FIT_STEPS {
            let before = now.objective(&metric);
            let trial = LatentMetric { weights: step(&metric, &now, damping), ..metric };
            match errors(&trial, c, u) {
                Some(found) if found.objective(&trial) < before => {
                    let small = before - found.objective(&trial) < 1e-6 * before;
                    (metric, now, damping) = (trial, found, damping * 0.1);
                    if small {
                        break;
                    }
                }
                _ => damping *= 100.0,
            }
        }
        let miss = now.values.iter().fold(0.0, |worst: f64, x| worst.max(x.abs())) / LATENT_RANGE;
        let (residual, velocity) = (now.residual, now.velocity);
        Ok(Self { c: c.to_vec(), u: u.to_vec(), metric, velocity, residual, miss })
    }

    /// Returns the latent at a normalised concentration.
    ///
    /// # Errors
    /// [`Error::Incomplete`] if the geodesic does not reach it.
    fn latent(&self, c: f64) -> Result<f64, Error> {
        let refuse = || Error::Incomplete(format!("the geodesic does not reach the normalised concentration {c}"));
        let (back, start) = if c < self.c[0] { (-1.0, [-self.c[0], self.u[0]]) } else { (1.0, [self.c[0], self.u[0]]) };
        if back > 0.0 {
            let (_, state) = cross(&self.metric, &initial(&start, &self.velocity), 0.0, c).ok_or_else(refuse)?;
            return Ok(state[1]);
        }
        // Backwards in time: the mirrored geodesic of the mirrored metric.
        let weights = self.metric.weights.iter().rev().copied().collect();
        let mirrored = LatentMetric { weights, ..self.metric };
        let velocity = [self.velocity[0], -self.velocity[1]];
        let (_, state) = cross(&mirrored, &initial(&start, &velocity), 0.0, -c).ok_or_else(refuse)?;
        Ok(state[1])
    }
}

/// The weights after a step of Levenberg and Marquardt.
fn step(metric: &LatentMetric, errors: &Errors, damping: f64) -> Vec<f64> {
    let mut matrix = vec![vec![0.0; BUMPS]; BUMPS];
    let mut right: Vec<f64> = metric.weights.iter().map(|w| -RIDGE * w).collect();
    for (row, value) in errors.jacobian.iter().zip(&errors.values) {
        for i in 0..BUMPS {
            right[i] -= row[i] * value;
            (0..BUMPS).for_each(|j| matrix[i][j] += row[i] * row[j]);
        }
    }
    (0..BUMPS).for_each(|i| matrix[i][i] += RIDGE + damping);
    metric.weights.iter().zip(solve(matrix, right)).map(|(w, s)| w + s).collect()
}

/// A model of two-dimensional geometries, one per principal component of the training spectra.
#[derive(Debug, Clone, PartialEq)]
pub struct LatentModel {
    axes: Axes,
    mean: Vec<f64>,
    /// Scaled principal components.
    components: Vec<Vec<f64>>,
    paths: Vec<LatentPath>,
    /// The width that the inner leave-one-out chose.
    pub width: f64,
}

impl LatentModel {
    /// Fits the model to at least 4 training spectra; `axes` are those of the experiment.
    ///
    /// # Errors
    /// [`Error::Length`] with fewer spectra, [`Error::Incomplete`] if a geodesic does not exist.
    pub fn fit(training: &Spectra, axes: Axes) -> Result<Self, Error> {
        let n = training.ppb().len();
        if n < 4 {
            return Err(Error::Length { field: "training spectra", actual: n, expected: 4 });
        }
        let c: Vec<f64> = training.ppb().iter().map(|ppb| axes.c(*ppb)).collect();
        let (mean, components, latents) = principal_components(training);
        let mut best = (f64::INFINITY, LATENT_WIDTHS[0]);
        for width in LATENT_WIDTHS {
            let error = inner_error(&c, &components, &latents, width);
            if error < best.0 {
                best = (error, width);
            }
        }
        let width = best.1;
        let paths = latents.iter().map(|u| LatentPath::fit(&c, u, width)).collect::<Result<_, _>>()?;
        Ok(Self { axes, mean, components, paths, width })
    }

    /// Predicts the spectrum at `ppb`.
    ///
    /// # Errors
    /// [`Error::Range`] if `ppb` is not finite, [`Error::Incomplete`] if a geodesic does not reach it.
    pub fn predict(&self, ppb: f64) -> Result<Vec<f64>, Error> {
        in_range("ppb", ppb, f64::MIN, f64::MAX, "finite")?;
        let mut spectrum = self.mean.clone();
        for (path, component) in self.paths.iter().zip(&self.components) {
            let latent = path.latent(self.axes.c(ppb))?;
            spectrum.iter_mut().zip(component).for_each(|(a, p)| *a += latent * p);
        }
        Ok(spectrum)
    }

    /// The path of each component, the largest first.
    pub fn paths(&self) -> &[LatentPath] {
        &self.paths
    }
}

/// Squared error of a leave-one-out of the training spectra, with the latents of all of them. A fold that fails counts as its latents.
fn inner_error(c: &[f64], components: &[Vec<f64>], latents: &[Vec<f64>], width: f64) -> f64 {
    let without = |values: &[f64], i: usize| [&values[..i], &values[i + 1..]].concat();
    let mut sum = 0.0;
    for (u, component) in latents.iter().zip(components) {
        let norm: f64 = component.iter().map(|p| p * p).sum();
        for i in 0..c.len() {
            let path = LatentPath::fit(&without(c, i), &without(u, i), width);
            let found = path.and_then(|path| path.latent(c[i])).unwrap_or(0.0);
            sum += norm * (found - u[i]).powi(2);
        }
    }
    sum
}

/// Mean, components and latents [component][spectrum] of spectra, the latents scaled to [`LATENT_RANGE`].
fn principal_components(training: &Spectra) -> (Vec<f64>, Vec<Vec<f64>>, Vec<Vec<f64>>) {
    let (n, width) = (training.ppb().len(), training.nm().len());
    let mean: Vec<f64> = (0..width).map(|w| (0..n).map(|i| training.row(i)[w]).sum::<f64>() / n as f64).collect();
    let mut rows: Vec<Vec<f64>> =
        (0..n).map(|i| training.row(i).iter().zip(&mean).map(|(a, m)| a - m).collect()).collect();
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(x, y)| x * y).sum::<f64>();
    let total: f64 = rows.iter().map(|row| dot(row, row)).sum();
    let (mut components, mut latents) = (Vec::new(), Vec::new());
    for _ in 0..MAX_COMPONENTS.min(n - 1) {
        // Power iteration from the longest remaining row.
        let longest = rows.iter().max_by(|a, b| dot(a, a).total_cmp(&dot(b, b))).expect("there are rows").clone();
        if dot(&longest, &longest) <= 1e-20 * total.max(f64::MIN_POSITIVE) {
            break;
        }
        let mut direction = longest;
        for _ in 0..300 {
            let length = dot(&direction, &direction).sqrt();
            direction.iter_mut().for_each(|x| *x /= length);
            let scores: Vec<f64> = rows.iter().map(|row| dot(row, &direction)).collect();
            let mut next = vec![0.0; width];
            for (row, score) in rows.iter().zip(&scores) {
                next.iter_mut().zip(row).for_each(|(x, a)| *x += score * a);
            }
            direction = next;
        }
        let length = dot(&direction, &direction).sqrt();
        direction.iter_mut().for_each(|x| *x /= length);
        let scores: Vec<f64> = rows.iter().map(|row| dot(row, &direction)).collect();
        for (row, score) in rows.iter_mut().zip(&scores) {
            row.iter_mut().zip(&direction).for_each(|(a, d)| *a -= score * d);
        }
        let scale = scores.iter().fold(0.0, |most: f64, s| most.max(s.abs())) / LATENT_RANGE;
        latents.push(scores.iter().map(|s| s / scale).collect());
        components.push(direction.iter().map(|d| d * scale).collect());
    }
    (mean, components, latents)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::baseline::Baseline;
    use crate::generate::{Generator, Noise};
    use crate::measure::rmse;
    use crate::random::Stream;
    use crate::spectra::{REFERENCE_PPB, reference_nm};

    const C: [f64; 5] = [-1.0, -0.6, -0.1, 0.3, 1.0];
    const U: [f64; 5] = [-0.02, 0.01, 0.03, 0.02, -0.015];

    fn curved(width: f64) -> LatentMetric {
        LatentMetric { width, weights: (0..BUMPS as u64).map(|m| 0.3 * Stream::new(4, 1).normal(m)).collect() }
    }

    #[test]
    fn forces_are_those_of_the_connection_and_gradients_equal_central_differences() {
        let metric = curved(0.5);
        let (x, v) = ([0.2, 0.4], [1.1, -0.7]);
        let (gamma, _) = crate::manifold::connection(2, &metric.jet(&x));
        for k in 0..2 {
            let exact: f64 = (0..4).map(|ij| -gamma[k * 4 + ij] * v[ij / 2] * v[ij % 2]).sum();
            let sum: f64 = (0..BUMPS).map(|m| metric.weights[m] * metric.force(m, &x, &v)[k]).sum();
            assert!((exact - sum).abs() < 1e-12, "{exact} {sum}");
        }
        let found = errors(&metric, &C, &U).unwrap();
        assert!(found.values.iter().all(|e| e.abs() > 1e-4), "{:?}", found.values);
        for m in (0..BUMPS).step_by(2) {
            let shifted = |h: f64| {
                let mut metric = metric.clone();
                metric.weights[m] += h;
                errors(&metric, &C, &U).unwrap().values
            };
            let (up, down) = (shifted(1e-4), shifted(-1e-4));
            for j in 0..3 {
                let difference = (up[j] - down[j]) / 2e-4;
                assert!(
                    (difference - found.jacobian[j][m]).abs() < 1e-5,
                    "weight {m}, point {j}: {difference} {found:?}",
                    found = found.jacobian[j][m]
                );
            }
        }
    }

    #[test]
    fn learned_geodesic_passes_through_all_points_and_continues_on_both_sides() {
        let path = LatentPath::fit(&C, &U, 0.5).unwrap();
        assert!(path.miss < 0.02 && path.residual <= 1e-7, "{path:?}");
        for (c, u) in C.iter().zip(U) {
            assert!((path.latent(*c).unwrap() - u).abs() < 1e-3, "{c}");
        }
        for (inner, outer) in [(1.0, 1.001), (-1.0, -1.001)] {
            let (a, b) = (path.latent(inner).unwrap(), path.latent(outer).unwrap());
            let slope = (b - a) / (outer - inner);
            let before = (a - path.latent(0.999 * inner).unwrap()) / (0.001 * inner);
            assert!((slope - before).abs() < 0.02 * (1.0 + slope.abs()), "{slope} {before}");
        }
    }

    #[test]
    fn interior_spectra_are_predicted_better_than_by_linear_interpolation() {
        let spectra = Generator::Mixed.spectra(&REFERENCE_PPB, &reference_nm(), &Noise::default(), 0).unwrap();
        let axes = Axes::new(spectra.ppb(), spectra.nm()).unwrap();
        for fold in [1, 3] {
            let training = spectra.without(fold).unwrap();
            let model = LatentModel::fit(&training, axes).unwrap();
            let predicted = model.predict(spectra.ppb()[fold]).unwrap();
            let ours = rmse(spectra.row(fold), &predicted);
            let linear = rmse(spectra.row(fold), &Baseline::LinearClamped.predict(&training, spectra.ppb()[fold]));
            assert!(ours < linear, "fold {fold}: {ours} {linear}");
        }
        assert!(matches!(LatentModel::fit(&spectra, axes).unwrap().predict(f64::NAN), Err(Error::Range { .. })));
    }
}
