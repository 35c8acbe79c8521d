//! What the tests of several crates share: random valid commands, a store of the map that fails, an issuer of tokens.
//!
//! A crate of its own, not a feature of those that it is about: with a feature, whatever is tested would be built once for its users and once
//! more for the tests, with all that depends on it.
#![forbid(unsafe_code)]

pub mod commands;
pub mod map_store;
pub mod tokens;
