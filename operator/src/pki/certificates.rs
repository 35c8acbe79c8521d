//! The operator's CA: its key in a Secret, created by the first replica, and the certificates that it signs.
//!
//! The Secret is the one object that is written before a plan, while a cluster is observed, and by any replica: followers coordinate
//! clusters with TLS too, and cannot wait for a leader. Creation is safe on every replica: the API server creates one object of the name,
//! a replica whose creation conflicts reads the other one's key, and nothing overwrites a key that exists except a rotation, by the leader.
//!
//! All replicas sign with the same key. It is not created by Helm, which would store it in the release history and replace it with every
//! rendering. [`crate::pki::ca_rotation`] decides about rotation: the leader writes the Secret, and all replicas read it every few seconds.

use parking_lot::RwLock;
use std::collections::BTreeMap;
use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use engram_identity::{Keys, Name, Refusals, Role, SigningRequest};
use engram_memory::ClusterId;
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use k8s_openapi::jiff::Timestamp;
use kube::api::PostParams;
use kube::{Api, Client};
use tokio::sync::{Mutex, watch};

use crate::context::Key;
use crate::kube::api_request::{RequestError, request};
use crate::kube::failure::{Cause, Failure};
use crate::names::{RENEW, RENEWAL, RENEWAL_SINCE};
use crate::pki::ca_rotation::{CaSecret, CaSet, ClusterCertificates, Stage, Step};

/// Keys of the Secret.
const CERTIFICATES: &str = "ca.pem";
const PRIVATE_KEY: &str = "ca.key";
const NEXT_KEY: &str = "next.key";
/// Polling interval of the Secret, which the operator may read but not watch: a small fraction of a rotation step.
const PERIOD: Duration = Duration::from_secs(5);

/// Why the CA cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CaError {
    #[error(transparent)]
    Request(#[from] RequestError),
    /// It is not available, for the reason in the text.
    #[error("failed to load the CA: {0}")]
    Unavailable(String),
}

impl Failure for CaError {
    fn root_cause(&self) -> Cause<'_> {
        match self {
            Self::Request(error) => error.root_cause(),
            Self::Unavailable(_) => Cause::CertificateAuthority,
        }
    }
}

/// The CA, loaded on first use: an operator without TLS clusters needs neither a CA nor permissions for its Secret.
pub(crate) struct Certificates {
    client: Client,
    /// Location of the Secret.
    place: Key,
    /// Overrides the clusters' certificate lifetime, for tests.
    lifetime: Option<Duration>,
    refusals: Arc<Refusals>,
    current: RwLock<Option<Arc<CaSet>>>,
    /// Held while the CA is read or created.
    making: Mutex<()>,
    changes: watch::Sender<()>,
}

impl Certificates {
    pub(crate) fn new(client: Client, place: Key, lifetime: Option<Duration>, refusals: Arc<Refusals>) -> Self {
        let (current, making, changes) = (RwLock::default(), Mutex::default(), watch::Sender::default());
        Self { client, place, lifetime, refusals, current, making, changes }
    }

    /// Returns the certificate lifetime of a cluster that requests `requested`.
    pub(crate) fn lifetime(&self, requested: Duration) -> Duration {
        self.lifetime.unwrap_or(requested)
    }

    /// Returns the loaded CAs; `None` before the first use.
    pub(crate) fn current(&self) -> Option<Arc<CaSet>> {
        self.current.read().clone()
    }

    /// Notifies of changes of the trusted or signing CAs.
    pub(crate) fn changes(&self) -> watch::Receiver<()> {
        self.changes.subscribe()
    }

    async fn load(&self) -> Result<Arc<CaSet>, CaError> {
        if let Some(current) = self.current() {
            return Ok(current);
        }
        let _making = self.making.lock().await;
        match self.current() {
            Some(current) => Ok(current),
            None => Ok(self.set(self.read_or_create().await?)),
        }
    }

    fn set(&self, secret: CaSet) -> Arc<CaSet> {
        let secret = Arc::new(secret);
        *self.current.write() = Some(Arc::clone(&secret));
        self.changes.send_replace(());
        secret
    }

    /// Returns the trust bundle as PEM; the signing CA comes first.
    pub(crate) async fn roots(&self) -> Result<String, CaError> {
        Ok(self.load().await?.signing.certificate().to_owned())
    }

