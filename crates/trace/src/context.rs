//! W3C trace context.

use std::fmt;
use std::str::FromStr;
use xxhash_rust::xxh3::{xxh3_64, xxh3_128};

tokio::task_local! {
    static CURRENT: Context;
}

/// Trace context of a call: identifies a span, the parent of what happens within it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Context {
    /// Trace id; not 0.
    pub trace: u128,
    /// Span id; not 0.
    pub span: u64,
    /// Bit 0 = sampled.
    pub flags: u8,
}

impl Context {
    const SAMPLED: u8 = 1;
    /// Length of the binary form.
    pub const BYTES: usize = 25;

    /// Creates a new trace, which is not sampled.
    pub fn new() -> Self {
        Self { trace: rand::random::<u128>() | 1, span: rand::random::<u64>() | 1, flags: 0 }
    }

    /// Returns the context on which all processes agree for a subject: both ids are hashes of its name.
    pub fn of(kind: &str, subject: &[u8]) -> Self {
        let name = [kind.as_bytes(), &[0], subject].concat();
        Self { trace: xxh3_128(&name) | 1, span: xxh3_64(&name) | 1, flags: 0 }
    }

    /// Returns another span of the same trace.
    #[must_use]
    pub fn child(self) -> Self {
        Self { span: rand::random::<u64>() | 1, ..self }
    }

    /// Returns whether the spans of the trace are recorded.
    pub const fn is_sampled(self) -> bool {
        self.flags & Self::SAMPLED != 0
    }

    /// Returns the same span of a sampled trace.
    #[must_use]
    pub const fn sampled(self) -> Self {
        Self { flags: self.flags | Self::SAMPLED, ..self }
    }

    /// Returns the binary form: trace id and span id in network byte order, flags.
    pub fn to_bytes(self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        bytes[..16].copy_from_slice(&self.trace.to_be_bytes());
        bytes[16..24].copy_from_slice(&self.span.to_be_bytes());
        bytes[24] = self.flags;
        bytes
    }

    /// Parses the binary form; `None` if it has another length, or an id is 0.
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; Self::BYTES] = bytes.try_into().ok()?;
        let (ids, flags) = bytes.split_at(24);
        let (trace, span) = ids.split_at(16);
        let trace = u128::from_be_bytes(trace.try_into().ok()?);
        let span = u64::from_be_bytes(span.try_into().ok()?);
        (trace != 0 && span != 0).then_some(Self { trace, span, flags: flags[0] })
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

/// Returns the context of the current task, if it runs [`within`] one.
pub fn current() -> Option<Context> {
    CURRENT.try_with(|context| *context).ok()
}

/// Runs `work` under `context`: it is the parent of every span and call in it.
pub async fn within<F: Future>(context: Context, work: F) -> F::Output {
    CURRENT.scope(context, work).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn context_round_trips_through_text_and_bytes_and_other_input_is_rejected() {
        let context = Context::new().sampled();
        assert_eq!(context.to_string().parse(), Ok(context));
        assert_eq!(Context::from_bytes(&context.to_bytes()), Some(context));
        let zero = format!("00-{:032x}-{:016x}-00", 0, 1);
        for text in ["", "00", "01-00-00-00", zero.as_str(), "00-+0000000000000000000000000000001-0000000000000001-00"]
        {
            assert_eq!(text.parse::<Context>(), Err(NotTraceparent), "{text}");
        }
        for bytes in [&[][..], &[1; 24], &[1; 26], &[0; 25]] {
            assert_eq!(Context::from_bytes(bytes), None, "{bytes:?}");
        }
    }
}
