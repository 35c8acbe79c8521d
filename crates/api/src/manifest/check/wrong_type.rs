//! What to write instead of a value of the wrong type.

use serde_json::Value;

use crate::manifest::tree::Yaml;

/// Describes the type of a schema.
pub(super) fn describe(expected: &str) -> &str {
    match expected {
        "integer" => "a whole number",
        "number" => "a number",
        "string" => "text",
        "boolean" => "true or false",
        "array" => "a list",
        "object" => "an object",
        other => other,
    }
}

/// Returns what to write for the field `name`, which has the value `value`, in the file as `written`.
pub(super) fn advice(name: &str, expected: &str, value: &Yaml, written: &str, schema: &Value) -> Option<String> {
    match (expected, value) {
        ("object", Yaml::Null) => Some(format!("write {name}: {{}} for the defaults, or remove the line")),
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
                None => format!("put it in quotes: {name}: \"{written}\""),
            })
        }
        _ => None,
    }
}

/// Reads a whole number that is written with underscores.
fn whole(text: &str) -> Option<i128> {
    let digits: String = text.chars().filter(|letter| *letter != '_').collect();
    digits.parse().ok()
}
