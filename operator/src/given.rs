//! Whether a Secret has a certificate that the workers of a cluster can use, and whom its processes believe then.
//!
//! The operator reads it for two things: to say what is wrong before a pod finds out, and for the authority in it, which everybody is told.
//! Its own certificate it signs itself, so that its authority is believed beside the given one.

use std::collections::BTreeMap;
use std::time::SystemTime;

use engram_api::status::{ClusterPhase, LearnerClusterStatus, Truth, condition};
use engram_identity::{Given, Name, bundle};
use k8s_openapi::ByteString;
use k8s_openapi::jiff::Timestamp;

use crate::names::{GIVEN, Names};
use crate::observed::Observed;
use crate::report::Writer;

/// A certificate that the workers can use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Fit {
    /// The authority of the certificate, as PEM.
    pub roots: String,
    /// For people: until when it is valid.
    pub message: String,
}

/// Why a Secret is of no use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Unfit {
    /// In one word.
    pub reason: &'static str,
    /// What is wrong, and what is to be done.
    pub message: String,
}

impl Unfit {
    /// The word for a Secret that is not there.
    pub(crate) const MISSING: &str = "SecretNotFound";

    /// There is no such Secret.
    pub(crate) fn missing(secret: &str, needed: &Name) -> Self {
        Self { reason: Self::MISSING, message: format!("there is no Secret {secret}; {}", wanted(needed)) }
    }

    /// This operator may not read it.
    pub(crate) fn forbidden(secret: &str) -> Self {
        let message = format!(
            "the operator may not read Secret {secret}: allow its service account to get it, by a Role of this namespace that names it \
             (docs/security.md)"
        );
        Self { reason: "SecretForbidden", message }
    }
}

fn wanted(needed: &Name) -> String {
    format!(
        "needed: a certificate with the URI {needed} and no other, for server and client authentication, in tls.crt, its key in tls.key, its \
         authority in ca.crt"
    )
}

/// Reads what is in `secret`; `needed` is the name that its certificate must have.
///
/// # Errors
/// It is of no use to the workers.
pub(crate) fn read(
    secret: &str,
    data: &BTreeMap<String, ByteString>,
    needed: &Name,
    now: SystemTime,
) -> Result<Fit, Unfit> {
    let unfit = |what: String| Unfit {
        reason: "SecretUnusable",
        message: format!("Secret {secret} is of no use: {what}; {}", wanted(needed)),
    };
    let found = GIVEN.map(|key| (key, data.get(key).map_or(&[][..], |text| text.0.as_slice())));
    if let Some((key, _)) = found.iter().find(|(_, bytes)| bytes.is_empty()) {
        return Err(unfit(format!("it has no {key}")));
    }
    let [(_, authority), (_, certificate), (_, key)] = found;
    let given = Given::read(authority, certificate, key, now).map_err(|error| unfit(error.to_string()))?;
    let Name { cluster, role, ordinal, .. } = given.name;
    if (cluster, role, ordinal) != (needed.cluster, needed.role, needed.ordinal) {
        return Err(unfit(format!("its certificate is of {}", given.name)));
    }
    let roots = bundle("", &String::from_utf8_lossy(authority));
    let until = Timestamp::try_from(given.until).map(|until| until.to_string()).unwrap_or_default();
    Ok(Fit { roots, message: format!("Secret {secret}, valid until {until}") })
}

/// Whom the processes of the cluster believe, as PEM: this operator, and who is given; while that is of no use, who was published last. `None`
/// where there was nobody yet, and no worker to believe.
pub(crate) fn believed(own: &str, found: &Result<Fit, Unfit>, published: Option<&str>) -> Option<String> {
    match found {
        Ok(fit) => Some(bundle(own, &fit.roots)),
        Err(_) => published.map(|published| bundle(own, published)),
    }
}

/// What was published of whom to believe.
pub(crate) fn published<'a>(names: &Names, observed: &'a Observed) -> Option<&'a str> {
    let name = names.authority();
    let is_meant = |object: &&serde_json::Value| object["kind"] == "ConfigMap" && object["metadata"]["name"] == *name;
    observed.objects.iter().find(is_meant)?.get("data")?.get(crate::names::ROOTS)?.as_str()
}

/// Says in a status how it stands with the certificate.
pub(crate) fn tell(status: &mut LearnerClusterStatus, found: &Result<Fit, Unfit>, generation: i64, now: &str) {
    let (truth, reason, message) = match found {
        Ok(fit) => (Truth::True, "Given", &fit.message),
        Err(unfit) => (Truth::False, unfit.reason, &unfit.message),
    };
    let mut writer = Writer::new(status, generation, now);
    writer.set(condition::CERTIFIED, truth, reason, message);
    *status = writer.status;
}

