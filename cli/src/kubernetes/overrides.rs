//! Manual overrides of the partition map in Kubernetes: the caller writes the `PartitionMap` with their own permissions, so that the
//! API server authorizes and audits it. The override is recorded with the map, as by a local coordinator.

use super::{Cluster, error};
use crate::error::failure;
use engram_api::ExitCode;
use engram_cluster::PartitionMap;
use engram_mapstore::{EntryOverride, Error, KubernetesStore, MapLocation, MapOverride, OverrideKind, with_causes};
use engram_memory::Law;
use futures::FutureExt as _;
use k8s_openapi::api::authentication::v1::SelfSubjectReview;
use k8s_openapi::api::authorization::v1::{
    ResourceAttributes, SelfSubjectAccessReview, SelfSubjectAccessReviewSpec, SubjectAccessReviewStatus,
};
use kube::Api;
use kube::api::{ApiResource, DynamicObject, GroupVersionKind, PostParams};
use serde_json::Value;
use tokio::runtime::Handle;

/// API group and resource of partition maps.
const GROUP: &str = "engram.dev";
const RESOURCE: &str = "partitionmaps";
/// Verbs required to override an existing map.
const CHANGE: [&str; 3] = ["get", "patch", "force-promote"];
/// Verbs required to create a map.
const CREATE: [&str; 2] = ["get", "create"];

impl Cluster {
    /// Writes an override that the coordinator has validated: the map that `apply` returns for the current map.
    ///
    /// # Errors
    /// A permission is missing, the map has changed since validation, or the API server does not respond.
    pub(crate) async fn override_map(
        &self,
        operation: OverrideKind,
        reason: &str,
        steps: Vec<EntryOverride>,
        apply: impl Fn(Option<&PartitionMap>) -> Option<PartitionMap> + Send + 'static,
    ) -> anyhow::Result<PartitionMap> {
        if reason.len() > MapOverride::MAX_TEXT_BYTES {
            let (length, limit) = (reason.len(), MapOverride::MAX_TEXT_BYTES);
            return Err(failure(
                ExitCode::Usage,
                format!("--accept-data-loss has {length} bytes; allowed: at most {limit}"),
            ));
        }
        let map_override = MapOverride::now(operation, &self.user().await?, reason, steps);
        let location = MapLocation::of_cluster(&self.namespace, &self.name, owner(&self.object));
        let store =
            KubernetesStore::new(self.client.clone(), Handle::current(), location, self.id()?, law(&self.object)?);
        // Blocking: the store waits for the API server.
        let written = tokio::task::spawn_blocking(move || map_override.apply(&store, apply)).await?;
        match written {
            Ok(map) => Ok(map),
            Err(error) => Err(self.explain(&error).await),
        }
    }

    /// Returns the user name, as authenticated by the API server.
    async fn user(&self) -> anyhow::Result<String> {
        let reviews: Api<SelfSubjectReview> = Api::all(self.client.clone());
        let response = reviews.create(&PostParams::default(), &SelfSubjectReview::default()).boxed().await;
        let review = response.map_err(|error| {
            error::describe(
                &error,
                "to read the user name",
                "create selfsubjectreviews.authentication.k8s.io",
                &self.namespace,
            )
        })?;
        let user = review.status.and_then(|status| status.user_info).and_then(|user| user.username);
        Ok(user.filter(|user| !user.is_empty()).unwrap_or_else(|| "unknown".to_owned()))
    }

    /// Converts an error of the store, naming missing permissions.
    async fn explain(&self, error: &Error) -> anyhow::Error {
        if let Error::Conflict { .. } = error {
            let text = "the partition map has changed meanwhile and nothing was written; check the state and try again";
            return failure(ExitCode::Conflict, text);
        }
        let server_error = server_error(error);
        if server_error.is_some_and(is_denial) {
            let required: &[&str] = match error {
                Error::Io { action: "read", .. } => &["get"],
                _ if self.has_map().await => &CHANGE,
                _ => &CREATE,
            };
            let mut missing = Vec::new();
            for verb in required {
                if !self.is_allowed(verb).await {
                    missing.push(*verb);
                }
            }
            if !missing.is_empty() {
                return failure(ExitCode::Denied, missing_permission(&missing, &self.namespace, &with_causes(error)));
            }
        }
        match server_error {
            Some(error) => error::describe(error, "to write the map", &format!("{RESOURCE}.{GROUP}"), &self.namespace),
            None => failure(ExitCode::Failed, format!("failed to write the partition map: {}", with_causes(error))),
        }
    }

    /// Whether a map exists; `true` if unknown.
    async fn has_map(&self) -> bool {
        let kind = GroupVersionKind::gvk(GROUP, "v1alpha1", "PartitionMap");
        let maps: Api<DynamicObject> =
            Api::namespaced_with(self.client.clone(), &self.namespace, &ApiResource::from_gvk(&kind));
        !matches!(maps.get_opt(&self.name).boxed().await, Ok(None))
    }

