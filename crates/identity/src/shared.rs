//! A certificate that several processes have together with its key: a process that presents it is one of them.
//!
//! For processes that have no certificate of the cluster, such as clients with a token: a worker that has authenticated them gives each the same
//! [`SharedCertificate`], and they accept no other from each other. The certificate is not signed by a CA and names nothing.

use crate::Error;
use crate::material::PROVIDER;
use rcgen::{CertificateParams, KeyPair};
use rustls::client::Resumption;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::verify_tls13_signature;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer, ServerName, UnixTime};
use rustls::server::NoServerSessionStorage;
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::sign::{CertifiedKey, SingleCertAndKey};
use rustls::version::TLS13;
use rustls::{CertificateError, ClientConfig, DigitallySignedStruct, DistinguishedName, ServerConfig, SignatureScheme};
use std::fmt;
use std::sync::Arc;

/// Longest accepted certificate and key: many times their usual size.
const MAX_BYTES: usize = 4 << 10;

/// A certificate and its key, which several processes have. The key is secret.
#[derive(Clone)]
pub struct SharedCertificate {
    certificate: CertificateDer<'static>,
    key: Arc<CertifiedKey>,
    /// PKCS #8.
    der: Arc<[u8]>,
}

impl fmt::Debug for SharedCertificate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The key is secret.
        f.write_str("SharedCertificate")
    }
}

impl PartialEq for SharedCertificate {
    fn eq(&self, other: &Self) -> bool {
        self.certificate == other.certificate
    }
}

impl Eq for SharedCertificate {}

impl SharedCertificate {
    /// Creates a certificate with a new key.
    ///
    /// # Errors
    /// The machine provides no randomness.
    pub fn create() -> Result<Self, Error> {
        let key = KeyPair::generate()?;
        let certificate = CertificateParams::default().self_signed(&key)?;
        Self::from_der(certificate.der(), &key.serialize_der())
    }

    /// Reads a certificate, and its key in PKCS #8.
    ///
    /// # Errors
    /// One of them is too long or damaged, or they do not belong together.
    pub fn from_der(certificate: &[u8], key: &[u8]) -> Result<Self, Error> {
        if certificate.len().max(key.len()) > MAX_BYTES {
            return Err(Error::unusable(format!("the shared certificate or its key has more than {MAX_BYTES} bytes")));
        }
        let damaged = || Error::unusable("the key of the shared certificate is damaged or of an unsupported type");
        let private = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(key.to_vec()));
        let signing = PROVIDER.key_provider.load_private_key(private).map_err(|_| damaged())?;
        let certificate = CertificateDer::from(certificate.to_vec());
        let certified = CertifiedKey::new(vec![certificate.clone()], signing);
        let mismatch = |_| Error::unusable("the shared certificate is damaged, or not that of its key");
        certified.keys_match().map_err(mismatch)?;
        Ok(Self { certificate, key: Arc::new(certified), der: key.into() })
    }

    /// Returns the certificate as DER.
    pub fn certificate(&self) -> &[u8] {
        &self.certificate
    }

    /// Returns the key as PKCS #8, for another process that is trusted with it.
    pub fn private_key(&self) -> &[u8] {
        &self.der
    }

    fn resolver(&self) -> Arc<SingleCertAndKey> {
        Arc::new(SingleCertAndKey::from(Arc::clone(&self.key)))
    }

    /// Returns the configuration of connections of `protocol` (an ALPN name) to a process that has this certificate.
    pub(crate) fn dialer(&self, protocol: &[u8]) -> Arc<ClientConfig> {
        let verifier = Arc::new(SameCertificate(self.certificate.clone()));
        let mut config = ClientConfig::builder_with_provider(Arc::clone(&PROVIDER))
            .with_protocol_versions(&[&TLS13])
            .expect("the algorithms are those of TLS 1.3")
            .dangerous()
            .with_custom_certificate_verifier(verifier)
            .with_client_cert_resolver(self.resolver());
        config.alpn_protocols = vec![protocol.to_vec()];
        config.resumption = Resumption::disabled();
        Arc::new(config)
    }

    /// Returns the configuration of a listener for `protocol` that accepts only processes with this certificate.
    pub(crate) fn listener(&self, protocol: &[u8]) -> Arc<ServerConfig> {
        let verifier = Arc::new(SameCertificate(self.certificate.clone()));
        let mut config = ServerConfig::builder_with_provider(Arc::clone(&PROVIDER))
            .with_protocol_versions(&[&TLS13])
            .expect("the algorithms are those of TLS 1.3")
            .with_client_cert_verifier(verifier)
            .with_cert_resolver(self.resolver());
        config.alpn_protocols = vec![protocol.to_vec()];
        config.session_storage = Arc::new(NoServerSessionStorage {});
        config.send_tls13_tickets = 0;
        Arc::new(config)
    }
}

