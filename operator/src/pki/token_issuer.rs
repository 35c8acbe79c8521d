//! The API server's keys for ServiceAccount tokens, with which workers verify tokens locally.
//!
//! They are read from `/openid/v1/jwks`, which ClusterRole `system:service-account-issuer-discovery` allows for all ServiceAccounts.

use parking_lot::RwLock;
use std::collections::BTreeMap;
use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use anyhow::{Context as _, Result};
use axum::http::Request;
use engram_api::kubernetes_only::Right;
use engram_api::{AccessDenied, AccessList, RequiredRight};
use engram_coordinator::{QueryKind, TokenAuthorizer};
use engram_identity::Reason;
use engram_identity::token::{Claims, Issuer, TokenRejection, audience};
use engram_memory::ClusterId;
use kube::Client;
use serde_json::Value;
use tokio::sync::watch;

/// Refresh interval: new keys are published long before they sign.
const PERIOD: Duration = Duration::from_secs(60 * 60);
/// Retry interval after a failure.
const RETRY: Duration = Duration::from_secs(10);
/// Deadline of a request.
const DEADLINE: Duration = Duration::from_secs(10);
const DISCOVERY: &str = "/.well-known/openid-configuration";
const KEYS: &str = "/openid/v1/jwks";

/// The published token issuer.
struct Published {
    name: String,
    keys: String,
    issuer: Issuer,
}

/// The current token issuer.
#[derive(Default)]
pub(crate) struct Issuers {
    issuer: RwLock<Option<Arc<Published>>>,
    /// Whether the first read was attempted.
    is_read: watch::Sender<bool>,
}

impl Issuers {
    fn current(&self) -> Option<Arc<Published>> {
        self.issuer.read().clone()
    }

    /// Waits until the first read succeeded or failed. Otherwise a starting operator would overwrite published keys with none.
    pub(crate) async fn wait_for_first_read(&self) {
        // The sender outlives this call.
        let _ = self.is_read.subscribe().wait_for(|is_read| *is_read).await;
    }

    /// Returns the files for workers by name; empty before the first read.
    pub(crate) fn files(&self) -> BTreeMap<String, String> {
        let file = |name: &str, text: &String| (name.to_owned(), text.clone());
        let files = |published: Arc<Published>| [file("issuer", &published.name), file("jwks.json", &published.keys)];
        self.current().map(files).into_iter().flatten().collect()
    }

    /// Verifies a ServiceAccount token; `None` while the issuer is unknown.
    pub(crate) fn verify(&self, token: &str, audience: &str) -> Option<Result<Claims, TokenRejection>> {
        Some(self.current()?.issuer.verify(token, audience, SystemTime::now()))
    }

    /// Refreshes the issuer periodically until `stop` completes. A failed read keeps the previous one.
    pub(crate) async fn follow(&self, client: Client, stop: impl Future<Output = ()>) -> Result<()> {
        let reading = async {
            loop {
                let wait = match tokio::time::timeout(DEADLINE, read(&client)).await {
                    Ok(Ok(issuer)) => {
                        self.replace(issuer);
                        PERIOD
                    }
                    Ok(Err(error)) => {
                        tracing::warn!(error = format!("{error:#}"), "failed to read the token issuer");
                        RETRY
                    }
                    Err(_) => RETRY,
                };
                self.is_read.send_replace(true);
                tokio::time::sleep(wait).await;
            }
        };
        tokio::select! {
            () = stop => Ok(()),
            () = reading => Ok(()),
        }
    }

    fn replace(&self, new: Published) {
        let mut current = self.issuer.write();
        if current.as_ref().is_none_or(|published| (&published.name, &published.keys) != (&new.name, &new.keys)) {
            tracing::info!(issuer = new.name, "read the keys of the token issuer");
            *current = Some(Arc::new(new));
        }
    }
}

/// Authorizes token-authenticated calls to the coordinator of a cluster.
pub(crate) struct TokenAccess {
    pub(crate) issuers: Arc<Issuers>,
    pub(crate) cluster: ClusterId,
    pub(crate) access: AccessList,
}

