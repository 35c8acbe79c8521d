//! CA of a cluster: signs certificates for its processes.

use crate::{Error, Name, RootId, Roots, SigningRequest, validity};
use engram_memory::ClusterId;
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose, SanType, SerialNumber,
};
use std::fmt;
use std::time::{Duration, SystemTime};
use time::OffsetDateTime;

/// Default lifetime of a certificate. Shorter limits the use of a stolen one, longer survives a longer outage of the
/// CA.
pub const LIFETIME: Duration = Duration::from_secs(24 * 60 * 60);
/// Lifetime of the CA certificate: a cluster outlives many of its processes' certificates.
const OWN_LIFETIME: Duration = Duration::from_secs(10 * 365 * 24 * 60 * 60);
/// Certificates are valid from a little before they are issued: clocks of machines differ.
pub(crate) const SKEW: Duration = Duration::from_secs(60);

/// When a certificate or token is due for renewal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Renewal {
    issued: SystemTime,
    at: SystemTime,
}

impl Renewal {
    /// Creates it from the time of issue: after two thirds of the lifetime, so that the last third is left for retries.
    pub fn of(issued: SystemTime, lifetime: Duration) -> Self {
        Self { issued, at: issued + lifetime * 2 / 3 }
    }

    /// Whether it is due at `now`: it is old, or it was issued by a clock that was ahead, and is not valid yet.
    pub fn is_due(&self, now: SystemTime) -> bool {
        now >= self.at || now + SKEW < self.issued
    }
}

/// A certificate with its key.
#[derive(Clone)]
pub struct IssuedCertificate {
    /// Key and certificate as PEM in one text, so that one file replaces both at once.
    pub pem: String,
    /// End of validity, in whole seconds.
    pub until: SystemTime,
    /// When it is due for renewal.
    pub renewal: Renewal,
}

impl fmt::Debug for IssuedCertificate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The key is secret.
        f.debug_struct("Issued").field("until", &self.until).finish_non_exhaustive()
    }
}

/// What a CA signs for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Realm {
    /// One cluster.
    Cluster(ClusterId),
    /// All clusters of an operator. Certificates name their cluster, and no process accepts one of another.
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

/// A CA of one cluster, or of several.
pub struct CertificateAuthority {
    issuer: Issuer<'static, KeyPair>,
    /// Its own certificate, and those of previous and next CAs during a rotation.
    certificates: String,
    root: RootId,
    until: SystemTime,
}

impl fmt::Debug for CertificateAuthority {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("CertificateAuthority")
    }
}

impl CertificateAuthority {
    /// Creates a CA with a new key.
    ///
    /// # Errors
    /// The machine provides no randomness.
    pub fn create(realm: impl Into<Realm>, now: SystemTime) -> Result<Self, Error> {
        let (realm, key) = (realm.into(), KeyPair::generate()?);
        let parameters = parameters(realm, now);
        let certificate = parameters.self_signed(&key)?.pem();
        let root = root_of(&certificate)?;
        let expires_at = SystemTime::from(parameters.not_after);
        Ok(Self { issuer: Issuer::new(parameters, key), certificates: certificate, root, until: expires_at })
    }

    /// Opens an existing CA from its key and a bundle that contains its certificate.
    ///
    /// # Errors
    /// The key or the bundle is damaged, or they do not match.
    pub fn open(realm: impl Into<Realm>, key: &str, certificates: &str) -> Result<Self, Error> {
        let key = KeyPair::from_pem(key).map_err(|_| Error::unusable("the key of the CA is damaged"))?;
        // The whole bundle is published, so all of it must be valid.
        let roots = Roots::parse(certificates.as_bytes())?;
        let own = roots.with_key(key.public_key_raw());
        let (root, der) = own.ok_or_else(|| Error::unusable("the certificate of the CA does not match its key"))?;
        let until = validity::period(der).map(|(_, until)| until);
        let until = until.ok_or_else(|| Error::unusable("the certificate of the CA has no end of validity"))?;
        let issuer = Issuer::new(parameters(realm.into(), SystemTime::now()), key);
        Ok(Self { issuer, certificates: certificates.to_owned(), root, until })
    }

    /// Returns the trust bundle as PEM: its own certificate, and those of other CAs during a rotation.
    pub fn certificate(&self) -> &str {
        &self.certificates
    }

    /// Returns which of [the certificates](Self::certificate) is its own.
    pub fn root(&self) -> RootId {
        self.root
    }

    /// Returns the end of validity of its own certificate.
    pub fn until(&self) -> SystemTime {
        self.until
    }

    /// Returns its key as PEM, for a private file.
    pub fn key(&self) -> String {
        self.issuer.key().serialize_pem()
    }

