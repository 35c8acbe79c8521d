//! The pod's certificate: a key that it makes itself, for which the operator signs, and again before it ends. Or one that somebody gives, in a
//! Secret that is mounted: then it is waited for, and read again.
//!
//! ```text
//! token (kubelet) ─┐
//! roots (<c>-ca) ──┴─> ask a coordinator over TLS ─> worker.pem in memory ─> the worker looks at it every 2 s
//! ```
//!
//! Invariants: the key leaves this pod in no direction; a file that is good is never replaced by one that is not; a certificate that is good
//! is worked with while nobody signs another.

use super::settings::{Place, Settings};
use crate::options::{Tls, TokenFiles};
use anyhow::{Context as _, Result, anyhow};
use engram_identity::{Asked, Expected, Files, Keys, Name, Role, Roots, ask, connect_anonymously};
use engram_memory::ClusterId;
use engram_proto::v1::SignRequest;
use engram_proto::v1::certificate_service_client::CertificateServiceClient;
use hyper_util::rt::TokioIo;
use std::fs::OpenOptions;
use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};
use tokio::net::lookup_host;
use tokio::time::{sleep, timeout};
use tonic::Request;
use tonic::transport::Endpoint;
use tower::service_fn;

/// How long one coordinator may take.
const DEADLINE: Duration = Duration::from_secs(10);
/// First and longest wait after nobody signed, or who signed is not who signs now. The longest is a small part of what is left of the
/// shortest life at its renewal.
const ASK_AGAIN: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(10));
/// Between looks at a certificate that is given: as a worker looks.
const GIVEN_LOOK: Duration = engram_identity::LOOK;
/// Between looks at the clock: one that was set is followed.
const LOOK: Duration = Duration::from_secs(1);

/// Where the pod finds what it proves itself with, and where it puts its certificate.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Places {
    /// What is mounted of the cluster's authority: `ca.pem`, and for tokens of clients `jwks.json` and `issuer`.
    pub authority: PathBuf,
    /// A folder in memory; where certificates are given, with `tls.crt` and `tls.key`.
    pub folder: PathBuf,
    /// The pod's token for this purpose.
    pub token: PathBuf,
    /// Whose tokens clients may show instead of certificates.
    pub tokens: TokenFiles,
}

impl Places {
    /// Roots, and the pair that is written.
    pub fn files(&self) -> Files {
        Files::pair(self.authority.join("ca.pem"), self.folder.join("worker.pem"))
    }

    /// Roots, and certificate and key as a Secret of the type `kubernetes.io/tls` has them.
    fn given(&self) -> Files {
        let authority = self.authority.join("ca.pem");
        Files { authority, certificate: self.folder.join("tls.crt"), key: self.folder.join("tls.key") }
    }
}

/// Who gets certificates for a worker.
#[derive(Debug, Clone)]
pub struct Identity {
    pub(super) name: Name,
    pub(super) places: Places,
    /// Whether it is given, and nobody asked.
    pub(super) is_given: bool,
    /// Who signs, each as `host:port`.
    pub(super) coordinators: Vec<String>,
}

impl Settings {
    /// For whom to get a certificate, with what is at `places`; `None` where the cluster has none.
    ///
    /// # Errors
    /// There is no namespace to name.
    pub fn identity(&self, place: &Place, places: impl FnOnce() -> Places) -> Result<Option<Identity>> {
        if !self.has_certificates {
            return Ok(None);
        }
        let namespace = place.namespace.as_deref();
        let namespace =
            namespace.context("POD_NAMESPACE is not set; allowed: the pod's namespace, for its certificate")?;
        let name = Name::on_kubernetes(namespace, &place.cluster, self.cluster, Role::Worker, place.ordinal);
        let is_given = self.is_given_certificates;
        Ok(Some(Identity { name, places: places(), is_given, coordinators: self.coordinators.clone() }))
    }
}

impl Identity {
    /// Waits until there is a certificate: one of a container before in this pod, while it is good, or a new one.
    pub(super) async fn obtain(&self) -> Arc<Keys> {
        let (mut wait, longest) = ASK_AGAIN;
        let mut told = String::new();
        loop {
            let error = match self.open() {
                Ok(keys) => return keys,
                Err(error) if self.is_given => format!("{:#}", anyhow!(error)),
                Err(_) => match self.renew().await {
                    Ok(()) => continue,
                    Err(error) => format!("{error:#}"),
                },
            };
            if error != told {
                tracing::warn!(error, given = self.is_given, "no certificate yet; trying again");
                // For whoever looks at the pod when the kubelet has given up on it.
                if self.is_given {
                    super::tell_kubelet(&format!("no certificate yet: {error}"));
                }
                told = error;
            }
            sleep(jittered(wait)).await;
            wait = (wait * 2).min(longest);
        }
    }

    /// What the worker is told.
    pub(super) fn tls(&self, keys: &Keys) -> Tls {
        Tls { tokens: Some(self.places.tokens.clone()), ..Tls::of(self.files(), keys.lifetime()) }
    }

