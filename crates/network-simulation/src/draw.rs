//! Random numbers from a seed.

use engram_memory::mix64;

/// A sequence of random numbers.
#[derive(Debug, Clone)]
pub(crate) struct Draw(u64);

impl Draw {
    pub(crate) const fn new(seed: u64) -> Self {
        Self(mix64(seed ^ 0x0e7_c0de))
    }

    pub(crate) const fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix64(self.0)
    }

    /// Draws from `from..=to`.
    pub(crate) const fn within(&mut self, from: u64, to: u64) -> u64 {
        from + self.next() % (to - from + 1)
    }

    /// Returns true with this chance in percent.
    pub(crate) const fn chance(&mut self, percent: u64) -> bool {
        self.next() % 100 < percent
    }
}
