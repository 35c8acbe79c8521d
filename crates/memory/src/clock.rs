//! Decay clock: decay advances a clock instead of changing memories.
//!
//! One clock D per partition; a memory stores its *potential* `p = weight + D` as of its last write, so its current weight is
//! `max(0, p - D)`. Decay by `a` is `D += a`. When D reaches [`FOLD_AT`] the same record folds: every p becomes `max(0, p - D)`
//! and D becomes 0. Lazy and eager decay agree bit for bit, including folds.
//!
//! Invariants after every record: `D < 2^31`, `p <= D + ONE`, so `p < 3 * 2^30` fits in u32.

use crate::law::{ONE, Weight};

/// The clock folds when it reaches this value, once in about 200 epochs at decay 0.01.
pub const FOLD_AT: u32 = 1 << 31;

/// The total decay of a partition since its last fold, in units.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct DecayClock(u32);

/// Effect of a decay on the memories.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Advance {
    /// None: only the clock advanced.
    Moved,
    /// Every potential p becomes `max(0, p - subtract)`; the clock is 0.
    Fold {
        /// The clock before it was set to 0.
        subtract: u32,
    },
}

impl DecayClock {
    /// Creates a clock from a stored value; `None` at or above [`FOLD_AT`].
    pub const fn from_units(units: u32) -> Option<Self> {
        if units < FOLD_AT { Some(Self(units)) } else { None }
    }

    /// Returns the value in units, below [`FOLD_AT`].
    pub const fn units(self) -> u32 {
        self.0
    }

    /// Decays by `amount` units.
    ///
    /// # Panics
    /// When `amount` is above [`ONE`]: rejected at the edge and by the decoder.
    pub fn advance(&mut self, amount: u32) -> Advance {
        assert!(amount <= ONE, "a decay of {amount} units is rejected at the edge");
        self.0 += amount;
        if self.0 >= FOLD_AT {
            let subtract = std::mem::take(&mut self.0);
            Advance::Fold { subtract }
        } else {
            Advance::Moved
        }
    }

    /// Returns the current weight of a memory with potential `p`.
    pub const fn weight(self, p: u32) -> Weight {
        match Weight::from_units(p.saturating_sub(self.0)) {
            Some(weight) => weight,
            None => panic!("a potential is never above the clock plus one"),
        }
    }

    /// Returns the potential of `weight` at the current clock.
    pub const fn potential(self, weight: Weight) -> u32 {
        self.0 + weight.units()
    }

    /// Returns the potential after one delta, based on the clamped weight rather than the raw potential.
    pub const fn updated(self, p: u32, delta: i32) -> u32 {
        self.potential(self.weight(p).updated(delta))
    }
}

/// Returns the potential after a fold that subtracts `subtract`.
pub const fn folded(p: u32, subtract: u32) -> u32 {
    p.saturating_sub(subtract)
}
