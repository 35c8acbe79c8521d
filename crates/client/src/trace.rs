//! W3C trace context: part of the metadata of every call, so that a request can be traced across workers.

use std::fmt;
use std::str::FromStr;

tokio::task_local! {
    static CURRENT: Context;
}

/// Trace context of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Context {
    /// Trace id; not 0.
    pub trace: u128,
    /// Span id; not 0.
    pub span: u64,
    /// Bit 0 = sampled.
    pub flags: u8,
}

impl Context {
    /// Creates a new trace.
    pub fn new() -> Self {
        Self { trace: rand::random::<u128>() | 1, span: rand::random::<u64>() | 1, flags: 0 }
    }

    /// Returns the context of the current task, if it runs [`within`] one.
    pub fn current() -> Option<Self> {
        CURRENT.try_with(|context| *context).ok()
    }

    /// Returns a child span.
    #[must_use]
    pub fn child(self) -> Self {
        Self { span: rand::random::<u64>() | 1, ..self }
    }
}

impl Default for Context {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Display for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "00-{:032x}-{:016x}-{:02x}", self.trace, self.span, self.flags)
    }
}

/// The text is not a `traceparent` of version 00.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("not a traceparent of version 00")]
pub struct NotTraceparent;

impl FromStr for Context {
    type Err = NotTraceparent;

    fn from_str(text: &str) -> Result<Self, NotTraceparent> {
        let mut fields = text.split('-');
        let (version, trace, span, flags) = (fields.next(), fields.next(), fields.next(), fields.next());
        let hex = |field: Option<&str>, digits: usize| {
            field
                .filter(|text| {
                    text.len() == digits && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
                })
                .and_then(|text| u128::from_str_radix(text, 16).ok())
                .ok_or(NotTraceparent)
        };
        if version != Some("00") || fields.next().is_some() {
            return Err(NotTraceparent);
        }
        let context = Self { trace: hex(trace, 32)?, span: hex(span, 16)? as u64, flags: hex(flags, 2)? as u8 };
        if context.trace == 0 || context.span == 0 { Err(NotTraceparent) } else { Ok(context) }
    }
}

/// Runs `work` under `context`: every call made in it is a child span.
pub async fn within<F: Future>(context: Context, work: F) -> F::Output {
    CURRENT.scope(context, work).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn context_round_trips_through_text_and_other_text_is_rejected() {
        let context = Context { flags: 1, ..Context::new() };
        assert_eq!(context.to_string().parse(), Ok(context));
        let zero = format!("00-{:032x}-{:016x}-00", 0, 1);
        for text in ["", "00", "01-00-00-00", zero.as_str(), "00-+0000000000000000000000000000001-0000000000000001-00"]
        {
            assert_eq!(text.parse::<Context>(), Err(NotTraceparent), "{text}");
        }
    }
}
