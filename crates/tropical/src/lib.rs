//! Tropical (max-plus) algebra over `f32`: addition is the maximum, with neutral element negative infinity; multiplication is the sum,
//! with neutral element 0. Min-plus is the same algebra on negated values.
//!
//! This crate decides values, winners and gradients. It does no I/O and starts no threads beyond those of one product.
//!
//! Invariants:
//! - **Same bits for any split.** The maximum is exact and associative, and each product is one rounded addition. Results do not depend on
//!   tiles, threads, vector width or the order of shards.
//! - **Missing is negative infinity.** There is no finite sentinel. NaN and positive infinity are refused at the edge ([`Matrix::new`]);
//!   zeros are stored as +0, since the maximum of +0 and -0 may be either.
//! - **One winner.** Ties go to the lowest index, within a call and across shards ([`winner`]). Only the winner receives the gradient.

mod attention;
mod cycle;
mod error;
mod layer;
mod matrix;
mod network;
mod product;
mod vector;
mod viterbi;
pub mod winner;

pub use attention::winner_takes_all;
pub use cycle::cycle_mean;
pub use error::Error;
pub use layer::{
    Gradient, Layer, LayerOutput, LayerView, SmoothOutput, add_input_gradient, add_parameter_gradient, smooth_backward,
    smooth_forward,
};
pub use matrix::{Matrix, Semiring};
pub use network::{Network, NetworkGradient, NetworkShape};
pub use product::{power, product, product_rows};
pub use viterbi::{HiddenMarkovModel, Path};