impl TokenAuthorizer for TokenAccess {
    fn authorize(&self, token: &str, asks: QueryKind) -> Result<(), TokenRejection> {
        let refused = |reason, text: String| Err(TokenRejection { reason, text });
        let Some(published) = self.issuers.current() else {
            return refused(Reason::TokenKey, "the keys of the token issuer are not read yet".into());
        };
        let account = published.issuer.verify(token, &audience(self.cluster), SystemTime::now())?.account;
        let needed = RequiredRight::One(match asks {
            QueryKind::Status => Right::Read,
            QueryKind::OrderPreview => Right::Admin,
        });
        self.access.check(&account.namespace, &account.name, needed).or_else(|missing| {
            let reason = match missing {
                AccessDenied::Account { .. } => Reason::TokenAccount,
                AccessDenied::Right { .. } => Reason::TokenRight,
            };
            refused(reason, format!("{account} is not authorized to call the coordinator: it {missing}"))
        })
    }
}

async fn read(client: &Client) -> Result<Published> {
    let get = async |path: &str| -> Result<String> {
        let request = Request::get(path).body(Vec::new()).context("invalid path")?;
        client.request_text(request).await.with_context(|| format!("failed to read {path}"))
    };
    let (discovery, keys) = (get(DISCOVERY).await?, get(KEYS).await?);
    published(&discovery, keys)
}

/// Parses the issuer and its keys.
fn published(discovery: &str, keys: String) -> Result<Published> {
    let discovery: Value = serde_json::from_str(discovery).with_context(|| format!("{DISCOVERY} is not JSON"))?;
    let name = discovery["issuer"].as_str().with_context(|| format!("{DISCOVERY} names no issuer"))?.to_owned();
    let issuer = Issuer::parse(name.as_bytes(), keys.as_bytes()).with_context(|| format!("{KEYS} is invalid"))?;
    Ok(Published { name, keys, issuer })
}

#[cfg(test)]
mod tests {
    use super::*;
    use engram_api::kubernetes_only::Access;
    use engram_testing::tokens::Signer;
    use serde_json::json;

    #[test]
    fn invalid_keys_are_not_published() {
        let keys = r#"{"keys":[{"kty":"EC","crv":"P-256","kid":"a","alg":"ES256",
            "x":"f83OJ3D2xF1Bg8vub9tLe1gHMzV76e8Tus9uPHvRVEU","y":"x_FEzRu9m36HLN_tue659LNpXW6pCyStikYjKIWI5a0"}]}"#;
        let discovery = r#"{"issuer":"https://kubernetes.default.svc","jwks_uri":"https://10.0.0.1/openid/v1/jwks"}"#;
        assert!(published("{}", keys.to_owned()).is_err());
        assert!(published(discovery, r#"{"keys":[]}"#.to_owned()).is_err());
        let issuers = Issuers::default();
        assert!(issuers.files().is_empty());
        issuers.replace(published(discovery, keys.to_owned()).unwrap());
        let files = issuers.files();
        assert_eq!((files["issuer"].as_str(), files["jwks.json"].as_str()), ("https://kubernetes.default.svc", keys));
    }

    #[test]
    fn a_token_allows_the_coordinator_calls_of_its_accounts_rights() {
        let (signer, cluster) = (Signer::new("first"), ClusterId(42));
        let issuers = Arc::new(Issuers::default());
        let discovery = json!({ "issuer": "https://kubernetes.default.svc" }).to_string();
        issuers.replace(published(&discovery, signer.keys().to_string()).unwrap());
        let entry = |name: &str, right| Access { service_account: name.into(), namespace: None, rights: vec![right] };
        let access = AccessList::new([entry("reader", Right::Read), entry("admin", Right::Admin)], "research");
        let tokens = TokenAccess { issuers, cluster, access };
        let why = |account: &str, audience: &str, asks| {
            let body = json!({
                "iss": "https://kubernetes.default.svc", "aud": [audience], "exp": 32_503_680_000_u64,
                "sub": format!("system:serviceaccount:research:{account}"),
            });
            tokens.authorize(&signer.token(&body), asks).err().map(|refused| refused.reason)
        };
        let here = audience(cluster);
        assert_eq!(why("reader", &here, QueryKind::Status), None);
        assert_eq!(why("reader", &here, QueryKind::OrderPreview), Some(Reason::TokenRight));
        assert_eq!(why("admin", &here, QueryKind::OrderPreview), None);
        assert_eq!(why("stranger", &here, QueryKind::Status), Some(Reason::TokenAccount));
        assert_eq!(why("admin", &audience(ClusterId(43)), QueryKind::Status), Some(Reason::TokenAudience));
        let unread = TokenAccess { issuers: Arc::default(), ..tokens };
        assert_eq!(unread.authorize("a.b.c", QueryKind::Status).unwrap_err().reason, Reason::TokenKey);
    }
}
