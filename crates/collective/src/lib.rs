//! Reductions over a group of workers: which algorithm, what each rank sends and adds, in which buckets, how it is compressed, who takes part, and
//! how a step is committed.
//!
//! Decisions are pure: [`cost`], [`schedule`], [`split`], [`bucket`], [`compress`], [`low_rank`], [`message`], [`tree`] compute; [`group`] has the state
//! machines of membership. Only [`transport`] does I/O, behind a trait; [`executor`] runs a schedule over it, [`measure`] takes the times of its
//! messages; [`overlap`] runs reductions next to the computation; [`library`] sums over GPUs by a library of the caller, where that is faster. Invariants:
//! - **Sums and counts, never means.** Gradients of any number of samples add up.
//! - **Rank order by default.** The algorithms of the default mode add each element in the order of the ranks: the same bits for a fixed
//!   membership, on every rank, whatever the buckets ([`cost::Algorithm::adds_in_rank_order`]).
//! - **A step is committed everywhere or nowhere.** All buckets of a step use one membership ([`group`]).
//! - **Inputs stay.** A reduction is out of place, so that the survivors of a failure can repeat it.
//! - **No message is taken for another.** A tag names generation, step, bucket, phase, chunk and sender; a checksum covers it ([`message`]).
#![forbid(unsafe_code)]

pub mod bucket;
pub mod compress;
pub mod cost;
pub mod executor;
pub mod group;
pub mod library;
pub mod low_rank;
pub mod measure;
pub mod message;
pub mod overlap;
pub mod schedule;
pub mod split;
pub mod transport;
pub mod tree;
