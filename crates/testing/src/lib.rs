//! Shared test code of several crates: random valid commands, a map store with faults, an issuer of tokens.
//!
//! A crate of its own instead of features of the tested crates: with a feature, each tested crate would be built twice,
//! with all its dependents.
#![forbid(unsafe_code)]

pub mod commands;
pub mod map_store;
pub mod tokens;
