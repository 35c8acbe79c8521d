//! The pod's certificate: either the pod creates a key and the operator signs its certificate, which is renewed before it expires;
//! or both are provided in a mounted Secret, which is watched.
//!
//! ```text
//! token (kubelet) ─┐
//! roots (<c>-ca) ──┴─> certificate request over TLS ─> worker.pem in memory ─> reloaded by the worker every 2 s
//! ```
//!
//! Invariants: the key never leaves this pod; a valid file is never replaced by an invalid one; a valid certificate stays in use
//! while no coordinator signs another.

use super::settings::{PodInfo, Settings};
use crate::options::{Tls, TokenFiles};
use anyhow::{Context as _, Result, anyhow};
use engram_identity::{
    CertificateRequest, ExpectedPeer, Files, Keys, Name, Role, Roots, connect_anonymously, create_request,
};
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

/// Deadline for one coordinator.
const DEADLINE: Duration = Duration::from_secs(10);
/// First and longest interval between requests. The longest is a small part of the remaining lifetime of the shortest-lived
/// certificate at its renewal.
const RETRY_INTERVALS: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(10));
/// Interval between checks of a provided certificate: that of a worker.
const MOUNTED_CHECK_INTERVAL: Duration = engram_identity::RELOAD_INTERVAL;
/// Interval between checks of the clock, which may be set.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// Paths of the pod's credentials.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IdentityPaths {
    /// Mount path of the cluster's CA: `ca.pem`, and for client tokens `jwks.json` and `issuer`.
    pub ca: PathBuf,
    /// A folder in memory; for provided certificates the mount path of `tls.crt` and `tls.key`.
    pub folder: PathBuf,
    /// Token for certificate requests.
    pub token: PathBuf,
    /// Files for the verification of client tokens.
    pub tokens: TokenFiles,
}

impl IdentityPaths {
    /// Returns the roots, and the pair that is written.
    pub fn files(&self) -> Files {
        Files::pair(self.ca.join("ca.pem"), self.folder.join("worker.pem"))
    }

    /// Returns the roots, and certificate and key in the layout of a Secret of type `kubernetes.io/tls`.
    fn mounted_files(&self) -> Files {
        let ca = self.ca.join("ca.pem");
        Files { trust_bundle: ca, certificate: self.folder.join("tls.crt"), key: self.folder.join("tls.key") }
    }
}

/// Obtains certificates for a worker.
#[derive(Debug, Clone)]
pub struct Identity {
    pub(super) name: Name,
    pub(super) paths: IdentityPaths,
    /// Whether the certificate is mounted and not requested.
    pub(super) is_mounted: bool,
    /// Coordinators that sign, each as `host:port`.
    pub(super) coordinators: Vec<String>,
}

impl Settings {
    /// Returns the identity to obtain a certificate for, with the paths of `places`; `None` if the cluster has none.
    ///
    /// # Errors
    /// The namespace of the pod is missing.
    pub fn identity(&self, pod_info: &PodInfo, paths: impl FnOnce() -> IdentityPaths) -> Result<Option<Identity>> {
        if !self.has_certificates {
            return Ok(None);
        }
        let namespace = pod_info.namespace.as_deref();
        let namespace =
            namespace.context("POD_NAMESPACE is not set; allowed: the pod's namespace, for its certificate")?;
        let name = Name::on_kubernetes(namespace, &pod_info.cluster, self.cluster, Role::Worker, pod_info.ordinal);
        let is_mounted = self.has_mounted_certificates;
        Ok(Some(Identity { name, paths: paths(), is_mounted, coordinators: self.coordinators.clone() }))
    }
}

impl Identity {
    /// Waits for a certificate: a valid one of a previous container in this pod, or a new one.
    pub(super) async fn obtain(&self) -> Arc<Keys> {
        let (mut wait, longest) = RETRY_INTERVALS;
        let mut last_error = String::new();
        loop {
            let error = match self.open() {
                Ok(keys) => return keys,
                Err(error) if self.is_mounted => format!("{:#}", anyhow!(error)),
                Err(_) => match self.renew().await {
                    Ok(()) => continue,
                    Err(error) => format!("{error:#}"),
                },
            };
            if error != last_error {
                tracing::warn!(error, is_mounted = self.is_mounted, "no valid certificate yet; retrying");
                // Shown by the kubelet once it gives up on the container.
                if self.is_mounted {
                    super::write_termination_message(&format!("no valid certificate yet: {error}"));
                }
                last_error = error;
            }
            sleep(jittered(wait)).await;
            wait = (wait * 2).min(longest);
        }
    }

    /// Returns the TLS options of the worker.
    pub(super) fn tls(&self, keys: &Keys) -> Tls {
        Tls { tokens: Some(self.paths.tokens.clone()), ..Tls::of(self.files(), keys.lifetime()) }
    }

    fn files(&self) -> Files {
        if self.is_mounted { self.paths.mounted_files() } else { self.paths.files() }
    }

    /// Returns the identity that the certificate must have.
    const fn expected(&self) -> ExpectedPeer {
        ExpectedPeer { role: Some(Role::Worker), ordinal: self.name.ordinal }
    }

