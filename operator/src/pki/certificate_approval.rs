//! Approval of certificate requests: a pod receives a certificate only for its own worker name.
//!
//! The pod is authenticated by a token with a dedicated audience, of its cluster's ServiceAccount, bound to the current pod of that name.

use engram_identity::token::{Account, BoundPod, Claims};
use engram_identity::{Name, Role};
use engram_memory::ClusterId;
use k8s_openapi::api::authentication::v1::TokenReviewStatus;
use std::collections::BTreeMap;
use std::time::SystemTime;

use crate::names::{CSR_AUDIENCE, Names};

/// A cluster whose pods may request certificates.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CertificateCluster {
    /// Namespace of the cluster.
    pub namespace: String,
    /// Name of the cluster.
    pub name: String,
    /// Cluster id.
    pub id: ClusterId,
}

/// Why a certificate request is denied.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The token is not of this API server, not valid now, or for another audience.
    #[error("invalid token: {0}")]
    Token(String),
    /// The request is not for a worker of the cluster.
    #[error("the request is for {requested}; allowed: {allowed}")]
    Name {
        /// Requested name.
        requested: Box<Name>,
        /// Allowed name.
        allowed: Box<Name>,
    },
    /// The token is of another ServiceAccount.
    #[error("the token belongs to {found}; required: {needed}")]
    Account {
        /// Account of the token.
        found: Account,
        /// Required account.
        needed: Account,
    },
    /// The token is of another pod, or of none.
    #[error("the token is bound to {}; required: pod {needed}", found.as_deref().map_or("no pod".to_owned(), |found| format!("pod {found}")))]
    Pod {
        /// Pod of the token.
        found: Option<String>,
        /// Required pod.
        needed: String,
    },
    /// The pod of the token no longer exists.
    #[error("pod {name} with UID {uid} does not exist")]
    Gone {
        /// Name of the pod.
        name: String,
        /// UID of the pod.
        uid: String,
    },
}

impl Refusal {
    /// Returns the label value for metrics.
    pub const fn label(&self) -> &'static str {
        match self {
            Self::Token(_) => "token",
            Self::Name { .. } => "name",
            Self::Account { .. } => "account",
            Self::Pod { .. } => "pod",
            Self::Gone { .. } => "gone",
        }
    }
}

/// Decides whether a caller with these token claims may receive a certificate with the name `requested`. `pod` is the UID of the current pod of
/// that worker, if any.
///
/// # Errors
/// Returns why the request is denied.
pub fn approve(
    requested: &Name,
    claims: &Claims,
    cluster: &CertificateCluster,
    pod: Option<&str>,
) -> Result<(), Refusal> {
    // A name without an ordinal, shared by workers, never equals `allowed`.
    let ordinal = requested.ordinal.unwrap_or_default();
    let allowed = Name::on_kubernetes(&cluster.namespace, &cluster.name, cluster.id, Role::Worker, ordinal);
    if *requested != allowed {
        return Err(Refusal::Name { requested: Box::new(requested.clone()), allowed: Box::new(allowed) });
    }
    let names = Names { cluster: cluster.name.clone() };
    let needed = Account { namespace: cluster.namespace.clone(), name: names.worker() };
    if claims.account != needed {
        return Err(Refusal::Account { found: claims.account.clone(), needed });
    }
    let needed = names.pod(ordinal);
    let Some(bound) = claims.pod.as_ref().filter(|bound| bound.name == needed) else {
        return Err(Refusal::Pod { found: claims.pod.as_ref().map(|bound| bound.name.clone()), needed });
    };
    // The pod may have been replaced by one of the same name.
    if pod != Some(bound.uid.as_str()) {
        return Err(Refusal::Gone { name: bound.name.clone(), uid: bound.uid.clone() });
    }
    Ok(())
}

/// Extracts the claims from a TokenReview for our audience.
///
/// # Errors
/// Fails if the token is invalid or for another audience.
pub fn claims_of_review(status: &TokenReviewStatus) -> Result<Claims, Refusal> {
    let refused = |why: &str| Err(Refusal::Token(why.to_owned()));
    if status.authenticated != Some(true) {
        return refused(status.error.as_deref().unwrap_or("the API server did not authenticate it"));
    }
    // An API server without audience support authenticates without naming one.
    if !status.audiences.iter().flatten().any(|audience| audience == CSR_AUDIENCE) {
        return refused("wrong audience; required: engram-csr");
    }
    let user = status.user.as_ref();
    let name = user.and_then(|user| user.username.as_deref()).unwrap_or_default();
    let account = name.strip_prefix("system:serviceaccount:").and_then(|rest| rest.split_once(':'));
    let Some((namespace, name)) = account else { return refused("it does not belong to a ServiceAccount") };
    let none = BTreeMap::new();
    let extra = user.and_then(|user| user.extra.as_ref()).unwrap_or(&none);
    let one = |key: &str| match extra.get(&format!("authentication.kubernetes.io/{key}")).map(Vec::as_slice) {
        Some([only]) => Some(only.clone()),
        _ => None,
    };
    let pod = one("pod-name").zip(one("pod-uid")).map(|(name, uid)| BoundPod { name, uid });
    let account = Account { namespace: namespace.to_owned(), name: name.to_owned() };
    // The API server has checked the expiry.
    Ok(Claims { account, pod, until: SystemTime::UNIX_EPOCH })
}

