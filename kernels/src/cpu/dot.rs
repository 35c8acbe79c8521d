//! Dot products of a query with stored f16 features, widened by the processor's own instruction where available.
//!
//! The compiler does not emit that instruction for plain loops, and widening by integer operations is slower than memory. Products and sums
//! follow the order of [`crate::recall`], so the bits are identical.

use crate::instructions::{Level, Set};
use crate::recall::dot_f16_bytes;

/// Computes the dot product of the query with each row: little-endian f16 bits, `query.len()` elements per row, rows contiguous.
pub(super) fn dots(level: Level, query: &[f32], rows: &[u8], out: &mut [f32]) {
    match level.set() {
        #[cfg(target_arch = "x86_64")]
        Set::Avx512 | Set::Avx2 => x86_64::dots(level, query, rows, out),
        Set::Portable => {
            let rows = rows.chunks_exact(size_of_val(query) / 2);
            out.iter_mut().zip(rows).for_each(|(dot, row)| *dot = dot_f16_bytes(query, row));
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[allow(unsafe_code)] // Loads by pointer, each within a chunk of the right length.
mod x86_64 {
    use super::{Level, Set};
    use crate::recall::COLUMNS;
    use std::arch::x86_64::*;

    /// Prefetch distance for rows in bytes: the hardware prefetcher does not cross a 4 KiB page.
    const AHEAD: usize = 4_096;

    /// Vectorized version of [`super::dots`]. Processes one row at a time: several rows would share query loads but wait longer for their data.
    pub(super) fn dots(level: Level, query: &[f32], rows: &[u8], out: &mut [f32]) {
        match level.set() {
            // SAFETY: the level says that the processor has AVX-512.
            Set::Avx512 => unsafe { dots_avx512(query, rows, out) },
            // SAFETY: the level says that the processor has AVX2 and F16C.
            Set::Avx2 => unsafe { dots_avx2(query, rows, out) },
            Set::Portable => unreachable!("the portable level is handled by the caller"),
        }
    }

    #[target_feature(enable = "avx512f,avx512dq,avx2,f16c")]
    fn dots_avx512(query: &[f32], rows: &[u8], out: &mut [f32]) {
        for (dot, row) in out.iter_mut().zip(rows.chunks_exact(size_of_val(query) / 2)) {
            let mut columns = [_mm512_setzero_ps(); 2];
            each_part(query, row, |query, row| {
                for (half, columns) in columns.iter_mut().enumerate() {
                    // SAFETY: sixteen f32 follow, at least the last sixteen of 32.
                    let query = unsafe { _mm512_loadu_ps(query[half * 16..].as_ptr()) };
                    // SAFETY: sixteen f16 follow, likewise.
                    let own = unsafe { _mm256_loadu_si256(row[half * 32..].as_ptr().cast()) };
                    *columns = _mm512_add_ps(*columns, _mm512_mul_ps(_mm512_cvtph_ps(own), query));
                }
            });
            let sixteen = _mm512_add_ps(columns[0], columns[1]);
            *dot = sum(_mm256_add_ps(_mm512_castps512_ps256(sixteen), _mm512_extractf32x8_ps::<1>(sixteen)));
        }
    }

    #[target_feature(enable = "avx2,f16c")]
    fn dots_avx2(query: &[f32], rows: &[u8], out: &mut [f32]) {
        for (dot, row) in out.iter_mut().zip(rows.chunks_exact(size_of_val(query) / 2)) {
            let mut columns = [_mm256_setzero_ps(); 4];
            each_part(query, row, |query, row| {
                for (quarter, columns) in columns.iter_mut().enumerate() {
                    // SAFETY: eight f32 follow, at least the last eight of 32.
                    let query = unsafe { _mm256_loadu_ps(query[quarter * 8..].as_ptr()) };
                    // SAFETY: eight f16 follow, likewise.
                    let own = unsafe { _mm_loadu_si128(row[quarter * 16..].as_ptr().cast()) };
                    *columns = _mm256_add_ps(*columns, _mm256_mul_ps(_mm256_cvtph_ps(own), query));
                }
            });
            let [a, b, c, d] = columns;
            *dot = sum(_mm256_add_ps(_mm256_add_ps(a, c), _mm256_add_ps(b, d)));
        }
    }

    /// Calls `add` for each group of columns of query and row; the last group is padded with zeros.
    #[inline(always)]
    fn each_part(query: &[f32], row: &[u8], mut add: impl FnMut(&[f32; COLUMNS], &[u8; 2 * COLUMNS])) {
        let (queries, last_query) = query.as_chunks::<COLUMNS>();
        let (parts, last_part) = row.as_chunks::<{ 2 * COLUMNS }>();
        for (query, part) in queries.iter().zip(parts) {
            // SAFETY: every x86-64 processor has the instruction, and it accepts any address.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(part.as_ptr().cast::<i8>().wrapping_add(AHEAD)) };
            add(query, part);
        }
        if !last_query.is_empty() {
            // Zeros change no sum: no sum is -0, since each starts at 0.
            let (mut padded_query, mut padded_part) = ([0.0; COLUMNS], [0; 2 * COLUMNS]);
            padded_query[..last_query.len()].copy_from_slice(last_query);
            padded_part[..last_part.len()].copy_from_slice(last_part);
            add(&padded_query, &padded_part);
        }
    }

    /// Sums eight columns in pairs 4, 2, 1 apart.
    #[target_feature(enable = "avx2,f16c")]
    #[inline]
    fn sum(eight: __m256) -> f32 {
        let four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
        let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
        _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps::<1>(two, two)))
    }

    #[cfg(test)]
    mod tests {
        use super::*;
        use crate::Instructions;
        use crate::recall::widen_f16;

        #[test]
        fn the_instruction_widens_every_half_as_integers_do() {
            if Level::of(Instructions::Avx2).set() == Set::Portable {
                return;
            }
            #[target_feature(enable = "avx2,f16c")]
            fn by_instruction(bits: u16) -> f32 {
                _mm256_cvtss_f32(_mm256_cvtph_ps(_mm_set1_epi16(bits.cast_signed())))
            }
            for bits in 0..=u16::MAX {
                // SAFETY: the level above has F16C.
                let value = unsafe { by_instruction(bits) };
                assert_eq!(value.to_bits(), widen_f16(bits).to_bits(), "{bits:04x}");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Instructions;
    use engram_memory::mix64;

    #[test]
    fn dot_products_have_the_same_bits_at_every_level() {
        for dimension in [1, 7, 31, 32, 33, 64, 100, 383, 384] {
            // Finite values of every magnitude, subnormal ones included.
            let half = |number: usize| {
                let bits = mix64(number as u64) as u16;
                if bits & 0x7c00 == 0x7c00 { bits & 0x83ff } else { bits }
            };
            for count in [0, 1, 2, 3, 9] {
                let rows: Vec<u8> = (0..count * dimension).flat_map(|number| half(number).to_le_bytes()).collect();
                let query: Vec<f32> =
                    (0..dimension).map(|number| crate::recall::widen_f16(half(number + 77_777))).collect();
                let bits = |instructions| {
                    let mut out = vec![f32::NAN; count];
                    dots(Level::of(instructions), &query, &rows, &mut out);
                    out.into_iter().map(f32::to_bits).collect::<Vec<_>>()
                };
                let expected: Vec<_> =
                    rows.chunks_exact(2 * dimension).map(|row| dot_f16_bytes(&query, row).to_bits()).collect();
                for instructions in [Instructions::Widest, Instructions::Avx2, Instructions::Portable] {
                    assert_eq!(bits(instructions), expected, "{instructions:?}, {count} rows of {dimension}");
                }
            }
        }
    }
}
