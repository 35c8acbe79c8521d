//! The Christoffel symbol on a grid of (c, l), valid for one metric only.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::error::{Error, in_range, increasing};
use crate::manifold::{Manifold, TensorJet};
use crate::metric::Metric;
use crate::random::Stream;

/// Most knots of an axis, and most values of a grid: 16 Mi values are 256 MiB with their derivatives.
pub(crate) const MAX_KNOTS: usize = 1 << 16;
pub(crate) const MAX_VALUES: usize = 1 << 24;

/// How values between knots are computed. Points outside the grid take the value at its border.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Interpolation {
    /// Bilinear from the four neighbours.
    Bilinear,
    /// Cubic Hermite in c with exact derivatives at the knots, linear in l.
    Hermite,
}

/// Gamma and dGamma/dc at knots [c, l] over [-1, 1]^2, from exact derivatives of the metric.
#[derive(Debug, Clone, PartialEq)]
pub struct ChristoffelGrid {
    version: u128,
    columns: GridColumns,
}

/// Neighbouring columns of a grid: all knots in c at some knots in l.
#[derive(Debug, Clone, PartialEq)]
pub struct GridColumns {
    pub(crate) knots: Arc<[f64]>,
    /// Position of the first column in the grid, number of columns, and that of the whole grid.
    pub(crate) first: usize,
    pub(crate) count: usize,
    pub(crate) total: usize,
    /// Gamma and dGamma/dc, [knot, column].
    pub(crate) gamma: Vec<f64>,
    pub(crate) slope: Vec<f64>,
}

/// A Christoffel grid, in memory or in a file.
pub trait GridSource: std::fmt::Debug + Sync {
    /// Version of the metric it was built from.
    fn version(&self) -> u128;

    /// Returns columns that contain the two neighbours of `l`.
    ///
    /// # Errors
    /// If they cannot be read, or are damaged.
    fn columns_at(&self, l: f64) -> Result<Arc<GridColumns>, Error>;

    /// Refuses to be used with another metric than it was built from.
    ///
    /// # Errors
    /// [`Error::Stale`].
    fn check_version(&self, metric: &dyn Metric) -> Result<(), Error> {
        let (found, expected) = (self.version(), metric.version());
        if found == expected { Ok(()) } else { Err(Error::Stale { object: "christoffel grid", found, expected }) }
    }
}

/// Errors of a grid against the metric at random points.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GridAccuracy {
    /// Points compared.
    pub points: usize,
    /// Largest |Gamma(grid) - Gamma(metric)|.
    pub max_error: f64,
    /// Root of the mean squared error.
    pub rms_error: f64,
    /// Number of uniform knots in c at which bilinear interpolation, whose error falls with the square of the spacing,
    /// would meet the threshold.
    pub recommended_knots: usize,
}

/// Knots `0..count` spread over [-1, 1].
fn uniform(count: usize) -> Vec<f64> {
    (0..count).map(|k| 2.0 * k as f64 / (count - 1) as f64 - 1.0).collect()
}

/// Position of `l` among `columns` columns over [-1, 1].
fn position(columns: usize, l: f64) -> f64 {
    let last = (columns - 1) as f64;
    ((l + 1.0) / 2.0 * last).clamp(0.0, last)
}

/// The column left of `l`, of `columns`; another one is right of it.
pub(crate) fn left_column(columns: usize, l: f64) -> usize {
    (position(columns, l) as usize).min(columns - 2)
}

impl ChristoffelGrid {
    /// The grid of `metric` with `rows` uniform knots in c and `columns` in l; the reference uses 2000 x 601.
    ///
    /// # Errors
    /// If an axis has fewer than 2 or more than 65,536 knots, or the grid more than 16 Mi values.
    pub fn build(metric: &dyn Metric, rows: usize, columns: usize) -> Result<Self, Error> {
        in_range("rows", rows as f64, 2.0, MAX_KNOTS as f64, "2 to 65,536")?;
        Self::over(metric, uniform(rows), columns)
    }

    fn over(metric: &dyn Metric, knots: Vec<f64>, columns: usize) -> Result<Self, Error> {
        increasing("knots", &knots, 2)?;
        in_range("columns", columns as f64, 2.0, MAX_KNOTS as f64, "2 to 65,536")?;
        in_range("grid values", (knots.len() * columns) as f64, 4.0, MAX_VALUES as f64, "at most 16,777,216")?;
        let wavelengths = uniform(columns);
        let (mut gamma, mut slope) = (Vec::new(), Vec::new());
        for &c in &knots {
            let points: Vec<(f64, f64)> = wavelengths.iter().map(|&l| (c, l)).collect();
            for jet in metric.jets(&points) {
                gamma.push(jet.gamma());
                slope.push(jet.gamma_derivative());
            }
        }
        let columns = GridColumns { knots: knots.into(), first: 0, count: columns, total: columns, gamma, slope };
        Ok(Self { version: metric.version(), columns })
    }

