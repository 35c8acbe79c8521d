//! The private sum of a round: clipped updates, noise once, a fixed divisor.

use serde::{Deserialize, Serialize};

use super::clipping::{ClippedUpdate, STEPS_PER_NORM};
use super::discrete::DiscreteGaussian;
use crate::content::DigestStream;
use crate::error::{InvalidInput, require};
use crate::random::{Seed, stream};
use crate::round::Digest;

/// Sum of clipped vectors before noise. Parts of other ranks or micro-batches are merged before the one call that adds the noise.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PrivateSum {
    steps: Vec<i64>,
    /// Sum of `2 * below - 1`.
    below: i64,
}

/// Noise of a release.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ReleaseNoise {
    /// Standard deviation over the clipping norm, for the sum of updates.
    pub multiplier: f64,
    /// Standard deviation of the number of clients below the norm; only for adaptive clipping.
    pub share_sigma: Option<f64>,
}

/// What leaves the private sum.
#[derive(Debug, Clone, PartialEq)]
pub struct Release {
    /// Noisy sum over the expected number of participants.
    pub mean: Vec<f64>,
    /// Noisy sum of `2 * below - 1`, for `AdaptiveClip::advance`.
    pub noisy_share_sum: Option<f64>,
}

impl PrivateSum {
    /// Creates an empty sum.
    #[must_use]
    pub fn new(parameters: usize) -> Self {
        Self { steps: vec![0; parameters], below: 0 }
    }

    /// Creates a sum from values that were clipped before they were added, rounded to the grid of `norm`.
    ///
    /// # Errors
    /// `norm` is not above 0, or a value is not finite or too large for the grid.
    pub fn of_values(values: &[f64], norm: f64) -> Result<Self, InvalidInput> {
        require(norm > 0.0 && norm.is_finite(), "norm", norm, "above 0")?;
        let scale = STEPS_PER_NORM as f64 / norm;
        let largest = values.iter().map(|value| (value * scale).abs()).fold(0.0, f64::max);
        let holds = values.iter().all(|value| value.is_finite()) && largest < (1_u64 << 52) as f64;
        require(holds, "sum", "out of range", "finite values of clipped updates")?;
        Ok(Self { steps: values.iter().map(|value| (value * scale).round() as i64).collect(), below: 0 })
    }

    /// Creates a sum from the steps that [`Self::steps`] returned, on another rank.
    ///
    /// # Errors
    /// A value is too large for a sum of clipped updates.
    pub fn from_steps(steps: Vec<i64>) -> Result<Self, InvalidInput> {
        let largest = steps.iter().map(|step| step.unsigned_abs()).max().unwrap_or(0);
        require(largest < 1 << 52, "sum", largest, "below 2^52 steps")?;
        Ok(Self { steps, below: 0 })
    }

    /// The sum per parameter in steps of the clipping norm over `STEPS_PER_NORM`.
    #[must_use]
    pub fn steps(&self) -> &[i64] {
        &self.steps
    }

    /// SHA-256 of the sum per parameter: part of the seed of the noise, so that sums that differ never have the same noise.
    pub(crate) fn digest(&self) -> Digest {
        let mut digest = DigestStream::default();
        for steps in self.steps.chunks(1024) {
            digest.add(&steps.iter().flat_map(|step| step.to_le_bytes()).collect::<Vec<u8>>());
        }
        digest.finish()
    }

    /// Sum of `2 * below - 1` over the clients.
    pub(crate) const fn below(&self) -> i64 {
        self.below
    }

    /// Adds one clipped update, or one clipped gradient of a sample.
    ///
    /// # Errors
    /// When the update has another length.
    pub fn add(&mut self, update: &ClippedUpdate) -> Result<(), InvalidInput> {
        require(update.steps.len() == self.steps.len(), "delta", update.steps.len(), "one value per parameter")?;
        for (sum, step) in self.steps.iter_mut().zip(&update.steps) {
            *sum += step;
        }
        self.below += if update.below { 1 } else { -1 };
        Ok(())
    }

    /// Adds the part of another rank or micro-batch, which has no noise yet.
    ///
    /// # Errors
    /// When the part has another length.
    pub fn merge(&mut self, part: &Self) -> Result<(), InvalidInput> {
        require(part.steps.len() == self.steps.len(), "part", part.steps.len(), "one value per parameter")?;
        for (sum, step) in self.steps.iter_mut().zip(&part.steps) {
            *sum += step;
        }
        self.below += part.below;
        Ok(())
    }

