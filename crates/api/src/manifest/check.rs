//! Validates one document against the schema of its kind: fields, types, ranges, enum values.
//!
//! The schema is generated from the types. All problems of the document are found in one pass. Rules between fields are in
//! `rules`.

use std::collections::HashMap;

use serde_json::Value;

use super::suggestion::nearest;
use super::tree::{Entry, Node, Yaml, place};
use crate::buffers::{MAX_BUFFER_NAME, MAX_FIELD_NAME, is_item_name};
use crate::cluster::SMALLEST_SETTING;
use crate::code::Code;
use crate::object::{MAX_NAME_LENGTH, is_name};
use crate::objects::{self, is_address, is_endpoint, is_region};
use crate::operator;
use crate::problem::{Location, Problem};
use crate::quantity::{Duration, RESOURCE_QUANTITY_ALLOWED, Rate, Size, is_resource_quantity};
use crate::snapshot::{self, is_folder};

/// Validation of one document.
pub(crate) struct Check<'a> {
    /// The file.
    source: &'a str,
    /// Schema of the document's kind.
    root: &'a Value,
    pub(crate) problems: Vec<Problem>,
    /// Fields that apply to Kubernetes only.
    pub(crate) ignored: Vec<String>,
}

impl<'a> Check<'a> {
    /// Checks `document` of the file `source` against `schema`.
    pub(crate) fn document(source: &'a str, document: &Node, schema: &'a Value) -> Self {
        let mut check = Self { source, root: schema, problems: Vec::new(), ignored: Vec::new() };
        check.value(document, place(document.referenced), schema, "");
        check
    }

    /// Checks a value. `place` is the location for errors: the field with its value.
    fn value(&mut self, node: &Node, place: Location, schema: &Value, path: &str) {
        if let Some(alternatives) = schema["oneOf"].as_array() {
            if alternatives[0]["const"].is_string() {
                self.enum_value(node, place, schema, alternatives, path);
            } else {
                self.exactly_one(node, place, alternatives, path);
            }
            return;
        }
        if schema["x-quantity"] == true {
            return self.resource_quantity(node, place, path);
        }
        match (schema["type"].as_str(), &node.value) {
            (Some("object"), Yaml::Map(entries)) => self.object(entries, place, schema, path),
            (Some("array"), Yaml::List(items)) => self.list(node, items, place, schema, path),
            (Some("string"), Yaml::Text(text)) => self.text(text, place, schema, path),
            (Some("boolean"), Yaml::Bool(_)) => {}
            (Some("integer" | "number"), Yaml::Integer(value)) if !self.is_binary(node) => {
                // Bounds are small, so rounding of large numbers does not matter.
                self.number(node, *value as f64, place, schema, path);
            }
            (Some("number"), Yaml::Number(value)) => self.number(node, *value, place, schema, path),
            (Some(expected), _) => self.wrong_type(node, place, schema, expected, path),
            (None, _) => {}
        }
    }

