//! Fetching of remote inputs.

use super::status::Status;
use crate::source::Origin;
use futures::future::BoxFuture;
use tokio::sync::watch;

/// Fetches an event file to this machine.
///
/// Called when the run has its turn, by each new driver, and dropped at any await when the run is stopped.
pub trait Fetcher: Send + Sync {
    /// Fetches the whole file, with retries, and publishes progress in the status.
    ///
    /// # Errors
    /// The input cannot be fetched; the run fails.
    fn fetch<'a>(&'a self, status: &'a watch::Sender<Status>) -> BoxFuture<'a, Result<Origin, FetchError>>;
}

/// The input cannot be fetched.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct FetchError {
    /// Error code.
    pub code: &'static str,
    /// Location and cause.
    pub message: String,
}