    /// Whether the caller has permission for the verb; `true` if unknown.
    async fn is_allowed(&self, verb: &str) -> bool {
        let reviews: Api<SelfSubjectAccessReview> = Api::all(self.client.clone());
        let review =
            SelfSubjectAccessReview { spec: access_review(verb, &self.namespace, &self.name), ..Default::default() };
        let response = reviews.create(&PostParams::default(), &review).boxed().await;
        response.ok().and_then(|review| review.status).is_none_or(|SubjectAccessReviewStatus { allowed, .. }| allowed)
    }
}

fn access_review(verb: &str, namespace: &str, name: &str) -> SelfSubjectAccessReviewSpec {
    let text = |text: &str| Some(text.to_owned());
    let attributes = ResourceAttributes {
        group: text(GROUP),
        resource: text(RESOURCE),
        verb: text(verb),
        namespace: text(namespace),
        name: text(name),
        ..ResourceAttributes::default()
    };
    SelfSubjectAccessReviewSpec { resource_attributes: Some(attributes), ..SelfSubjectAccessReviewSpec::default() }
}

/// Returns the error of the API server, if it caused the failure.
fn server_error(error: &Error) -> Option<&kube::Error> {
    let Error::Io { source, .. } = error else { return None };
    source.get_ref()?.downcast_ref()
}

/// Whether access is denied by RBAC, or by the admission policy for maps, which reports status 422.
fn is_denial(error: &kube::Error) -> bool {
    let kube::Error::Api(status) = error else { return false };
    status.code == 403 || (status.code == 422 && status.message.contains("ValidatingAdmissionPolicy"))
}

fn missing_permission(missing: &[&str], namespace: &str, reason: &str) -> String {
    format!(
        "failed to write the map: missing permission to {} {RESOURCE}.{GROUP} in namespace {namespace}, which ClusterRole \
         <release>-force-promote of the chart grants: {reason}",
        missing.join(" and to ")
    )
}

/// Returns the owner of a new map, as the operator sets it: a map outlives the `LearnerCluster` if the data does.
fn owner(object: &Value) -> Option<&str> {
    let storage = &object["spec"]["storage"];
    let is_deleted_with_cluster = storage["retainPolicy"] == "Delete" || storage["ephemeral"] == true;
    object["metadata"]["uid"].as_str().filter(|_| is_deleted_with_cluster)
}

fn law(object: &Value) -> anyhow::Result<Law> {
    match object["spec"]["learning"]["law"].as_str() {
        None | Some("Linear") => Ok(Law::Linear),
        Some(law) => Err(failure(ExitCode::Failed, format!("law {law} is not supported by this version"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kube::core::Status;
    use serde_json::json;
    use std::io;
    use std::path::PathBuf;

    fn store_error(code: u16, message: &str) -> Error {
        let status = Status { code, message: message.into(), ..Status::default() };
        let source = io::Error::other(kube::Error::Api(Box::new(status)));
        Error::Io { action: "write", path: PathBuf::from("PartitionMap research/words"), source }
    }

    #[test]
    fn denials_by_rbac_and_policy_differ_from_invalid_requests() {
        let denied = |code, message| server_error(&store_error(code, message)).is_some_and(is_denial);
        assert!(denied(403, "partitionmaps.engram.dev \"words\" is forbidden: User \"ann\" cannot patch"));
        let policy = "partitionmaps.engram.dev \"words\" is forbidden: ValidatingAdmissionPolicy 'partitionmaps.engram.dev' \
                      denied request: the new primary, or a member of its isr, is no candidate of the old entry";
        assert!(denied(422, policy));
        assert!(!denied(422, "spec.partitions: Invalid value") && !denied(500, "etcd is away"));
        let conflict = Error::Conflict { expected: Some(1), found: None };
        assert!(server_error(&conflict).is_none());
        let text = missing_permission(&["patch", "force-promote"], "research", &with_causes(&store_error(422, policy)));
        assert!(
            text.contains("permission to patch and to force-promote partitionmaps.engram.dev in namespace research")
        );
        assert!(text.contains("is no candidate of the old entry"), "{text}");
    }

    #[test]
    fn new_maps_are_owned_like_the_data() {
        let object = |storage: Value| json!({ "metadata": { "uid": "u" }, "spec": { "storage": storage } });
        assert_eq!(owner(&object(json!({ "size": "1Gi", "retainPolicy": "Retain" }))), None);
        assert_eq!(owner(&object(json!({ "size": "1Gi", "retainPolicy": "Delete" }))), Some("u"));
        assert_eq!(owner(&object(json!({ "ephemeral": true }))), Some("u"));
        let review = access_review("force-promote", "research", "words").resource_attributes.unwrap();
        assert_eq!((review.verb.as_deref(), review.name.as_deref()), (Some("force-promote"), Some("words")));
        assert!(law(&object(json!({}))).is_ok());
    }
}
