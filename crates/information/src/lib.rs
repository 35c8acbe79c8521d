//! Information geometry: Fisher matrices of scores, natural gradients, divergences, the Amari-Chentsov tensor.
//!
//! This crate decides values and the order of additions. It does no I/O and knows no workers: a worker computes the sums of its samples
//! ([`partial_sums`]), and anyone combines them ([`combine`]).
//!
//! Invariants:
//! - **Same bits for any split.** Sample i of N belongs to leaf `64 i / N`. A leaf adds its samples in order, in f64; the leaves are added by a
//!   fixed binary tree; the division by N comes last. The product of two f32 scores is exact in f64, so a fused multiply-add gives the same
//!   bits as a multiplication followed by an addition. [`Mode::Fast`] gives this up and says so.
//! - **Sums and counts, never means.** Shards of any size combine by addition.
//! - **Right signs.** The Gaussian in (mu, sigma) has `+2 / sigma^2`; the tensor is totally symmetric; the divergence is infinite where the
//!   second distribution has no mass.

mod distribution;
mod divergence;
mod error;
mod fisher;
mod kernel;
mod natural;
mod tensor;

pub use distribution::{categorical_fisher, gaussian_fisher, softmax_fisher, softmax_scores};
pub use divergence::{bregman, kullback_leibler, kullback_leibler_gaussian};
pub use error::Error;
pub use fisher::{
    FisherMatrix, LEAVES, Mode, PartialSum, bands, combine, fast_sum, leaf_range, merge_subtrees, partial_sums,
    partial_sums_of_rows,
};
pub use natural::natural_gradient;
pub use tensor::{amari_chentsov, gaussian_amari_chentsov};
