//! What Kubernetes knows that an upgrade has to fit: how objects are stored, and what the operator has pinned.

use super::{Cluster, error};
use crate::commands::upgrade_check::InKubernetes;
use futures::FutureExt as _;
use futures::future::try_join_all;
use kube::Api;
use kube::api::{ApiResource, DynamicObject, GroupVersionKind};
use serde_json::Value;
use std::collections::BTreeMap;

/// The definitions of this product.
const DEFINITIONS: [&str; 3] = ["learnerclusters.engram.dev", "learnerruns.engram.dev", "partitionmaps.engram.dev"];

impl Cluster {
    /// What an upgrade has to fit. Who may not look at definitions is told the rest.
    ///
    /// # Errors
    /// When the API server fails otherwise.
    pub(crate) async fn upgrade(&self) -> anyhow::Result<InKubernetes> {
        let conditions = self.object["status"]["conditions"].as_array();
        let mut conditions = conditions.into_iter().flatten();
        let offered = conditions.find(|it| it["type"] == "UpdateAvailable" && it["status"] == "True");
        let stored = match self.stored().boxed().await {
            Ok(stored) => Some(stored),
            Err(kube::Error::Api(status)) if status.code == 403 => None,
            Err(found) => {
                let wanted = "to see how objects are stored";
                return Err(error::told(&found, wanted, "get customresourcedefinitions", &self.namespace));
            }
        };
        Ok(InKubernetes {
            image: text(&self.object["status"]["worker"]["image"]),
            offered: offered.and_then(|offered| text(&offered["message"])),
            stored,
        })
    }

    /// The versions in which objects are stored, by definition.
    async fn stored(&self) -> Result<BTreeMap<String, Vec<String>>, kube::Error> {
        let kind = GroupVersionKind::gvk("apiextensions.k8s.io", "v1", "CustomResourceDefinition");
        let definitions: Api<DynamicObject> = Api::all_with(self.client.clone(), &ApiResource::from_gvk(&kind));
        let found = try_join_all(DEFINITIONS.map(|name| definitions.get(name))).await?;
        let stored = found.into_iter().map(|definition| stored(&definition.data));
        Ok(DEFINITIONS.map(str::to_owned).into_iter().zip(stored).collect())
    }
}

fn text(value: &Value) -> Option<String> {
    value.as_str().map(str::to_owned)
}

fn stored(definition: &Value) -> Vec<String> {
    definition["status"]["storedVersions"].as_array().into_iter().flatten().filter_map(text).collect()
}
