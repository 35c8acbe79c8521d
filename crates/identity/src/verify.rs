//! Verification of peers in a handshake: chain to the CA, currently valid, same cluster, and the expected process.

use crate::{ExpectedPeer, Name};
use engram_memory::ClusterId;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::verify_server_cert_signed_by_trust_anchor;
use rustls::crypto::{CryptoProvider, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::ParsedCertificate;
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::{CertificateError, DigitallySignedStruct, DistinguishedName, OtherError, RootCertStore, SignatureScheme};
use std::sync::Arc;

/// Returns the name in a certificate: its only URI.
pub(crate) fn name(certificate: &CertificateDer<'_>) -> Result<Name, crate::Error> {
    let certificate = webpki::EndEntityCert::try_from(certificate)
        .map_err(|error| crate::Error::unusable(format!("the certificate is damaged: {error}")))?;
    let uris: Vec<&str> = certificate.valid_uri_names().take(2).collect();
    match uris[..] {
        [uri] => Ok(uri.parse()?),
        _ => Err(crate::Error::unusable("the certificate names no process of a cluster: it must have one URI")),
    }
}

fn invalid_certificate(error: impl std::error::Error + Send + Sync + 'static) -> rustls::Error {
    rustls::Error::InvalidCertificate(CertificateError::Other(OtherError(Arc::new(error))))
}

/// Verifies servers by the name in the certificate; the address does not matter.
#[derive(Debug)]
pub(crate) struct ServerVerifier {
    pub(crate) roots: Arc<RootCertStore>,
    pub(crate) cluster: ClusterId,
    pub(crate) expected: ExpectedPeer,
    pub(crate) provider: Arc<CryptoProvider>,
}

impl ServerCertVerifier for ServerVerifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        let certificate = ParsedCertificate::try_from(end_entity)?;
        let algorithms = self.provider.signature_verification_algorithms.all;
        verify_server_cert_signed_by_trust_anchor(&certificate, &self.roots, intermediates, now, algorithms)?;
        let name = name(end_entity).map_err(invalid_certificate)?;
        self.expected.check(self.cluster, &name).map_err(invalid_certificate)?;
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls12_signature(message, certificate, signature, &self.provider.signature_verification_algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls13_signature(message, certificate, signature, &self.provider.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}

/// Verifies clients: any process of the cluster. What it may do depends on its role.
#[derive(Debug)]
pub(crate) struct ClientVerifier {
    /// Verifies chain and validity.
    pub(crate) chain: Arc<dyn ClientCertVerifier>,
    pub(crate) cluster: ClusterId,
}

impl ClientCertVerifier for ClientVerifier {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        self.chain.root_hint_subjects()
    }

    fn client_auth_mandatory(&self) -> bool {
        self.chain.client_auth_mandatory()
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, rustls::Error> {
        let verified = self.chain.verify_client_cert(end_entity, intermediates, now)?;
        let is_ours = name(end_entity)
            .map_err(|error| error.to_string())
            .and_then(|name| ExpectedPeer::default().check(self.cluster, &name).map_err(|error| error.to_string()));
        is_ours.map_err(|reason| {
            tracing::warn!(reason, "rejected a certificate");
            // The peer receives an access-denied alert.
            rustls::Error::InvalidCertificate(CertificateError::ApplicationVerificationFailure)
        })?;
        Ok(verified)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.chain.verify_tls12_signature(message, certificate, signature)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.chain.verify_tls13_signature(message, certificate, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.chain.supported_verify_schemes()
    }
}
