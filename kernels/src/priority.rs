//! Prioritized sampling in integers, so that every device and placement draws the same memories.
//!
//! A priority is a power of the weight: a table of exact powers at [`KNOTS`] weights, computed once per exponent, with linear interpolation. A
//! draw is a threshold into the prefix sums of the priorities. Draws are unbiased however well the table approximates the power: the probability
//! of a memory is its integer priority over the sum of all. `priority.cuh` has the same algorithm.

/// Weights with an exact power: 0 to 255, then 128 for each power of two up to [`ONE`](engram_memory::ONE).
pub const KNOTS: usize = 3_073;
/// The exponent 1: exponents are in units of 2^-16.
pub const EXPONENT_ONE: u32 = 1 << 16;

/// The priorities of all weights for one exponent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Priorities {
    /// At the knots, the last one repeated.
    table: Box<[u32]>,
}

impl Priorities {
    /// Computes the priorities `weight ^ (exponent / 2^16)`; the exponent is at most [`EXPONENT_ONE`], 0 draws all memories of positive weight alike.
    ///
    /// # Panics
    /// When the exponent is greater.
    pub fn new(exponent: u32) -> Self {
        assert!(exponent <= EXPONENT_ONE, "the exponent is at most 1");
        let knots = (0..KNOTS).map(|knot| if knot == 0 { 0 } else { power(weight_at(knot), exponent).max(1) });
        let mut table: Vec<u32> = knots.collect();
        table.push(table[KNOTS - 1]);
        Self { table: table.into() }
    }

    /// Returns the priority of a weight in units: monotone, at most [`ONE`](engram_memory::ONE), and 0 only for weight 0.
    pub fn of(&self, weight: u32) -> u32 {
        let shift = if weight < 256 { 0 } else { 24 - weight.leading_zeros() };
        let knot = ((shift << 7) + (weight >> shift)) as usize;
        let part = weight & ((1 << shift) - 1);
        let rise = u64::from(self.table[knot + 1] - self.table[knot]);
        self.table[knot] + ((rise * u64::from(part)) >> shift) as u32
    }

    /// Returns the table as devices read it.
    pub fn table(&self) -> &[u32] {
        &self.table
    }
}

/// Computes `weight` in (0, ONE] to the power `exponent / 2^16`, in units: binary logarithm and exponential, one bit per step.
fn power(weight: u32, exponent: u32) -> u32 {
    let top = weight.ilog2();
    let (mut mantissa, mut fraction) = (u64::from(weight) << (31 - top), 0_u64);
    for _ in 0..32 {
        mantissa = (mantissa * mantissa) >> 31;
        fraction <<= 1;
        if mantissa >> 32 != 0 {
            mantissa >>= 1;
            fraction |= 1;
        }
    }
    // log2(ONE / weight) times the exponent, 32 bits of fraction.
    let below_one = (u64::from(30 - top) << 32) - fraction;
    let exponent = u64::from(exponent);
    let scaled = (below_one >> 16) * exponent + (((below_one & 0xFFFF) * exponent) >> 16);
    let (mut result, mut root) = (1_u64 << 32, 1_u64 << 31);
    for bit in (0..32).rev() {
        root = (root << 32).isqrt(); // 2^(-2^(bit - 32))
        if scaled >> bit & 1 == 1 {
            result = (result * root) >> 32;
        }
    }
    let shift = 2 + (scaled >> 32);
    if shift > 33 { 0 } else { (result >> shift) as u32 }
}

/// Returns the weight at a knot.
fn weight_at(knot: usize) -> u32 {
    let shift = if knot < 256 { 0 } else { (knot >> 7) - 1 };
    ((knot - (shift << 7)) << shift) as u32
}

/// The draws of one step: pure functions of the seed, the step and the priorities.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Draws {
    /// Random seed.
    pub seed: u64,
    /// Step of the run.
    pub step: u64,
    /// Stream of random numbers of this step: 0 for draws from all partitions, 1 + rank for those of a member from its own.
    pub stream: u32,
    /// Number of draws, at least 1.
    pub count: u32,
    /// Sum of the priorities of all partitions of the cluster: more than 0, less than 2^62.
    pub total: u64,
}

impl Draws {
    /// Returns the threshold of draw `draw`, in `[0, total)`; thresholds ascend with the draws, one per stratum.
    pub fn threshold(&self, draw: u32) -> u64 {
        stratified(draw, self.count, random(self.seed, self.step, self.stream, draw), self.total)
    }
}

fn stratified(draw: u32, count: u32, random: u64, total: u64) -> u64 {
    let within = (u128::from(random) * u128::from(total)) >> 64;
    ((u128::from(draw) * u128::from(total) + within) / u128::from(count)) as u64
}

