//! Compression with error feedback: `u = g + e`; send `C(u)`; `e <- u - decode(C(u))`.
//!
//! The error `e` is f32 state per element and part of a checkpoint. Compression is off by default.

use half::{bf16, f16};

/// How a bucket travels.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub enum Compression {
    /// f32 as it is.
    #[default]
    None,
    /// bfloat16, rounded to nearest even.
    BFloat16,
    /// float16 after a division by the number of ranks; a sum that is not finite skips the step.
    Float16,
    /// The largest elements by magnitude: this share of them, in (0, 1].
    TopK(f64),
    /// The sign of each element and the mean magnitude: one bit per element.
    OneBit,
}

/// Why a compression was refused.
#[derive(Debug, Clone, Copy, PartialEq, thiserror::Error)]
pub enum Error {
    /// A share out of its range.
    #[error("share: {0} is not allowed; allowed: above 0, at most 1")]
    Share(f64),
    /// Bytes that no encoder of this version makes.
    #[error("compressed bucket of {0} bytes is malformed")]
    Malformed(usize),
    /// Another number of elements than the error state has.
    #[error("elements: {found} is not allowed; allowed: {expected}")]
    Elements {
        /// Elements given.
        found: usize,
        /// Elements of the state.
        expected: usize,
    },
}

/// The compressor of one bucket, with its error feedback.
#[derive(Debug, Clone, PartialEq)]
pub struct Compressor {
    compression: Compression,
    error: Vec<f32>,
}

impl Compressor {
    /// Creates a compressor without accumulated error.
    ///
    /// # Errors
    /// [`Error::Share`].
    pub fn new(compression: Compression, elements: usize) -> Result<Self, Error> {
        Self::restore(compression, vec![0.0; elements])
    }

    /// Creates a compressor with the error of a checkpoint.
    ///
    /// # Errors
    /// [`Error::Share`].
    pub fn restore(compression: Compression, error: Vec<f32>) -> Result<Self, Error> {
        match compression {
            Compression::TopK(share) if !(share > 0.0 && share <= 1.0) => Err(Error::Share(share)),
            _ => Ok(Self { compression, error }),
        }
    }

    /// Returns the accumulated error, for a checkpoint or to send it uncompressed on a planned leave.
    pub fn error(&self) -> &[f32] {
        &self.error
    }

    /// Compresses a gradient and keeps what is lost.
    ///
    /// # Errors
    /// [`Error::Elements`].
    pub fn encode(&mut self, gradient: &[f32], ranks: usize) -> Result<Vec<u8>, Error> {
        if gradient.len() != self.error.len() {
            return Err(Error::Elements { found: gradient.len(), expected: self.error.len() });
        }
        let corrected: Vec<f32> = gradient.iter().zip(&self.error).map(|(g, e)| g + e).collect();
        let bytes = encode(self.compression, &corrected, ranks);
        let decoded = decode(self.compression, &bytes, gradient.len(), ranks)?;
        for ((error, exact), sent) in self.error.iter_mut().zip(&corrected).zip(&decoded) {
            let lost = exact - sent;
            // An overflow is no error to feed back: the step is skipped.
            *error = if lost.is_finite() { lost } else { 0.0 };
        }
        Ok(bytes)
    }
}

fn encode(compression: Compression, values: &[f32], ranks: usize) -> Vec<u8> {
    match compression {
        Compression::None => values.iter().flat_map(|it| it.to_le_bytes()).collect(),
        Compression::BFloat16 => values.iter().flat_map(|&it| bf16::from_f32(it).to_le_bytes()).collect(),
        Compression::Float16 => values.iter().flat_map(|&it| f16::from_f32(it / ranks as f32).to_le_bytes()).collect(),
        Compression::TopK(share) => encode_top_k(values, share),
        Compression::OneBit => encode_one_bit(values),
    }
}