    fn files(&self) -> Files {
        if self.is_given { self.places.given() } else { self.places.files() }
    }

    /// Whose its certificate must be.
    const fn expected(&self) -> Expected {
        Expected { role: Some(Role::Worker), ordinal: self.name.ordinal }
    }

    fn open(&self) -> Result<Arc<Keys>, engram_identity::Error> {
        Keys::open_for(self.files(), self.name.cluster, self.expected())
    }

    /// Replaces the certificate whenever it is due. Never ends.
    pub(super) async fn keep(self, keys: Arc<Keys>) {
        let (first, longest) = ASK_AGAIN;
        let mut wait = first;
        loop {
            if self.is_given {
                sleep(GIVEN_LOOK).await;
                keys.look();
                continue;
            }
            if !is_due(&keys) {
                wait = first;
                sleep(LOOK).await;
                // For others that are believed.
                keys.look();
                continue;
            }
            if let Err(error) = self.renew().await {
                let left = keys.until().duration_since(SystemTime::now()).unwrap_or_default();
                let error = format!("{error:#}");
                tracing::warn!(error, left_s = left.as_secs(), "the certificate was not renewed; asking again");
            }
            keys.look();
            // Whoever signed may not have read of the next authority yet; and by a clock that is ahead the new one is due already.
            if is_due(&keys) {
                sleep(jittered(wait)).await;
                wait = (wait * 2).min(longest);
            }
        }
    }

    /// Makes a key, has it signed and puts both in place.
    async fn renew(&self) -> Result<()> {
        let files = self.places.files();
        let roots = tokio::fs::read_to_string(&files.authority).await;
        let roots = roots.with_context(|| format!("failed to read {}", files.authority.display()))?;
        let token = tokio::fs::read_to_string(&self.places.token).await;
        let token = token.with_context(|| format!("failed to read {}", self.places.token.display()))?;
        let Asked { key, request } = ask(&self.name)?;
        let certificate = self.signed(&Roots::parse(roots.as_bytes())?, token.trim(), &request).await?;
        let pair = key + &certificate;
        // What is of no use is not put in the place of what is.
        let got = Keys::given(&roots, &pair, Arc::default()).context("the certificate that came is of no use")?;
        self.expected().check(self.name.cluster, &got.name())?;
        replace(&files.certificate, &pair).with_context(|| format!("failed to write {}", files.certificate.display()))
    }

    /// Asks one coordinator after the other, at every address that their names stand for.
    async fn signed(&self, roots: &Roots, token: &str, request: &[u8]) -> Result<String> {
        let mut failed = anyhow!("nobody is known by {}", self.coordinators.join(", "));
        for name in &self.coordinators {
            let found = match lookup_host(name).await {
                Ok(found) => found.collect::<Vec<_>>(),
                Err(error) => {
                    failed = anyhow!(error).context(format!("{name} is not known"));
                    continue;
                }
            };
            for address in found {
                let address = address.to_string();
                let signed = sign(roots, self.name.cluster, &address, token, request);
                match timeout(DEADLINE, signed).await {
                    Ok(Ok(certificate)) => return Ok(certificate),
                    Ok(Err(error)) => failed = error,
                    Err(_) => failed = anyhow!("{address} does not answer"),
                }
            }
        }
        Err(failed)
    }
}

async fn sign(roots: &Roots, cluster: ClusterId, address: &str, token: &str, request: &[u8]) -> Result<String> {
    // Where names say nothing, the certificate says whom the token is given to.
    let stream = connect_anonymously(roots, cluster, Expected::any(Role::Coordinator), address).await?;
    let mut stream = Some(stream);
    let connect = service_fn(move |_| {
        let stream = stream.take().ok_or_else(|| std::io::Error::other("the connection has ended"));
        async move { stream.map(TokioIo::new) }
    });
    let channel = Endpoint::from_static("http://coordinator").connect_with_connector(connect).await?;
    let mut call = Request::new(SignRequest { request: request.to_vec().into() });
    let bearer = format!("Bearer {token}").parse().context("the token is not what a token looks like")?;
    call.metadata_mut().insert("authorization", bearer);
    let signed = CertificateServiceClient::new(channel).sign(call).await;
    let signed = signed.map_err(|status| anyhow!("{address} does not sign: {}", status.message()))?;
    Ok(signed.into_inner().certificate)
}

/// Whether another certificate is to be asked for.
fn is_due(keys: &Keys) -> bool {
    keys.renew_at() <= SystemTime::now() || !is_of_who_signs_now(keys)
}

/// Whether who signed is who signs now: the first of those that are published. An operator whose authority is followed by another goes on when
/// all workers have certificates of that one.
fn is_of_who_signs_now(keys: &Keys) -> bool {
    keys.believed().first().is_none_or(|first| *first == keys.root())
}

