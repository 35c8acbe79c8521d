//! Quality and histogram of one tile.

#[cfg(target_arch = "x86_64")]
use super::{avx2, avx512};
use crate::TILE;
use crate::instructions::{Level, Set, dispatch};
use engram_memory::quality::GroupQuality;
use engram_memory::{DecayClock, Histogram};

/// [`GroupQuality`] within one segment: fewer than 2^32 memories of at most 2^30 units, so the sum fits in 64 bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Total {
    pub(super) count: u64,
    pub(super) sum: u64,
    pub(super) min: u32,
    pub(super) max: u32,
}

impl Total {
    pub(super) const EMPTY: Self = Self { count: 0, sum: 0, min: u32::MAX, max: 0 };

    #[inline(always)]
    pub(super) fn merge(&mut self, other: &Self) {
        self.count += other.count;
        self.sum += other.sum;
        self.min = self.min.min(other.min);
        self.max = self.max.max(other.max);
    }

    #[inline(always)]
    pub(super) fn add(&mut self, weight: u32) {
        self.merge(&Self { count: 1, sum: weight.into(), min: weight, max: weight });
    }

    /// Subtracts the other totals from the last one, which was summed over all memories.
    #[inline(always)]
    pub(super) fn take_from_last(totals: &mut [Self]) {
        if let [others @ .., last] = totals {
            last.sum -= others.iter().map(|total| total.sum).sum::<u64>();
        }
    }

    pub(super) fn quality(&self) -> GroupQuality {
        GroupQuality { count: self.count, sum: u128::from(self.sum), min: self.min, max: self.max }
    }
}

/// Up to this many groups, one vectorized comparison per group is cheaper than one table look-up per memory.
const MAX_FEW_GROUPS: usize = 8;

/// The groups of a tile with few groups. Neighbouring tiles mostly have the same groups, so those of one tile are the guess for the next;
/// counting verifies the guess.
#[derive(Debug, Clone, Copy)]
pub(super) struct TileGroups {
    groups: [u8; MAX_FEW_GROUPS],
    count: usize,
}

impl TileGroups {
    /// No groups.
    pub(super) const NONE: Self = Self { groups: [0; MAX_FEW_GROUPS], count: 0 };

    /// Returns `None` for more than [`MAX_FEW_GROUPS`] groups.
    fn of(level: Level, groups: &[u8]) -> Option<Self> {
        let mut present = Self::NONE;
        let mut next = Some(least(level, groups, 0));
        while let Some(group) = next {
            if present.count == MAX_FEW_GROUPS {
                return None;
            }
            present.groups[present.count] = group;
            present.count += 1;
            next = group.checked_add(1).and_then(|from| {
                // Groups below `from` have at least this distance.
                let around = from.wrapping_neg();
                Some(least(level, groups, from)).filter(|&distance| distance < around).map(|distance| from + distance)
            });
        }
        Some(present)
    }

    fn groups(&self) -> &[u8] {
        &self.groups[..self.count]
    }
}

/// Adds a tile to the totals, which are indexed by group and cover the tile's highest group.
pub(super) fn add_tile(
    level: Level,
    potentials: &[u32],
    groups: &[u8],
    clock: u32,
    guess: &mut TileGroups,
    totals: &mut [Total],
) {
    if add_groups(level, potentials, groups, clock, guess.groups(), totals) {
        return;
    }
    match TileGroups::of(level, groups) {
        Some(present) => {
            *guess = present;
            let all = add_groups(level, potentials, groups, clock, present.groups(), totals);
            debug_assert!(all, "every memory of a tile is in one of its groups");
        }
        None => {
            *guess = TileGroups::NONE;
            add_each(potentials, groups, clock, totals);
        }
    }
}

/// Adds a tile if all of its groups are in `selected` (at most [`MAX_FEW_GROUPS`]); returns whether they are, and adds nothing otherwise.
#[inline]
fn add_groups(
    level: Level,
    potentials: &[u32],
    groups: &[u8],
    clock: u32,
    selected: &[u8],
    totals: &mut [Total],
) -> bool {
    let mut buffer = [Total::EMPTY; MAX_FEW_GROUPS];
    let group_totals = &mut buffer[..selected.len()];
    match *selected {
        [one] => totals_of::<1, true>(level, potentials, groups, clock, [one], group_totals),
        [one, other] => totals_of::<2, true>(level, potentials, groups, clock, [one, other], group_totals),
        _ => {
            for (selected, group_totals) in selected.chunks(2).zip(group_totals.chunks_mut(2)) {
                match *selected {
                    [one, other] => totals_of::<2, false>(level, potentials, groups, clock, [one, other], group_totals),
                    [one] => totals_of::<1, false>(level, potentials, groups, clock, [one], group_totals),
                    _ => unreachable!("chunks of two"),
                }
            }
        }
    }
    let all = group_totals.iter().map(|total| total.count).sum::<u64>() == potentials.len() as u64;
    if all {
        for (&group, group_totals) in selected.iter().zip(group_totals) {
            // The guess may name a group that this tile lacks and that is outside of `totals`.
            if group_totals.count > 0 {
                totals[usize::from(group)].merge(group_totals);
            }
        }
    }
    all
}

