//! Sums by a fixed binary tree over the leaves of a global batch: the same bits for any number of workers.
//!
//! A global batch has [`LEAVES`] logical leaves. A worker computes the gradient of its leaves, adds them up to the largest aligned subtrees, and
//! sends those sums. Every addition is one of the fixed tree, on whichever rank.

use std::ops::Range;

/// Leaves of a global batch.
pub const LEAVES: usize = 64;

/// A complete subtree: `1 << level` leaves from `index << level` on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Subtree {
    /// Height of the subtree; 0 for a leaf.
    pub level: u32,
    /// Number of the subtree among those of its level.
    pub index: usize,
}

/// Returns the largest aligned subtrees of a range of leaves, in order: at most 10.
///
/// # Panics
/// The range ends beyond [`LEAVES`].
pub fn subtrees(leaves: Range<usize>) -> Vec<Subtree> {
    assert!(leaves.end <= LEAVES, "leaves end at {}, allowed: at most {LEAVES}", leaves.end);
    let mut start = leaves.start;
    let mut nodes = Vec::new();
    while start < leaves.end {
        let aligned = start.trailing_zeros().min(LEAVES.trailing_zeros());
        let level = aligned.min((leaves.end - start).ilog2());
        nodes.push(Subtree { level, index: start >> level });
        start += 1 << level;
    }
    nodes
}

/// Collects the gradients of leaves, in order, into subtree sums.
#[derive(Debug)]
pub struct LeafSums {
    next: usize,
    leaves: Range<usize>,
    sums: Vec<(Subtree, Vec<f32>)>,
}

impl LeafSums {
    /// Begins with the first leaf of a range.
    pub const fn new(leaves: Range<usize>) -> Self {
        Self { next: leaves.start, leaves, sums: Vec::new() }
    }

    /// Adds the gradient of the next leaf.
    ///
    /// # Panics
    /// All leaves of the range are there.
    pub fn push(&mut self, gradient: Vec<f32>) {
        assert!(self.next < self.leaves.end, "leaf {} is not one of {:?}", self.next, self.leaves);
        self.sums.push((Subtree { level: 0, index: self.next }, gradient));
        self.next += 1;
        merge(&mut self.sums);
    }

    /// Returns the sums of the subtrees of the range, in order.
    ///
    /// # Panics
    /// A leaf is missing.
    pub fn finish(self) -> Vec<Vec<f32>> {
        assert_eq!(self.next, self.leaves.end.max(self.leaves.start), "leaves of {:?} that were added", self.leaves);
        self.sums.into_iter().map(|(_, sum)| sum).collect()
    }
}

/// Adds siblings at the end of the list as long as there are some.
fn merge(sums: &mut Vec<(Subtree, Vec<f32>)>) {
    while let [.., (left, _), (right, _)] = &sums[..]
        && left.level == right.level
        && left.index + 1 == right.index
        && left.index.is_multiple_of(2)
    {
        let parent = Subtree { level: left.level + 1, index: left.index / 2 };
        if let Some((_, right)) = sums.pop()
            && let Some((node, left)) = sums.last_mut()
        {
            left.iter_mut().zip(&right).for_each(|(left, right)| *left += right);
            *node = parent;
        }
    }
}

/// Adds the subtree sums of all leaves, in order, up to the root.
///
/// # Panics
/// The subtrees do not cover all leaves.
pub(crate) fn combine(contributions: &mut Vec<(Subtree, Vec<f32>)>) -> Vec<f32> {
    let mut sums = Vec::new();
    for contribution in contributions.drain(..) {
        sums.push(contribution);
        merge(&mut sums);
    }
    let root = Subtree { level: LEAVES.trailing_zeros(), index: 0 };
    match sums.pop() {
        Some((node, sum)) if node == root && sums.is_empty() => sum,
        _ => panic!("subtrees must cover {LEAVES} leaves"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn subtrees_cover_each_range_with_at_most_ten_aligned_nodes() {
        for start in 0..=LEAVES {
            for end in start..=LEAVES {
                let nodes = subtrees(start..end);
                let mut next = start;
                for node in &nodes {
                    assert_eq!(node.index << node.level, next);
                    next += 1 << node.level;
                }
                assert_eq!(next, end);
                assert!(nodes.len() <= 10, "{start}..{end}: {}", nodes.len());
            }
        }
    }

    #[test]
    fn sums_have_the_bits_of_the_tree_for_any_split() {
        let leaf = |index: usize| vec![(index as f32 + 0.3).sin() * 1e3, (index as f32).exp2() * 1e-9];
        let split = |ends: &[usize]| {
            let mut contributions = Vec::new();
            let mut start = 0;
            for &end in ends {
                let mut sums = LeafSums::new(start..end);
                (start..end).for_each(|index| sums.push(leaf(index)));
                contributions.extend(subtrees(start..end).into_iter().zip(sums.finish()));
                start = end;
            }
            combine(&mut contributions)
        };
        let mut level: Vec<Vec<f32>> = (0..LEAVES).map(leaf).collect();
        while level.len() > 1 {
            level = level.chunks(2).map(|it| vec![it[0][0] + it[1][0], it[0][1] + it[1][1]]).collect();
        }
        for cut in 0..=LEAVES {
            assert_eq!(split(&[cut / 3, cut, LEAVES]), level[0], "{cut}");
        }
    }
}
