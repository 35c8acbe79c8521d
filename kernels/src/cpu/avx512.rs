//! What plain loops do not become by AVX-512: the quality of a tile, 64 memories at a time, where byte masks of the groups go straight to
//! masked operations; and the selection of updates, 8 at a time, where those that are kept are moved together in a register.
#![allow(unsafe_code)] // Loads and stores by pointer; every one lies in a chunk of the right length.

use super::quality::Total;
use super::update::select_plain;
use crate::Update;
use engram_memory::ONE;
use std::arch::x86_64::*;
use std::array::from_fn;
use std::ops::Range;

/// How far ahead potentials are asked for, in bytes: the processor itself does not look beyond a page of 4 KiB.
const AHEAD: usize = 4_096;
/// Times 64 weights that are added before it is looked whether extremes are still to be looked for; then twice as many, and so on.
const FIRST_PIECE: usize = 2;

/// What is summed of some groups, in registers.
struct Sums<const G: usize> {
    counts: [u32; G],
    min: [__m512i; G],
    max: [__m512i; G],
    /// Sums of pairs of lanes as numbers of 64 bits, modulo 2^64: of both lanes, the odd one shifted up by 32 bits, and of the odd one
    /// alone. Their difference is the even one.
    both: [__m512i; G],
    odd: [__m512i; G],
}

impl<const G: usize> Sums<G> {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,bmi1,bmi2,lzcnt,popcnt")]
    fn zero() -> Self {
        let zero = [_mm512_setzero_si512(); G];
        Self { counts: [0; G], min: [_mm512_set1_epi32(-1); G], max: zero, both: zero, odd: zero }
    }

    /// Adds those of 64 weights whose mask for a group says so; `MIN`, `MAX`: whether their extremes may be new ones.
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
            // Two weights of at most 2^30 fit in a lane.
            for half in [0, 2] {
                let one = _mm512_maskz_mov_epi32(quarters[half], weights[half]);
                let pair = _mm512_mask_add_epi32(one, quarters[half + 1], one, weights[half + 1]);
                self.both[g] = _mm512_add_epi64(self.both[g], pair);
                self.odd[g] = _mm512_add_epi64(self.odd[g], _mm512_srli_epi64::<32>(pair));
            }
        }
    }

    /// Whether each group has `weight` among its extremes of one kind.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,bmi1,bmi2,lzcnt,popcnt")]
    fn all_have(extremes: &[__m512i; G], weight: u32) -> bool {
        let weight = _mm512_set1_epi32(weight.cast_signed());
        extremes.iter().all(|it| _mm512_cmpeq_epi32_mask(*it, weight) != 0)
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,bmi1,bmi2,lzcnt,popcnt")]
    fn total(&self, g: usize) -> Total {
        let both = _mm512_reduce_add_epi64(self.both[g]).cast_unsigned();
        let odd = _mm512_reduce_add_epi64(self.odd[g]).cast_unsigned();
        Total {
            count: u64::from(self.counts[g]),
            sum: both.wrapping_sub(odd << 32).wrapping_add(odd),
            min: _mm512_reduce_min_epu32(self.min[g]),
            max: _mm512_reduce_max_epu32(self.max[g]),
        }
    }
}

