//! Path features of all pairs in closed form.
//!
//! `sqrt(g) c'` is constant along a geodesic of `ds^2 = g dc^2`. With `s(c) = integral sqrt(g) dc` the features of a
//! pair are differences of `S = integral sqrt(g)` and `M = integral c sqrt(g)` between break points, and one minimum.
//! Each interval between break points is integrated once per wavelength, with a Gauss-Legendre rule.
#![allow(clippy::needless_range_loop, reason = "an index runs over several arrays of the same shape")]

use crate::error::{Error, in_range, increasing};
use crate::metric::{Metric, MetricNetwork, MetricPass};
use crate::quadrature::gauss_legendre;

/// Points at which the metric is evaluated: per wavelength, `nodes` in each interval between break points, then the
/// break points.
#[derive(Debug, Clone, PartialEq)]
pub struct Lattice {
    breaks: Vec<f64>,
    wavelengths: Vec<f64>,
    nodes: usize,
    softness: Option<f64>,
    /// c of the points of one wavelength.
    points: Vec<f64>,
    /// Quadrature weight of each node of one wavelength, in c.
    weights: Vec<f64>,
}

/// Features of geodesics, each [pair, wavelength].
#[derive(Debug, Clone, PartialEq)]
pub struct Features {
    /// `s1 - s0`: the signed length, and the constant `sqrt(g) c'`.
    pub displacement: Vec<f64>,
    /// Mean of c over time.
    pub mean: Vec<f64>,
    /// Largest |c'| on the path.
    pub velocity: Vec<f64>,
    /// c' at the start, signed.
    pub initial_velocity: Vec<f64>,
}

/// Gradients with respect to [`Features`], each [pair, wavelength].
#[derive(Debug, Clone, PartialEq)]
pub struct FeatureAdjoint {
    /// With respect to the path length `|displacement|`.
    pub length: Vec<f64>,
    /// With respect to the mean of c.
    pub mean: Vec<f64>,
    /// With respect to the largest velocity.
    pub velocity: Vec<f64>,
}

/// A forward pass over a [`MetricNetwork`], for its backward pass.
#[derive(Debug)]
pub struct FeaturePass {
    metric: MetricPass,
    root: Vec<f64>,
    pairs: Vec<(usize, usize)>,
    /// The features.
    pub features: Features,
}

/// Minimum of sqrt(g) over a set of points, hard or soft.
#[derive(Clone, Copy)]
struct Minimum {
    least: f64,
    /// Position of the least value among the points of a wavelength.
    at: usize,
    /// `sum exp(-(f - least) / softness)`; only for a soft minimum.
    sum: f64,
    count: f64,
}

impl Lattice {
    /// A lattice over break points `breaks` and `wavelengths`, both normalised and strictly increasing, with `nodes`
    /// (1 to 64) per interval. 8 nodes reach 5e-13 on the stress metric.
    ///
    /// # Errors
    /// If an axis is not increasing, there are fewer than 2 break points, or `nodes` is out of range.
    pub fn new(breaks: &[f64], wavelengths: &[f64], nodes: usize) -> Result<Self, Error> {
        increasing("break points", breaks, 2)?;
        increasing("wavelengths", wavelengths, 1)?;
        in_range("nodes", nodes as f64, 1.0, 64.0, "1 to 64")?;
        let rule = gauss_legendre(nodes);
        let (mut points, mut weights) = (Vec::new(), Vec::new());
        for ends in breaks.windows(2) {
            let (middle, half) = (0.5 * (ends[0] + ends[1]), 0.5 * (ends[1] - ends[0]));
            points.extend(rule.iter().map(|(x, _)| middle + half * x));
            weights.extend(rule.iter().map(|(_, w)| half * w));
        }
        points.extend_from_slice(breaks);
        Ok(Self { breaks: breaks.to_vec(), wavelengths: wavelengths.to_vec(), nodes, softness: None, points, weights })
    }

    /// Replaces the minimum of sqrt(g) in the largest velocity by `-T ln mean exp(-f / T)`, whose gradient does not
    /// jump when the minimiser jumps. The reference uses T = 1e-3.
    ///
    /// # Errors
    /// If the temperature is not within [1e-9, 1].
    pub fn soft_minimum(mut self, temperature: f64) -> Result<Self, Error> {
        in_range("temperature", temperature, 1e-9, 1.0, "in [1e-9, 1]")?;
        self.softness = Some(temperature);
        Ok(self)
    }

