//! Counter-based random numbers: a draw is a pure function of (seed, stream, index), whatever was drawn before.

use engram_neural::philox;

/// Separates the numbers of this crate from those of other users of the same seed.
const DOMAIN: u64 = 0x6765_6f64_6573_6963;

/// A family of independent draws.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Stream {
    seed: u64,
    stream: u64,
}

impl Stream {
    pub(crate) fn new(seed: u64, stream: u64) -> Self {
        Self { seed, stream }
    }

    fn words(self, index: u64) -> [u32; 4] {
        let counter = [index as u32, (index >> 32) as u32, self.stream as u32, (self.stream >> 32) as u32];
        philox(self.seed ^ DOMAIN, counter)
    }

    /// Uniform in (0, 1).
    pub(crate) fn uniform(self, index: u64) -> f64 {
        unit(self.words(index), 0)
    }

    /// Standard normal, by Box and Muller.
    pub(crate) fn normal(self, index: u64) -> f64 {
        let words = self.words(index);
        (-2.0 * unit(words, 0).ln()).sqrt() * (std::f64::consts::TAU * unit(words, 2)).cos()
    }

    /// Uniform integer in `0..bound`.
    pub(crate) fn below(self, index: u64, bound: usize) -> usize {
        ((self.uniform(index) * bound as f64) as usize).min(bound - 1)
    }
}

/// 52 bits of two words, shifted by half a step so that neither 0 nor 1 occurs.
fn unit(words: [u32; 4], first: usize) -> f64 {
    let bits = (u64::from(words[first]) << 32 | u64::from(words[first + 1])) >> 12;
    (bits as f64 + 0.5) / (1u64 << 52) as f64
}
