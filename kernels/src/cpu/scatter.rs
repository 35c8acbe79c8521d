//! Parallel part of the sort: moves entries to the range of their digit.
#![allow(unsafe_code)] // Several threads write one slice, at positions that the histograms keep disjoint.

use super::sort::{Block, Entry};
use crate::pool::Pool;

/// Entries of a cache line.
const LINE: usize = 8;

/// Moves the entries of `blocks` to `to`, sorted stably by the `bits` bits of the key from `shift` on; returns the start of each digit, and the
/// end.
///
/// Thousands of write positions fit in no cache, so a block collects a cache line for each digit and writes full lines with non-temporal
/// stores: half the time of plain stores, which read each line before they modify it.
pub(super) fn split<B: Block>(pool: &mut Pool, blocks: &[B], to: &mut [Entry], shift: u32, bits: u32) -> Vec<usize> {
    let digits = 1_usize << bits;
    let mut counts = vec![0_u32; blocks.len() * digits];
    pool.for_each(blocks.iter().zip(counts.chunks_mut(digits)).collect(), |_, (block, counts)| {
        count(block, counts, shift);
    });
    // Counts become positions: by digit, then by block in order, which keeps the sort stable.
    let mut bounds = Vec::with_capacity(digits + 1);
    let mut place = 0;
    for digit in 0..digits {
        bounds.push(place as usize);
        for block in 0..blocks.len() {
            place += std::mem::replace(&mut counts[block * digits + digit], place);
        }
    }
    bounds.push(place as usize);
    assert_eq!(place as usize, to.len(), "every entry was counted once");
    let target = Target::new(to);
    pool.for_each(blocks.iter().zip(counts.chunks_mut(digits)).collect(), |_, (block, places)| {
        // SAFETY: for every digit and block, positions were reserved for as many entries as the block has of that digit, all below the length of
        // `to`; a block yields the same entries again, and only it writes them.
        unsafe { move_block(block, places, target, shift) };
    });
    bounds
}

/// Counts the entries of each digit; `counts` has one element per digit, a power of two.
fn count<B: Block>(block: &B, counts: &mut [u32], shift: u32) {
    let mask = counts.len() - 1;
    block.each(|entry| counts[(entry.1 >> shift) as usize & mask] += 1);
}

/// Moves the entries of a block to `places`, by digit; `places` holds the ends of the written ranges afterwards.
///
/// # Safety
/// For each digit, as many positions as the block has entries lie in the slice behind `target`, and no other thread accesses them meanwhile.
unsafe fn move_block<B: Block>(block: &B, places: &mut [u32], target: Target, shift: u32) {
    let mask = places.len() - 1;
    let starts = places.to_vec();
    let mut lines = vec![Line([(0, 0); LINE]); places.len()];
    block.each(|entry| {
        let digit = (entry.1 >> shift) as usize & mask;
        let (place, line) = (places[digit], &mut lines[digit]);
        let within = target.within_line(place);
        line.0[within] = entry;
        places[digit] = place + 1;
        if within == LINE - 1 {
            // SAFETY: guaranteed by the caller. `place` is the last position of the line; those from the start on are filled.
            unsafe { target.write_line(starts[digit], place, line) };
        }
    });
    for ((&start, &place), line) in starts.iter().zip(&*places).zip(&lines) {
        if place > start && target.within_line(place) > 0 {
            // SAFETY: as above; the last entry went to the previous position.
            unsafe { target.write_line(start, place - 1, line) };
        }
    }
    fence();
}

#[derive(Clone, Copy)]
#[repr(align(64))]
struct Line([Entry; LINE]);

/// Output slice that blocks write to.
#[derive(Clone, Copy)]
struct Target {
    to: *mut Entry,
    /// Entries between the start of the first cache line and the first entry.
    lead: u32,
    /// Whether lines of entries are aligned to cache lines.
    aligned: bool,
}

// SAFETY: blocks on different threads write to disjoint positions, see `split`.
unsafe impl Sync for Target {}

impl Target {
    fn new(to: &mut [Entry]) -> Self {
        let address = to.as_ptr().addr();
        let size = size_of::<Entry>();
        Self { to: to.as_mut_ptr(), lead: (address / size % LINE) as u32, aligned: address.is_multiple_of(size) }
    }

    /// Returns the offset of a position in its cache line.
    #[inline(always)]
    fn within_line(self, place: u32) -> usize {
        (place + self.lead) as usize % LINE
    }

    /// Writes `line` to the positions of `last`'s cache line from `start` to `last`.
    ///
    /// # Safety
    /// These positions lie in the slice behind this target, and no other thread accesses them meanwhile.
    #[inline(always)]
    unsafe fn write_line(self, start: u32, last: u32, line: &Line) {
        let within = self.within_line(last);
        if self.aligned && within == LINE - 1 && last - start >= LINE as u32 - 1 {
            // SAFETY: a whole cache line of positions, guaranteed by the caller; it starts where `last` is the last position.
            unsafe { write_past_cache(self.to.add(last as usize - within), line) };
            return;
        }
        let first = (last.saturating_sub(within as u32)).max(start);
        for place in first..=last {
            // SAFETY: guaranteed by the caller.
            unsafe { self.to.add(place as usize).write(line.0[self.within_line(place)]) };
        }
    }
}

/// # Safety
/// The caller may write the cache line at `to`.
#[inline(always)]
unsafe fn write_past_cache(to: *mut Entry, line: &Line) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{__m128i, _mm_load_si128, _mm_stream_si128};
        let (from, to) = (line.0.as_ptr().cast::<__m128i>(), to.cast::<__m128i>());
        for part in 0..4 {
            // SAFETY: four parts of 16 bytes are a line; both are aligned to 64 bytes. Every x86-64 processor has SSE2.
            unsafe { _mm_stream_si128(to.add(part), _mm_load_si128(from.add(part))) };
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    // SAFETY: guaranteed by the caller.
    unsafe {
        to.cast::<[Entry; LINE]>().write(line.0);
    }
}

/// Orders non-temporal stores before the completion of the block.
fn fence() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every x86-64 processor has SSE.
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
}
