//! Reads the Secret with a given certificate. [`crate::given`] decides.

use std::time::SystemTime;

use engram_identity::Name;
use k8s_openapi::api::core::v1::Secret;
use kube::Api;

use super::Context;
use super::asking::{Error, ask};
use crate::given::{Fit, Unfit, read};
use crate::validate::ValidatedCluster;

/// The name that the certificate of the cluster's workers must have; the id of its data is as the map or the status has it.
pub(super) fn needed(cluster: &ValidatedCluster, id: &str) -> Result<Name, Error> {
    let id = id.parse().map_err(|_| Error::Coordinator(format!("cluster id {id:?} is not 32 hexadecimal digits")))?;
    Ok(Name::shared_by_workers(&cluster.namespace, &cluster.names.cluster, id))
}

/// Looks whether the certificate that `secret` is to give the workers of the cluster is there and of use. This operator may read a Secret where
/// somebody has allowed it, and no other.
pub(super) async fn look(
    context: &Context,
    cluster: &ValidatedCluster,
    needed: &Name,
    secret: &str,
) -> Result<Result<Fit, Unfit>, Error> {
    let api: Api<Secret> = Api::namespaced(context.client.clone(), &cluster.namespace);
    Ok(match ask(|| format!("read Secret {secret}"), api.get_opt(secret)).await {
        Ok(Some(found)) => read(secret, &found.data.unwrap_or_default(), needed, SystemTime::now()),
        Ok(None) => Err(Unfit::missing(secret, needed)),
        Err(Error::Api { source: kube::Error::Api(status), .. }) if status.code == 403 => Err(Unfit::forbidden(secret)),
        Err(error) => return Err(error),
    })
}
