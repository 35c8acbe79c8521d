//! Privacy of samples in training (DP-SGD, Abadi et al. 2016): which samples a step uses, and the one release of the sum of their clipped gradients.
//!
//! Both follow from a secret of the run that all ranks have, so every rank of a group finds the same samples and adds the same noise, once, to the
//! sum of all ranks. The seed of the noise depends on the sum too: a step that is repeated after a failure with the same samples is the same
//! release, and sums that differ never have the same noise.

use super::sum::PrivateSum;
use crate::random::{Seed, derive, stream, unit};

/// A secret of a run, from a cryptographic generator. It is not shown.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct NoiseSecret(Seed);

impl std::fmt::Debug for NoiseSecret {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("NoiseSecret(..)")
    }
}

impl NoiseSecret {
    /// Takes 32 random bytes; `None` for another number.
    #[must_use]
    pub fn new(bytes: &[u8]) -> Option<Self> {
        bytes.try_into().ok().map(Self)
    }

    /// Returns the samples of a step in ascending order: each of `population` independently with probability `rate` (Poisson sampling).
    #[must_use]
    pub fn sample(&self, step: u64, population: usize, rate: f64) -> Vec<usize> {
        let mut rng = stream(&self.0, "samples of a step", step);
        (0..population).filter(|_| unit(&mut rng) < rate).collect()
    }

    /// Returns the seed of the noise on the sum of a step.
    #[must_use]
    pub fn release_seed(&self, step: u64, sum: &PrivateSum) -> Seed {
        derive(&self.0, &[b"noise of a step", &step.to_le_bytes(), &sum.digest()])
    }
}

/// Returns the seed of a part of a release, of which each has a generator of its own.
#[must_use]
pub fn part_seed(release: &Seed, part: u64) -> Seed {
    derive(release, &[b"part of a release", &part.to_le_bytes()])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_sample_takes_part_independently_with_the_rate() {
        let secret = NoiseSecret::new(&[9; 32]).unwrap();
        let (population, rate, steps) = (200, 0.1, 500);
        let mut counts = vec![0_u32; population];
        let mut sizes = Vec::new();
        for step in 0..steps {
            let samples = secret.sample(step, population, rate);
            assert_eq!(samples, secret.sample(step, population, rate));
            samples.iter().for_each(|sample| counts[*sample] += 1);
            sizes.push(samples.len() as f64);
        }
        // Binomial: mean 50, standard deviation 6.7 per sample; mean 20, variance 18 per step.
        assert!(counts.iter().all(|count| (17..=83).contains(count)), "{counts:?}");
        let mean = sizes.iter().sum::<f64>() / steps as f64;
        let variance = sizes.iter().map(|size| (size - mean).powi(2)).sum::<f64>() / steps as f64;
        assert!((mean - 20.0).abs() < 1.0 && (12.0..26.0).contains(&variance), "{mean} {variance}");
        assert_eq!(secret.sample(0, 5, 1.0), [0, 1, 2, 3, 4]);
    }

    #[test]
    fn noise_is_that_of_the_step_and_the_sum_and_the_secret_is_not_shown() {
        let secret = NoiseSecret::new(&[9; 32]).unwrap();
        let sum = |value| PrivateSum::from_steps(vec![value, 2]).unwrap();
        assert_eq!(secret.release_seed(3, &sum(1)), secret.release_seed(3, &sum(1)));
        assert_ne!(secret.release_seed(3, &sum(1)), secret.release_seed(4, &sum(1)));
        assert_ne!(
            secret.release_seed(3, &sum(1)),
            secret.release_seed(3, &sum(5)),
            "sums that differ have other noise"
        );
        assert_ne!(secret.release_seed(3, &sum(1)), NoiseSecret::new(&[8; 32]).unwrap().release_seed(3, &sum(1)));
        assert_ne!(part_seed(&[1; 32], 0), part_seed(&[1; 32], 1));
        assert_eq!(format!("{secret:?}"), "NoiseSecret(..)");
        assert_eq!(NoiseSecret::new(&[1; 31]), None);
        assert!(PrivateSum::from_steps(vec![1 << 52]).is_err());
    }
}
