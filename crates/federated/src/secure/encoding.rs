//! Values as integers modulo 2^m: clipping, stochastic rounding, packing into m bits, masks.

use chacha20::ChaCha20Rng;
use chacha20::rand_core::{Rng, SeedableRng};

use super::SecureError;
use crate::random::{Seed, unit};

/// Expanded bytes per pass: fits the first-level cache.
const BLOCK_BYTES: usize = 8 << 10;

/// All values below 2^bits.
const fn low_bits(bits: u32) -> u64 {
    u64::MAX >> (64 - bits)
}

/// Encodes a value in [-clip, clip] into 0 to 2^level_bits - 1, without bias.
pub(super) fn quantize(value: f64, clip: f64, level_bits: u32, rng: &mut ChaCha20Rng) -> u64 {
    let top = low_bits(level_bits);
    let place = (value.clamp(-clip, clip) + clip) / (2.0 * clip) * top as f64;
    let down = place.floor();
    (down as u64 + u64::from(unit(rng) < place - down)).min(top)
}

/// The sum of the values of `clients` clients whose encodings add up to `sum`.
pub(super) fn dequantize(sum: u64, clients: usize, clip: f64, level_bits: u32) -> f64 {
    sum as f64 * (2.0 * clip / low_bits(level_bits) as f64) - clients as f64 * clip
}

/// The largest encoded value.
pub(super) const fn top_level(level_bits: u32) -> u64 {
    low_bits(level_bits)
}

/// Adds or subtracts the expansion of a 256-bit key, modulo 2^bits.
pub(super) fn apply_mask(values: &mut [u64], key: &Seed, subtract: bool, bits: u32) {
    let mut rng = ChaCha20Rng::from_seed(*key);
    let mut block = [0; BLOCK_BYTES];
    // Each value takes whole bytes of the stream; the excess bits are cut off, so masks are uniform.
    let width = if bits <= 32 { 4 } else { 8 };
    for values in values.chunks_mut(BLOCK_BYTES / width) {
        rng.fill_bytes(&mut block);
        for (value, bytes) in values.iter_mut().zip(block.chunks_exact(width)) {
            let mut word = [0; 8];
            word[..width].copy_from_slice(bytes);
            let mask = u64::from_le_bytes(word);
            *value = if subtract { value.wrapping_sub(mask) } else { value.wrapping_add(mask) } & low_bits(bits);
        }
    }
}

/// Adds values modulo 2^bits.
pub(super) fn add_values(sum: &mut [u64], values: &[u64], bits: u32) {
    for (sum, value) in sum.iter_mut().zip(values) {
        *sum = sum.wrapping_add(*value) & low_bits(bits);
    }
}

/// Packs values below 2^bits into `bits` bits each, lowest bit first.
pub(super) fn pack(values: &[u64], bits: u32) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(packed_bytes(values.len(), bits));
    let (mut buffer, mut filled) = (0_u128, 0);
    for value in values {
        buffer |= u128::from(*value) << filled;
        filled += bits;
        while filled >= 8 {
            bytes.push(buffer as u8);
            buffer >>= 8;
            filled -= 8;
        }
    }
    if filled > 0 {
        bytes.push(buffer as u8);
    }
    bytes
}

/// Bytes of `count` packed values.
pub(super) const fn packed_bytes(count: usize, bits: u32) -> usize {
    (count * bits as usize).div_ceil(8)
}

