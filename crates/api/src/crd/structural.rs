//! Conversion of JSON Schema into structural schemas for API servers.
//!
//! API servers support a subset of JSON Schema (no `oneOf` with fields, no `const`, exclusive bounds as flags) and
//! extensions (CEL rules, list types). Constraints that a structural schema cannot express become CEL rules.

use serde_json::{Map, Value, json};

use super::rules::Rule;
use crate::buffers::NAME_PATTERN;
use crate::cluster::SMALLEST_SETTING;
use crate::{objects, snapshot};

/// Maximum length of a quantity: 20 digits and a unit. Without a bound the API server's cost estimate assumes megabytes of
/// text and rejects rules on it.
const LONGEST_QUANTITY: u64 = 22;

/// Converts the schemas of one kind.
pub(crate) struct Structural<'a> {
    pub(crate) rules: &'a [Rule],
    pub(crate) defaults: &'a [(&'static str, Value)],
    /// Paths whose default depends on other fields; the operator fills it in.
    pub(crate) without_default: &'a [&'static str],
}

impl Structural<'_> {
    /// Converts the schema of the field at `path`.
    pub(crate) fn of(&self, schema: &Value, path: &str) -> Value {
        let mut out = Map::new();
        let mut rules = Vec::new();
        if let Some(text) = schema["description"].as_str() {
            out.insert("description".into(), text.replace('\n', " ").into());
        }
        match (schema["oneOf"].as_array(), schema["type"].as_str()) {
            (None, None) if schema["x-quantity"] == true => {
                out.insert("anyOf".into(), json!([{ "type": "integer" }, { "type": "string" }]));
                out.insert("x-kubernetes-int-or-string".into(), true.into());
                copy(schema, "pattern", &mut out);
            }
            (Some(alternatives), _) if alternatives[0]["const"].is_string() => {
                words(schema, alternatives, path, &mut out, &mut rules);
            }
            (Some(alternatives), _) => self.one_of(alternatives, path, &mut out, &mut rules),
            (None, Some("object")) => self.object(schema, path, &mut out, &mut rules),
            (None, Some("array")) => self.array(schema, path, &mut out),
            (None, Some("string")) => text(schema, path, &mut out, &mut rules),
            (None, Some("integer" | "number")) => number(schema, path, &mut out, &mut rules),
            (None, Some(kind)) => {
                out.insert("type".into(), kind.into());
            }
            (None, None) => {
                out.insert("x-kubernetes-preserve-unknown-fields".into(), true.into());
            }
        }
        if let Some((_, default)) = self.defaults.iter().find(|(at, _)| *at == path) {
            out.insert("default".into(), default.clone());
        } else if let Some(default) = schema.get("default").filter(|_| !self.without_default.contains(&path)) {
            out.insert("default".into(), default.clone());
        }
        rules.extend(self.rules.iter().filter(|rule| rule.at == path).map(Rule::to_json));
        if !rules.is_empty() {
            out.insert("x-kubernetes-validations".into(), rules.into());
        }
        Value::Object(out)
    }

    fn object(&self, schema: &Value, path: &str, out: &mut Map<String, Value>, rules: &mut Vec<Value>) {
        out.insert("type".into(), "object".into());
        let mut properties = Map::new();
        for (name, field) in schema["properties"].as_object().into_iter().flatten() {
            properties.insert(name.clone(), self.of(field, &join(path, name)));
        }
        // A parent that is rejected as a whole needs no rules for its reserved fields.
        let refused = self.rules.iter().any(|rule| {
            let parent_field = rule.field.map(|field| join(rule.at, field));
            rule.message.contains("not supported yet") && parent_field.as_deref() == Some(path)
        });
        for (name, advice) in schema["x-later"].as_object().into_iter().flatten().filter(|_| !refused) {
            let advice = advice.as_str().unwrap_or_default();
            self.later(name, &format!("{} is not supported yet: {advice}", join(path, name)), &mut properties, rules);
        }
        for name in schema["x-blocks"].as_array().into_iter().flatten().filter_map(Value::as_str) {
            let message = format!("{} belongs to a kind of run that is not supported yet: remove it", join(path, name));
            self.later(name, &message, &mut properties, rules);
        }
        if !properties.is_empty() {
            out.insert("properties".into(), properties.into());
        } else if schema["additionalProperties"].is_object() {
            let values = self.of(&schema["additionalProperties"], &join(path, "*"));
            out.insert("additionalProperties".into(), values);
        } else if schema["additionalProperties"] != false {
            out.insert("x-kubernetes-preserve-unknown-fields".into(), true.into());
        }
        if let Some(required) = schema["required"].as_array().filter(|required| !required.is_empty()) {
            out.insert("required".into(), required.clone().into());
        }
        for keyword in ["maxProperties", "x-kubernetes-map-type"] {
            copy(schema, keyword, out);
        }
    }

    /// Adds a reserved field, which is rejected rather than pruned silently.
    fn later(&self, name: &str, message: &str, properties: &mut Map<String, Value>, rules: &mut Vec<Value>) {
        let description = "Not supported yet.";
        let open =
            json!({ "type": "object", "description": description, "x-kubernetes-preserve-unknown-fields": true });
        properties.insert(name.into(), open);
        rules.push(json!({
            "rule": format!("!has(self.{name})"),
            "message": message,
            "reason": "FieldValueForbidden",
            "fieldPath": format!(".{name}"),
        }));
    }

    /// An object with exactly one of several fields: `source`.
    fn one_of(&self, alternatives: &[Value], path: &str, out: &mut Map<String, Value>, rules: &mut Vec<Value>) {
        let mut properties = Map::new();
        for (name, field) in alternatives.iter().filter_map(|one| one["properties"].as_object()).flatten() {
            properties.insert(name.clone(), self.of(field, &join(path, name)));
        }
        let present: Vec<String> = properties.keys().map(|name| format!("has(self.{name})")).collect();
        let names: Vec<&str> = properties.keys().map(String::as_str).collect();
        rules.push(json!({
            "rule": format!("[{}].filter(present, present).size() == 1", present.join(", ")),
            "message": format!("{path} must have exactly one of {}", names.join(", ")),
            "reason": "FieldValueInvalid",
        }));
        out.insert("type".into(), "object".into());
        out.insert("properties".into(), properties.into());
    }

    fn array(&self, schema: &Value, path: &str, out: &mut Map<String, Value>) {
        out.insert("type".into(), "array".into());
        out.insert("items".into(), self.of(&schema["items"], &format!("{path}[]")));
        for keyword in ["minItems", "maxItems", "x-kubernetes-list-type", "x-kubernetes-list-map-keys"] {
            copy(schema, keyword, out);
        }
        if schema["uniqueItems"] == true {
            out.insert("x-kubernetes-list-type".into(), "set".into());
        }
    }
}

