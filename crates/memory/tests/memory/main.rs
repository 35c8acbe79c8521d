//! Tests of the domain rules, the tables and the codec of a partition, in one binary.
#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

mod checks;
mod codec;
mod epochs;
mod generator;
mod golden;
mod golden_buffer;
mod laws;
mod runs;
mod sessions;
mod standard;
mod vectors;
