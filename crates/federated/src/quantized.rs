//! Models as 8-bit integers: what clients download where bytes count more than the last digits.
//!
//! Blocks of 256 values have a scale each: 4 bytes little-endian, then one signed byte per value. A value differs from its original by at most
//! half a scale, 1/254 of the largest absolute value of its block.

/// Values per scale.
const BLOCK: usize = 256;
/// Largest absolute value of an encoded value.
const LEVELS: f32 = 127.0;

/// Bytes of `values` encoded values.
#[must_use]
pub const fn encoded_bytes(values: usize) -> usize {
    values + 4 * values.div_ceil(BLOCK)
}

/// Encodes finite values.
#[must_use]
pub fn encode(values: &[f32]) -> Vec<u8> {
    let mut content = Vec::with_capacity(encoded_bytes(values.len()));
    for block in values.chunks(BLOCK) {
        let largest = block.iter().fold(0.0_f32, |largest, value| largest.max(value.abs()));
        let scale = largest / LEVELS;
        content.extend(scale.to_le_bytes());
        // A scale that underflows to 0 rounds its block to 0.
        let level = |value: &f32| if scale > 0.0 { (value / scale).round().clamp(-LEVELS, LEVELS) as i8 } else { 0 };
        content.extend(block.iter().map(|value| level(value).cast_unsigned()));
    }
    content
}

/// Decodes `values` values; `None` if the content has another length, or a scale that is not finite.
#[must_use]
pub fn decode(content: &[u8], values: usize) -> Option<Vec<f32>> {
    if content.len() != encoded_bytes(values) {
        return None;
    }
    let mut decoded = Vec::with_capacity(values);
    for block in content.chunks(4 + BLOCK) {
        let (scale, levels) = block.split_first_chunk::<4>()?;
        let scale = f32::from_le_bytes(*scale);
        if !scale.is_finite() {
            return None;
        }
        decoded.extend(levels.iter().map(|level| (f32::from(level.cast_signed()) * scale).clamp(f32::MIN, f32::MAX)));
    }
    Some(decoded)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_within_half_a_scale_of_their_block_and_take_a_quarter_of_the_bytes() {
        let values: Vec<f32> =
            (0..1_000).map(|number| ((number * 37 % 101) as f32 - 50.0) * 0.01 * (1 + number / 256) as f32).collect();
        let content = encode(&values);
        assert_eq!(content.len(), 1_000 + 4 * 4);
        let decoded = decode(&content, 1_000).unwrap();
        for (block, (original, decoded)) in values.chunks(BLOCK).zip(decoded.chunks(BLOCK)).enumerate() {
            let largest = original.iter().fold(0.0_f32, |largest, value| largest.max(value.abs()));
            for (original, decoded) in original.iter().zip(decoded) {
                assert!((original - decoded).abs() <= largest / 253.0, "block {block}: {original} became {decoded}");
            }
        }
        assert_eq!(encode(&decoded), content, "a decoded model is encoded alike");
    }

    #[test]
    fn hostile_contents_are_refused_and_extreme_values_stay_finite() {
        assert_eq!(decode(&[0; 9], 4), None);
        assert_eq!(decode(&[&f32::NAN.to_le_bytes()[..], &[1; 4]].concat(), 4), None);
        assert_eq!(decode(&encode(&[0.0; 3]), 3).unwrap(), [0.0; 3]);
        assert_eq!(decode(&encode(&[1e-45, 0.0]), 2).unwrap(), [0.0; 2]);
        assert!(decode(&encode(&[f32::MAX, f32::MIN]), 2).unwrap().iter().all(|value| value.is_finite()));
    }
}
