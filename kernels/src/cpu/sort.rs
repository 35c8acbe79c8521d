//! A stable parallel radix sort of (slot, key) by key, ascending.
//!
//! All threads together split large inputs by their highest differing bits until every part fits in a core's cache; then each thread sorts whole
//! parts by their remaining bits. The input is never stored unsorted: the first split reads it from its source, which saves a pass and its
//! memory. Bits that all keys of a part share are skipped, so a part of equal keys costs one read.
#![allow(unsafe_code)] // The unsafe trait `Block`, whose contract unsafe code in `scatter` relies on.

use super::scatter::split;
use crate::Slot;
use crate::pool::Pool;
use parking_lot::Mutex;
use std::ops::Range;

/// Sort element: a slot and its key.
pub(super) type Entry = (Slot, u32);

/// A run of entries that one thread reads. See [`block_length`].
///
/// # Safety
/// [`Block::each`] yields the same entries at every call while the block is borrowed.
pub(super) unsafe trait Block: Sync {
    /// Returns the number of entries.
    fn len(&self) -> usize;

    /// Calls `f` with every entry, in order.
    fn each(&self, f: impl FnMut(Entry));
}

// SAFETY: the slice is borrowed and not modified.
unsafe impl Block for &[Entry] {
    fn len(&self) -> usize {
        <[Entry]>::len(self)
    }

    #[inline(always)]
    fn each(&self, f: impl FnMut(Entry)) {
        self.iter().copied().for_each(f);
    }
}

/// Maximum length of a part that one thread sorts: the part and its scratch memory fit in the L2 cache.
const SMALL: usize = 1 << 15;
/// Target length of the parts of a split, low enough that random variation stays below the maximum.
const AIM: usize = 20_000;
/// Small neighbouring parts are sorted together up to this length, to avoid a call for each.
const TOGETHER: usize = 1 << 12;
/// Maximum digit width of a split in bits.
const SPLIT_BITS: u32 = 11;
/// Maximum digit width within a part in bits: the write positions then fit in the L1 cache, which is worth more than a saved pass.
const DIGIT_BITS: u32 = 8;
/// Minimum entries of a block: it has a histogram, and a line of entries for each digit.
const BLOCK: usize = 1 << 16;

/// Returns the block length for `length` entries: a few blocks per thread, so that one late thread does not delay the others.
pub(super) fn block_length(pool: &Pool, length: usize) -> usize {
    length.div_ceil(4 * pool.threads()).max(BLOCK)
}

/// Sorts the entries of `blocks` into `to`, which has their total length. `finish(part)` is called once for every sorted, final part: parts are
/// consecutive, cover all of `to` except the returned ranges, and never share a key.
///
/// Returns ranges of equal keys that exceed one thread's work, in input order.
pub(super) fn sort<B: Block>(
    pool: &mut Pool,
    blocks: &[B],
    to: &mut [Entry],
    finish: impl Fn(&mut [Entry]) + Sync,
) -> Vec<Range<usize>> {
    let mut tied = Vec::new();
    let mut small: Vec<Part> = Vec::new();
    let mut large = Vec::new();
    let full_range = 0..to.len();
    // Zeroed memory from the system is free until it is touched: only parts that are split twice touch it.
    let mut scratch: Vec<Entry> = Vec::new();
    match highest_difference(pool, blocks) {
        Some(highest) if full_range.len() > SMALL => {
            let (shift, bits) = digit(full_range.len(), highest);
            let bounds = split(pool, blocks, to, shift, bits);
            push_parts(&mut large, &full_range, &bounds, true);
        }
        difference => {
            let mut cut = Cut { at: 0, rest: &mut *to };
            let places = |block: &B| cut.take(&(cut.at..cut.at + block.len()));
            let work: Vec<_> = blocks.iter().map(places).zip(blocks).collect();
            pool.for_each(work, |_, (places, block)| {
                let mut places = places.iter_mut();
                block.each(|entry| *places.next().expect("a block yields as many entries as its length") = entry);
            });
            if difference.is_some() || full_range.len() <= SMALL {
                small.push(Part { range: full_range, arrived: true });
            } else {
                tied.push(full_range);
            }
        }
    }
    while let Some(part) = large.pop() {
        if part.range.len() <= SMALL {
            small.push(part);
            continue;
        }
        if scratch.is_empty() {
            scratch = vec![(0, 0); to.len()];
        }
        let (source, target) = (&mut to[part.range.clone()], &mut scratch[part.range.clone()]);
        let (source, target) = if part.arrived { (source, target) } else { (target, source) };
        let blocks: Vec<&[Entry]> = source.chunks(block_length(pool, source.len())).collect();
        let Some(highest) = highest_difference(pool, &blocks) else {
            if !part.arrived {
                target.copy_from_slice(source);
            }
            tied.push(part.range);
            continue;
        };
        let (shift, bits) = digit(source.len(), highest);
        let bounds = split(pool, &blocks, target, shift, bits);
        push_parts(&mut large, &part.range, &bounds, !part.arrived);
    }
    sort_parts(pool, small, to, &mut scratch, finish);
    tied
}

