//! Checks text against the format of its schema.

use serde_json::Value;

use crate::buffers::{MAX_BUFFER_NAME, MAX_FIELD_NAME, is_item_name};
use crate::object::{MAX_NAME_LENGTH, is_name};
use crate::objects::{self, is_address, is_endpoint, is_region};
use crate::operator;
use crate::quantity::{Duration, Rate, Size};
use crate::snapshot::{self, is_folder};

/// Reason why a text does not fit its schema.
pub(super) enum TextError {
    /// It cannot be read as what the format describes; the message says what can.
    Unreadable(String),
    /// It is none of the allowed texts, which are described.
    NotAllowed(String),
}

/// Checks `text` against the format and the length of `schema`.
pub(super) fn check(text: &str, schema: &Value) -> Result<(), TextError> {
    let allowed = match schema["format"].as_str() {
        Some("engram-duration") => return duration(text, schema),
        Some("engram-size") => return readable(text.parse::<Size>()),
        Some("engram-rate") => return readable(text.parse::<Rate>()),
        Some(format) => violated_format(format, text),
        None => None,
    };
    let is_missing = schema["minLength"] == 1 && text.is_empty();
    match allowed.or_else(|| is_missing.then(|| "at least one character".to_owned())) {
        Some(allowed) => Err(TextError::NotAllowed(allowed)),
        None => Ok(()),
    }
}

fn readable<T>(parsed: Result<T, String>) -> Result<(), TextError> {
    parsed.map(drop).map_err(TextError::Unreadable)
}

fn duration(text: &str, schema: &Value) -> Result<(), TextError> {
    let value: Duration = text.parse().map_err(TextError::Unreadable)?;
    let bound = |keyword: &str| schema[keyword].as_str().and_then(|bound| bound.parse::<Duration>().ok());
    match (bound("x-minimum"), bound("x-maximum")) {
        (Some(least), _) if value < least => Err(TextError::NotAllowed(format!("{least} or more"))),
        (_, Some(most)) if value > most => Err(TextError::NotAllowed(format!("at most {most}"))),
        _ => Ok(()),
    }
}

/// Returns what `format` allows, if `text` does not have it.
fn violated_format(format: &str, text: &str) -> Option<String> {
    let (is_of_it, allowed) = match format {
        "engram-name" => (is_name(text), allowed_name(text)),
        "engram-s3" => (is_address(text), objects::ALLOWED.to_owned()),
        "engram-folder" => (is_folder(text), snapshot::ALLOWED.to_owned()),
        "engram-endpoint" => (
            is_endpoint(text),
            "http://HOST:PORT or https://HOST, with a port of 1 to 65535 and without credentials".to_owned(),
        ),
        "engram-buffer-name" => (is_item_name(text, MAX_BUFFER_NAME), allowed_item_name(MAX_BUFFER_NAME)),
        "engram-field-name" => (is_item_name(text, MAX_FIELD_NAME), allowed_item_name(MAX_FIELD_NAME)),
        "engram-region" => (is_region(text), "A-Z, a-z, 0-9, - and _".to_owned()),
        other => {
            let (_, is_of_it, allowed) = operator::FORMATS.iter().find(|(name, ..)| *name == other)?;
            (is_of_it(text), (*allowed).to_owned())
        }
    };
    (!is_of_it).then_some(allowed)
}

fn allowed_name(text: &str) -> String {
    let length = text.chars().count();
    let excess = if length > MAX_NAME_LENGTH { format!(" (this has {length})") } else { String::new() };
    format!("a-z, 0-9 and -, starting with a letter, not ending with -, at most {MAX_NAME_LENGTH} characters{excess}")
}

fn allowed_item_name(longest: usize) -> String {
    format!("letters, digits, '_', '.' and '-', 1 to {longest} bytes")
}
