//! What a training step needs of a group: the sum of gradients and of loss moments over its members.

use std::ops::Range;
use std::sync::Arc;

use engram_collective::compress::{self, Compression};
use engram_collective::low_rank::LowRank;
use engram_neural::tree::{Node, TreeError, combine};
use engram_neural::{GradientSum, Moments, StageLink};
use thiserror::Error;

use crate::private::PrivateGradient;
use crate::stages::StagePlace;

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
    /// Sums of all subtrees of the group, of which the member has computed some parameters of some: -0, which changes no sum, stands for the others.
    /// The group adds each subtree over the members, and the subtrees along the tree.
    Stages {
        /// Number of leaves of the whole group; a power of two.
        leaves: u32,
        /// All subtrees, the same on all members.
        sums: Vec<(Node, GradientSum)>,
    },
    /// One sum, compressed. The group adds the decoded sums in rank order.
    Compressed(CompressedSum),
    /// One sum, of which the group adds the factors of an approximation in rank order.
    LowRank(LowRankSum),
    /// A sum of clipped gradients, to which the group adds noise once. Its order does not matter.
    Private(Box<PrivateGradient>),
}

/// A compressed sum over a member's samples.
#[derive(Debug, Clone, PartialEq)]
pub struct CompressedSum {
    /// How it is encoded, the same on all members.
    pub compression: Compression,
    /// What 16-bit values are divided by, the same on all members.
    pub divisor: usize,
    /// Encoded values.
    pub bytes: Vec<u8>,
    /// Number of values.
    pub elements: usize,
    /// As in [`GradientSum`].
    pub samples: u64,
    /// As in [`GradientSum`].
    pub loss: f64,
}

/// A sum over a member's samples that travels as factors of its matrices, see [`LowRank`].
#[derive(Debug, Clone, PartialEq)]
pub struct LowRankSum {
    /// The approximation, the same on all members.
    pub plan: Arc<LowRank>,
    /// The basis of the step, the same on all members.
    pub basis: Arc<Vec<f32>>,
    /// The sum and what was lost before.
    pub values: Vec<f32>,
    /// As in [`GradientSum`].
    pub samples: u64,
    /// As in [`GradientSum`].
    pub loss: f64,
}

impl LowRankSum {
    /// Adds the sums of all members in two rounds. `add` returns the sum of a vector over all members, in rank order.
    ///
    /// # Errors
    /// Those of `add`.
    pub fn reduce<E>(&self, mut add: impl FnMut(Round, &[f32]) -> Result<Vec<f32>, E>) -> Result<Vec<f32>, E> {
        let mut left = add(Round::Left, &self.left())?;
        self.plan.orthonormalize(&mut left);
        let right = self.plan.right(&self.values, &left);
        let right = if right.is_empty() { right } else { add(Round::Right, &right)? };
        Ok(self.plan.expand(&left, &right))
    }

    fn left(&self) -> Vec<f32> {
        self.plan.left(&self.values, &self.basis)
    }

    /// Adds the sums of all members, given in rank order.
    ///
    /// # Panics
    /// There are none.
    fn add_all(parts: &[&Self]) -> GradientSum {
        let all = |of: &dyn Fn(&Self) -> Vec<f32>| {
            let mut sums = parts.iter().map(|part| of(part));
            let first = sums.next().expect("a group has a member");
            sums.fold(first, |mut total, part| {
                total.iter_mut().zip(part).for_each(|(total, value)| *total += value);
                total
            })
        };
        let plan = &parts[0].plan;
        let mut left = all(&Self::left);
        plan.orthonormalize(&mut left);
        let right = all(&|part| plan.right(&part.values, &left));
        let samples = parts.iter().map(|part| part.samples).sum();
        GradientSum { values: plan.expand(&left, &right), samples, loss: parts.iter().map(|part| part.loss).sum() }
    }
}

/// Rounds in which factors are added.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Round {
    /// Left factors, and what travels as it is.
    Left,
    /// Right factors.
    Right,
}

