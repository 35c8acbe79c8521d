//! AVX2 code for loops that the compiler does not vectorize reliably: quality of a tile, and selection of updates.
#![allow(unsafe_code)] // Loads and stores by pointer, each within a chunk of the right length.

use super::quality::Total;
use super::update::select_plain;
use crate::Update;
use engram_memory::ONE;
use std::arch::x86_64::*;
use std::array::from_fn;
use std::ops::Range;

/// Prefetch distance for potentials in bytes: the hardware prefetcher does not cross a 4 KiB page.
const AHEAD: usize = 4_096;
/// Memories added per iteration.
const ROW: usize = 32;
/// Rows before it is checked whether minima and maxima are already extreme; doubles up to `LAST_PIECE`, which 8-bit counters allow.
const FIRST_PIECE: usize = 4;
const LAST_PIECE: usize = 64;

/// Accumulators of several groups, in registers. With `REST`, the last one sums all memories without masks, and the other groups are
/// subtracted at the end.
struct Sums<const G: usize, const REST: bool> {
    /// 64-bit lanes.
    counts: [__m256i; G],
    min: [__m256i; G],
    max: [__m256i; G],
    /// Sums of weights modulo 2^32.
    sum: [__m256i; G],
    /// Sums of the upper 16 bits of pairs of weights. Their error in a tile is less than 2^32, so `sum` corrects it.
    upper: [__m256i; G],
}

impl<const G: usize, const REST: bool> Sums<G, REST> {
    #[inline]
    #[target_feature(enable = "avx2,fma,bmi1,bmi2,lzcnt,popcnt")]
    fn zero() -> Self {
        let zero = [_mm256_setzero_si256(); G];
        Self { counts: zero, min: [_mm256_set1_epi32(-1); G], max: zero, sum: zero, upper: zero }
    }

