//! Orders against the rules of a map: whoever gives one writes the `PartitionMap` by rights of their own, so that the API server decides
//! who may, and has it in its audit log. What was ordered is kept beside the map, as by a local coordinator.

use super::{Cluster, error};
use crate::error::said;
use engram_api::ExitCode;
use engram_cluster::PartitionMap;
use engram_mapstore::{Error, KubernetesStore, Order, Place, Step, What, with_causes};
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

/// What orders are written to.
const GROUP: &str = "engram.dev";
const RESOURCE: &str = "partitionmaps";
/// Changes a map that is there, against its rules.
const CHANGE: [&str; 3] = ["get", "patch", "force-promote"];
/// Makes one where there is none.
const MAKE: [&str; 2] = ["get", "create"];

impl Cluster {
    /// Writes what was ordered, judged by the coordinator: what `ordered` makes of the map that is there.
    ///
    /// # Errors
    /// The caller may not, the map has moved on since it was judged, or the API server does not answer.
    pub(crate) async fn order(
        &self,
        what: What,
        reason: &str,
        steps: Vec<Step>,
        ordered: impl Fn(Option<&PartitionMap>) -> Option<PartitionMap> + Send + 'static,
    ) -> anyhow::Result<PartitionMap> {
        if reason.len() > Order::WORDS_MOST {
            let (length, most) = (reason.len(), Order::WORDS_MOST);
            return Err(said(ExitCode::Usage, format!("--accept-data-loss: {length} bytes; allowed are {most}")));
        }
        let order = Order::now(what, &self.who().await?, reason, steps);
        let place = Place::of_cluster(&self.namespace, &self.name, owner(&self.object));
        let store = KubernetesStore::new(self.client.clone(), Handle::current(), place, self.id()?, law(&self.object)?);
        // The store waits for the API server.
        let written = tokio::task::spawn_blocking(move || order.carry_out(&store, ordered)).await?;
        match written {
            Ok(map) => Ok(map),
            Err(failed) => Err(self.refusal(&failed).await),
        }
    }

    /// Who asks, as the API server knows them.
    async fn who(&self) -> anyhow::Result<String> {
        let reviews: Api<SelfSubjectReview> = Api::all(self.client.clone());
        let asked = reviews.create(&PostParams::default(), &SelfSubjectReview::default()).boxed().await;
        let told = asked.map_err(|found| {
            error::told(
                &found,
                "to ask who you are",
                "create selfsubjectreviews.authentication.k8s.io",
                &self.namespace,
            )
        })?;
        let user = told.status.and_then(|status| status.user_info).and_then(|user| user.username);
        Ok(user.filter(|user| !user.is_empty()).unwrap_or_else(|| "somebody without a name".to_owned()))
    }

    /// Why it was not written, in words that say what is missing.
    async fn refusal(&self, failed: &Error) -> anyhow::Error {
        if let Error::Conflict { .. } = failed {
            let text = "the partition changed meanwhile, nothing was done: look at it, and order it again";
            return said(ExitCode::Conflict, text);
        }
        let said_by_server = answer(failed);
        if said_by_server.is_some_and(is_denial) {
            let needed: &[&str] = match failed {
                Error::Io { action: "read", .. } => &["get"],
                _ if self.has_map().await => &CHANGE,
                _ => &MAKE,
            };
            let mut missing = Vec::new();
            for verb in needed {
                if !self.may(verb).await {
                    missing.push(*verb);
                }
            }
            if !missing.is_empty() {
                return said(ExitCode::Denied, lacks(&missing, &self.namespace, &with_causes(failed)));
            }
        }
        match said_by_server {
            Some(found) => error::told(found, "to write the map", &format!("{RESOURCE}.{GROUP}"), &self.namespace),
            None => said(ExitCode::Failed, format!("the order was not carried out: {}", with_causes(failed))),
        }
    }

    /// Whether there is a map to change; yes, where that cannot be told.
    async fn has_map(&self) -> bool {
        let kind = GroupVersionKind::gvk(GROUP, "v1alpha1", "PartitionMap");
        let maps: Api<DynamicObject> =
            Api::namespaced_with(self.client.clone(), &self.namespace, &ApiResource::from_gvk(&kind));
        !matches!(maps.get_opt(&self.name).boxed().await, Ok(None))
    }

