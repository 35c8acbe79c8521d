//! Seeded pseudo-random numbers.

use engram_memory::{ONE, mix64};

/// A deterministic sequence, so that a failure can be replayed by its seed.
pub(crate) struct RandomNumbers(pub(crate) u64);

impl RandomNumbers {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        mix64(self.0)
    }

    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }

    pub(crate) fn one_of<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len() as u64) as usize]
    }

    pub(crate) fn delta(&mut self) -> i32 {
        let any = self.below(2 * u64::from(ONE) + 1) as i64 - i64::from(ONE);
        self.one_of(&[any as i32, 42_949_673, -42_949_672, 0, 1, -1, ONE as i32, -(ONE as i32)])
    }
}
