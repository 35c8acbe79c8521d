//! A manifest as a tree of keys and values with their locations in the file.

use std::fmt;

use serde::de::{Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_saphyr::Spanned;
use serde_saphyr::options::{DuplicateKeyPolicy, MergeKeyPolicy, NonFiniteFloatPolicy};

use crate::code::Code;
use crate::problem::{Location, Problem};

/// A value with its location.
pub(crate) type Node = Spanned<Yaml>;

/// A YAML 1.2 value.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Yaml {
    Null,
    Bool(bool),
    Integer(i128),
    Number(f64),
    Text(String),
    List(Vec<Node>),
    Map(Vec<Entry>),
}

/// One `key: value`. Duplicate keys are kept.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Entry {
    pub(crate) key: String,
    pub(crate) place: Location,
    pub(crate) value: Node,
}

/// Parses all documents of `text`, or returns the first syntax error.
pub(crate) fn read(text: &str) -> Result<Vec<Node>, Problem> {
    let options = serde_saphyr::options! {
        // YAML 1.2: `yes` is text, and so is `1_000`.
        strict_booleans: true,
        underscored_numbers_as_strings: true,
        // The checker reports these with their locations.
        duplicate_keys: DuplicateKeyPolicy::PassThrough,
        merge_keys: MergeKeyPolicy::AsOrdinary,
        non_finite_float_policy: NonFiniteFloatPolicy::PassThrough,
        with_snippet: false,
        // Bounds the expansion of nested aliases; far more than any manifest needs.
        alias_limits: serde_saphyr::alias_limits! { max_total_replayed_events: 10_000 },
    };
    serde_saphyr::from_multiple_with_options(text, options).map_err(|error| {
        let place = error.location().map(|location| point(location, text));
        let message = error.without_snippet().to_string();
        // The parser's message ends with the location, which is shown anyway.
        let message = message.split(" at line ").next().unwrap_or_default().to_owned();
        Problem::new(Code::NotAManifest, format!("not YAML: {message}"))
            .at(place)
            .help("the file was not checked beyond this location")
    })
}

/// Fields of `metadata` that only the API server writes.
const SERVER_METADATA: [&str; 6] =
    ["creationTimestamp", "generation", "managedFields", "resourceVersion", "selfLink", "uid"];

/// Removes the fields that the API server has written, if the document is an object that it returned. Returns their paths.
pub(crate) fn remove_server_fields(document: &mut Yaml) -> Vec<String> {
    let Yaml::Map(fields) = document else { return Vec::new() };
    let metadata = fields.iter_mut().find(|entry| entry.key == "metadata").map(|entry| &mut entry.value.value);
    let Some(Yaml::Map(metadata)) = metadata else { return Vec::new() };
    // Anything else with these names is a mistake, which the checker reports.
    if !["uid", "resourceVersion"].iter().all(|key| metadata.iter().any(|entry| entry.key == *key)) {
        return Vec::new();
    }
    let mut removed = Vec::new();
    metadata.retain(|entry| {
        let is_written = SERVER_METADATA.contains(&entry.key.as_str());
        removed.extend(is_written.then(|| format!("metadata.{}", entry.key)));
        !is_written
    });
    fields.retain(|entry| {
        removed.extend((entry.key == "status").then(|| entry.key.clone()));
        entry.key != "status"
    });
    removed
}

/// Converts the parser's location.
pub(crate) fn place(location: serde_saphyr::Location) -> Location {
    let span = location.span();
    let (start, length) = (span.byte_offset().unwrap_or(0), span.byte_len().unwrap_or(0));
    Location {
        line: location.line() as usize,
        column: location.column() as usize,
        start: start as usize,
        length: length as usize,
    }
}

/// Converts the location of an error, which may be past the end, into an empty location inside the text.
fn point(location: serde_saphyr::Location, text: &str) -> Location {
    let (line, column) = (location.line() as usize, location.column() as usize);
    let before: usize = text.split_inclusive('\n').take(line.saturating_sub(1)).map(str::len).sum();
    let offset = text[before..].char_indices().nth(column.saturating_sub(1)).map_or(text.len() - before, |(at, _)| at);
    Location { line, column, start: before + offset, length: 0 }
}

