//! Simple predictions that a model must outperform, from the same training spectra.

use serde::{Deserialize, Serialize};

use crate::spectra::Spectra;

/// A simple prediction of a spectrum at one concentration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Baseline {
    /// Arithmetic mean of the training spectra.
    MeanOfOthers,
    /// Spectrum of the nearest concentration; of two equally near the lower one.
    Nearest,
    /// Piecewise linear in concentration, constant outside.
    LinearClamped,
    /// Piecewise linear, the last segment continued.
    LinearExtrapolated,
    /// Monotone cubic Hermite (Fritsch and Carlson), the last piece continued.
    Pchip,
    /// Gaussian process per wavelength with a squared exponential kernel; its length is chosen by inner leave-one-out.
    RbfGp,
}

/// Kernel lengths that [`Baseline::RbfGp`] chooses from, in ppb.
pub const GP_LENGTHS: [f64; 3] = [10.0, 20.0, 40.0];
/// Variance of the noise relative to the kernel's.
const GP_NOISE: f64 = 1e-3;

impl Baseline {
    /// All six, in the order of the report.
    pub const ALL: [Self; 6] =
        [Self::MeanOfOthers, Self::Nearest, Self::LinearClamped, Self::LinearExtrapolated, Self::Pchip, Self::RbfGp];

    /// Name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::MeanOfOthers => "mean of others",
            Self::Nearest => "nearest",
            Self::LinearClamped => "linear, clamped",
            Self::LinearExtrapolated => "linear, extrapolated",
            Self::Pchip => "pchip",
            Self::RbfGp => "RBF-GP",
        }
    }

    /// Predicts the spectrum at `ppb` from at least two training spectra.
    ///
    /// Every baseline is linear in the training spectra, so it is a weight per spectrum, the same at all wavelengths,
    /// except for pchip.
    pub fn predict(self, training: &Spectra, ppb: f64) -> Vec<f64> {
        let c = training.ppb();
        match self {
            Self::MeanOfOthers => combine(training, &vec![1.0 / c.len() as f64; c.len()]),
            Self::Nearest => {
                let distance = |i: &usize| (c[*i] - ppb).abs();
                let nearest = (0..c.len()).min_by(|a, b| distance(a).total_cmp(&distance(b))).unwrap_or(0);
                training.row(nearest).to_vec()
            }
            Self::LinearClamped => combine(training, &linear_weights(c, ppb.clamp(c[0], c[c.len() - 1]))),
            Self::LinearExtrapolated => combine(training, &linear_weights(c, ppb)),
            Self::Pchip => pchip(training, ppb),
            Self::RbfGp => gp_prediction(training, ppb, gp_length(training)),
        }
    }
}

fn combine(training: &Spectra, weights: &[f64]) -> Vec<f64> {
    let mut out = vec![0.0; training.nm().len()];
    for (i, w) in weights.iter().enumerate() {
        out.iter_mut().zip(training.row(i)).for_each(|(o, a)| *o += w * a);
    }
    out
}

/// The segment of `c` for `ppb`: the last one that starts at or below it, or the first.
fn segment(c: &[f64], ppb: f64) -> usize {
    c.partition_point(|x| *x <= ppb).saturating_sub(1).min(c.len() - 2)
}

fn linear_weights(c: &[f64], ppb: f64) -> Vec<f64> {
    let k = segment(c, ppb);
    let t = (ppb - c[k]) / (c[k + 1] - c[k]);
    let mut weights = vec![0.0; c.len()];
    (weights[k], weights[k + 1]) = (1.0 - t, t);
    weights
}

fn pchip(training: &Spectra, ppb: f64) -> Vec<f64> {
    let c = training.ppb();
    let h: Vec<f64> = c.windows(2).map(|w| w[1] - w[0]).collect();
    let k = segment(c, ppb);
    let t = (ppb - c[k]) / h[k];
    let column = |j: usize| {
        let a: Vec<f64> = (0..c.len()).map(|i| training.row(i)[j]).collect();
        let d: Vec<f64> = (0..h.len()).map(|i| (a[i + 1] - a[i]) / h[i]).collect();
        let (left, right) = (pchip_slope(&h, &d, k), pchip_slope(&h, &d, k + 1));
        let (t2, t3) = (t * t, t * t * t);
        (2.0 * t3 - 3.0 * t2 + 1.0) * a[k]
            + (t3 - 2.0 * t2 + t) * h[k] * left
            + (3.0 * t2 - 2.0 * t3) * a[k + 1]
            + (t3 - t2) * h[k] * right
    };
    (0..training.nm().len()).map(column).collect()
}

