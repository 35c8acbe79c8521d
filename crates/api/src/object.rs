//! The envelope of every kind: `apiVersion`, `kind`, `metadata`, `spec`.

use std::borrow::Cow;
use std::collections::BTreeMap;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};

/// The group and version of every kind.
pub const API_VERSION: &str = "engram.dev/v1alpha1";

/// Default controller of an object (`spec.managedBy`).
pub const MANAGED_BY: &str = "engram.dev/operator";

/// Maximum length of a name. Kubernetes allows 63 characters; the rest is for suffixes of dependent objects
/// (`words-worker-99`).
pub const MAX_NAME_LENGTH: usize = 45;

/// The settings of one kind.
pub trait Kind: JsonSchema {
    /// Value of `kind`.
    const KIND: &'static str;
}

/// One object of a manifest: `LearnerCluster` and `LearnerRun` are names of this type.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Object<S> {
    /// Always [`API_VERSION`].
    pub api_version: Cow<'static, str>,
    /// Value of [`Kind::KIND`].
    pub kind: Cow<'static, str>,
    /// Identity of the object.
    pub metadata: Metadata,
    /// Desired state of the object.
    pub spec: S,
}

impl<S: Kind> Object<S> {
    /// Makes an object called `name`.
    pub fn new(name: impl Into<String>, spec: S) -> Self {
        let metadata = Metadata { name: name.into(), ..Metadata::default() };
        Self { api_version: API_VERSION.into(), kind: S::KIND.into(), metadata, spec }
    }
}

impl<S: Kind> JsonSchema for Object<S> {
    fn schema_name() -> Cow<'static, str> {
        S::KIND.into()
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        json_schema!({
            "type": "object",
            "required": ["apiVersion", "kind", "metadata", "spec"],
            "properties": {
                "apiVersion": { "type": "string", "const": API_VERSION },
                "kind": { "type": "string", "const": S::KIND },
                "metadata": generator.subschema_for::<Metadata>(),
                "spec": generator.subschema_for::<S>(),
            },
            "additionalProperties": false,
        })
    }
}

/// Identity of an object.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Metadata {
    /// Name of the object: `a-z`, `0-9` and `-`, starting with a letter, not ending with `-`, at most 45 characters.
    /// A completed run is not repeated under the same name: a new run needs a new name.
    #[schemars(extend("format" = "engram-name", "pattern" = "^[a-z]([-a-z0-9]*[a-z0-9])?$", "maxLength" = MAX_NAME_LENGTH))]
    #[schemars(example = &"words")]
    pub name: String,
    /// Kubernetes namespace; ignored in local mode.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub namespace: Option<String>,
    /// Labels, for selection.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    /// Annotations, for tools.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, String>,
}

/// Returns whether `name` is a valid object name.
pub fn is_name(name: &str) -> bool {
    let inner = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    name.len() <= MAX_NAME_LENGTH
        && name.bytes().all(inner)
        && name.starts_with(|first: char| first.is_ascii_lowercase())
        && !name.ends_with('-')
}
