//! The authority of a cluster: signs certificates for its processes.

use crate::{Error, Name, RootId, Roots, SigningRequest, validity};
use engram_memory::ClusterId;
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose, SanType, SerialNumber,
};
use std::fmt;
use std::time::{Duration, SystemTime};
use time::OffsetDateTime;

/// How long a certificate is valid where nothing else is said. Shorter ends a stolen one sooner, longer survives an authority that is
/// away for longer.
pub const LIFETIME: Duration = Duration::from_secs(24 * 60 * 60);
/// How long the authority's own is: a cluster outlives many of its processes' certificates.
const OWN_LIFETIME: Duration = Duration::from_secs(10 * 365 * 24 * 60 * 60);
/// Certificates begin a little before they are made: clocks of machines differ.
pub(crate) const SKEW: Duration = Duration::from_secs(60);

/// When a certificate is due to be replaced: after two thirds of its life, so that the last third is left for trying again.
pub fn renewal(issued: SystemTime, lifetime: Duration) -> SystemTime {
    issued + lifetime * 2 / 3
}

/// A certificate with its key.
#[derive(Clone)]
pub struct Issued {
    /// The key, the certificate: both as PEM, in one text, so that one file replaces both at once.
    pub pem: String,
    /// Until when it is valid, in whole seconds.
    pub until: SystemTime,
    /// When it is due to be replaced.
    pub renew_at: SystemTime,
}

impl fmt::Debug for Issued {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The key is nobody's to read.
        f.debug_struct("Issued").field("until", &self.until).finish_non_exhaustive()
    }
}

/// For whom an authority signs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Realm {
    /// One cluster.
    Cluster(ClusterId),
    /// All clusters of an operator. Certificates name their cluster, and nobody believes one of another.
    Operator,
}

impl From<ClusterId> for Realm {
    fn from(cluster: ClusterId) -> Self {
        Self::Cluster(cluster)
    }
}

impl fmt::Display for Realm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cluster(cluster) => write!(f, "cluster {cluster}"),
            Self::Operator => f.write_str("an operator"),
        }
    }
}

/// Who signs for a cluster, or for several.
pub struct Authority {
    issuer: Issuer<'static, KeyPair>,
    /// Its own, and those of authorities before and after it, where it is about to follow one or to be followed.
    certificates: String,
    root: RootId,
    until: SystemTime,
}

impl fmt::Debug for Authority {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Authority")
    }
}

impl Authority {
    /// A new one, with a new key.
    ///
    /// # Errors
    /// The machine has no randomness to give.
    pub fn create(realm: impl Into<Realm>, now: SystemTime) -> Result<Self, Error> {
        let (realm, key) = (realm.into(), KeyPair::generate()?);
        let parameters = parameters(realm, now);
        let certificate = parameters.self_signed(&key)?.pem();
        let root = root_of(&certificate)?;
        let until = SystemTime::from(parameters.not_after);
        Ok(Self { issuer: Issuer::new(parameters, key), certificates: certificate, root, until })
    }

    /// One that was made before, from its key and its certificate, which others may stand beside.
    ///
    /// # Errors
    /// They are damaged, or not of one another.
    pub fn open(realm: impl Into<Realm>, key: &str, certificates: &str) -> Result<Self, Error> {
        let key = KeyPair::from_pem(key).map_err(|_| Error::unusable("the key of the authority is damaged"))?;
        // All of them are published, so all of them must be good.
        let roots = Roots::parse(certificates.as_bytes())?;
        let own = roots.with_key(key.public_key_raw());
        let (root, der) = own.ok_or_else(|| Error::unusable("the certificate of the authority is not of its key"))?;
        let until = validity::period(der).map(|(_, until)| until);
        let until = until.ok_or_else(|| Error::unusable("the certificate of the authority has no end"))?;
        let issuer = Issuer::new(parameters(realm.into(), SystemTime::now()), key);
        Ok(Self { issuer, certificates: certificates.to_owned(), root, until })
    }

    /// Its certificate as PEM, and those beside it: what everybody believes.
    pub fn certificate(&self) -> &str {
        &self.certificates
    }

    /// The one of [its certificates](Self::certificate) that is its own.
    pub fn root(&self) -> RootId {
        self.root
    }

    /// Until when its own certificate is valid.
    pub fn until(&self) -> SystemTime {
        self.until
    }

    /// Its key as PEM, for a file that nobody else reads.
    pub fn key(&self) -> String {
        self.issuer.key().serialize_pem()
    }