dispatch! {
    /// Returns the least distance from `from` upwards to a group, modulo 256.
    fn least(groups: &[u8], from: u8) -> u8 {
        groups.iter().fold(u8::MAX, |least, group| least.min(group.wrapping_sub(from)))
    }
}

/// Replaces `totals` with one total for each selected group. `REST` assumes that no memory is in another group; otherwise the counts show it
/// and the totals are invalid.
#[cfg_attr(target_arch = "x86_64", allow(unsafe_code))]
fn totals_of<const G: usize, const REST: bool>(
    level: Level,
    potentials: &[u32],
    groups: &[u8],
    clock: u32,
    selected: [u8; G],
    totals: &mut [Total],
) {
    match level.set() {
        // SAFETY: the level says that the processor has these instructions.
        #[cfg(target_arch = "x86_64")]
        Set::Avx512 => unsafe { avx512::totals::<G, REST>(potentials, groups, clock, selected, totals) },
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        Set::Avx2 => unsafe { avx2::totals::<G, REST>(potentials, groups, clock, selected, totals) },
        Set::Portable => {
            for (total, group) in totals.iter_mut().zip(selected) {
                *total = total_of(level, potentials, groups, clock, group);
            }
        }
    }
}

dispatch! {
    /// Computes the total of one group of at most a tile.
    fn total_of(potentials: &[u32], groups: &[u8], clock: u32, group: u8) -> Total {
        debug_assert!(potentials.len() <= TILE, "at most one tile, so that the sums of halves fit");
        // 2^12 memories of at most 2^30 units: the sums of the two 16-bit halves fit in 32 bits each, so all lanes have one width.
        let (mut count, mut low, mut high, mut min, mut max) = (0_u32, 0_u32, 0_u32, u32::MAX, 0_u32);
        for (&potential, &other) in potentials.iter().zip(groups) {
            let weight = potential.max(clock) - clock;
            let mask = if other == group { u32::MAX } else { 0 };
            let counted = weight & mask;
            count += mask & 1;
            low += counted & 0xFFFF;
            high += counted >> 16;
            min = min.min(weight | !mask);
            max = max.max(counted);
        }
        Total { count: u64::from(count), sum: (u64::from(high) << 16) + u64::from(low), min, max }
    }
}

fn add_each(potentials: &[u32], groups: &[u8], clock: u32, totals: &mut [Total]) {
    for (&potential, &group) in potentials.iter().zip(groups) {
        totals[usize::from(group)].add(potential.max(clock) - clock);
    }
}

/// Counts a tile into `bins`: `2^bits` for each group, group by group.
pub(super) fn count_tile(potentials: &[u32], groups: &[u8], clock: DecayClock, bits: u32, bins: &mut [u32]) {
    for (&potential, &group) in potentials.iter().zip(groups) {
        bins[(usize::from(group) << bits) + Histogram::bin(bits, clock.weight(potential))] += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::instructions::Instructions;
    use engram_memory::ONE;
    use proptest::prelude::*;

    /// Weights of a tile, constant for a while and then redrawn, so that extremes occur early, late, or never.
    fn weights() -> impl Strategy<Value = Vec<u32>> {
        let weight = prop_oneof![Just(0), Just(ONE), 1..=100_u32, 0..=ONE];
        let runs = prop::collection::vec((weight, 1..600_usize), 0..30);
        runs.prop_map(|runs| {
            let all = runs.into_iter().flat_map(|(weight, times)| std::iter::repeat_n(weight, times));
            all.take(TILE).collect()
        })
    }

    proptest! {
        #[test]
        fn totals_are_what_adding_one_by_one_gives(
            weights in weights(),
            clock in prop_oneof![Just(0), 1..=ONE],
            (count, seed) in (1..=10_u64, any::<u64>()),
            guessed in prop::collection::btree_set(0..12_u8, 0..=3),
        ) {
            let potentials: Vec<u32> = weights.iter().map(|weight| clock + weight).collect();
            let random = |at: usize| engram_memory::hash::mix64(seed ^ at as u64);
            let groups: Vec<u8> = (0..weights.len()).map(|at| (random(at / 70) % 2 * random(at) % count) as u8).collect();
            let mut expected = [Total::EMPTY; 10];
            add_each(&potentials, &groups, clock, &mut expected);
            for most in [Instructions::Widest, Instructions::Avx2, Instructions::Portable] {
                let (mut guess, mut totals) = (TileGroups::NONE, [Total::EMPTY; 10]);
                for (place, group) in guess.groups.iter_mut().zip(&guessed) {
                    *place = *group;
                    guess.count += 1;
                }
                for _ in 0..2 {
                    add_tile(Level::of(most), &potentials, &groups, clock, &mut guess, &mut totals);
                }
                let twice = expected.map(|it| Total { count: 2 * it.count, sum: 2 * it.sum, ..it });
                prop_assert_eq!(totals, twice, "{}", Level::of(most));
            }
        }
    }
}
