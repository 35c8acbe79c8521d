//! AVX-512 code for loops that the compiler does not vectorize reliably: quality of a tile, 64 memories at a time with byte masks of the
//! groups, and selection of updates, 8 at a time by compression in a register.
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
/// Blocks of 64 weights before it is checked whether minima and maxima are already extreme; doubles each time.
const FIRST_PIECE: usize = 2;

/// Accumulators of several groups, in registers. With `REST`, the last one sums all memories without masks, and the other groups are
/// subtracted at the end.
struct Sums<const G: usize, const REST: bool> {
    counts: [u32; G],
    min: [__m512i; G],
    max: [__m512i; G],
    /// Sums of weights modulo 2^32.
    sum: [__m512i; G],
    /// About 2^-17 of those sums, see [`Sums::exact_sum`].
    upper: [__m512i; G],
}

impl<const G: usize, const REST: bool> Sums<G, REST> {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,bmi1,bmi2,lzcnt,popcnt")]
    fn zero() -> Self {
        let zero = [_mm512_setzero_si512(); G];
        Self { counts: [0; G], min: [_mm512_set1_epi32(-1); G], max: zero, sum: zero, upper: zero }
    }

    /// Adds those of 64 weights whose mask bit is set; `MIN`, `MAX`: whether the extremes can still change.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,bmi1,bmi2,lzcnt,popcnt")]
    fn add<const MIN: bool, const MAX: bool>(&mut self, weights: [__m512i; 4], masks: [__mmask64; G]) {
        for (g, mask) in masks.into_iter().enumerate() {
            self.counts[g] += mask.count_ones();
            let quarters: [__mmask16; 4] = from_fn(|quarter| (mask >> (16 * quarter)) as __mmask16);
            for quarter in 0..4 {
                if MIN {
                    self.min[g] = _mm512_mask_min_epu32(self.min[g], quarters[quarter], self.min[g], weights[quarter]);
                }
                if MAX {
                    self.max[g] = _mm512_mask_max_epu32(self.max[g], quarters[quarter], self.max[g], weights[quarter]);
                }
            }
            // The sum of two weights (at most 2^30 each) fits in a lane.
            let pairs: [__m512i; 2] = if REST && g == G - 1 {
                from_fn(|half| _mm512_add_epi32(weights[2 * half], weights[2 * half + 1]))
            } else {
                from_fn(|half| {
                    let one = _mm512_maskz_mov_epi32(quarters[2 * half], weights[2 * half]);
                    _mm512_mask_add_epi32(one, quarters[2 * half + 1], one, weights[2 * half + 1])
                })
            };
            self.sum[g] = _mm512_add_epi32(self.sum[g], _mm512_add_epi32(pairs[0], pairs[1]));
            // The lower half of a lane is unrelated and is shifted out.
            let upper = _mm512_srli_epi32::<16>(_mm512_avg_epu16(pairs[0], pairs[1]));
            self.upper[g] = _mm512_add_epi32(self.upper[g], upper);
        }
    }