    /// Issues the operator's own keys for a cluster with the trust bundle `provided_roots`, or the operator's CA if `None`.
    pub(crate) async fn keys(
        &self,
        cluster: &Key,
        id: ClusterId,
        lifetime: Duration,
        provided_roots: Option<&str>,
    ) -> Result<Arc<Keys>, CaError> {
        let cas = self.load().await?;
        let ca = &cas.signing;
        let name = Name::on_kubernetes(&cluster.namespace, &cluster.name, id, Role::Coordinator, 0);
        let issued = ca.issue(&name, SystemTime::now(), lifetime).map_err(|error| unusable(&error))?;
        let roots = provided_roots.unwrap_or_else(|| ca.certificate());
        Keys::from_pem(roots, &issued.pem, Arc::clone(&self.refusals)).map_err(|error| unusable(&error))
    }

    /// Renews keys that are due, or whose signing or trusted CAs have changed.
    pub(crate) fn renew(&self, keys: &Keys, lifetime: Duration, provided_roots: Option<&str>) {
        let Some(current) = self.current() else { return };
        let is_of_others = provided_roots.is_none() && keys.trusted_roots() != current.trusted;
        if keys.is_due(SystemTime::now()) || keys.root() != current.signing.root() || is_of_others {
            self.replace(keys, lifetime, provided_roots);
        }
    }

    /// Replaces keys.
    pub(crate) fn replace(&self, keys: &Keys, lifetime: Duration, provided_roots: Option<&str>) {
        let Some(current) = self.current() else { return };
        let ca = &current.signing;
        match ca.issue(&keys.name(), SystemTime::now(), lifetime) {
            Ok(issued) => keys.replace(provided_roots.unwrap_or_else(|| ca.certificate()), &issued.pem),
            Err(error) => tracing::warn!(%error, "failed to renew the operator's certificate"),
        }
    }

    /// Signs an approved request. Returns the certificate as PEM.
    pub(crate) async fn sign(
        &self,
        request: &SigningRequest,
        name: &Name,
        lifetime: Duration,
    ) -> Result<String, CaError> {
        let cas = self.load().await?;
        cas.signing.sign(request, name, SystemTime::now(), lifetime).map_err(|error| unusable(&error))
    }

    fn api(&self) -> Api<Secret> {
        Api::namespaced(self.client.clone(), &self.place.namespace)
    }

    async fn read(&self) -> Result<Option<Secret>, RequestError> {
        let name = &self.place.name;
        request(|| format!("read Secret {name}"), self.api().get_opt(name)).await
    }

    async fn read_or_create(&self) -> Result<CaSet, CaError> {
        let name = &self.place.name;
        if let Some(secret) = self.read().await? {
            return self.open(&secret);
        }
        let made = CaSecret::create(SystemTime::now()).map_err(|error| unusable(&error))?;
        let metadata = ObjectMeta { name: Some(name.clone()), ..ObjectMeta::default() };
        let secret = Secret { metadata, type_: Some("Opaque".into()), ..with_content(Secret::default(), &made) };
        match request(|| format!("create Secret {name}"), self.api().create(&PostParams::default(), &secret)).await {
            Ok(_) => {
                tracing::info!(secret = %self.place, "created the CA");
                made.open().map_err(|error| unusable(&error))
            }
            // Created by another replica.
            Err(error) if error.is_rejected_with(&[409]) => match self.read().await? {
                Some(secret) => self.open(&secret),
                None => {
                    Err(CaError::Unavailable(format!("Secret {} was created and deleted concurrently", self.place)))
                }
            },
            Err(error) => Err(error.into()),
        }
    }

    fn open(&self, secret: &Secret) -> Result<CaSet, CaError> {
        ca_secret(secret).open().map_err(|error| {
            CaError::Unavailable(format!(
                "Secret {} is invalid: {error}; restore it, or delete it to create a new CA",
                self.place
            ))
        })
    }

    /// Polls the Secret until `stop` completes, and as the leader advances a rotation according to the workers' reports from `clusters`.
    pub(crate) async fn follow<F: Future<Output = Result<Vec<ClusterCertificates>, RequestError>>>(
        &self,
        leads: impl Fn() -> bool,
        clusters: impl Fn() -> F,
        stop: impl Future<Output = ()>,
    ) -> anyhow::Result<()> {
        let following = async {
            loop {
                tokio::time::sleep(PERIOD).await;
                if let Err(error) = self.sync(&leads, &clusters).await {
                    tracing::warn!(%error, secret = %self.place, "failed to sync the CA Secret");
                }
            }
        };
        tokio::select! {
            () = stop => Ok(()),
            () = following => Ok(()),
        }
    }

