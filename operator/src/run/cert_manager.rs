//! Keeps the Certificate that cert-manager is asked for. [`crate::cert_manager`] says what comes of it.

use engram_identity::Name;
use kube::core::Status;
use serde_json::Value;

use super::Context;
use super::apply::write_object;
use super::asking::{Error, ask};
use super::kinds::CERTIFICATE;
use super::observe::is_owned;
use crate::build::certificate;
use crate::cert_manager::{Asked, judge, refused};
use crate::given::Unfit;
use crate::plan::covers;
use crate::validate::ValidatedCluster;

/// Asks cert-manager for the certificate of the workers, where the cluster says so, and reads what it says. Nothing of cert-manager is an error:
/// a cluster that runs has its certificate, and is looked after without it.
pub(super) async fn keep(context: &Context, cluster: &ValidatedCluster, needed: &Name) -> Result<Asked, Error> {
    let Some(wanted) = certificate(cluster, needed) else { return Ok(Asked::Ready) };
    // Whoever does not lead writes neither objects nor statuses.
    if cluster.is_paused() || !context.leadership.leads() {
        return Ok(Asked::Ready);
    }
    let name = cluster.names.certificate();
    match kept(context, cluster, &name, &wanted).await {
        Ok(found) => Ok(judge(&name, &found)),
        Err(Error::Deposed) => Err(Error::Deposed),
        // Over soon, and then at the first object of a cluster.
        Err(error) if error.is_early() => Err(error),
        Err(Error::Api { source: kube::Error::Api(status), .. }) => {
            let Status { code, message, reason, .. } = &*status;
            Ok(Asked::Failed(refused(&name, *code, reason, message)))
        }
        Err(error) => Ok(Asked::Failed(Unfit { reason: "CertManagerFailed", message: error.to_string() })),
    }
}

async fn kept(context: &Context, cluster: &ValidatedCluster, name: &str, wanted: &Value) -> Result<Value, Error> {
    let api = CERTIFICATE.of(&context.client, &cluster.namespace);
    let there = ask(|| format!("read Certificate {name}"), api.get_opt(name)).await?;
    if let Some(there) = there.map(|there| CERTIFICATE.value(&there)) {
        if !is_owned(&there, &cluster.uid) {
            return Err(Error::Foreign { kind: CERTIFICATE.name.to_owned(), name: name.to_owned() });
        }
        if covers(&there, wanted) {
            return Ok(there);
        }
    }
    let written = write_object(context, cluster, CERTIFICATE, name, wanted).await?;
    Ok(CERTIFICATE.value(&written))
}
