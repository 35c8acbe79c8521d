//! Replay buffers, decided apart from storage and networks: what an item looks like, which items a step draws, and when a call has to wait.
//! What a consumer has had and which items make room is replicated state: [`engram_memory::buffer`].
//!
//! This crate does no I/O, has no clock and no randomness of its own: draws are functions of a seed, a step and integers.
//!
//! Invariants:
//! - **Exact and unbiased.** A draw takes item i with probability `p_i / T` for the integers `p_i` and their sum `T`; sharding changes nothing
//!   ([`plan`]).
//! - **Flat cost.** A draw searches tiles and scans one tile ([`tiles`]); its cost does not grow with the number of items in a tile's row.
//! - **Handles are never reused**, so a stale handle never names another item.
//! - **No deadlock by configuration.** A rate limiter that can block both sides is refused at construction ([`limiter`]).
#![forbid(unsafe_code)]

pub mod columns;
pub mod importance;
pub mod item;
pub mod limiter;
pub mod plan;
pub mod schema;
pub mod selection;
pub mod tiles;