/// Returns (shift, bits) of the digit by which to split `length` entries whose keys differ in bit `highest` and lower ones.
fn digit(length: usize, highest: u32) -> (u32, u32) {
    let bits = length.div_ceil(AIM).next_power_of_two().ilog2().clamp(1, SPLIT_BITS).min(highest + 1);
    (highest + 1 - bits, bits)
}

/// Pushes the parts of `range` between `bounds`, relative to its start, onto a stack.
fn push_parts(stack: &mut Vec<Part>, range: &Range<usize>, bounds: &[usize], arrived: bool) {
    // Pushed in reverse so that they are popped in order and small neighbours stay adjacent.
    for part in bounds.windows(2).rev().filter(|part| part[0] < part[1]) {
        stack.push(Part { range: range.start + part[0]..range.start + part[1], arrived });
    }
}

/// Sorts parts, each on one thread. Parts that have not arrived are in `scratch`.
fn sort_parts(
    pool: &mut Pool,
    parts: Vec<Part>,
    to: &mut [Entry],
    scratch: &mut [Entry],
    finish: impl Fn(&mut [Entry]) + Sync,
) {
    let (mut to, mut scratch) = (Cut { at: 0, rest: to }, Cut { at: 0, rest: scratch });
    let mut work = Vec::with_capacity(parts.len());
    let mut parts = parts.into_iter().peekable();
    while let Some(mut part) = parts.next() {
        while let Some(next) = parts.next_if(|next| next.extends(&part)) {
            part.range.end = next.range.end;
        }
        let from = (!part.arrived).then(|| scratch.take(&part.range));
        work.push((from, to.take(&part.range)));
    }
    // One buffer per thread, which stays in its cache.
    let buffers: Vec<_> = (0..pool.threads()).map(|_| Mutex::new(Vec::new())).collect();
    pool.for_each(work, |thread, (from, to)| {
        if let Some(from) = from {
            sort_small(from, to, false);
        } else {
            let mut buffer = buffers[thread].lock();
            if buffer.len() < to.len() {
                buffer.resize(to.len(), (0, 0));
            }
            sort_small(&mut buffer[..to.len()], to, true);
        }
        finish(to);
    });
}

/// A slice whose ranges are taken in order.
struct Cut<'a> {
    at: usize,
    rest: &'a mut [Entry],
}

impl<'a> Cut<'a> {
    fn take(&mut self, range: &Range<usize>) -> &'a mut [Entry] {
        let (_, rest) = std::mem::take(&mut self.rest).split_at_mut(range.start - self.at);
        let (own, rest) = rest.split_at_mut(range.len());
        (self.at, self.rest) = (range.end, rest);
        own
    }
}

/// A range of positions whose entries all precede those of the next range.
struct Part {
    range: Range<usize>,
    /// Whether its entries are already in the output.
    arrived: bool,
}

impl Part {
    fn extends(&self, part: &Self) -> bool {
        self.arrived == part.arrived
            && self.range.start == part.range.end
            && self.range.end - part.range.start <= TOGETHER
    }
}

/// Returns the highest bit in which two keys differ.
fn highest_difference<B: Block>(pool: &mut Pool, blocks: &[B]) -> Option<u32> {
    // For each block: the bits that all keys have, and those that any key has.
    let mut bits = vec![(u32::MAX, 0); blocks.len()];
    pool.for_each(blocks.iter().zip(&mut bits).collect(), |_, (block, bits)| *bits = common_bits(block));
    let (all, any) = bits.into_iter().fold((u32::MAX, 0), |(all, any), bits| (all & bits.0, any | bits.1));
    (any & !all).checked_ilog2()
}

fn common_bits(block: &impl Block) -> (u32, u32) {
    let (mut all, mut any) = (u32::MAX, 0);
    block.each(|(_, key)| {
        all &= key;
        any |= key;
    });
    (all, any)
}

