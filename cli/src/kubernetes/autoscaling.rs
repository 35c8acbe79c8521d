//! Decisions of the operator's autoscaler.

use super::{Cluster, error};
use crate::error::failure;
use engram_api::ExitCode;
use engram_forecast::history::History;
use futures::FutureExt as _;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::Api;

/// Key of the table in the ConfigMap of the operator.
const DECISIONS: &str = "decisions.csv";

impl Cluster {
    /// Reads the decisions that the operator has written: all but the last five minutes.
    ///
    /// # Errors
    /// The cluster has no `spec.autoscaling`, there is no decision yet, a permission is missing, or the API server fails.
    pub(crate) async fn autoscaling_history(&self) -> anyhow::Result<History> {
        if self.object["spec"]["autoscaling"].is_null() {
            return Err(failure(ExitCode::Usage, format!("{self} has no spec.autoscaling")));
        }
        let maps: Api<ConfigMap> = Api::namespaced(self.client.clone(), &self.namespace);
        let map = maps.get_opt(&format!("{}-autoscaling", self.name)).boxed().await;
        let map = map.map_err(|error| {
            error::describe(&error, "to read the decisions of autoscaling", "get configmaps", &self.namespace)
        })?;
        let text = map.and_then(|map| map.data?.remove(DECISIONS));
        let text = text.ok_or_else(|| {
            failure(
                ExitCode::NotReady,
                format!("{self} has no decision of autoscaling yet: {}", self.operator_status()),
            )
        })?;
        Ok(History::parse(&text).0)
    }

    /// Returns the operator's sentence about its last decision.
    pub(crate) fn last_decision(&self) -> Option<&str> {
        self.object["status"]["autoscaling"]["message"].as_str()
    }
}
