//! Certificate requests of processes that create their own keys.

use crate::ca::certificate_params;
use crate::{Error, Name};
use rcgen::{CertificateSigningRequestParams, KeyPair, PublicKeyData, SanType};

/// Longest accepted request: many times the usual size.
const MAX_BYTES: usize = 4 << 10;

/// A new key, and the request for a certificate of it.
pub struct CertificateRequest {
    /// The key as PEM, for a private file.
    pub key: String,
    /// The request as DER (PKCS #10), signed with the key.
    pub request: Vec<u8>,
}

/// Creates a key, and a request for a certificate with this name.
///
/// # Errors
/// The machine provides no randomness.
pub fn create_request(name: &Name) -> Result<CertificateRequest, Error> {
    let key = KeyPair::generate()?;
    let request = certificate_params(name)?.serialize_request(&key)?;
    Ok(CertificateRequest { key: key.serialize_pem(), request: request.der().to_vec() })
}

/// A parsed request: its sender has the key.
#[derive(Debug)]
pub struct SigningRequest(CertificateSigningRequestParams);

impl SigningRequest {
    /// Parses a request, and checks that it is signed with its own key.
    ///
    /// # Errors
    /// It is damaged, too long, or uses an unknown algorithm.
    pub fn parse(der: &[u8]) -> Result<Self, Error> {
        if der.len() > MAX_BYTES {
            return Err(Error::unusable(format!("the request has {} bytes; allowed: {MAX_BYTES}", der.len())));
        }
        let read = CertificateSigningRequestParams::from_der(&der.into());
        read.map(Self).map_err(|error| Error::unusable(format!("the request is damaged: {error}")))
    }

    /// Returns the requested name: its only one.
    ///
    /// # Errors
    /// It has none, several, or one of another kind.
    pub fn name(&self) -> Result<Name, Error> {
        match self.0.params.subject_alt_names.as_slice() {
            [SanType::URI(uri)] => Ok(uri.as_str().parse()?),
            _ => Err(Error::unusable("the request names no process of a cluster: it must have one URI")),
        }
    }

    pub(crate) const fn key(&self) -> &impl PublicKeyData {
        &self.0.public_key
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{CertificateAuthority, Keys, Realm, Refusals, Role};
    use engram_memory::ClusterId;
    use std::sync::Arc;
    use std::time::{Duration, SystemTime};

    #[test]
    fn signed_certificate_has_the_requested_key_and_the_decided_name() {
        let (now, hour) = (SystemTime::now(), Duration::from_secs(3_600));
        let ca = CertificateAuthority::create(Realm::Operator, now).unwrap();
        let name = Name::on_kubernetes("research", "words", ClusterId(7), Role::Worker, 3);
        let CertificateRequest { key, request } = create_request(&name).unwrap();
        let request = SigningRequest::parse(&request).unwrap();
        assert_eq!(request.name().unwrap(), name);
        let other = Name { ordinal: Some(4), ..name };
        let certificate = ca.sign(&request, &other, now, hour).unwrap();
        let keys = Keys::from_pem(ca.certificate(), &(key + &certificate), Arc::new(Refusals::default())).unwrap();
        assert_eq!(keys.name(), other, "the signer decides about the name");
        assert_eq!(keys.lifetime().as_secs(), hour.as_secs());
    }

    #[test]
    fn damaged_or_wrongly_signed_request_is_rejected() {
        let name = Name::on_kubernetes("research", "words", ClusterId(7), Role::Worker, 3);
        let good = create_request(&name).unwrap().request;
        let read = SigningRequest::parse(&good).unwrap();
        let (key, mut rejected) = (read.key().der_bytes().to_vec(), 0);
        for at in 0..good.len() {
            let mut damaged = good.clone();
            damaged[at] ^= 1;
            match SigningRequest::parse(&damaged) {
                // Some bits have no meaning.
                Ok(read) => assert!(read.name().unwrap() == name && read.key().der_bytes() == key, "byte {at}"),
                Err(_) => rejected += 1,
            }
            assert!(SigningRequest::parse(&good[..at]).is_err(), "cut at {at}");
        }
        assert!(rejected > good.len() - 10, "{rejected} of {}", good.len());
        assert!(SigningRequest::parse(&vec![0x30; MAX_BYTES + 1]).unwrap_err().to_string().contains("4097 bytes"));
    }
}
