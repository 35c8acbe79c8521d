//! Predictions from the newest weights of a training.

pub(super) mod predict;
pub(super) mod serve;
