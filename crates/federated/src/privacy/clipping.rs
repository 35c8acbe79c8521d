//! Clipping on an integer grid: the bound on the norm is checked in integers, after rounding.

use serde::{Deserialize, Serialize};

use crate::error::{InvalidInput, require};
use crate::model::check_vector;

/// Steps of the grid per clipping norm. A noise multiplier of up to 64 fits the sampler.
pub const STEPS_PER_NORM: i64 = 1 << 18;

/// A clipped update in steps of `norm / STEPS_PER_NORM`. Its Euclidean norm is at most `STEPS_PER_NORM`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClippedUpdate {
    pub(super) steps: Vec<i64>,
    /// Whether the norm before clipping was below the bound.
    pub(super) below: bool,
}

impl ClippedUpdate {
    /// Clips `delta` to the Euclidean norm `norm` and rounds it to the grid.
    ///
    /// # Errors
    /// When `norm` is not above 0 or `delta` has a value that is not finite.
    pub fn new(delta: &[f32], norm: f64) -> Result<Self, InvalidInput> {
        require(norm > 0.0 && norm.is_finite(), "norm", norm, "above 0")?;
        check_vector("delta", delta, delta.len())?;
        let length = delta.iter().map(|value| f64::from(*value).powi(2)).sum::<f64>().sqrt();
        let bound = STEPS_PER_NORM as f64;
        let scale = bound / norm;
        let mut factor = if length > norm { bound / length } else { scale };
        loop {
            let steps: Vec<i64> = delta.iter().map(|value| (f64::from(*value) * factor).round() as i64).collect();
            if squared_norm(&steps) <= (STEPS_PER_NORM as u128).pow(2) {
                return Ok(Self { steps, below: length <= norm });
            }
            // Rounding raised the norm. The factor falls below the least value that rounds to one step after at most some hundred passes.
            factor *= 0.999;
        }
    }

    /// Returns the update times `weight`, at most 1, rounded to the grid. No value grows, so the norm stays within the bound.
    ///
    /// # Errors
    /// When `weight` is not above 0 and at most 1.
    pub fn weighted(mut self, weight: f64) -> Result<Self, InvalidInput> {
        require(weight > 0.0 && weight <= 1.0, "weight", weight, "above 0, at most 1")?;
        for step in &mut self.steps {
            *step = (*step as f64 * weight).round() as i64;
        }
        Ok(self)
    }

    /// Says whether the norm before clipping was at most the bound.
    #[must_use]
    pub const fn is_below(&self) -> bool {
        self.below
    }

    /// The clipped values.
    #[must_use]
    pub fn values(&self, norm: f64) -> Vec<f64> {
        self.steps.iter().map(|step| *step as f64 * norm / STEPS_PER_NORM as f64).collect()
    }
}

fn squared_norm(steps: &[i64]) -> u128 {
    steps.iter().map(|step| u128::from(step.unsigned_abs()).pow(2)).sum()
}

/// A clipping norm that follows the median of the norms (Andrew et al. 2021).
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct AdaptiveClip {
    /// The current norm.
    pub norm: f64,
    /// Expected number of participants.
    expected: f64,
}

impl AdaptiveClip {
    /// Rate of the geometric update.
    const RATE: f64 = 0.2;
    /// Share of clients that should lie below the norm.
    const TARGET: f64 = 0.5;
    /// The norm of the first round.
    const INITIAL: f64 = 0.1;

    /// Starts with the norm 0.1 for `expected` participants a round.
    ///
    /// # Errors
    /// When fewer than 20 participants are expected: the noise of the share would be below the grid of the sampler.
    pub fn new(expected: f64) -> Result<Self, InvalidInput> {
        Self::starting_at(Self::INITIAL, expected)
    }

    /// Starts with `norm`.
    ///
    /// # Errors
    /// As [`Self::new`]; or `norm` is not above 0.
    pub fn starting_at(norm: f64, expected: f64) -> Result<Self, InvalidInput> {
        require(norm > 0.0 && norm.is_finite(), "clip", norm, "above 0")?;
        require(expected >= 20.0 && expected.is_finite(), "expectedParticipants", expected, "at least 20")?;
        Ok(Self { norm, expected })
    }

    /// Standard deviation of the noise on the number of clients below the norm.
    #[must_use]
    pub fn share_sigma(&self) -> f64 {
        self.expected / 20.0
    }