    fn object(&mut self, entries: &[Entry], place: Location, schema: &Value, path: &str) {
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
    fn exactly_one(&mut self, node: &Node, place: Location, alternatives: &[Value], path: &str) {
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

    fn enum_value(&mut self, node: &Node, place: Location, schema: &Value, alternatives: &[Value], path: &str) {
        let words: Vec<&str> = alternatives.iter().filter_map(|alternative| alternative["const"].as_str()).collect();
        let Yaml::Text(word) = &node.value else {
            return self.wrong_type(node, place, schema, &format!("one of {}", words.join(", ")), path);
        };
        if words.contains(&&**word) {
            return;
        }
        if let Some(advice) = schema["x-later"][word].as_str() {
            let message = format!("{path} is {word}, which this version does not support");
            return self.report(Code::NotSupported, path, place, message, [advice.to_owned()]);
        }
        let message = format!("{path} is {}; allowed: {}", node.value, words.join(", "));
        let help = nearest(word, words.iter().copied()).map(|near| format!("did you mean {near}?"));
        self.report(Code::NotOneOf, path, place, message, help);
    }

    fn list(&mut self, node: &Node, items: &[Node], at: Location, schema: &Value, path: &str) {
        let limit = |keyword: &str, otherwise| schema[keyword].as_u64().map_or(otherwise, |limit| limit as usize);
        let (fewest, most) = (limit("minItems", 0), limit("maxItems", usize::MAX));
        if !(fewest..=most).contains(&items.len()) {
            let message = format!("{path} has {} values; allowed: {fewest} to {most}", items.len());
            self.report(Code::OutOfRange, path, at, message, []);
        } else if schema["uniqueItems"] == true
            && let Some((_, twice)) = items
                .iter()
                .enumerate()
                .find(|(index, item)| items[..*index].iter().any(|early| early.value == item.value))
        {
            let message = format!("{path} is {}, with {} twice; allowed: distinct values", node.value, twice.value);
            self.report(Code::OutOfRange, path, place(twice.referenced), message, []);
        }
        for (index, item) in items.iter().enumerate() {
            self.value(item, place(item.referenced), &schema["items"], &format!("{path}[{index}]"));
        }
    }

    fn text(&mut self, text: &str, place: Location, schema: &Value, path: &str) {
        if let Some(expected) = schema["const"].as_str() {
            if text != expected {
                let message = format!("{path} is {text}; allowed: {expected}");
                self.report(Code::NotAManifest, path, place, message, [format!("set {path}: {expected}")]);
            }
            return;
        }
        let allowed = match schema["format"].as_str() {
            Some("engram-name") if !is_name(text) => {
                let length = text.chars().count();
                let excess = if length > MAX_NAME_LENGTH { format!(" (this has {length})") } else { String::new() };
                format!(
                    "a-z, 0-9 and -, starting with a letter, not ending with -, at most {MAX_NAME_LENGTH} characters{excess}"
                )
            }
            Some("engram-duration") => {
                let bounds =
                    ["x-minimum", "x-maximum"].map(|keyword| schema[keyword].as_str().map(str::parse::<Duration>));
                match (text.parse::<Duration>(), bounds) {
                    (Err(message), _) => {
                        return self.report(Code::WrongType, path, place, format!("{path}: {message}"), []);
                    }
                    (Ok(value), [Some(Ok(least)), _]) if value < least => format!("{least} or more"),
                    (Ok(value), [_, Some(Ok(most))]) if value > most => format!("at most {most}"),
                    _ => return,
                }
            }
            Some("engram-size") => match text.parse::<Size>() {
                Err(message) => return self.report(Code::WrongType, path, place, format!("{path}: {message}"), []),
                Ok(_) => return,
            },
            Some("engram-rate") => match text.parse::<Rate>() {
                Err(message) => return self.report(Code::WrongType, path, place, format!("{path}: {message}"), []),
                Ok(_) => return,
            },
            Some("engram-s3") if !is_address(text) => objects::ALLOWED.to_owned(),
            Some("engram-folder") if !is_folder(text) => snapshot::ALLOWED.to_owned(),
            Some("engram-endpoint") if !is_endpoint(text) => {
                "http://HOST:PORT or https://HOST, with a port of 1 to 65535 and without credentials".to_owned()
            }
            Some("engram-buffer-name") if !is_item_name(text, MAX_BUFFER_NAME) => {
                "letters, digits, '_', '.' and '-', 1 to 128 bytes".to_owned()
            }
            Some("engram-field-name") if !is_item_name(text, MAX_FIELD_NAME) => {
                "letters, digits, '_', '.' and '-', 1 to 64 bytes".to_owned()
            }
            Some("engram-region") if !is_region(text) => "A-Z, a-z, 0-9, - and _".to_owned(),
            Some(format)
                if let Some((_, is_of_it, allowed)) = operator::FORMATS.iter().find(|(name, ..)| *name == format) =>
            {
                if is_of_it(text) {
                    return;
                }
                (*allowed).to_owned()
            }
            _ if schema["minLength"] == 1 && text.is_empty() => "at least one character".into(),
            _ => return,
        };
        let shown = Yaml::Text(text.into());
        self.report(Code::OutOfRange, path, place, format!("{path} is {shown}; allowed: {allowed}"), []);
    }

    /// Checks a quantity of a Kubernetes resource, which is a number or text.
    fn resource_quantity(&mut self, node: &Node, place: Location, path: &str) {
        let is_valid = match &node.value {
            Yaml::Text(text) => is_resource_quantity(text),
            Yaml::Integer(value) => *value >= 0 && !self.is_binary(node),
            _ => false,
        };
        if !is_valid {
            let message = format!("{path} is {}; allowed: {RESOURCE_QUANTITY_ALLOWED}", node.value);
            self.report(Code::OutOfRange, path, place, message, []);
        }
    }

    fn number(&mut self, node: &Node, value: f64, place: Location, schema: &Value, path: &str) {
        let bound = |schema: &Value, keyword: &str, otherwise: f64| schema[keyword].as_f64().unwrap_or(otherwise);
        let gap = &schema["not"];
        let inside = value.is_finite()
            && value >= bound(schema, "minimum", f64::MIN)
            && value > bound(schema, "exclusiveMinimum", f64::NEG_INFINITY)
            && value <= bound(schema, "maximum", f64::MAX)
            && !(value > bound(gap, "exclusiveMinimum", f64::INFINITY) && value <= bound(gap, "maximum", f64::MAX))
            && schema["multipleOf"].as_f64().is_none_or(|divisor| value % divisor == 0.0);
        if !inside {
            let message = format!("{path} is {}; allowed: {}", self.written(node), range(schema));
            self.report(Code::OutOfRange, path, place, message, []);
        }
    }

    fn wrong_type(&mut self, node: &Node, place: Location, schema: &Value, expected: &str, path: &str) {
        let whole = |value: &str| {
            let digits: String = value.chars().filter(|letter| *letter != '_').collect();
            digits.parse::<i128>().ok()
        };
        let expectation = match expected {
            "integer" => "a whole number",
            "number" => "a number",
            "string" => "text",
            "boolean" => "true or false",
            "array" => "a list",
            "object" => "an object",
            other => other,
        };
        let name = path.rsplit('.').next().unwrap_or(path);
        let help = match (expected, &node.value) {
            (_, Yaml::Null) if expected == "object" => {
                Some(format!("write {name}: {{}} for the defaults, or remove the line"))
            }
            (_, Yaml::Null) => Some("give it a value, or remove the line".into()),
            ("integer" | "number", Yaml::Text(text)) => {
                whole(text).map(|number| format!("write {name}: {number}, without quotes and underscores"))
            }
            ("integer", Yaml::Number(value)) if value.fract() == 0.0 && value.abs() < 1e15 => {
                Some(format!("write {name}: {value:.0}"))
            }
            ("boolean", Yaml::Text(text)) => match text.to_ascii_lowercase().as_str() {
                "yes" | "on" | "y" => Some(format!("write {name}: true")),
                "no" | "off" | "n" => Some(format!("write {name}: false")),
                _ => None,
            },
            ("string", Yaml::Bool(_) | Yaml::Integer(_) | Yaml::Number(_)) => {
                let example = schema["examples"][0].as_str().filter(|_| schema["format"].is_string());
                Some(match example {
                    Some(example) => format!("write text such as {name}: {example}"),
                    None => format!("put it in quotes: {name}: \"{}\"", self.written(node)),
                })
            }
            _ => None,
        };
        let found = match &node.value {
            Yaml::Null | Yaml::List(_) | Yaml::Map(_) => node.value.kind().to_owned(),
            scalar => format!("{} ({})", self.written(node), scalar.kind()),
        };
        let message = format!("{path} is {found}; expected {expectation}");
        let subject = if path.is_empty() { message.replacen(" is", "the document is", 1) } else { message };
        self.report(Code::WrongType, path, place, subject, help);
    }

    /// Returns a scalar as written in the file, including quotes.
    fn written(&self, node: &Node) -> String {
        let Location { start, length, .. } = place(node.defined);
        match self.source.get(start..start + length) {
            Some(text) if !text.is_empty() && text.chars().count() <= 60 && !text.contains('\n') => text.to_owned(),
            _ => node.value.to_string(),
        }
    }

    /// Returns whether a number is binary, which the parser accepts although YAML 1.2 does not.
    fn is_binary(&self, node: &Node) -> bool {
        self.written(node).trim_start_matches(['+', '-']).starts_with("0b")
    }

    /// Returns the location of `key: value`, or of the key where the value is not a scalar on the same line.
    fn entry_place(&self, entry: &Entry) -> Location {
        entry_place(entry, self.source)
    }

    fn report(
        &mut self,
        code: Code,
        path: &str,
        place: Location,
        message: String,
        help: impl IntoIterator<Item = String>,
    ) {
        let problem = Problem::new(code, message).of(path).at(place);
        self.problems.push(help.into_iter().fold(problem, Problem::help));
    }
}

/// Returns the location of `key: value` in `source`, or of the key where the value is not a scalar on the same line.
pub(crate) fn entry_place(entry: &Entry, source: &str) -> Location {
    let value = place(entry.value.referenced);
    let end = value.start + value.length;
    let scalar = !matches!(entry.value.value, Yaml::List(_) | Yaml::Map(_) | Yaml::Null);
    let length = match source.get(entry.place.start..end) {
        Some(text) if scalar && !text.contains('\n') => text.len(),
        _ => entry.place.length,
    };
    Location { length, ..entry.place }
}

/// Appends a field name to a path.
fn join(path: &str, name: &str) -> String {
    if path.is_empty() { name.to_owned() } else { format!("{path}.{name}") }
}

/// Describes the numbers that `schema` allows.
fn range(schema: &Value) -> String {
    let show = |number: &Value| match number.as_f64() {
        Some(SMALLEST_SETTING) => "2^-31".to_owned(),
        _ => number.to_string(),
    };
    let [least, above, most] = ["minimum", "exclusiveMinimum", "maximum"].map(|keyword| &schema[keyword]);
    let gap = &schema["not"]["maximum"];
    let range = match (least.is_null(), above.is_null(), most.is_null()) {
        _ if !gap.is_null() => format!("0, or above {} and at most {}", show(gap), show(most)),
        (_, false, false) => format!("above {}, at most {}", show(above), show(most)),
        (_, false, true) => format!("above {}", show(above)),
        (false, true, false) => format!("{} to {}", show(least), show(most)),
        (false, true, true) => format!("{} or more", show(least)),
        (true, true, _) => "finite numbers".into(),
    };
    if schema["multipleOf"] == 2 { format!("even, {range}") } else { range }
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
