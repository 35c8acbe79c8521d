//! With which keys the API server signs the tokens of ServiceAccounts: workers verify tokens with them, and ask nobody.
//!
//! They are read under `/openid/v1/jwks`, as any ServiceAccount may: Kubernetes binds ClusterRole
//! `system:service-account-issuer-discovery` to all of them.

use std::collections::BTreeMap;
use std::future::Future;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::{Duration, SystemTime};

use anyhow::{Context as _, Result};
use axum::http::Request;
use engram_api::kubernetes_only::Right;
use engram_api::{AccessList, Missing, Need};
use engram_coordinator::{Accounts, Asks};
use engram_identity::Reason;
use engram_identity::token::{Claims, Issuer, Refused, audience};
use engram_memory::ClusterId;
use kube::Client;
use serde_json::Value;
use tokio::sync::watch;

/// Keys are changed by hand, and the new one is published long before it signs.
const PERIOD: Duration = Duration::from_secs(60 * 60);
/// After a failure.
const RETRY: Duration = Duration::from_secs(10);
/// How long an answer may take.
const DEADLINE: Duration = Duration::from_secs(10);
const DISCOVERY: &str = "/.well-known/openid-configuration";
const KEYS: &str = "/openid/v1/jwks";

/// Who signs tokens, as it is published.
struct Published {
    name: String,
    keys: String,
    issuer: Issuer,
}

/// What is known of the issuer.
#[derive(Default)]
pub(super) struct Issuers {
    known: RwLock<Option<Arc<Published>>>,
    /// Whether it was asked for at all.
    asked: watch::Sender<bool>,
}

impl Issuers {
    fn known(&self) -> Option<Arc<Published>> {
        self.known.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Waits until it was read, or could not be. What an operator publishes takes the place of what another one did: one that has
    /// only just started would take the keys away, and workers of a new cluster would know no token for the minute that a kubelet takes.
    pub(super) async fn asked(&self) {
        // Who asks lives as long as whoever waits here.
        let _ = self.asked.subscribe().wait_for(|asked| *asked).await;
    }

    /// What workers are told of it, by the name of its file; nothing until it was read.
    pub(super) fn files(&self) -> BTreeMap<String, String> {
        let file = |name: &str, text: &String| (name.to_owned(), text.clone());
        let files = |known: Arc<Published>| [file("issuer", &known.name), file("jwks.json", &known.keys)];
        self.known().map(files).into_iter().flatten().collect()
    }

    /// Verifies a token of any ServiceAccount; `None` while the issuer is not known.
    pub(super) fn verify(&self, token: &str, audience: &str) -> Option<Result<Claims, Refused>> {
        Some(self.known()?.issuer.verify(token, audience, SystemTime::now()))
    }

    /// Reads it now and then, until `stop` completes. What cannot be read changes nothing.
    pub(super) async fn follow(&self, client: Client, stop: impl Future<Output = ()>) -> Result<()> {
        let reading = async {
            loop {
                let wait = match tokio::time::timeout(DEADLINE, read(&client)).await {
                    Ok(Ok(issuer)) => {
                        self.take(issuer);
                        PERIOD
                    }
                    Ok(Err(error)) => {
                        tracing::warn!(error = format!("{error:#}"), "the issuer of tokens is not known anew");
                        RETRY
                    }
                    Err(_) => RETRY,
                };
                self.asked.send_replace(true);
                tokio::time::sleep(wait).await;
            }
        };
        tokio::select! {
            () = stop => Ok(()),
            () = reading => Ok(()),
        }
    }

    fn take(&self, found: Published) {
        let mut known = self.known.write().unwrap_or_else(PoisonError::into_inner);
        if known.as_ref().is_none_or(|known| (&known.name, &known.keys) != (&found.name, &found.keys)) {
            tracing::info!(issuer = found.name, "keys of the issuer of tokens are known");
            *known = Some(Arc::new(found));
        }
    }
}

/// Who may ask a coordinator of a cluster with a token.
pub(super) struct Tokens {
    pub(super) issuers: Arc<Issuers>,
    pub(super) cluster: ClusterId,
    pub(super) access: AccessList,
}

impl Accounts for Tokens {
    fn admit(&self, token: &str, asks: Asks) -> Result<(), Refused> {
        let refused = |reason, text: String| Err(Refused { reason, text });
        let Some(known) = self.issuers.known() else {
            return refused(Reason::TokenKey, "no keys of an issuer of tokens are known here yet".into());
        };
        let account = known.issuer.verify(token, &audience(self.cluster), SystemTime::now())?.account;
        let needed = Need::One(match asks {
            Asks::Status => Right::Read,
            Asks::Judgement => Right::Admin,
        });
        self.access.check(&account.namespace, &account.name, needed).or_else(|missing| {
            let reason = match missing {
                Missing::Account { .. } => Reason::TokenAccount,
                Missing::Right { .. } => Reason::TokenRight,
            };
            refused(reason, format!("{account} may not ask the coordinator: it {missing}"))
        })
    }
}

async fn read(client: &Client) -> Result<Published> {
    let get = async |path: &str| -> Result<String> {
        let request = Request::get(path).body(Vec::new()).context("a path is a request")?;
        client.request_text(request).await.with_context(|| format!("failed to read {path}"))
    };
    let (discovery, keys) = (get(DISCOVERY).await?, get(KEYS).await?);
    published(&discovery, keys)
}

/// What workers are told, if it is of use to them.
fn published(discovery: &str, keys: String) -> Result<Published> {
    let discovery: Value = serde_json::from_str(discovery).with_context(|| format!("{DISCOVERY} is no JSON"))?;
    let name = discovery["issuer"].as_str().with_context(|| format!("{DISCOVERY} names no issuer"))?.to_owned();
    let issuer = Issuer::parse(name.as_bytes(), keys.as_bytes()).with_context(|| format!("{KEYS} is of no use"))?;
    Ok(Published { name, keys, issuer })
}

#[cfg(test)]
mod tests {
    use super::*;
    use engram_api::kubernetes_only::Access;
    use engram_testing::tokens::Signer;
    use serde_json::json;