/// The totals of some groups in a tile.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,bmi1,bmi2,lzcnt,popcnt")]
pub(super) fn totals<const G: usize>(potentials: &[u32], groups: &[u8], clock: u32, wanted: [u8; G]) -> [Total; G] {
    let clocks = _mm512_set1_epi32(clock.cast_signed());
    let bytes = wanted.map(|group| _mm512_set1_epi8(group.cast_signed()));
    let mut sums = Sums::<G>::zero();
    let (mut chunks, rest) = potentials.as_chunks::<64>();
    let (mut chunks_of_groups, rest_of_groups) = groups.as_chunks::<64>();
    let mut piece = FIRST_PIECE;
    while !chunks.is_empty() {
        let (now, groups_now);
        (now, chunks) = chunks.split_at(piece.min(chunks.len()));
        (groups_now, chunks_of_groups) = chunks_of_groups.split_at(now.len());
        piece *= 2;
        // No weight is below 0 or above one: once each group has shown it, no other is looked for.
        match (Sums::all_have(&sums.min, 0), Sums::all_have(&sums.max, ONE)) {
            (false, false) => add_chunks::<G, true, true>(&mut sums, now, groups_now, clocks, bytes),
            (false, true) => add_chunks::<G, true, false>(&mut sums, now, groups_now, clocks, bytes),
            (true, false) => add_chunks::<G, false, true>(&mut sums, now, groups_now, clocks, bytes),
            (true, true) => add_chunks::<G, false, false>(&mut sums, now, groups_now, clocks, bytes),
        }
    }
    let left = rest.len().min(rest_of_groups.len());
    if left > 0 {
        let used: __mmask64 = (1 << left) - 1;
        // SAFETY: what is not in use is not read.
        let groups = unsafe { _mm512_maskz_loadu_epi8(used, rest_of_groups.as_ptr().cast()) };
        let weights = from_fn(|quarter| {
            let at = rest.as_ptr().wrapping_add(quarter * 16);
            // SAFETY: as above.
            let potentials = unsafe { _mm512_maskz_loadu_epi32((used >> (16 * quarter)) as __mmask16, at.cast()) };
            _mm512_sub_epi32(_mm512_max_epu32(potentials, clocks), clocks)
        });
        sums.add::<true, true>(weights, bytes.map(|byte| _mm512_mask_cmpeq_epi8_mask(used, groups, byte)));
    }
    from_fn(|g| sums.total(g))
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,bmi1,bmi2,lzcnt,popcnt")]
fn add_chunks<const G: usize, const MIN: bool, const MAX: bool>(
    sums: &mut Sums<G>,
    chunks: &[[u32; 64]],
    groups: &[[u8; 64]],
    clocks: __m512i,
    bytes: [__m512i; G],
) {
    for (chunk, groups) in chunks.iter().zip(groups) {
        // SAFETY: 64 bytes.
        let groups = unsafe { _mm512_loadu_si512(groups.as_ptr().cast()) };
        let weights = from_fn(|quarter| {
            let at = chunk[quarter * 16..].as_ptr();
            _mm_prefetch::<_MM_HINT_T0>(at.cast::<i8>().wrapping_add(AHEAD));
            // SAFETY: 16 numbers of 32 bits follow, the last 16 of 64 at the least.
            let potentials = unsafe { _mm512_loadu_si512(at.cast()) };
            _mm512_sub_epi32(_mm512_max_epu32(potentials, clocks), clocks)
        });
        sums.add::<MIN, MAX>(weights, bytes.map(|byte| _mm512_cmpeq_epi8_mask(groups, byte)));
    }
}

/// Updates in a register. Each is one number of 64 bits here, whose lower half is its slot.
const LANES: usize = 8;
const _: () = assert!(size_of::<Update>() == 8 && std::mem::offset_of!(Update, slot) == 0);

/// [`select_plain`], with room for as many updates as there are.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,bmi1,bmi2,lzcnt,popcnt")]
pub(super) fn select(updates: &[Update], slots: Range<u64>, room: &mut [Update]) -> usize {
    assert!(room.len() >= updates.len(), "all of them may be kept");
    let length = _mm512_set1_epi64((slots.end - slots.start).cast_signed());
    let start = _mm512_set1_epi64(slots.start.cast_signed());
    let slot_bits = _mm512_set1_epi64(u32::MAX.into());
    let (chunks, rest) = updates.as_chunks::<LANES>();
    let mut count = 0;
    for chunk in chunks {
        // SAFETY: 8 numbers of 64 bits.
        let eight = unsafe { _mm512_loadu_si512(chunk.as_ptr().cast()) };
        let after_start = _mm512_sub_epi64(_mm512_and_si512(eight, slot_bits), start);
        let kept = _mm512_cmplt_epu64_mask(after_start, length);
        let together = _mm512_maskz_compress_epi64(kept, eight);
        // SAFETY: no more were kept than came before these 8, and there is room for all that came.
        unsafe { _mm512_storeu_si512(room.as_mut_ptr().add(count).cast(), together) };
        count += kept.count_ones() as usize;
    }
    count + select_plain(rest, slots, &mut room[count..])
}
