//! A stable parallel radix sort of (slot, key) by key, ascending.
//!
//! What is large is split by its highest bits that differ, by all threads together, until every part fits in a core's
//! cache; then each thread sorts whole parts by their remaining bits. Bits that all keys of a part share cost nothing, so
//! a part of equal keys is recognised by one look at it.
#![allow(unsafe_code)] // The scatter writes one slice from several threads, at places that the histograms keep apart.

use crate::Slot;
use crate::pool::Pool;
use std::ops::Range;

/// What is sorted: a slot and its key.
pub(super) type Entry = (Slot, u32);

/// Parts up to this length are sorted by one thread: they and their scratch fit in the second-level cache.
const SMALL: usize = 1 << 15;
/// Small neighbours are sorted together up to this length, so that many tiny parts do not cost a call each.
const TOGETHER: usize = 1 << 12;
/// Bits of one parallel split, at most.
const SPLIT_BITS: u32 = 11;
/// Entries of one block of a parallel pass, at least: its histogram must be cheap beside it.
const BLOCK: usize = 1 << 16;

/// Sorts `entries` by key. `finish(thread, part)` is called once for every part, sorted and final: parts are consecutive, together
/// all of `entries` but the ranges that are returned, and equal keys are never in two parts.
///
/// Returned are ranges of more than one thread's work whose keys are all equal, in the order they had.
pub(super) fn sort(
    pool: &mut Pool,
    entries: &mut [Entry],
    scratch: &mut [Entry],
    finish: impl Fn(usize, &mut [Entry]) + Sync,
) -> Vec<Range<usize>> {
    assert_eq!(entries.len(), scratch.len(), "the scratch is as long as what is sorted");
    let mut tied = Vec::new();
    let mut small: Vec<Part> = Vec::new();
    let mut large = vec![Part { range: 0..entries.len(), in_scratch: false }];
    while let Some(part) = large.pop() {
        if part.range.len() <= SMALL {
            small.push(part);
            continue;
        }
        let (from, to) = part.buffers(entries, scratch);
        let Some(bit) = highest_difference(pool, from) else {
            if part.in_scratch {
                to.copy_from_slice(from);
            }
            tied.push(part.range);
            continue;
        };
        let bits = (from.len() / TOGETHER).ilog2().min(SPLIT_BITS).min(bit + 1);
        let ends = split(pool, from, to, bit + 1 - bits, bits);
        let mut start = part.range.start;
        // The last one first: what is popped is always the next in order, so that small neighbours are found to be such.
        let first = large.len();
        for end in ends {
            let end = part.range.start + end;
            if end > start {
                large.push(Part { range: start..end, in_scratch: !part.in_scratch });
            }
            start = end;
        }
        large[first..].reverse();
    }
    let mut parts = Vec::with_capacity(small.len());
    let (mut entries, mut scratch, mut at) = (entries, scratch, 0);
    let mut small = small.into_iter().peekable();
    while let Some(mut part) = small.next() {
        while let Some(next) = small.next_if(|next| next.extends(&part)) {
            part.range.end = next.range.end;
        }
        let skipped = part.range.start - at;
        at = part.range.end;
        let (own, rest) = std::mem::take(&mut entries)[skipped..].split_at_mut(part.range.len());
        entries = rest;
        let (own_scratch, rest) = std::mem::take(&mut scratch)[skipped..].split_at_mut(part.range.len());
        scratch = rest;
        parts.push((own, own_scratch, part.in_scratch));
    }
    pool.each(parts, |thread, (own, scratch, in_scratch)| {
        sort_small(own, scratch, in_scratch);
        finish(thread, own);
    });
    tied
}

struct Part {
    range: Range<usize>,
    in_scratch: bool,
}

impl Part {
    /// Where it lies, and the same places of the other buffer.
    fn buffers<'a>(&self, entries: &'a mut [Entry], scratch: &'a mut [Entry]) -> (&'a mut [Entry], &'a mut [Entry]) {
        let (entries, scratch) = (&mut entries[self.range.clone()], &mut scratch[self.range.clone()]);
        if self.in_scratch { (scratch, entries) } else { (entries, scratch) }
    }

    fn extends(&self, part: &Self) -> bool {
        self.in_scratch == part.in_scratch
            && self.range.start == part.range.end
            && self.range.end - part.range.start <= TOGETHER
    }
}

/// The highest bit in which two keys differ.
fn highest_difference(pool: &mut Pool, entries: &[Entry]) -> Option<u32> {
    let first = entries[0].1;
    let mut differences: Vec<u32> = vec![0; entries.len().div_ceil(BLOCK)];
    let blocks = entries.chunks(BLOCK).zip(&mut differences).collect();
    pool.each(blocks, |_, (block, difference)| {
        *difference = block.iter().fold(0, |all, &(_, key)| all | (key ^ first));
    });
    differences.iter().fold(0, |all, difference| all | difference).checked_ilog2()
}

/// Where blocks of a scatter write.
#[derive(Clone, Copy)]
struct Target(*mut Entry);

// SAFETY: blocks on different threads write through it to different places only, see `split`.
unsafe impl Sync for Target {}

impl Target {
    /// # Safety
    /// `place` lies in the slice that this was made of, and nobody else writes or reads there meanwhile.
    unsafe fn write(self, place: usize, entry: Entry) {
        // SAFETY: as the caller promises.
        unsafe { self.0.add(place).write(entry) }
    }
}