    /// Whether the caller may do this to the map; yes, where that cannot be told.
    async fn may(&self, verb: &str) -> bool {
        let reviews: Api<SelfSubjectAccessReview> = Api::all(self.client.clone());
        let asked = SelfSubjectAccessReview { spec: question(verb, &self.namespace, &self.name), ..Default::default() };
        let told = reviews.create(&PostParams::default(), &asked).boxed().await;
        told.ok().and_then(|told| told.status).is_none_or(|SubjectAccessReviewStatus { allowed, .. }| allowed)
    }
}

fn question(verb: &str, namespace: &str, name: &str) -> SelfSubjectAccessReviewSpec {
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

/// What the API server said, where it was asked at all.
fn answer(failed: &Error) -> Option<&kube::Error> {
    let Error::Io { source, .. } = failed else { return None };
    source.get_ref()?.downcast_ref()
}

/// Whether somebody may not: by the rules of access, or by the policy that guards maps, which calls what it denies invalid.
fn is_denial(found: &kube::Error) -> bool {
    let kube::Error::Api(status) = found else { return false };
    status.code == 403 || (status.code == 422 && status.message.contains("ValidatingAdmissionPolicy"))
}

fn lacks(missing: &[&str], namespace: &str, why: &str) -> String {
    format!(
        "failed to write the map: not allowed, it takes the right to {} {RESOURCE}.{GROUP} in namespace {namespace}, which the \
         ClusterRole <release>-force-promote of the chart has: {why}",
        missing.join(" and to ")
    )
}

/// With what a map goes that is made anew, as the operator decides it: where the data outlives the object, so does the map.
fn owner(object: &Value) -> Option<&str> {
    let storage = &object["spec"]["storage"];
    let goes_along = storage["retainPolicy"] == "Delete" || storage["ephemeral"] == true;
    object["metadata"]["uid"].as_str().filter(|_| goes_along)
}

fn law(object: &Value) -> anyhow::Result<Law> {
    match object["spec"]["learning"]["law"].as_str() {
        None | Some("Linear") => Ok(Law::Linear),
        Some(law) => Err(said(ExitCode::Failed, format!("law {law} is not supported by this version of engram"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kube::core::Status;
    use serde_json::json;
    use std::io;
    use std::path::PathBuf;

    fn failed(code: u16, message: &str) -> Error {
        let status = Status { code, message: message.into(), ..Status::default() };
        let source = io::Error::other(kube::Error::Api(Box::new(status)));
        Error::Io { action: "write", path: PathBuf::from("PartitionMap research/words"), source }
    }

    #[test]
    fn what_rules_of_access_and_the_policy_deny_is_told_apart_from_what_is_wrong() {
        let denied = |code, message| answer(&failed(code, message)).is_some_and(is_denial);
        assert!(denied(403, "partitionmaps.engram.dev \"words\" is forbidden: User \"ann\" cannot patch"));
        let policy = "partitionmaps.engram.dev \"words\" is forbidden: ValidatingAdmissionPolicy 'partitionmaps.engram.dev' \
                      denied request: the new primary, or a member of its isr, is no candidate of the old entry";
        assert!(denied(422, policy));
        assert!(!denied(422, "spec.partitions: Invalid value") && !denied(500, "etcd is away"));
        let gone = Error::Conflict { expected: Some(1), found: None };
        assert!(answer(&gone).is_none());
        let text = lacks(&["patch", "force-promote"], "research", &with_causes(&failed(422, policy)));
        assert!(
            text.contains("the right to patch and to force-promote partitionmaps.engram.dev in namespace research")
        );
        assert!(text.contains("is no candidate of the old entry"), "{text}");
    }

    #[test]
    fn a_map_that_is_made_anew_goes_with_the_data() {
        let object = |storage: Value| json!({ "metadata": { "uid": "u" }, "spec": { "storage": storage } });
        assert_eq!(owner(&object(json!({ "size": "1Gi", "retainPolicy": "Retain" }))), None);
        assert_eq!(owner(&object(json!({ "size": "1Gi", "retainPolicy": "Delete" }))), Some("u"));
        assert_eq!(owner(&object(json!({ "ephemeral": true }))), Some("u"));
        let question = question("force-promote", "research", "words").resource_attributes.unwrap();
        assert_eq!((question.verb.as_deref(), question.name.as_deref()), (Some("force-promote"), Some("words")));
        assert!(law(&object(json!({}))).is_ok());
    }
}