/// Converts an enum: its values, and its reserved values, which a rule rejects.
fn words(schema: &Value, alternatives: &[Value], path: &str, out: &mut Map<String, Value>, rules: &mut Vec<Value>) {
    let mut words: Vec<Value> = alternatives.iter().map(|one| one["const"].clone()).collect();
    let meanings: Vec<String> = alternatives
        .iter()
        .filter_map(|one| {
            Some(format!("{}: {}", one["const"].as_str()?, one["description"].as_str()?.replace('\n', " ")))
        })
        .collect();
    let description = out.get("description").and_then(Value::as_str).unwrap_or_default();
    out.insert("description".into(), format!("{description} {}", meanings.join(" ")).trim().into());
    for (word, advice) in schema["x-later"].as_object().into_iter().flatten() {
        words.push(word.as_str().into());
        let advice = advice.as_str().unwrap_or_default();
        rules.push(json!({
            "rule": format!("self != '{word}'"),
            "message": format!("{path}: {word} is not supported yet: {advice}"),
            "reason": "FieldValueForbidden",
        }));
    }
    out.insert("type".into(), "string".into());
    out.insert("enum".into(), words.into());
}

fn text(schema: &Value, path: &str, out: &mut Map<String, Value>, rules: &mut Vec<Value>) {
    out.insert("type".into(), "string".into());
    for keyword in ["pattern", "minLength", "maxLength"] {
        copy(schema, keyword, out);
    }
    if let Some(value) = schema.get("const") {
        out.insert("enum".into(), vec![value.clone()].into());
    }
    if let Some(format) = schema.get("x-kubernetes-format") {
        out.insert("format".into(), format.clone());
    }
    if matches!(schema["format"].as_str(), Some("engram-duration" | "engram-size" | "engram-rate")) {
        out.insert("maxLength".into(), LONGEST_QUANTITY.into());
    }
    match schema["format"].as_str() {
        Some("engram-s3") => {
            out.insert("pattern".into(), objects::PATTERN.into());
        }
        Some("engram-folder") => {
            out.insert("pattern".into(), snapshot::PATTERN.into());
        }
        Some("engram-region") => {
            out.insert("pattern".into(), objects::REGION_PATTERN.into());
        }
        Some("engram-buffer-name" | "engram-field-name") => {
            out.insert("pattern".into(), NAME_PATTERN.into());
        }
        Some("engram-endpoint") => {
            out.insert("pattern".into(), objects::ENDPOINT_PATTERN.into());
        }
        _ => {}
    }
    for (keyword, relation, sentence) in [("x-minimum", ">=", "at least"), ("x-maximum", "<=", "at most")] {
        if let Some(bound) = schema[keyword].as_str() {
            // CEL durations do not support days.
            let days = if relation == ">=" { "self.endsWith('d') ||" } else { "!self.endsWith('d') &&" };
            rules.push(json!({
                "rule": format!("{days} duration(self) {relation} duration('{bound}')"),
                "message": format!("{path} must be {sentence} {bound}"),
                "reason": "FieldValueInvalid",
            }));
        }
    }
}

fn number(schema: &Value, path: &str, out: &mut Map<String, Value>, rules: &mut Vec<Value>) {
    let kind = schema["type"].as_str().unwrap_or_default();
    out.insert("type".into(), kind.into());
    if kind == "integer" {
        out.insert("format".into(), "int64".into());
    }
    for keyword in ["minimum", "maximum", "multipleOf"] {
        copy(schema, keyword, out);
    }
    if let Some(bound) = schema.get("exclusiveMinimum") {
        out.insert("minimum".into(), bound.clone());
        out.insert("exclusiveMinimum".into(), true.into());
    }
    if schema["not"]["exclusiveMinimum"].is_number() {
        rules.push(json!({
            "rule": format!("self == 0.0 || self > {SMALLEST_SETTING:e}"),
            "message": format!("{path} must be 0, or above 2^-31 and at most 1"),
            "reason": "FieldValueInvalid",
        }));
    }
}

fn copy(schema: &Value, keyword: &str, out: &mut Map<String, Value>) {
    if let Some(value) = schema.get(keyword) {
        out.insert(keyword.into(), value.clone());
    }
}

fn join(path: &str, name: &str) -> String {
    if path.is_empty() { name.to_owned() } else { format!("{path}.{name}") }
}