/// Moves `from` to `to`, sorted stably by the `bits` bits of the key from `shift` on; returns where each digit ends.
fn split(pool: &mut Pool, from: &[Entry], to: &mut [Entry], shift: u32, bits: u32) -> Vec<usize> {
    let digits = 1_usize << bits;
    let digit = |entry: &Entry| (entry.1 >> shift) as usize & (digits - 1);
    let length = (from.len().div_ceil(pool.threads() * 4)).max(BLOCK);
    let blocks = from.len().div_ceil(length);
    let mut counts = vec![0_u32; blocks * digits];
    pool.each(from.chunks(length).zip(counts.chunks_mut(digits)).collect(), |_, (block, counts)| {
        block.iter().for_each(|entry| counts[digit(entry)] += 1);
    });
    // Counts become places: digit by digit, and in each the blocks in order, which is what keeps the sort stable.
    let mut ends = Vec::with_capacity(digits);
    let mut place = 0;
    for digit in 0..digits {
        for block in 0..blocks {
            place += std::mem::replace(&mut counts[block * digits + digit], place);
        }
        ends.push(place as usize);
    }
    assert_eq!(place as usize, to.len(), "every entry was counted once");
    let target = Target(to.as_mut_ptr());
    pool.each(from.chunks(length).zip(counts.chunks_mut(digits)).collect(), |_, (block, places)| {
        for entry in block {
            let place = &mut places[digit(entry)];
            // SAFETY: for every digit and block the places from here on were reserved, as many as the block has entries of
            // that digit and all below the length of `to`, which was checked; `to` is borrowed until all blocks are done.
            unsafe { target.write(*place as usize, *entry) };
            *place += 1;
        }
    });
    ends
}

/// Sorts one part, which lies in `scratch` or in `own`, into `own`.
fn sort_small(own: &mut [Entry], scratch: &mut [Entry], in_scratch: bool) {
    let (mut from, mut to, mut swapped) = if in_scratch { (scratch, own, true) } else { (own, scratch, false) };
    let first = from.first().map_or(0, |entry| entry.1);
    let difference = from.iter().fold(0, |all, &(_, key)| all | (key ^ first));
    let (low, high) = (difference.trailing_zeros(), 32 - difference.leading_zeros());
    if difference > 0 && from.len() <= 64 {
        from.sort_by_key(|entry| entry.1);
    } else if difference > 0 {
        // Wide digits pay where there are many entries to share the cost of their histogram.
        let widest = if from.len() >= 2_048 { 11 } else { 8 };
        let passes = (high - low).div_ceil(widest);
        let bits = (high - low).div_ceil(passes);
        for shift in (low..high).step_by(bits as usize) {
            scatter(from, to, shift, bits);
            std::mem::swap(&mut from, &mut to);
            swapped = !swapped;
        }
    }
    if swapped {
        to.copy_from_slice(from);
    }
}

fn scatter(from: &[Entry], to: &mut [Entry], shift: u32, bits: u32) {
    let mut places = [0_u32; 1 << SPLIT_BITS];
    let places = &mut places[..1 << bits];
    let mask = places.len() - 1;
    let digit = |entry: &Entry| (entry.1 >> shift) as usize & mask;
    from.iter().for_each(|entry| places[digit(entry)] += 1);
    let mut place = 0;
    for count in places.iter_mut() {
        place += std::mem::replace(count, place);
    }
    for entry in from {
        let place = &mut places[digit(entry)];
        to[*place as usize] = *entry;
        *place += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Mutex;

    fn check(pool: &mut Pool, keys: impl Iterator<Item = u32>) {
        let mut entries: Vec<Entry> = keys.enumerate().map(|(slot, key)| (slot as u32, key)).collect();
        let mut expected = entries.clone();
        expected.sort_by_key(|entry| entry.1);
        let mut scratch = vec![(0, 0); entries.len()];
        let finished = Mutex::new(Vec::new());
        let tied = sort(pool, &mut entries, &mut scratch, |_, part| finished.lock().unwrap().extend_from_slice(part));
        assert!(entries == expected, "{} entries", expected.len());
        let mut finished = finished.into_inner().unwrap();
        for range in tied {
            let part = &entries[range];
            assert!(part.len() > SMALL && part.iter().all(|entry| entry.1 == part[0].1));
            finished.extend_from_slice(part);
        }
        finished.sort_unstable();
        expected.sort_unstable();
        assert!(finished == expected, "every part was finished once or is tied");
    }

    #[test]
    fn any_distribution_of_keys_is_sorted_stably() {
        // A fixed multiplicative sequence stands for random keys.
        let random = |n: u32| n.wrapping_mul(2_654_435_761);
        for threads in [1, 2, 3] {
            let mut pool = Pool::new(threads);
            for n in [0, 1, 2, 64, 65, 5_000, SMALL as u32 + 1, 300_000] {
                check(&mut pool, (0..n).map(random));
                check(&mut pool, (0..n).map(|n| random(n) >> 2));
                check(&mut pool, (0..n).rev());
                check(&mut pool, (0..n).map(|_| 7));
                check(&mut pool, (0..n).map(|n| if n % 3 == 0 { random(n) } else { u32::MAX }));
                check(&mut pool, (0..n).map(|n| 1 << (random(n) >> 27)));
                check(&mut pool, (0..n).map(|n| random(n) & 1));
            }
        }
    }
}