    fn open(&self) -> Result<Arc<Keys>, engram_identity::Error> {
        Keys::open_for(self.files(), self.name.cluster, self.expected())
    }

    /// Renews the certificate when it is due. Never returns.
    pub(super) async fn renew_when_due(self, keys: Arc<Keys>) {
        let (first, longest) = RETRY_INTERVALS;
        let mut wait = first;
        loop {
            if self.is_mounted {
                sleep(MOUNTED_CHECK_INTERVAL).await;
                keys.reload();
                continue;
            }
            if !is_due(&keys) {
                wait = first;
                sleep(CHECK_INTERVAL).await;
                // Picks up changes of the trust bundle.
                keys.reload();
                continue;
            }
            if let Err(error) = self.renew().await {
                let left = keys.expires_at().duration_since(SystemTime::now()).unwrap_or_default();
                let error = format!("{error:#}");
                tracing::warn!(error, left_s = left.as_secs(), "failed to renew certificate; retrying");
            }
            keys.reload();
            // The signer may not know the next CA yet, and by a clock that is ahead the new certificate is due already.
            if is_due(&keys) {
                sleep(jittered(wait)).await;
                wait = (wait * 2).min(longest);
            }
        }
    }

    /// Creates a key, requests a certificate and installs both.
    async fn renew(&self) -> Result<()> {
        let files = self.paths.files();
        let roots = tokio::fs::read_to_string(&files.trust_bundle).await;
        let roots = roots.with_context(|| format!("failed to read {}", files.trust_bundle.display()))?;
        let token = tokio::fs::read_to_string(&self.paths.token).await;
        let token = token.with_context(|| format!("failed to read {}", self.paths.token.display()))?;
        let CertificateRequest { key, request } = create_request(&self.name)?;
        let certificate = self.request_certificate(&Roots::parse(roots.as_bytes())?, token.trim(), &request).await?;
        let pair = key + &certificate;
        // An invalid certificate never replaces a valid one.
        let issued = Keys::from_pem(&roots, &pair, Arc::default()).context("the issued certificate is invalid")?;
        self.expected().check(self.name.cluster, &issued.name())?;
        replace(&files.certificate, &pair).with_context(|| format!("failed to write {}", files.certificate.display()))
    }

    /// Requests a certificate from one coordinator after the other, at every address of their names.
    async fn request_certificate(&self, roots: &Roots, token: &str, request: &[u8]) -> Result<String> {
        let mut last_error = anyhow!("no addresses for {}", self.coordinators.join(", "));
        for name in &self.coordinators {
            let addresses = match lookup_host(name).await {
                Ok(addresses) => addresses.collect::<Vec<_>>(),
                Err(error) => {
                    last_error = anyhow!(error).context(format!("failed to resolve {name}"));
                    continue;
                }
            };
            for address in addresses {
                let address = address.to_string();
                let signed = sign(roots, self.name.cluster, &address, token, request);
                match timeout(DEADLINE, signed).await {
                    Ok(Ok(certificate)) => return Ok(certificate),
                    Ok(Err(error)) => last_error = error,
                    Err(_) => last_error = anyhow!("no response from {address}"),
                }
            }
        }
        Err(last_error)
    }
}

async fn sign(roots: &Roots, cluster: ClusterId, address: &str, token: &str, request: &[u8]) -> Result<String> {
    // The certificate of the coordinator shows that the token goes to the right recipient.
    let stream = connect_anonymously(roots, cluster, ExpectedPeer::any(Role::Coordinator), address).await?;
    let mut stream = Some(stream);
    let connect = service_fn(move |_| {
        let stream = stream.take().ok_or_else(|| std::io::Error::other("the connection has ended"));
        async move { stream.map(TokioIo::new) }
    });
    let channel = Endpoint::from_static("http://coordinator").connect_with_connector(connect).await?;
    let mut call = Request::new(SignRequest { request: request.to_vec().into() });
    let bearer = format!("Bearer {token}").parse().context("the token is not valid in a header")?;
    call.metadata_mut().insert("authorization", bearer);
    let signed = CertificateServiceClient::new(channel).sign(call).await;
    let signed =
        signed.map_err(|status| anyhow!("{address} rejected the certificate request: {}", status.message()))?;
    Ok(signed.into_inner().certificate)
}

/// Returns whether the certificate must be renewed.
fn is_due(keys: &Keys) -> bool {
    keys.is_due(SystemTime::now()) || !is_of_current_ca(keys)
}

/// Returns whether the certificate was issued by the current CA, the first of the published ones. An operator that rotates its CA
/// continues when all workers have certificates of the new one.
fn is_of_current_ca(keys: &Keys) -> bool {
    keys.trusted_roots().first().is_none_or(|first| *first == keys.root())
}

/// Adds jitter, so that pods that start together do not retry together.
fn jittered(wait: Duration) -> Duration {
    wait.mul_f64(rand::random_range(0.5..1.0))
}

