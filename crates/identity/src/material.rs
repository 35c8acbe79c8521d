//! A certificate, its key and the roots, checked against one another, and what TLS makes of them.

use crate::verify::{ClientVerifier, ServerVerifier, name};
use crate::{Error, Expected, Name, validity};
use engram_memory::ClusterId;
use rustls::client::{Resumption, WantsClientCert, verify_server_cert_signed_by_trust_anchor};
use rustls::crypto::{CryptoProvider, ring};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, UnixTime};
use rustls::server::{NoServerSessionStorage, ParsedCertificate, WebPkiClientVerifier};
use rustls::sign::{CertifiedKey, SingleCertAndKey};
use rustls::version::TLS13;
use rustls::{ClientConfig, ConfigBuilder, RootCertStore, ServerConfig};
use std::path::Path;
use std::sync::{Arc, LazyLock};
use std::time::{Duration, SystemTime};

/// The protocol inside.
const ALPN: &[u8] = b"h2";

/// One for all: the tree has a single implementation of the algorithms.
static PROVIDER: LazyLock<Arc<CryptoProvider>> = LazyLock::new(|| Arc::new(ring::default_provider()));

/// All that one process shows and believes, at one time.
pub(crate) struct Material {
    pub(crate) name: Name,
    pub(crate) from: SystemTime,
    pub(crate) until: SystemTime,
    key: Arc<CertifiedKey>,
    roots: Roots,
    certified: Arc<ServerConfig>,
    anyone: Arc<ServerConfig>,
}

/// Whom a listener lets in; whoever shows a certificate that is not good is refused by all.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Callers {
    /// Who shows a certificate.
    Certified,
    /// Who shows none, too: such a caller is [anonymous](crate::Caller::Anonymous), and may do what it proves otherwise.
    Anyone,
}

/// Certificates of authorities that are believed.
#[derive(Debug, Clone)]
pub struct Roots(Arc<RootCertStore>);

impl Roots {
    /// Reads them from PEM.
    ///
    /// # Errors
    /// There is none, or one is damaged.
    pub fn parse(pem: &[u8]) -> Result<Self, Error> {
        let mut roots = RootCertStore::empty();
        for root in certificates(pem, "authority")? {
            roots.add(root).map_err(|error| Error::unusable(format!("the authority is damaged: {error}")))?;
        }
        Ok(Self(Arc::new(roots)))
    }

    /// Reads them from a file.
    ///
    /// # Errors
    /// It cannot be read, and as for [`Self::parse`].
    pub fn read(path: &Path) -> Result<Self, Error> {
        let pem = std::fs::read(path).map_err(|source| Error::Read { path: path.to_owned(), source })?;
        Self::parse(&pem)
    }

    /// For a connection to whom is `expected` in `cluster`, to show no certificate.
    pub(crate) fn client(&self, cluster: ClusterId, expected: Expected) -> Arc<ClientConfig> {
        Arc::new(told(self.builder(cluster, expected).with_no_client_auth()))
    }

    fn builder(&self, cluster: ClusterId, expected: Expected) -> ConfigBuilder<ClientConfig, WantsClientCert> {
        let provider = Arc::clone(&PROVIDER);
        let verifier = ServerVerifier { roots: Arc::clone(&self.0), cluster, expected, provider };
        ClientConfig::builder_with_provider(Arc::clone(&PROVIDER))
            .with_protocol_versions(&[&TLS13])
            .expect("the algorithms are those of TLS 1.3")
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(verifier))
    }
}

/// What all connections have in common.
fn told(mut config: ClientConfig) -> ClientConfig {
    config.alpn_protocols = vec![ALPN.to_vec()];
    config.resumption = Resumption::disabled();
    config
}

