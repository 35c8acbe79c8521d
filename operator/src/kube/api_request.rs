//! Requests to the API server, with deadlines and errors that name the action.

use std::future::Future;
use std::time::Duration;

use crate::cluster::observe::object_views::InvalidObject;

/// Deadline of a request: the remaining duration of a Lease when its holder stops writing.
pub(crate) const DEADLINE: Duration = Duration::from_secs(5);

/// Group and resources of the reconciled objects, as in the details of a response.
const GROUP: &str = "engram.dev";
const CLUSTERS: &str = "learnerclusters";
const RUNS: &str = "learnerruns";
/// Cause of a refused creation in a namespace that is being deleted.
const NAMESPACE_TERMINATING: &str = "NamespaceTerminating";

/// Why a reconcile failed. It is retried.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// The API server returned an error.
    #[error("failed to {action}: {}", describe(source))]
    Api { action: String, source: kube::Error },
    /// The API server did not respond in time.
    #[error("failed to {action}: no response within 5 s")]
    Timeout { action: String },
    /// An object is invalid.
    #[error(transparent)]
    InvalidObject(#[from] InvalidObject),
    /// An object of this name is not owned by the cluster.
    #[error("{kind} {name} exists and is not owned by this cluster: rename the cluster or delete the object")]
    NotOwned { kind: String, name: String },
    /// Another replica is the leader.
    #[error("lost leadership to another replica")]
    NotLeader,
    /// A request to the workers failed.
    #[error("failed to {action}: {source}")]
    Workers { action: &'static str, source: Box<engram_client::Error> },
    /// The CA is not available.
    #[error("failed to load the CA: {0}")]
    CertificateAuthority(String),
    /// The coordinator cannot be started.
    #[error("failed to coordinate the cluster: {0}")]
    Coordinator(String),
    /// The settings of the autoscaler are invalid.
    #[error("failed to start the autoscaler: spec.autoscaling: {0}")]
    Autoscaling(String),
}

impl Error {
    /// Returns the reason label for metrics.
    pub(crate) const fn category(&self) -> &'static str {
        match self {
            Self::Api { .. } => "api",
            Self::Timeout { .. } => "timeout",
            Self::InvalidObject(_) => "invalid_object",
            Self::NotOwned { .. } => "not_owned",
            Self::NotLeader => "not_leader",
            Self::Workers { .. } => "workers",
            Self::CertificateAuthority(_) => "ca",
            Self::Coordinator(_) => "coordinator",
            Self::Autoscaling(_) => "autoscaling",
        }
    }

    /// Returns whether the API server does not know the owner's kind yet. With `OwnerReferencesPermissionEnforcement` it discovers a new
    /// CustomResourceDefinition within half a minute, and rejects objects owned by its kind until then.
    pub(crate) fn is_kind_not_ready(&self) -> bool {
        matches!(self, Self::Api { source: kube::Error::Api(status), .. } if status.message.contains("cannot find RESTMapping"))
    }

    /// Returns whether the request failed because the reconciled object or its namespace is being deleted, which ends a reconcile as it
    /// should.
    pub(crate) fn is_deletion(&self) -> bool {
        let Self::Api { source: kube::Error::Api(status), .. } = self else { return false };
        let Some(details) = &status.details else { return false };
        match status.code {
            404 => details.group == GROUP && [CLUSTERS, RUNS].contains(&details.kind.as_str()),
            403 => details.causes.iter().any(|cause| cause.reason == NAMESPACE_TERMINATING),
            _ => false,
        }
    }
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
) -> Result<T, Error> {
    match tokio::time::timeout(DEADLINE, request).await {
        Ok(Ok(answer)) => Ok(answer),
        Ok(Err(source)) => Err(Error::Api { action: action(), source }),
        Err(_) => Err(Error::Timeout { action: action() }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kube::core::Status;
    use serde_json::json;

    #[test]
    fn a_rejected_request_is_described_without_debug_output() {
        let status = Status::failure("StatefulSet.apps \"w\" is invalid: cpu", "Invalid").with_code(422);
        let error = Error::Api { action: "apply StatefulSet w".into(), source: kube::Error::Api(Box::new(status)) };
        let expected = "failed to apply StatefulSet w: StatefulSet.apps \"w\" is invalid: cpu (Invalid, HTTP 422)";
        assert_eq!(error.to_string(), expected);
    }

    #[test]
    fn an_unknown_owner_kind_is_distinguished_from_a_missing_permission() {
        let refused = |why: &str| Error::Api {
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

    #[test]
    fn a_deletion_is_distinguished_from_a_failure() {
        let failed = |text: serde_json::Value| {
            let status: Status = serde_json::from_value(text).expect("a Status");
            Error::Api { action: "apply ConfigMap words".into(), source: kube::Error::Api(Box::new(status)) }
        };
        let missing = |group: &str, kind: &str| {
            failed(
                json!({ "status": "Failure", "code": 404, "reason": "NotFound", "details": { "group": group, "kind": kind } }),
            )
        };
        let refused = |cause: &str| {
            let details =
                json!({ "kind": "configmaps", "causes": [{ "reason": cause, "field": "metadata.namespace" }] });
            failed(json!({ "status": "Failure", "code": 403, "reason": "Forbidden", "details": details }))
        };
        assert!(
            missing("engram.dev", "learnerclusters").is_deletion()
                && missing("engram.dev", "learnerruns").is_deletion()
        );
        assert!(refused("NamespaceTerminating").is_deletion());
        for other in
            [missing("", "pods"), missing("engram.dev", "partitionmaps"), refused("QuotaExceeded"), Error::NotLeader]
        {
            assert!(!other.is_deletion(), "{other}");
        }
    }
}
