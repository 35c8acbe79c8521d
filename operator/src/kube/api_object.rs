//! Objects of the Kubernetes API as this operator applies and finds them.
//!
//! An object is built and read as its type of the API. In between it is its content as JSON, of which server-side apply owns exactly the
//! fields that are there: found objects may have more fields than the types of this version know, and desired ones have the parts that a
//! user wrote into `podTemplate`.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use kube::api::DynamicObject;
use serde::de::DeserializeOwned;
use serde::{Deserialize as _, Serialize};
use serde_json::{Map, Value};

use crate::kube::resource_kinds::{Kind, built};

/// Why an object cannot be parsed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{object}: {field} is {found}; expected {expected}")]
pub struct InvalidObject {
    object: String,
    field: String,
    found: String,
    expected: &'static str,
}

/// An object of a needed name exists, and is not owned by the cluster.
#[derive(Debug, thiserror::Error)]
#[error("{kind} {name} exists and is not owned by this cluster: rename the cluster or delete the object")]
pub(crate) struct NotOwned {
    pub(crate) kind: &'static str,
    pub(crate) name: String,
}

/// An object of a kind: metadata typed, content as JSON.
#[derive(Clone, Debug, PartialEq)]
pub struct ApiObject {
    kind: Kind,
    metadata: ObjectMeta,
    content: Value,
}

impl ApiObject {
    /// Returns the object with this content.
    pub fn new(kind: Kind, content: Value) -> Self {
        let metadata = content.get("metadata").and_then(|metadata| ObjectMeta::deserialize(metadata).ok());
        Self { kind, metadata: metadata.unwrap_or_default(), content }
    }

    /// Returns an object that the operator has built, of one of the kinds that [`crate::cluster::build`] makes.
    pub(crate) fn built<K: k8s_openapi::Resource + Serialize>(object: &K) -> Self {
        Self::new(built(K::KIND), to_json(object))
    }

    /// Returns an object of a built kind with this content.
    pub(crate) fn of_built_kind<K: k8s_openapi::Resource>(content: Value) -> Self {
        Self::new(built(K::KIND), content)
    }

    /// Returns an object that a list, a watch or a request delivered.
    pub(crate) fn of(kind: Kind, mut object: DynamicObject) -> Self {
        // Items of a list lack their kind, and nothing reads managed fields.
        object.types = Some(kind.types());
        object.metadata.managed_fields = None;
        Self { kind, content: to_json(&object), metadata: object.metadata }
    }

    /// Returns its kind.
    pub const fn kind(&self) -> Kind {
        self.kind
    }

    /// Returns its metadata.
    pub const fn metadata(&self) -> &ObjectMeta {
        &self.metadata
    }

    /// Returns its name.
    pub fn name(&self) -> &str {
        self.metadata.name.as_deref().unwrap_or_default()
    }

    /// Returns its UID; empty for one that was not created.
    pub fn uid(&self) -> &str {
        self.metadata.uid.as_deref().unwrap_or_default()
    }

    /// Returns whether the object with this UID owns it.
    pub(crate) fn is_owned_by(&self, uid: &str) -> bool {
        is_owned(&self.metadata, uid)
    }

    /// Returns its owners.
    pub(crate) fn owners(&self) -> impl Iterator<Item = &OwnerReference> {
        self.metadata.owner_references.iter().flatten()
    }

    /// Returns its content.
    pub const fn content(&self) -> &Value {
        &self.content
    }

    /// Reads it as its type of the API.
    ///
    /// # Errors
    /// Names the object and what does not fit the type.
    pub(crate) fn read<T: DeserializeOwned>(&self) -> Result<T, InvalidObject> {
        T::deserialize(&self.content)
            .map_err(|error| self.invalid("object", error.to_string(), "an object of its kind"))
    }

    /// Reads it as this type; `None` if it is of another kind, or does not fit.
    pub(crate) fn read_kind<K: k8s_openapi::Resource + DeserializeOwned>(&self) -> Option<K> {
        if self.kind.name() == K::KIND { self.read().ok() } else { None }
    }

    /// Returns the error of a field with a wrong value.
    pub(crate) fn invalid(&self, field: &str, found: String, expected: &'static str) -> InvalidObject {
        let name = if self.name().is_empty() { "?" } else { self.name() };
        InvalidObject { object: format!("{} {name}", self.kind.name()), field: field.to_owned(), found, expected }
    }

    /// Returns whether `other` describes the same object.
    pub fn is_same(&self, other: &Self) -> bool {
        self.kind == other.kind && self.name() == other.name()
    }

    /// Returns whether it has every field of `desired`; it may have more, from defaults or other writers.
    pub(crate) fn covers(&self, desired: &Self) -> bool {
        covers(&self.content, &desired.content)
    }

    /// Adds an annotation.
    pub(crate) fn annotate(&mut self, name: &str, value: String) {
        self.metadata.annotations.get_or_insert_default().insert(name.to_owned(), value);
        if let Value::Object(content) = &mut self.content {
            content.insert("metadata".to_owned(), to_json(&self.metadata));
        }
    }
}

/// Returns whether the object with this metadata is owned by the one with this UID.
pub(crate) fn is_owned(object: &ObjectMeta, uid: &str) -> bool {
    object.owner_references.iter().flatten().any(|owner| owner.uid == uid)
}

/// Converts a value with text keys to JSON.
pub(crate) fn to_json(value: &impl Serialize) -> Value {
    serde_json::to_value(value).expect("keys are texts and numbers are finite")
}

/// Returns whether `found` has every field of `desired`.
pub(crate) fn covers(found: &Value, desired: &Value) -> bool {
    match (found, desired) {
        (Value::Object(found), Value::Object(desired)) => desired.iter().all(|(name, value)| {
            let empty = matches!(value, Value::Object(fields) if fields.is_empty())
                || matches!(value, Value::Array(items) if items.is_empty());
            found.get(name).map_or(empty, |found| covers(found, value))
        }),
        (Value::Array(found), Value::Array(desired)) => {
            found.len() == desired.len() && found.iter().zip(desired).all(|(found, desired)| covers(found, desired))
        }
        (found, desired) => found == desired,
    }
}

/// Merges `over`, a part of an object that a user wrote, into `base`: objects by field, lists of named items by name; other lists are
/// concatenated.
pub(crate) fn merge(base: &mut Value, over: &Value) {
    match (base, over) {
        (Value::Object(base), Value::Object(over)) => merge_fields(base, over),
        (Value::Array(base), Value::Array(over)) => {
            for item in over {
                let name = item.get("name").filter(|name| name.is_string());
                match base.iter_mut().find(|existing| name.is_some() && existing.get("name") == name) {
                    Some(existing) => merge(existing, item),
                    None => base.push(item.clone()),
                }
            }
        }
        (base, over) => *base = over.clone(),
    }
}

fn merge_fields(base: &mut Map<String, Value>, over: &Map<String, Value>) {
    for (name, value) in over {
        merge(base.entry(name.clone()).or_insert(Value::Null), value);
    }
}
