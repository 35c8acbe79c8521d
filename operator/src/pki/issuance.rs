//! Creation of cert-manager Certificates, whose state [`crate::pki::cert_manager`] evaluates.

use engram_identity::Name;
use kube::core::Status;
use serde_json::Value;

use crate::cluster::apply::write_object;
use crate::cluster::build::certificate;
use crate::cluster::observe::is_owned;
use crate::cluster::plan::covers;
use crate::cluster::validate::ValidatedCluster;
use crate::context::Context;
use crate::kube::api_request::{Error, request};
use crate::kube::resource_kinds::CERTIFICATE;
use crate::pki::cert_manager::{IssuanceState, issuance_state, rejection};
use crate::pki::provided_certificate::CertificateProblem;

/// Ensures the Certificate of a cluster with `tls.mode: CertManager`, and returns its state. Errors of cert-manager do not fail the
/// reconcile: a running cluster has its certificate.
pub(crate) async fn ensure(
    context: &Context,
    cluster: &ValidatedCluster,
    needed: &Name,
) -> Result<IssuanceState, Error> {
    let Some(wanted) = certificate(cluster, needed) else { return Ok(IssuanceState::Ready) };
    // Only the leader writes objects and statuses.
    if cluster.is_paused() || !context.leadership.is_leader() {
        return Ok(IssuanceState::Ready);
    }
    let name = cluster.names.certificate();
    match apply_certificate(context, cluster, &name, &wanted).await {
        Ok(found) => Ok(issuance_state(&name, &found)),
        Err(Error::NotLeader) => Err(Error::NotLeader),
        // Temporary, and affects the first object of a new cluster.
        Err(error) if error.is_kind_not_ready() => Err(error),
        Err(Error::Api { source: kube::Error::Api(status), .. }) => {
            let Status { code, message, reason, .. } = &*status;
            Ok(IssuanceState::Failed(rejection(&name, *code, reason, message)))
        }
        Err(error) => {
            Ok(IssuanceState::Failed(CertificateProblem { reason: "CertManagerFailed", message: error.to_string() }))
        }
    }
}

async fn apply_certificate(
    context: &Context,
    cluster: &ValidatedCluster,
    name: &str,
    wanted: &Value,
) -> Result<Value, Error> {
    let api = CERTIFICATE.of(&context.client, &cluster.namespace);
    let there = request(|| format!("read Certificate {name}"), api.get_opt(name)).await?;
    if let Some(there) = there.map(|there| CERTIFICATE.value(&there)) {
        if !is_owned(&there, &cluster.uid) {
            return Err(Error::NotOwned { kind: CERTIFICATE.name.to_owned(), name: name.to_owned() });
        }
        if covers(&there, wanted) {
            return Ok(there);
        }
    }
    let written = write_object(context, cluster, CERTIFICATE, name, wanted).await?;
    Ok(CERTIFICATE.value(&written))
}
