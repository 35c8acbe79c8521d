//! Requests to the API server, with deadlines and errors that name the action.

use std::future::Future;
use std::time::Duration;

use kube::core::Status;

use crate::context::Context;
use crate::kube::failure::{Cause, Failure};

/// Deadline of a request: the remaining duration of a Lease when its holder stops writing.
pub(crate) const DEADLINE: Duration = Duration::from_secs(5);

/// Why a request failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RequestError {
    /// The API server returned an error.
    #[error("failed to {action}: {}", describe(source))]
    Api { action: String, source: kube::Error },
    /// The API server did not respond in time.
    #[error("failed to {action}: no response within 5 s")]
    Timeout { action: String },
}

/// Why an object was not written.
#[derive(Debug, thiserror::Error)]
pub(crate) enum WriteError {
    #[error(transparent)]
    Request(#[from] RequestError),
    /// Another replica is the leader.
    #[error("lost leadership to another replica")]
    NotLeader,
}

impl RequestError {
    /// Returns the response of the API server, if it rejected the request.
    pub(crate) fn status(&self) -> Option<&Status> {
        match self {
            Self::Api { source: kube::Error::Api(status), .. } => Some(status),
            _ => None,
        }
    }

    /// Returns whether the API server rejected the request with one of these codes.
    pub(crate) fn is_rejected_with(&self, codes: &[u16]) -> bool {
        self.status().is_some_and(|status| codes.contains(&status.code))
    }

    /// Returns whether the API server does not know the owner's kind yet. With `OwnerReferencesPermissionEnforcement` it discovers a new
    /// CustomResourceDefinition within half a minute, and rejects objects owned by its kind until then.
    pub(crate) fn is_kind_not_ready(&self) -> bool {
        self.status().is_some_and(|status| status.message.contains("cannot find RESTMapping"))
    }
}

impl Failure for RequestError {
    fn root_cause(&self) -> Cause<'_> {
        Cause::Request(self)
    }
}

impl Failure for WriteError {
    fn root_cause(&self) -> Cause<'_> {
        match self {
            Self::Request(error) => error.root_cause(),
            Self::NotLeader => Cause::NotLeader,
        }
    }
}

/// Checks leadership before every write, since a Lease may expire meanwhile.
pub(crate) fn check_leader(context: &Context) -> Result<(), WriteError> {
    if context.leadership.is_leader() { Ok(()) } else { Err(WriteError::NotLeader) }
}

/// Describes an error for conditions and events. The client's own text of a response contains a dump of the response.
fn describe(error: &kube::Error) -> String {
    match error {
        kube::Error::Api(status) => format!("{} ({}, HTTP {})", status.message, status.reason, status.code),
        error => error.to_string(),
    }
}

/// Sends a request with a deadline.
pub(crate) async fn request<T>(
    action: impl FnOnce() -> String,
    request: impl Future<Output = kube::Result<T>>,
) -> Result<T, RequestError> {
    match tokio::time::timeout(DEADLINE, request).await {
        Ok(Ok(answer)) => Ok(answer),
        Ok(Err(source)) => Err(RequestError::Api { action: action(), source }),
        Err(_) => Err(RequestError::Timeout { action: action() }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rejected_request_is_described_without_debug_output() {
        let status = Status::failure("StatefulSet.apps \"w\" is invalid: cpu", "Invalid").with_code(422);
        let error =
            RequestError::Api { action: "apply StatefulSet w".into(), source: kube::Error::Api(Box::new(status)) };
        let expected = "failed to apply StatefulSet w: StatefulSet.apps \"w\" is invalid: cpu (Invalid, HTTP 422)";
        assert_eq!(error.to_string(), expected);
    }

    #[test]
    fn an_unknown_owner_kind_is_distinguished_from_a_missing_permission() {
        let refused = |why: &str| RequestError::Api {
            action: "apply ServiceAccount words-worker".into(),
            source: kube::Error::Api(Box::new(Status::failure(why, "Forbidden").with_code(403))),
        };
        let early = "cannot set blockOwnerDeletion in this case because cannot find RESTMapping for APIVersion \
            engram.dev/v1alpha1 Kind LearnerCluster";
        assert!(refused(early).is_kind_not_ready());
        let forbidden =
            "cannot set blockOwnerDeletion if an ownerReference refers to a resource you can't set finalizers on";
        assert!(!refused(forbidden).is_kind_not_ready());
    }
}
