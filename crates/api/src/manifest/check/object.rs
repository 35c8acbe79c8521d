//! Checks the fields of an object: unknown, missing, given twice, and alternatives of which exactly one is allowed.

use std::collections::HashMap;

use serde_json::Value;

use super::{Check, join};
use crate::code::Code;
use crate::manifest::suggestion::nearest;
use crate::manifest::tree::{Entry, Node, Yaml};
use crate::problem::Location;

impl Check<'_> {
    pub(super) fn object(&mut self, entries: &[Entry], place: Location, schema: &Value, path: &str) {
        let mut misspelt = Vec::new();
        let mut first_places = HashMap::new();
        for entry in entries {
            let field = join(path, &entry.key);
            let place = self.entry_place(entry);
            let first = *first_places.entry(entry.key.as_str()).or_insert(entry.place);
            if first != entry.place {
                let message = format!("{field} is given twice, first in line {}", first.line);
                self.report(Code::NotAManifest, &field, place, message, ["remove one of the two".into()]);
            } else if let Some(known) = schema["properties"].get(&entry.key) {
                if known["x-kubernetes-only"] == true {
                    self.ignored.push(field.clone());
                }
                self.value(&entry.value, place, known, &field);
            } else if schema["additionalProperties"].is_object() {
                self.value(&entry.value, place, &schema["additionalProperties"], &field);
            } else if schema["additionalProperties"] == false {
                misspelt.extend(self.unknown_field(entry, schema, path));
            }
        }
        for name in schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str) {
            // `worker: 5` is one problem, not an unknown and a missing field.
            if !entries.iter().any(|entry| entry.key == name) && !misspelt.iter().any(|meant| meant == name) {
                self.missing(name, place, &schema["properties"][name], path);
            }
        }
    }

    /// Reports an unknown field; returns the one that was probably meant.
    fn unknown_field(&mut self, entry: &Entry, schema: &Value, path: &str) -> Option<String> {
        let field = join(path, &entry.key);
        if schema["x-blocks"].as_array().is_some_and(|blocks| blocks.iter().any(|block| *block == *entry.key)) {
            return None;
        }
        if let Some(advice) = schema["x-later"][&entry.key].as_str() {
            let message = format!("{field} is not supported by this version");
            self.report(Code::NotSupported, &field, entry.place, message, [advice.to_owned()]);
            return None;
        }
        let allowed: Vec<&str> =
            schema["properties"].as_object().into_iter().flatten().map(|(key, _)| key.as_str()).collect();
        let near = nearest(&entry.key, allowed.iter().copied());
        let meant = near.map(str::to_owned).or_else(|| find_field(self.root, &entry.key, ""));
        let message = format!("{field} is not a known field; allowed here: {}", allowed.join(", "));
        let help = meant.map(|meant| format!("did you mean {meant}?"));
        self.report(Code::UnknownField, &field, entry.place, message, help);
        near.map(str::to_owned)
    }

    fn missing(&mut self, name: &str, place: Location, schema: &Value, path: &str) {
        let field = join(path, name);
        if let Some(alternatives) = schema["oneOf"].as_array().filter(|all| all[0]["properties"].is_object()) {
            return self.not_exactly_one(place, alternatives, &field, "is missing");
        }
        let example = if schema["const"].is_null() { &schema["examples"][0] } else { &schema["const"] };
        let help = if example.is_null() { format!("add {name}") } else { format!("add {name}: {}", flow(example)) };
        self.report(Code::Missing, &field, place, format!("{field} is missing"), [help]);
    }

    /// Checks an object with exactly one of several fields: `source`.
    pub(super) fn exactly_one(&mut self, node: &Node, place: Location, alternatives: &[Value], path: &str) {
        let Yaml::Map(entries) = &node.value else {
            return self.wrong_type(node, place, &Value::Null, "object", path);
        };
        // One object schema with the fields of all alternatives.
        let properties: serde_json::Map<String, Value> = alternatives
            .iter()
            .filter_map(|alternative| alternative["properties"].as_object())
            .flatten()
            .map(|(name, schema)| (name.clone(), schema.clone()))
            .collect();
        let known: Vec<&str> =
            entries.iter().map(|entry| &*entry.key).filter(|key| properties.contains_key(*key)).collect();
        if let [] | [_, _, ..] = &known[..] {
            let found =
                if known.is_empty() { "has none of them".into() } else { format!("has {}", known.join(" and ")) };
            self.not_exactly_one(place, alternatives, path, &found);
        }
        self.object(
            entries,
            place,
            &serde_json::json!({ "properties": properties, "additionalProperties": false }),
            path,
        );
    }

    fn not_exactly_one(&mut self, place: Location, alternatives: &[Value], path: &str, found: &str) {
        let names: Vec<&str> =
            alternatives.iter().filter_map(|alternative| alternative["required"][0].as_str()).collect();
        let message = format!("{path} {found}; allowed: exactly one of {}", names.join(", "));
        self.report(Code::Conflicting, path, place, message, []);
    }
}

/// Formats an example as YAML on one line.
fn flow(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Object(fields) => {
            let fields: Vec<String> = fields.iter().map(|(name, value)| format!("{name}: {}", flow(value))).collect();
            format!("{{ {} }}", fields.join(", "))
        }
        Value::Array(items) => format!("[{}]", items.iter().map(flow).collect::<Vec<_>>().join(", ")),
        other => other.to_string(),
    }
}

/// Returns the path of a field of that name anywhere in `schema`.
fn find_field(schema: &Value, name: &str, path: &str) -> Option<String> {
    let objects = std::iter::once(schema).chain(schema["oneOf"].as_array().into_iter().flatten());
    let fields = || objects.clone().filter_map(|object| object["properties"].as_object()).flatten();
    if fields().any(|(field, _)| field == name) {
        return Some(join(path, name));
    }
    fields().find_map(|(field, schema)| find_field(schema, name, &join(path, field)))
}
