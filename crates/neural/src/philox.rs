//! Philox4x32-10: counter-based random numbers (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as
//! 1, 2, 3", 2011). A number is a pure function of a key and a counter, so it does not depend on the order of draws.

const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];

/// Separates the numbers of this crate from those of other users of the same seed, such as the sampler of a buffer.
const DOMAIN: u64 = 0x6e65_7572_616c_0000;

/// Four random words for `key` and `counter`, ten rounds.
pub fn philox(key: u64, counter: [u32; 4]) -> [u32; 4] {
    let mut key = [key as u32, (key >> 32) as u32];
    let mut c = counter;
    for _ in 0..10 {
        let a = u64::from(MULTIPLIERS[0]) * u64::from(c[0]);
        let b = u64::from(MULTIPLIERS[1]) * u64::from(c[2]);
        c = [(b >> 32) as u32 ^ c[1] ^ key[0], b as u32, (a >> 32) as u32 ^ c[3] ^ key[1], a as u32];
        key = [key[0].wrapping_add(WEYL[0]), key[1].wrapping_add(WEYL[1])];
    }
    c
}

/// Key of the dropout streams of a seed; that of a layer is this xor its number.
pub(crate) fn dropout_key(seed: u64) -> u64 {
    seed ^ DOMAIN
}

/// Four words of the dropout stream: units `4 * block` to `4 * block + 3` of `layer` for one sample of one step.
///
/// `sample` is the position in the global batch, so the words are the same for any split of the batch.
pub(crate) fn dropout_words(seed: u64, step: u64, layer: u16, sample: u32, block: u32) -> [u32; 4] {
    let key = dropout_key(seed) ^ u64::from(layer);
    philox(key, [block, sample, step as u32, (step >> 32) as u32])
}

/// Uniform number in [0, 1) with 24 bits for element `index` of parameter tensor `tensor`.
pub(crate) fn initial_uniform(seed: u64, tensor: u32, index: u64) -> f32 {
    let block = index / 4;
    let words = philox(!(seed ^ DOMAIN), [block as u32, (block >> 32) as u32, tensor, 0]);
    unit(words[(index % 4) as usize])
}

/// Maps a word to [0, 1) with the 24 bits that an f32 holds.
pub(crate) fn unit(word: u32) -> f32 {
    (word >> 8) as f32 / 16_777_216.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn philox_gives_the_known_answers_of_its_authors() {
        assert_eq!(philox(0, [0; 4]), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        assert_eq!(philox(u64::MAX, [u32::MAX; 4]), [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]);
    }
}
