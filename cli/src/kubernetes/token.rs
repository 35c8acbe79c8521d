//! Authentication to a cluster with TLS: a token of ServiceAccount `<cluster>-client`, issued by the API server. Kubernetes RBAC
//! decides who may request one.

use super::error;
use super::forward::{Forwarder, Opener};
use crate::error::failure;
use anyhow::Context as _;
use engram_api::ExitCode;
use engram_client::{Network, Token};
use engram_identity::token::audience;
use engram_identity::{ExpectedPeer, Renewal, Role, Roots, WatchedFiles};
use engram_memory::ClusterId;
use futures::FutureExt as _;
use futures::future::BoxFuture;
use k8s_openapi::api::authentication::v1::{TokenRequest, TokenRequestSpec};
use k8s_openapi::api::core::v1::{ConfigMap, ServiceAccount};
use kube::api::PostParams;
use kube::{Api, Client};
use serde_json::Value;
use std::path::Path;
use std::sync::{Arc, PoisonError, RwLock, Weak};
use std::time::{Duration, SystemTime};
use tokio::sync::Mutex;

/// Lifetime of a token: the minimum of the API server, because commands are short-lived.
const LIFETIME: Duration = Duration::from_secs(600);
/// Interval between checks whether the token is due for renewal.
const CHECK_INTERVAL: Duration = Duration::from_secs(5);
/// Delay after a failed renewal.
const RETRY_DELAY: Duration = Duration::from_secs(10);

/// Returns the network for a cluster with TLS, and its CA certificates in PEM; `None` without TLS. `token` replaces the token of the service account.
///
/// # Errors
/// The CA certificates or the token cannot be read.
pub(super) async fn network(
    client: &Client,
    namespace: &str,
    object: &Value,
    forwarder: &Arc<Forwarder>,
    token: Option<&Path>,
) -> anyhow::Result<Option<(Network, String)>> {
    let name = object["metadata"]["name"].as_str().unwrap_or_default();
    let maps: Api<ConfigMap> = Api::namespaced(client.clone(), namespace);
    let map = maps.get_opt(&format!("{name}-ca")).boxed().await;
    let map = match map {
        Ok(map) => map,
        // Not needed without TLS.
        Err(kube::Error::Api(status)) if status.code == 403 && !wants_tls(object) => None,
        Err(error) => {
            return Err(error::describe(&error, "to read the CA certificates", "get configmaps", namespace));
        }
    };
    let pem = map.and_then(|map| map.data?.remove("ca.pem"));
    let id: Option<ClusterId> = object["status"]["clusterId"].as_str().and_then(|id| id.parse().ok());
    let (Some(pem), Some(cluster)) = (pem, id) else { return Ok(None) };
    let roots = Roots::parse(pem.as_bytes()).with_context(|| format!("ConfigMap {name}-ca"))?;
    let token = match token {
        Some(path) => Token::file(path).context("--token-file")?,
        None => {
            let token = Arc::new(ClientToken {
                accounts: Api::namespaced(client.clone(), namespace),
                namespace: namespace.to_owned(),
                account: format!("{name}-client"),
                audience: audience(cluster),
                current: RwLock::default(),
                renewal: Mutex::default(),
            });
            forwarder.set_token(Arc::clone(&token));
            Token::from_fn(move || token.text())
        }
    };
    let network = Network::with_token(token, WatchedFiles::fixed(roots), cluster, ExpectedPeer::any(Role::Worker));
    Ok(Some((network.with_opener(Arc::new(Opener(Arc::clone(forwarder)))), pem)))
}

fn wants_tls(object: &Value) -> bool {
    object["spec"]["tls"]["mode"] != "Disabled"
}

/// Token of the client service account of a cluster.
pub(super) struct ClientToken {
    accounts: Api<ServiceAccount>,
    namespace: String,
    account: String,
    audience: String,
    current: RwLock<Option<IssuedToken>>,
    /// Held during a renewal.
    renewal: Mutex<()>,
}

struct IssuedToken {
    text: String,
    renewal: Renewal,
}

impl ClientToken {
    fn text(&self) -> String {
        let current = self.current.read().unwrap_or_else(PoisonError::into_inner);
        current.as_ref().map(|token| token.text.clone()).unwrap_or_default()
    }

    fn renewal(&self) -> Option<Renewal> {
        self.current.read().unwrap_or_else(PoisonError::into_inner).as_ref().map(|token| token.renewal)
    }

    /// Requests a token if there is none or if it is due for renewal. The first request starts a background renewal.
    ///
    /// # Errors
    /// The API server rejects the request.
    pub(super) async fn renew_if_due(self: &Arc<Self>) -> anyhow::Result<()> {
        let _guard = self.renewal.lock().await;
        let renewal = self.renewal();
        if renewal.is_some_and(|renewal| !renewal.is_due(SystemTime::now())) {
            return Ok(());
        }
        let is_first = renewal.is_none();
        let spec = TokenRequestSpec {
            audiences: vec![self.audience.clone()],
            expiration_seconds: Some(LIFETIME.as_secs() as i64),
            ..TokenRequestSpec::default()
        };
        let request = TokenRequest { spec, ..TokenRequest::default() };
        let response =
            self.accounts.create_token_request(&self.account, &PostParams::default(), &request).boxed().await;
        let action = format!("to request a token of ServiceAccount {}", self.account);
        let response = response
            .map_err(|error| error::describe(&error, &action, "create serviceaccounts/token", &self.namespace))?;
        let text = response.status.map(|status| status.token).filter(|token| !token.is_empty());
        let text =
            text.ok_or_else(|| failure(ExitCode::Failed, format!("{action}: the API server returned an empty token")))?;
        let token = IssuedToken { text, renewal: Renewal::of(SystemTime::now(), LIFETIME) };
        *self.current.write().unwrap_or_else(PoisonError::into_inner) = Some(token);
        if is_first {
            tokio::spawn(renew(Arc::downgrade(self)));
        }
        Ok(())
    }
}

/// Renews a token until it is dropped: connections outlive tokens.
fn renew(token: Weak<ClientToken>) -> BoxFuture<'static, ()> {
    async move {
        loop {
            // The wall clock may step and the machine may sleep, so the time is checked periodically.
            tokio::time::sleep(CHECK_INTERVAL).await;
            let Some(token) = token.upgrade() else { return };
            if let Err(error) = token.renew_if_due().await {
                tracing::warn!(error = format!("{error:#}"), "failed to renew the client token");
                tokio::time::sleep(RETRY_DELAY).await;
            }
        }
    }
    .boxed()
}
