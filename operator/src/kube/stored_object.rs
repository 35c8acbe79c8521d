//! Objects of this operator's own kinds, as the API server stores them.
//!
//! Metadata, status and the fields that decide whether and how an object is reconciled are typed. The spec as a whole is read by the
//! checker of manifests, not by serde: what a default is may depend on which fields are absent, and the checker reports every problem at
//! once, also of an object that an earlier version of the definition accepted. Every object with metadata can be parsed, so that none
//! breaks a watch.

use std::fmt::Debug;

use engram_api::MANAGED_BY;
use k8s_openapi::NamespaceResourceScope;
use kube::Resource;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::Value;

/// A spec as stored, and its typed part `H`: the default if that does not fit, which the checker reports.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StoredSpec<H> {
    pub(crate) head: H,
    stored: Value,
}

impl<'de, H: DeserializeOwned + Default> Deserialize<'de> for StoredSpec<H> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        // An object may have no spec.
        let stored = Option::<Value>::deserialize(deserializer)?.unwrap_or_default();
        Ok(Self { head: H::deserialize(&stored).unwrap_or_default(), stored })
    }
}

impl<H> Serialize for StoredSpec<H> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.stored.serialize(serializer)
    }
}

/// A status; the default if another version wrote it.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[serde(transparent)]
pub struct StoredStatus<S>(pub(crate) S);

impl<'de, S: DeserializeOwned + Default> Deserialize<'de> for StoredStatus<S> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let stored = Value::deserialize(deserializer)?;
        Ok(Self(S::deserialize(stored).unwrap_or_default()))
    }
}

/// An object of one of this operator's kinds.
pub trait StoredObject:
    Resource<DynamicType = (), Scope = NamespaceResourceScope> + Serialize + DeserializeOwned + Clone + Debug
{
    /// The typed part of its spec.
    type Head;
    /// Its status.
    type Status: Serialize;

    /// Returns what decides about it, without the rest of its spec.
    fn head(&self) -> &Self::Head;

    /// Returns its status; the default if it has none.
    fn status(&self) -> &Self::Status;

    /// Returns the whole object, for the checker of manifests.
    fn manifest(&self) -> Value {
        serde_json::to_value(self).expect("an object parsed from JSON serializes to JSON")
    }

    /// Returns the object with another spec, as the checker sees it.
    fn manifest_with_spec(&self, spec: Value) -> Value {
        let mut manifest = self.manifest();
        if let Value::Object(fields) = &mut manifest {
            fields.insert("spec".to_owned(), spec);
        }
        manifest
    }

    /// Returns its name.
    fn name(&self) -> &str {
        self.meta().name.as_deref().unwrap_or_default()
    }

    /// Returns its namespace.
    fn namespace(&self) -> &str {
        self.meta().namespace.as_deref().unwrap_or_default()
    }

    /// Returns its UID; empty for an object that was not created.
    fn uid(&self) -> &str {
        self.meta().uid.as_deref().unwrap_or_default()
    }

    /// Returns its generation.
    fn generation(&self) -> i64 {
        self.meta().generation.unwrap_or_default()
    }

    /// Returns its creation time, RFC 3339 in whole seconds of UTC; empty for an object that was not created.
    fn created(&self) -> String {
        self.meta().creation_timestamp.as_ref().map_or_else(String::new, |time| time.0.to_string())
    }

    /// Returns whether this operator manages the object and it is not being deleted; garbage collection deletes its dependents.
    fn is_ours(&self, managed_by: Option<&str>) -> bool {
        managed_by.is_none_or(|manager| manager == MANAGED_BY) && self.meta().deletion_timestamp.is_none()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::object::ClusterObject;
    use crate::learner_run::object::RunObject;
    use serde_json::json;

    #[test]
    fn every_object_with_metadata_is_parsed_and_keeps_what_was_stored() {
        let stored = json!({
            "metadata": { "name": "words", "namespace": "research" },
            "spec": { "workers": "many", "managedBy": "other", "ofANewerVersion": { "deep": [1, 2.5] } },
            "status": { "phase": 7 },
        });
        let parsed: ClusterObject = serde_json::from_value(stored.clone()).expect("it has metadata");
        assert_eq!((parsed.name(), parsed.head().managed_by.as_deref()), ("words", Some("other")));
        assert_eq!(*parsed.status(), Default::default(), "a status of another version");
        assert_eq!(parsed.manifest()["spec"], stored["spec"]);
        assert_eq!(parsed.manifest()["kind"], "LearnerCluster", "items of a list have no kind");

        let wrong: RunObject =
            serde_json::from_value(json!({ "metadata": { "name": "a" }, "spec": 5 })).expect("it has metadata");
        assert_eq!((wrong.cluster(), wrong.head().suspend), ("", false));
        assert!(serde_json::from_value::<RunObject>(json!({ "spec": {} })).is_err());
        let bare: RunObject = serde_json::from_value(json!({ "metadata": { "name": "a" } })).expect("it has metadata");
        assert_eq!((bare.manifest()["spec"].clone(), bare.manifest().get("status")), (Value::Null, None));
    }

    #[test]
    fn derived_resources_are_those_of_the_definitions() {
        use crate::kube::resource_kinds::{CLUSTER, RUN};
        use kube::api::ApiResource;
        assert_eq!(ApiResource::erase::<ClusterObject>(&()), CLUSTER.resource());
        assert_eq!(ApiResource::erase::<RunObject>(&()), RUN.resource());
    }
}