    /// Makes a key and signs a certificate for it, valid from a minute before `now` until `lifetime` after it.
    ///
    /// # Errors
    /// As [`Self::create`].
    pub fn issue(&self, name: &Name, now: SystemTime, lifetime: Duration) -> Result<Issued, Error> {
        let key = KeyPair::generate()?;
        let parameters = leaf(name, now, lifetime)?;
        let until = SystemTime::from(parameters.not_after);
        let certificate = parameters.signed_by(&key, &self.issuer)?;
        let pem = format!("{}{}", key.serialize_pem(), certificate.pem());
        Ok(Issued { pem, until, renew_at: renewal(now, lifetime) })
    }

    /// Signs a certificate for the key of a request, valid as one that is [issued](Self::issue), and returns it as PEM. Of the request only
    /// the key is taken: whether it may have this name, whoever calls this has decided.
    ///
    /// # Errors
    /// The name is too long for a certificate.
    pub fn sign(
        &self,
        request: &SigningRequest,
        name: &Name,
        now: SystemTime,
        lifetime: Duration,
    ) -> Result<String, Error> {
        Ok(leaf(name, now, lifetime)?.signed_by(request.key(), &self.issuer)?.pem())
    }
}

/// What the certificate of a process says.
fn leaf(name: &Name, now: SystemTime, lifetime: Duration) -> Result<CertificateParams, Error> {
    let mut parameters = named(name)?;
    parameters.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    // Every process of a cluster listens and calls.
    parameters.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
    parameters.use_authority_key_identifier_extension = true;
    (parameters.not_before, parameters.not_after) = (date(now - SKEW), date(now + lifetime));
    Ok(parameters)
}

/// The part that says whose it is.
pub(crate) fn named(name: &Name) -> Result<CertificateParams, Error> {
    let mut parameters = CertificateParams::default();
    parameters.distinguished_name = common_name(name.process());
    let uri = name.to_string().try_into();
    parameters.subject_alt_names = vec![SanType::URI(uri.map_err(|_| Error::unusable("a name is ASCII"))?)];
    Ok(parameters)
}

/// What an authority's certificate says; of one realm always the same, but for its time.
fn parameters(realm: Realm, now: SystemTime) -> CertificateParams {
    let mut parameters = CertificateParams::default();
    parameters.distinguished_name = common_name(format!("Engram authority of {realm}"));
    parameters.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    parameters.key_usages = vec![KeyUsagePurpose::KeyCertSign];
    parameters.serial_number = Some(SerialNumber::from(1_u64));
    (parameters.not_before, parameters.not_after) = (date(now - SKEW), date(now + OWN_LIFETIME));
    parameters
}

fn common_name(text: String) -> DistinguishedName {
    let mut name = DistinguishedName::new();
    name.push(DnType::CommonName, text);
    name
}

/// In whole seconds, as certificates have them.
fn date(time: SystemTime) -> OffsetDateTime {
    OffsetDateTime::from(time).replace_nanosecond(0).expect("0 is a nanosecond")
}

fn root_of(certificate: &str) -> Result<RootId, Error> {
    Roots::parse(certificate.as_bytes())?.ids().next().ok_or_else(|| Error::unusable("the authority is empty"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_third_of_a_life_is_left_for_trying_again() {
        let start = SystemTime::UNIX_EPOCH;
        assert_eq!(renewal(start, LIFETIME), start + Duration::from_secs(16 * 60 * 60));
        assert_eq!(renewal(start, Duration::from_secs(600)), start + Duration::from_secs(400));
    }

    #[test]
    fn an_authority_opens_with_its_own_certificate_alone() {
        let (now, cluster) = (SystemTime::now(), ClusterId(7));
        let (one, other) = (Authority::create(cluster, now).unwrap(), Authority::create(cluster, now).unwrap());
        assert!(Authority::open(cluster, &one.key(), one.certificate()).is_ok());
        assert!(Authority::open(cluster, &one.key(), other.certificate()).is_err());
        assert!(Authority::open(cluster, &one.key(), "").is_err());
        assert!(Authority::open(cluster, &one.key()[..40], one.certificate()).is_err());
        let both = format!("{}{}", other.certificate(), one.certificate());
        let among_others = Authority::open(cluster, &one.key(), &both).unwrap();
        assert_eq!((among_others.root(), among_others.until()), (one.root(), one.until()));
        assert_eq!(among_others.certificate(), both);
        assert_ne!(one.root(), other.root());
    }
}
