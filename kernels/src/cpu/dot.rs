//! Dot products of a query with features as they are stored: f16, widened by the processor's own instruction where it has one.
//!
//! Plain loops do not become that instruction, and to widen by integers takes longer than memory takes to give the features. Products and
//! sums are those of [`crate::recall`], in its order, so that the bits are the same.

use crate::instructions::{Level, Set};
use crate::recall::dot_stored;

/// The dot product of the query with each row: f16 bits, little-endian, as many as `query` has elements, row behind row.
pub(super) fn dots(level: Level, query: &[f32], rows: &[u8], out: &mut [f32]) {
    match level.set() {
        #[cfg(target_arch = "x86_64")]
        Set::Avx512 | Set::Avx2 => x86_64::dots(level, query, rows, out),
        Set::Portable => {
            let rows = rows.chunks_exact(size_of_val(query) / 2);
            out.iter_mut().zip(rows).for_each(|(dot, row)| *dot = dot_stored(query, row));
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[allow(unsafe_code)] // Loads by pointer; every one lies in a chunk of the right length.
mod x86_64 {
    use super::{Level, Set};
    use crate::recall::COLUMNS;
    use std::arch::x86_64::*;
    use std::array::from_fn;

    /// f16 of a vector of 256 bits of f32.
    const LANES: usize = 8;
    /// Vectors of all columns.
    const VECTORS: usize = COLUMNS / LANES;
    /// Rows at a time: their sums and a vector of the query fit in the 16 registers of AVX2.
    const TOGETHER: usize = 2;
    /// How far ahead rows are asked for, in bytes: the processor itself does not look beyond a page of 4 KiB.
    const AHEAD: usize = 4_096;

    /// As [`super::dots`].
    pub(super) fn dots(level: Level, query: &[f32], rows: &[u8], out: &mut [f32]) {
        assert_ne!(level.set(), Set::Portable, "there is no such instruction");
        // SAFETY: every other level has F16C and AVX2.
        unsafe { dots_f16c(query, rows, out) }
    }

    #[target_feature(enable = "avx2,f16c")]
    fn dots_f16c(query: &[f32], rows: &[u8], out: &mut [f32]) {
        let width = size_of_val(query) / 2;
        let (several, rest) = out.as_chunks_mut::<TOGETHER>();
        let (rows_of_several, rows_of_rest) = rows.split_at(several.len() * TOGETHER * width);
        for (dots, rows) in several.iter_mut().zip(rows_of_several.chunks_exact(TOGETHER * width)) {
            *dots = dots_of(query, from_fn(|row| &rows[row * width..][..width]));
        }
        for (dot, row) in rest.iter_mut().zip(rows_of_rest.chunks_exact(width)) {
            [*dot] = dots_of(query, [row]);
        }
    }

    #[target_feature(enable = "avx2,f16c")]
    #[inline]
    fn dots_of<const N: usize>(query: &[f32], rows: [&[u8]; N]) -> [f32; N] {
        let mut columns = [[_mm256_setzero_ps(); VECTORS]; N];
        let (queries, last_query) = query.as_chunks::<COLUMNS>();
        let whole = rows.map(|row| &row.as_chunks::<{ 2 * COLUMNS }>().0[..queries.len()]);
        for (at, query) in queries.iter().enumerate() {
            for (columns, row) in columns.iter_mut().zip(whole) {
                add_products(columns, query, &row[at]);
            }
        }
        if !last_query.is_empty() {
            // Zeros change no sum: none is -0, since it began as 0.
            let mut padded_query = [0.0; COLUMNS];
            padded_query[..last_query.len()].copy_from_slice(last_query);
            for (columns, row) in columns.iter_mut().zip(rows) {
                let last_row = row.as_chunks::<{ 2 * COLUMNS }>().1;
                let mut padded = [0; 2 * COLUMNS];
                padded[..last_row.len()].copy_from_slice(last_row);
                add_products(columns, &padded_query, &padded);
            }
        }
        columns.map(|columns| sum(columns))
    }

    /// Adds a product to each column, rounded before: an addition and a multiplication are never one operation here.
    #[target_feature(enable = "avx2,f16c")]
    #[inline]
    fn add_products(columns: &mut [__m256; VECTORS], query: &[f32; COLUMNS], row: &[u8; 2 * COLUMNS]) {
        _mm_prefetch::<_MM_HINT_T0>(row.as_ptr().cast::<i8>().wrapping_add(AHEAD));
        for (vector, column) in columns.iter_mut().enumerate() {
            // SAFETY: eight f32 follow, the last eight of 32 at the least.
            let query = unsafe { _mm256_loadu_ps(query[vector * LANES..].as_ptr()) };
            // SAFETY: eight f16 follow, in the same way.
            let own = unsafe { _mm_loadu_si128(row[2 * vector * LANES..].as_ptr().cast()) };
            *column = _mm256_add_ps(*column, _mm256_mul_ps(_mm256_cvtph_ps(own), query));
        }
    }

    /// The sum of the columns in pairs 16, 8, 4, 2, 1 apart.
    #[target_feature(enable = "avx2,f16c")]
    #[inline]
    fn sum([a, b, c, d]: [__m256; VECTORS]) -> f32 {
        let eight = _mm256_add_ps(_mm256_add_ps(a, c), _mm256_add_ps(b, d));
        let four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
        let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
        _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps::<1>(two, two)))
    }

    #[cfg(test)]
    mod tests {
        use super::*;
        use crate::Instructions;
        use crate::recall::widened;

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
                assert_eq!(value.to_bits(), widened(bits).to_bits(), "{bits:04x}");
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
            // Finite, of every size, subnormal ones included.
            let half = |number: usize| {
                let bits = mix64(number as u64) as u16;
                if bits & 0x7c00 == 0x7c00 { bits & 0x83ff } else { bits }
            };
            for count in [0, 1, 2, 3, 9] {
                let rows: Vec<u8> = (0..count * dimension).flat_map(|number| half(number).to_le_bytes()).collect();
                let query: Vec<f32> =
                    (0..dimension).map(|number| crate::recall::widened(half(number + 77_777))).collect();
                let bits = |instructions| {
                    let mut out = vec![f32::NAN; count];
                    dots(Level::of(instructions), &query, &rows, &mut out);
                    out.into_iter().map(f32::to_bits).collect::<Vec<_>>()
                };
                let expected: Vec<_> =
                    rows.chunks_exact(2 * dimension).map(|row| dot_stored(&query, row).to_bits()).collect();
                for instructions in [Instructions::Widest, Instructions::Avx2, Instructions::Portable] {
                    assert_eq!(bits(instructions), expected, "{instructions:?}, {count} rows of {dimension}");
                }
            }
        }
    }
}
