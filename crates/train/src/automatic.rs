//! Automatic compression of gradient sums: the level follows from the share of the time of a step that its reduction takes.
//!
//! Members exchange the times of their last step with the counts of each sum, and [`Trainer::observe_times`] takes those of a committed step. So all
//! members decide from the same numbers at the same step, and a step that is repeated after a failure counts once.
//!
//! What compression lost stays valid at a switch: it is a gradient that was not sent yet, in the same unit at every level. The next compressed sum makes up
//! for it, and the first whole sum carries all of it.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::compression::GradientEncoding;
use crate::ensemble::Ensemble;
use crate::trainer::Trainer;

/// Measured steps between two decisions: outliers of a few steps do not decide.
const WINDOW_STEPS: u32 = 100;
/// Share of a step above which the next level is used.
const UPPER_SHARE: f64 = 0.2;
/// Expected share of a step at the level below, below which that is used. Half of the other, so that noise does not switch back and forth.
const LOWER_SHARE: f64 = 0.1;
/// Updates before the first approximation by low rank: early gradients change too fast for it.
const LOW_RANK_AFTER: u64 = 1_000;

/// What a member measured in a step, in nanoseconds. All are 0 where it measured nothing, as in the first step of a generation.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct StepTimes {
    /// From the end of the step before to its own end.
    pub step: u64,
    /// Part of it in reductions that no computation hid.
    pub reduction: u64,
}

impl StepTimes {
    /// Returns the times that count for a group: those of the member with the shortest reduction. In those of the others is the wait for slower members,
    /// which compression does not shorten. `None` where a member measured nothing.
    fn of_group(members: &[Self]) -> Option<Self> {
        let shortest = members.iter().min_by_key(|it| (it.reduction, it.step))?;
        members.iter().all(|it| it.step > 0).then_some(*shortest)
    }
}

/// Encodings of gradient sums, by the bytes that they send.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum CompressionLevel {
    /// Whole sums.
    #[default]
    None,
    /// bfloat16.
    Bf16,
    /// Matrices as products of two thin ones.
    PowerSgd,
}

impl CompressionLevel {
    /// Returns the encoding; `None` of whole sums.
    pub(crate) const fn encoding(self) -> Option<GradientEncoding> {
        match self {
            Self::None => None,
            Self::Bf16 => Some(GradientEncoding::Bf16),
            Self::PowerSgd => Some(GradientEncoding::PowerSgd),
        }
    }
}

/// What a group sends at each level.
#[derive(Debug, Clone, Copy)]
struct Traffic {
    members: u64,
    parameters: u64,
    /// Values of the factors of a gradient, and of what travels as it is.
    factors: u64,
}

impl Traffic {
    /// Returns the bytes that a member sends, divided by what is common to all levels. Sums are all-reduced, and each member sends about `2 (n - 1) / n` of
    /// their bytes; 16-bit values go to all others, `n - 1` times.
    const fn bytes(self, level: CompressionLevel) -> u64 {
        match level {
            CompressionLevel::None => 4 * self.parameters,
            CompressionLevel::Bf16 => self.members * self.parameters,
            CompressionLevel::PowerSgd => 4 * self.factors,
        }
    }

    /// Returns the levels of which each sends less than the one before: `Bf16` is none of them in a group of four or more.
    fn levels(self) -> Vec<CompressionLevel> {
        let mut levels = vec![CompressionLevel::None];
        for level in [CompressionLevel::Bf16, CompressionLevel::PowerSgd] {
            if levels.last().is_some_and(|last| self.bytes(level) < self.bytes(*last)) {
                levels.push(level);
            }
        }
        levels
    }
}

/// A change of the level, and why.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CompressionSwitch {
    /// Level until now.
    pub from: CompressionLevel,
    /// Level from the next step on.
    pub to: CompressionLevel,
    /// Share of the time of the last steps in which reductions were exposed.
    pub share: f64,
    /// Of a switch to a lower level: the share that is expected there.
    pub expected: Option<f64>,
}

impl fmt::Display for CompressionSwitch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { from, to, share, expected } = self;
        write!(f, "gradient compression switched from {from:?} to {to:?}: ")?;
        write!(f, "reductions took {:.1} % of the last {WINDOW_STEPS} steps, ", 100.0 * share)?;
        match expected.map(|it| 100.0 * it) {
            None => write!(f, "more than {:.0} %", 100.0 * UPPER_SHARE),
            Some(expected) => {
                write!(
                    f,
                    "and are expected to take {expected:.1} % with {to:?}, less than {:.0} %",
                    100.0 * LOWER_SHARE
                )
            }
        }
    }
}

