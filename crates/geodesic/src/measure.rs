//! Scores of a predicted spectrum.

use serde::{Deserialize, Serialize};

use crate::baseline::solve;

/// Scores of one predicted spectrum. A score that does not exist for the data is `None`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Scores {
    /// `1 - sum (y - p)^2 / sum (y - mean y)^2`; none for a flat spectrum.
    pub r2: Option<f64>,
    /// Root of the mean squared error.
    pub rmse: f64,
    /// Mean absolute error.
    pub mae: f64,
    /// RMSE over 200-400, 400-500 and 500-800 nm; none for a band without wavelengths.
    pub band_rmse: [Option<f64>; 3],
    /// Distance of the peaks at 500 nm and above, in nm; none with fewer than 11 wavelengths there.
    pub peak_error_nm: Option<f64>,
    /// Cosine of the angle between the spectra; none if one is zero.
    pub cosine: Option<f64>,
    /// That angle in radians.
    pub spectral_angle: Option<f64>,
    /// Pearson correlation of the first derivatives; none if one is constant.
    pub derivative_correlation: Option<f64>,
}

impl Scores {
    /// Scores `predicted` against `truth` on increasing wavelengths `nm`; the three have the same length.
    pub fn new(nm: &[f64], truth: &[f64], predicted: &[f64]) -> Self {
        let cosine = cosine(truth, predicted);
        let derivative =
            |a: &[f64]| -> Vec<f64> { (1..a.len()).map(|i| (a[i] - a[i - 1]) / (nm[i] - nm[i - 1])).collect() };
        Self {
            r2: r2(truth, predicted),
            rmse: rmse(truth, predicted),
            mae: truth.iter().zip(predicted).map(|(y, p)| (y - p).abs()).sum::<f64>() / truth.len() as f64,
            band_rmse: [(200.0, 400.0), (400.0, 500.0), (500.0, 800.1)].map(|(low, high)| {
                let band: Vec<usize> = (0..nm.len()).filter(|&i| nm[i] >= low && nm[i] < high).collect();
                let part = |a: &[f64]| band.iter().map(|&i| a[i]).collect::<Vec<_>>();
                (!band.is_empty()).then(|| rmse(&part(truth), &part(predicted)))
            }),
            peak_error_nm: peak(nm, truth).zip(peak(nm, predicted)).map(|(a, b)| (a - b).abs()),
            cosine,
            spectral_angle: cosine.map(|c| c.clamp(-1.0, 1.0).acos()),
            derivative_correlation: pearson(&derivative(truth), &derivative(predicted)),
        }
    }
}

/// Coefficient of determination over wavelengths; none for a flat truth.
pub fn r2(truth: &[f64], predicted: &[f64]) -> Option<f64> {
    let mean = truth.iter().sum::<f64>() / truth.len() as f64;
    let total: f64 = truth.iter().map(|y| (y - mean).powi(2)).sum();
    let scale: f64 = truth.iter().map(|y| y * y).sum();
    let residual: f64 = truth.iter().zip(predicted).map(|(y, p)| (y - p).powi(2)).sum();
    // A flat spectrum has a spread of rounding errors only.
    (total > 1e-24 * scale).then(|| 1.0 - residual / total)
}

/// Root of the mean squared difference.
pub fn rmse(truth: &[f64], predicted: &[f64]) -> f64 {
    (truth.iter().zip(predicted).map(|(y, p)| (y - p).powi(2)).sum::<f64>() / truth.len() as f64).sqrt()
}

fn cosine(a: &[f64], b: &[f64]) -> Option<f64> {
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(x, y)| x * y).sum::<f64>();
    let norms = (dot(a, a) * dot(b, b)).sqrt();
    (norms > 0.0).then(|| dot(a, b) / norms)
}

fn pearson(a: &[f64], b: &[f64]) -> Option<f64> {
    let centred = |a: &[f64]| -> Vec<f64> {
        let mean = a.iter().sum::<f64>() / a.len() as f64;
        a.iter().map(|x| x - mean).collect()
    };
    cosine(&centred(a), &centred(b))
}