    /// Adds those of 16 weights whose mask is all ones; `MIN`, `MAX`: whether the extremes can still change.
    #[inline]
    #[target_feature(enable = "avx2,fma,bmi1,bmi2,lzcnt,popcnt")]
    fn add<const MIN: bool, const MAX: bool>(&mut self, g: usize, weights: [__m256i; 2], masks: [__m256i; 2]) {
        let masked: [__m256i; 2] = from_fn(|at| _mm256_and_si256(weights[at], masks[at]));
        if MAX {
            self.max[g] = _mm256_max_epu32(self.max[g], _mm256_max_epu32(masked[0], masked[1]));
        }
        if MIN {
            // The complement of a zero mask exceeds any weight.
            let [first, second] = from_fn(|at| _mm256_or_si256(weights[at], not(masks[at])));
            self.min[g] = _mm256_min_epu32(self.min[g], _mm256_min_epu32(first, second));
        }
        // The sum of two weights (at most 2^30 each) fits in a lane.
        let [first, second] = if REST && g == G - 1 { weights } else { masked };
        let pair = _mm256_add_epi32(first, second);
        self.sum[g] = _mm256_add_epi32(self.sum[g], pair);
        self.upper[g] = _mm256_add_epi32(self.upper[g], _mm256_srli_epi32::<16>(pair));
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,bmi1,bmi2,lzcnt,popcnt")]
    fn write(&self, totals: &mut [Total]) {
        for (g, total) in totals.iter_mut().enumerate() {
            let sums = lanes(self.sum[g]).into_iter().zip(lanes(self.upper[g])).map(|(sum, upper)| {
                let upper = u64::from(upper) << 16;
                upper + u64::from(sum.wrapping_sub(upper as u32))
            });
            *total = Total {
                count: lanes(self.counts[g]).into_iter().map(u64::from).sum(),
                sum: sums.sum(),
                min: lanes(self.min[g]).into_iter().fold(u32::MAX, u32::min),
                max: lanes(self.max[g]).into_iter().fold(0, u32::max),
            };
        }
        if REST {
            Total::take_from_last(totals);
        }
    }
}

/// Returns whether each group has `weight` among its extremes.
#[inline]
#[target_feature(enable = "avx2,fma,bmi1,bmi2,lzcnt,popcnt")]
fn all_have<const G: usize>(extremes: &[__m256i; G], weight: u32) -> bool {
    let weight = _mm256_set1_epi32(weight.cast_signed());
    extremes.iter().all(|it| _mm256_movemask_epi8(_mm256_cmpeq_epi32(*it, weight)) != 0)
}

#[inline]
#[target_feature(enable = "avx2")]
fn not(it: __m256i) -> __m256i {
    _mm256_xor_si256(it, _mm256_set1_epi32(-1))
}

#[inline]
#[target_feature(enable = "avx2")]
fn lanes(it: __m256i) -> [u32; 8] {
    let mut lanes = [0; 8];
    // SAFETY: the array has 8 values of 32 bits.
    unsafe { _mm256_storeu_si256(lanes.as_mut_ptr().cast(), it) };
    lanes
}

/// Computes the totals of some groups in a tile. `REST` assumes that no memory is in another group; otherwise the counts show it and the
/// totals are invalid.
#[target_feature(enable = "avx2,fma,bmi1,bmi2,lzcnt,popcnt")]
pub(super) fn totals<const G: usize, const REST: bool>(
    potentials: &[u32],
    groups: &[u8],
    clock: u32,
    selected: [u8; G],
    totals: &mut [Total],
) {
    assert_eq!(totals.len(), G, "totals has an entry for each group");
    let clocks = _mm256_set1_epi32(clock.cast_signed());
    let mut sums = Sums::<G, REST>::zero();
    let (mut rows, rest) = potentials.as_chunks::<ROW>();
    let (mut rows_of_groups, rest_of_groups) = groups.as_chunks::<ROW>();
    if !rest.is_empty() {
        // Padded with memories of a group that is not selected.
        let other = (0..=u8::MAX).find(|group| !selected.contains(group)).expect("at most eight groups are selected");
        let (mut row, mut groups) = ([0; ROW], [other; ROW]);
        row[..rest.len()].copy_from_slice(rest);
        groups[..rest.len()].copy_from_slice(rest_of_groups);
        add_rows::<G, REST, true, true>(&mut sums, &[row], &[groups], clocks, selected);
    }
    let mut piece = FIRST_PIECE;
    while !rows.is_empty() {
        let (now, groups_now);
        (now, rows) = rows.split_at(piece.min(rows.len()));
        (groups_now, rows_of_groups) = rows_of_groups.split_at(now.len());
        piece = (2 * piece).min(LAST_PIECE);
        // Weights are between 0 and ONE: once every group has reached a bound, that extreme is final.
        match (all_have(&sums.min, 0), all_have(&sums.max, ONE)) {
            (false, false) => add_rows::<G, REST, true, true>(&mut sums, now, groups_now, clocks, selected),
            (false, true) => add_rows::<G, REST, true, false>(&mut sums, now, groups_now, clocks, selected),
            (true, false) => add_rows::<G, REST, false, true>(&mut sums, now, groups_now, clocks, selected),
            (true, true) => add_rows::<G, REST, false, false>(&mut sums, now, groups_now, clocks, selected),
        }
    }
    sums.write(totals);
}

/// Not inlined, so that each variant has all registers available.
#[inline(never)]
#[target_feature(enable = "avx2,fma,bmi1,bmi2,lzcnt,popcnt")]
fn add_rows<const G: usize, const REST: bool, const MIN: bool, const MAX: bool>(
    sums: &mut Sums<G, REST>,
    rows: &[[u32; ROW]],
    groups: &[[u8; ROW]],
    clocks: __m256i,
    selected: [u8; G],
) {
    let mut own = Sums { ..*sums };
    let bytes = selected.map(|group| _mm256_set1_epi8(group.cast_signed()));
    let mut counts = [_mm256_setzero_si256(); G];
    let numbers = selected.map(|group| _mm256_set1_epi32(group.into()));
    for (row, groups) in rows.iter().zip(groups) {
        // SAFETY: the row has 32 bytes.
        let all = unsafe { _mm256_loadu_si256(groups.as_ptr().cast()) };
        for (count, byte) in counts.iter_mut().zip(bytes) {
            // All ones is -1; an 8-bit counter suffices for a piece.
            *count = _mm256_sub_epi8(*count, _mm256_cmpeq_epi8(all, byte));
        }
        for (potentials, groups) in row.as_chunks::<16>().0.iter().zip(groups.as_chunks::<16>().0) {
            _mm_prefetch::<_MM_HINT_T0>(potentials.as_ptr().cast::<i8>().wrapping_add(AHEAD));
            let weights = from_fn(|half| {
                // SAFETY: 8 values of 32 bits follow.
                let potentials = unsafe { _mm256_loadu_si256(potentials[half * 8..].as_ptr().cast()) };
                _mm256_sub_epi32(_mm256_max_epu32(potentials, clocks), clocks)
            });
            let groups: [__m256i; 2] = from_fn(|half| {
                // SAFETY: 8 bytes follow.
                _mm256_cvtepu8_epi32(unsafe { _mm_loadl_epi64(groups[half * 8..].as_ptr().cast()) })
            });
            for (g, number) in numbers.into_iter().enumerate() {
                own.add::<MIN, MAX>(g, weights, groups.map(|groups| _mm256_cmpeq_epi32(groups, number)));
            }
        }
    }
    for (count, bytes) in own.counts.iter_mut().zip(counts) {
        *count = _mm256_add_epi64(*count, _mm256_sad_epu8(bytes, _mm256_setzero_si256()));
    }
    *sums = own;
}

/// Updates per register. Each is one 64-bit value whose lower half is its slot.
const LANES: usize = 4;
const _: () = assert!(size_of::<Update>() == 8 && std::mem::offset_of!(Update, slot) == 0);
/// Permutation that moves the updates whose bits are set in the index to the front.
const COMPACTION_ORDER: [[u32; 2 * LANES]; 1 << LANES] = compacted();

const fn compacted() -> [[u32; 2 * LANES]; 1 << LANES] {
    let mut all = [[0; 2 * LANES]; 1 << LANES];
    let mut mask = 0;
    while mask < all.len() {
        let (mut from, mut to) = (0, 0);
        while from < LANES as u32 {
            if mask >> from & 1 == 1 {
                all[mask][to] = 2 * from;
                all[mask][to + 1] = 2 * from + 1;
                to += 2;
            }
            from += 1;
        }
        mask += 1;
    }
    all
}

/// AVX2 version of [`select_plain`]; `out` must hold all updates.
#[target_feature(enable = "avx2,fma,bmi1,bmi2,lzcnt,popcnt")]
pub(super) fn select(updates: &[Update], slots: Range<u64>, out: &mut [Update]) -> usize {
    assert!(out.len() >= updates.len(), "out must hold all updates");
    let length = _mm256_set1_epi64x((slots.end - slots.start).cast_signed());
    let start = _mm256_set1_epi64x(slots.start.cast_signed());
    let slot_bits = _mm256_set1_epi64x(u32::MAX.into());
    let (chunks, rest) = updates.as_chunks::<LANES>();
    let mut count = 0;
    for chunk in chunks {
        // SAFETY: the chunk has 4 values of 64 bits.
        let four = unsafe { _mm256_loadu_si256(chunk.as_ptr().cast()) };
        let after_start = _mm256_sub_epi64(_mm256_and_si256(four, slot_bits), start);
        let before_start = _mm256_cmpgt_epi64(_mm256_setzero_si256(), after_start);
        let mask = _mm256_andnot_si256(before_start, _mm256_cmpgt_epi64(length, after_start));
        let mask = _mm256_movemask_pd(_mm256_castsi256_pd(mask)).cast_unsigned() as usize;
        // SAFETY: the row has 8 values of 32 bits.
        let order = unsafe { _mm256_loadu_si256(COMPACTION_ORDER[mask].as_ptr().cast()) };
        let compacted = _mm256_permutevar8x32_epi32(four, order);
        // SAFETY: at most as many updates were kept as precede these 4, and `out` holds all of them.
        unsafe { _mm256_storeu_si256(out.as_mut_ptr().add(count).cast(), compacted) };
        count += mask.count_ones() as usize;
    }
    count + select_plain(rest, slots, &mut out[count..])
}
