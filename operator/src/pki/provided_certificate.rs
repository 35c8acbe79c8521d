//! Validation of a Secret with a certificate that a user or cert-manager provides, and the resulting trust bundle.
//!
//! The operator reads the Secret to report problems before a pod fails, and to publish its CA. The operator's own certificates are
//! signed by its own CA, so the trust bundle contains both.

use std::collections::BTreeMap;
use std::time::SystemTime;

use engram_api::status::{ClusterPhase, LearnerClusterStatus, Truth, condition};
use engram_identity::{Name, ProvidedCertificate, bundle};
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::ConfigMap;
use k8s_openapi::jiff::Timestamp;

use crate::cluster::observe::observation::Observation;
use crate::cluster::status::StatusWriter;
use crate::kube::api_object::ApiObject;
use crate::names::{Names, ROOTS, TLS_SECRET_KEYS};

/// A valid certificate for the workers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct UsableCertificate {
    /// CA of the certificate, as PEM.
    pub roots: String,
    /// Human-readable validity.
    pub message: String,
}

/// Why a certificate cannot be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct CertificateProblem {
    /// Machine-readable reason.
    pub reason: &'static str,
    /// Human-readable problem and remedy.
    pub message: String,
}

impl CertificateProblem {
    /// Reason for a Secret that does not exist.
    pub(crate) const MISSING: &str = "SecretNotFound";

    /// The Secret does not exist.
    pub(crate) fn missing(secret: &str, needed: &Name) -> Self {
        Self { reason: Self::MISSING, message: format!("Secret {secret} not found; {}", requirement(needed)) }
    }

    /// The operator is not allowed to read the Secret.
    pub(crate) fn forbidden(secret: &str) -> Self {
        let message = format!(
            "the operator is not allowed to read Secret {secret}: grant its ServiceAccount get on it by a Role in this namespace \
             (docs/security.md)"
        );
        Self { reason: "SecretForbidden", message }
    }
}

fn requirement(needed: &Name) -> String {
    format!(
        "required: a certificate with the URI {needed} and no other, for server and client authentication, in tls.crt, its key in tls.key, \
         its CA in ca.crt"
    )
}

/// Validates the content of `secret`; `needed` is the name that its certificate must have.
///
/// # Errors
/// Returns why the workers cannot use it.
pub(crate) fn read(
    secret: &str,
    data: &BTreeMap<String, ByteString>,
    needed: &Name,
    now: SystemTime,
) -> Result<UsableCertificate, CertificateProblem> {
    let problem = |what: String| CertificateProblem {
        reason: "SecretUnusable",
        message: format!("Secret {secret} is not usable: {what}; {}", requirement(needed)),
    };
    let files = TLS_SECRET_KEYS.map(|key| (key, data.get(key).map_or(&[][..], |text| text.0.as_slice())));
    if let Some((key, _)) = files.iter().find(|(_, bytes)| bytes.is_empty()) {
        return Err(problem(format!("it has no {key}")));
    }
    let [(_, ca), (_, certificate), (_, key)] = files;
    let provided = ProvidedCertificate::read(ca, certificate, key, now).map_err(|error| problem(error.to_string()))?;
    let Name { cluster, role, ordinal, .. } = provided.name;
    if (cluster, role, ordinal) != (needed.cluster, needed.role, needed.ordinal) {
        return Err(problem(format!("its certificate is of {}", provided.name)));
    }
    let roots = bundle("", &String::from_utf8_lossy(ca));
    let until = Timestamp::try_from(provided.until).map(|until| until.to_string()).unwrap_or_default();
    Ok(UsableCertificate { roots, message: format!("Secret {secret}, valid until {until}") })
}

/// Returns the trust bundle of the cluster as PEM: the operator's CA and the CA of the provided certificate. While the provided
/// certificate is not usable, the published bundle is kept; `None` if nothing was published yet.
pub(crate) fn trust_bundle(
    own: &str,
    files: &Result<UsableCertificate, CertificateProblem>,
    published: Option<&str>,
) -> Option<String> {
    match files {
        Ok(usable) => Some(bundle(own, &usable.roots)),
        Err(_) => published.map(|published| bundle(own, published)),
    }
}

/// Returns the published trust bundle.
pub(crate) fn published_roots(names: &Names, observed: &Observation) -> Option<String> {
    let name = names.ca();
    let found = observed.objects.iter().filter(|object| object.name() == name);
    found.filter_map(ApiObject::read_kind::<ConfigMap>).find_map(|map| map.data?.remove(ROOTS))
}

/// Sets condition CertificateValid.
pub(crate) fn set_certificate_condition(
    status: &mut LearnerClusterStatus,
    files: &Result<UsableCertificate, CertificateProblem>,
    generation: i64,
    now: &str,
) {
    let (truth, reason, message) = match files {
        Ok(usable) => (Truth::True, "Valid", &usable.message),
        Err(problem) => (Truth::False, problem.reason, &problem.message),
    };
    let mut writer = StatusWriter::new(status, generation, now);
    writer.set(condition::CERTIFICATE_VALID, truth, reason, message);
    *status = writer.status;
}

