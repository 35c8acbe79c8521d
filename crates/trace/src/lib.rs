//! Trace contexts and spans of Engram.
//!
//! Decides which spans exist: a trace is sampled at its head, by its id, and the decision travels with the context in gRPC metadata
//! (`traceparent` of W3C Trace Context) and in messages between workers. A span of a trace that is not sampled does not exist, and
//! costs a comparison. Exporting finished spans is the work of a [`Recorder`], which `engram-telemetry` provides.
//!
//! - Without a recorder no trace starts, and nothing is sent.
//! - A span is recorded when it is dropped, or with [`record`] after the fact, from measured times.
//! - Contexts follow tasks, not threads: [`within`] sets the one of a future.
#![forbid(unsafe_code)]

mod context;
mod span;

pub use context::{Context, NotTraceparent, current, within};
pub use span::{FinishedSpan, Kind, Span, Value, in_span, record, record_child};

use std::fmt;
use std::sync::OnceLock;

/// Receives finished spans and decides which traces are sampled.
pub trait Recorder: fmt::Debug + Send + Sync {
    /// Returns whether a trace that starts here is sampled.
    fn samples(&self, trace: u128) -> bool;

    /// Returns whether the decision of a remote parent is followed.
    fn follows_parent(&self) -> bool;

    /// Takes a finished span. Must not block.
    fn record(&self, span: FinishedSpan);
}

/// A recorder was already set.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a recorder of traces was already set")]
pub struct AlreadySet;

static RECORDER: OnceLock<Box<dyn Recorder>> = OnceLock::new();

/// Sets the recorder of this process.
///
/// # Errors
/// There is one already.
pub fn set_recorder(recorder: Box<dyn Recorder>) -> Result<(), AlreadySet> {
    RECORDER.set(recorder).map_err(|_| AlreadySet)
}

/// Returns whether this process records traces.
pub fn is_recording() -> bool {
    RECORDER.get().is_some()
}

pub(crate) fn recorder() -> Option<&'static dyn Recorder> {
    RECORDER.get().map(AsRef::as_ref)
}
