//! Observes the certificates of a cluster with TLS: the trust bundle that its workers receive, and the state of a provided certificate.
//!
//! The first cluster with TLS makes the operator create its CA here, before there is a plan; [`crate::pki::certificates`] says why every
//! replica may do that.

use std::collections::BTreeMap;

use crate::cluster::observe::ObserveError;
use crate::cluster::observe::observation::Observation;
use crate::cluster::plan::safety::cluster_id;
use crate::cluster::validate::ValidatedCluster;
use crate::context::Context;
use crate::kube::api_object::ApiObject;
use crate::names::ROOTS;
use crate::pki::cert_manager::IssuanceState;
use crate::pki::issuance::Issuance;
use crate::pki::provided_certificate::{CertificateProblem, UsableCertificate, published_roots, trust_bundle};
use crate::pki::{issuance, provided_secret};

/// What is known of a cluster's certificates.
#[derive(Default)]
pub(crate) struct Trust {
    /// Files for workers by name; empty without TLS.
    published: BTreeMap<String, String>,
    certificate: Option<CertificateObservation>,
}

/// A certificate that the user or cert-manager provides.
pub(crate) struct CertificateObservation {
    secret: Result<UsableCertificate, CertificateProblem>,
    issuance: Issuance,
    /// Id of the cluster, which the name of the certificate contains.
    cluster_id: String,
    /// Whether there is a trust bundle. A new cluster has none, and waits.
    has_roots: bool,
}

impl CertificateObservation {
    /// Returns the certificate. `rejected` is why its Certificate could not be applied.
    pub(crate) fn usable_certificate(
        &self,
        rejected: Option<CertificateProblem>,
    ) -> Result<UsableCertificate, CertificateProblem> {
        let issuance = rejected.map_or_else(|| self.issuance.state.clone(), IssuanceState::Failed);
        issuance.combine(self.secret.clone())
    }

    pub(crate) fn cluster_id(&self) -> &str {
        &self.cluster_id
    }

    pub(crate) const fn has_roots(&self) -> bool {
        self.has_roots
    }
}

impl Trust {
    /// Returns whether the cluster can be planned. Otherwise it is new and waits for its certificate.
    pub(crate) fn is_complete(&self) -> bool {
        self.certificate.as_ref().is_none_or(CertificateObservation::has_roots)
    }

    /// Returns the files for workers, by name; empty without TLS.
    pub(crate) const fn published(&self) -> &BTreeMap<String, String> {
        &self.published
    }

    /// Returns the certificate that the user or cert-manager provides.
    pub(crate) const fn certificate(&self) -> Option<&CertificateObservation> {
        self.certificate.as_ref()
    }

    /// Returns the trust bundle of a cluster with a provided certificate.
    pub(crate) fn provided_roots(&self) -> Option<&str> {
        self.certificate.as_ref().and(self.published.get(ROOTS)).map(String::as_str)
    }

    /// Returns the Certificate of cert-manager to apply, if it is missing or differs.
    pub(crate) fn missing_certificate(&self) -> Option<&ApiObject> {
        self.certificate.as_ref().and_then(|certificate| certificate.issuance.missing.as_ref())
    }
}

/// Observes the certificates of a cluster.
///
/// # Errors
/// The CA is not available: without it the cluster can be neither created nor coordinated. Or a request failed.
pub(crate) async fn observe_trust(
    context: &Context,
    cluster: &ValidatedCluster,
    observed: &Observation,
) -> Result<Trust, ObserveError> {
    if cluster.certificates().is_none() {
        return Ok(Trust::default());
    }
    let mut roots = context.certificates.roots().await?;
    let mut certificate = None;
    if let Some(name) = cluster.provided_secret() {
        let cluster_id = cluster_id(cluster, observed);
        let needed = provided_secret::needed(cluster, &cluster_id)?;
        let issuance = issuance::observe_certificate(context, cluster, &needed).await?;
        let secret = provided_secret::read_secret(context, cluster, &needed, &name).await?;
        let bundle = trust_bundle(&roots, &secret, published_roots(&cluster.names, observed).as_deref());
        certificate = Some(CertificateObservation { secret, issuance, cluster_id, has_roots: bundle.is_some() });
        roots = bundle.unwrap_or(roots);
    }
    context.issuers.wait_for_first_read().await;
    let mut published = context.issuers.files();
    published.insert(ROOTS.to_owned(), roots);
    Ok(Trust { published, certificate })
}