    /// The break points.
    pub fn breaks(&self) -> &[f64] {
        &self.breaks
    }

    /// The wavelengths.
    pub fn wavelengths(&self) -> &[f64] {
        &self.wavelengths
    }

    /// c of the points of one wavelength: the nodes of all intervals, then the break points.
    pub(crate) fn points(&self) -> &[f64] {
        &self.points
    }

    /// Quadrature weight of each node of one wavelength, in c.
    pub(crate) fn weights(&self) -> &[f64] {
        &self.weights
    }

    /// Nodes per interval.
    pub(crate) const fn nodes(&self) -> usize {
        self.nodes
    }

    /// sqrt(g) at all points, [wavelength, point].
    pub(crate) fn root(&self, metric: &dyn Metric) -> Vec<f64> {
        let mut root = metric.values(&self.inputs());
        root.iter_mut().for_each(|g| *g = g.sqrt());
        root
    }

    /// g at all points, with what a backward pass needs.
    pub(crate) fn metric_pass(&self, metric: &MetricNetwork) -> MetricPass {
        metric.forward(1, self.inputs().into_iter().flat_map(|(c, l)| [c, l]).collect())
    }

    /// All ordered pairs of different break points.
    pub fn all_pairs(&self) -> Vec<(usize, usize)> {
        let n = self.breaks.len();
        (0..n).flat_map(|i| (0..n).filter(move |j| *j != i).map(move |j| (i, j))).collect()
    }

    /// Number of metric evaluations of one forward pass.
    pub fn evaluations(&self) -> usize {
        self.points.len() * self.wavelengths.len()
    }

    fn inputs(&self) -> Vec<(f64, f64)> {
        self.wavelengths.iter().flat_map(|&l| self.points.iter().map(move |&c| (c, l))).collect()
    }

    /// Features of `pairs` of break points.
    ///
    /// # Panics
    /// If a pair names a break point that does not exist, or one point twice.
    pub fn features(&self, metric: &dyn Metric, pairs: &[(usize, usize)]) -> Features {
        self.features_of_root(&self.root(metric), pairs)
    }

    /// As [`features`](Self::features), keeping what [`backward`](Self::backward) needs.
    pub fn forward(&self, metric: &MetricNetwork, pairs: &[(usize, usize)]) -> FeaturePass {
        let pass = self.metric_pass(metric);
        let root: Vec<f64> = pass.g.iter().map(|g| g.sqrt()).collect();
        let features = self.features_of_root(&root, pairs);
        FeaturePass { metric: pass, root, pairs: pairs.to_vec(), features }
    }

    fn intervals(&self) -> usize {
        self.breaks.len() - 1
    }

    /// Cumulative integrals of sqrt(g) and c sqrt(g) from the first break point to each.
    fn integrals(&self, root: &[f64], sums: &mut [(f64, f64)]) {
        let mut total = (0.0, 0.0);
        sums[0] = total;
        for (i, sum) in sums[1..].iter_mut().enumerate() {
            for q in i * self.nodes..(i + 1) * self.nodes {
                let part = self.weights[q] * root[q];
                total = (total.0 + part, total.1 + part * self.points[q]);
            }
            *sum = total;
        }
    }

    /// The points of interval `i`: its nodes and both ends.
    fn interval_points(&self, i: usize) -> impl Iterator<Item = usize> + use<> {
        let ends = self.intervals() * self.nodes + i;
        (i * self.nodes..(i + 1) * self.nodes).chain(ends..ends + 2)
    }

    fn interval_minimum(&self, root: &[f64], i: usize) -> Minimum {
        let mut minimum = Minimum { least: f64::INFINITY, at: 0, sum: 0.0, count: 0.0 };
        for p in self.interval_points(i) {
            if root[p] < minimum.least {
                (minimum.least, minimum.at) = (root[p], p);
            }
        }
        if let Some(t) = self.softness {
            for p in self.interval_points(i) {
                minimum.sum += (-(root[p] - minimum.least) / t).exp();
                minimum.count += 1.0;
            }
        }
        minimum
    }

    fn path_minimum(&self, intervals: &[Minimum]) -> Minimum {
        let mut path = intervals[0];
        for next in &intervals[1..] {
            let least = path.least.min(next.least);
            if let Some(t) = self.softness {
                path.sum = path.sum * (-(path.least - least) / t).exp() + next.sum * (-(next.least - least) / t).exp();
                path.count += next.count;
            }
            if next.least < path.least {
                path.at = next.at;
            }
            path.least = least;
        }
        path
    }

