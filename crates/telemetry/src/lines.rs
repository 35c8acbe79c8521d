//! Log lines.

use std::fmt;

use opentelemetry::Context;
use opentelemetry::trace::TraceContextExt as _;
use tracing::{Event, Subscriber};
use tracing_subscriber::fmt::format::{Format, FormatEvent, FormatFields, Json, Writer};
use tracing_subscriber::fmt::{FmtContext, format};
use tracing_subscriber::registry::LookupSpan;

/// How lines are logged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogFormat {
    /// For people.
    Text,
    /// One JSON object a line; inside a span that may be traced with its `trace_id` and `span_id`.
    Json,
}

/// JSON lines as they were, with the ids of the trace that they belong to at their end.
pub(crate) struct Traced(Format<Json>);

impl Traced {
    pub(crate) fn new() -> Self {
        Self(format().json())
    }
}

impl<S, N> FormatEvent<S, N> for Traced
where
    S: Subscriber + for<'span> LookupSpan<'span>,
    N: for<'writer> FormatFields<'writer> + 'static,
{
    fn format_event(&self, context: &FmtContext<'_, S, N>, mut writer: Writer<'_>, event: &Event<'_>) -> fmt::Result {
        let ids = Context::map_current(|current| {
            let of_span = current.span().span_context().clone();
            of_span.is_valid().then(|| (of_span.trace_id(), of_span.span_id()))
        });
        let Some((trace, span)) = ids else { return self.0.format_event(context, writer, event) };
        let mut line = String::new();
        self.0.format_event(context, Writer::new(&mut line), event)?;
        match line.trim_end().strip_suffix('}') {
            Some(open) => writeln!(writer, "{open},\"trace_id\":\"{trace}\",\"span_id\":\"{span}\"}}"),
            None => writer.write_str(&line),
        }
    }
}
