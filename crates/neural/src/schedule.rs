//! Learning rate as a function of the step.

use serde::{Deserialize, Serialize};

use crate::error::SettingError;

/// A learning-rate schedule: linear warm-up, then constant or cosine decay.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ScheduleSpec {
    /// Learning rate after the warm-up; positive.
    pub rate: f32,
    /// Steps of the warm-up: step s (from 0) has `rate * (s + 1) / warmupSteps`. Default 0.
    #[serde(default)]
    pub warmup_steps: u64,
    /// Cosine decay from `rate` after the warm-up to `floor` at the last step. Absent: constant.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cosine: Option<CosineSpec>,
}

/// Cosine decay (Loshchilov and Hutter, 2017).
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct CosineSpec {
    /// Steps from 0 to the end of the decay, warm-up included. Later steps have the floor.
    pub total_steps: u64,
    /// Last learning rate, from 0 to `rate`. Default 0.
    #[serde(default)]
    pub floor: f32,
}

/// A validated schedule.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Schedule(ScheduleSpec);

impl Schedule {
    /// Validates a specification.
    ///
    /// # Errors
    /// A setting is out of range.
    pub fn new(spec: ScheduleSpec) -> Result<Self, SettingError> {
        let valid = spec.rate.is_finite() && spec.rate > 0.0;
        SettingError::unless(valid, "schedule.rate", spec.rate, "a positive number")?;
        if let Some(cosine) = spec.cosine {
            let valid = (0.0..=spec.rate).contains(&cosine.floor);
            SettingError::unless(valid, "schedule.cosine.floor", cosine.floor, "0 to schedule.rate")?;
            let valid = cosine.total_steps > spec.warmup_steps;
            let allowed = "more than schedule.warmupSteps";
            SettingError::unless(valid, "schedule.cosine.totalSteps", cosine.total_steps, allowed)?;
        }
        Ok(Self(spec))
    }

    /// Learning rate of step `step`, counted from 0.
    pub fn rate(&self, step: u64) -> f32 {
        let spec = &self.0;
        let rate = f64::from(spec.rate);
        if step < spec.warmup_steps {
            return (rate * (step + 1) as f64 / spec.warmup_steps as f64) as f32;
        }
        let Some(cosine) = spec.cosine else { return spec.rate };
        let length = (cosine.total_steps - spec.warmup_steps) as f64;
        let at = ((step - spec.warmup_steps) as f64 / length).min(1.0);
        let floor = f64::from(cosine.floor);
        (floor + (rate - floor) * 0.5 * (1.0 + (std::f64::consts::PI * at).cos())) as f32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn warmup_is_linear_and_cosine_ends_at_the_floor() {
        let cosine = Some(CosineSpec { total_steps: 14, floor: 0.2 });
        let schedule = Schedule::new(ScheduleSpec { rate: 1.0, warmup_steps: 4, cosine }).unwrap();
        let rates: Vec<f32> = [0, 3, 4, 9, 14, 1000].map(|s| schedule.rate(s)).to_vec();
        assert_eq!(rates, [0.25, 1.0, 1.0, 0.6, 0.2, 0.2]);
        let constant = Schedule::new(ScheduleSpec { rate: 0.5, warmup_steps: 0, cosine: None }).unwrap();
        assert_eq!(constant.rate(u64::MAX), 0.5);
        let cosine = Some(CosineSpec { total_steps: 4, floor: 0.0 });
        let error = Schedule::new(ScheduleSpec { rate: 1.0, warmup_steps: 4, cosine }).unwrap_err();
        assert_eq!(error.to_string(), "schedule.cosine.totalSteps is 4, allowed: more than schedule.warmupSteps");
    }
}
