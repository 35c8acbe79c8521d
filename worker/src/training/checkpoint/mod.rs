//! Checkpoints of a training: files and folders, and what a run lists of them.

pub(super) mod checkpoints;
pub(super) mod files;