/// Returns the status of a new cluster that waits for its certificate.
pub(crate) fn awaiting_certificate_status(
    old: &LearnerClusterStatus,
    cluster_id: &str,
    problem: CertificateProblem,
    generation: i64,
    now: &str,
) -> LearnerClusterStatus {
    let mut writer = StatusWriter::new(old, generation, now);
    let (reason, message) = (problem.reason, problem.message.clone());
    writer.set(condition::ACCEPTED, Truth::True, "Valid", "");
    writer.set(condition::STALLED, Truth::False, "Waiting", "");
    writer.set(condition::RECONCILING, Truth::True, reason, "waiting for the Secret with the workers' certificate");
    writer.set(condition::READY, Truth::False, reason, &message);
    let mut status = writer.status;
    status.phase = Some(ClusterPhase::Starting);
    // The name of the certificate contains the cluster id.
    status.cluster_id = Some(cluster_id.to_owned());
    set_certificate_condition(&mut status, &Err(problem), generation, now);
    status
}

#[cfg(test)]
mod tests {
    use super::*;
    use engram_identity::{CertificateAuthority, Realm, Role};
    use engram_memory::ClusterId;
    use std::time::Duration;

    const HOUR: Duration = Duration::from_secs(3_600);
    const NOW: &str = "2026-11-21T09:00:00Z";

    fn needed() -> Name {
        Name::shared_by_workers("research", "words", ClusterId(7))
    }

    /// A Secret with a certificate signed by `ca`.
    fn secret(ca: &CertificateAuthority, name: &Name) -> BTreeMap<String, ByteString> {
        let pair = ca.issue(name, SystemTime::now(), HOUR).unwrap().pem;
        let texts = [ca.certificate(), &pair, &pair];
        TLS_SECRET_KEYS
            .iter()
            .zip(texts)
            .map(|(key, text)| ((*key).to_owned(), ByteString(text.as_bytes().to_vec())))
            .collect()
    }

    #[test]
    fn a_secret_is_usable_only_with_the_required_name() {
        let now = SystemTime::now();
        let ca = CertificateAuthority::create(Realm::Operator, now).unwrap();
        let good = secret(&ca, &needed());
        let usable = read("words-tls", &good, &needed(), now).unwrap();
        assert_eq!(usable.roots, bundle("", ca.certificate()));
        assert!(usable.message.starts_with("Secret words-tls, valid until 20"), "{}", usable.message);
        let why = |data: &BTreeMap<String, ByteString>, now| {
            let problem = read("words-tls", data, &needed(), now).unwrap_err();
            assert!(
                problem.reason == "SecretUnusable" && problem.message.contains(&needed().to_string()),
                "{problem:?}"
            );
            problem.message
        };
        for key in TLS_SECRET_KEYS {
            let mut less = good.clone();
            less.remove(key);
            assert!(why(&less, now).contains(&format!("it has no {key}")));
        }
        assert!(why(&good, now + 2 * HOUR).contains("xpired"));
        let other = secret(&CertificateAuthority::create(Realm::Operator, now).unwrap(), &needed());
        let mixed = |key: &str| {
            let mut mixed = good.clone();
            mixed.insert(key.to_owned(), other[key].clone());
            mixed
        };
        assert!(why(&mixed("tls.key"), now).contains("the key does not match the certificate"));
        assert!(why(&mixed("ca.crt"), now).contains("the certificate is not valid"));
        for stranger in [
            Name { ordinal: Some(0), ..needed() },
            Name { cluster: ClusterId(8), ..needed() },
            Name::on_kubernetes("research", "words", ClusterId(7), Role::Coordinator, 0),
            Name::on_kubernetes("research", "words", ClusterId(7), Role::Client, 0),
        ] {
            assert!(why(&secret(&ca, &stranger), now).contains(&format!("is of {stranger};")));
        }
    }

    #[test]
    fn published_roots_are_kept_until_another_certificate_is_provided() {
        let now = SystemTime::now();
        let [own, first, second] = [0; 3].map(|_| CertificateAuthority::create(Realm::Operator, now).unwrap());
        let of = |ca: &CertificateAuthority| Ok(read("s", &secret(ca, &needed()), &needed(), now).unwrap());
        let lost = || Err(CertificateProblem::missing("s", &needed()));
        let own = own.certificate();
        assert_eq!(trust_bundle(own, &lost(), None), None);
        let begun = trust_bundle(own, &of(&first), None).unwrap();
        assert_eq!(begun, bundle(own, first.certificate()));
        assert_eq!(trust_bundle(own, &lost(), Some(&begun)).unwrap(), begun, "a deleted Secret changes nothing");
        let after = trust_bundle(own, &of(&second), Some(&begun)).unwrap();
        assert_eq!(after, bundle(own, second.certificate()));
    }

    #[test]
    fn conditions_name_the_required_certificate() {
        let problem = CertificateProblem::missing("words-tls", &needed());
        let status = awaiting_certificate_status(&LearnerClusterStatus::default(), "0f6c", problem, 3, NOW);
        let find = |kind: &str| status.conditions.iter().find(|entry| entry.kind == kind).unwrap().clone();
        for kind in [condition::READY, condition::CERTIFICATE_VALID] {
            let condition = find(kind);
            assert_eq!((condition.status, condition.reason.as_str()), (Truth::False, "SecretNotFound"));
            assert!(condition.message.contains("/worker and no other"), "{}", condition.message);
        }
        assert_eq!(status.cluster_id.as_deref(), Some("0f6c"));
        let mut later = status;
        set_certificate_condition(
            &mut later,
            &Ok(UsableCertificate { roots: String::new(), message: "m".into() }),
            3,
            NOW,
        );
        assert_eq!(later.conditions.iter().filter(|entry| entry.kind == condition::CERTIFICATE_VALID).count(), 1);
    }
}
