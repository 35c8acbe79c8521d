//! (head to be written)

mod apply;
mod arena;
mod columns;
mod partition;
mod partitions;

pub use partitions::{Coverage, Memory, Partitions, Ranked};