/// Pods that were started together do not come back together.
fn jittered(wait: Duration) -> Duration {
    wait.mul_f64(rand::random_range(0.5..1.0))
}

/// Writes a file that nobody else can read, in one step.
fn replace(path: &Path, text: &str) -> std::io::Result<()> {
    let temporary = path.with_extension("tmp");
    match std::fs::remove_file(&temporary) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    // New, so that its mode is this one.
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&temporary)?;
    file.write_all(text.as_bytes())?;
    std::fs::rename(&temporary, path)
}

#[cfg(test)]
mod tests {
    use super::*;
    use engram_identity::{Authority, Realm};
    use serde_json::json;

    fn places() -> Places {
        let tokens = TokenFiles { keys: "/ca/jwks.json".into(), issuer: "/ca/issuer".into(), access: "/a.json".into() };
        Places { authority: "/ca".into(), folder: "/run".into(), token: "/token".into(), tokens }
    }

    #[test]
    fn a_pod_whose_cluster_has_certificates_asks_for_one_under_its_own_name() {
        let mut file = json!({
            "clusterId": "0f6c1d528a534a0a9d1e2f8f5f0f7a11",
            "coordinators": ["engram-coordinator.engram.svc:7440"],
            "replicationFactor": 2,
        });
        let settings = |file: &serde_json::Value| Settings::parse(&file.to_string()).unwrap();
        let place = Place {
            cluster: "words".into(),
            ordinal: 12,
            namespace: Some("research".into()),
            address: [10, 244, 2, 7].into(),
        };
        assert!(settings(&file).identity(&place, || unreachable!("it has none")).unwrap().is_none());
        file["tls"] = json!({ "mode": "Auto", "certificateLifetime": "1h", "fieldOfALaterOperator": 1 });
        let secured = settings(&file);
        let identity = secured.identity(&place, places).unwrap().unwrap();
        assert_eq!(identity.coordinators, ["engram-coordinator.engram.svc:7440"]);
        assert_eq!(
            identity.name.to_string(),
            "spiffe://engram.dev/ns/research/cluster/words/0f6c1d528a534a0a9d1e2f8f5f0f7a11/worker/12"
        );
        let nowhere = Place { namespace: None, ..place };
        assert!(secured.identity(&nowhere, places).unwrap_err().to_string().contains("POD_NAMESPACE"));
        assert!(!identity.is_given);
        file["tls"] = json!({ "mode": "Secret", "secretName": "words-tls" });
        let place = Place { namespace: Some("research".into()), ..nowhere };
        assert!(settings(&file).identity(&place, places).unwrap().unwrap().is_given);
    }

    #[test]
    fn a_certificate_is_replaced_when_another_authority_signs() {
        let name = Name::on_kubernetes("research", "words", ClusterId(7), Role::Worker, 1);
        let now = SystemTime::now();
        let [old, new] = [0; 2].map(|_| Authority::create(Realm::Operator, now).unwrap());
        let is_current = |roots: [&Authority; 2]| {
            let pair = old.issue(&name, now, Duration::from_secs(3_600)).unwrap().pem;
            let keys = Keys::given(&roots.map(Authority::certificate).concat(), &pair, Arc::default()).unwrap();
            assert_eq!(keys.believed(), roots.map(Authority::root));
            assert_eq!(keys.root(), old.root());
            is_of_who_signs_now(&keys)
        };
        assert!(is_current([&old, &new]), "the next one does not sign yet");
        assert!(!is_current([&new, &old]));
    }

    #[tokio::test]
    async fn a_certificate_that_is_given_is_waited_for_and_stands_for_any_worker_of_its_cluster() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        let authority = Authority::create(Realm::Operator, SystemTime::now()).unwrap();
        let give = |name: &Name| {
            let pair = authority.issue(name, SystemTime::now(), Duration::from_secs(3_600)).unwrap().pem;
            std::fs::write(path("tls.crt"), &pair).unwrap();
            std::fs::write(path("tls.key"), &pair).unwrap();
        };
        std::fs::write(path("ca.pem"), authority.certificate()).unwrap();
        let worker = |ordinal| Name::on_kubernetes("research", "words", ClusterId(7), Role::Worker, ordinal);
        let identity = Identity {
            name: worker(12),
            places: Places { authority: folder.path().into(), folder: folder.path().into(), ..places() },
            is_given: true,
            coordinators: Vec::new(),
        };
        assert!(identity.open().unwrap_err().to_string().contains("tls.crt"), "there is none");
        give(&worker(3));
        assert!(identity.open().unwrap_err().to_string().contains("the certificate is of worker 3"));
        let shared = Name::shared_by_workers("research", "words", ClusterId(7));
        let giving = async {
            sleep(Duration::from_millis(100)).await;
            give(&shared);
        };
        let (keys, ()) = tokio::join!(identity.obtain(), giving);
        assert_eq!(keys.name(), shared);
        assert_eq!(identity.tls(&keys).files.key, path("tls.key"));
    }
}