    #[test]
    fn what_is_of_no_use_is_not_passed_on() {
        let keys = r#"{"keys":[{"kty":"EC","crv":"P-256","kid":"a","alg":"ES256",
            "x":"f83OJ3D2xF1Bg8vub9tLe1gHMzV76e8Tus9uPHvRVEU","y":"x_FEzRu9m36HLN_tue659LNpXW6pCyStikYjKIWI5a0"}]}"#;
        let discovery = r#"{"issuer":"https://kubernetes.default.svc","jwks_uri":"https://10.0.0.1/openid/v1/jwks"}"#;
        assert!(published("{}", keys.to_owned()).is_err());
        assert!(published(discovery, r#"{"keys":[]}"#.to_owned()).is_err());
        let issuers = Issuers::default();
        assert!(issuers.files().is_empty());
        issuers.take(published(discovery, keys.to_owned()).unwrap());
        let files = issuers.files();
        assert_eq!((files["issuer"].as_str(), files["jwks.json"].as_str()), ("https://kubernetes.default.svc", keys));
    }

    #[test]
    fn a_token_asks_a_coordinator_for_what_its_account_has_the_right_to() {
        let (signer, cluster) = (Signer::new("first"), ClusterId(42));
        let issuers = Arc::new(Issuers::default());
        let discovery = json!({ "issuer": "https://kubernetes.default.svc" }).to_string();
        issuers.take(published(&discovery, signer.keys().to_string()).unwrap());
        let entry = |name: &str, right| Access { service_account: name.into(), namespace: None, rights: vec![right] };
        let access = AccessList::new([entry("reader", Right::Read), entry("admin", Right::Admin)], "research");
        let tokens = Tokens { issuers, cluster, access };
        let why = |account: &str, audience: &str, asks| {
            let body = json!({
                "iss": "https://kubernetes.default.svc", "aud": [audience], "exp": 32_503_680_000_u64,
                "sub": format!("system:serviceaccount:research:{account}"),
            });
            tokens.admit(&signer.token(&body), asks).err().map(|refused| refused.reason)
        };
        let here = audience(cluster);
        assert_eq!(why("reader", &here, Asks::Status), None);
        assert_eq!(why("reader", &here, Asks::Judgement), Some(Reason::TokenRight));
        assert_eq!(why("admin", &here, Asks::Judgement), None);
        assert_eq!(why("stranger", &here, Asks::Status), Some(Reason::TokenAccount));
        assert_eq!(why("admin", &audience(ClusterId(43)), Asks::Status), Some(Reason::TokenAudience));
        let unread = Tokens { issuers: Arc::default(), ..tokens };
        assert_eq!(unread.admit("a.b.c", Asks::Status).unwrap_err().reason, Reason::TokenKey);
    }
}
