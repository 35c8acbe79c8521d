//! Quality vectors and histograms: integers that can be added in any order.

use crate::ids::Group;
use crate::law::{ONE, Weight};

/// Count, sum and extremes of the weights of one group, in units. Memories of weight 0 are counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GroupQuality {
    /// Number of memories.
    pub count: u64,
    /// Sum of their weights.
    pub sum: u128,
    /// Lowest weight; [`u32::MAX`] when there is none.
    pub min: u32,
    /// Highest weight; 0 when there is none.
    pub max: u32,
}

impl GroupQuality {
    /// Quality without memories.
    pub const EMPTY: Self = Self { count: 0, sum: 0, min: u32::MAX, max: 0 };

    /// Adds one memory.
    pub fn add(&mut self, weight: Weight) {
        let units = weight.units();
        self.count += 1;
        self.sum += u128::from(units);
        self.min = self.min.min(units);
        self.max = self.max.max(units);
    }

    /// Merges another value.
    pub fn merge(&mut self, other: &Self) {
        self.count += other.count;
        self.sum += other.sum;
        self.min = self.min.min(other.min);
        self.max = self.max.max(other.max);
    }

    /// Whether at least one set of memories has this quality.
    fn is_possible(&self) -> bool {
        let count = u128::from(self.count);
        let bounds = count * u128::from(self.min)..=count * u128::from(self.max);
        count > 0 && self.min <= self.max && self.max <= ONE && bounds.contains(&self.sum)
    }

    /// Returns the mean weight in [0, 1], `None` without memories.
    pub fn mean(&self) -> Option<f64> {
        (self.count > 0).then(|| self.sum as f64 / (self.count as f64 * f64::from(ONE)))
    }
}

impl Default for GroupQuality {
    fn default() -> Self {
        Self::EMPTY
    }
}

/// Quality per group: sorted by group, groups without a memory are absent.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct QualityVector {
    groups: Vec<(Group, GroupQuality)>,
}

impl QualityVector {
    /// Rebuilds a vector from its parts; `None` if no set of memories has it: groups that do not ascend, an empty group, inconsistent
    /// extremes and sum, or a count overflow.
    pub fn from_parts(groups: Vec<(Group, GroupQuality)>) -> Option<Self> {
        let ascending = groups.windows(2).all(|pair| pair[0].0 < pair[1].0);
        let possible = groups.iter().all(|(_, quality)| quality.is_possible());
        let countable = groups.iter().try_fold(0_u64, |total, (_, quality)| total.checked_add(quality.count)).is_some();
        (ascending && possible && countable).then_some(Self { groups })
    }

    /// Replaces the content by groups in any order, reusing memory; empty ones are dropped, equal ones merged.
    pub fn assign(&mut self, groups: impl IntoIterator<Item = (Group, GroupQuality)>) {
        self.groups.clear();
        for (group, quality) in groups {
            // Usually in ascending order.
            match self.groups.last() {
                Some(last) if last.0 >= group => self.merge_group(group, &quality),
                _ if quality.count == 0 => {}
                _ => self.groups.push((group, quality)),
            }
        }
    }

    /// Returns the non-empty groups, ascending.
    pub fn groups(&self) -> &[(Group, GroupQuality)] {
        &self.groups
    }

    /// Returns the quality of one group.
    pub fn group(&self, group: Group) -> GroupQuality {
        match self.groups.binary_search_by_key(&group, |entry| entry.0) {
            Ok(at) => self.groups[at].1,
            Err(_) => GroupQuality::EMPTY,
        }
    }

    /// Returns the quality of all groups together.
    pub fn total(&self) -> GroupQuality {
        self.groups.iter().fold(GroupQuality::EMPTY, |mut total, (_, quality)| {
            total.merge(quality);
            total
        })
    }

    /// Adds one memory.
    pub fn add(&mut self, group: Group, weight: Weight) {
        let mut one = GroupQuality::EMPTY;
        one.add(weight);
        self.merge_group(group, &one);
    }

    /// Merges another value.
    pub fn merge(&mut self, other: &Self) {
        for (at, (group, quality)) in other.groups.iter().enumerate() {
            // Usually both have the same groups.
            match self.groups.get_mut(at) {
                Some(entry) if entry.0 == *group => entry.1.merge(quality),
                _ => self.merge_group(*group, quality),
            }
        }
    }

    fn merge_group(&mut self, group: Group, quality: &GroupQuality) {
        if quality.count == 0 {
            return;
        }
        match self.groups.binary_search_by_key(&group, |entry| entry.0) {
            Ok(at) => self.groups[at].1.merge(quality),
            Err(at) => self.groups.insert(at, (group, *quality)),
        }
    }
}

/// Most bits of a histogram: 4,096 bins.
pub const MAX_HISTOGRAM_BITS: u32 = 12;

/// Counts of weights in 2^bits equal bins, per group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Histogram {
    bits: u32,
    groups: Vec<(Group, Vec<u64>)>,
}

impl Histogram {
    /// Creates an empty histogram of `2^bits` bins; `None` above [`MAX_HISTOGRAM_BITS`].
    pub fn new(bits: u32) -> Option<Self> {
        (bits <= MAX_HISTOGRAM_BITS).then(|| Self { bits, groups: Vec::new() })
    }

    /// Rebuilds a histogram from its parts; `None` if a group has another number of bins or groups do not ascend.
    pub fn from_parts(bits: u32, groups: Vec<(Group, Vec<u64>)>) -> Option<Self> {
        let fits = bits <= MAX_HISTOGRAM_BITS
            && groups.iter().all(|(_, bins)| bins.len() == 1 << bits)
            && groups.windows(2).all(|pair| pair[0].0 < pair[1].0);
        fits.then_some(Self { bits, groups })
    }

    /// Returns the number of bins as a power of two.
    pub const fn bits(&self) -> u32 {
        self.bits
    }

    /// Returns the bin of a weight: `min(w >> (30 - bits), 2^bits - 1)`, so that weight 1 falls in the last bin.
    pub const fn bin(bits: u32, weight: Weight) -> usize {
        let bin = (weight.units() >> (30 - bits)) as usize;
        let last = (1 << bits) - 1;
        if bin > last { last } else { bin }
    }

    /// Returns the counts per group, ascending.
    pub fn groups(&self) -> &[(Group, Vec<u64>)] {
        &self.groups
    }

    /// Returns the counts of all groups together.
    pub fn total(&self) -> Vec<u64> {
        let mut total = vec![0; 1 << self.bits];
        for (_, bins) in &self.groups {
            total.iter_mut().zip(bins).for_each(|(sum, count)| *sum += count);
        }
        total
    }

    /// Counts one memory.
    pub fn add(&mut self, group: Group, weight: Weight) {
        let bin = Self::bin(self.bits, weight);
        self.bins_mut(group)[bin] += 1;
    }

    /// Returns the bins of one group, creating them if absent.
    pub fn bins_mut(&mut self, group: Group) -> &mut [u64] {
        let at = match self.groups.binary_search_by_key(&group, |entry| entry.0) {
            Ok(at) => at,
            Err(at) => {
                self.groups.insert(at, (group, vec![0; 1 << self.bits]));
                at
            }
        };
        &mut self.groups[at].1
    }

    /// Adds another histogram of the same number of bins.
    ///
    /// # Panics
    /// When the numbers of bins differ.
    pub fn merge(&mut self, other: &Self) {
        assert_eq!(self.bits, other.bits, "histograms have the same number of bins");
        for (group, bins) in &other.groups {
            self.bins_mut(*group).iter_mut().zip(bins).for_each(|(sum, count)| *sum += count);
        }
    }
}