#[cfg(test)]
mod tests {
    use super::*;
    use k8s_openapi::api::authentication::v1::UserInfo;

    const UID: &str = "0f6c1d52-8a53-4a0a-9d1e-2f8f5f0f7a11";

    fn cluster() -> CertificateCluster {
        CertificateCluster { namespace: "research".into(), name: "words".into(), id: ClusterId(7) }
    }

    fn worker(ordinal: u32) -> Name {
        Name::on_kubernetes("research", "words", ClusterId(7), Role::Worker, ordinal)
    }

    fn claims() -> Claims {
        Claims {
            account: Account { namespace: "research".into(), name: "words-worker".into() },
            pod: Some(BoundPod { name: "words-worker-2".into(), uid: UID.into() }),
            until: SystemTime::UNIX_EPOCH,
        }
    }

    #[test]
    fn only_the_current_pod_of_a_worker_gets_its_certificate() {
        assert_eq!(approve(&worker(2), &claims(), &cluster(), Some(UID)), Ok(()));
        let refused =
            |requested: &Name, claims: &Claims, pod| approve(requested, claims, &cluster(), pod).unwrap_err().label();
        for stranger in [
            Name { role: Role::Coordinator, ..worker(2) },
            Name { role: Role::Client, ..worker(2) },
            Name { namespace: "other".into(), ..worker(2) },
            Name { cluster_name: "books".into(), ..worker(2) },
            Name { cluster: ClusterId(8), ..worker(2) },
            Name { trust_domain: "engram.local".into(), ..worker(2) },
            Name { ordinal: None, ..worker(0) },
        ] {
            assert_eq!(refused(&stranger, &claims(), Some(UID)), "name", "{stranger}");
        }
        for (namespace, name) in [("other", "words-worker"), ("research", "default"), ("research", "books-worker")] {
            let account = Account { namespace: namespace.into(), name: name.into() };
            assert_eq!(refused(&worker(2), &Claims { account, ..claims() }, Some(UID)), "account");
        }
        assert_eq!(refused(&worker(1), &claims(), Some(UID)), "pod", "the right token of another pod");
        assert_eq!(refused(&worker(2), &Claims { pod: None, ..claims() }, Some(UID)), "pod", "bound to nothing");
        assert_eq!(refused(&worker(2), &claims(), None), "gone");
        assert_eq!(refused(&worker(2), &claims(), Some("another")), "gone", "the pod was replaced");
    }

    #[test]
    fn a_token_review_is_valid_for_our_audience_only() {
        let extra = [("pod-name", "words-worker-2"), ("pod-uid", UID)];
        let extra = extra.map(|(key, value)| (format!("authentication.kubernetes.io/{key}"), vec![value.to_owned()]));
        let good = TokenReviewStatus {
            authenticated: Some(true),
            audiences: Some(vec![CSR_AUDIENCE.into()]),
            error: None,
            user: Some(UserInfo {
                username: Some("system:serviceaccount:research:words-worker".into()),
                extra: Some(extra.into()),
                ..UserInfo::default()
            }),
        };
        assert_eq!(claims_of_review(&good), Ok(claims()));
        let with_user = |change: &dyn Fn(&mut UserInfo)| {
            let mut user = good.user.clone().unwrap();
            change(&mut user);
            TokenReviewStatus { user: Some(user), ..good.clone() }
        };
        for bad in [
            TokenReviewStatus { authenticated: Some(false), ..good.clone() },
            TokenReviewStatus { authenticated: None, ..good.clone() },
            TokenReviewStatus { audiences: None, ..good.clone() },
            TokenReviewStatus { audiences: Some(vec!["https://kubernetes.default.svc".into()]), ..good.clone() },
            TokenReviewStatus { user: None, ..good.clone() },
            with_user(&|user| user.username = Some("system:admin".into())),
        ] {
            assert_eq!(claims_of_review(&bad).unwrap_err().label(), "token", "{bad:?}");
        }
        let unbound = claims_of_review(&with_user(&|user| user.extra = None)).unwrap();
        assert_eq!(unbound.pod, None);
    }
}
