//! What a training step needs of a group: the sum of gradients and of loss moments over its members.

use engram_neural::tree::{Node, TreeError, combine};
use engram_neural::{GradientSum, Moments};

/// A member's part of a gradient.
#[derive(Debug, Clone, PartialEq)]
pub enum LocalGradient {
    /// One sum over the member's samples. The group adds the members' sums in rank order.
    Sum(GradientSum),
    /// Sums of subtrees over a fixed number of leaves. The group adds them along the tree, so the result does not
    /// depend on which member computed which leaf.
    Subtrees {
        /// Number of leaves of the whole group; a power of two.
        leaves: u32,
        /// The member's maximal subtrees.
        sums: Vec<(Node, GradientSum)>,
    },
}

/// Reduction over the members of a group at one generation.
///
/// Every member calls the same methods in the same order. The results have the same bits on every member. An error
/// leaves the local parts untouched, so that the caller can reduce them again with the surviving members.
pub trait Reduce {
    /// Why a reduction failed.
    type Error;

    /// Sum of the moments of all leaves of all members, added in rank order and within a member in leaf order.
    ///
    /// # Errors
    /// A member left, or a deadline passed.
    fn moments(&mut self, local: &[Moments]) -> Result<Moments, Self::Error>;

    /// Sum of the gradients of all members.
    ///
    /// # Errors
    /// A member left, or a deadline passed.
    fn gradient(&mut self, local: &LocalGradient) -> Result<GradientSum, Self::Error>;
}

/// A group of one member.
#[derive(Debug, Clone, Copy, Default)]
pub struct Alone;

impl Reduce for Alone {
    type Error = TreeError;

    fn moments(&mut self, local: &[Moments]) -> Result<Moments, TreeError> {
        Ok(sum_moments([local]))
    }

    fn gradient(&mut self, local: &LocalGradient) -> Result<GradientSum, TreeError> {
        sum_gradients(&[local])
    }
}

/// Adds moments in the order given.
pub(crate) fn sum_moments<'a>(parts: impl IntoIterator<Item = &'a [Moments]>) -> Moments {
    let mut total = Moments::default();
    parts.into_iter().flatten().for_each(|m| total.add(m));
    total
}

/// Adds the members' gradients, given in rank order.
///
/// # Errors
/// Subtrees do not cover every leaf exactly once.
///
/// # Panics
/// Members use different orders of summation, or there are none.
pub(crate) fn sum_gradients(parts: &[&LocalGradient]) -> Result<GradientSum, TreeError> {
    let mut total: Option<GradientSum> = None;
    let mut subtrees = Vec::new();
    let mut leaf_count = 0;
    for part in parts {
        match part {
            LocalGradient::Sum(sum) => match &mut total {
                Some(total) => total.add(sum),
                None => total = Some(sum.clone()),
            },
            LocalGradient::Subtrees { leaves, sums } => {
                leaf_count = *leaves;
                subtrees.extend(sums.iter().cloned());
            }
        }
    }
    match total {
        Some(total) => {
            assert!(subtrees.is_empty(), "members use different orders of summation");
            Ok(total)
        }
        None => combine(leaf_count, subtrees, |a, b| a.add(&b)),
    }
}
