//! Reductions over a group of workers, decided apart from sockets: which algorithm, what each rank sends and adds, in which buckets, how it is
//! compressed, and how messages are identified.
//!
//! This crate does no I/O and has no clock. Invariants:
//! - **Sums and counts, never means.** Gradients of any number of samples add up.
//! - **Rank order by default.** The algorithms of the default mode add each element in the order of the ranks: the same bits for a fixed
//!   membership, on every rank, whatever the buckets ([`cost::Algorithm::adds_in_rank_order`]).
//! - **A step is committed everywhere or nowhere.** All buckets of a step use one membership ([`group`]).
//! - **No message is taken for another.** A tag names generation, step, bucket, phase, chunk and sender; a checksum covers it ([`message`]).
#![forbid(unsafe_code)]

pub mod bucket;
pub mod compress;
pub mod cost;
pub mod group;
pub mod message;
pub mod schedule;
pub mod split;
