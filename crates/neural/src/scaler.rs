//! Loss scaling for half-precision gradients: a state machine over whether the reduced gradient was finite.
//!
//! The reduced gradient has the same bits on every member, so all members take the same decision without a vote.

use serde::{Deserialize, Serialize};

use crate::error::SettingError;

/// Settings of the scaler; the defaults are those of common practice.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct ScalerSpec {
    /// First scale, a power of two in [1, 2^24]. Default 2^16.
    pub initial: f32,
    /// Finite steps in a row after which the scale doubles; at least 1. Default 2,000.
    pub growth_interval: u32,
    /// Non-finite steps in a row after which the scale halves; at least 1. Default 1.
    pub hysteresis: u32,
}

impl Default for ScalerSpec {
    fn default() -> Self {
        Self { initial: 65_536.0, growth_interval: 2_000, hysteresis: 1 }
    }
}

/// Largest scale: 2^24. Beyond it f16 gradients of ordinary size overflow.
const MAX_SCALE: f32 = 16_777_216.0;

/// State of a scaler, part of a checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ScalerState {
    /// Factor of the loss.
    pub scale: f32,
    /// Finite steps since the last change of the scale.
    pub finite_steps: u32,
    /// Non-finite steps in a row.
    pub overflow_steps: u32,
    /// Steps skipped since the start.
    pub skipped: u64,
}

/// What to do with a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ScalerDecision {
    /// Apply the gradient.
    Apply,
    /// Drop the gradient; the data cursor advances all the same.
    Skip,
}

/// A loss scaler, or a constant scale of 1.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LossScaler {
    spec: Option<ScalerSpec>,
    state: ScalerState,
}

impl LossScaler {
    /// A scaler with dynamic scale.
    ///
    /// # Errors
    /// A setting is out of range.
    pub fn dynamic(spec: ScalerSpec) -> Result<Self, SettingError> {
        let power = spec.initial.is_finite() && spec.initial.to_bits().trailing_zeros() >= 23;
        let valid = power && (1.0..=MAX_SCALE).contains(&spec.initial);
        SettingError::unless(valid, "scaler.initial", spec.initial, "a power of two from 1 to 16777216")?;
        SettingError::unless(spec.growth_interval > 0, "scaler.growthInterval", spec.growth_interval, "at least 1")?;
        SettingError::unless(spec.hysteresis > 0, "scaler.hysteresis", spec.hysteresis, "at least 1")?;
        Ok(Self { spec: Some(spec), state: ScalerState { scale: spec.initial, ..Self::idle() } })
    }

    /// For f32 and bf16: the scale stays 1, and steps that are not finite are skipped.
    pub fn off() -> Self {
        Self { spec: None, state: Self::idle() }
    }

    fn idle() -> ScalerState {
        ScalerState { scale: 1.0, finite_steps: 0, overflow_steps: 0, skipped: 0 }
    }

    /// Factor of the loss of the next step.
    pub fn scale(&self) -> f32 {
        self.state.scale
    }

    /// The state, for a checkpoint.
    pub fn state(&self) -> ScalerState {
        self.state
    }

    /// Restores the state of a checkpoint.
    pub fn restore(&mut self, state: ScalerState) {
        self.state = state;
    }

    /// Records whether the reduced gradient of a step was finite.
    pub fn step(&mut self, finite: bool) -> ScalerDecision {
        let state = &mut self.state;
        if finite {
            state.overflow_steps = 0;
            state.finite_steps += 1;
            if let Some(spec) = self.spec
                && state.finite_steps >= spec.growth_interval
            {
                state.scale = (state.scale * 2.0).min(MAX_SCALE);
                state.finite_steps = 0;
            }
            if self.spec.is_none() {
                state.finite_steps = 0;
            }
            return ScalerDecision::Apply;
        }
        state.finite_steps = 0;
        state.overflow_steps = state.overflow_steps.saturating_add(1);
        state.skipped += 1;
        if let Some(spec) = self.spec
            && state.overflow_steps >= spec.hysteresis
        {
            state.scale = (state.scale * 0.5).max(1.0);
            state.overflow_steps = 0;
        }
        ScalerDecision::Skip
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(spec: ScalerSpec, finite: &[bool]) -> LossScaler {
        let mut scaler = LossScaler::dynamic(spec).unwrap();
        for &f in finite {
            let expected = if f { ScalerDecision::Apply } else { ScalerDecision::Skip };
            assert_eq!(scaler.step(f), expected);
        }
        scaler
    }

    #[test]
    fn scale_halves_on_overflow_and_doubles_after_the_interval() {
        let spec = ScalerSpec { growth_interval: 3, ..ScalerSpec::default() };
        assert_eq!(run(spec, &[false]).scale(), 32_768.0);
        assert_eq!(run(spec, &[true, true, false, true, true]).scale(), 32_768.0);
        assert_eq!(run(spec, &[true; 3]).scale(), 131_072.0);
        assert_eq!(run(spec, &[false; 40]).state().skipped, 40);
        assert_eq!(run(spec, &[false; 40]).scale(), 1.0);
        assert_eq!(run(spec, &[true; 100]).scale(), MAX_SCALE);
        let patient = ScalerSpec { hysteresis: 2, ..spec };
        assert_eq!(run(patient, &[false, true, false]).scale(), 65_536.0);
        assert_eq!(run(patient, &[false, false]).scale(), 32_768.0);
    }

    #[test]
    fn restored_scaler_continues_the_growth_counter() {
        let spec = ScalerSpec { growth_interval: 3, ..ScalerSpec::default() };
        let before = run(spec, &[false, true, true]);
        let mut after = LossScaler::dynamic(spec).unwrap();
        after.restore(before.state());
        after.step(true);
        assert_eq!(after.scale(), 65_536.0);
    }

    #[test]
    fn scale_that_is_no_power_of_two_is_refused() {
        assert!(LossScaler::dynamic(ScalerSpec { initial: 3.0, ..ScalerSpec::default() }).is_err());
    }
}
