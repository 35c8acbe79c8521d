//! What the laws, the tables and the codec of a partition promise, in one binary.
#![allow(clippy::unwrap_used, reason = "a helper of a test may unwrap as the test does")]

mod checks;
mod codec;
mod epochs;
mod generator;
mod golden;
mod laws;
mod runs;
mod sessions;
mod standard;
mod vectors;
