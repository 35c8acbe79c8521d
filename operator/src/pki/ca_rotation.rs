//! CA rotation without failed calls: a new CA is trusted by all workers before it signs, and the old one stays trusted until no worker has a
//! certificate signed by it.
//!
//! ```text
//! Secret                stable           announced               signing            stable
//! ca.pem                A         ──>    A, B             ──>    B, A        ──>    B
//! ca.key                of A             of A                    of B               of B
//! next.key                               of B
//!                           requested, or          all workers            all workers have
//!                           A expires in a year    trust B                certificates of B
//! ```
//!
//! `ca.pem` is the trust bundle, and its first certificate is the signing CA. All state is in the Secret and in the workers' reports, so any
//! replica can continue a rotation.

use std::collections::BTreeMap;
use std::fmt;
use std::time::{Duration, SystemTime};

use engram_coordinator::WorkerCertificate;
use engram_identity::{CertificateAuthority, Error, Realm, RootId, Roots, split_pem};

/// How long before the expiry of a CA its rotation starts.
const RENEW_BEFORE: Duration = Duration::from_secs(365 * 24 * 60 * 60);
/// Minimum duration of a step. Replicas read the Secret every few seconds, and each must trust a CA before a certificate signed by it is used.
pub(crate) const STEP_MINIMUM: Duration = Duration::from_secs(20);
/// How long to wait for an unreachable worker. One that returns later reads the trust bundle before it requests a certificate.
const UNREACHABLE_WORKER_TIMEOUT: Duration = Duration::from_secs(60 * 60);
/// Maximum number of workers that a message lists.
const MAX_LISTED_WORKERS: usize = 5;

/// Content of the CA Secret.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct CaSecret {
    /// Trust bundle as PEM; the signing CA comes first.
    pub certificates: String,
    /// Key of the signing CA.
    pub key: String,
    /// Key of the next CA.
    pub next_key: Option<String>,
}

impl fmt::Debug for CaSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CaSecret").field("certificates", &self.certificates).finish_non_exhaustive()
    }
}

/// The loaded CAs.
pub(crate) struct CaSet {
    secret: CaSecret,
    /// The signing CA.
    pub signing: CertificateAuthority,
    /// Trusted CAs, in the order of the bundle.
    pub trusted: Vec<RootId>,
    next: Option<CertificateAuthority>,
}

/// Stage of a rotation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stage {
    /// No rotation is in progress.
    Stable,
    /// The next CA is published and does not sign yet.
    Announced,
    /// The new CA signs, and the old one is still trusted.
    Signing,
}

/// Certificates of a cluster, as its workers report them.
#[derive(Debug, Clone)]
pub(crate) struct ClusterCertificates {
    /// Namespace and name.
    pub cluster: String,
    /// Desired number of workers.
    pub workers: u32,
    /// Whether the workers' certificate is provided rather than signed by this operator.
    pub is_provided: bool,
    /// Reports of the reachable workers; `None` while the cluster is not coordinated here.
    pub reports: Option<BTreeMap<u32, WorkerCertificate>>,
}

/// Next step of a rotation.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// Nothing to do.
    Idle,
    /// Wait, with a human-readable reason.
    Wait(String),
    /// Replace the content of the Secret.
    Replace(CaSecret),
}

impl CaSecret {
    /// Creates the first CA.
    ///
    /// # Errors
    /// Fails if the system's random number generator fails.
    pub(crate) fn create(now: SystemTime) -> Result<Self, Error> {
        let ca = CertificateAuthority::create(Realm::Operator, now)?;
        Ok(Self { certificates: ca.certificate().to_owned(), key: ca.key(), next_key: None })
    }

    /// Loads the CAs.
    ///
    /// # Errors
    /// Fails if the content is damaged or keys and certificates do not match.
    pub(crate) fn open(self) -> Result<CaSet, Error> {
        let open = |key: &String| CertificateAuthority::open(Realm::Operator, key, &self.certificates);
        let (signing, next) = (open(&self.key)?, self.next_key.as_ref().map(open).transpose()?);
        let trusted = Roots::parse(self.certificates.as_bytes())?.ids().collect();
        Ok(CaSet { secret: self, signing, trusted, next })
    }
}

impl CaSet {
    /// Returns the Secret content that this was loaded from.
    pub(crate) fn secret(&self) -> &CaSecret {
        &self.secret
    }

