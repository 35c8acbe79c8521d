//! The operator's authority: a key in a Secret that whichever replica comes first makes, and the certificates that it signs.
//!
//! All replicas sign with the one key. Nobody but operators may read it, and Helm never knows it: a rendered key would lie in the history
//! of releases, and every rendering would make another. [`crate::succession`] decides when another takes its place: the leader writes that, and all
//! replicas read it every few seconds.

use std::collections::BTreeMap;
use std::future::Future;
use std::sync::{Arc, PoisonError, RwLock};
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

use super::Key;
use super::asking::{Error, ask};
use crate::names::{RENEW, RENEWAL, RENEWAL_SINCE};
use crate::succession::{Authorities, Held, Stage, Step, Told};

/// Keys of the Secret.
const CERTIFICATES: &str = "ca.pem";
const PRIVATE_KEY: &str = "ca.key";
const NEXT_KEY: &str = "next.key";
/// Between looks at the Secret: a small part of what a step of a succession takes.
const PERIOD: Duration = Duration::from_secs(5);

/// The authority, once it is needed: operators without clusters that have certificates need none, nor a right to keep one.
pub(super) struct Certificates {
    client: Client,
    /// Where it is kept.
    place: Key,
    /// Instead of what clusters say: tests cannot wait for days.
    lifetime: Option<Duration>,
    refusals: Arc<Refusals>,
    known: RwLock<Option<Arc<Authorities>>>,
    /// Held by whoever looks for it or makes it.
    making: Mutex<()>,
    changes: watch::Sender<()>,
}

impl Certificates {
    pub(super) fn new(client: Client, place: Key, lifetime: Option<Duration>, refusals: Arc<Refusals>) -> Self {
        let (known, making, changes) = (RwLock::default(), Mutex::default(), watch::Sender::default());
        Self { client, place, lifetime, refusals, known, making, changes }
    }

    /// How long a certificate is good, where a cluster says so long.
    pub(super) fn lifetime(&self, asked: Duration) -> Duration {
        self.lifetime.unwrap_or(asked)
    }

