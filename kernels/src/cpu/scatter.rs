//! The parallel part of the sort: moves entries to their digit's places.
#![allow(unsafe_code)] // One slice is written from several threads, at places that the histograms keep apart.

use super::sort::{Block, Entry};
use crate::pool::Pool;

/// Entries of a cache line.
const LINE: usize = 8;

/// Moves the entries of `blocks` to `to`, sorted stably by the `bits` bits of the key from `shift` on; returns where each digit
/// begins, and the end.
///
/// Thousands of places that are written in turn fit in no cache, so a block collects a line for each digit and writes it
/// past the cache when it is full: half the time of plain stores, which read each line before they change it.
pub(super) fn split<B: Block>(pool: &mut Pool, blocks: &[B], to: &mut [Entry], shift: u32, bits: u32) -> Vec<usize> {
    let digits = 1_usize << bits;
    let mut counts = vec![0_u32; blocks.len() * digits];
    pool.each(blocks.iter().zip(counts.chunks_mut(digits)).collect(), |_, (block, counts)| count(block, counts, shift));
    // Counts become places: digit by digit, and in each the blocks in order, which is what keeps the sort stable.
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
    pool.each(blocks.iter().zip(counts.chunks_mut(digits)).collect(), |_, (block, places)| {
        // SAFETY: for every digit and block the places from its start on were reserved, as many as the block gave entries of
        // that digit, all below the length of `to`; a block gives the same entries again, and only it writes them.
        unsafe { move_block(block, places, target, shift) };
    });
    bounds
}

/// Counts the entries of each digit; there are as many digits as counts, a power of two.
fn count<B: Block>(block: &B, counts: &mut [u32], shift: u32) {
    let mask = counts.len() - 1;
    block.each(|entry| counts[(entry.1 >> shift) as usize & mask] += 1);
}

/// Moves the entries of a block to the places from `places` on, by digit; these are ends of what was written afterwards.
///
/// # Safety
/// As many places as the block has entries of a digit lie in the slice that `target` was made of, and nobody else writes or reads
/// them meanwhile.
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
            // SAFETY: as the caller promises. The line's last place is `place`, those of it from the start on are filled.
            unsafe { target.write_line(starts[digit], place, line) };
        }
    });
    for ((&start, &place), line) in starts.iter().zip(&*places).zip(&lines) {
        if place > start && target.within_line(place) > 0 {
            // SAFETY: as above; the last entry went to the place before.
            unsafe { target.write_line(start, place - 1, line) };
        }
    }
    fence();
}

#[derive(Clone, Copy)]
#[repr(align(64))]
struct Line([Entry; LINE]);

/// Where blocks write.
#[derive(Clone, Copy)]
struct Target {
    to: *mut Entry,
    /// How many entries before the first one its cache line begins.
    lead: u32,
    /// Whether entries are aligned so that lines of entries are cache lines.
    aligned: bool,
}

// SAFETY: blocks on different threads write through it to different places only, see `split`.
unsafe impl Sync for Target {}

impl Target {
    fn new(to: &mut [Entry]) -> Self {
        let address = to.as_ptr().addr();
        let size = size_of::<Entry>();
        Self { to: to.as_mut_ptr(), lead: (address / size % LINE) as u32, aligned: address.is_multiple_of(size) }
    }

    /// The position of a place in its cache line.
    #[inline(always)]
    fn within_line(self, place: u32) -> usize {
        (place + self.lead) as usize % LINE
    }

    /// Writes what `line` has for the places of `last`'s cache line from `start` to `last`.
    ///
    /// # Safety
    /// These places lie in the slice that this was made of, and nobody else writes or reads them meanwhile.
    #[inline(always)]
    unsafe fn write_line(self, start: u32, last: u32, line: &Line) {
        let within = self.within_line(last);
        if self.aligned && within == LINE - 1 && last - start >= LINE as u32 - 1 {
            // SAFETY: a whole cache line of places, as the caller promises, and it begins where `last` is its last.
            unsafe { write_past_cache(self.to.add(last as usize - within), line) };
            return;
        }
        let first = (last.saturating_sub(within as u32)).max(start);
        for place in first..=last {
            // SAFETY: as the caller promises.
            unsafe { self.to.add(place as usize).write(line.0[self.within_line(place)]) };
        }
    }
}

/// # Safety
/// `to` is a cache line that the caller may write.
#[inline(always)]
unsafe fn write_past_cache(to: *mut Entry, line: &Line) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{__m128i, _mm_load_si128, _mm_stream_si128};
        let (from, to) = (line.0.as_ptr().cast::<__m128i>(), to.cast::<__m128i>());
        for part in 0..4 {
            // SAFETY: four parts of 16 bytes are a line; both are aligned to 64 bytes. SSE2 is in every x86-64.
            unsafe { _mm_stream_si128(to.add(part), _mm_load_si128(from.add(part))) };
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    // SAFETY: as the caller promises.
    unsafe {
        to.cast::<[Entry; LINE]>().write(line.0);
    }
}

/// What was written past the cache is seen by whoever sees that the block is done.
fn fence() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: SSE is in every x86-64.
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
}
