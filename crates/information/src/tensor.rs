//! The Amari-Chentsov tensor `T_ijk = E[d_i l d_j l d_k l]`, totally symmetric.

use crate::Error;
use crate::distribution::precision;

/// Most parameters of a sample tensor: its entries grow with the third power.
const MAX_PARAMETERS: usize = 128;

/// Returns the sample tensor of scores (samples x `parameters`, row-major) as `parameters^3` entries, row-major.
///
/// # Errors
/// More than 128 parameters; no whole sample; a score that is not finite.
pub fn amari_chentsov(scores: &[f32], parameters: usize) -> Result<Vec<f64>, Error> {
    if !(1..=MAX_PARAMETERS).contains(&parameters) {
        return Err(Error::Range { name: "parameters", value: parameters as f64, allowed: "1 to 128" });
    }
    let samples = scores.len() / parameters;
    if samples == 0 {
        return Err(Error::Range { name: "samples", value: 0.0, allowed: "at least 1" });
    }
    Error::dimension("number of scores", scores.len(), samples * parameters)?;
    Error::finite("scores", scores.iter().map(|&it| f64::from(it)))?;
    let mut tensor = vec![0.0; parameters.pow(3)];
    for score in scores.chunks_exact(parameters) {
        for i in 0..parameters {
            for j in i..parameters {
                let product = f64::from(score[i]) * f64::from(score[j]);
                for k in j..parameters {
                    tensor[(i * parameters + j) * parameters + k] += product * f64::from(score[k]);
                }
            }
        }
    }
    // Every permutation of an index triple has the entry of the sorted one.
    for i in 0..parameters {
        for j in 0..parameters {
            for k in 0..parameters {
                let mut sorted = [i, j, k];
                sorted.sort_unstable();
                tensor[(i * parameters + j) * parameters + k] =
                    tensor[(sorted[0] * parameters + sorted[1]) * parameters + sorted[2]];
            }
        }
    }
    tensor.iter_mut().for_each(|entry| *entry /= samples as f64);
    Ok(tensor)
}

/// Returns the tensor of a Gaussian in (mu, sigma), `[i][j][k]`: `2 / sigma^3` for (mu, mu, sigma), `8 / sigma^3` for (sigma, sigma, sigma),
/// 0 for (mu, mu, mu) and (mu, sigma, sigma).
///
/// # Errors
/// A sigma that is not positive and finite.
pub fn gaussian_amari_chentsov(sigma: f64) -> Result<[[[f64; 2]; 2]; 2], Error> {
    let cube = precision(sigma)? / sigma;
    let entry = |sigmas: usize| match sigmas {
        1 => 2.0 * cube,
        3 => 8.0 * cube,
        _ => 0.0,
    };
    Ok(std::array::from_fn(|i| std::array::from_fn(|j| std::array::from_fn(|k| entry(i + j + k)))))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Scores of a standard Gaussian at the nodes of a fine grid, repeated by density: an expectation by quadrature.
    fn quadrature(sigma: f64) -> Vec<f64> {
        let (steps, width) = (20_001, 9.0);
        let mut tensor = vec![0.0; 8];
        for step in 0..steps {
            let z = width * (2.0 * f64::from(step) / f64::from(steps - 1) - 1.0);
            let density =
                (-0.5 * z * z).exp() / (2.0 * std::f64::consts::PI).sqrt() * 2.0 * width / f64::from(steps - 1);
            let score = [z / sigma, (z * z - 1.0) / sigma];
            for (index, entry) in tensor.iter_mut().enumerate() {
                *entry += density * score[index >> 2 & 1] * score[index >> 1 & 1] * score[index & 1];
            }
        }
        tensor
    }

    #[test]
    fn gaussian_tensor_equals_quadrature_and_is_symmetric() {
        let tensor = gaussian_amari_chentsov(1.3).unwrap();
        let numeric = quadrature(1.3);
        for i in 0..2 {
            for j in 0..2 {
                for k in 0..2 {
                    assert!((tensor[i][j][k] - numeric[i * 4 + j * 2 + k]).abs() < 1e-6, "{i}{j}{k}");
                    assert_eq!(tensor[i][j][k], tensor[j][i][k]);
                    assert_eq!(tensor[i][j][k], tensor[i][k][j]);
                }
            }
        }
    }

    #[test]
    fn sample_tensor_is_totally_symmetric_and_equals_the_definition() {
        let scores = [0.5_f32, -1.0, 2.0, 1.5, 0.25, -0.75, -2.0, 1.0, 0.5];
        let tensor = amari_chentsov(&scores, 3).unwrap();
        let exact = |i: usize, j: usize, k: usize| -> f64 {
            scores.chunks(3).map(|s| f64::from(s[i]) * f64::from(s[j]) * f64::from(s[k])).sum::<f64>() / 3.0
        };
        for (index, entry) in tensor.iter().enumerate() {
            let (i, j, k) = (index / 9, index / 3 % 3, index % 3);
            assert!((entry - exact(i, j, k)).abs() < 1e-12);
            assert_eq!(*entry, tensor[(k * 3 + i) * 3 + j]);
        }
        assert!(amari_chentsov(&scores, 200).is_err());
    }
}