    /// Who signs, and who is believed; `None` as long as nobody needed it.
    pub(super) fn known(&self) -> Option<Arc<Authorities>> {
        self.known.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Every time that others are believed, or somebody else signs.
    pub(super) fn changes(&self) -> watch::Receiver<()> {
        self.changes.subscribe()
    }

    async fn authorities(&self) -> Result<Arc<Authorities>, Error> {
        if let Some(known) = self.known() {
            return Ok(known);
        }
        let _making = self.making.lock().await;
        match self.known() {
            Some(known) => Ok(known),
            None => Ok(self.take(self.find_or_make().await?)),
        }
    }

    fn take(&self, found: Authorities) -> Arc<Authorities> {
        let found = Arc::new(found);
        *self.known.write().unwrap_or_else(PoisonError::into_inner) = Some(Arc::clone(&found));
        self.changes.send_replace(());
        found
    }

    /// What everybody believes, as PEM; who signs comes first.
    pub(super) async fn roots(&self) -> Result<String, Error> {
        Ok(self.authorities().await?.signing.certificate().to_owned())
    }

    /// Keys of the operator itself, for one of its clusters, whose processes believe `given`; where that is nothing, this authority alone.
    pub(super) async fn keys(
        &self,
        cluster: &Key,
        id: ClusterId,
        lifetime: Duration,
        given: Option<&str>,
    ) -> Result<Arc<Keys>, Error> {
        let authorities = self.authorities().await?;
        let authority = &authorities.signing;
        let name = Name::on_kubernetes(&cluster.namespace, &cluster.name, id, Role::Coordinator, 0);
        let issued = authority.issue(&name, SystemTime::now(), lifetime).map_err(|error| unusable(&error))?;
        let roots = given.unwrap_or_else(|| authority.certificate());
        Keys::given(roots, &issued.pem, Arc::clone(&self.refusals)).map_err(|error| unusable(&error))
    }

    /// Replaces keys that are due, that another signs now, or that rest on others than are believed now.
    pub(super) fn renew(&self, keys: &Keys, lifetime: Duration, given: Option<&str>) {
        let Some(known) = self.known() else { return };
        let is_of_others = given.is_none() && keys.believed() != known.believed;
        if keys.renew_at() <= SystemTime::now() || keys.root() != known.signing.root() || is_of_others {
            self.replace(keys, lifetime, given);
        }
    }

    /// Replaces keys, as when others are believed.
    pub(super) fn replace(&self, keys: &Keys, lifetime: Duration, given: Option<&str>) {
        let Some(known) = self.known() else { return };
        let authority = &known.signing;
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
        let authorities = self.authorities().await?;
        authorities.signing.sign(request, name, SystemTime::now(), lifetime).map_err(|error| unusable(&error))
    }

    fn api(&self) -> Api<Secret> {
        Api::namespaced(self.client.clone(), &self.place.namespace)
    }

    async fn read(&self) -> Result<Option<Secret>, Error> {
        let name = &self.place.name;
        ask(|| format!("read Secret {name}"), self.api().get_opt(name)).await
    }

    async fn find_or_make(&self) -> Result<Authorities, Error> {
        let name = &self.place.name;
        if let Some(found) = self.read().await? {
            return self.open(&found);
        }
        let made = Held::create(SystemTime::now()).map_err(|error| unusable(&error))?;
        let metadata = ObjectMeta { name: Some(name.clone()), ..ObjectMeta::default() };
        let secret = Secret { metadata, type_: Some("Opaque".into()), ..filled(Secret::default(), &made) };
        match ask(|| format!("create Secret {name}"), self.api().create(&PostParams::default(), &secret)).await {
            Ok(_) => {
                tracing::info!(secret = %self.place, "made the authority");
                made.open().map_err(|error| unusable(&error))
            }
            // Another replica was faster.
            Err(Error::Api { source: kube::Error::Api(status), .. }) if status.code == 409 => {
                match self.read().await? {
                    Some(found) => self.open(&found),
                    None => Err(Error::Authority(format!("Secret {} came and went", self.place))),
                }
            }
            Err(error) => Err(error),
        }
    }

    fn open(&self, secret: &Secret) -> Result<Authorities, Error> {
        held(secret).open().map_err(|error| {
            Error::Authority(format!(
                "Secret {} is of no use: {error}; restore it, or delete it for a new one",
                self.place
            ))
        })
    }

    /// Looks at the Secret every few seconds, until `stop` completes: what another replica wrote is used, and where this one `leads` it carries a
    /// succession on, by what `clusters` says of the workers.
    pub(super) async fn follow<F: Future<Output = Result<Vec<Told>, Error>>>(
        &self,
        leads: impl Fn() -> bool,
        clusters: impl Fn() -> F,
        stop: impl Future<Output = ()>,
    ) -> anyhow::Result<()> {
        let following = async {
            loop {
                tokio::time::sleep(PERIOD).await;
                if let Err(error) = self.look(&leads, &clusters).await {
                    tracing::warn!(%error, secret = %self.place, "the authority was not looked at");
                }
            }
        };
        tokio::select! {
            () = stop => Ok(()),
            () = following => Ok(()),
        }
    }

    async fn look<F: Future<Output = Result<Vec<Told>, Error>>>(
        &self,
        leads: impl Fn() -> bool,
        clusters: impl Fn() -> F,
    ) -> Result<(), Error> {
        let Some(known) = self.known() else { return Ok(()) };
        // One that was deleted is gone for who starts anew; who has it goes on with it.
        let Some(secret) = self.read().await? else { return Ok(()) };
        let known = if *known.held() == held(&secret) { known } else { self.take(self.open(&secret)?) };
        let note = |name: &str| secret.metadata.annotations.as_ref().and_then(|all| all.get(name)).map(String::as_str);
        let asked = note(RENEW).is_some();
        if !leads() {
            return Ok(());
        }
        let (now, since) = (SystemTime::now(), note(RENEWAL_SINCE).and_then(|since| since.parse::<Timestamp>().ok()));
        let since = since.and_then(|since| now.duration_since(SystemTime::from(since)).ok()).unwrap_or_default();
        let clusters = if known.stage() == Stage::Settled { Vec::new() } else { clusters().await? };
        let (held, told) = match known.step(asked, since, &clusters, now).map_err(|error| unusable(&error))? {
            Step::Rest => return Ok(()),
            Step::Wait(why) if note(RENEWAL) == Some(&why) && note(RENEWAL_SINCE).is_some() => return Ok(()),
            Step::Wait(why) => (known.held().clone(), why),
            Step::Become(held) => (held, String::new()),
        };
        self.write(&secret, held, &told).await
    }

    /// Writes what the Secret holds from now on, if nobody else has changed it.
    async fn write(&self, secret: &Secret, held: Held, told: &str) -> Result<(), Error> {
        let opened = held.open().map_err(|error| unusable(&error))?;
        let mut secret = filled(secret.clone(), opened.held());
        let notes = secret.metadata.annotations.get_or_insert_default();
        let since = Timestamp::now().to_string();
        if told.is_empty() {
            match opened.stage() {
                Stage::Settled => {
                    notes.remove(RENEWAL_SINCE);
                    notes.insert(RENEWAL.to_owned(), format!("done at {since}"));
                }
                stage => {
                    // Who asks again meanwhile gets another one after this.
                    if stage == Stage::Announced {
                        notes.remove(RENEW);
                    }
                    notes.insert(RENEWAL_SINCE.to_owned(), since);
                    notes.insert(RENEWAL.to_owned(), "begun".to_owned());
                }
            }
            tracing::info!(secret = %self.place, stage = ?opened.stage(), signs = %opened.signing.root(), "the authority changes");
        } else {
            notes.insert(RENEWAL.to_owned(), told.to_owned());
            // Somebody may have taken it away.
            notes.entry(RENEWAL_SINCE.to_owned()).or_insert(since);
        }
        let name = &self.place.name;
        // With the resource version that was read: of two that write it one is refused.
        ask(|| format!("replace Secret {name}"), self.api().replace(name, &PostParams::default(), &secret)).await?;
        if told.is_empty() {
            self.take(opened);
        }
        Ok(())
    }
}

fn held(secret: &Secret) -> Held {
    let text = |key: &str| {
        let found = secret.data.as_ref().and_then(|data| data.get(key));
        found.map(|ByteString(bytes)| String::from_utf8_lossy(bytes).into_owned())
    };
    Held {
        certificates: text(CERTIFICATES).unwrap_or_default(),
        key: text(PRIVATE_KEY).unwrap_or_default(),
        next_key: text(NEXT_KEY),
    }
}

fn filled(mut secret: Secret, held: &Held) -> Secret {
    let texts =
        [(CERTIFICATES, Some(&held.certificates)), (PRIVATE_KEY, Some(&held.key)), (NEXT_KEY, held.next_key.as_ref())];
    let data: BTreeMap<String, ByteString> = texts
        .into_iter()
        .filter_map(|(key, text)| Some((key.to_owned(), ByteString(text?.clone().into_bytes()))))
        .collect();
    secret.data = Some(data);
    secret
}

fn unusable(error: &engram_identity::Error) -> Error {
    Error::Authority(error.to_string())
}
