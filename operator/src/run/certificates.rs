//! The operator's authority: a key in a Secret that whichever replica comes first makes, and the certificates that it signs.
//!
//! All replicas sign with the one key. Nobody but operators may read it, and Helm never knows it: a rendered key would lie in the history
//! of releases, and every rendering would make another.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use engram_identity::{Authority, Keys, Name, Realm, Refusals, Role, SigningRequest};
use engram_memory::ClusterId;
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::PostParams;
use kube::{Api, Client};
use tokio::sync::OnceCell;

use super::Key;
use super::asking::{Error, ask};

/// Keys of the Secret.
const CERTIFICATE: &str = "ca.pem";
const PRIVATE_KEY: &str = "ca.key";

/// The authority, once it is needed: operators without clusters that have certificates need none, nor a right to keep one.
pub(super) struct Certificates {
    client: Client,
    /// Where it is kept.
    place: Key,
    /// Instead of what clusters say: tests cannot wait for days.
    lifetime: Option<Duration>,
    refusals: Arc<Refusals>,
    authority: OnceCell<Authority>,
}

impl Certificates {
    pub(super) fn new(client: Client, place: Key, lifetime: Option<Duration>, refusals: Arc<Refusals>) -> Self {
        Self { client, place, lifetime, refusals, authority: OnceCell::new() }
    }

    /// How long a certificate is good, where a cluster says so long.
    pub(super) fn lifetime(&self, asked: Duration) -> Duration {
        self.lifetime.unwrap_or(asked)
    }

    async fn authority(&self) -> Result<&Authority, Error> {
        self.authority.get_or_try_init(|| self.find_or_make()).await
    }

    /// What everybody believes, as PEM.
    pub(super) async fn roots(&self) -> Result<String, Error> {
        Ok(self.authority().await?.certificate().to_owned())
    }

    /// Keys of the operator itself, for one of its clusters, whose processes believe `given`; where that is nothing, this authority alone.
    pub(super) async fn keys(
        &self,
        cluster: &Key,
        id: ClusterId,
        lifetime: Duration,
        given: Option<&str>,
    ) -> Result<Arc<Keys>, Error> {
        let authority = self.authority().await?;
        let name = Name::on_kubernetes(&cluster.namespace, &cluster.name, id, Role::Coordinator, 0);
        let issued = authority.issue(&name, SystemTime::now(), lifetime).map_err(|error| unusable(&error))?;
        let roots = given.unwrap_or_else(|| authority.certificate());
        Keys::given(roots, &issued.pem, Arc::clone(&self.refusals)).map_err(|error| unusable(&error))
    }

    /// Replaces keys that are due.
    pub(super) fn renew(&self, keys: &Keys, lifetime: Duration, given: Option<&str>) {
        if keys.renew_at() <= SystemTime::now() {
            self.replace(keys, lifetime, given);
        }
    }

    /// Replaces keys, as when others are believed.
    pub(super) fn replace(&self, keys: &Keys, lifetime: Duration, given: Option<&str>) {
        let Some(authority) = self.authority.get() else { return };
        match authority.issue(&keys.name(), SystemTime::now(), lifetime) {
            Ok(issued) => keys.replace(given.unwrap_or_else(|| authority.certificate()), &issued.pem),
            Err(error) => tracing::warn!(%error, "a certificate of this operator was not renewed"),
        }
    }

    /// Signs what was decided to be signed; the certificate as PEM.
    pub(super) async fn sign(
        &self,
        request: &SigningRequest,
        name: &Name,
        lifetime: Duration,
    ) -> Result<String, Error> {
        self.authority().await?.sign(request, name, SystemTime::now(), lifetime).map_err(|error| unusable(&error))
    }

    async fn find_or_make(&self) -> Result<Authority, Error> {
        let Key { namespace, name } = &self.place;
        let api: Api<Secret> = Api::namespaced(self.client.clone(), namespace);
        let read = async || ask(|| format!("read Secret {name}"), api.get_opt(name)).await;
        if let Some(found) = read().await? {
            return self.open(&found);
        }
        let made = Authority::create(Realm::Operator, SystemTime::now()).map_err(|error| unusable(&error))?;
        let data = [(CERTIFICATE, made.certificate().to_owned()), (PRIVATE_KEY, made.key())];
        let data: BTreeMap<String, ByteString> =
            data.into_iter().map(|(key, text)| (key.to_owned(), ByteString(text.into_bytes()))).collect();
        let metadata = ObjectMeta { name: Some(name.clone()), ..ObjectMeta::default() };
        let secret = Secret { metadata, data: Some(data), type_: Some("Opaque".into()), ..Secret::default() };
        match ask(|| format!("create Secret {name}"), api.create(&PostParams::default(), &secret)).await {
            Ok(_) => {
                tracing::info!(secret = %self.place, "made the authority");
                Ok(made)
            }
            // Another replica was faster.
            Err(Error::Api { source: kube::Error::Api(status), .. }) if status.code == 409 => match read().await? {
                Some(found) => self.open(&found),
                None => Err(Error::Authority(format!("Secret {} came and went", self.place))),
            },
            Err(error) => Err(error),
        }
    }

    fn open(&self, secret: &Secret) -> Result<Authority, Error> {
        let text = |key: &str| {
            let found = secret.data.as_ref().and_then(|data| data.get(key));
            found.map(|ByteString(bytes)| String::from_utf8_lossy(bytes).into_owned()).unwrap_or_default()
        };
        Authority::open(Realm::Operator, &text(PRIVATE_KEY), &text(CERTIFICATE)).map_err(|error| {
            Error::Authority(format!(
                "Secret {} is of no use: {error}; restore it, or delete it for a new one",
                self.place
            ))
        })
    }
}

fn unusable(error: &engram_identity::Error) -> Error {
    Error::Authority(error.to_string())
}
