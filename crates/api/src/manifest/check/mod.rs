//! Validates one document against the schema of its kind: fields, types, ranges, enum values.
//!
//! The schema is generated from the types. All problems of the document are found in one pass. Rules between fields are in
//! `rules`.

mod number;
mod object;
mod text;
mod wrong_type;

use serde_json::Value;

use self::text::TextError;
use super::suggestion::nearest;
use super::tree::{Entry, Node, Yaml, place};
use crate::code::Code;
use crate::problem::{Location, Problem};
use crate::quantity::{RESOURCE_QUANTITY_ALLOWED, is_resource_quantity};

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
        match text::check(text, schema) {
            Ok(()) => {}
            Err(TextError::Unreadable(message)) => {
                self.report(Code::WrongType, path, place, format!("{path}: {message}"), []);
            }
            Err(TextError::NotAllowed(allowed)) => {
                let shown = Yaml::Text(text.into());
                self.report(Code::OutOfRange, path, place, format!("{path} is {shown}; allowed: {allowed}"), []);
            }
        }
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
        if !number::is_allowed(value, schema) {
            let message = format!("{path} is {}; allowed: {}", self.written(node), number::range(schema));
            self.report(Code::OutOfRange, path, place, message, []);
        }
    }

    fn wrong_type(&mut self, node: &Node, place: Location, schema: &Value, expected: &str, path: &str) {
        let (name, written) = (path.rsplit('.').next().unwrap_or(path), self.written(node));
        let help = wrong_type::advice(name, expected, &node.value, &written, schema);
        let found = match &node.value {
            Yaml::Null | Yaml::List(_) | Yaml::Map(_) => node.value.kind().to_owned(),
            scalar => format!("{written} ({})", scalar.kind()),
        };
        let message = format!("{path} is {found}; expected {}", wrong_type::describe(expected));
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