    /// Returns the stage of the rotation.
    pub(crate) fn stage(&self) -> Stage {
        match (&self.next, self.trusted.len()) {
            (Some(_), _) => Stage::Announced,
            (None, 1) => Stage::Stable,
            (None, _) => Stage::Signing,
        }
    }

    /// Returns the next step; `requested` is whether a rotation was requested, `since` the time in the current stage.
    ///
    /// # Errors
    /// Fails if the system's random number generator fails.
    pub(crate) fn step(
        &self,
        requested: bool,
        since: Duration,
        clusters: &[ClusterCertificates],
        now: SystemTime,
    ) -> Result<Step, Error> {
        let stage = self.stage();
        if stage == Stage::Stable {
            let ends_soon = self.signing.until() < now + RENEW_BEFORE;
            return if requested || ends_soon { self.announce(now).map(Step::Replace) } else { Ok(Step::Idle) };
        }
        let waiting = self.waiting(since < UNREACHABLE_WORKER_TIMEOUT, clusters);
        let what = match stage {
            Stage::Announced => "to trust the next CA",
            _ => "to renew their certificates with the new CA",
        };
        if let Some(first) = waiting.first() {
            let named =
                waiting.iter().skip(1).take(MAX_LISTED_WORKERS - 1).fold(first.clone(), |all, next| all + ", " + next);
            let more = waiting.len().saturating_sub(MAX_LISTED_WORKERS);
            let more = if more == 0 { String::new() } else { format!(" and {more} more") };
            return Ok(Step::Wait(format!("waiting for {named}{more} {what}")));
        }
        if since < STEP_MINIMUM {
            return Ok(Step::Wait("waiting for all operator replicas to read the Secret".into()));
        }
        Ok(Step::Replace(match &self.next {
            Some(next) => CaSecret {
                certificates: self.only(next.root()) + &self.only(self.signing.root()),
                key: next.key(),
                next_key: None,
            },
            None => CaSecret { certificates: self.only(self.signing.root()), ..self.secret.clone() },
        }))
    }

    fn announce(&self, now: SystemTime) -> Result<CaSecret, Error> {
        let CaSecret { certificates, key, .. } = self.secret.clone();
        let next = CertificateAuthority::create(Realm::Operator, now)?;
        Ok(CaSecret { certificates: certificates + next.certificate(), key, next_key: Some(next.key()) })
    }

    /// Returns the certificate of one trusted CA.
    fn only(&self, root: RootId) -> String {
        let is_it = |pem: &&str| Roots::parse(pem.as_bytes()).is_ok_and(|roots| roots.ids().eq([root]));
        split_pem(&self.secret.certificates).find(is_it).map(|pem| format!("{pem}\n")).unwrap_or_default()
    }

