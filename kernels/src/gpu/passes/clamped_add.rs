//! Composition of consecutive updates of a weight, as in `laws.cuh`, which has the proof.

use engram_memory::ONE;

/// `x -> min(high, max(low, x + add))`, with `low <= high <= ONE`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::gpu) struct ClampedAdd {
    pub(in crate::gpu) add: i64,
    pub(in crate::gpu) low: u32,
    pub(in crate::gpu) high: u32,
}

impl ClampedAdd {
    /// Returns the map of one update.
    pub(in crate::gpu) fn update(delta: i32) -> Self {
        Self { add: i64::from(delta), low: 0, high: ONE }
    }

    /// Applies the map to a weight.
    fn apply(self, weight: u32) -> u32 {
        (i64::from(weight) + self.add).clamp(i64::from(self.low), i64::from(self.high)) as u32
    }

    /// Returns the composition of this map and the next.
    pub(in crate::gpu) fn then(self, next: Self) -> Self {
        Self { add: self.add + next.add, low: next.apply(self.low), high: next.apply(self.high) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use engram_memory::Weight;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn composed_updates_are_the_updates_in_turn(
            weight in 0..=ONE, deltas in proptest::collection::vec(any::<i32>(), 1..12), cut: prop::sample::Index,
        ) {
            let in_turn = |weight, deltas: &[i32]| {
                deltas.iter().fold(Weight::from_units(weight).unwrap(), |weight, &delta| weight.updated(delta))
            };
            let composed = |deltas: &[i32]| deltas.iter().map(|&delta| ClampedAdd::update(delta)).reduce(ClampedAdd::then);
            let whole = composed(&deltas).unwrap();
            prop_assert_eq!(whole.apply(weight), in_turn(weight, &deltas).units());
            // Composition is associative.
            let (left, right) = deltas.split_at(cut.index(deltas.len()));
            if let (Some(left), Some(right)) = (composed(left), composed(right)) {
                prop_assert_eq!(left.then(right), whole);
            }
        }
    }
}