/// Decodes a bucket of `elements`.
///
/// # Errors
/// [`Error::Malformed`].
pub fn decode(compression: Compression, bytes: &[u8], elements: usize, ranks: usize) -> Result<Vec<f32>, Error> {
    let malformed = Error::Malformed(bytes.len());
    let width = if compression == Compression::None { 4 } else { 2 };
    match compression {
        Compression::None | Compression::BFloat16 | Compression::Float16 if bytes.len() != elements * width => {
            Err(malformed)
        }
        Compression::None => Ok(bytes.as_chunks().0.iter().map(|it| f32::from_le_bytes(*it)).collect()),
        Compression::BFloat16 => Ok(bytes.as_chunks().0.iter().map(|it| bf16::from_le_bytes(*it).to_f32()).collect()),
        Compression::Float16 => {
            Ok(bytes.as_chunks().0.iter().map(|it| f16::from_le_bytes(*it).to_f32() * ranks as f32).collect())
        }
        Compression::TopK(_) => decode_top_k(bytes, elements).ok_or(malformed),
        Compression::OneBit => decode_one_bit(bytes, elements).ok_or(malformed),
    }
}

/// Indices as varint differences, then the values as float16, scaled by the largest magnitude.
fn encode_top_k(values: &[f32], share: f64) -> Vec<u8> {
    let kept = ((values.len() as f64 * share).ceil() as usize).min(values.len());
    let mut order: Vec<u32> = (0..values.len() as u32).collect();
    let magnitude = |index: &u32| values[*index as usize].abs();
    // Ties go to the lowest index, so that every rank keeps the same elements of equal gradients.
    order.sort_by(|a, b| magnitude(b).total_cmp(&magnitude(a)).then(a.cmp(b)));
    order.truncate(kept);
    let scale = order.first().map_or(0.0, magnitude);
    order.sort_unstable();
    let mut bytes = scale.to_le_bytes().to_vec();
    bytes.extend_from_slice(&(kept as u32).to_le_bytes());
    let mut next = 0;
    for &index in &order {
        put_varint(&mut bytes, index - next);
        next = index + 1;
    }
    for &index in &order {
        let relative = if scale > 0.0 { values[index as usize] / scale } else { 0.0 };
        bytes.extend_from_slice(&f16::from_f32(relative).to_le_bytes());
    }
    bytes
}

fn decode_top_k(bytes: &[u8], elements: usize) -> Option<Vec<f32>> {
    let scale = f32::from_le_bytes(bytes.get(..4)?.try_into().ok()?);
    let kept = u32::from_le_bytes(bytes.get(4..8)?.try_into().ok()?) as usize;
    if kept > elements {
        return None;
    }
    let mut rest = bytes.get(8..)?;
    let mut indices = Vec::with_capacity(kept);
    let mut next = 0_usize;
    for _ in 0..kept {
        let index = next.checked_add(take_varint(&mut rest)? as usize).filter(|index| *index < elements)?;
        indices.push(index);
        next = index + 1;
    }
    let (values, remainder) = rest.as_chunks();
    if values.len() != kept || !remainder.is_empty() {
        return None;
    }
    let mut decoded = vec![0.0; elements];
    for (index, value) in indices.into_iter().zip(values) {
        decoded[index] = f16::from_le_bytes(*value).to_f32() * scale;
    }
    Some(decoded)
}

fn put_varint(bytes: &mut Vec<u8>, mut value: u32) {
    while value >= 0x80 {
        bytes.push(value as u8 | 0x80);
        value >>= 7;
    }
    bytes.push(value as u8);
}

fn take_varint(bytes: &mut &[u8]) -> Option<u32> {
    let mut value = 0_u64;
    for shift in (0..35).step_by(7) {
        let (&byte, rest) = bytes.split_first()?;
        *bytes = rest;
        value |= u64::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            return u32::try_from(value).ok();
        }
    }
    None
}

fn encode_one_bit(values: &[f32]) -> Vec<u8> {
    let sum: f64 = values.iter().map(|it| f64::from(it.abs())).sum();
    let scale = (sum / values.len().max(1) as f64) as f32;
    let mut bytes = scale.to_le_bytes().to_vec();
    let signs = |chunk: &[f32]| {
        chunk.iter().enumerate().fold(0_u8, |bits, (bit, it)| bits | u8::from(it.is_sign_negative()) << bit)
    };
    bytes.extend(values.chunks(8).map(signs));
    bytes
}

fn decode_one_bit(bytes: &[u8], elements: usize) -> Option<Vec<f32>> {
    let scale = f32::from_le_bytes(bytes.get(..4)?.try_into().ok()?);
    let signs = bytes.get(4..)?;
    if signs.len() != elements.div_ceil(8) {
        return None;
    }
    let value = |index: usize| if signs[index / 8] >> (index % 8) & 1 == 1 { -scale } else { scale };
    Some((0..elements).map(value).collect())
}