    /// Creates a key and signs a certificate for it, valid from a minute before `now` until `lifetime` after it.
    ///
    /// # Errors
    /// As [`Self::create`].
    pub fn issue(&self, name: &Name, now: SystemTime, lifetime: Duration) -> Result<IssuedCertificate, Error> {
        let key = KeyPair::generate()?;
        let parameters = leaf(name, now, lifetime)?;
        let until = SystemTime::from(parameters.not_after);
        let certificate = parameters.signed_by(&key, &self.issuer)?;
        let pem = format!("{}{}", key.serialize_pem(), certificate.pem());
        Ok(IssuedCertificate { pem, until, renewal: Renewal::of(now, lifetime) })
    }

    /// Signs a certificate for the key of a request, valid like an [issued](Self::issue) one, and returns it as PEM.
    /// Only the key is taken from the request: the caller decides about the name.
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

/// Parameters of the certificate of a process.
fn leaf(name: &Name, now: SystemTime, lifetime: Duration) -> Result<CertificateParams, Error> {
    let mut parameters = certificate_params(name)?;
    parameters.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    // Every process of a cluster accepts and opens connections.
    parameters.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
    parameters.use_authority_key_identifier_extension = true;
    (parameters.not_before, parameters.not_after) = (date(now - SKEW), date(now + lifetime));
    Ok(parameters)
}

/// Parameters that name the process.
pub(crate) fn certificate_params(name: &Name) -> Result<CertificateParams, Error> {
    let mut parameters = CertificateParams::default();
    parameters.distinguished_name = common_name(name.process());
    let uri = name.to_string().try_into();
    parameters.subject_alt_names = vec![SanType::URI(uri.map_err(|_| Error::unusable("a name is ASCII"))?)];
    Ok(parameters)
}

/// Parameters of a CA certificate; constant for a realm, except for its validity.
fn parameters(realm: Realm, now: SystemTime) -> CertificateParams {
    let mut parameters = CertificateParams::default();
    parameters.distinguished_name = common_name(format!("Engram CA of {realm}"));
    parameters.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    parameters.key_usages = vec![KeyUsagePurpose::KeyCertSign];
    parameters.serial_number = Some(SerialNumber::from(1_u64));
    // Valid from the past, so that a CA created by a clock that is ahead is valid when the clock is corrected.
    let from = now.checked_sub(OWN_LIFETIME).filter(|from| *from > SystemTime::UNIX_EPOCH);
    (parameters.not_before, parameters.not_after) =
        (date(from.unwrap_or(SystemTime::UNIX_EPOCH)), date(now + OWN_LIFETIME));
    parameters
}

fn common_name(text: String) -> DistinguishedName {
    let mut name = DistinguishedName::new();
    name.push(DnType::CommonName, text);
    name
}

/// Truncates to whole seconds, as certificates do.
fn date(time: SystemTime) -> OffsetDateTime {
    OffsetDateTime::from(time).replace_nanosecond(0).expect("0 is a nanosecond")
}

fn root_of(certificate: &str) -> Result<RootId, Error> {
    Roots::parse(certificate.as_bytes())?.ids().next().ok_or_else(|| Error::unusable("the trust bundle is empty"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_third_of_the_lifetime_is_left_for_retries() {
        let issued = SystemTime::UNIX_EPOCH + LIFETIME;
        let due = |lifetime, after| Renewal::of(issued, lifetime).is_due(issued + Duration::from_secs(after));
        assert!(!due(LIFETIME, 16 * 60 * 60 - 1) && due(LIFETIME, 16 * 60 * 60));
        assert!(!due(Duration::from_secs(600), 399) && due(Duration::from_secs(600), 400));
    }

    #[test]
    fn certificate_of_a_clock_that_was_ahead_is_due_when_the_clock_is_corrected() {
        let now = SystemTime::now();
        let ahead = Renewal::of(now + 40 * LIFETIME, LIFETIME);
        assert!(ahead.is_due(now) && !ahead.is_due(now + 40 * LIFETIME));
        assert!(!Renewal::of(now + SKEW, LIFETIME).is_due(now), "clocks of machines differ");
    }

    #[test]
    fn ca_opens_only_with_its_own_certificate() {
        let (now, cluster) = (SystemTime::now(), ClusterId(7));
        let (one, other) =
            (CertificateAuthority::create(cluster, now).unwrap(), CertificateAuthority::create(cluster, now).unwrap());
        assert!(CertificateAuthority::open(cluster, &one.key(), one.certificate()).is_ok());
        assert!(CertificateAuthority::open(cluster, &one.key(), other.certificate()).is_err());
        assert!(CertificateAuthority::open(cluster, &one.key(), "").is_err());
        assert!(CertificateAuthority::open(cluster, &one.key()[..40], one.certificate()).is_err());
        let both = format!("{}{}", other.certificate(), one.certificate());
        let among_others = CertificateAuthority::open(cluster, &one.key(), &both).unwrap();
        assert_eq!((among_others.root(), among_others.until()), (one.root(), one.until()));
        assert_eq!(among_others.certificate(), both);
        assert_ne!(one.root(), other.root());
    }
}
