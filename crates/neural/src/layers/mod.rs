//! Forward and backward of each layer, over the rows of one leaf of the batch.
//!
//! A backward function overwrites the gradient of its own parameters with the sum over its rows, in row order.

pub(crate) mod activation;
pub(crate) mod attention;
pub(crate) mod bag;
pub(crate) mod dense;
pub(crate) mod dropout;
pub(crate) mod norm;
pub(crate) mod tropical;