/// Half width of the smoothing window, in samples.
const HALF: usize = 5;

/// Wavelength of the largest value at 500 nm and above, after Savitzky-Golay smoothing (11 samples, cubic), refined by
/// a parabola. Below 500 nm absorbance often rises towards the end of the range, where every method finds the maximum.
pub fn peak(nm: &[f64], spectrum: &[f64]) -> Option<f64> {
    let first = nm.partition_point(|w| *w < 500.0);
    let count = nm.len() - first;
    if count < 2 * HALF + 1 {
        return None;
    }
    let smooth: Vec<f64> = (0..count)
        .map(|i| {
            let start = first + i.saturating_sub(HALF).min(count - 2 * HALF - 1);
            local_cubic(&spectrum[start..=start + 2 * HALF], (first + i - start) as f64 - HALF as f64)
        })
        .collect();
    let top = (0..count).max_by(|&a, &b| smooth[a].total_cmp(&smooth[b])).unwrap_or(0);
    if top == 0 || top + 1 == count {
        return Some(nm[first + top]);
    }
    let (a, b, c) = (smooth[top - 1], smooth[top], smooth[top + 1]);
    let bend = a - 2.0 * b + c;
    let shift = if bend < 0.0 { 0.5 * (a - c) / bend } else { 0.0 };
    let step = 0.5 * (nm[first + top + 1] - nm[first + top - 1]);
    Some(nm[first + top] + shift * step)
}

/// Value at `x`, in samples from the middle, of the cubic that fits a window of 11 samples.
fn local_cubic(window: &[f64], x: f64) -> f64 {
    let position = |i: usize| (i as f64 - HALF as f64) / HALF as f64;
    let sum = |f: &dyn Fn(usize) -> f64| (0..window.len()).map(f).sum::<f64>();
    let matrix = (0..4).map(|r: i32| (0..4).map(|c: i32| sum(&|i| position(i).powi(r + c))).collect()).collect();
    let right = (0..4).map(|r: i32| sum(&|i| position(i).powi(r) * window[i])).collect();
    let x = x / HALF as f64;
    solve(matrix, right).iter().rev().fold(0.0, |value, c| value * x + c)
}

/// Noise level from two replicate draws: their RMSE over sqrt 2.
pub fn noise_level(first: &[f64], second: &[f64]) -> f64 {
    rmse(first, second) / std::f64::consts::SQRT_2
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::generate::Generator;
    use crate::spectra::{REFERENCE_PPB, reference_nm};

    #[test]
    fn flat_spectra_have_no_r2_and_peaks_ignore_the_short_wave_edge() {
        let nm = reference_nm();
        assert_eq!(r2(&[0.1; 601], &[0.2; 601]), None);
        for (ppb, expected) in REFERENCE_PPB.iter().zip([525.0, 529.0, 532.0, 536.0, 540.0, 635.0]) {
            let spectrum: Vec<f64> = nm.iter().map(|w| Generator::Mixed.absorbance(*ppb, *w)).collect();
            let found = peak(&nm, &spectrum).unwrap();
            assert!((found - expected).abs() < 1.0, "{ppb} ppb: {found}");
        }
    }

    #[test]
    fn scores_equal_values_computed_by_hand() {
        let scores = Scores::new(&[300.0, 450.0, 600.0], &[1.0, 2.0, 3.0], &[1.0, 2.0, 4.0]);
        assert_eq!(scores.r2, Some(0.5));
        assert!((scores.rmse - (1.0f64 / 3.0).sqrt()).abs() < 1e-15 && (scores.mae - 1.0 / 3.0).abs() < 1e-15);
        assert_eq!(scores.band_rmse, [Some(0.0), Some(0.0), Some(1.0)]);
        assert!((scores.cosine.unwrap() - 17.0 / (14.0f64 * 21.0).sqrt()).abs() < 1e-15);
        assert_eq!(scores.peak_error_nm, None);
        assert_eq!(scores.derivative_correlation, None);
        assert!((noise_level(&[0.0, 0.0], &[2.0, 2.0]) - 2.0f64.sqrt()).abs() < 1e-15);
    }
}
