//! A certificate, its key and the roots, validated together, and the TLS configurations made of them.

use crate::verify::{ClientVerifier, ServerVerifier, name};
use crate::{Error, ExpectedPeer, Name, validity};
use ::ring::digest::{SHA256, digest};
use engram_memory::ClusterId;
use rustls::client::{Resumption, WantsClientCert, verify_server_cert_signed_by_trust_anchor};
use rustls::crypto::{CryptoProvider, ring};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, UnixTime};
use rustls::server::{NoServerSessionStorage, ParsedCertificate, WebPkiClientVerifier};
use rustls::sign::{CertifiedKey, SingleCertAndKey};
use rustls::version::TLS13;
use rustls::{ClientConfig, ConfigBuilder, RootCertStore, ServerConfig};
use std::fmt;
use std::path::Path;
use std::sync::{Arc, LazyLock};
use std::time::{Duration, SystemTime};

/// Application protocol.
const ALPN: &[u8] = b"h2";

/// One provider for all: the tree contains a single implementation of the algorithms.
pub(crate) static PROVIDER: LazyLock<Arc<CryptoProvider>> = LazyLock::new(|| Arc::new(ring::default_provider()));

/// Certificate, key and roots of a process at one time.
pub(crate) struct Material {
    pub(crate) name: Name,
    pub(crate) from: SystemTime,
    pub(crate) until: SystemTime,
    /// The root that issued the certificate.
    pub(crate) root: RootId,
    key: Arc<CertifiedKey>,
    roots: Roots,
    certified: Arc<ServerConfig>,
    anyone: Arc<ServerConfig>,
}

/// Which callers a listener accepts; an invalid certificate is always rejected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Callers {
    /// Only callers with a certificate.
    Certified,
    /// Also callers without one: such a caller is [anonymous](crate::Caller::Anonymous), and may only do what it
    /// authorizes otherwise.
    Anyone,
}

/// Identifies a root by a prefix of the SHA-256 of its certificate. For display and for comparing trust bundles, not
/// for authentication.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RootId(pub u64);

impl RootId {
    fn of(certificate: &CertificateDer<'_>) -> Self {
        let digest = digest(&SHA256, certificate);
        let first = digest.as_ref().first_chunk().expect("the digest has 32 bytes");
        Self(u64::from_be_bytes(*first))
    }
}

impl fmt::Display for RootId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

/// Certificates of trusted CAs.
#[derive(Debug, Clone)]
pub struct Roots {
    store: Arc<RootCertStore>,
    /// The certificates one by one, in their order.
    each: Arc<[(RootId, CertificateDer<'static>)]>,
}

impl Roots {
    /// Reads them from PEM.
    ///
    /// # Errors
    /// There is none, or one is damaged.
    pub fn parse(pem: &[u8]) -> Result<Self, Error> {
        let each = certificates(pem, "trust bundle")?;
        let store = Arc::new(store(&each)?);
        Ok(Self { store, each: each.into_iter().map(|root| (RootId::of(&root), root)).collect() })
    }

    /// Returns their ids, in order. In a bundle published by an operator the first is the current signer.
    pub fn ids(&self) -> impl Iterator<Item = RootId> {
        self.each.iter().map(|(id, _)| *id)
    }

    /// Finds the root with this public key, in rcgen's encoding: the end of its structure in the certificate.
    pub(crate) fn with_key(&self, raw: &[u8]) -> Option<(RootId, &CertificateDer<'static>)> {
        let is_of = |root: &CertificateDer<'static>| {
            let anchor = webpki::anchor_from_trusted_cert(root).ok();
            anchor.is_some_and(|anchor| anchor.subject_public_key_info.as_ref().ends_with(raw))
        };
        self.each.iter().find(|(_, root)| is_of(root)).map(|(id, root)| (*id, root))
    }

    /// Finds the root that issued a certificate.
    fn root_of(&self, leaf: &ParsedCertificate<'_>, chain: &[CertificateDer<'_>], now: UnixTime) -> Option<RootId> {
        let algorithms = PROVIDER.signature_verification_algorithms.all;
        let issued = |root: &CertificateDer<'static>| {
            let single = store(std::slice::from_ref(root)).ok()?;
            verify_server_cert_signed_by_trust_anchor(leaf, &single, chain, now, algorithms).ok()
        };
        self.each.iter().find(|(_, root)| issued(root).is_some()).map(|(id, _)| *id)
    }

    /// Reads them from a file.
    ///
    /// # Errors
    /// It cannot be read, and as for [`Self::parse`].
    pub fn read(path: &Path) -> Result<Self, Error> {
        let pem = std::fs::read(path).map_err(|source| Error::Read { path: path.to_owned(), source })?;
        Self::parse(&pem)
    }

    /// Returns the TLS configuration for a connection without a client certificate to the `expected` peer of `cluster`.
    pub(crate) fn client(&self, cluster: ClusterId, expected: ExpectedPeer) -> Arc<ClientConfig> {
        Arc::new(finish(self.builder(cluster, expected).with_no_client_auth()))
    }

    fn builder(&self, cluster: ClusterId, expected: ExpectedPeer) -> ConfigBuilder<ClientConfig, WantsClientCert> {
        let provider = Arc::clone(&PROVIDER);
        let verifier = ServerVerifier { roots: Arc::clone(&self.store), cluster, expected, provider };
        ClientConfig::builder_with_provider(Arc::clone(&PROVIDER))
            .with_protocol_versions(&[&TLS13])
            .expect("the algorithms are those of TLS 1.3")
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(verifier))
    }
}

