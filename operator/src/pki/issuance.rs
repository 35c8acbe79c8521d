//! cert-manager Certificates: what is there, and what the plan has to apply. [`crate::pki::cert_manager`] evaluates their state.

use engram_identity::Name;
use kube::core::Status;

use crate::cluster::apply::ApplyError;
use crate::cluster::build::certificate;
use crate::cluster::validate::ValidatedCluster;
use crate::context::Context;
use crate::kube::api_object::{ApiObject, NotOwned};
use crate::kube::api_request::{RequestError, WriteError, request};
use crate::kube::resource_kinds::CERTIFICATE;
use crate::pki::cert_manager::{IssuanceState, issuance_state, rejection};
use crate::pki::provided_certificate::CertificateProblem;

/// The Certificate of a cluster with `tls.mode: CertManager`, as observed.
pub(crate) struct Issuance {
    pub(crate) state: IssuanceState,
    /// The Certificate, if it is missing or differs.
    pub(crate) missing: Option<ApiObject>,
}

/// Observes the Certificate. Errors of cert-manager do not fail the reconcile: a running cluster has its certificate.
///
/// # Errors
/// The API server does not know the kind of the owner yet.
pub(crate) async fn observe_certificate(
    context: &Context,
    cluster: &ValidatedCluster,
    needed: &Name,
) -> Result<Issuance, RequestError> {
    let wanted = certificate(cluster, needed);
    // Only the leader writes objects and statuses.
    let Some(wanted) = wanted.filter(|_| !cluster.is_paused() && context.leadership.is_leader()) else {
        return Ok(Issuance { state: IssuanceState::Ready, missing: None });
    };
    let name = wanted.name();
    let api = CERTIFICATE.of(&context.client, &cluster.namespace);
    let found = match request(|| format!("read Certificate {name}"), api.get_opt(name)).await {
        Ok(found) => found.map(|found| ApiObject::of(CERTIFICATE, found)),
        Err(error) => {
            return Ok(Issuance { state: IssuanceState::Failed(request_problem(name, error)?), missing: None });
        }
    };
    if found.as_ref().is_some_and(|found| !found.is_owned_by(&cluster.uid)) {
        let foreign = NotOwned { kind: CERTIFICATE.name, name: name.to_owned() };
        return Ok(Issuance { state: IssuanceState::Failed(failed(&foreign)), missing: None });
    }
    let state = issuance_state(name, found.as_ref());
    let is_there = found.is_some_and(|found| found.covers(&wanted));
    Ok(Issuance { state, missing: (!is_there).then_some(wanted) })
}

/// Returns the problem of a Certificate that could not be applied.
///
/// # Errors
/// The error is temporary, and affects the first object of a new cluster, or the leader has changed.
pub(crate) fn problem(name: &str, error: ApplyError) -> Result<CertificateProblem, ApplyError> {
    match error {
        ApplyError::Write(WriteError::NotLeader) | ApplyError::Steer(_) => Err(error),
        ApplyError::Write(WriteError::Request(error)) => Ok(request_problem(name, error)?),
        ApplyError::NotOwned(foreign) => Ok(failed(&foreign)),
    }
}

fn request_problem(name: &str, error: RequestError) -> Result<CertificateProblem, RequestError> {
    if error.is_kind_not_ready() {
        return Err(error);
    }
    Ok(match error.status() {
        Some(Status { code, message, reason, .. }) => rejection(name, *code, reason, message),
        None => failed(&error),
    })
}

fn failed(error: &dyn std::error::Error) -> CertificateProblem {
    CertificateProblem { reason: "CertManagerFailed", message: error.to_string() }
}
