//! Whether a pod gets the certificate that it asks for: it must be the worker whose name it asks for, and nobody else.
//!
//! Who it is, its token says: one for this purpose alone, of its cluster's ServiceAccount, bound to the pod that has that name now.

use engram_identity::token::{Account, Bound, Claims};
use engram_identity::{Name, Role};
use engram_memory::ClusterId;
use k8s_openapi::api::authentication::v1::TokenReviewStatus;
use std::collections::BTreeMap;
use std::time::SystemTime;

use crate::names::{CSR_AUDIENCE, Names};

/// A cluster whose pods may ask.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Asked {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// Its identity.
    pub id: ClusterId,
}

/// Why there is no certificate.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The token is not one of this API server, not good now, or for another purpose.
    #[error("the token is not taken: {0}")]
    Token(String),
    /// The request is for somebody else than a worker of the cluster.
    #[error("the request is for {asked}; allowed: {allowed}")]
    Name {
        /// Whose name it asks for.
        asked: Box<Name>,
        /// Whose this may be.
        allowed: Box<Name>,
    },
    /// The token is of another ServiceAccount.
    #[error("the token is of {found}; needed: {needed}")]
    Account {
        /// Whose it is.
        found: Account,
        /// Whose it must be.
        needed: Account,
    },
    /// The token is of another pod, or of none.
    #[error("the token is bound to {}; needed: pod {needed}", found.as_deref().map_or("no pod".to_owned(), |found| format!("pod {found}")))]
    Pod {
        /// Whose it is.
        found: Option<String>,
        /// Whose it must be.
        needed: String,
    },
    /// The pod that the token was given to is not there any more.
    #[error("pod {name} with UID {uid} is not there")]
    Gone {
        /// Its name.
        name: String,
        /// Its UID.
        uid: String,
    },
}

impl Refusal {
    /// The word for it in metrics.
    pub const fn word(&self) -> &'static str {
        match self {
            Self::Token(_) => "token",
            Self::Name { .. } => "name",
            Self::Account { .. } => "account",
            Self::Pod { .. } => "pod",
            Self::Gone { .. } => "gone",
        }
    }
}

/// Decides whether who has shown a token with these claims gets a certificate with the name `asked`. `pod` is the UID of the pod that has
/// the name of that worker's pod now, if there is one.
///
/// # Errors
/// It gets none.
pub fn decide(asked: &Name, claims: &Claims, cluster: &Asked, pod: Option<&str>) -> Result<(), Refusal> {
    // One without an ordinal, which workers could share, is nobody's: each has its own here.
    let ordinal = asked.ordinal.unwrap_or_default();
    let allowed = Name::on_kubernetes(&cluster.namespace, &cluster.name, cluster.id, Role::Worker, ordinal);
    if *asked != allowed {
        return Err(Refusal::Name { asked: Box::new(asked.clone()), allowed: Box::new(allowed) });
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
    // One of the same name may have been made since.
    if pod != Some(bound.uid.as_str()) {
        return Err(Refusal::Gone { name: bound.name.clone(), uid: bound.uid.clone() });
    }
    Ok(())
}

/// Reads what the API server says of a token that it was asked about, for our audience.
///
/// # Errors
/// It is not good, or not for this.
pub fn reviewed(status: &TokenReviewStatus) -> Result<Claims, Refusal> {
    let refused = |why: &str| Err(Refusal::Token(why.to_owned()));
    if status.authenticated != Some(true) {
        return refused(status.error.as_deref().unwrap_or("the API server does not know it"));
    }
    // An API server that does not know of audiences says yes without naming one.
    if !status.audiences.iter().flatten().any(|audience| audience == CSR_AUDIENCE) {
        return refused("its audience is another; needed: engram-csr");
    }
    let user = status.user.as_ref();
    let name = user.and_then(|user| user.username.as_deref()).unwrap_or_default();
    let account = name.strip_prefix("system:serviceaccount:").and_then(|rest| rest.split_once(':'));
    let Some((namespace, name)) = account else { return refused("it is not of a ServiceAccount") };
    let none = BTreeMap::new();
    let extra = user.and_then(|user| user.extra.as_ref()).unwrap_or(&none);
    let one = |key: &str| match extra.get(&format!("authentication.kubernetes.io/{key}")).map(Vec::as_slice) {
        Some([only]) => Some(only.clone()),
        _ => None,
    };
    let pod = one("pod-name").zip(one("pod-uid")).map(|(name, uid)| Bound { name, uid });
    let account = Account { namespace: namespace.to_owned(), name: name.to_owned() };
    // The API server has looked at its end.
    Ok(Claims { account, pod, until: SystemTime::UNIX_EPOCH })
}

#[cfg(test)]
mod tests {
    use super::*;
    use k8s_openapi::api::authentication::v1::UserInfo;

    const UID: &str = "0f6c1d52-8a53-4a0a-9d1e-2f8f5f0f7a11";

    fn cluster() -> Asked {
        Asked { namespace: "research".into(), name: "words".into(), id: ClusterId(7) }
    }

    fn worker(ordinal: u32) -> Name {
        Name::on_kubernetes("research", "words", ClusterId(7), Role::Worker, ordinal)
    }

    fn claims() -> Claims {
        Claims {
            account: Account { namespace: "research".into(), name: "words-worker".into() },
            pod: Some(Bound { name: "words-worker-2".into(), uid: UID.into() }),
            until: SystemTime::UNIX_EPOCH,
        }
    }

    #[test]
    fn the_pod_that_has_the_name_gets_the_certificate_and_nobody_else_does() {
        assert_eq!(decide(&worker(2), &claims(), &cluster(), Some(UID)), Ok(()));
        let refused = |asked: &Name, claims: &Claims, pod| decide(asked, claims, &cluster(), pod).unwrap_err().word();
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
        assert_eq!(refused(&worker(2), &claims(), Some("another")), "gone", "the pod that has the name now is another");
    }

    #[test]
    fn an_answer_of_the_api_server_counts_for_our_audience_alone() {
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
        assert_eq!(reviewed(&good), Ok(claims()));
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
            assert_eq!(reviewed(&bad).unwrap_err().word(), "token", "{bad:?}");
        }
        let unbound = reviewed(&with_user(&|user| user.extra = None)).unwrap();
        assert_eq!(unbound.pod, None);
    }
}
