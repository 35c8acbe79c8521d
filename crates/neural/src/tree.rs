//! Sums over a fixed binary tree of leaves, so that they do not depend on which worker computes which leaf.
//!
//! The global batch is split into V leaves. A node of the tree is the sum of its two children, in this order. A worker
//! that owns a contiguous range of leaves sends the sums of the maximal subtrees within its range; adding them up along
//! the tree gives the same bits for every distribution of the leaves.

use std::ops::Range;

use thiserror::Error;

/// Node of the tree: leaves `index << level` to `(index + 1) << level` exclusive.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Node {
    /// 0 for leaves.
    pub level: u32,
    /// Place among the nodes of the level.
    pub index: u32,
}

impl Node {
    /// The leaves below the node.
    pub fn leaves(self) -> Range<u32> {
        self.index << self.level..(self.index + 1) << self.level
    }

    pub(crate) fn parent(self) -> Self {
        Self { level: self.level + 1, index: self.index / 2 }
    }
}

/// Maximal aligned subtrees that cover `leaves`, in order: at most `2 log2 V` of them.
pub fn subtrees(leaves: Range<u32>) -> Vec<Node> {
    let mut nodes = Vec::new();
    let mut at = leaves.start;
    while at < leaves.end {
        let aligned = if at == 0 { 31 } else { at.trailing_zeros() };
        let level = aligned.min((leaves.end - at).ilog2());
        nodes.push(Node { level, index: at >> level });
        at += 1 << level;
    }
    nodes
}

/// Subtree sums that do not cover every leaf exactly once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum TreeError {
    /// A leaf is missing.
    #[error("leaf {leaf}: no sum contains it")]
    Missing {
        /// The first missing leaf.
        leaf: u32,
    },
    /// A leaf occurs in two sums.
    #[error("leaf {leaf}: two sums contain it")]
    Duplicate {
        /// The first duplicate leaf.
        leaf: u32,
    },
}

/// Adds subtree sums along the tree of `leaves` leaves (a power of two) with `add(left, right)`.
///
/// # Errors
/// The nodes do not cover every leaf exactly once.
pub fn combine<T>(leaves: u32, mut sums: Vec<(Node, T)>, mut add: impl FnMut(&mut T, T)) -> Result<T, TreeError> {
    sums.sort_by_key(|(node, _)| node.leaves().start);
    let mut next = 0;
    for (node, _) in &sums {
        let range = node.leaves();
        if range.start > next {
            return Err(TreeError::Missing { leaf: next });
        }
        if range.start < next {
            return Err(TreeError::Duplicate { leaf: range.start });
        }
        next = range.end;
    }
    if next != leaves {
        return Err(TreeError::Missing { leaf: next });
    }
    // A right child merges with the left sibling, which is on top of the stack once its subtree is complete.
    let mut stack: Vec<(Node, T)> = Vec::new();
    for (mut node, mut sum) in sums {
        while node.index % 2 == 1 && stack.last().is_some_and(|(top, _)| top.level == node.level) {
            let (_, mut left) = stack.pop().expect("the condition checked it");
            add(&mut left, sum);
            (node, sum) = (node.parent(), left);
        }
        stack.push((node, sum));
    }
    let (_, sum) = stack.pop().expect("at least one leaf");
    assert!(stack.is_empty(), "the number of leaves is a power of two");
    Ok(sum)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tree_sum_has_the_same_bits_for_every_distribution_of_leaves() {
        let values: Vec<f32> = (0..64u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 8) as f32 * 1e-3).collect();
        let sums_of = |range: Range<u32>| -> Vec<(Node, f32)> {
            let sum = |node: Node| {
                let all =
                    node.leaves().map(|i| (Node { level: 0, index: i - node.leaves().start }, values[i as usize]));
                combine(node.leaves().len() as u32, all.collect(), |a, b| *a += b).unwrap()
            };
            subtrees(range).into_iter().map(|n| (n, sum(n))).collect()
        };
        let whole = sums_of(0..64)[0].1;
        assert_ne!(whole.to_bits(), values.iter().sum::<f32>().to_bits(), "the order of additions matters here");
        for first in 0..=64 {
            for second in (first..=64).step_by(7) {
                let parts = [0..first, first..second, second..64];
                let sums = parts.into_iter().flat_map(sums_of).collect();
                assert_eq!(combine(64, sums, |a, b| *a += b).unwrap().to_bits(), whole.to_bits());
            }
        }
        assert!(subtrees(1..63).len() <= 12);
    }

    #[test]
    fn missing_and_duplicate_leaves_are_errors() {
        let sums = |ranges: &[Range<u32>]| -> Vec<(Node, u32)> {
            ranges.iter().flat_map(|r| subtrees(r.clone())).map(|n| (n, 1)).collect()
        };
        let add = |a: &mut u32, b: u32| *a += b;
        assert_eq!(combine(8, sums(&[0..3, 4..8]), add), Err(TreeError::Missing { leaf: 3 }));
        assert_eq!(combine(8, sums(&[0..4, 3..8]), add), Err(TreeError::Duplicate { leaf: 3 }));
        assert_eq!(combine(8, sums(&[0..4, 4..7]), add), Err(TreeError::Missing { leaf: 7 }));
    }
}
