//! Certificate reports of the workers of all clusters, for [`crate::pki::ca_rotation`].

use kube::Api;
use kube::api::ListParams;

use crate::cluster::object::ClusterObject;
use crate::cluster::validate::validate;
use crate::context::{Context, Key};
use crate::kube::api_request::{RequestError, request};
use crate::pki::ca_rotation::ClusterCertificates;

/// Collects the reports. Clusters are listed from the API server, since one that was not reconciled yet has no reports.
pub(crate) async fn collect(
    context: &Context,
    scopes: &[Option<String>],
) -> Result<Vec<ClusterCertificates>, RequestError> {
    let mut all = Vec::new();
    for scope in scopes {
        let api: Api<ClusterObject> = match scope {
            Some(namespace) => Api::namespaced(context.client.clone(), namespace),
            None => Api::all(context.client.clone()),
        };
        let list = request(|| "list LearnerClusters".to_owned(), api.list(&ListParams::default())).await?;
        for object in &list.items {
            let key = Key::of(object);
            if !object.is_managed_here() {
                continue;
            }
            let reports = context.coordinators.certificates(&key);
            let certificates = match validate(object) {
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
