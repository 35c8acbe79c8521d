//! Quality and histogram of one tile.

use crate::instructions::dispatch;
use engram_memory::quality::GroupQuality;
use engram_memory::{Histogram, Weight};

/// [`GroupQuality`] within one segment: fewer than 2^32 memories of at most 2^30 units, so 64 bits hold the sum.
#[derive(Debug, Clone, Copy)]
pub(super) struct Total {
    count: u64,
    sum: u64,
    min: u32,
    max: u32,
}

impl Total {
    pub(super) const EMPTY: Self = Self { count: 0, sum: 0, min: u32::MAX, max: 0 };

    pub(super) fn merge(&mut self, other: &Self) {
        self.count += other.count;
        self.sum += other.sum;
        self.min = self.min.min(other.min);
        self.max = self.max.max(other.max);
    }

    pub(super) fn quality(&self) -> GroupQuality {
        GroupQuality { count: self.count, sum: u128::from(self.sum), min: self.min, max: self.max }
    }
}

/// Up to this many groups, one vectorised run over the tile for each is cheaper than a scalar look-up for each memory.
const FEW: usize = 8;

dispatch! {
    /// Adds a tile to the totals, indexed by group; the highest group of the tile is within them.
    pub(super) fn add_tile(potentials: &[u32], groups: &[u8], clock: u32, totals: &mut [Total]) {
        let mut present = [0; FEW];
        let mut found = 0;
        let mut next = groups.iter().copied().min();
        while let Some(group) = next {
            if found == FEW {
                return add_each(potentials, groups, clock, totals);
            }
            present[found] = group;
            found += 1;
            let above = groups.iter().fold(u8::MAX, |least, &other| least.min(if other > group { other } else { u8::MAX }));
            next = (above < u8::MAX || (group < u8::MAX && groups.contains(&u8::MAX))).then_some(above);
        }
        for &group in &present[..found] {
            totals[usize::from(group)].merge(&total_of(potentials, groups, clock, group));
        }
    }
}

#[inline(always)]
fn total_of(potentials: &[u32], groups: &[u8], clock: u32, group: u8) -> Total {
    // A tile has 2^12 memories of at most 2^30 units: sums of the two halves of their 32 bits fit in 32 bits each, and all
    // lanes have one width.
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

#[inline(always)]
fn add_each(potentials: &[u32], groups: &[u8], clock: u32, totals: &mut [Total]) {
    for (&potential, &group) in potentials.iter().zip(groups) {
        let weight = potential.max(clock) - clock;
        let total = &mut totals[usize::from(group)];
        total.count += 1;
        total.sum += u64::from(weight);
        total.min = total.min.min(weight);
        total.max = total.max.max(weight);
    }
}

/// Counts a tile into `bins`: `2^bits` for each group, group by group.
pub(super) fn count_tile(potentials: &[u32], groups: &[u8], clock: u32, bits: u32, bins: &mut [u32]) {
    for (&potential, &group) in potentials.iter().zip(groups) {
        let weight = Weight::from_units(potential.max(clock) - clock).unwrap_or(Weight::ONE);
        bins[(usize::from(group) << bits) + Histogram::bin(bits, weight)] += 1;
    }
}