/// The status of a cluster that cannot begin before somebody gives it a certificate.
pub(crate) fn awaited(
    old: &LearnerClusterStatus,
    cluster_id: &str,
    unfit: Unfit,
    generation: i64,
    now: &str,
) -> LearnerClusterStatus {
    let mut writer = Writer::new(old, generation, now);
    let (reason, message) = (unfit.reason, unfit.message.clone());
    writer.set(condition::ACCEPTED, Truth::True, "Valid", "");
    writer.set(condition::STALLED, Truth::False, "Waiting", "");
    writer.set(condition::RECONCILING, Truth::True, reason, "waiting for the Secret with the workers' certificate");
    writer.set(condition::READY, Truth::False, reason, &message);
    let mut status = writer.status;
    status.phase = Some(ClusterPhase::Starting);
    // Whoever is to sign needs it.
    status.cluster_id = Some(cluster_id.to_owned());
    tell(&mut status, &Err(unfit), generation, now);
    status
}

#[cfg(test)]
mod tests {
    use super::*;
    use engram_identity::{Authority, Realm, Role};
    use engram_memory::ClusterId;
    use std::time::Duration;

    const HOUR: Duration = Duration::from_secs(3_600);
    const NOW: &str = "2026-11-21T09:00:00Z";

    fn needed() -> Name {
        Name::shared_by_workers("research", "words", ClusterId(7))
    }

    /// A Secret as an authority fills it.
    fn secret(authority: &Authority, name: &Name) -> BTreeMap<String, ByteString> {
        let pair = authority.issue(name, SystemTime::now(), HOUR).unwrap().pem;
        let texts = [authority.certificate(), &pair, &pair];
        GIVEN.iter().zip(texts).map(|(key, text)| ((*key).to_owned(), ByteString(text.as_bytes().to_vec()))).collect()
    }

    #[test]
    fn a_secret_is_of_use_with_the_one_name_and_says_otherwise_what_is_needed() {
        let now = SystemTime::now();
        let authority = Authority::create(Realm::Operator, now).unwrap();
        let good = secret(&authority, &needed());
        let fit = read("words-tls", &good, &needed(), now).unwrap();
        assert_eq!(fit.roots, bundle("", authority.certificate()));
        assert!(fit.message.starts_with("Secret words-tls, valid until 20"), "{}", fit.message);
        let why = |data: &BTreeMap<String, ByteString>, now| {
            let unfit = read("words-tls", data, &needed(), now).unwrap_err();
            assert!(unfit.reason == "SecretUnusable" && unfit.message.contains(&needed().to_string()), "{unfit:?}");
            unfit.message
        };
        for key in GIVEN {
            let mut less = good.clone();
            less.remove(key);
            assert!(why(&less, now).contains(&format!("it has no {key}")));
        }
        assert!(why(&good, now + 2 * HOUR).contains("xpired"));
        let other = secret(&Authority::create(Realm::Operator, now).unwrap(), &needed());
        let mixed = |key: &str| {
            let mut mixed = good.clone();
            mixed.insert(key.to_owned(), other[key].clone());
            mixed
        };
        assert!(why(&mixed("tls.key"), now).contains("the key is not of the certificate"));
        assert!(why(&mixed("ca.crt"), now).contains("the certificate is not good"));
        for stranger in [
            Name { ordinal: Some(0), ..needed() },
            Name { cluster: ClusterId(8), ..needed() },
            Name::on_kubernetes("research", "words", ClusterId(7), Role::Coordinator, 0),
            Name::on_kubernetes("research", "words", ClusterId(7), Role::Client, 0),
        ] {
            assert!(why(&secret(&authority, &stranger), now).contains(&format!("is of {stranger};")));
        }
    }

    #[test]
    fn whoever_was_believed_is_believed_until_somebody_else_is_given() {
        let now = SystemTime::now();
        let [own, first, second] = [0; 3].map(|_| Authority::create(Realm::Operator, now).unwrap());
        let of = |authority: &Authority| Ok(read("s", &secret(authority, &needed()), &needed(), now).unwrap());
        let lost = || Err(Unfit::missing("s", &needed()));
        let own = own.certificate();
        assert_eq!(believed(own, &lost(), None), None);
        let begun = believed(own, &of(&first), None).unwrap();
        assert_eq!(begun, bundle(own, first.certificate()));
        assert_eq!(believed(own, &lost(), Some(&begun)).unwrap(), begun, "a Secret that went changes nothing");
        let after = believed(own, &of(&second), Some(&begun)).unwrap();
        assert_eq!(after, bundle(own, second.certificate()));
    }

    #[test]
    fn what_is_missing_stands_in_the_conditions_with_the_name_that_is_needed() {
        let unfit = Unfit::missing("words-tls", &needed());
        let status = awaited(&LearnerClusterStatus::default(), "0f6c", unfit, 3, NOW);
        let find = |kind: &str| status.conditions.iter().find(|known| known.kind == kind).unwrap().clone();
        for kind in [condition::READY, condition::CERTIFIED] {
            let condition = find(kind);
            assert_eq!((condition.status, condition.reason.as_str()), (Truth::False, "SecretNotFound"));
            assert!(condition.message.contains("/worker and no other"), "{}", condition.message);
        }
        assert_eq!(status.cluster_id.as_deref(), Some("0f6c"));
        let mut later = status;
        tell(&mut later, &Ok(Fit { roots: String::new(), message: "m".into() }), 3, NOW);
        assert_eq!(later.conditions.iter().filter(|known| known.kind == condition::CERTIFIED).count(), 1);
    }
}
