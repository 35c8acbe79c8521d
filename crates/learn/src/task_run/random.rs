//! Random numbers of runs: the same seed and stream give the same numbers everywhere.

/// SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014).
pub(super) struct Random(u64);

impl Random {
    /// Starts the stream `stream` of `seed`.
    pub(super) const fn new(seed: u64, stream: u64) -> Self {
        Self(mix(seed ^ mix(stream.wrapping_add(0x9E37_79B9_7F4A_7C15))))
    }

    /// Returns 64 random bits.
    pub(super) const fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        mix(self.0)
    }

    /// Returns a number in [0, 1).
    pub(super) const fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// Returns an index drawn with these weights, which need not sum to 1.
    pub(super) fn draw(&mut self, weights: &[f64]) -> usize {
        let mut rest = self.unit() * weights.iter().sum::<f64>();
        let hit = weights.iter().position(|weight| {
            rest -= weight;
            rest < 0.0
        });
        // Rounding may leave a rest: the last possible index.
        hit.unwrap_or_else(|| weights.iter().rposition(|&weight| weight > 0.0).unwrap_or(0))
    }

    /// Returns the numbers below `count` in random order.
    pub(super) fn permutation(&mut self, count: usize) -> Vec<usize> {
        let mut order: Vec<usize> = (0..count).collect();
        for last in (1..count).rev() {
            let other = (self.unit() * (last + 1) as f64) as usize;
            order.swap(last, other);
        }
        order
    }
}

const fn mix(mut word: u64) -> u64 {
    word = (word ^ (word >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    word = (word ^ (word >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    word ^ (word >> 31)
}
