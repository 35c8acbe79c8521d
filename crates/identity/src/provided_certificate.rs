//! Certificates provided by a user, signed by another CA: their validation, and trust bundles.

use crate::material::Material;
use crate::{Error, Name};
use std::time::SystemTime;

/// A validated user-provided certificate.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProvidedCertificate {
    /// The process that it names.
    pub name: Name,
    /// End of validity.
    pub until: SystemTime,
}

impl ProvidedCertificate {
    /// Reads the PEM of the roots, of the certificate with its intermediates, and of its key, like the process that
    /// will use them.
    ///
    /// # Errors
    /// One of them is damaged, they do not match, or the certificate is not valid at `now` for a process that accepts
    /// and opens connections.
    pub fn read(trust_bundle: &[u8], certificate: &[u8], key: &[u8], now: SystemTime) -> Result<Self, Error> {
        let Material { name, until, .. } = Material::parse(trust_bundle, certificate, key, now)?;
        Ok(Self { name, until })
    }
}

/// First and last line of a PEM certificate.
const BEGIN: &str = "-----BEGIN CERTIFICATE-----";
const END: &str = "-----END CERTIFICATE-----";

/// Merges the certificates of `own` and `others`: in their order, each once, and nothing else. Merging again changes
/// nothing.
pub fn bundle(own: &str, others: &str) -> String {
    let mut all: Vec<&str> = Vec::new();
    for block in [own, others].into_iter().flat_map(split_pem) {
        if !all.contains(&block) {
            all.push(block);
        }
    }
    all.into_iter().flat_map(|block| [block, "\n"]).collect()
}

/// Splits PEM text into certificates, without anything between them.
pub fn split_pem(pem: &str) -> impl Iterator<Item = &str> {
    let block = |text| str::find(text, BEGIN).map(|at| &text[at..]).filter(|block| block.ends_with(END));
    pem.split_inclusive(END).filter_map(block)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{CertificateAuthority, Realm, Role};
    use engram_memory::ClusterId;
    use rcgen::{CertificateParams, ExtendedKeyUsagePurpose, Issuer, KeyPair, SanType};
    use std::time::Duration;

    const HOUR: Duration = Duration::from_secs(3_600);

    fn shared() -> Name {
        Name::shared_by_workers("research", "words", ClusterId(7))
    }

    #[test]
    fn provided_certificates_are_validated_and_errors_name_the_cause() {
        let now = SystemTime::now();
        let [trust_bundle, other] = [0; 2].map(|_| CertificateAuthority::create(Realm::Operator, now).unwrap());
        let issued = trust_bundle.issue(&shared(), now, HOUR).unwrap();
        let (roots, pem) = (trust_bundle.certificate().as_bytes(), issued.pem.as_bytes());
        let provided = ProvidedCertificate::read(roots, pem, pem, now).unwrap();
        assert_eq!(provided, ProvidedCertificate { name: shared(), until: issued.until });
        let why = |roots: &[u8], certificate: &[u8], key: &[u8], now| {
            ProvidedCertificate::read(roots, certificate, key, now).unwrap_err().to_string()
        };
        assert!(why(b"", pem, pem, now).contains("the trust bundle is empty"));
        assert!(why(roots, b"", pem, now).contains("the certificate is empty"));
        assert!(why(roots, pem, b"", now).contains("the key is damaged or missing"));
        assert!(why(roots, pem, other.key().as_bytes(), now).contains("the key does not match the certificate"));
        assert!(why(other.certificate().as_bytes(), pem, pem, now).contains("the certificate is not valid"));
        assert!(why(roots, pem, pem, now + 2 * HOUR).contains("xpired"));
    }

    #[test]
    fn certificate_without_client_usage_is_rejected() {
        let root = KeyPair::generate().unwrap();
        let mut of_root = CertificateParams::default();
        of_root.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        let roots = of_root.self_signed(&root).unwrap().pem();
        let (issuer, key) = (Issuer::new(of_root, root), KeyPair::generate().unwrap());
        let read = |usages: &[ExtendedKeyUsagePurpose]| {
            let mut leaf = CertificateParams::default();
            leaf.subject_alt_names = vec![SanType::URI(shared().to_string().try_into().unwrap())];
            leaf.extended_key_usages = usages.to_vec();
            let certificate = leaf.signed_by(&key, &issuer).unwrap().pem();
            let key = key.serialize_pem();
            ProvidedCertificate::read(roots.as_bytes(), certificate.as_bytes(), key.as_bytes(), SystemTime::now())
        };
        let (listens, calls) = (ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth);
        assert_eq!(read(&[listens.clone(), calls.clone()]).unwrap().name.role, Role::Worker);
        assert_eq!(read(&[]).unwrap().name, shared(), "no usages mean all usages");
        assert!(read(&[listens]).unwrap_err().to_string().contains("the certificate is not valid"));
        assert!(read(&[calls]).unwrap_err().to_string().contains("the certificate is not valid"));
    }

    #[test]
    fn bundle_holds_each_certificate_once_and_nothing_else() {
        let block = |text: &str| format!("{BEGIN}\n{text}\n{END}\n");
        let (a, b, c) = (block("a"), block("b"), block("c"));
        let text = format!("# ours\n{b}\n# before\n{c}{b}{BEGIN}\ncut");
        let merged = bundle(&a, &text);
        assert_eq!(merged, format!("{a}{b}{c}"));
        assert_eq!(bundle(&a, &merged), merged);
        assert_eq!(bundle("", "-----BEGIN PRIVATE KEY-----\nx\n-----END PRIVATE KEY-----\n"), "");
    }
}
