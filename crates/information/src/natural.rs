//! The natural gradient `(F + d I)^-1 g`.

use nalgebra::{DMatrix, DVector};

use crate::Error;

/// Returns `(F + damping I)^-1 gradient` for `F = (1/N) sum s s^T` over scores (samples x parameters, row-major).
///
/// With fewer samples than parameters it solves the samples x samples system of Woodbury's identity instead:
/// `(1/d) (g - S (d I + S^T S)^-1 S^T g)` with `S = [s_i] / sqrt(N)`.
///
/// # Errors
/// Shapes that do not fit; numbers that are not finite; a negative damping, or none for a singular matrix.
pub fn natural_gradient(scores: &[f32], gradient: &[f64], damping: f64) -> Result<Vec<f64>, Error> {
    let parameters = gradient.len();
    let samples = scores.len().checked_div(parameters).unwrap_or(0);
    Error::dimension("number of scores", scores.len(), samples * parameters)?;
    if samples == 0 {
        return Err(Error::Range { name: "samples", value: 0.0, allowed: "at least 1" });
    }
    Error::finite("gradient", gradient.iter().copied())?;
    Error::finite("scores", scores.iter().map(|&it| f64::from(it)))?;
    if !(damping.is_finite() && damping >= 0.0) {
        return Err(Error::Range { name: "damping", value: damping, allowed: "at least 0" });
    }
    let root = (samples as f64).sqrt();
    // Columns are samples.
    let scaled = DMatrix::from_iterator(parameters, samples, scores.iter().map(|&it| f64::from(it) / root));
    let gradient = DVector::from_column_slice(gradient);
    let solved = if samples < parameters {
        if damping == 0.0 {
            return Err(Error::Singular { damping });
        }
        let gram = scaled.tr_mul(&scaled) + DMatrix::identity(samples, samples) * damping;
        let inner = solve(gram, &scaled.tr_mul(&gradient), damping)?;
        (&gradient - &scaled * inner) / damping
    } else {
        let fisher = &scaled * scaled.transpose() + DMatrix::identity(parameters, parameters) * damping;
        solve(fisher, &gradient, damping)?
    };
    Ok(solved.iter().copied().collect())
}

/// Pivots below this share of the largest diagonal entry mean a singular matrix: rounding alone leaves about 1e-16.
const SINGULAR: f64 = 1e-13;

fn solve(matrix: DMatrix<f64>, right: &DVector<f64>, damping: f64) -> Result<DVector<f64>, Error> {
    let largest = matrix.diagonal().max();
    let cholesky = matrix.cholesky().ok_or(Error::Singular { damping })?;
    let smallest = cholesky.l_dirty().diagonal().min().powi(2);
    if smallest <= SINGULAR * largest {
        return Err(Error::Singular { damping });
    }
    Ok(cholesky.solve(right))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scores(samples: usize, parameters: usize) -> Vec<f32> {
        let mix = |index: u32| index.wrapping_mul(2_654_435_761).rotate_left(9).wrapping_mul(0x85eb_ca6b);
        (0..(samples * parameters) as u32).map(|index| mix(index) as f32 / 2e9 - 1.0).collect()
    }

    #[test]
    fn solution_satisfies_the_damped_system_on_both_sides() {
        for (samples, parameters) in [(40, 7), (5, 12)] {
            let scores = scores(samples, parameters);
            let gradient: Vec<f64> = (0..parameters).map(|it| it as f64 - 3.0).collect();
            let solved = natural_gradient(&scores, &gradient, 0.01).unwrap();
            for row in 0..parameters {
                let fisher = |column: usize| -> f64 {
                    let products = scores.chunks(parameters).map(|s| f64::from(s[row]) * f64::from(s[column]));
                    products.sum::<f64>() / samples as f64
                };
                let left: f64 =
                    (0..parameters).map(|column| fisher(column) * solved[column]).sum::<f64>() + 0.01 * solved[row];
                assert!((left - gradient[row]).abs() < 1e-8, "{samples} samples: {left} {}", gradient[row]);
            }
        }
    }

    #[test]
    fn direction_does_not_depend_on_the_parametrisation() {
        // (mu, sigma) against (mu, ln sigma): scores and gradients of sigma are scaled by sigma, the step by 1 / sigma.
        let sigma = 1.7_f64;
        let original = scores(50, 2);
        let moved: Vec<f32> = original.chunks(2).flat_map(|s| [s[0], (f64::from(s[1]) * sigma) as f32]).collect();
        let plain = natural_gradient(&original, &[0.4, -0.9], 0.0).unwrap();
        let logarithmic = natural_gradient(&moved, &[0.4, -0.9 * sigma], 0.0).unwrap();
        assert!((plain[0] - logarithmic[0]).abs() < 1e-5 && (plain[1] - logarithmic[1] * sigma).abs() < 1e-5);
    }

    #[test]
    fn singular_matrix_without_damping_is_refused() {
        let twice: Vec<f32> = (0..20).flat_map(|it| [it as f32, 2.0 * it as f32]).collect();
        assert_eq!(natural_gradient(&twice, &[1.0, 0.0], 0.0).unwrap_err(), Error::Singular { damping: 0.0 });
        assert!(natural_gradient(&twice, &[1.0, 0.0], 1e-3).is_ok());
        assert!(natural_gradient(&scores(2, 5), &[0.0; 5], 0.0).is_err());
        assert!(natural_gradient(&scores(2, 5), &[0.0; 5], -1.0).unwrap_err().to_string().contains("damping: -1"));
    }
}
