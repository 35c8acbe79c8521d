//! A client of a federated run: takes tasks, downloads models, uploads updates, and takes part in secure aggregation.
//!
//! - [`Participant`]: one client of one run. Every call can be repeated; an update counts at most once.
//! - [`Queue`]: updates on disk that wait for a connection, bounded in bytes and number.
//!
//! Invariants:
//! - **A model is used only if its content has the digest of the task, and the key of the run signed that digest.** The key is given by the user, or
//!   kept from the first task.
//! - **With secure aggregation no update leaves the client without its masks**, and never under the same masks twice.
//! - **The secret and the identity key of a client stay in one file that only its user can read.**
#![forbid(unsafe_code)]

mod backoff;
mod keys;
mod masks;
mod model_key;
mod participant;
mod queue;

pub use backoff::Backoff;
pub use keys::ClientKeys;
pub use model_key::ModelKey;
pub use participant::{Assignment, Next, Participant, Training};
pub use queue::{DroppedUpdate, Limits, Queue, QueuedUpdate};

use engram_federated::error::InvalidInput;
use engram_federated::secure::SecureError;
use engram_proto::v1::{FederatedRefusal, FederatedRefusalReason};

/// Why a client cannot go on.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The cluster cannot be reached, or rejects the call.
    #[error(transparent)]
    Client(#[from] engram_client::Error),
    /// The server refused the request; nothing was changed.
    #[error("{message}")]
    Refused {
        /// The reason.
        reason: FederatedRefusalReason,
        /// What was refused, and what is allowed.
        message: String,
    },
    /// An argument is invalid.
    #[error(transparent)]
    Invalid(#[from] InvalidInput),
    /// Secure aggregation failed; nothing was revealed.
    #[error("secure aggregation failed")]
    Masks(#[from] SecureError),
    /// The downloaded model is not that of the task.
    #[error("the downloaded model has another digest than the task; it was not used")]
    Digest,
    /// The model of a task is not signed by the key that this client expects.
    #[error("the model is not signed by the key of the run that this client expects; it was not used: {0}")]
    Signature(&'static str),
    /// A message of the server is incomplete.
    #[error("the answer of the server has no usable {0}")]
    Protocol(&'static str),
    /// A file cannot be read or written.
    #[error("failed to access {path}")]
    File {
        /// The file.
        path: String,
        /// Cause.
        source: std::io::Error,
    },
}

impl Error {
    /// Whether the task is lost, or was answered: the client checks in again.
    #[must_use]
    pub fn is_stale(&self) -> bool {
        use FederatedRefusalReason::{Conflict, Ended, LeaseExpired, Stale};
        matches!(self, Self::Refused { reason: LeaseExpired | Conflict | Stale | Ended, .. })
            || matches!(self, Self::Masks(error) if is_lost(error))
    }

    /// Whether another attempt may succeed without a change by the user.
    #[must_use]
    pub fn is_temporary(&self) -> bool {
        use engram_proto::v1::ProblemKind;
        match self {
            Self::Client(error) => !matches!(
                error.kind(),
                ProblemKind::Invalid | ProblemKind::Denied | ProblemKind::RunUnknown | ProblemKind::WrongCluster
            ),
            Self::Refused { reason, .. } => *reason == FederatedRefusalReason::Busy,
            _ => self.is_stale(),
        }
    }

    pub(crate) fn file(path: &std::path::Path, source: std::io::Error) -> Self {
        Self::File { path: path.display().to_string(), source }
    }
}

/// Whether the cohort of a masked update goes on without this client: too few are left, or what another client sent cannot be used. A list of survivors
/// that the server did not sign, or that would reveal an input, is no loss but an error.
const fn is_lost(error: &SecureError) -> bool {
    use SecureError::{BelowThreshold, Conflict, InvalidKey, InvalidSeal, InvalidShare, NotInCohort, WrongStage};
    matches!(error, BelowThreshold | Conflict | InvalidKey | InvalidSeal | InvalidShare | NotInCohort(_) | WrongStage)
}

/// Returns the refusal of a response as an error.
fn refused(refusal: Option<FederatedRefusal>) -> Result<(), Error> {
    match refusal {
        None => Ok(()),
        Some(refusal) => Err(Error::Refused { reason: refusal.reason(), message: refusal.message }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lost_task_differs_from_an_error() {
        use FederatedRefusalReason as Reason;
        let refused = |reason| Error::Refused { reason, message: String::new() }.is_stale();
        for reason in [Reason::LeaseExpired, Reason::Conflict, Reason::Stale, Reason::Ended] {
            assert!(refused(reason), "{reason:?}");
        }
        assert!(![Reason::Invalid, Reason::WrongSecret, Reason::NotEnrolled, Reason::Busy].into_iter().any(refused));
        let masks = |error| Error::Masks(error).is_stale();
        assert!(masks(SecureError::WrongStage) && masks(SecureError::Conflict) && masks(SecureError::NotInCohort(1)));
        assert!(!masks(SecureError::BothKinds) && !masks(SecureError::InvalidSignature));
    }
}
