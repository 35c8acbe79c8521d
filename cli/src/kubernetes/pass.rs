//! How a person gets into a cluster with TLS: by a token of its ServiceAccount `<cluster>-client`, which the API server gives to whoever
//! may ask for one. So the RBAC of Kubernetes decides who is a user.

use super::error;
use super::forward::{Forwarder, Opener};
use crate::error::said;
use anyhow::Context as _;
use engram_api::ExitCode;
use engram_client::{Network, Token};
use engram_identity::token::audience;
use engram_identity::{Expected, Followed, Role, Roots, renewal};
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

/// How long a token is good for: the least that an API server gives, since commands are short and what is stolen ends soon.
const LIFETIME: Duration = Duration::from_secs(600);
/// How long a renewal waits after one that failed.
const PAUSE: Duration = Duration::from_secs(10);

/// The way to the processes of a cluster with TLS; `None` where it has none. `token` takes the place of one that is asked for.
///
/// # Errors
/// The API server does not tell, or tells what makes no sense.
pub(super) async fn network(
    client: &Client,
    namespace: &str,
    object: &Value,
    forwarder: &Arc<Forwarder>,
    token: Option<&Path>,
) -> anyhow::Result<Option<Network>> {
    let name = object["metadata"]["name"].as_str().unwrap_or_default();
    let maps: Api<ConfigMap> = Api::namespaced(client.clone(), namespace);
    let found = maps.get_opt(&format!("{name}-ca")).boxed().await;
    let map = match found {
        Ok(map) => map,
        // In clear nothing of it is needed, and what is not in clear says so itself.
        Err(kube::Error::Api(status)) if status.code == 403 && !wants_tls(object) => None,
        Err(found) => {
            return Err(error::told(&found, "to find the cluster's authority", "get configmaps", namespace));
        }
    };
    let pem = map.and_then(|map| map.data?.remove("ca.pem"));
    let id: Option<ClusterId> = object["status"]["clusterId"].as_str().and_then(|id| id.parse().ok());
    let (Some(pem), Some(cluster)) = (pem, id) else { return Ok(None) };
    let roots = Roots::parse(pem.as_bytes()).with_context(|| format!("ConfigMap {name}-ca"))?;
    let token = match token {
        Some(path) => Token::file(path).context("--token-file")?,
        None => {
            let pass = Arc::new(Pass {
                accounts: Api::namespaced(client.clone(), namespace),
                namespace: namespace.to_owned(),
                account: format!("{name}-client"),
                audience: audience(cluster),
                current: RwLock::default(),
                asking: Mutex::default(),
            });
            forwarder.with_pass(Arc::clone(&pass));
            Token::given(move || pass.text())
        }
    };
    let network = Network::carrying(token, Followed::fixed(roots), cluster, Expected::any(Role::Worker));
    Ok(Some(network.through(Arc::new(Opener(Arc::clone(forwarder))))))
}

fn wants_tls(object: &Value) -> bool {
    object["spec"]["tls"]["mode"] != "Disabled"
}

/// A token of a cluster's ServiceAccount for people.
pub(super) struct Pass {
    accounts: Api<ServiceAccount>,
    namespace: String,
    account: String,
    audience: String,
    current: RwLock<Option<Given>>,
    /// Held by the one who asks.
    asking: Mutex<()>,
}

struct Given {
    text: String,
    renew_at: SystemTime,
}

impl Pass {
    fn text(&self) -> String {
        let current = self.current.read().unwrap_or_else(PoisonError::into_inner);
        current.as_ref().map(|given| given.text.clone()).unwrap_or_default()
    }

    fn renew_at(&self) -> Option<SystemTime> {
        self.current.read().unwrap_or_else(PoisonError::into_inner).as_ref().map(|given| given.renew_at)
    }

    /// Asks for a token where there is none, or for the next where this one is to be renewed.
    ///
    /// # Errors
    /// The API server gives none.
    pub(super) async fn ask_if_due(self: &Arc<Self>) -> anyhow::Result<()> {
        let _alone = self.asking.lock().await;
        let first = match self.renew_at() {
            Some(renew_at) if SystemTime::now() < renew_at => return Ok(()),
            known => known.is_none(),
        };
        let spec = TokenRequestSpec {
            audiences: vec![self.audience.clone()],
            expiration_seconds: Some(LIFETIME.as_secs() as i64),
            ..TokenRequestSpec::default()
        };
        let request = TokenRequest { spec, ..TokenRequest::default() };
        let asked = self.accounts.create_token_request(&self.account, &PostParams::default(), &request).boxed().await;
        let wanted = format!("to get a token of ServiceAccount {}", self.account);
        let given =
            asked.map_err(|found| error::told(&found, &wanted, "create serviceaccounts/token", &self.namespace))?;
        let text = given.status.map(|status| status.token).filter(|token| !token.is_empty());
        let text = text.ok_or_else(|| said(ExitCode::Failed, format!("{wanted}: the API server gave an empty one")))?;
        let given = Given { text, renew_at: renewal(SystemTime::now(), LIFETIME) };
        *self.current.write().unwrap_or_else(PoisonError::into_inner) = Some(given);
        if first {
            tokio::spawn(renew(Arc::downgrade(self)));
        }
        Ok(())
    }
}

/// Renews a pass for as long as anybody has it: connections outlive tokens.
fn renew(pass: Weak<Pass>) -> BoxFuture<'static, ()> {
    async move {
        loop {
            let Some(renew_at) = pass.upgrade().and_then(|pass| pass.renew_at()) else { return };
            tokio::time::sleep(renew_at.duration_since(SystemTime::now()).unwrap_or_default()).await;
            let Some(pass) = pass.upgrade() else { return };
            if let Err(error) = pass.ask_if_due().await {
                tracing::warn!(error = format!("{error:#}"), "the token is not renewed yet");
                tokio::time::sleep(PAUSE).await;
            }
        }
    }
    .boxed()
}
