//! A stable parallel radix sort of (slot, key) by key, ascending.
//!
//! What is large is split by its highest bits that differ, by all threads together, until every part fits in a core's
//! cache; then each thread sorts whole parts by their remaining bits. Bits that all keys of a part share cost nothing, so
//! a part of equal keys is recognised by one look at it.

use super::scatter::{BLOCK, split};
use crate::Slot;
use crate::pool::Pool;
use std::ops::Range;

/// What is sorted: a slot and its key.
pub(super) type Entry = (Slot, u32);

/// Parts up to this length are sorted by one thread: they and their scratch fit in the second-level cache.
const SMALL: usize = 1 << 15;
/// Small neighbours are sorted together up to this length, so that many tiny parts do not cost a call each.
const TOGETHER: usize = 1 << 12;
/// Bits of one digit, at most.
const DIGIT_BITS: u32 = 11;

/// Sorts what is in `from` by key, into `to`; `from` is lost. `finish(part)` is called once for every part, sorted and final:
/// parts are consecutive, together all of `to` but the ranges that are returned, and equal keys are never in two parts.
///
/// Returned are ranges of more than one thread's work whose keys are all equal, in the order they had.
pub(super) fn sort(
    pool: &mut Pool,
    from: &mut [Entry],
    to: &mut [Entry],
    finish: impl Fn(&mut [Entry]) + Sync,
) -> Vec<Range<usize>> {
    assert_eq!(from.len(), to.len(), "what is sorted goes to as much room");
    let mut tied = Vec::new();
    let mut small: Vec<Part> = Vec::new();
    let mut large = vec![Part { range: 0..from.len(), arrived: false }];
    while let Some(part) = large.pop() {
        if part.range.len() <= SMALL {
            small.push(part);
            continue;
        }
        let (here, there) = (&mut from[part.range.clone()], &mut to[part.range.clone()]);
        let (here, there) = if part.arrived { (there, here) } else { (here, there) };
        let Some(highest) = highest_difference(pool, here) else {
            if !part.arrived {
                pool.each(there.chunks_mut(BLOCK).zip(here.chunks(BLOCK)).collect(), |_, (there, here)| {
                    there.copy_from_slice(here);
                });
            }
            tied.push(part.range);
            continue;
        };
        let bits = (here.len() / TOGETHER).ilog2().min(DIGIT_BITS).min(highest + 1);
        let ends = split(pool, here, there, highest + 1 - bits, bits);
        let first = large.len();
        let mut start = part.range.start;
        for end in ends {
            let end = part.range.start + end;
            if end > start {
                large.push(Part { range: start..end, arrived: !part.arrived });
            }
            start = end;
        }
        // The last is taken first: now parts are taken in order, so that small neighbours follow each other.
        large[first..].reverse();
    }
    let mut parts = Vec::with_capacity(small.len());
    let (mut from, mut to, mut at) = (from, to, 0);
    let mut small = small.into_iter().peekable();
    while let Some(mut part) = small.next() {
        while let Some(next) = small.next_if(|next| next.extends(&part)) {
            part.range.end = next.range.end;
        }
        let skipped = part.range.start - at;
        at = part.range.end;
        let (own_from, rest) = std::mem::take(&mut from)[skipped..].split_at_mut(part.range.len());
        from = rest;
        let (own_to, rest) = std::mem::take(&mut to)[skipped..].split_at_mut(part.range.len());
        to = rest;
        parts.push((own_from, own_to, part.arrived));
    }
    pool.each(parts, |_, (from, to, arrived)| {
        sort_small(from, to, arrived);
        finish(to);
    });
    tied
}

/// A range of places whose entries are all before those of the next range.
struct Part {
    range: Range<usize>,
    /// Whether its entries are where they shall end.
    arrived: bool,
}

impl Part {
    fn extends(&self, part: &Self) -> bool {
        self.arrived == part.arrived
            && self.range.start == part.range.end
            && self.range.end - part.range.start <= TOGETHER
    }
}

/// The highest bit in which two keys differ.
fn highest_difference(pool: &mut Pool, entries: &[Entry]) -> Option<u32> {
    let first = entries[0].1;
    let mut differences: Vec<u32> = vec![0; entries.len().div_ceil(BLOCK)];
    let blocks = entries.chunks(BLOCK).zip(&mut differences).collect();
    pool.each(blocks, |_, (block, difference)| *difference = differing_bits(block, first));
    differences.iter().fold(0, |all, difference| all | difference).checked_ilog2()
}

fn differing_bits(entries: &[Entry], first: u32) -> u32 {
    entries.iter().fold(0, |all, &(_, key)| all | (key ^ first))
}

/// Sorts one part into `to`, where it is already if it has `arrived`.
fn sort_small(from: &mut [Entry], to: &mut [Entry], arrived: bool) {
    let (mut here, mut there, mut arrived) = if arrived { (to, from, true) } else { (from, to, false) };
    let difference = here.first().map_or(0, |first| differing_bits(here, first.1));
    if difference > 0 && here.len() <= 64 {
        here.sort_by_key(|entry| entry.1);
    } else if difference > 0 {
        let (low, high) = (difference.trailing_zeros(), 32 - difference.leading_zeros());
        // Wide digits pay where there are many entries to share the cost of their histogram.
        let widest = if here.len() >= 2_048 { DIGIT_BITS } else { 8 };
        let bits = (high - low).div_ceil((high - low).div_ceil(widest));
        for shift in (low..high).step_by(bits as usize) {
            scatter(here, there, shift, bits);
            std::mem::swap(&mut here, &mut there);
            arrived = !arrived;
        }
    }
    if !arrived {
        there.copy_from_slice(here);
    }
}

fn scatter(from: &[Entry], to: &mut [Entry], shift: u32, bits: u32) {
    let mut places = [0_u32; 1 << DIGIT_BITS];
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
        let mut from: Vec<Entry> = keys.enumerate().map(|(slot, key)| (slot as u32, key)).collect();
        let mut expected = from.clone();
        expected.sort_by_key(|entry| entry.1);
        let mut to = vec![(0, 0); from.len()];
        let finished = Mutex::new(Vec::new());
        let tied = sort(pool, &mut from, &mut to, |part| finished.lock().unwrap().extend_from_slice(part));
        assert!(to == expected, "{} entries", expected.len());
        let mut finished = finished.into_inner().unwrap();
        for range in tied {
            let part = &to[range];
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

    #[test]
    fn a_split_writes_each_place_wherever_its_lines_begin() {
        let mut pool = Pool::new(2);
        let from: Vec<Entry> = (0..200_000_u32).map(|n| (n, n.wrapping_mul(2_654_435_761) >> 9)).collect();
        let mut expected = from.clone();
        expected.sort_by_key(|entry| entry.1 >> 12);
        for lead in 0..9 {
            let mut room = vec![(7, 7); from.len() + 9];
            let ends = split(&mut pool, &from, &mut room[lead..lead + from.len()], 12, 11);
            assert!(room[lead..lead + from.len()] == expected, "lead {lead}");
            assert!(room[..lead].iter().chain(&room[lead + from.len()..]).all(|&entry| entry == (7, 7)));
            assert_eq!((ends.len(), ends.last()), (2_048, Some(&from.len())));
        }
    }
}
