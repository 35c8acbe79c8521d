//! Weight arithmetic in integers.
//!
//! A weight is an integer in [0, [`ONE`]]; every function is exact, so results do not depend on order of summation, thread count,
//! or device. The order of operations is fixed: in a learning epoch decay comes first, then the deltas in record order, clamped
//! after each.

use std::fmt;

/// Weight 1.0 in units: weights are unsigned fixed point with 30 fractional bits.
pub const ONE: u32 = 1 << 30;

/// The quality of a memory, in units of 1/[`ONE`]; at most [`ONE`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Weight(u32);

impl Weight {
    /// Weight 0.
    pub const ZERO: Self = Self(0);
    /// Weight 1.
    pub const ONE: Self = Self(ONE);
    /// Weight 0.5, the default initial weight.
    pub const HALF: Self = Self(ONE / 2);

    /// Creates a weight of `units`; `None` above [`ONE`].
    pub const fn from_units(units: u32) -> Option<Self> {
        if units <= ONE { Some(Self(units)) } else { None }
    }

    /// Returns the units of 1/[`ONE`].
    pub const fn units(self) -> u32 {
        self.0
    }

    /// Returns the exact value in [0, 1].
    pub fn to_f64(self) -> f64 {
        f64::from(self.0) / f64::from(ONE)
    }

    /// Decays by `amount` units, at most [`ONE`]; never below 0.
    #[must_use]
    pub const fn decayed(self, amount: u32) -> Self {
        Self(self.0.saturating_sub(amount))
    }

    /// Applies one signed delta and clamps to [0, [`ONE`]].
    #[must_use]
    pub const fn updated(self, delta: i32) -> Self {
        // u32 + i32 fits in i64.
        let moved = self.0 as i64 + delta as i64;
        if moved < 0 {
            Self(0)
        } else if moved > ONE as i64 {
            Self(ONE)
        } else {
            Self(moved as u32)
        }
    }
}

impl fmt::Display for Weight {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.to_f64())
    }
}

/// Returns the weight change for `quality` at learning rate `rate`, both in units and at most [`ONE`].
///
/// Above one half the memory gains `rate * quality`, at or below it loses `rate * (1 - quality)`; products truncate toward zero.
/// Computed once, by the primary, before the log: records contain neither quality nor rate.
pub const fn delta(rate: u32, quality: u32) -> i32 {
    debug_assert!(rate <= ONE && quality <= ONE);
    if quality > ONE / 2 { product(rate, quality) } else { -product(rate, ONE - quality) }
}

/// `a * b` of two fixed-point numbers, truncated; at most [`ONE`], so it fits.
const fn product(a: u32, b: u32) -> i32 {
    ((a as u64 * b as u64) >> 30) as i32
}

/// Total rank order of (weight, id): heavier first, then the smaller id.
pub fn rank_order(a: (Weight, crate::MemoryId), b: (Weight, crate::MemoryId)) -> std::cmp::Ordering {
    b.0.cmp(&a.0).then(a.1.cmp(&b.1))
}