/// Returns whether compression pays: the exposed communication of the last steps exceeds a fifth of the step in at least `steps` steps in a row.
/// `exposed` and `total` are seconds per step, the newest last.
pub fn should_compress(exposed: &[f64], total: &[f64], steps: usize) -> bool {
    let recent = exposed.iter().zip(total).rev().take(steps);
    exposed.len().min(total.len()) >= steps
        && steps > 0
        && recent.clone().all(|(exposed, total)| *exposed > 0.2 * total)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const ALL: [Compression; 5] =
        [Compression::None, Compression::BFloat16, Compression::Float16, Compression::TopK(0.1), Compression::OneBit];

    fn gradient(elements: usize, step: usize) -> Vec<f32> {
        (0..elements).map(|index| ((index * 37 + step * 11) % 101) as f32 / 50.0 - 1.0).collect()
    }

    #[test]
    fn what_is_sent_over_time_plus_the_error_is_the_sum_of_the_gradients() {
        for compression in ALL {
            let mut compressor = Compressor::new(compression, 200).unwrap();
            let mut sent = vec![0.0_f64; 200];
            let mut exact = vec![0.0_f64; 200];
            for step in 0..50 {
                let gradient = gradient(200, step);
                let bytes = compressor.encode(&gradient, 4).unwrap();
                let decoded = decode(compression, &bytes, 200, 4).unwrap();
                sent.iter_mut().zip(&decoded).for_each(|(sum, it)| *sum += f64::from(*it));
                exact.iter_mut().zip(&gradient).for_each(|(sum, it)| *sum += f64::from(*it));
            }
            for ((sent, error), exact) in sent.iter().zip(compressor.error()).zip(&exact) {
                assert!((sent + f64::from(*error) - exact).abs() < 1e-3, "{compression:?}");
            }
        }
    }

    #[test]
    fn restored_error_continues_with_the_same_bytes() {
        for compression in ALL {
            let mut whole = Compressor::new(compression, 64).unwrap();
            whole.encode(&gradient(64, 0), 2).unwrap();
            let mut restored = Compressor::restore(compression, whole.error().to_vec()).unwrap();
            assert_eq!(whole.encode(&gradient(64, 1), 2), restored.encode(&gradient(64, 1), 2), "{compression:?}");
        }
    }

    #[test]
    fn top_k_keeps_the_largest_and_is_small() {
        let mut compressor = Compressor::new(Compression::TopK(0.01), 10_000).unwrap();
        let mut values = vec![0.001; 10_000];
        values[7_777] = -3.0;
        let bytes = compressor.encode(&values, 1).unwrap();
        assert!(bytes.len() < 100 * 6, "{} bytes for 100 elements", bytes.len());
        assert_eq!(decode(Compression::TopK(0.01), &bytes, 10_000, 1).unwrap()[7_777], -3.0);
        assert!(
            Compressor::new(Compression::TopK(0.0), 1).is_err()
                && Compressor::new(Compression::TopK(f64::NAN), 1).is_err()
        );
    }

    #[test]
    fn overflow_in_half_precision_is_visible_and_not_fed_back() {
        let mut compressor = Compressor::new(Compression::Float16, 2).unwrap();
        let bytes = compressor.encode(&[1e9, 1.0], 2).unwrap();
        let decoded = decode(Compression::Float16, &bytes, 2, 2).unwrap();
        assert!(decoded[0].is_infinite() && decoded[1] == 1.0);
        assert_eq!(compressor.error()[0], 0.0);
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_decode_or_are_refused(bytes in proptest::collection::vec(any::<u8>(), 0..60), elements in 0_usize..40) {
            for compression in ALL {
                if let Ok(decoded) = decode(compression, &bytes, elements, 2) {
                    prop_assert_eq!(decoded.len(), elements);
                }
            }
        }
    }

    #[test]
    fn compression_starts_after_enough_exposed_steps() {
        assert!(should_compress(&[0.3; 100], &[1.0; 100], 100));
        assert!(!should_compress(&[0.3; 99], &[1.0; 99], 100));
        let mut exposed = vec![0.3; 100];
        exposed[50] = 0.1;
        assert!(!should_compress(&exposed, &[1.0; 100], 100));
    }
}