    /// Lists the clusters and workers that are not ready for the next step.
    fn waiting(&self, require_all: bool, clusters: &[ClusterCertificates]) -> Vec<String> {
        let is_ready = |cluster: &ClusterCertificates, report: &WorkerCertificate| match &self.next {
            Some(next) => report.trusted_roots.contains(&next.root()),
            None => cluster.is_provided || report.root == self.signing.root(),
        };
        let mut waiting = Vec::new();
        for cluster in clusters {
            let Some(reports) = &cluster.reports else {
                waiting.push(cluster.cluster.clone());
                continue;
            };
            let unreachable = (0..cluster.workers).filter(|ordinal| require_all && !reports.contains_key(ordinal));
            let unready = reports.iter().filter(|(_, report)| !is_ready(cluster, report)).map(|(ordinal, _)| *ordinal);
            waiting.extend(unreachable.chain(unready).map(|ordinal| format!("{} worker {ordinal}", cluster.cluster)));
        }
        waiting
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn certificates(reports: impl IntoIterator<Item = (u32, WorkerCertificate)>) -> ClusterCertificates {
        ClusterCertificates {
            cluster: "research/words".into(),
            workers: 2,
            is_provided: false,
            reports: Some(reports.into_iter().collect()),
        }
    }

    fn report_of(cas: &CaSet) -> WorkerCertificate {
        WorkerCertificate { trusted_roots: cas.trusted.clone(), root: cas.signing.root() }
    }

    fn becomes(step: Step) -> CaSet {
        match step {
            Step::Replace(secret) => secret.open().unwrap(),
            other => panic!("{other:?}"),
        }
    }

    fn waits(step: Step) -> String {
        match step {
            Step::Wait(why) => why,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_ca_signs_once_all_workers_trust_it_and_the_old_one_is_removed_when_unused() {
        let now = SystemTime::now();
        let first = CaSecret::create(now).unwrap().open().unwrap();
        assert_eq!(first.stage(), Stage::Stable);
        assert_eq!(first.step(false, UNREACHABLE_WORKER_TIMEOUT, &[], now).unwrap(), Step::Idle);
        let old = report_of(&first);

        let announced = becomes(
            first.step(true, Duration::ZERO, &[certificates([(0, old.clone()), (1, old.clone())])], now).unwrap(),
        );
        assert_eq!((announced.stage(), announced.trusted.len()), (Stage::Announced, 2));
        assert_eq!(announced.signing.root(), first.signing.root(), "the next CA does not sign yet");
        assert_eq!(announced.signing.certificate(), announced.secret().certificates, "all CAs are published");
        let trusting = report_of(&announced);
        let step = |clusters: &[ClusterCertificates], since| announced.step(false, since, clusters, now).unwrap();
        let late = UNREACHABLE_WORKER_TIMEOUT + STEP_MINIMUM;
        for (clusters, since, missing) in [
            (certificates([(0, trusting.clone()), (1, old.clone())]), STEP_MINIMUM, "research/words worker 1 to trust"),
            // An unreachable worker is waited for only so long.
            (certificates([(0, trusting.clone())]), STEP_MINIMUM, "research/words worker 1 to trust"),
            (ClusterCertificates { reports: None, ..certificates([]) }, late, "research/words to trust"),
            (certificates([(1, old)]), late, "research/words worker 1 to trust"),
            (certificates([(0, trusting.clone()), (1, trusting.clone())]), STEP_MINIMUM / 2, "all operator replicas"),
        ] {
            let why = waits(step(&[clusters], since));
            assert!(why.contains(missing), "{why}");
        }
        assert!(matches!(step(&[certificates([(0, trusting.clone())])], late), Step::Replace(_)));

        let signing = becomes(step(&[certificates([(0, trusting.clone()), (1, trusting.clone())])], STEP_MINIMUM));
        assert_eq!(signing.stage(), Stage::Signing);
        assert_eq!(signing.trusted, [announced.trusted[1], announced.trusted[0]], "the signing CA comes first");
        assert_eq!(signing.signing.root(), announced.trusted[1]);
        assert_eq!(signing.secret().next_key, None);
        let new = report_of(&signing);
        let step = |clusters: &[ClusterCertificates]| signing.step(true, STEP_MINIMUM, clusters, now).unwrap();
        let both = certificates([(0, new.clone()), (1, trusting)]);
        assert!(
            waits(step(std::slice::from_ref(&both))).contains("worker 1 to renew their certificates with the new CA")
        );
        let provided = ClusterCertificates { is_provided: true, ..both };
        assert!(matches!(step(&[provided]), Step::Replace(_)), "their certificate is provided");

        let stable = becomes(step(&[certificates([(0, new.clone()), (1, new)])]));
        assert_eq!((stable.stage(), stable.signing.root()), (Stage::Stable, signing.signing.root()));
        assert_eq!(stable.trusted, [signing.signing.root()]);
    }

    #[test]
    fn a_ca_is_rotated_before_it_expires() {
        let now = SystemTime::now();
        let cas = CaSecret::create(now).unwrap().open().unwrap();
        let end = cas.signing.until();
        assert_eq!(
            cas.step(false, UNREACHABLE_WORKER_TIMEOUT, &[], end - RENEW_BEFORE - STEP_MINIMUM).unwrap(),
            Step::Idle
        );
        let announced =
            becomes(cas.step(false, UNREACHABLE_WORKER_TIMEOUT, &[], end - RENEW_BEFORE + STEP_MINIMUM).unwrap());
        assert_eq!(announced.stage(), Stage::Announced);
    }

    #[test]
    fn a_message_lists_a_limited_number_of_workers() {
        let now = SystemTime::now();
        let first = CaSecret::create(now).unwrap().open().unwrap();
        let announced = becomes(first.step(true, STEP_MINIMUM, &[], now).unwrap());
        let many = ClusterCertificates { workers: 9, ..certificates([]) };
        let why = waits(announced.step(false, STEP_MINIMUM, &[many], now).unwrap());
        assert!(why.ends_with("research/words worker 4 and 4 more to trust the next CA"), "{why}");
    }
}
