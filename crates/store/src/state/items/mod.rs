//! Items of replay buffers: derived state per partition and buffer, so that an append, a change of a priority and a draw do not depend on the
//! number of items.
//!
//! Nothing here is replicated: an index is built from the columns when it is first needed, follows the commands on its buffer, and is built
//! again after any other change of its items (a decay, a reinforcement, a removal by id).

mod apply;
mod index;
mod read;
#[cfg(test)]
mod tests;

pub(crate) use index::Items;
pub use index::Sampler;
pub use read::{ByAge, DrawnItem, ItemSums, Trajectory};
