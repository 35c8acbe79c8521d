//! The symmetric rank-n update: adds `s s^T` of each sample to a packed upper triangle, in the order of the samples.

use std::ops::Range;

/// Rows of a tile. With [`TILE_COLUMNS`], accumulators and operands fit the 32 vector registers of AVX-512.
const TILE_ROWS: usize = 6;
/// Columns of a tile: four vectors of eight f64.
const TILE_COLUMNS: usize = 32;

/// Returns the number of entries of a packed upper triangle.
pub(crate) const fn triangle(parameters: usize) -> usize {
    parameters * (parameters + 1) / 2
}

/// Returns the index of entry (row, row) in the packed upper triangle; the entries (row, row..) follow.
pub(crate) const fn row_start(row: usize, parameters: usize) -> usize {
    row * parameters - row * row.saturating_sub(1) / 2
}

/// Returns the entries of some rows of the packed upper triangle, which are consecutive.
pub(crate) const fn packed_rows(rows: &Range<usize>, parameters: usize) -> Range<usize> {
    row_start(rows.start, parameters)..row_start(rows.end, parameters)
}

/// Returns some rows of the packed upper triangle of the sum of `s s^T` over samples (samples x parameters, row-major), samples added in
/// order.
///
/// Each entry is `((s_0 + s_1) + s_2) + ...` in f64: independent of tiles, of the rows asked for, and of fused multiply-add, since products
/// of two f32 are exact.
pub(crate) fn outer_products(scores: &[f32], parameters: usize, wanted: &Range<usize>) -> Vec<f64> {
    let packed = packed_rows(wanted, parameters);
    let mut sums = vec![0.0; packed.len()];
    if wanted.is_empty() || scores.is_empty() {
        return sums;
    }
    let samples = scores.len() / parameters;
    // Padded with zeros to whole tiles, column panels first: a tile reads both operands contiguously.
    let padded = parameters.next_multiple_of(TILE_COLUMNS);
    let mut panels = vec![0.0_f64; padded * samples];
    for (sample, row) in scores.chunks_exact(parameters).enumerate() {
        for (parameter, &score) in row.iter().enumerate() {
            let panel = parameter / TILE_COLUMNS;
            panels[(panel * samples + sample) * TILE_COLUMNS + parameter % TILE_COLUMNS] = f64::from(score);
        }
    }
    for panel in wanted.start / TILE_COLUMNS..padded / TILE_COLUMNS {
        let columns = &panels[panel * samples * TILE_COLUMNS..][..samples * TILE_COLUMNS];
        let last = ((panel + 1) * TILE_COLUMNS).min(parameters);
        // Rows up to the diagonal of this panel.
        let end = last.min(wanted.end);
        for row in (wanted.start..end).step_by(TILE_ROWS) {
            let rows = TILE_ROWS.min(end - row);
            let mut tile = [[0.0; TILE_COLUMNS]; TILE_ROWS];
            accumulate(&panels, samples, row, columns, &mut tile);
            for (offset, values) in tile.iter().enumerate().take(rows) {
                let row = row + offset;
                for column in row.max(panel * TILE_COLUMNS)..last {
                    sums[row_start(row, parameters) - packed.start + column - row] =
                        values[column - panel * TILE_COLUMNS];
                }
            }
        }
    }
    sums
}

/// Columns of one panel: samples x [`TILE_COLUMNS`].
type Tile = [[f64; TILE_COLUMNS]; TILE_ROWS];

/// Adds the products of all samples to a tile, with the widest vector instructions of the processor.
#[allow(unsafe_code)]
fn accumulate(panels: &[f64], samples: usize, row: usize, columns: &[f64], tile: &mut Tile) {
    #[cfg(target_arch = "x86_64")]
    {
        #[target_feature(enable = "avx512f,avx512vl,avx2,fma")]
        fn avx512(panels: &[f64], samples: usize, row: usize, columns: &[f64], tile: &mut Tile) {
            loops::<true>(panels, samples, row, columns, tile);
        }
        #[target_feature(enable = "avx2,fma")]
        fn avx2(panels: &[f64], samples: usize, row: usize, columns: &[f64], tile: &mut Tile) {
            loops::<true>(panels, samples, row, columns, tile);
        }
        let has_avx2 = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma");
        if has_avx2 && is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512vl") {
            // SAFETY: the processor has every feature that the function enables.
            return unsafe { avx512(panels, samples, row, columns, tile) };
        }
        if has_avx2 {
            // SAFETY: the processor has every feature that the function enables.
            return unsafe { avx2(panels, samples, row, columns, tile) };
        }
    }
    loops::<false>(panels, samples, row, columns, tile);
}

#[inline(always)]
fn loops<const FUSED: bool>(panels: &[f64], samples: usize, row: usize, columns: &[f64], tile: &mut Tile) {
    // Where each row of the tile is found in its panel.
    let starts: [usize; TILE_ROWS] = std::array::from_fn(|offset| {
        let (panel, lane) = ((row + offset) / TILE_COLUMNS, (row + offset) % TILE_COLUMNS);
        // Rows beyond the last panel repeat the first: their sums are dropped.
        let start = panel * samples * TILE_COLUMNS + lane;
        if start < panels.len() { start } else { 0 }
    });
    let mut sums = *tile;
    for (sample, values) in columns.chunks_exact(TILE_COLUMNS).enumerate() {
        for offset in 0..TILE_ROWS {
            let factor = panels[starts[offset] + sample * TILE_COLUMNS];
            for column in 0..TILE_COLUMNS {
                // Equal bits either way: the product of two f32 is exact in f64.
                sums[offset][column] = if FUSED {
                    factor.mul_add(values[column], sums[offset][column])
                } else {
                    factor * values[column] + sums[offset][column]
                };
            }
        }
    }
    *tile = sums;
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(30))]
        #[test]
        fn sums_have_the_bits_of_the_plain_loop(
            parameters in 1_usize..80,
            samples in 0_usize..20,
            cut in 0_usize..80,
            seed: u32,
        ) {
            let mix = |index: u32| (index ^ seed).wrapping_mul(2_654_435_761).rotate_left(11).wrapping_mul(0x85eb_ca6b);
            let scores: Vec<f32> =
                (0..(parameters * samples) as u32).map(|index| mix(index) as f32 / 1e9 - 2.0).collect();
            let mut expected = Vec::new();
            for row in 0..parameters {
                for column in row..parameters {
                    let mut sum = 0.0;
                    for sample in scores.chunks_exact(parameters) {
                        sum += f64::from(sample[row]) * f64::from(sample[column]);
                    }
                    expected.push(sum.to_bits());
                }
            }
            let bits = |rows: Range<usize>| outer_products(&scores, parameters, &rows).into_iter().map(f64::to_bits);
            prop_assert_eq!(bits(0..parameters).collect::<Vec<u64>>(), &expected[..]);
            let cut = cut.min(parameters);
            prop_assert_eq!(bits(0..cut).chain(bits(cut..parameters)).collect::<Vec<u64>>(), expected);
        }
    }
}
