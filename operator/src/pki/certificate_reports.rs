//! Certificate reports of the workers of all clusters, for [`crate::pki::ca_rotation`].

use kube::api::ListParams;

use crate::cluster::controller::key_of;
use crate::cluster::reconcile::is_ours;
use crate::cluster::validate::validate;
use crate::context::Context;
use crate::kube::api_request::{Error, request};
use crate::kube::resource_kinds::CLUSTER;
use crate::pki::ca_rotation::ClusterCertificates;

/// Collects the reports. Clusters are listed from the API server, since one that was not reconciled yet has no reports.
pub(crate) async fn collect(context: &Context, scopes: &[Option<String>]) -> Result<Vec<ClusterCertificates>, Error> {
    let mut all = Vec::new();
    for scope in scopes {
        let api = CLUSTER.within(&context.client, scope.as_deref());
        let list = request(|| "list LearnerClusters".to_owned(), api.list(&ListParams::default())).await?;
        for object in &list.items {
            let (key, value) = (key_of(object), CLUSTER.value(object));
            if !is_ours(&value) {
                continue;
            }
            let reports = context.coordinators.certificates(&key);
            let certificates = match validate(&value) {
                // Restarted pods read the current trust bundle.
                Ok(cluster) if cluster.certificates().is_none() || cluster.spec.suspend == Some(true) => continue,
                Ok(cluster) => {
                    let is_provided = cluster.provided_secret().is_some();
                    ClusterCertificates {
                        cluster: key.to_string(),
                        workers: cluster.spec.workers,
                        is_provided,
                        reports,
                    }
                }
                // With an invalid spec the cluster continues as it was: only reporting workers count.
                Err(_) if reports.is_some() => {
                    let is_provided = context.coordinators.is_certificate_provided(&key);
                    ClusterCertificates { cluster: key.to_string(), workers: 0, is_provided, reports }
                }
                Err(_) => continue,
            };
            all.push(certificates);
        }
    }
    Ok(all)
}