    /// Adds the noise, once, and divides by the expected number of participants, whatever the actual number was.
    ///
    /// `seed` must be secret, from a cryptographic generator, and used for one release only.
    ///
    /// # Errors
    /// When a number is out of its range.
    pub fn release(self, norm: f64, expected: f64, noise: ReleaseNoise, seed: &Seed) -> Result<Release, InvalidInput> {
        require(expected > 0.0 && expected.is_finite(), "expectedParticipants", expected, "above 0")?;
        let law = DiscreteGaussian::new(noise.multiplier * STEPS_PER_NORM as f64)?;
        let unit = norm / STEPS_PER_NORM as f64 / expected;
        let mut rng = stream(seed, "noise of the update", 0);
        let mean = self.steps.iter().map(|sum| (sum + law.sample(&mut rng)) as f64 * unit).collect();
        let noisy_share_sum = match noise.share_sigma {
            None => None,
            Some(sigma) => {
                let law = DiscreteGaussian::new(2.0 * sigma)?;
                Some((self.below + law.sample(&mut stream(seed, "noise of the share", 0))) as f64)
            }
        };
        Ok(Release { mean, noisy_share_sum })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOISE: ReleaseNoise = ReleaseNoise { multiplier: 2.0, share_sigma: None };

    fn variance(values: &[f64]) -> f64 {
        values.iter().map(|value| value * value).sum::<f64>() / values.len() as f64
    }

    #[test]
    fn noise_is_added_once_however_many_ranks_and_micro_batches() {
        let parameters = 20_000;
        let mut total = PrivateSum::new(parameters);
        for _ in 0..4 {
            let mut rank = PrivateSum::new(parameters);
            for _ in 0..3 {
                rank.add(&ClippedUpdate::new(&vec![0.0; parameters], 0.5).unwrap()).unwrap();
            }
            total.merge(&rank).unwrap();
        }
        let release = total.release(0.5, 1.0, NOISE, &[3; 32]).unwrap();
        // (z C)^2 = 1.
        assert!((variance(&release.mean) - 1.0).abs() < 0.05, "{}", variance(&release.mean));
    }

    #[test]
    fn empty_round_releases_noise_and_the_divisor_is_fixed() {
        let release = |sum: PrivateSum| sum.release(1.0, 10.0, NOISE, &[4; 32]).unwrap();
        let empty = release(PrivateSum::new(5_000));
        assert!((variance(&empty.mean) - 0.04).abs() < 0.004);
        let mut one = PrivateSum::new(5_000);
        let mut delta = vec![0.0; 5_000];
        delta[0] = 1.0;
        one.add(&ClippedUpdate::new(&delta, 1.0).unwrap()).unwrap();
        let one = release(one);
        assert!((one.mean[0] - empty.mean[0] - 0.1).abs() < 1e-6, "one client moves the mean by 1/10, not by 1/1");
        assert_eq!(one.mean[1..], empty.mean[1..], "the noise depends on the seed only");
    }

    #[test]
    fn parts_of_another_length_and_sums_out_of_range_are_refused() {
        let clipped = |delta: &[f32]| ClippedUpdate::new(delta, 1.0).unwrap();
        let mut sum = PrivateSum::new(2);
        assert_eq!(sum.add(&clipped(&[0.5])).unwrap_err().field, "delta");
        assert_eq!(sum.merge(&PrivateSum::new(1)).unwrap_err().field, "part");
        assert_eq!(sum, PrivateSum::new(2));
        for expected in [0.0, f64::INFINITY] {
            let refused = sum.clone().release(1.0, expected, NOISE, &[1; 32]).unwrap_err();
            assert_eq!(refused.field, "expectedParticipants");
        }
        assert_eq!(PrivateSum::of_values(&[1.0], 0.0).unwrap_err().field, "norm");
        for value in [f64::NAN, f64::INFINITY, -1e12] {
            assert_eq!(PrivateSum::of_values(&[0.0, value], 1.0).unwrap_err().field, "sum");
        }
    }

    #[test]
    fn clients_below_the_norm_are_counted_over_all_parts_with_noise_of_their_own() {
        let mut parts = [PrivateSum::new(1), PrivateSum::new(1)];
        for value in [0.5, 0.5, 2.0] {
            parts.iter_mut().for_each(|part| part.add(&ClippedUpdate::new(&[value], 1.0).unwrap()).unwrap());
        }
        let [mut sum, part] = parts;
        sum.merge(&part).unwrap();
        assert_eq!(sum.below, 2, "four below, two above");
        // One grid and one scale: the same stream would draw the same number twice.
        let noise = ReleaseNoise { multiplier: 2.0, share_sigma: Some(STEPS_PER_NORM as f64) };
        let release = PrivateSum::new(1).release(STEPS_PER_NORM as f64, 1.0, noise, &[1; 32]).unwrap();
        assert_ne!(release.noisy_share_sum, Some(release.mean[0]));
    }

    #[test]
    fn release_is_the_sum_plus_noise_not_twice_the_sum() {
        let mut sum = PrivateSum::new(1);
        for _ in 0..1_000 {
            sum.add(&ClippedUpdate::new(&[1.0], 1.0).unwrap()).unwrap();
        }
        let release =
            sum.release(1.0, 1_000.0, ReleaseNoise { multiplier: 0.01, share_sigma: Some(50.0) }, &[5; 32]).unwrap();
        assert!((release.mean[0] - 1.0).abs() < 1e-3, "{}", release.mean[0]);
        let share = release.noisy_share_sum.unwrap();
        assert!((share - 1_000.0).abs() < 1_000.0 && share != 1_000.0, "{share}");
    }
}