    /// A grid with non-uniform knots in c: intervals are halved until the bilinear error at their middles is at most
    /// `threshold` at every wavelength of the grid, or `most` knots are reached.
    ///
    /// # Errors
    /// If the threshold is not positive or a count is out of range.
    pub fn refined(metric: &dyn Metric, columns: usize, threshold: f64, most: usize) -> Result<Self, Error> {
        in_range("threshold", threshold, f64::MIN_POSITIVE, 1e6, "positive")?;
        in_range("most knots", most as f64, 2.0, MAX_KNOTS as f64, "2 to 65,536")?;
        let mut knots = uniform(17.min(most));
        loop {
            let grid = Self::over(metric, knots.clone(), columns)?;
            let wavelengths = uniform(columns);
            let mut added = Vec::new();
            for ends in knots.windows(2) {
                let middle = 0.5 * (ends[0] + ends[1]);
                let points: Vec<(f64, f64)> = wavelengths.iter().map(|&l| (middle, l)).collect();
                let error = |(jet, l): (crate::metric::MetricJet, &f64)| {
                    (jet.gamma() - grid.value(middle, *l, Interpolation::Bilinear).0).abs()
                };
                let worst = metric.jets(&points).into_iter().zip(&wavelengths).map(error).fold(0.0, f64::max);
                if worst > threshold {
                    added.push(middle);
                }
            }
            added.truncate(most - knots.len());
            if added.is_empty() {
                return Ok(grid);
            }
            knots.extend(added);
            knots.sort_by(f64::total_cmp);
        }
    }

    /// Knots in c.
    pub fn knots(&self) -> &[f64] {
        &self.columns.knots
    }

    /// Gamma and its derivative with respect to c at (c, l), both of the interpolant.
    pub fn value(&self, c: f64, l: f64, interpolation: Interpolation) -> (f64, f64) {
        self.columns.value(c, l, interpolation)
    }

    pub(crate) const fn all(&self) -> &GridColumns {
        &self.columns
    }

    pub(crate) const fn from_columns(version: u128, columns: GridColumns) -> Self {
        Self { version, columns }
    }

    /// Compares the grid with the metric at `points` random points (the reference: 1,000), for a largest error of
    /// `threshold`.
    ///
    /// # Errors
    /// [`Error::Stale`] if the metric has changed since the grid was built.
    pub fn accuracy(
        &self,
        metric: &dyn Metric,
        interpolation: Interpolation,
        points: usize,
        threshold: f64,
        seed: u64,
    ) -> Result<GridAccuracy, Error> {
        self.check_version(metric)?;
        let draws = Stream::new(seed, 4);
        let at = |i: usize| (2.0 * draws.uniform(2 * i as u64) - 1.0, 2.0 * draws.uniform(2 * i as u64 + 1) - 1.0);
        let places: Vec<(f64, f64)> = (0..points).map(at).collect();
        let (mut max_error, mut sum) = (0.0f64, 0.0);
        for (jet, (c, l)) in metric.jets(&places).iter().zip(&places) {
            let error = (jet.gamma() - self.value(*c, *l, interpolation).0).abs();
            max_error = max_error.max(error);
            sum += error * error;
        }
        let factor = (max_error / threshold).sqrt();
        let recommended_knots = ((self.knots().len() - 1) as f64 * factor).ceil().max(1.0) as usize + 1;
        Ok(GridAccuracy { points, max_error, rms_error: (sum / points as f64).sqrt(), recommended_knots })
    }
}

impl GridSource for ChristoffelGrid {
    fn version(&self) -> u128 {
        self.version
    }

    fn columns_at(&self, l: f64) -> Result<Arc<GridColumns>, Error> {
        let first = self.columns.left_column(l);
        Ok(Arc::new(self.columns.part(first, 2)))
    }
}

impl GridColumns {
    /// Position of `l` among the columns of the grid.
    fn position(&self, l: f64) -> f64 {
        position(self.total, l)
    }

    /// The column of the grid left of `l`; another one is right of it.
    pub(crate) fn left_column(&self, l: f64) -> usize {
        left_column(self.total, l)
    }

    /// Copies `count` columns from column `first` of the grid on.
    pub(crate) fn part(&self, first: usize, count: usize) -> Self {
        let of = |table: &[f64]| {
            let rows = table.chunks_exact(self.count);
            rows.flat_map(|row| row[first - self.first..first - self.first + count].iter().copied()).collect()
        };
        Self {
            knots: Arc::clone(&self.knots),
            first,
            count,
            total: self.total,
            gamma: of(&self.gamma),
            slope: of(&self.slope),
        }
    }

