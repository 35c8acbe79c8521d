//! Workers, their coordinator and clients over real sockets, in one process.
#![allow(clippy::unwrap_used, reason = "the helpers are tests, too")]

mod bad_input;
#[path = "../../../kernels/tests/host/build.rs"]
mod build;
#[path = "../../../kernels/tests/host/emulated_driver.rs"]
mod emulated_driver;
mod exactly_once;
mod harness;
mod limits;
mod operations;
mod reading;
mod replication;
mod runs;
mod security;
mod snapshots;