/// Accepts exactly one certificate. The handshake proves that the peer has its key.
#[derive(Debug)]
struct SameCertificate(CertificateDer<'static>);

impl SameCertificate {
    fn check(&self, found: &CertificateDer<'_>) -> Result<(), rustls::Error> {
        let is_same = found == &self.0;
        if is_same { Ok(()) } else { Err(CertificateError::ApplicationVerificationFailure.into()) }
    }

    fn verify(
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls13_signature(message, certificate, signature, &PROVIDER.signature_verification_algorithms)
    }

    fn schemes() -> Vec<SignatureScheme> {
        PROVIDER.signature_verification_algorithms.supported_schemes()
    }
}

/// TLS 1.2 is not configured.
fn unsupported() -> rustls::Error {
    rustls::Error::General("only TLS 1.3 is supported".to_owned())
}

impl ServerCertVerifier for SameCertificate {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        self.check(end_entity).map(|()| ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _certificate: &CertificateDer<'_>,
        _signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Err(unsupported())
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Self::verify(message, certificate, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        Self::schemes()
    }
}

impl ClientCertVerifier for SameCertificate {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _now: UnixTime,
    ) -> Result<ClientCertVerified, rustls::Error> {
        self.check(end_entity).map(|()| ClientCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _certificate: &CertificateDer<'_>,
        _signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Err(unsupported())
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Self::verify(message, certificate, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        Self::schemes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::TlsSocket;
    use std::io::{self, Read as _, Write as _};
    use std::net::{TcpListener, TcpStream};

    const PROTOCOL: &[u8] = b"test/1";

    /// Connects two processes; returns what each of them sees.
    fn connect(
        caller: &SharedCertificate,
        listener: &SharedCertificate,
        protocol: &[u8],
    ) -> (io::Result<()>, io::Result<()>) {
        let socket = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = socket.local_addr().unwrap();
        std::thread::scope(|scope| {
            let accepted = scope.spawn(|| {
                let mut socket = TlsSocket::accept_shared(listener, PROTOCOL, socket.accept()?.0)?;
                let mut bytes = [0; 5];
                socket.read_exact(&mut bytes)?;
                assert_eq!(&bytes, b"hello");
                socket.write_all(b"!")
            });
            let called = || {
                let mut socket = TlsSocket::connect_shared(caller, protocol, TcpStream::connect(address)?)?;
                socket.write_all(b"hello")?;
                socket.read_exact(&mut [0])
            };
            (called(), accepted.join().unwrap())
        })
    }

    #[test]
    fn only_processes_with_the_shared_certificate_reach_each_other() {
        let shared = SharedCertificate::create().unwrap();
        let copy = SharedCertificate::from_der(shared.certificate(), shared.private_key()).unwrap();
        let (called, accepted) = connect(&copy, &shared, PROTOCOL);
        called.unwrap();
        accepted.unwrap();
        let other = SharedCertificate::create().unwrap();
        let (called, accepted) = connect(&other, &shared, PROTOCOL);
        assert!(called.is_err() && accepted.is_err(), "another certificate");
        let (called, accepted) = connect(&copy, &shared, b"test/2");
        assert!(called.is_err() && accepted.is_err(), "another protocol");
        // The certificate alone is public: without its key it is worth nothing.
        assert!(SharedCertificate::from_der(shared.certificate(), other.private_key()).is_err());
        assert!(SharedCertificate::from_der(shared.certificate(), &[0; MAX_BYTES + 1]).is_err());
    }
}