/// Applies the settings that all connections share.
fn finish(mut config: ClientConfig) -> ClientConfig {
    config.alpn_protocols = vec![ALPN.to_vec()];
    config.resumption = Resumption::disabled();
    config
}

impl Material {
    /// Reads the PEM of the roots, of the certificate with its intermediates, and of its key.
    ///
    /// # Errors
    /// One of them is damaged, the key does not match, or the certificate is not valid under the roots at `now`.
    pub(crate) fn parse(trust_bundle: &[u8], certificate: &[u8], key: &[u8], now: SystemTime) -> Result<Self, Error> {
        let roots = Roots::parse(trust_bundle)?;
        let chain = certificates(certificate, "certificate")?;
        let key = PrivateKeyDer::from_pem_slice(key).map_err(|_| Error::unusable("the key is damaged or missing"))?;
        let signing = PROVIDER.key_provider.load_private_key(key);
        let signing = signing.map_err(|_| Error::unusable("the key is damaged or of an unsupported type"))?;
        let key = CertifiedKey::new(chain, signing);
        key.keys_match().map_err(|_| Error::unusable("the key does not match the certificate"))?;
        let (leaf, intermediates) = key.cert.split_first().expect("a list of certificates is not empty");
        let invalid = |error| Error::unusable(format!("the certificate is not valid: {error}"));
        let since_1970 = now.duration_since(SystemTime::UNIX_EPOCH).unwrap_or(Duration::ZERO);
        let now = UnixTime::since_unix_epoch(since_1970);
        let algorithms = PROVIDER.signature_verification_algorithms.all;
        let parsed = ParsedCertificate::try_from(leaf).map_err(invalid)?;
        verify_server_cert_signed_by_trust_anchor(&parsed, &roots.store, intermediates, now, algorithms)
            .map_err(invalid)?;
        let root = roots.root_of(&parsed, intermediates, now);
        let root = root.ok_or_else(|| Error::unusable("the certificate is signed by none of the roots"))?;
        // Every process accepts and opens connections: its certificate must be valid for both.
        let client_verifier =
            WebPkiClientVerifier::builder_with_provider(Arc::clone(&roots.store), Arc::clone(&PROVIDER)).build();
        let client_verifier =
            client_verifier.map_err(|error| Error::unusable(format!("the trust bundle is unusable: {error}")))?;
        client_verifier.verify_client_cert(leaf, intermediates, now).map_err(invalid)?;
        let name = name(leaf)?;
        let (from, until) =
            validity::period(leaf).ok_or_else(|| Error::unusable("the certificate has no end of validity"))?;
        let key = Arc::new(key);
        let [certified, anyone] =
            [Callers::Certified, Callers::Anyone].map(|callers| server(&name, &key, &roots, callers));
        let (certified, anyone) = (Arc::new(certified?), Arc::new(anyone?));
        Ok(Self { name, from, until, root, key, roots, certified, anyone })
    }

    /// Returns the TLS configuration for accepted connections.
    pub(crate) fn server(&self, callers: Callers) -> Arc<ServerConfig> {
        Arc::clone(match callers {
            Callers::Certified => &self.certified,
            Callers::Anyone => &self.anyone,
        })
    }

    /// Returns the trusted roots.
    pub(crate) fn trusted_roots(&self) -> Vec<RootId> {
        self.roots.ids().collect()
    }

    /// Returns the TLS configuration for a connection to the `expected` peer.
    pub(crate) fn client(&self, expected: ExpectedPeer) -> Arc<ClientConfig> {
        let resolver = Arc::new(SingleCertAndKey::from(Arc::clone(&self.key)));
        Arc::new(finish(self.roots.builder(self.name.cluster, expected).with_client_cert_resolver(resolver)))
    }
}

fn server(name: &Name, key: &Arc<CertifiedKey>, roots: &Roots, callers: Callers) -> Result<ServerConfig, Error> {
    let chain = WebPkiClientVerifier::builder_with_provider(Arc::clone(&roots.store), Arc::clone(&PROVIDER));
    let chain = match callers {
        Callers::Certified => chain.build(),
        Callers::Anyone => chain.allow_unauthenticated().build(),
    };
    let chain = chain.map_err(|error| Error::unusable(format!("the trust bundle is unusable: {error}")))?;
    let mut config = ServerConfig::builder_with_provider(Arc::clone(&PROVIDER))
        .with_protocol_versions(&[&TLS13])
        .expect("the algorithms are those of TLS 1.3")
        .with_client_cert_verifier(Arc::new(ClientVerifier { chain, cluster: name.cluster }))
        .with_cert_resolver(Arc::new(SingleCertAndKey::from(Arc::clone(key))));
    config.alpn_protocols = vec![ALPN.to_vec()];
    // A resumed session would not present its certificate again.
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config.send_tls13_tickets = 0;
    Ok(config)
}

fn store(roots: &[CertificateDer<'static>]) -> Result<RootCertStore, Error> {
    let mut store = RootCertStore::empty();
    for root in roots {
        store.add(root.clone()).map_err(|error| Error::unusable(format!("the trust bundle is damaged: {error}")))?;
    }
    Ok(store)
}

/// Reads certificates: at least one.
fn certificates(pem: &[u8], what: &str) -> Result<Vec<CertificateDer<'static>>, Error> {
    let read: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
    let read = read.map_err(|error| Error::unusable(format!("the {what} is damaged: {error}")))?;
    if read.is_empty() { Err(Error::unusable(format!("the {what} is empty"))) } else { Ok(read) }
}
