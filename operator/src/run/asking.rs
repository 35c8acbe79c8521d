//! Requests to the API server: each with a deadline, each error with what was tried.

use std::future::Future;
use std::time::Duration;

use crate::read::Unreadable;

/// Longest request: what is left of a Lease when its holder stops to write.
pub(super) const DEADLINE: Duration = Duration::from_secs(5);

/// Why a look at a cluster ended early. The next one tries again.
#[derive(Debug, thiserror::Error)]
pub(super) enum Error {
    /// The API server refused.
    #[error("failed to {action}: {source}")]
    Api { action: String, source: kube::Error },
    /// It did not answer.
    #[error("failed to {action}: no answer within 5 s")]
    Slow { action: String },
    /// An object says nonsense.
    #[error(transparent)]
    Unreadable(#[from] Unreadable),
    /// An object of this name is not ours.
    #[error("{kind} {name} exists and was not made for this cluster: rename the cluster, or remove the object")]
    Foreign { kind: String, name: String },
    /// Another replica writes now.
    #[error("another replica leads now")]
    Deposed,
    /// The workers refused, or did not answer.
    #[error("failed to {action}: {source}")]
    Workers { action: &'static str, source: Box<engram_client::Error> },
    /// There is nobody to sign certificates.
    #[error("failed to use the authority of certificates: {0}")]
    Authority(String),
    /// The coordinator does not start.
    #[error("failed to coordinate: {0}")]
    Coordinator(String),
}

impl Error {
    /// Returns what it is counted under.
    pub(super) const fn category(&self) -> &'static str {
        match self {
            Self::Api { .. } => "api",
            Self::Slow { .. } => "slow",
            Self::Unreadable(_) => "unreadable",
            Self::Foreign { .. } => "foreign",
            Self::Deposed => "deposed",
            Self::Workers { .. } => "workers",
            Self::Authority(_) => "authority",
            Self::Coordinator(_) => "coordinator",
        }
    }

    /// Whether the API server does not know the owner's kind yet. Where it checks who may own what (`OwnerReferencesPermissionEnforcement`)
    /// it learns of a new definition within half a minute, and refuses all that is made for an object of it until then.
    pub(super) fn is_early(&self) -> bool {
        matches!(self, Self::Api { source: kube::Error::Api(status), .. } if status.message.contains("cannot find RESTMapping"))
    }
}

/// Waits for an answer, but not for ever.
pub(super) async fn ask<T>(
    action: impl FnOnce() -> String,
    request: impl Future<Output = kube::Result<T>>,
) -> Result<T, Error> {
    match tokio::time::timeout(DEADLINE, request).await {
        Ok(Ok(answer)) => Ok(answer),
        Ok(Err(source)) => Err(Error::Api { action: action(), source }),
        Err(_) => Err(Error::Slow { action: action() }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kube::core::Status;

    #[test]
    fn a_kind_that_the_api_server_does_not_know_yet_is_told_from_a_right_that_is_missing() {
        let refused = |why: &str| Error::Api {
            action: "apply ServiceAccount words-worker".into(),
            source: kube::Error::Api(Box::new(Status::failure(why, "Forbidden").with_code(403))),
        };
        let early = "cannot set blockOwnerDeletion in this case because cannot find RESTMapping for APIVersion \
            engram.dev/v1alpha1 Kind LearnerCluster";
        assert!(refused(early).is_early());
        let forbidden =
            "cannot set blockOwnerDeletion if an ownerReference refers to a resource you can't set finalizers on";
        assert!(!refused(forbidden).is_early());
    }
}