    /// The value of a minimum: itself, or the soft one.
    fn minimum_value(&self, minimum: Minimum) -> f64 {
        match self.softness {
            Some(t) => minimum.least - t * (minimum.sum / minimum.count).ln(),
            None => minimum.least,
        }
    }

    fn features_of_root(&self, root: &[f64], pairs: &[(usize, usize)]) -> Features {
        let (count, stride) = (self.wavelengths.len(), self.points.len());
        let empty = vec![0.0; pairs.len() * count];
        let mut out = Features {
            displacement: empty.clone(),
            mean: empty.clone(),
            velocity: empty.clone(),
            initial_velocity: empty,
        };
        let mut sums = vec![(0.0, 0.0); self.breaks.len()];
        for (w, root) in root.chunks_exact(stride).enumerate() {
            self.integrals(root, &mut sums);
            let minima: Vec<Minimum> = (0..self.intervals()).map(|i| self.interval_minimum(root, i)).collect();
            for (p, &(i, j)) in pairs.iter().enumerate() {
                let k = sums[j].0 - sums[i].0;
                let least = self.minimum_value(self.path_minimum(&minima[i.min(j)..i.max(j)]));
                let at = p * count + w;
                out.displacement[at] = k;
                out.mean[at] = (sums[j].1 - sums[i].1) / k;
                out.velocity[at] = k.abs() / least;
                out.initial_velocity[at] = k / root[self.weights.len() + i];
            }
        }
        out
    }

    /// Adds the gradient with respect to the metric's parameters to `gradient`.
    ///
    /// # Panics
    /// If a length differs from what the pass implies.
    pub fn backward(&self, metric: &MetricNetwork, pass: &FeaturePass, adjoint: &FeatureAdjoint, gradient: &mut [f64]) {
        let mut to_root = vec![0.0; pass.root.len()];
        let stride = self.points.len();
        for (w, (root, out)) in pass.root.chunks_exact(stride).zip(to_root.chunks_exact_mut(stride)).enumerate() {
            self.backward_wavelength(w, root, pass, adjoint, out);
        }
        // d sqrt(g) = dg / (2 sqrt(g))
        to_root.iter_mut().zip(&pass.root).for_each(|(a, f)| *a /= 2.0 * f);
        metric.backward(&pass.metric, &to_root, gradient);
    }

    fn backward_wavelength(
        &self,
        w: usize,
        root: &[f64],
        pass: &FeaturePass,
        adjoint: &FeatureAdjoint,
        out: &mut [f64],
    ) {
        let count = self.wavelengths.len();
        let minima: Vec<Minimum> = (0..self.intervals()).map(|i| self.interval_minimum(root, i)).collect();
        // Adjoints of the integrals up to each break point.
        let mut sums = vec![(0.0, 0.0); self.breaks.len()];
        for (p, &(i, j)) in pass.pairs.iter().enumerate() {
            let at = p * count + w;
            let (k, mean) = (pass.features.displacement[at], pass.features.mean[at]);
            let path = self.path_minimum(&minima[i.min(j)..i.max(j)]);
            let least = self.minimum_value(path);
            let to_velocity = adjoint.velocity[at];
            let to_k = k.signum() * (adjoint.length[at] + to_velocity / least) - adjoint.mean[at] * mean / k;
            let to_m = adjoint.mean[at] / k;
            sums[j] = (sums[j].0 + to_k, sums[j].1 + to_m);
            sums[i] = (sums[i].0 - to_k, sums[i].1 - to_m);
            let to_least = -to_velocity * k.abs() / (least * least);
            match self.softness {
                None => out[path.at] += to_least,
                Some(t) => {
                    for q in (i.min(j)..i.max(j)).flat_map(|i| self.interval_points(i)) {
                        out[q] += to_least * (-(root[q] - path.least) / t).exp() / path.sum;
                    }
                }
            }
        }
        let mut later = (0.0, 0.0);
        for i in (0..self.intervals()).rev() {
            later = (later.0 + sums[i + 1].0, later.1 + sums[i + 1].1);
            for q in i * self.nodes..(i + 1) * self.nodes {
                out[q] += self.weights[q] * (later.0 + later.1 * self.points[q]);
            }
        }
    }
}

#[cfg(test)]
#[path = "closed_tests.rs"]
mod tests;