/// State of automatic compression, equal on all members and part of checkpoints.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct AutomaticCompression {
    /// The level.
    pub level: CompressionLevel,
    /// Whether the next whole sum carries what compression lost.
    pub is_flushing: bool,
    /// Measured steps of the window.
    pub steps: u32,
    /// Sums over the steps of the window.
    pub times: StepTimes,
}

impl AutomaticCompression {
    /// State of a trainer whose members may have losses of another compression.
    pub(crate) fn after_other_compression() -> Self {
        Self { is_flushing: true, ..Self::default() }
    }

    /// Returns the numbers of the state, for its digest.
    pub(crate) fn numbers(&self) -> [u64; 5] {
        let Self { level, is_flushing, steps, times } = *self;
        [level as u64, u64::from(is_flushing), u64::from(steps), times.step, times.reduction]
    }

    /// Adds a step; decides at the end of a window. `updates` is the number of updates so far.
    fn observe(&mut self, times: StepTimes, traffic: Traffic, updates: u64) -> Option<CompressionSwitch> {
        self.steps += 1;
        self.times.step += times.step;
        self.times.reduction += times.reduction.min(times.step);
        if self.steps < WINDOW_STEPS {
            return None;
        }
        let switch = self.decide(traffic, updates);
        (self.steps, self.times) = (0, StepTimes::default());
        if let Some(switch) = &switch {
            self.level = switch.to;
            self.is_flushing = switch.to == CompressionLevel::None;
        }
        switch
    }

    fn decide(&self, traffic: Traffic, updates: u64) -> Option<CompressionSwitch> {
        let (from, levels) = (self.level, traffic.levels());
        let reduction = self.times.reduction as f64;
        let computation = self.times.step as f64 - reduction;
        let share = reduction / self.times.step as f64;
        let is_allowed = |level: &CompressionLevel| *level != CompressionLevel::PowerSgd || updates >= LOW_RANK_AFTER;
        let above = levels.iter().copied().find(|level| *level > from).filter(is_allowed);
        if let Some(to) = above.filter(|_| share > UPPER_SHARE) {
            return Some(CompressionSwitch { from, to, share, expected: None });
        }
        let to = levels.iter().copied().rfind(|level| *level < from)?;
        // A reduction is short because it is compressed: what counts is how long it would be at the level below.
        let expected = reduction * traffic.bytes(to) as f64 / traffic.bytes(from) as f64;
        let expected = expected / (computation + expected).max(1.0);
        (expected < LOWER_SHARE).then_some(CompressionSwitch { from, to, share, expected: Some(expected) })
    }
}

impl Ensemble {
    /// As [`Trainer::observe_times`]; sums of several models are not compressed.
    pub fn observe_times(&mut self, members: &[StepTimes]) -> Option<CompressionSwitch> {
        let [member] = self.members_mut() else { return None };
        member.observe_times(members)
    }
}

impl Trainer {
    /// With automatic compression: takes the times that all members sent with the sum that was just committed. Returns the switch of the level from the next
    /// step on, if there is one.
    pub fn observe_times(&mut self, members: &[StepTimes]) -> Option<CompressionSwitch> {
        let automatic = self.automatic.as_mut()?;
        let times = StepTimes::of_group(members)?;
        let factors = self.factors.as_ref()?.plan.sent_elements() as u64;
        let parameters = self.model.parameter_count() as u64;
        let traffic = Traffic { members: members.len() as u64, parameters, factors };
        automatic.observe(times, traffic, self.counters.updates)
    }

    /// State of automatic compression; `None` with another one.
    pub const fn automatic_compression(&self) -> Option<&AutomaticCompression> {
        self.automatic.as_ref()
    }

    /// Encoding of the next sum; `None` where it travels whole.
    pub(crate) fn encoding(&self) -> Option<GradientEncoding> {
        match &self.automatic {
            Some(automatic) => automatic.level.encoding(),
            None => self.spec.compression.as_ref().map(|it| it.kind),
        }
    }

    /// Whether the next sum travels whole and carries what compression lost.
    pub(crate) fn is_flushing(&self) -> bool {
        self.automatic.as_ref().is_some_and(|it| it.is_flushing)
    }
}

#[cfg(test)]
mod tests;