/// Sorts one part into `to`; the input is already there if it has `arrived`.
fn sort_small(from: &mut [Entry], to: &mut [Entry], arrived: bool) {
    let (source, target) = if arrived { (&mut *to, &mut *from) } else { (&mut *from, &mut *to) };
    let (all, any) = common_bits(&&*source);
    let difference = any & !all;
    let mut moves = 0;
    if difference > 0 && source.len() <= 64 {
        source.sort_by_key(|entry| entry.1);
    } else if difference > 0 {
        let (low, high) = (difference.trailing_zeros(), 32 - difference.leading_zeros());
        moves = (high - low).div_ceil(DIGIT_BITS);
        let bits = (high - low).div_ceil(moves);
        match moves {
            1 => sort_digits::<1>(source, target, low, bits),
            2 => sort_digits::<2>(source, target, low, bits),
            3 => sort_digits::<3>(source, target, low, bits),
            _ => sort_digits::<4>(source, target, low, bits),
        }
    }
    if arrived != moves.is_multiple_of(2) {
        to.copy_from_slice(from);
    }
}

/// Sorts by `N` digits of `bits` bits each from `low` on, moving all entries between the two buffers for each digit.
fn sort_digits<'a, const N: usize>(mut source: &'a mut [Entry], mut target: &'a mut [Entry], low: u32, bits: u32) {
    let mask = (1_usize << bits) - 1;
    let digit = |entry: &Entry, place: usize| (entry.1 >> (low + place as u32 * bits)) as usize & mask;
    let mut places = [[0_u32; 1 << DIGIT_BITS]; N];
    // One read for all digits, since counts do not depend on the order of entries.
    for entry in &*source {
        for (place, counts) in places.iter_mut().enumerate() {
            counts[digit(entry, place)] += 1;
        }
    }
    for (place, places) in places.iter_mut().enumerate() {
        let mut next = 0;
        for count in &mut *places {
            next += std::mem::replace(count, next);
        }
        for entry in &*source {
            let next = &mut places[digit(entry, place)];
            target[*next as usize] = *entry;
            *next += 1;
        }
        std::mem::swap(&mut source, &mut target);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(pool: &mut Pool, keys: impl Iterator<Item = u32>) {
        let from: Vec<Entry> = keys.enumerate().map(|(slot, key)| (slot as u32, key)).collect();
        let mut expected = from.clone();
        expected.sort_by_key(|entry| entry.1);
        let mut to = vec![(0, 0); from.len()];
        let blocks: Vec<_> = from.chunks(10_000).collect();
        let finished = Mutex::new(Vec::new());
        let tied = sort(pool, &blocks, &mut to, |part| finished.lock().extend_from_slice(part));
        assert!(to == expected, "{} entries", expected.len());
        let mut finished = finished.into_inner();
        for range in tied {
            let part = &to[range];
            assert!(part.len() > SMALL && part.iter().all(|entry| entry.1 == part[0].1));
            finished.extend_from_slice(part);
        }
        finished.sort_unstable();
        expected.sort_unstable();
        assert!(finished == expected, "every part is finished once or returned as tied");
    }

    #[test]
    fn any_distribution_of_keys_is_sorted_stably() {
        // A fixed multiplicative sequence as random keys.
        let random = |n: u32| n.wrapping_mul(2_654_435_761);
        for threads in [1, 2, 3] {
            let mut pool = Pool::new(threads);
            for n in [0, 1, 2, 64, 65, 5_000, SMALL as u32, SMALL as u32 + 1, BLOCK as u32 + 1, 300_000] {
                check(&mut pool, (0..n).map(random));
                // Covers every number of digits.
                for shift in [2, 10, 18, 25] {
                    check(&mut pool, (0..n).map(|n| random(n) >> shift));
                }
                check(&mut pool, (0..n).rev());
                check(&mut pool, (0..n).map(|_| 7));
                check(&mut pool, (0..n).map(|n| if n % 3 == 0 { random(n) } else { u32::MAX }));
                check(&mut pool, (0..n).map(|n| 1 << (random(n) >> 27)));
                check(&mut pool, (0..n).map(|n| random(n) & 1));
            }
        }
    }

    #[test]
    fn a_split_writes_each_place_wherever_its_lines_begin() {
        let mut pool = Pool::new(2);
        let from: Vec<Entry> = (0..200_000_u32).map(|n| (n, n.wrapping_mul(2_654_435_761) >> 9)).collect();
        let mut expected = from.clone();
        expected.sort_by_key(|entry| entry.1 >> 12);
        for lead in 0..9 {
            let mut buffer = vec![(7, 7); from.len() + 9];
            let blocks: Vec<_> = from.chunks(70_000).collect();
            let bounds = split(&mut pool, &blocks, &mut buffer[lead..lead + from.len()], 12, 11);
            assert!(buffer[lead..lead + from.len()] == expected, "lead {lead}");
            assert!(buffer[..lead].iter().chain(&buffer[lead + from.len()..]).all(|&entry| entry == (7, 7)));
            assert_eq!((bounds.len(), bounds[0], bounds[2_048]), (2_049, 0, from.len()));
        }
    }
}
