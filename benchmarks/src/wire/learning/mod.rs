//! Replay buffers, trainings and federated runs.

pub(in crate::wire) mod federated;
pub(in crate::wire) mod replay;
pub(in crate::wire) mod training;
