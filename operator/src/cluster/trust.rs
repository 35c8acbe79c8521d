//! Certificates of a cluster with TLS: the trust bundle that its workers receive, and the state of a provided certificate.

use std::collections::BTreeMap;
use std::time::Duration;

use engram_api::status::LearnerClusterStatus;

use crate::cluster::observe::observation::Observation;
use crate::cluster::plan::Plan;
use crate::cluster::plan::revision::Offer;
use crate::cluster::plan::safety::cluster_id;
use crate::cluster::reconcile::Pass;
use crate::cluster::report::publish_status;
use crate::cluster::status::set_reconcile_failed;
use crate::cluster::validate::ValidatedCluster;
use crate::kube::api_request::Error;
use crate::names::ROOTS;
use crate::pki::provided_certificate::{
    CertificateProblem, UsableCertificate, awaiting_certificate_status, published_roots, set_certificate_condition,
    trust_bundle,
};
use crate::pki::{issuance, provided_secret};

/// Polling interval for a missing or invalid Secret: the operator is not allowed to watch Secrets.
const CERTIFICATE_REQUEUE: Duration = Duration::from_secs(5);

/// What is known of a cluster's certificates.
pub(crate) enum Trust {
    /// The cluster can be planned.
    Complete(CompleteTrust),
    /// A new cluster waits for its certificate with this status, and is observed again after this time.
    Awaiting(Box<LearnerClusterStatus>, Duration),
}

/// Files for workers, and the state of a provided certificate.
#[derive(Default)]
pub(crate) struct CompleteTrust {
    /// By name; empty without TLS.
    published: BTreeMap<String, String>,
    provided: Option<Result<UsableCertificate, CertificateProblem>>,
}

impl CompleteTrust {
    /// Returns the offer to this cluster: that to all clusters, and its files.
    pub(crate) fn offer(&self, common: &Offer) -> Offer {
        if self.published.is_empty() {
            return common.clone();
        }
        Offer { published: self.published.clone(), ..common.clone() }
    }

    /// Returns the trust bundle of a cluster with a provided certificate.
    pub(crate) fn provided_roots(&self) -> Option<&str> {
        self.provided.as_ref().and(self.published.get(ROOTS)).map(String::as_str)
    }

    /// Sets condition CertificateValid, and observes an invalid certificate again soon.
    pub(crate) fn set_condition<S>(&self, plan: &mut Plan<S>, generation: i64, now: &str) {
        let Some(state) = &self.provided else { return };
        set_certificate_condition(&mut plan.status, state, generation, now);
        if state.is_err() {
            plan.requeue = plan.requeue.min(CERTIFICATE_REQUEUE);
        }
    }
}

/// Observes the certificates of a cluster; requests one from cert-manager if the spec says so.
///
/// # Errors
/// The CA is not available: without it the cluster can be neither created nor coordinated. Or a request failed.
pub(crate) async fn observe_trust(
    pass: &Pass<'_>,
    cluster: &ValidatedCluster,
    observed: &Observation,
) -> Result<Trust, Error> {
    let Pass { context, old, now, .. } = pass;
    if cluster.certificates().is_none() {
        return Ok(Trust::Complete(CompleteTrust::default()));
    }
    let mut roots = match context.certificates.roots().await {
        Ok(roots) => roots,
        Err(error) => {
            let mut status = old.clone();
            set_reconcile_failed(&mut status, &error.to_string(), now);
            publish_status(pass, &status).await?;
            return Err(error);
        }
    };
    let mut provided = None;
    if let Some(secret) = cluster.provided_secret() {
        let id = cluster_id(cluster, observed);
        let needed = provided_secret::needed(cluster, &id)?;
        let issuance = issuance::ensure(context, cluster, &needed).await?;
        let state = issuance.combine(provided_secret::read_secret(context, cluster, &needed, &secret).await?);
        match (trust_bundle(&roots, &state, published_roots(&cluster.names, observed)), state) {
            (None, Err(unfit)) => {
                let status = awaiting_certificate_status(old, &id, unfit, cluster.generation, now);
                return Ok(Trust::Awaiting(Box::new(status), CERTIFICATE_REQUEUE));
            }
            (all, state) => {
                roots = all.unwrap_or(roots);
                provided = Some(state);
            }
        }
    }
    context.issuers.wait_for_first_read().await;
    let mut published = context.issuers.files();
    published.insert(ROOTS.to_owned(), roots);
    Ok(Trust::Complete(CompleteTrust { published, provided }))
}
