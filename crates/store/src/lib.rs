//! (head to be written)

mod apply;
mod arena;
mod columns;
mod content;
mod partition;
mod partitions;

pub use content::{Column, Content, ImportError};
pub use partitions::{Coverage, Memory, Partitions, Ranked};