impl Yaml {
    /// Returns a field of a map.
    pub(crate) fn get(&self, key: &str) -> Option<&Entry> {
        match self {
            Self::Map(entries) => entries.iter().find(|entry| entry.key == key),
            _ => None,
        }
    }

    /// Returns the text, if it is one.
    pub(crate) fn text(&self) -> Option<&str> {
        match self {
            Self::Text(text) => Some(text),
            _ => None,
        }
    }

    /// Returns the integer, if it is one.
    pub(crate) fn integer(&self) -> Option<i128> {
        match self {
            Self::Integer(integer) => Some(*integer),
            _ => None,
        }
    }

    /// Returns the name of its type, with an article.
    pub(crate) fn kind(&self) -> &'static str {
        match self {
            Self::Null => "empty",
            Self::Bool(_) => "a truth value",
            Self::Integer(_) => "a whole number",
            Self::Number(_) => "a number",
            Self::Text(_) => "text",
            Self::List(_) => "a list",
            Self::Map(_) => "an object",
        }
    }

    /// Converts the tree to JSON, from which serde makes the types. Numbers that JSON cannot represent become `null`; the
    /// checker has rejected them before.
    pub(crate) fn to_json(&self) -> serde_json::Value {
        match self {
            Self::Null => serde_json::Value::Null,
            Self::Bool(value) => (*value).into(),
            Self::Integer(value) => serde_json::Number::from_i128(*value).into(),
            Self::Number(value) => (*value).into(),
            Self::Text(value) => value.as_str().into(),
            Self::List(items) => items.iter().map(|item| item.value.to_json()).collect(),
            Self::Map(entries) => {
                entries.iter().map(|entry| (entry.key.clone(), entry.value.value.to_json())).collect()
            }
        }
    }
}

/// Formats a value as written, truncated if long.
impl fmt::Display for Yaml {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const LONGEST: usize = 60;
        match self {
            Self::Null => f.write_str("empty"),
            Self::Bool(value) => value.fmt(f),
            Self::Integer(value) => value.fmt(f),
            Self::Number(value) if value.is_nan() => f.write_str(".nan"),
            Self::Number(value) if value.is_infinite() => f.write_str(if *value > 0.0 { ".inf" } else { "-.inf" }),
            // Debug keeps the point or exponent: 5.0 is not 5 in a manifest.
            Self::Number(value) => fmt::Debug::fmt(value, f),
            Self::Text(value) if value.chars().count() > LONGEST => {
                write!(f, "{}...", value.chars().take(LONGEST).collect::<String>())
            }
            Self::Text(value) if value.is_empty() => f.write_str("\"\""),
            Self::Text(value) => f.write_str(value),
            Self::List(items) => {
                f.write_str("[")?;
                for (index, item) in items.iter().enumerate() {
                    write!(f, "{}{}", if index == 0 { "" } else { ", " }, item.value)?;
                }
                f.write_str("]")
            }
            Self::Map(_) => f.write_str("an object"),
        }
    }
}

impl<'de> Deserialize<'de> for Yaml {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(AnyYaml)
    }
}

struct AnyYaml;

impl<'de> Visitor<'de> for AnyYaml {
    type Value = Yaml;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a YAML value")
    }

    fn visit_unit<E>(self) -> Result<Yaml, E> {
        Ok(Yaml::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Yaml, E> {
        Ok(Yaml::Bool(value))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Yaml, E> {
        Ok(Yaml::Integer(value.into()))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Yaml, E> {
        Ok(Yaml::Integer(value.into()))
    }

    fn visit_f64<E>(self, value: f64) -> Result<Yaml, E> {
        Ok(Yaml::Number(value))
    }

    fn visit_str<E>(self, value: &str) -> Result<Yaml, E> {
        Ok(Yaml::Text(value.to_owned()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Yaml, A::Error> {
        let mut list = Vec::new();
        while let Some(item) = items.next_element()? {
            list.push(item);
        }
        Ok(Yaml::List(list))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Yaml, A::Error> {
        let mut map = Vec::new();
        while let Some(key) = entries.next_key::<Node>()? {
            let value = entries.next_value()?;
            // A key that is not text is reported as an unknown field.
            map.push(Entry { key: key.value.to_string(), place: place(key.referenced), value });
        }
        Ok(Yaml::Map(map))
    }
}