/// Slope at knot `k`, from interval widths `h` and secants `d`: as `scipy.interpolate.PchipInterpolator`.
fn pchip_slope(h: &[f64], d: &[f64], k: usize) -> f64 {
    let end = |h0: f64, h1: f64, d0: f64, d1: f64| {
        let slope = ((2.0 * h0 + h1) * d0 - h0 * d1) / (h0 + h1);
        if slope * d0 <= 0.0 {
            0.0
        } else if d0 * d1 <= 0.0 && slope.abs() > 3.0 * d0.abs() {
            3.0 * d0
        } else {
            slope
        }
    };
    let n = h.len();
    if n == 1 {
        return d[0];
    }
    if k == 0 {
        return end(h[0], h[1], d[0], d[1]);
    }
    if k == n {
        return end(h[n - 1], h[n - 2], d[n - 1], d[n - 2]);
    }
    if d[k - 1] * d[k] <= 0.0 {
        return 0.0;
    }
    let (w1, w2) = (2.0 * h[k] + h[k - 1], h[k] + 2.0 * h[k - 1]);
    (w1 + w2) / (w1 / d[k - 1] + w2 / d[k])
}

/// Weights of the training spectra in `m + k (K + noise I)^-1 (a - m)`, m the mean of the training spectra.
fn gp_weights(c: &[f64], ppb: f64, length: f64) -> Vec<f64> {
    let n = c.len();
    let kernel = |a: f64, b: f64| (-(a - b).powi(2) / (2.0 * length * length)).exp();
    let mut matrix: Vec<Vec<f64>> = (0..n).map(|i| (0..n).map(|j| kernel(c[i], c[j])).collect()).collect();
    (0..n).for_each(|i| matrix[i][i] += GP_NOISE);
    let weights = solve(matrix, c.iter().map(|x| kernel(*x, ppb)).collect());
    let rest = (1.0 - weights.iter().sum::<f64>()) / n as f64;
    weights.iter().map(|w| w + rest).collect()
}

/// The prediction of [`Baseline::RbfGp`] at `ppb` with a kernel length in ppb.
pub fn gp_prediction(training: &Spectra, ppb: f64, length: f64) -> Vec<f64> {
    combine(training, &gp_weights(training.ppb(), ppb, length))
}

/// Solves a small symmetric positive definite system by elimination.
pub(crate) fn solve(mut a: Vec<Vec<f64>>, mut b: Vec<f64>) -> Vec<f64> {
    let n = b.len();
    for k in 0..n {
        let pivot = (k..n).max_by(|&x, &y| a[x][k].abs().total_cmp(&a[y][k].abs())).unwrap_or(k);
        a.swap(k, pivot);
        b.swap(k, pivot);
        for i in k + 1..n {
            let factor = a[i][k] / a[k][k];
            let (upper, lower) = a.split_at_mut(i);
            lower[0].iter_mut().zip(&upper[k]).skip(k).for_each(|(x, y)| *x -= factor * y);
            b[i] -= factor * b[k];
        }
    }
    for k in (0..n).rev() {
        let known: f64 = (k + 1..n).map(|j| a[k][j] * b[j]).sum();
        b[k] = (b[k] - known) / a[k][k];
    }
    b
}

