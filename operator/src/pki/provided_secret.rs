//! Reading of Secrets with provided certificates, which [`crate::pki::provided_certificate`] validates.

use std::time::SystemTime;

use engram_identity::Name;
use engram_memory::ClusterId;
use k8s_openapi::api::core::v1::Secret;
use kube::Api;

use crate::cluster::validate::ValidatedCluster;
use crate::context::Context;
use crate::kube::api_request::{RequestError, request};
use crate::pki::provided_certificate::{CertificateProblem, UsableCertificate, read};

/// The id of a cluster is not one.
#[derive(Debug, thiserror::Error)]
#[error("failed to coordinate the cluster: cluster id {0:?} is not 32 hexadecimal digits")]
pub(crate) struct InvalidClusterId(String);

/// Parses the id of a cluster.
pub(crate) fn parse_cluster_id(id: &str) -> Result<ClusterId, InvalidClusterId> {
    id.parse().map_err(|_| InvalidClusterId(id.to_owned()))
}

/// Returns the name that the certificate of the cluster's workers must have, for the cluster id `id`.
pub(crate) fn needed(cluster: &ValidatedCluster, id: &str) -> Result<Name, InvalidClusterId> {
    let id = parse_cluster_id(id)?;
    Ok(Name::shared_by_workers(&cluster.namespace, &cluster.names.cluster, id))
}

/// Reads and validates the certificate in `secret`. The operator needs an explicit grant to read a Secret.
pub(crate) async fn read_secret(
    context: &Context,
    cluster: &ValidatedCluster,
    needed: &Name,
    secret: &str,
) -> Result<Result<UsableCertificate, CertificateProblem>, RequestError> {
    let api: Api<Secret> = Api::namespaced(context.client.clone(), &cluster.namespace);
    Ok(match request(|| format!("read Secret {secret}"), api.get_opt(secret)).await {
        Ok(Some(secret_object)) => read(secret, &secret_object.data.unwrap_or_default(), needed, SystemTime::now()),
        Ok(None) => Err(CertificateProblem::missing(secret, needed)),
        Err(error) if error.is_rejected_with(&[403]) => Err(CertificateProblem::forbidden(secret)),
        Err(error) => return Err(error),
    })
}
