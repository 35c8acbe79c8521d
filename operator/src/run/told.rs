//! What the workers of all clusters say of their certificates, for [`crate::succession`].

use kube::api::ListParams;

use super::Context;
use super::asking::{Error, ask};
use super::kinds::CLUSTER;
use super::reconcile::{is_ours, key_of};
use crate::succession::Told;
use crate::validate::validate;

/// Asks the API server which clusters there are: one that was not looked at yet is one that has said nothing.
pub(super) async fn of(context: &Context, scopes: &[Option<String>]) -> Result<Vec<Told>, Error> {
    let mut all = Vec::new();
    for scope in scopes {
        let api = CLUSTER.within(&context.client, scope.as_deref());
        let found = ask(|| "list LearnerClusters".to_owned(), api.list(&ListParams::default())).await?;
        for object in &found.items {
            let (key, value) = (key_of(object), CLUSTER.value(object));
            if !is_ours(&value) {
                continue;
            }
            let said = context.coordinators.certificates(&key);
            let told = match validate(&value) {
                // Pods that are started again read whom to believe.
                Ok(cluster) if cluster.certificates().is_none() || cluster.spec.suspend == Some(true) => continue,
                Ok(cluster) => {
                    let is_given = cluster.given_secret().is_some();
                    Told { cluster: key.to_string(), workers: cluster.spec.workers, is_given, said }
                }
                // Refused as it is now, it goes on as it was: those count that say something.
                Err(_) if said.is_some() => {
                    let is_given = context.coordinators.certified_by_others(&key);
                    Told { cluster: key.to_string(), workers: 0, is_given, said }
                }
                Err(_) => continue,
            };
            all.push(told);
        }
    }
    Ok(all)
}