/// Philox4x32-10 (Salmon et al., 2011) with key = seed and counter = (draw, stream, step); returns its first two words.
fn random(seed: u64, step: u64, stream: u32, draw: u32) -> u64 {
    let mut counter = [draw, stream, step as u32, (step >> 32) as u32];
    let (mut low, mut high) = (seed as u32, (seed >> 32) as u32);
    for _ in 0..10 {
        let a = 0xD251_1F53_u64 * u64::from(counter[0]);
        let b = 0xCD9E_8D57_u64 * u64::from(counter[2]);
        counter = [(b >> 32) as u32 ^ counter[1] ^ low, b as u32, (a >> 32) as u32 ^ counter[3] ^ high, a as u32];
        low = low.wrapping_add(0x9E37_79B9);
        high = high.wrapping_add(0xBB67_AE85);
    }
    u64::from(counter[1]) << 32 | u64::from(counter[0])
}

#[cfg(test)]
mod tests {
    use super::*;
    use engram_memory::ONE;

    // Test vectors of the specification, from an independent implementation.

    #[test]
    fn priorities_are_those_of_the_specification() {
        let weights = [1, 255, 256, 257, 1_000, 1 << 20, 123_456_789, ONE / 2, ONE - 1, ONE];
        let vectors = [
            (
                39_322,
                [4_095, 113_826, 114_094, 114_361, 258_418, 16_776_506, 293_266_841, 708_402_416, 1_073_741_823, ONE],
                338_877_393_160_u64,
            ),
            (
                32_768,
                [32_768, 523_262, 524_288, 525_310, 1_036_215, 33_554_432, 364_088_679, 759_250_124, ONE - 1, ONE],
                404_885_197_823,
            ),
            (65_536, [1, 254, 256, 256, 999, 1_048_576, 123_456_788, 536_870_912, ONE - 2, ONE], 206_695_280_709),
            (0, [ONE; 10], 3_298_534_883_328),
        ];
        for (exponent, expected, sum) in vectors {
            let priorities = Priorities::new(exponent);
            assert_eq!(weights.map(|weight| priorities.of(weight)), expected, "exponent {exponent}");
            assert_eq!(priorities.table()[..KNOTS].iter().map(|&it| u64::from(it)).sum::<u64>(), sum);
            assert_eq!(priorities.of(0), 0);
        }
    }

    /// All random numbers that differ within a stratum, each once: an item is drawn as often as `count` times its share of the priorities.
    #[test]
    fn expected_draws_are_the_shares_of_the_priorities() {
        let priorities = [3_u64, 0, 5, 1, 8, 4];
        let total: u64 = priorities.iter().sum();
        let item_of = |threshold: u64| {
            let ends = priorities.iter().scan(0, |end, priority| {
                *end += priority;
                Some(*end)
            });
            ends.take_while(|end| *end <= threshold).count()
        };
        for count in 1..=9 {
            let mut drawn = [0_u64; 6];
            for draw in 0..count {
                for within in 0..total {
                    let random = ((u128::from(within) << 64).div_ceil(u128::from(total))) as u64;
                    drawn[item_of(stratified(draw, count, random, total))] += 1;
                }
            }
            assert_eq!(drawn, priorities.map(|priority| priority * u64::from(count)), "{count} draws");
        }
    }

    #[test]
    fn draws_are_those_of_the_specification() {
        assert_eq!(random(0, 0, 0, 0), 0xe169_c58d_6627_e8d5); // Known-answer test of Philox4x32-10.
        let priorities = Priorities::new(39_322);
        let weights = [0, 1, 1 << 28, 1 << 29, 1 << 30, 0, 3 << 28, 12_345_678];
        let own = weights.map(|weight| u64::from(priorities.of(weight)));
        let draws = Draws { seed: 42, step: 7, stream: 0, count: 8, total: own.iter().sum() };
        assert_eq!(draws.total, 3_226_697_927);
        let drawn: Vec<_> = (0..draws.count)
            .map(|draw| {
                let threshold = draws.threshold(draw);
                let mut sum = 0;
                let place = own.iter().position(|priority| {
                    sum += priority;
                    sum > threshold
                });
                (threshold, place.unwrap())
            })
            .collect();
        let thresholds = [
            361_315_142,
            554_683_368,
            1_184_807_251,
            1_408_940_595,
            1_680_907_266,
            2_386_423_325,
            2_600_171_046,
            3_041_913_521,
        ];
        assert!(drawn.into_iter().eq(thresholds.into_iter().zip([2, 3, 4, 4, 4, 6, 6, 6])));
        assert_eq!(stratified((1 << 20) - 1, 1 << 20, u64::MAX, (1 << 62) - 1), (1 << 62) - 2);
    }
}
