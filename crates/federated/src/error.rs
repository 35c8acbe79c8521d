//! Invalid input: the field, its value and what is allowed.

/// A refused value.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {value} is not allowed; allowed: {allowed}")]
pub struct InvalidInput {
    /// Name of the field.
    pub field: &'static str,
    /// The refused value.
    pub value: String,
    /// What is allowed.
    pub allowed: String,
}

impl InvalidInput {
    /// Returns the refusal of `value` in `field`.
    #[expect(clippy::needless_pass_by_value, reason = "callers pass numbers")]
    pub fn new(field: &'static str, value: impl ToString, allowed: impl Into<String>) -> Self {
        Self { field, value: shorten(value.to_string()), allowed: allowed.into() }
    }
}

/// Checks a condition on a field.
///
/// # Errors
/// When the condition does not hold.
pub(crate) fn require(
    holds: bool,
    field: &'static str,
    value: impl ToString,
    allowed: &str,
) -> Result<(), InvalidInput> {
    if holds { Ok(()) } else { Err(InvalidInput::new(field, value, allowed)) }
}

/// Shortens the text of a very large or small float, which has hundreds of digits.
fn shorten(text: String) -> String {
    match text.parse::<f64>() {
        Ok(value) if text.len() > 24 => format!("{value:e}"),
        _ => text,
    }
}
