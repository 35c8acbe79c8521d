//! Why a run was not advanced or reported.

use crate::kube::api_request::{RequestError, WriteError};
use crate::kube::failure::{Cause, Failure};

/// Why a run was not advanced: submitted, suspended, cancelled or removed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum AdvanceError {
    #[error(transparent)]
    Write(#[from] WriteError),
    /// A request to the workers failed.
    #[error("failed to {action}: {source}")]
    Workers { action: &'static str, source: Box<engram_client::Error> },
    /// No worker serves the cluster of the run.
    #[error("failed to coordinate the cluster: no worker serves the cluster")]
    NotServed,
}

/// Why the reconcile of a run failed: the step, with its error. An invalid spec is reported.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RunError {
    #[error(transparent)]
    Advance(#[from] AdvanceError),
    #[error(transparent)]
    Status(WriteError),
    /// It was not deleted after its time to live.
    #[error(transparent)]
    Delete(WriteError),
}

impl AdvanceError {
    /// Returns the error of workers that cannot be reached.
    pub(crate) fn unreachable(source: engram_client::Error) -> Self {
        Self::workers("reach the workers")(source)
    }

    /// Returns the error of a request to the workers.
    pub(crate) fn workers(action: &'static str) -> impl FnOnce(engram_client::Error) -> Self {
        move |source| Self::Workers { action, source: Box::new(source) }
    }
}

impl From<RequestError> for AdvanceError {
    fn from(error: RequestError) -> Self {
        Self::Write(error.into())
    }
}

impl Failure for AdvanceError {
    fn root_cause(&self) -> Cause<'_> {
        match self {
            Self::Write(error) => error.root_cause(),
            Self::Workers { .. } => Cause::Workers,
            Self::NotServed => Cause::Coordinator,
        }
    }
}

impl Failure for RunError {
    fn root_cause(&self) -> Cause<'_> {
        match self {
            Self::Advance(error) => error.root_cause(),
            Self::Status(error) | Self::Delete(error) => error.root_cause(),
        }
    }
}