impl Material {
    /// Reads the PEM of the roots, of the certificate with whatever leads to a root, and of its key.
    ///
    /// # Errors
    /// One of them is damaged, the key is of another certificate, or the certificate is none that the roots would let pass at `now`.
    pub(crate) fn parse(authority: &[u8], certificate: &[u8], key: &[u8], now: SystemTime) -> Result<Self, Error> {
        let roots = Roots::parse(authority)?;
        let chain = certificates(certificate, "certificate")?;
        let key = PrivateKeyDer::from_pem_slice(key).map_err(|_| Error::unusable("the key is damaged, or none"))?;
        let signing = PROVIDER.key_provider.load_private_key(key);
        let signing = signing.map_err(|_| Error::unusable("the key is damaged, or of a kind that is not known"))?;
        let key = CertifiedKey::new(chain, signing);
        key.keys_match().map_err(|_| Error::unusable("the key is not of the certificate"))?;
        let (leaf, intermediates) = key.cert.split_first().expect("a list of certificates is not empty");
        let refused = |error| Error::unusable(format!("the certificate is not good: {error}"));
        let since_1970 = now.duration_since(SystemTime::UNIX_EPOCH).unwrap_or(Duration::ZERO);
        let now = UnixTime::since_unix_epoch(since_1970);
        let algorithms = PROVIDER.signature_verification_algorithms.all;
        let parsed = ParsedCertificate::try_from(leaf).map_err(refused)?;
        verify_server_cert_signed_by_trust_anchor(&parsed, &roots.0, intermediates, now, algorithms)
            .map_err(refused)?;
        // Every process listens and calls: its certificate must be good for both.
        let calls = WebPkiClientVerifier::builder_with_provider(Arc::clone(&roots.0), Arc::clone(&PROVIDER)).build();
        let calls = calls.map_err(|error| Error::unusable(format!("the authority is of no use: {error}")))?;
        calls.verify_client_cert(leaf, intermediates, now).map_err(refused)?;
        let name = name(leaf)?;
        let (from, until) = validity::period(leaf).ok_or_else(|| Error::unusable("the certificate has no end"))?;
        let key = Arc::new(key);
        let [certified, anyone] =
            [Callers::Certified, Callers::Anyone].map(|callers| server(&name, &key, &roots, callers));
        let (certified, anyone) = (Arc::new(certified?), Arc::new(anyone?));
        Ok(Self { name, from, until, key, roots, certified, anyone })
    }

    /// For connections that are accepted.
    pub(crate) fn server(&self, callers: Callers) -> Arc<ServerConfig> {
        Arc::clone(match callers {
            Callers::Certified => &self.certified,
            Callers::Anyone => &self.anyone,
        })
    }

    /// For a connection to whom is `expected`.
    pub(crate) fn client(&self, expected: Expected) -> Arc<ClientConfig> {
        let resolver = Arc::new(SingleCertAndKey::from(Arc::clone(&self.key)));
        Arc::new(told(self.roots.builder(self.name.cluster, expected).with_client_cert_resolver(resolver)))
    }
}

fn server(name: &Name, key: &Arc<CertifiedKey>, roots: &Roots, callers: Callers) -> Result<ServerConfig, Error> {
    let chain = WebPkiClientVerifier::builder_with_provider(Arc::clone(&roots.0), Arc::clone(&PROVIDER));
    let chain = match callers {
        Callers::Certified => chain.build(),
        Callers::Anyone => chain.allow_unauthenticated().build(),
    };
    let chain = chain.map_err(|error| Error::unusable(format!("the authority is of no use: {error}")))?;
    let mut config = ServerConfig::builder_with_provider(Arc::clone(&PROVIDER))
        .with_protocol_versions(&[&TLS13])
        .expect("the algorithms are those of TLS 1.3")
        .with_client_cert_verifier(Arc::new(ClientVerifier { chain, cluster: name.cluster }))
        .with_cert_resolver(Arc::new(SingleCertAndKey::from(Arc::clone(key))));
    config.alpn_protocols = vec![ALPN.to_vec()];
    // A resumed session would not show its certificate again.
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config.send_tls13_tickets = 0;
    Ok(config)
}

/// At least one.
fn certificates(pem: &[u8], what: &str) -> Result<Vec<CertificateDer<'static>>, Error> {
    let read: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
    let read = read.map_err(|error| Error::unusable(format!("the {what} is damaged: {error}")))?;
    if read.is_empty() { Err(Error::unusable(format!("the {what} is empty"))) } else { Ok(read) }
}