/// Sums that cannot be added.
#[derive(Debug, Clone, Copy, PartialEq, Error)]
pub enum SumError {
    /// Subtrees do not cover the leaves.
    #[error(transparent)]
    Tree(#[from] TreeError),
    /// A compressed sum is malformed.
    #[error(transparent)]
    Compressed(#[from] compress::Error),
    /// Private sums have other lengths, or noise is out of range.
    #[error("failed to add private sums: lengths differ or a value is out of range")]
    Private,
}

impl CompressedSum {
    /// Adds compressed sums in the order given: the same bits on every member.
    ///
    /// # Errors
    /// One is malformed.
    pub fn add_all<'a>(parts: impl IntoIterator<Item = &'a Self>) -> Result<GradientSum, compress::Error> {
        let mut total: Option<GradientSum> = None;
        for part in parts {
            let values = compress::decode(part.compression, &part.bytes, part.elements, part.divisor)?;
            let sum = GradientSum { values, samples: part.samples, loss: part.loss };
            match &mut total {
                Some(total) => total.add(&sum),
                None => total = Some(sum),
            }
        }
        Ok(total.unwrap_or_default())
    }
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

    /// Ranges of a gradient that the group reduces one by one, see [`Trainer::buckets`](crate::Trainer::buckets); empty: as a whole.
    fn buckets(&self) -> &[Range<usize>] {
        &[]
    }

    /// Calls `compute` with a function that takes the values of each of [`Reduce::buckets`], in order, as soon as they are final for this member, and
    /// reduces them meanwhile. A failure does not end the computation: it is that of the next [`Reduce::gradient`], which must be of the same gradient.
    /// The default reduces nothing before that.
    fn overlap<T>(&mut self, compute: impl FnOnce(&mut dyn FnMut(&[f32])) -> T) -> T {
        compute(&mut |_| {})
    }

    /// Connections to the other stages of a pipeline for one batch; `None` where members are no stages.
    fn stage_link(&mut self, _place: StagePlace) -> Option<&mut dyn StageLink<Error = Self::Error>> {
        None
    }
}

/// A group of one member.
#[derive(Debug, Clone, Copy, Default)]
pub struct Alone;

impl Reduce for Alone {
    type Error = SumError;

    fn moments(&mut self, local: &[Moments]) -> Result<Moments, SumError> {
        Ok(sum_moments([local]))
    }

    fn gradient(&mut self, local: &LocalGradient) -> Result<GradientSum, SumError> {
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
/// Subtrees do not cover every leaf exactly once, or a compressed sum is malformed.
///
/// # Panics
/// Members use different orders of summation, or there are none.
pub(crate) fn sum_gradients(parts: &[&LocalGradient]) -> Result<GradientSum, SumError> {
    let mut total: Option<GradientSum> = None;
    let (mut subtrees, mut compressed, mut factored) = (Vec::new(), Vec::new(), Vec::new());
    let mut private: Vec<&PrivateGradient> = Vec::new();
    let mut stages: Vec<(Node, GradientSum)> = Vec::new();
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
            LocalGradient::Stages { leaves, sums } => {
                leaf_count = *leaves;
                if stages.is_empty() {
                    stages.clone_from(sums);
                } else {
                    stages.iter_mut().zip(sums).for_each(|((_, total), (_, sum))| total.add(sum));
                }
            }
            LocalGradient::Compressed(sum) => compressed.push(sum),
            LocalGradient::LowRank(sum) => factored.push(sum),
            LocalGradient::Private(sum) => private.push(sum),
        }
    }
    subtrees.append(&mut stages);
    if !private.is_empty() {
        assert_eq!(private.len(), parts.len(), "members use different orders of summation");
        return PrivateGradient::release(&private).map_err(|_| SumError::Private);
    }
    if !factored.is_empty() {
        assert_eq!(factored.len(), parts.len(), "members use different orders of summation");
        return Ok(LowRankSum::add_all(&factored));
    }
    if !compressed.is_empty() {
        assert_eq!(compressed.len(), parts.len(), "members use different orders of summation");
        return Ok(CompressedSum::add_all(compressed)?);
    }
    match total {
        Some(total) => {
            assert!(subtrees.is_empty(), "members use different orders of summation");
            Ok(total)
        }
        None => Ok(combine(leaf_count, subtrees, |a, b| a.add(&b))?),
    }
}