    async fn sync<F: Future<Output = Result<Vec<ClusterCertificates>, RequestError>>>(
        &self,
        leads: impl Fn() -> bool,
        clusters: impl Fn() -> F,
    ) -> Result<(), CaError> {
        let Some(current) = self.current() else { return Ok(()) };
        // A deleted Secret affects new replicas only; this one keeps its CA.
        let Some(secret) = self.read().await? else { return Ok(()) };
        let current = if *current.secret() == ca_secret(&secret) { current } else { self.set(self.open(&secret)?) };
        let note = |name: &str| secret.metadata.annotations.as_ref().and_then(|all| all.get(name)).map(String::as_str);
        let requested = note(RENEW).is_some();
        if !leads() {
            return Ok(());
        }
        let (now, since) = (SystemTime::now(), note(RENEWAL_SINCE).and_then(|since| since.parse::<Timestamp>().ok()));
        let since = since.and_then(|since| now.duration_since(SystemTime::from(since)).ok()).unwrap_or_default();
        let clusters = if current.stage() == Stage::Stable { Vec::new() } else { clusters().await? };
        let (content, message) =
            match current.step(requested, since, &clusters, now).map_err(|error| unusable(&error))? {
                Step::Idle => return Ok(()),
                Step::Wait(why) if note(RENEWAL) == Some(&why) && note(RENEWAL_SINCE).is_some() => return Ok(()),
                Step::Wait(why) => (current.secret().clone(), why),
                Step::Replace(content) => (content, String::new()),
            };
        self.write(&secret, content, &message).await
    }

    /// Replaces the content of the Secret, unless it changed since it was read.
    async fn write(&self, secret: &Secret, content: CaSecret, message: &str) -> Result<(), CaError> {
        let opened = content.open().map_err(|error| unusable(&error))?;
        let mut secret = with_content(secret.clone(), opened.secret());
        let notes = secret.metadata.annotations.get_or_insert_default();
        let since = Timestamp::now().to_string();
        if message.is_empty() {
            match opened.stage() {
                Stage::Stable => {
                    notes.remove(RENEWAL_SINCE);
                    notes.insert(RENEWAL.to_owned(), format!("completed at {since}"));
                }
                stage => {
                    // A new request during a rotation starts another one afterwards.
                    if stage == Stage::Announced {
                        notes.remove(RENEW);
                    }
                    notes.insert(RENEWAL_SINCE.to_owned(), since);
                    notes.insert(RENEWAL.to_owned(), "started".to_owned());
                }
            }
            tracing::info!(secret = %self.place, stage = ?opened.stage(), signs = %opened.signing.root(), "CA rotation advanced");
        } else {
            notes.insert(RENEWAL.to_owned(), message.to_owned());
            // A user may have removed it.
            notes.entry(RENEWAL_SINCE.to_owned()).or_insert(since);
        }
        let name = &self.place.name;
        // Replaces the resource version that was read: of concurrent writers one fails.
        request(|| format!("replace Secret {name}"), self.api().replace(name, &PostParams::default(), &secret)).await?;
        if message.is_empty() {
            self.set(opened);
        }
        Ok(())
    }
}

fn ca_secret(secret: &Secret) -> CaSecret {
    let text = |key: &str| {
        let secret = secret.data.as_ref().and_then(|data| data.get(key));
        secret.map(|ByteString(bytes)| String::from_utf8_lossy(bytes).into_owned())
    };
    CaSecret {
        certificates: text(CERTIFICATES).unwrap_or_default(),
        key: text(PRIVATE_KEY).unwrap_or_default(),
        next_key: text(NEXT_KEY),
    }
}

fn with_content(mut secret: Secret, content: &CaSecret) -> Secret {
    let texts = [
        (CERTIFICATES, Some(&content.certificates)),
        (PRIVATE_KEY, Some(&content.key)),
        (NEXT_KEY, content.next_key.as_ref()),
    ];
    let data: BTreeMap<String, ByteString> = texts
        .into_iter()
        .filter_map(|(key, text)| Some((key.to_owned(), ByteString(text?.clone().into_bytes()))))
        .collect();
    secret.data = Some(data);
    secret
}

fn unusable(error: &engram_identity::Error) -> CaError {
    CaError::Unavailable(error.to_string())
}
