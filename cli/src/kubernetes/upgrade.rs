//! What Kubernetes knows that an upgrade has to fit: how objects are stored, and what the operator has pinned.

use super::Cluster;
use crate::commands::upgrade_check::InKubernetes;
use futures::FutureExt as _;
use futures::future::try_join_all;
use kube::Api;
use kube::api::{ApiResource, DynamicObject, GroupVersionKind};
use serde_json::Value;

/// The definitions of this product.
const DEFINITIONS: [&str; 3] = ["learnerclusters.engram.dev", "learnerruns.engram.dev", "partitionmaps.engram.dev"];

impl Cluster {
    /// What an upgrade has to fit. Who may not look at definitions is told the rest.
    pub(crate) async fn upgrade(&self) -> InKubernetes {
        let kind = GroupVersionKind::gvk("apiextensions.k8s.io", "v1", "CustomResourceDefinition");
        let definitions: Api<DynamicObject> = Api::all_with(self.client.clone(), &ApiResource::from_gvk(&kind));
        let stored =
            try_join_all(
                DEFINITIONS.map(|name| {
                    let definitions = definitions.clone();
                    async move {
                        Ok::<_, kube::Error>((name.to_owned(), stored(&definitions.get(name).boxed().await?.data)))
                    }
                }),
            );
        let conditions = self.object["status"]["conditions"].as_array();
        let mut conditions = conditions.into_iter().flatten();
        let offered = conditions.find(|it| it["type"] == "UpdateAvailable" && it["status"] == "True");
        InKubernetes {
            image: text(&self.object["status"]["worker"]["image"]),
            offered: offered.and_then(|offered| text(&offered["message"])),
            stored: stored.await.ok().map(|stored| stored.into_iter().collect()),
        }
    }
}

fn text(value: &Value) -> Option<String> {
    value.as_str().map(str::to_owned)
}

fn stored(definition: &Value) -> Vec<String> {
    definition["status"]["storedVersions"].as_array().into_iter().flatten().filter_map(text).collect()
}
