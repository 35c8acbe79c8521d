//! Random numbers from a seed: every random choice of a run comes from here, in the order in which it is made.

use engram_memory::mix64;

/// A pseudo-random sequence.
#[derive(Debug, Clone)]
pub(crate) struct Draw(u64);

impl Draw {
    pub(crate) const fn new(seed: u64) -> Self {
        Self(mix64(seed ^ 0x5eed_5eed_5eed_5eed))
    }

    pub(crate) const fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix64(self.0)
    }

    /// Below `bound`, which must be above 0.
    pub(crate) const fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }

    /// In `from..=to`.
    pub(crate) const fn within(&mut self, from: u64, to: u64) -> u64 {
        from + self.below(to - from + 1)
    }

    /// True with this many chances in a thousand.
    pub(crate) const fn chance(&mut self, per_mille: u64) -> bool {
        self.below(1_000) < per_mille
    }

    /// One of several values, at least one.
    pub(crate) fn pick<T: Copy>(&mut self, among: &[T]) -> T {
        among[self.below(among.len() as u64) as usize]
    }

    /// 0 half of the time, so that a fault is absent from half of the runs; otherwise in `1..=most`.
    pub(crate) const fn sometimes(&mut self, most: u64) -> u64 {
        if self.chance(500) { 0 } else { self.within(1, most) }
    }
}
