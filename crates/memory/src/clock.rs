//! The decay clock: decay moves a clock, not the memories.
//!
//! One clock D per partition; a memory stores its *potential* `p = weight + D` as of its last write, so its weight
//! now is `max(0, p - D)`. Decay by `a` is `D += a`. When D reaches [`FOLD_AT`] the same record folds: every p becomes
//! `max(0, p - D)` and D becomes 0. Lazy and eager decay agree bit for bit, folds included.
//!
//! Invariants after every record: `D < 2^31`, `p <= D + ONE`, so `p < 3 * 2^30` fits in u32.

use crate::law::{ONE, Weight};

/// The clock folds when it reaches this value, once in about 200 epochs at decay 0.01.
pub const FOLD_AT: u32 = 1 << 31;

/// The total decay of a partition since its last fold, in units.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct DecayClock(u32);

/// What a decay asks of the memories.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Advance {
    /// Nothing: the clock moved.
    Moved,
    /// Every potential p becomes `max(0, p - subtract)`; the clock stands at 0.
    Fold {
        /// The clock before it was set to 0.
        subtract: u32,
    },
}

impl DecayClock {
    /// Makes a clock from a stored value, or `None` at or above [`FOLD_AT`].
    pub const fn from_units(units: u32) -> Option<Self> {
        if units < FOLD_AT { Some(Self(units)) } else { None }
    }

    /// The value in units, below [`FOLD_AT`].
    pub const fn units(self) -> u32 {
        self.0
    }

    /// Decays by `amount` units.
    ///
    /// # Panics
    /// When `amount` is above [`ONE`]: refused at the edge and by the decoder.
    pub fn advance(&mut self, amount: u32) -> Advance {
        assert!(amount <= ONE, "a decay of {amount} units passes the edge only as a fault of the program");
        self.0 += amount;
        if self.0 >= FOLD_AT {
            let subtract = std::mem::take(&mut self.0);
            Advance::Fold { subtract }
        } else {
            Advance::Moved
        }
    }

    /// The weight now of a memory with potential `p`.
    pub const fn weight(self, p: u32) -> Weight {
        match Weight::from_units(p.saturating_sub(self.0)) {
            Some(weight) => weight,
            None => panic!("a potential is never above the clock plus one"),
        }
    }

    /// The potential that stands for `weight` now.
    pub const fn potential(self, weight: Weight) -> u32 {
        self.0 + weight.units()
    }

    /// The potential after one delta: never starts from the raw potential of a forgotten memory.
    pub const fn updated(self, p: u32, delta: i32) -> u32 {
        self.potential(self.weight(p).updated(delta))
    }
}

/// The potential after a fold that subtracts `subtract`.
pub const fn folded(p: u32, subtract: u32) -> u32 {
    p.saturating_sub(subtract)
}