    /// The noise multiplier of the update that together with the noise of the share costs as much as `noise_multiplier` alone.
    ///
    /// # Errors
    /// When the share alone costs more.
    pub fn update_multiplier(&self, noise_multiplier: f64) -> Result<f64, InvalidInput> {
        let rest = noise_multiplier.powi(-2) - (2.0 * self.share_sigma()).powi(-2);
        let allowed = format!("below {} with this number of participants", 2.0 * self.share_sigma());
        if rest > 0.0 {
            Ok(rest.powf(-0.5))
        } else {
            Err(InvalidInput::new("noiseMultiplier", noise_multiplier, allowed))
        }
    }

    /// Moves the norm after a round with the noisy sum of `2 * below - 1` over its clients.
    pub fn advance(&mut self, noisy_sum: f64) {
        let share = noisy_sum / (2.0 * self.expected) + 0.5;
        self.norm *= (-Self::RATE * (share.clamp(0.0, 1.0) - Self::TARGET)).exp();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn norm_after_clipping_never_exceeds_the_bound() {
        for (delta, norm) in
            [(vec![3.0_f32, 4.0], 1.0), (vec![1e30; 7], 0.1), (vec![0.37; 1_000], 2.0), (vec![1e-9; 5], 1e-12)]
        {
            let clipped = ClippedUpdate::new(&delta, norm).unwrap();
            let length = clipped.values(norm).iter().map(|value| value * value).sum::<f64>().sqrt();
            assert!(length <= norm * (1.0 + 1e-12), "{length}");
            assert!(length > 0.99 * norm, "{length}");
            assert!(!clipped.is_below());
        }
        let clipped = ClippedUpdate::new(&[0.3, -0.4], 1.0).unwrap();
        assert!(clipped.is_below());
        assert!((clipped.values(1.0)[1] + 0.4).abs() < 1e-5, "values below the bound are not scaled");
        assert!(ClippedUpdate::new(&[f32::NAN], 1.0).is_err());
        assert!(ClippedUpdate::new(&[1.0], 0.0).is_err());
    }

    #[test]
    fn a_weight_shrinks_what_was_clipped_and_keeps_the_bound() {
        let clipped = ClippedUpdate::new(&[6.0, 8.0], 1.0).unwrap();
        let half = clipped.clone().weighted(0.5).unwrap();
        assert!((half.values(1.0)[0] - 0.3).abs() < 1e-5 && (half.values(1.0)[1] - 0.4).abs() < 1e-5);
        assert!(!half.is_below(), "the norm of the update is that before the weight");
        let many = ClippedUpdate::new(&vec![1.0_f32; 1 << 20], 1023.0).unwrap();
        for weight in [1.0, 0.999, 0.501, 1e-9] {
            let weighted = many.clone().weighted(weight).unwrap();
            assert!(squared_norm(&weighted.steps) <= squared_norm(&many.steps), "{weight}");
        }
        for weight in [0.0, -1.0, 1.001, f64::NAN] {
            assert_eq!(clipped.clone().weighted(weight).unwrap_err().field, "weight");
        }
    }

    #[test]
    fn many_small_values_that_all_round_up_stay_within_the_bound() {
        let delta = vec![1.0_f32; 1 << 20];
        // Each value is 256.4 steps: the norm is within the bound only before it is rounded.
        let clipped = ClippedUpdate::new(&delta, 1023.0).unwrap();
        assert!(squared_norm(&clipped.steps) <= (STEPS_PER_NORM as u128).pow(2));
    }

    #[test]
    fn adaptive_norm_converges_to_the_median() {
        let mut clip = AdaptiveClip::new(100.0).unwrap();
        for _ in 0..500 {
            let below = (0..100).filter(|client| 0.02 * f64::from(*client) <= clip.norm).count();
            clip.advance(2.0 * below as f64 - 100.0);
        }
        assert!((clip.norm - 1.0).abs() < 0.05, "{}", clip.norm);
        let multiplier = clip.update_multiplier(1.0).unwrap();
        assert!((multiplier.powi(-2) + (10.0_f64).powi(-2) - 1.0).abs() < 1e-12);
        assert!(clip.update_multiplier(10.0).is_err());
        assert!(AdaptiveClip::new(10.0).is_err());
        assert!(AdaptiveClip::starting_at(0.0, 100.0).is_err());
        let mut clip = AdaptiveClip::starting_at(1.0, 100.0).unwrap();
        clip.advance(1e9);
        assert!(
            (clip.norm - (-0.1_f64).exp()).abs() < 1e-12,
            "noise moves the norm by one step at most: {}",
            clip.norm
        );
    }
}
