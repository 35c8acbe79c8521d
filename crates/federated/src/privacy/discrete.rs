//! Exact samples of the discrete Gaussian (Canonne, Kamath, Steinke 2020, algorithms 1 to 3): integer and rational arithmetic only, so no
//! sample leaks the value it was added to through rounding.

use chacha20::ChaCha20Rng;

use crate::error::{InvalidInput, require};
use crate::random::{below, coin};

/// Largest standard deviation: all products stay below 2^127.
const MAX_SIGMA: f64 = (1_u64 << 24) as f64;

/// Distribution over integers with probability proportional to `exp(-x^2 / (2 sigma^2))`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DiscreteGaussian {
    /// The variance is `numerator / denominator`.
    numerator: u128,
    denominator: u128,
    /// Scale of the Laplace distribution that proposes samples: `floor(sigma) + 1`.
    scale: u128,
}

impl DiscreteGaussian {
    /// Creates the distribution with standard deviation `sigma`, rounded up by at most 1 in 2^16 of the variance.
    ///
    /// # Errors
    /// When `sigma` is not between 1 and 2^24.
    pub fn new(sigma: f64) -> Result<Self, InvalidInput> {
        require((1.0..=MAX_SIGMA).contains(&sigma), "sigma", sigma, "1 to 16777216 (2^24)")?;
        let denominator = if sigma < 4096.0 { 1 << 16 } else { 1 };
        let numerator = (sigma * sigma * denominator as f64).ceil() as u128;
        Ok(Self { numerator, denominator, scale: sigma.floor() as u128 + 1 })
    }

    /// The variance that is sampled.
    #[must_use]
    pub fn variance(&self) -> f64 {
        self.numerator as f64 / self.denominator as f64
    }

    /// Draws one integer.
    pub(crate) fn sample(&self, rng: &mut ChaCha20Rng) -> i64 {
        let (n, d, t) = (self.numerator, self.denominator, self.scale);
        loop {
            let (size, negative) = laplace(rng, t);
            // (|y| - variance/t)^2 / (2 variance) = (|y| d t - n)^2 / (2 n d t^2).
            let Some(squared) = size.checked_mul(d * t).map(|scaled| scaled.abs_diff(n)).and_then(|x| x.checked_mul(x))
            else {
                // Accepted with a probability below exp(-2^20).
                continue;
            };
            if happens_with_exp_minus(rng, squared, 2 * n * d * t * t) {
                let size = i64::try_from(size).expect("an accepted sample is far below 2^63");
                return if negative { -size } else { size };
            }
        }
    }
}

/// Size and sign of a discrete Laplace sample of an integer scale.
fn laplace(rng: &mut ChaCha20Rng, scale: u128) -> (u128, bool) {
    loop {
        let remainder = below(rng, scale);
        if !happens_with_exp_minus(rng, remainder, scale) {
            continue;
        }
        let mut quotient = 0;
        while happens_with_exp_minus(rng, 1, 1) {
            quotient += 1;
        }
        let (size, negative) = (remainder + scale * quotient, coin(rng));
        if size > 0 || !negative {
            return (size, negative);
        }
    }
}

/// True with probability `exp(-numerator/denominator)`.
fn happens_with_exp_minus(rng: &mut ChaCha20Rng, numerator: u128, denominator: u128) -> bool {
    for _ in 0..numerator / denominator {
        if !happens_with_exp_minus_fraction(rng, 1, 1) {
            return false;
        }
    }
    happens_with_exp_minus_fraction(rng, numerator % denominator, denominator)
}

/// As `happens_with_exp_minus`, for a fraction of at most 1: the parity of the first failure among events of probability fraction/k.
fn happens_with_exp_minus_fraction(rng: &mut ChaCha20Rng, numerator: u128, denominator: u128) -> bool {
    let mut k = 1;
    while below(rng, denominator * k) < numerator {
        k += 1;
    }
    k % 2 == 1
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::stream;

    #[test]
    fn samples_follow_the_probabilities_of_the_definition() {
        let law = DiscreteGaussian::new(1.5).unwrap();
        let mut rng = stream(&[1; 32], "test", 0);
        let draws = 200_000;
        let mut counts = [0.0_f64; 13];
        for _ in 0..draws {
            counts[(law.sample(&mut rng).clamp(-6, 6) + 6) as usize] += 1.0;
        }
        let weight = |x: i64| (-((x * x) as f64) / (2.0 * law.variance())).exp();
        let total: f64 = (-40..=40).map(weight).sum();
        let tail: f64 = (6..=40).map(weight).sum();
        let expected = |x: i64| f64::from(draws) * if x.abs() == 6 { tail } else { weight(x) } / total;
        let chi: f64 = (-6..=6).map(|x| (counts[(x + 6) as usize] - expected(x)).powi(2) / expected(x)).sum();
        // 12 degrees of freedom: exceeded with probability 1e-6.
        assert!(chi < 49.0, "chi-square {chi}, {counts:?}");
    }

    #[test]
    fn variance_is_right_from_small_to_large() {
        for sigma in [1.0, 40.5, 4096.0, 1e6, MAX_SIGMA] {
            let law = DiscreteGaussian::new(sigma).unwrap();
            assert!((law.variance() / (sigma * sigma) - 1.0).abs() < 1e-4);
            let mut rng = stream(&[2; 32], "test", sigma as u64);
            let draws = 40_000;
            let samples: Vec<f64> = (0..draws).map(|_| law.sample(&mut rng) as f64 / sigma).collect();
            let mean = samples.iter().sum::<f64>() / f64::from(draws);
            let variance = samples.iter().map(|x| x * x).sum::<f64>() / f64::from(draws);
            assert!(mean.abs() < 0.025, "sigma {sigma}: mean {mean}");
            assert!((variance - 1.0).abs() < 0.04, "sigma {sigma}: variance {variance}");
        }
        assert!(DiscreteGaussian::new(0.5).is_err());
        assert!(DiscreteGaussian::new(f64::NAN).is_err());
    }
}
