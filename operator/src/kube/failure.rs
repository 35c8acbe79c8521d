//! Causes of failed steps: what metrics, events and the back-off depend on, whichever step failed.

use std::error::Error;

use crate::kube::api_request::RequestError;

/// Group and resources of the reconciled objects, as in the details of a response.
const GROUP: &str = "engram.dev";
const CLUSTERS: &str = "learnerclusters";
const RUNS: &str = "learnerruns";
/// Cause of a refused creation in a namespace that is being deleted.
const NAMESPACE_TERMINATING: &str = "NamespaceTerminating";

/// Error of a step of a reconcile. The reconcile is retried.
pub(crate) trait Failure: Error {
    /// Returns what metrics, events and the back-off depend on.
    fn root_cause(&self) -> Cause<'_>;
}

/// Cause of a failed step.
#[derive(Debug)]
pub(crate) enum Cause<'a> {
    /// A request to the API server failed.
    Request(&'a RequestError),
    /// An object is invalid.
    InvalidObject,
    /// An object of a needed name is not owned by the cluster.
    NotOwned,
    /// Another replica is the leader.
    NotLeader,
    /// A request to the workers failed.
    Workers,
    /// The CA is not available.
    CertificateAuthority,
    /// The cluster cannot be coordinated.
    Coordinator,
    /// The settings of the autoscaler are invalid.
    Autoscaling,
}

impl Cause<'_> {
    /// Returns the reason label for metrics.
    pub(crate) const fn category(&self) -> &'static str {
        match self {
            Self::Request(RequestError::Api { .. }) => "api",
            Self::Request(RequestError::Timeout { .. }) => "timeout",
            Self::InvalidObject => "invalid_object",
            Self::NotOwned => "not_owned",
            Self::NotLeader => "not_leader",
            Self::Workers => "workers",
            Self::CertificateAuthority => "ca",
            Self::Coordinator => "coordinator",
            Self::Autoscaling => "autoscaling",
        }
    }

    /// Returns whether the API server does not know the owner's kind yet.
    pub(crate) fn is_kind_not_ready(&self) -> bool {
        matches!(self, Self::Request(error) if error.is_kind_not_ready())
    }

    /// Returns whether the request failed because the reconciled object or its namespace is being deleted, which ends a reconcile as it
    /// should.
    pub(crate) fn is_deletion(&self) -> bool {
        let Self::Request(error) = self else { return false };
        let Some(status) = error.status() else { return false };
        let Some(details) = &status.details else { return false };
        match status.code {
            404 => details.group == GROUP && [CLUSTERS, RUNS].contains(&details.kind.as_str()),
            403 => details.causes.iter().any(|cause| cause.reason == NAMESPACE_TERMINATING),
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kube::core::Status;
    use serde_json::json;

    #[test]
    fn a_deletion_is_distinguished_from_a_failure() {
        let is_deletion = |text: serde_json::Value| {
            let status: Status = serde_json::from_value(text).expect("a Status");
            let error = RequestError::Api {
                action: "apply ConfigMap words".into(),
                source: kube::Error::Api(Box::new(status)),
            };
            Cause::Request(&error).is_deletion()
        };
        let missing = |group: &str, kind: &str| {
            is_deletion(
                json!({ "status": "Failure", "code": 404, "reason": "NotFound", "details": { "group": group, "kind": kind } }),
            )
        };
        let refused = |cause: &str| {
            let details =
                json!({ "kind": "configmaps", "causes": [{ "reason": cause, "field": "metadata.namespace" }] });
            is_deletion(json!({ "status": "Failure", "code": 403, "reason": "Forbidden", "details": details }))
        };
        assert!(missing("engram.dev", "learnerclusters") && missing("engram.dev", "learnerruns"));
        assert!(refused("NamespaceTerminating"));
        assert!(!missing("", "pods") && !missing("engram.dev", "partitionmaps") && !refused("QuotaExceeded"));
        assert!(!Cause::NotLeader.is_deletion());
    }
}