/// The kernel length with the least squared error over an inner leave-one-out of the training spectra; the first of
/// the list with fewer than 3 spectra.
pub fn gp_length(training: &Spectra) -> f64 {
    let error = |length: f64| {
        let mut sum = 0.0;
        for i in 0..training.ppb().len() {
            let Ok(rest) = training.without(i) else { return 0.0 };
            let predicted = combine(&rest, &gp_weights(rest.ppb(), training.ppb()[i], length));
            sum += predicted.iter().zip(training.row(i)).map(|(p, a)| (p - a).powi(2)).sum::<f64>();
        }
        sum
    };
    let mut best = (f64::INFINITY, GP_LENGTHS[0]);
    for length in GP_LENGTHS {
        let sum = error(length);
        if sum < best.0 {
            best = (sum, length);
        }
    }
    best.1
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::generate::{Generator, Noise};
    use crate::measure::{r2, rmse};
    use crate::spectra::{REFERENCE_PPB, reference_nm};

    /// Per fold R2 and RMSE, without noise on S4; the Gaussian process with L = 20.
    const TABLE: [(Baseline, [f64; 6], [f64; 6], f64); 5] = [
        (
            Baseline::MeanOfOthers,
            [0.7066, 0.9034, 0.9435, 0.9389, 0.9227, 0.7053],
            [0.0856, 0.0518, 0.0430, 0.0482, 0.0561, 0.1076],
            0.0654,
        ),
        (
            Baseline::LinearClamped,
            [0.9144, 0.9964, 0.9953, 0.9965, 0.9864, 0.8010],
            [0.0462, 0.0099, 0.0124, 0.0116, 0.0236, 0.0884],
            0.0320,
        ),
        (
            Baseline::LinearExtrapolated,
            [0.9842, 0.9964, 0.9953, 0.9965, 0.9864, 0.8727],
            [0.0199, 0.0099, 0.0124, 0.0116, 0.0236, 0.0707],
            0.0247,
        ),
        (
            Baseline::Pchip,
            [0.9887, 0.9992, 0.9990, 0.9981, 0.9931, 0.8985],
            [0.0168, 0.0046, 0.0058, 0.0084, 0.0168, 0.0631],
            0.0193,
        ),
        (
            Baseline::RbfGp,
            [0.9896, 0.9996, 0.9999, 0.9999, 0.9990, 0.9114],
            [0.0161, 0.0034, 0.0014, 0.0018, 0.0064, 0.0590],
            0.0147,
        ),
    ];

    #[test]
    fn baselines_on_mixed_spectra_equal_the_reference_table() {
        let spectra = Generator::Mixed.spectra(&REFERENCE_PPB, &reference_nm(), &Noise::default(), 0).unwrap();
        for (baseline, r2s, rmses, mean) in TABLE {
            let mut sum = 0.0;
            for fold in 0..6 {
                let training = spectra.without(fold).unwrap();
                let predicted = match baseline {
                    Baseline::RbfGp => gp_prediction(&training, REFERENCE_PPB[fold], 20.0),
                    _ => baseline.predict(&training, REFERENCE_PPB[fold]),
                };
                let (r, e) = (r2(spectra.row(fold), &predicted).unwrap(), rmse(spectra.row(fold), &predicted));
                sum += e / 6.0;
                let near = |a: f64, b: f64| (a - b).abs() < 6e-5;
                assert!(near(r, r2s[fold]) && near(e, rmses[fold]), "{} fold {fold}: {r:.5} {e:.5}", baseline.name());
            }
            assert!((sum - mean).abs() < 6e-5, "{}: {sum}", baseline.name());
        }
    }

    #[test]
    fn kernel_length_is_chosen_by_inner_leave_one_out() {
        let spectra = Generator::Mixed.spectra(&REFERENCE_PPB, &reference_nm(), &Noise::default(), 0).unwrap();
        let lengths: Vec<f64> = (0..6).map(|fold| gp_length(&spectra.without(fold).unwrap())).collect();
        assert!(lengths.iter().all(|l| GP_LENGTHS.contains(l)) && lengths.contains(&40.0), "{lengths:?}");
    }

    #[test]
    fn linear_baselines_are_exact_on_linear_spectra() {
        let spectra = Generator::Linear.spectra(&REFERENCE_PPB, &reference_nm(), &Noise::default(), 0).unwrap();
        for (fold, ppb) in REFERENCE_PPB.into_iter().enumerate() {
            let training = spectra.without(fold).unwrap();
            let predicted = Baseline::LinearExtrapolated.predict(&training, ppb);
            assert!(rmse(spectra.row(fold), &predicted) < 1e-15);
            assert_eq!(Baseline::Nearest.predict(&training, ppb), training.row(fold.saturating_sub(1)));
        }
    }
}
