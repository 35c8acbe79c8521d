//! JSON Schema of the kinds, generated from the types.
//!
//! [`schema`] is the published schema for editors. The validation uses the same schema with private keywords:
//! `x-kubernetes-only` (ignored in local mode), `x-later` (reserved and not supported yet: name and advice), `x-blocks`
//! (settings of other kinds of run), `x-minimum` and `x-maximum` (bounds of a string with a unit).

use std::sync::LazyLock;

use schemars::JsonSchema;
use schemars::generate::SchemaSettings;
use serde_json::{Map, Value};

use crate::cluster::LearnerClusterSpec;
use crate::object::{Kind, Object};
use crate::operator::Configuration;
use crate::run::LearnerRunSpec;

/// Schemas with private keywords, one per kind, in the order of the documentation.
pub(crate) static KINDS: LazyLock<[(&str, Value); 2]> =
    LazyLock::new(|| [generate::<LearnerClusterSpec>(), generate::<LearnerRunSpec>()]);

/// Schema of the operator's configuration file, with private keywords.
pub(crate) static OPERATOR: LazyLock<Value> = LazyLock::new(inline::<Configuration>);

/// Returns the JSON Schema (2020-12) of the operator's configuration file. Unknown fields are rejected at every level.
pub fn operator_schema() -> Value {
    published(OPERATOR.clone())
}

/// Returns the JSON Schema (2020-12) of `kind`, or of a document of either kind where `kind` is `None`; `None` for an unknown
/// kind. Unknown fields are rejected at every level.
pub fn schema(kind: Option<&str>) -> Option<Value> {
    let schema = match kind {
        Some(kind) => KINDS.iter().find(|(name, _)| *name == kind)?.1.clone(),
        None => serde_json::json!({ "oneOf": KINDS.iter().map(|(_, schema)| schema).collect::<Vec<_>>() }),
    };
    Some(published(schema))
}

/// Returns a schema without private keywords.
fn published(mut schema: Value) -> Value {
    publish(&mut schema);
    if let Value::Object(root) = &mut schema {
        root.insert("$schema".into(), "https://json-schema.org/draft/2020-12/schema".into());
    }
    schema
}

/// Generates the schema of one kind, with subschemas inlined.
fn generate<S: Kind>() -> (&'static str, Value) {
    (S::KIND, inline::<Object<S>>())
}

/// Generates the schema of a type, with subschemas inlined.
pub(crate) fn inline<T: JsonSchema>() -> Value {
    let settings = SchemaSettings::draft2020_12().with(|settings| {
        settings.inline_subschemas = true;
        settings.meta_schema = None;
    });
    let mut schema = settings.into_generator().into_root_schema_for::<T>().to_value();
    tidy(&mut schema);
    schema
}

/// Removes artifacts of Rust types: `null` for an absent field, the width of numbers.
fn tidy(schema: &mut Value) {
    each_object(schema, &mut |object| {
        if let Some(Value::Array(alternatives)) = object.get_mut("anyOf") {
            alternatives.retain(|alternative| alternative["type"] != "null");
            if let [Value::Object(only)] = &mut alternatives[..] {
                let only = std::mem::take(only);
                object.remove("anyOf");
                for (keyword, value) in only {
                    object.entry(keyword).or_insert(value);
                }
            }
        }
        if let Some(Value::Array(types)) = object.get_mut("type") {
            types.retain(|name| name != "null");
            if let [only] = &types[..] {
                let only = only.clone();
                object.insert("type".into(), only);
            }
        }
        if let Some(Value::Array(words)) = object.get_mut("enum") {
            words.retain(|word| !word.is_null());
        }
        if object.get("default").is_some_and(Value::is_null) {
            object.remove("default");
        }
        if object.get("format").and_then(Value::as_str).is_some_and(|format| !format.starts_with("engram-")) {
            object.remove("format");
        }
    });
}

/// Removes private keywords and string formats.
fn publish(schema: &mut Value) {
    each_object(schema, &mut |object| {
        object.retain(|keyword, value| !(keyword.starts_with("x-") || keyword == "format" && value.as_str().is_some()));
    });
}

/// Calls `change` on every object in `value`, the innermost first.
fn each_object(value: &mut Value, change: &mut impl FnMut(&mut Map<String, Value>)) {
    match value {
        Value::Object(object) => {
            object.values_mut().for_each(|value| each_object(value, change));
            change(object);
        }
        Value::Array(items) => items.iter_mut().for_each(|value| each_object(value, change)),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}
