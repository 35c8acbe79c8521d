//! State in Kubernetes that an upgrade depends on: stored versions of objects, and the pinned worker image.

use super::{Cluster, error};
use futures::FutureExt as _;
use futures::future::try_join_all;
use kube::Api;
use kube::api::{ApiResource, DynamicObject, GroupVersionKind};
use serde::Serialize;
use serde_json::Value;
use std::collections::BTreeMap;

/// Custom resource definitions of Engram.
const DEFINITIONS: [&str; 3] = ["learnerclusters.engram.dev", "learnerruns.engram.dev", "partitionmaps.engram.dev"];

/// State in Kubernetes that an upgrade depends on.
#[derive(Debug, Default, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct UpgradeState {
    /// Image of the workers, pinned by the operator.
    pub(crate) image: Option<String>,
    /// Message of condition `UpdateAvailable`.
    pub(crate) available: Option<String>,
    /// Stored versions by definition; `None` without permission.
    pub(crate) stored: Option<BTreeMap<String, Vec<String>>>,
}

impl Cluster {
    /// Reads the state. Missing permission to read definitions is not an error.
    ///
    /// # Errors
    /// The API server fails otherwise.
    pub(crate) async fn upgrade(&self) -> anyhow::Result<UpgradeState> {
        let conditions = self.object["status"]["conditions"].as_array();
        let mut conditions = conditions.into_iter().flatten();
        let available = conditions.find(|it| it["type"] == "UpdateAvailable" && it["status"] == "True");
        let stored = match self.stored().boxed().await {
            Ok(stored) => Some(stored),
            Err(kube::Error::Api(status)) if status.code == 403 => None,
            Err(error) => {
                let action = "to read the stored versions";
                return Err(error::describe(&error, action, "get customresourcedefinitions", &self.namespace));
            }
        };
        Ok(UpgradeState {
            image: text(&self.object["status"]["worker"]["image"]),
            available: available.and_then(|condition| text(&condition["message"])),
            stored,
        })
    }

    /// Returns the stored versions by definition.
    async fn stored(&self) -> Result<BTreeMap<String, Vec<String>>, kube::Error> {
        let kind = GroupVersionKind::gvk("apiextensions.k8s.io", "v1", "CustomResourceDefinition");
        let definitions: Api<DynamicObject> = Api::all_with(self.client.clone(), &ApiResource::from_gvk(&kind));
        let objects = try_join_all(DEFINITIONS.map(|name| definitions.get(name))).await?;
        let stored = objects.into_iter().map(|definition| stored(&definition.data));
        Ok(DEFINITIONS.map(str::to_owned).into_iter().zip(stored).collect())
    }
}

fn text(value: &Value) -> Option<String> {
    value.as_str().map(str::to_owned)
}

fn stored(definition: &Value) -> Vec<String> {
    definition["status"]["storedVersions"].as_array().into_iter().flatten().filter_map(text).collect()
}