/// Writes a file that only this user can read, atomically.
fn replace(path: &Path, text: &str) -> std::io::Result<()> {
    let temporary = path.with_extension("tmp");
    match std::fs::remove_file(&temporary) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    // Created new, so that the mode applies.
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&temporary)?;
    file.write_all(text.as_bytes())?;
    std::fs::rename(&temporary, path)
}

#[cfg(test)]
mod tests {
    use super::*;
    use engram_identity::{CertificateAuthority, Realm};
    use serde_json::json;

    fn paths() -> IdentityPaths {
        let tokens = TokenFiles { keys: "/ca/jwks.json".into(), issuer: "/ca/issuer".into(), access: "/a.json".into() };
        IdentityPaths { ca: "/ca".into(), folder: "/run".into(), token: "/token".into(), tokens }
    }

    #[test]
    fn a_pod_of_a_secured_cluster_requests_a_certificate_under_its_name() {
        let mut file = json!({
            "clusterId": "0f6c1d528a534a0a9d1e2f8f5f0f7a11",
            "coordinators": ["engram-coordinator.engram.svc:7440"],
            "replicationFactor": 2,
        });
        let settings = |file: &serde_json::Value| Settings::parse(&file.to_string()).unwrap();
        let pod_info = PodInfo {
            cluster: "words".into(),
            ordinal: 12,
            namespace: Some("research".into()),
            address: [10, 244, 2, 7].into(),
        };
        assert!(
            settings(&file).identity(&pod_info, || unreachable!("the cluster has no certificates")).unwrap().is_none()
        );
        file["tls"] = json!({ "mode": "Auto", "certificateLifetime": "1h", "fieldOfALaterOperator": 1 });
        let secured = settings(&file);
        let identity = secured.identity(&pod_info, paths).unwrap().unwrap();
        assert_eq!(identity.coordinators, ["engram-coordinator.engram.svc:7440"]);
        assert_eq!(
            identity.name.to_string(),
            "spiffe://engram.dev/ns/research/cluster/words/0f6c1d528a534a0a9d1e2f8f5f0f7a11/worker/12"
        );
        let without_namespace = PodInfo { namespace: None, ..pod_info };
        assert!(secured.identity(&without_namespace, paths).unwrap_err().to_string().contains("POD_NAMESPACE"));
        assert!(!identity.is_mounted);
        file["tls"] = json!({ "mode": "Secret", "secretName": "words-tls" });
        let pod_info = PodInfo { namespace: Some("research".into()), ..without_namespace };
        assert!(settings(&file).identity(&pod_info, paths).unwrap().unwrap().is_mounted);
    }

    #[test]
    fn a_certificate_is_renewed_when_another_ca_signs() {
        let name = Name::on_kubernetes("research", "words", ClusterId(7), Role::Worker, 1);
        let now = SystemTime::now();
        let [old, new] = [0; 2].map(|_| CertificateAuthority::create(Realm::Operator, now).unwrap());
        let is_current = |roots: [&CertificateAuthority; 2]| {
            let pair = old.issue(&name, now, Duration::from_secs(3_600)).unwrap().pem;
            let keys =
                Keys::from_pem(&roots.map(CertificateAuthority::certificate).concat(), &pair, Arc::default()).unwrap();
            assert_eq!(keys.trusted_roots(), roots.map(CertificateAuthority::root));
            assert_eq!(keys.root(), old.root());
            is_of_current_ca(&keys)
        };
        assert!(is_current([&old, &new]), "the next CA does not sign yet");
        assert!(!is_current([&new, &old]));
    }

    #[tokio::test]
    async fn a_mounted_certificate_is_awaited_and_valid_for_any_worker_of_its_cluster() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        let ca = CertificateAuthority::create(Realm::Operator, SystemTime::now()).unwrap();
        let write_certificate = |name: &Name| {
            let pair = ca.issue(name, SystemTime::now(), Duration::from_secs(3_600)).unwrap().pem;
            std::fs::write(path("tls.crt"), &pair).unwrap();
            std::fs::write(path("tls.key"), &pair).unwrap();
        };
        std::fs::write(path("ca.pem"), ca.certificate()).unwrap();
        let worker = |ordinal| Name::on_kubernetes("research", "words", ClusterId(7), Role::Worker, ordinal);
        let identity = Identity {
            name: worker(12),
            paths: IdentityPaths { ca: folder.path().into(), folder: folder.path().into(), ..paths() },
            is_mounted: true,
            coordinators: Vec::new(),
        };
        assert!(identity.open().unwrap_err().to_string().contains("tls.crt"), "no certificate is mounted");
        write_certificate(&worker(3));
        assert!(identity.open().unwrap_err().to_string().contains("the certificate is of worker 3"));
        let shared = Name::shared_by_workers("research", "words", ClusterId(7));
        let writing = async {
            sleep(Duration::from_millis(100)).await;
            write_certificate(&shared);
        };
        let (keys, ()) = tokio::join!(identity.obtain(), writing);
        assert_eq!(keys.name(), shared);
        assert_eq!(identity.tls(&keys).files.key, path("tls.key"));
    }
}