    /// Combines the sum modulo 2^32 with its approximation. Four weights with pair sums p and q add (p / 2^16 + q / 2^16 + 1) / 2 to `upper`,
    /// each quotient rounded down: 2^17 times that is at most 2^17 below p + q and at most 2^16 above. The error in a tile is below 2^28.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,bmi1,bmi2,lzcnt,popcnt")]
    fn exact_sum(&self, g: usize) -> u64 {
        let about = u64::from(_mm512_reduce_add_epi32(self.upper[g]).cast_unsigned()) << 17;
        let missing = _mm512_reduce_add_epi32(self.sum[g]).wrapping_sub((about as u32).cast_signed());
        about.wrapping_add_signed(missing.into())
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,bmi1,bmi2,lzcnt,popcnt")]
    fn write(&self, totals: &mut [Total]) {
        for (g, total) in totals.iter_mut().enumerate() {
            *total = Total {
                count: u64::from(self.counts[g]),
                sum: self.exact_sum(g),
                min: _mm512_reduce_min_epu32(self.min[g]),
                max: _mm512_reduce_max_epu32(self.max[g]),
            };
        }
        if REST {
            Total::take_from_last(totals);
        }
    }
}

/// Returns whether each group has `weight` among its extremes.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,bmi1,bmi2,lzcnt,popcnt")]
fn all_have<const G: usize>(extremes: &[__m512i; G], weight: u32) -> bool {
    let weight = _mm512_set1_epi32(weight.cast_signed());
    extremes.iter().all(|it| _mm512_cmpeq_epi32_mask(*it, weight) != 0)
}

/// Computes the totals of some groups in a tile. `REST` assumes that no memory is in another group; otherwise the counts show it and the
/// totals are invalid.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,bmi1,bmi2,lzcnt,popcnt")]
pub(super) fn totals<const G: usize, const REST: bool>(
    potentials: &[u32],
    groups: &[u8],
    clock: u32,
    selected: [u8; G],
    totals: &mut [Total],
) {
    assert_eq!(totals.len(), G, "totals has an entry for each group");
    let clocks = _mm512_set1_epi32(clock.cast_signed());
    let bytes = selected.map(|group| _mm512_set1_epi8(group.cast_signed()));
    let mut sums = Sums::<G, REST>::zero();
    let (mut chunks, rest) = potentials.as_chunks::<64>();
    let (mut chunks_of_groups, rest_of_groups) = groups.as_chunks::<64>();
    let mut piece = FIRST_PIECE;
    while !chunks.is_empty() {
        let (now, groups_now);
        (now, chunks) = chunks.split_at(piece.min(chunks.len()));
        (groups_now, chunks_of_groups) = chunks_of_groups.split_at(now.len());
        piece *= 2;
        // Weights are between 0 and ONE: once every group has reached a bound, that extreme is final.
        match (all_have(&sums.min, 0), all_have(&sums.max, ONE)) {
            (false, false) => add_chunks::<G, REST, true, true>(&mut sums, now, groups_now, clocks, bytes),
            (false, true) => add_chunks::<G, REST, true, false>(&mut sums, now, groups_now, clocks, bytes),
            (true, false) => add_chunks::<G, REST, false, true>(&mut sums, now, groups_now, clocks, bytes),
            (true, true) => add_chunks::<G, REST, false, false>(&mut sums, now, groups_now, clocks, bytes),
        }
    }
    let remaining = rest.len().min(rest_of_groups.len());
    if remaining > 0 {
        let used: __mmask64 = (1 << remaining) - 1;
        // SAFETY: masked lanes are not read.
        let groups = unsafe { _mm512_maskz_loadu_epi8(used, rest_of_groups.as_ptr().cast()) };
        let weights = from_fn(|quarter| {
            let at = rest.as_ptr().wrapping_add(quarter * 16);
            // SAFETY: as above.
            let potentials = unsafe { _mm512_maskz_loadu_epi32((used >> (16 * quarter)) as __mmask16, at.cast()) };
            _mm512_sub_epi32(_mm512_max_epu32(potentials, clocks), clocks)
        });
        sums.add::<true, true>(weights, bytes.map(|byte| _mm512_mask_cmpeq_epi8_mask(used, groups, byte)));
    }
    sums.write(totals);
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,bmi1,bmi2,lzcnt,popcnt")]
fn add_chunks<const G: usize, const REST: bool, const MIN: bool, const MAX: bool>(
    sums: &mut Sums<G, REST>,
    chunks: &[[u32; 64]],
    groups: &[[u8; 64]],
    clocks: __m512i,
    bytes: [__m512i; G],
) {
    for (chunk, groups) in chunks.iter().zip(groups) {
        // SAFETY: the chunk has 64 bytes.
        let groups = unsafe { _mm512_loadu_si512(groups.as_ptr().cast()) };
        let weights = from_fn(|quarter| {
            let at = chunk[quarter * 16..].as_ptr();
            _mm_prefetch::<_MM_HINT_T0>(at.cast::<i8>().wrapping_add(AHEAD));
            // SAFETY: 16 values of 32 bits follow, at least the last 16 of 64.
            let potentials = unsafe { _mm512_loadu_si512(at.cast()) };
            _mm512_sub_epi32(_mm512_max_epu32(potentials, clocks), clocks)
        });
        sums.add::<MIN, MAX>(weights, bytes.map(|byte| _mm512_cmpeq_epi8_mask(groups, byte)));
    }
}

/// Updates per register. Each is one 64-bit value whose lower half is its slot.
const LANES: usize = 8;
const _: () = assert!(size_of::<Update>() == 8 && std::mem::offset_of!(Update, slot) == 0);

/// AVX-512 version of [`select_plain`]; `out` must hold all updates.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,bmi1,bmi2,lzcnt,popcnt")]
pub(super) fn select(updates: &[Update], slots: Range<u64>, out: &mut [Update]) -> usize {
    assert!(out.len() >= updates.len(), "out must hold all updates");
    let length = _mm512_set1_epi64((slots.end - slots.start).cast_signed());
    let start = _mm512_set1_epi64(slots.start.cast_signed());
    let slot_bits = _mm512_set1_epi64(u32::MAX.into());
    let (chunks, rest) = updates.as_chunks::<LANES>();
    let mut count = 0;
    for chunk in chunks {
        // SAFETY: the chunk has 8 values of 64 bits.
        let eight = unsafe { _mm512_loadu_si512(chunk.as_ptr().cast()) };
        let after_start = _mm512_sub_epi64(_mm512_and_si512(eight, slot_bits), start);
        let mask = _mm512_cmplt_epu64_mask(after_start, length);
        let compacted = _mm512_maskz_compress_epi64(mask, eight);
        // SAFETY: at most as many updates were kept as precede these 8, and `out` holds all of them.
        unsafe { _mm512_storeu_si512(out.as_mut_ptr().add(count).cast(), compacted) };
        count += mask.count_ones() as usize;
    }
    count + select_plain(rest, slots, &mut out[count..])
}
