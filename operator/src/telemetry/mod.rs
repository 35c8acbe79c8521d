//! Metrics, events and spans of the operator, and the page of its HTTP server.

pub(crate) mod events;
pub mod metrics;
pub(crate) mod page;
pub(crate) mod reconcile_span;
pub(crate) mod worker_traces;
