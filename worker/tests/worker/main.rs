//! Workers, their coordinator and clients over real sockets, in one process.

mod bad_input;
mod exactly_once;
mod harness;
mod operations;
mod reading;
