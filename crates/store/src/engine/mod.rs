//! Runs the store on threads: one decides and applies, one writes the log, one writes snapshots.
//!
//! ```text
//!  handles ──events (bounded by bytes and calls)──> engine ──batch──> log writer ──durable──┐
//!                                                    │ ▲ └──export─> snapshot writer ──done─┤
//!                                                    │ └────────────────────────────────────┘
//!                                                    └──> callbacks
//! ```
//!
//! While one batch is synced the next one fills; once it is durable the next one is sent to the disk before the durable one is
//! applied and answered. Reads run on the engine thread between batches, on committed state. A failed sync aborts the process.

mod event;
mod handle;
pub(crate) mod pending_calls;
mod queue;
mod results;
pub(crate) mod sequencer;
mod stepped;
mod store;
mod threads;

pub use handle::{Handle, MissingLease};
pub use queue::Overload;
pub use results::{ActivateError, CommittedWrite, WriteError};
pub use stepped::SteppedEngine;
pub use store::Store;
pub use threads::Engine;
