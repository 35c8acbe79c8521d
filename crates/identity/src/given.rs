//! Certificates that somebody else's authority signs, and gives: whether they are of use, and whom whoever has them believes.

use crate::material::Material;
use crate::{Error, Name};
use std::time::SystemTime;

/// What a certificate says that was given.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Given {
    /// Whose it is.
    pub name: Name,
    /// Until when it is valid.
    pub until: SystemTime,
}

impl Given {
    /// Reads the PEM of the roots, of the certificate with whatever leads to a root, and of its key, as a process does that is to use them.
    ///
    /// # Errors
    /// One of them is damaged, they are not of one another, or the certificate is not good at `now` for a process that listens and calls.
    pub fn read(authority: &[u8], certificate: &[u8], key: &[u8], now: SystemTime) -> Result<Self, Error> {
        let Material { name, until, .. } = Material::parse(authority, certificate, key, now)?;
        Ok(Self { name, until })
    }
}

/// First and last line of a certificate in PEM.
const BEGIN: &str = "-----BEGIN CERTIFICATE-----";
const END: &str = "-----END CERTIFICATE-----";

/// The certificates of `own` and those of `others` that are not among them: in their order, each once, and nothing else. What was put together
/// once stays the same when it is put together again.
pub fn bundle(own: &str, others: &str) -> String {
    let mut all: Vec<&str> = Vec::new();
    for block in [own, others].into_iter().flat_map(each) {
        if !all.contains(&block) {
            all.push(block);
        }
    }
    all.into_iter().flat_map(|block| [block, "\n"]).collect()
}

/// The certificates of a text in PEM, each as it stands there and without what is between them.
pub fn each(pem: &str) -> impl Iterator<Item = &str> {
    let block = |text| str::find(text, BEGIN).map(|at| &text[at..]).filter(|block| block.ends_with(END));
    pem.split_inclusive(END).filter_map(block)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Authority, Realm, Role};
    use engram_memory::ClusterId;
    use rcgen::{CertificateParams, ExtendedKeyUsagePurpose, Issuer, KeyPair, SanType};
    use std::time::Duration;

    const HOUR: Duration = Duration::from_secs(3_600);

    fn shared() -> Name {
        Name::shared_by_workers("research", "words", ClusterId(7))
    }

    #[test]
    fn what_is_given_is_read_as_a_process_would_and_says_what_is_wrong() {
        let now = SystemTime::now();
        let [authority, other] = [0; 2].map(|_| Authority::create(Realm::Operator, now).unwrap());
        let issued = authority.issue(&shared(), now, HOUR).unwrap();
        let (roots, pem) = (authority.certificate().as_bytes(), issued.pem.as_bytes());
        let given = Given::read(roots, pem, pem, now).unwrap();
        assert_eq!(given, Given { name: shared(), until: issued.until });
        let why = |roots: &[u8], certificate: &[u8], key: &[u8], now| {
            Given::read(roots, certificate, key, now).unwrap_err().to_string()
        };
        assert!(why(b"", pem, pem, now).contains("the authority is empty"));
        assert!(why(roots, b"", pem, now).contains("the certificate is empty"));
        assert!(why(roots, pem, b"", now).contains("the key is damaged, or none"));
        assert!(why(roots, pem, other.key().as_bytes(), now).contains("the key is not of the certificate"));
        assert!(why(other.certificate().as_bytes(), pem, pem, now).contains("the certificate is not good"));
        assert!(why(roots, pem, pem, now + 2 * HOUR).contains("xpired"));
    }

    #[test]
    fn a_certificate_that_may_not_call_is_of_no_use() {
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
            Given::read(roots.as_bytes(), certificate.as_bytes(), key.as_bytes(), SystemTime::now())
        };
        let (listens, calls) = (ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth);
        assert_eq!(read(&[listens.clone(), calls.clone()]).unwrap().name.role, Role::Worker);
        assert_eq!(read(&[]).unwrap().name, shared(), "no usages are all usages");
        assert!(read(&[listens]).unwrap_err().to_string().contains("the certificate is not good"));
        assert!(read(&[calls]).unwrap_err().to_string().contains("the certificate is not good"));
    }

    #[test]
    fn a_bundle_holds_each_certificate_once_and_nothing_else() {
        let block = |text: &str| format!("{BEGIN}\n{text}\n{END}\n");
        let (a, b, c) = (block("a"), block("b"), block("c"));
        let given = format!("# ours\n{b}\n# before\n{c}{b}{BEGIN}\ncut");
        let made = bundle(&a, &given);
        assert_eq!(made, format!("{a}{b}{c}"));
        assert_eq!(bundle(&a, &made), made);
        assert_eq!(bundle("", "-----BEGIN PRIVATE KEY-----\nx\n-----END PRIVATE KEY-----\n"), "");
    }
}
