//! What a source is made of, brought here where it is elsewhere.

use super::status::Status;
use crate::source::Origin;
use futures::future::BoxFuture;
use tokio::sync::watch;

/// Brings a file of events to this machine.
///
/// It is asked when the run has its turn, each time that a driver begins, and dropped at any await when the run is called off.
pub trait Fetch: Send + Sync {
    /// Fetches all of it, as often as that takes, and says in the status how far it is.
    ///
    /// # Errors
    /// It cannot be had; the run fails.
    fn fetch<'a>(&'a self, status: &'a watch::Sender<Status>) -> BoxFuture<'a, Result<Origin, Unfetched>>;
}

/// Why an input cannot be had.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct Unfetched {
    /// Number under which that is explained.
    pub code: &'static str,
    /// Where it should be, and what is wrong with it.
    pub message: String,
}
