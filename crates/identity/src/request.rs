//! What a process that makes its key itself asks an authority for.

use crate::authority::named;
use crate::{Error, Name};
use rcgen::{CertificateSigningRequestParams, KeyPair, PublicKeyData, SanType};

/// Longest request that is read: many times one of ours.
const MAX_BYTES: usize = 4 << 10;

/// A new key, and the request for a certificate of it.
pub struct Asked {
    /// The key as PEM, for a file that nobody else reads.
    pub key: String,
    /// The request as DER (PKCS #10), signed with the key.
    pub request: Vec<u8>,
}

/// Makes a key, and asks for a certificate with this name.
///
/// # Errors
/// The machine has no randomness to give.
pub fn ask(name: &Name) -> Result<Asked, Error> {
    let key = KeyPair::generate()?;
    let request = named(name)?.serialize_request(&key)?;
    Ok(Asked { key: key.serialize_pem(), request: request.der().to_vec() })
}

/// A request that was read: whoever made it has the key.
#[derive(Debug)]
pub struct SigningRequest(CertificateSigningRequestParams);

impl SigningRequest {
    /// Reads a request, and checks that it is signed with its own key.
    ///
    /// # Errors
    /// It is damaged, too long, or of an algorithm that is not known.
    pub fn parse(der: &[u8]) -> Result<Self, Error> {
        if der.len() > MAX_BYTES {
            return Err(Error::unusable(format!("the request has {} bytes; allowed: {MAX_BYTES}", der.len())));
        }
        let read = CertificateSigningRequestParams::from_der(&der.into());
        read.map(Self).map_err(|error| Error::unusable(format!("the request is damaged: {error}")))
    }

    /// The name that it asks for: its only one.
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
    use crate::{Authority, Keys, Realm, Refusals, Role};
    use engram_memory::ClusterId;
    use std::sync::Arc;
    use std::time::{Duration, SystemTime};

    #[test]
    fn who_asks_gets_a_certificate_of_its_own_key_under_the_name_that_was_decided() {
        let (now, hour) = (SystemTime::now(), Duration::from_secs(3_600));
        let authority = Authority::create(Realm::Operator, now).unwrap();
        let name = Name::on_kubernetes("research", "words", ClusterId(7), Role::Worker, 3);
        let Asked { key, request } = ask(&name).unwrap();
        let request = SigningRequest::parse(&request).unwrap();
        assert_eq!(request.name().unwrap(), name);
        let other = Name { ordinal: Some(4), ..name };
        let certificate = authority.sign(&request, &other, now, hour).unwrap();
        let keys = Keys::given(authority.certificate(), &(key + &certificate), Arc::new(Refusals::default())).unwrap();
        assert_eq!(keys.name(), other, "what is asked for is not what is given");
        assert_eq!(keys.lifetime().as_secs(), hour.as_secs());
    }

    #[test]
    fn a_request_that_is_damaged_or_not_signed_with_its_key_is_refused() {
        let name = Name::on_kubernetes("research", "words", ClusterId(7), Role::Worker, 3);
        let good = ask(&name).unwrap().request;
        let read = SigningRequest::parse(&good).unwrap();
        let (key, mut refused) = (read.key().der_bytes().to_vec(), 0);
        for at in 0..good.len() {
            let mut damaged = good.clone();
            damaged[at] ^= 1;
            match SigningRequest::parse(&damaged) {
                // There are bits that mean nothing.
                Ok(read) => assert!(read.name().unwrap() == name && read.key().der_bytes() == key, "byte {at}"),
                Err(_) => refused += 1,
            }
            assert!(SigningRequest::parse(&good[..at]).is_err(), "cut at {at}");
        }
        assert!(refused > good.len() - 10, "{refused} of {}", good.len());
        assert!(SigningRequest::parse(&vec![0x30; MAX_BYTES + 1]).unwrap_err().to_string().contains("4097 bytes"));
    }
}