    /// Gamma and its derivative with respect to c at (c, l), both of the interpolant.
    /// `l` lies in or next to these columns, or outside of the grid.
    pub(crate) fn value(&self, c: f64, l: f64, interpolation: Interpolation) -> (f64, f64) {
        let rows = self.knots.len();
        let inside = c.clamp(self.knots[0], self.knots[rows - 1]);
        let i = self.knots.partition_point(|k| *k <= inside).saturating_sub(1).min(rows - 2);
        let h = self.knots[i + 1] - self.knots[i];
        let t = (inside - self.knots[i]) / h;
        let left = self.left_column(l);
        let u = self.position(l) - left as f64;
        let j = left - self.first;
        let along = |table: &[f64], i: usize| {
            let at = i * self.count + j;
            table[at] + u * (table[at + 1] - table[at])
        };
        let (a, b) = (along(&self.gamma, i), along(&self.gamma, i + 1));
        let outside = inside != c;
        match interpolation {
            Interpolation::Bilinear => (a + t * (b - a), if outside { 0.0 } else { (b - a) / h }),
            Interpolation::Hermite => {
                let (p, q) = (h * along(&self.slope, i), h * along(&self.slope, i + 1));
                let (cubic, square) = (2.0 * (a - b) + p + q, 3.0 * (b - a) - 2.0 * p - q);
                let value = a + t * (p + t * (square + t * cubic));
                let derivative = (p + t * (2.0 * square + 3.0 * t * cubic)) / h;
                (value, if outside { 0.0 } else { derivative })
            }
        }
    }
}

/// A grid as a manifold of one dimension at one wavelength.
///
/// A grid holds the connection only. The tensor is a local one with g = 1 at every point and the derivatives that give
/// this connection: lengths and the invariant of a path need the metric itself.
#[derive(Debug, Clone, Copy)]
pub(crate) struct GridLine<'a> {
    pub(crate) columns: &'a GridColumns,
    pub(crate) wavelength: f64,
    pub(crate) interpolation: Interpolation,
}

impl Manifold for GridLine<'_> {
    fn dimension(&self) -> usize {
        1
    }

    fn jet(&self, x: &[f64]) -> TensorJet {
        let (gamma, slope) = self.columns.value(x[0], self.wavelength, self.interpolation);
        let first = 2.0 * gamma;
        TensorJet { g: vec![1.0], first: vec![first], second: vec![2.0 * slope + first * first] }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metric::LinearRootMetric;

    #[test]
    fn affine_grids_are_exact_everywhere_and_clamped_outside() {
        let knots = uniform(5);
        let value = |c: f64, l: f64| 1.0 + 2.0 * c + 3.0 * l;
        let gamma: Vec<f64> = knots.iter().flat_map(|&c| uniform(4).into_iter().map(move |l| value(c, l))).collect();
        let slope = vec![2.0; gamma.len()];
        let columns = GridColumns { knots: knots.into(), first: 0, count: 4, total: 4, gamma, slope };
        let grid = ChristoffelGrid { version: 0, columns };
        for interpolation in [Interpolation::Bilinear, Interpolation::Hermite] {
            for i in 0..100u64 {
                let draw = |k| 2.0 * Stream::new(1, 1).uniform(2 * i + k) - 1.0;
                let (c, l) = (draw(0), draw(1));
                let (g, slope) = grid.value(c, l, interpolation);
                assert!((g - value(c, l)).abs() < 1e-14 && (slope - 2.0).abs() < 1e-13);
            }
            for (c, l) in [(-1.0, -1.0), (0.5, 1.0), (1.0, 1.0 / 3.0)] {
                assert!((grid.value(c, l, interpolation).0 - value(c, l)).abs() < 1e-14, "knot {c} {l}");
            }
            assert!((grid.value(3.0, -5.0, interpolation).0 - value(1.0, -1.0)).abs() < 1e-14);
        }
    }

    #[test]
    fn refinement_meets_its_threshold_and_hermite_is_more_accurate() {
        let metric = LinearRootMetric { depth: 0.8 };
        let grid = ChristoffelGrid::refined(&metric, 601, 1e-3, 4000).unwrap();
        let bilinear = grid.accuracy(&metric, Interpolation::Bilinear, 1000, 1e-3, 1).unwrap();
        assert!(bilinear.max_error < 2e-3 && grid.knots().len() < 1000, "{bilinear:?} {}", grid.knots().len());
        let hermite = grid.accuracy(&metric, Interpolation::Hermite, 1000, 1e-3, 1).unwrap();
        assert!(hermite.rms_error < bilinear.rms_error);
        let spacing = |at: usize| grid.knots()[at + 1] - grid.knots()[at];
        assert!(spacing(0) < spacing(grid.knots().len() / 2), "knots are dense where Gamma bends");
    }
}
