//! Workers, their coordinator and clients over real sockets, in one process.
#![allow(clippy::unwrap_used, reason = "the helpers are tests, too")]

mod bad_input;
mod exactly_once;
mod harness;
mod operations;
mod reading;
mod replication;
