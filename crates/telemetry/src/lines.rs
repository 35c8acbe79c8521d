//! Log lines.

use std::fmt;

use opentelemetry::Context;
use opentelemetry::trace::TraceContextExt as _;
use tracing::{Event, Subscriber};
use tracing_subscriber::fmt::format::Full;
use tracing_subscriber::fmt::format::{Format, FormatEvent, FormatFields, Json, Writer};
use tracing_subscriber::fmt::{FmtContext, format};
use tracing_subscriber::registry::LookupSpan;

/// Format of log lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogFormat {
    /// Human-readable; inside a traced span with `trace_id` and `span_id`.
    Text,
    /// One JSON object per line; inside a traced span with `trace_id` and `span_id`.
    Json,
}

/// Returns the ids of the current span as hex digits: of `engram-trace`, if its trace is sampled, or of `tracing`.
fn ids() -> Option<(String, String)> {
    if let Some(context) = engram_trace::current().filter(|context| context.is_sampled()) {
        return Some((format!("{:032x}", context.trace), format!("{:016x}", context.span)));
    }
    Context::map_current(|current| {
        let span_context = current.span().span_context().clone();
        span_context.is_valid().then(|| (span_context.trace_id().to_string(), span_context.span_id().to_string()))
    })
}

/// Text lines with the ids of their trace appended.
pub(crate) struct TracedText(Format<Full>);

impl TracedText {
    pub(crate) fn new() -> Self {
        Self(format().with_ansi(false))
    }
}

impl<S, N> FormatEvent<S, N> for TracedText
where
    S: Subscriber + for<'span> LookupSpan<'span>,
    N: for<'writer> FormatFields<'writer> + 'static,
{
    fn format_event(&self, context: &FmtContext<'_, S, N>, mut writer: Writer<'_>, event: &Event<'_>) -> fmt::Result {
        let Some((trace, span)) = ids() else { return self.0.format_event(context, writer, event) };
        let mut line = String::new();
        self.0.format_event(context, Writer::new(&mut line), event)?;
        writeln!(writer, "{} trace_id={trace} span_id={span}", line.trim_end())
    }
}

/// JSON lines with the ids of their trace appended.
pub(crate) struct TracedFormat(Format<Json>);

impl TracedFormat {
    pub(crate) fn new() -> Self {
        Self(format().json())
    }
}

impl<S, N> FormatEvent<S, N> for TracedFormat
where
    S: Subscriber + for<'span> LookupSpan<'span>,
    N: for<'writer> FormatFields<'writer> + 'static,
{
    fn format_event(&self, context: &FmtContext<'_, S, N>, mut writer: Writer<'_>, event: &Event<'_>) -> fmt::Result {
        let Some((trace, span)) = ids() else { return self.0.format_event(context, writer, event) };
        let mut line = String::new();
        self.0.format_event(context, Writer::new(&mut line), event)?;
        match line.trim_end().strip_suffix('}') {
            Some(open) => writeln!(writer, "{open},\"trace_id\":\"{trace}\",\"span_id\":\"{span}\"}}"),
            None => writer.write_str(&line),
        }
    }
}
