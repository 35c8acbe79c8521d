//! Closed forms of the Fisher information of common distributions.

use crate::Error;

/// Returns the Fisher matrix of a Gaussian in (mu, sigma): `diag(1 / sigma^2, 2 / sigma^2)`.
///
/// # Errors
/// A sigma that is not positive and finite.
pub fn gaussian_fisher(sigma: f64) -> Result<[[f64; 2]; 2], Error> {
    let precision = precision(sigma)?;
    Ok([[precision, 0.0], [0.0, 2.0 * precision]])
}

pub(crate) fn precision(sigma: f64) -> Result<f64, Error> {
    if sigma.is_finite() && sigma > 0.0 {
        Ok(1.0 / (sigma * sigma))
    } else {
        Err(Error::Range { name: "sigma", value: sigma, allowed: "a positive finite number" })
    }
}

/// Returns the Fisher matrix of a categorical distribution in its first K-1 probabilities, row-major: `delta_ij / p_i + 1 / p_K`.
///
/// # Errors
/// Fewer than two probabilities; one that is not positive; a sum that differs from 1 by more than 1e-6.
pub fn categorical_fisher(probabilities: &[f64]) -> Result<Vec<f64>, Error> {
    check_probabilities(probabilities)?;
    let Some((&last, free)) = probabilities.split_last().filter(|(_, free)| !free.is_empty()) else {
        return Err(Error::Dimension { what: "number of probabilities", found: probabilities.len(), expected: 2 });
    };
    let all = probabilities.iter();
    if let Some(&zero) = all.clone().find(|&&it| it <= 0.0) {
        return Err(Error::Range { name: "probability", value: zero, allowed: "above 0" });
    }
    let entry = |row: usize, column: usize| if row == column { 1.0 / free[row] + 1.0 / last } else { 1.0 / last };
    Ok((0..free.len()).flat_map(|row| (0..free.len()).map(move |column| entry(row, column))).collect())
}

/// Returns the Fisher matrix of softmax logits, row-major: `diag(p) - p p^T`.
///
/// # Errors
/// Probabilities that are negative or do not sum to 1 within 1e-6.
pub fn softmax_fisher(probabilities: &[f64]) -> Result<Vec<f64>, Error> {
    check_probabilities(probabilities)?;
    let entry = |row: usize, column: usize| {
        let product = probabilities[row] * probabilities[column];
        if row == column { probabilities[row] - product } else { -product }
    };
    let classes = probabilities.len();
    Ok((0..classes).flat_map(|row| (0..classes).map(move |column| entry(row, column))).collect())
}

/// Returns the scores whose outer products sum to the **model** Fisher matrix of one sample, `J^T (diag(p) - p p^T) J`: per class c one row
/// `sqrt(p_c) (J_c - sum_k p_k J_k)`. `jacobian` holds the gradients of the logits, classes x parameters, row-major.
///
/// # Errors
/// Probabilities as in [`softmax_fisher`]; a jacobian of another size.
pub fn softmax_scores(jacobian: &[f32], probabilities: &[f64]) -> Result<Vec<f32>, Error> {
    check_probabilities(probabilities)?;
    let classes = probabilities.len();
    let parameters = jacobian.len() / classes;
    Error::dimension("number of entries of the jacobian", jacobian.len(), classes * parameters)?;
    let mut mean = vec![0.0_f64; parameters];
    for (row, &probability) in jacobian.chunks_exact(parameters.max(1)).zip(probabilities) {
        mean.iter_mut().zip(row).for_each(|(mean, &entry)| *mean += probability * f64::from(entry));
    }
    let rows = jacobian.chunks_exact(parameters.max(1)).zip(probabilities);
    let scores = rows.flat_map(|(row, &probability)| {
        let root = probability.sqrt();
        row.iter().zip(&mean).map(move |(&entry, mean)| (root * (f64::from(entry) - mean)) as f32)
    });
    Ok(scores.collect())
}

fn check_probabilities(probabilities: &[f64]) -> Result<(), Error> {
    if probabilities.is_empty() {
        return Err(Error::Dimension { what: "number of probabilities", found: 0, expected: 1 });
    }
    if let Some(&refused) = probabilities.iter().find(|it| !(0.0..=1.0).contains(*it)) {
        return Err(Error::Range { name: "probability", value: refused, allowed: "0 to 1" });
    }
    let sum: f64 = probabilities.iter().sum();
    if (sum - 1.0).abs() > 1e-6 {
        return Err(Error::Range { name: "sum of the probabilities", value: sum, allowed: "1 within 1e-6" });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{fast_sum, kullback_leibler};

    #[test]
    fn gaussian_has_a_positive_sigma_entry() {
        let fisher = gaussian_fisher(1.7).unwrap();
        assert!((fisher[1][1] - 0.692_041).abs() < 1e-6, "{fisher:?}");
        assert!((fisher[0][0] - 0.346_021).abs() < 1e-6);
        assert!(gaussian_fisher(0.0).is_err() && gaussian_fisher(f64::NAN).is_err());
    }

    #[test]
    fn categorical_equals_the_numeric_hessian_of_the_divergence() {
        let p = [0.2, 0.5, 0.3];
        let fisher = categorical_fisher(&p).unwrap();
        let step = 1e-4;
        let divergence = |a: f64, b: f64| {
            let moved = [p[0] + a, p[1] + b, p[2] - a - b];
            kullback_leibler(&p, &moved).unwrap()
        };
        for (row, column) in [(0, 0), (0, 1), (1, 1)] {
            let at = |x: f64, y: f64| {
                let mut moves = [0.0; 2];
                moves[row] += x;
                moves[column] += y;
                divergence(moves[0], moves[1])
            };
            let numeric = (at(step, step) - at(step, -step) - at(-step, step) + at(-step, -step)) / (4.0 * step * step);
            assert!((numeric - fisher[row * 2 + column]).abs() < 1e-3, "{row}{column}: {numeric} {fisher:?}");
        }
        assert!((fisher[1] - 1.0 / 0.3).abs() < 1e-12, "diag(1/p) alone misses the off-diagonal entries");
    }

    #[test]
    fn model_scores_sum_to_the_softmax_form() {
        let p = [0.1, 0.6, 0.3];
        let jacobian = [0.5_f32, -1.0, 2.0, 0.25, -0.75, 1.5];
        let scores = softmax_scores(&jacobian, &p).unwrap();
        let fisher = fast_sum(&scores, 2).unwrap();
        let inner = softmax_fisher(&p).unwrap();
        for row in 0..2 {
            for column in 0..2 {
                let mut exact = 0.0;
                for a in 0..3 {
                    for b in 0..3 {
                        exact +=
                            f64::from(jacobian[a * 2 + row]) * inner[a * 3 + b] * f64::from(jacobian[b * 2 + column]);
                    }
                }
                // The mean over three rows, times three.
                assert!((3.0 * fisher.get(row, column) - exact).abs() < 1e-6);
            }
        }
        // Mean score 0 under the model.
        let mean: f64 = (0..3).map(|class| p[class].sqrt() * f64::from(scores[class * 2])).sum();
        assert!(mean.abs() < 1e-7, "{mean}");
        assert!(softmax_scores(&jacobian, &[0.5, 0.6]).is_err());
    }
}