/// Reads `count` packed values.
///
/// # Errors
/// When the length is wrong, or the bits after the last value are not zero.
pub(super) fn unpack(bytes: &[u8], count: usize, bits: u32) -> Result<Vec<u64>, SecureError> {
    if bytes.len() != packed_bytes(count, bits) {
        return Err(SecureError::InvalidVector);
    }
    let (mut buffer, mut filled) = (0_u128, 0);
    let mut values = Vec::with_capacity(count);
    for byte in bytes {
        buffer |= u128::from(*byte) << filled;
        filled += 8;
        while filled >= bits && values.len() < count {
            values.push(buffer as u64 & low_bits(bits));
            buffer >>= bits;
            filled -= bits;
        }
    }
    if buffer == 0 { Ok(values) } else { Err(SecureError::InvalidVector) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::stream;

    #[test]
    fn packing_is_lossless_at_every_width() {
        for bits in [1, 7, 8, 26, 32, 33, 61, 64] {
            let values: Vec<u64> =
                (0..101_u64).map(|i| i.wrapping_mul(0x9E37_79B9_7F4A_7C15) & low_bits(bits)).collect();
            let bytes = pack(&values, bits);
            assert_eq!(bytes.len(), packed_bytes(101, bits));
            assert_eq!(unpack(&bytes, 101, bits).unwrap(), values);
            assert!(unpack(&bytes[1..], 101, bits).is_err());
        }
        assert!(unpack(&[0xFF], 1, 7).is_err(), "bits after the last value");
    }

    #[test]
    fn quantization_is_unbiased_and_clipped() {
        let mut rng = stream(&[1; 32], "test", 0);
        let draws = 20_000;
        let mut mean = |value: f64| {
            let sum: u64 = (0..draws).map(|_| quantize(value, 2.0, 4, &mut rng)).sum();
            dequantize(sum, draws, 2.0, 4) / draws as f64
        };
        for (value, expected) in [(0.3, 0.3), (-1.234, -1.234), (9.0, 2.0), (-9.0, -2.0)] {
            assert!((mean(value) - expected).abs() < 0.005, "{value}");
        }
    }

    #[test]
    fn blocks_of_a_long_mask_differ() {
        for bits in [26, 64] {
            let mut values = vec![0; 3 * BLOCK_BYTES / 4];
            apply_mask(&mut values, &[7; 32], false, bits);
            for block in [BLOCK_BYTES / 8, BLOCK_BYTES / 4] {
                let same = values.iter().zip(&values[block..]).filter(|(a, b)| a == b).count();
                assert!(same < 3, "{bits} bits: {same} values are repeated after {block}");
            }
        }
    }

    #[test]
    fn every_bit_of_a_key_changes_its_mask() {
        let mask = |key: Seed| {
            let mut values = [0; 2];
            apply_mask(&mut values, &key, false, 64);
            values
        };
        let changed = (0..256_usize).map(|bit| {
            let mut key = [7; 32];
            key[bit / 8] ^= 1 << (bit % 8);
            mask(key)
        });
        let masks: std::collections::BTreeSet<[u64; 2]> = changed.chain([mask([7; 32])]).collect();
        assert_eq!(masks.len(), 257);
    }

    #[test]
    fn each_bit_of_a_mask_is_set_half_of_the_time() {
        let count = 4_000;
        for bits in [26, 33, 48, 64] {
            let mut mask = vec![0; count];
            apply_mask(&mut mask, &[3; 32], false, bits);
            for bit in 0..bits {
                let set = mask.iter().filter(|value| *value >> bit & 1 == 1).count() as f64;
                // Six standard deviations of a binomial count.
                let deviation = (set - count as f64 / 2.0).abs() / (count as f64 / 4.0).sqrt();
                assert!(deviation < 6.0, "bit {bit} of {bits}: {set} of {count}");
            }
        }
    }

    #[test]
    fn masks_cancel_and_differ_by_key() {
        for bits in [26, 48, 64] {
            let original: Vec<u64> = (0..5_000).collect();
            let mut values = original.clone();
            apply_mask(&mut values, &[1; 32], false, bits);
            assert!(values.iter().all(|value| *value <= low_bits(bits)));
            assert_ne!(values, original);
            let masked = values.clone();
            apply_mask(&mut values, &[2; 32], true, bits);
            assert_ne!(values, original);
            values = masked;
            apply_mask(&mut values, &[1; 32], true, bits);
            assert_eq!(values, original);
        }
    }
}
