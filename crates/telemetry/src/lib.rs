//! Telemetry of a program: log lines on standard error, and traces by OTLP over gRPC.
//!
//! Traces are sent if the standard variables name an endpoint (`OTEL_EXPORTER_OTLP_ENDPOINT`,
//! `OTEL_EXPORTER_OTLP_TRACES_ENDPOINT`); otherwise nothing of it exists. Engram has no variables of its own for it.
//! All OpenTelemetry code is in this crate, since its crates break in minor versions; other crates create spans with
//! `engram-trace`, the operator also with `tracing`.
//!
//! - An invalid variable is a startup error; none is ignored.
//! - An unavailable collector delays nothing: spans go into a bounded queue, a separate thread sends them, and spans
//!   without room or receiver are lost.
//! - Only spans of Engram's own crates are sent, from level debug on, so that log lines show them only on request; the
//!   connection to the collector is never part of a trace.

mod export;
mod lines;
mod recorder;
mod settings;

use std::time::Duration;

use opentelemetry::KeyValue;
use opentelemetry::trace::TracerProvider as _;
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::{
    BatchSpanProcessor, IdGenerator as _, RandomIdGenerator, SdkTracerProvider, SpanProcessor as _,
};
use tracing::level_filters::LevelFilter;
use tracing::{Dispatch, Level, Metadata};
use tracing_subscriber::filter::FilterFn;
use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::fmt::format::JsonFields;
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::{EnvFilter, Layer as _};

pub use lines::LogFormat;
pub use settings::Invalid;

use lines::{TracedFormat, TracedText};
use recorder::{SharedProcessor, SpanRecorder};
use settings::{HeadSampling, Traces};

/// Time limit for sending the last spans when a program ends.
const FLUSH: Duration = Duration::from_secs(3);

/// Identity of the program.
#[derive(Debug, Clone, Copy)]
pub struct Program {
    /// Default of `service.name`; `OTEL_SERVICE_NAME` overrides it.
    pub name: &'static str,
    /// Its `service.version`.
    pub version: &'static str,
    /// Source of its spans.
    pub spans: Spans,
}

/// Source of the spans of a program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Spans {
    /// `engram-trace` only: spans of traces that are not sampled cost nothing.
    Sampled,
    /// `engram-trace`, and the `tracing` spans of Engram's crates.
    Tracing,
}

/// Settings of log lines.
#[derive(Debug, Clone, Copy)]
pub struct Log<'a> {
    /// A level, or targets with levels.
    pub filter: &'a str,
    /// Format of lines.
    pub format: LogFormat,
}

/// Reason why telemetry could not be set up.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Invalid log filter.
    #[error("log filter {0:?}: {1}")]
    Filter(String, tracing_subscriber::filter::ParseError),
    /// Invalid variable.
    #[error(transparent)]
    Variable(#[from] Invalid),
    /// No exporter could be created.
    #[error("failed to create a trace exporter: {0}")]
    Exporter(String),
    /// Logging was already set up.
    #[error("logging was already set up")]
    Twice,
}

/// Keeps telemetry running until dropped: then the last spans are sent, for a bounded time.
#[derive(Debug)]
#[must_use = "the last spans are lost without it"]
pub struct Telemetry {
    export: Option<Export>,
}

/// An exporter with what feeds it.
#[derive(Debug)]
struct Export {
    provider: SdkTracerProvider,
    processor: SharedProcessor,
    head: HeadSampling,
}

impl Telemetry {
    fn of(traces: Option<&Traces>) -> Result<Self, Error> {
        Ok(Self { export: traces.map(export_of).transpose()? })
    }

    /// Whether traces are sent.
    pub const fn traces(&self) -> bool {
        self.export.is_some()
    }

    /// Makes the `engram-trace` spans of this process part of what is sent.
    fn record_spans(&self) -> Result<(), Error> {
        let Some(export) = &self.export else { return Ok(()) };
        let recorder = SpanRecorder::new(export.processor.clone(), export.head);
        engram_trace::set_recorder(Box::new(recorder)).map_err(|_| Error::Twice)
    }
}

impl Drop for Telemetry {
    fn drop(&mut self) {
        if let Some(export) = self.export.take() {
            // The exporter has logged errors.
            let _ = export.provider.shutdown_with_timeout(FLUSH);
        }
    }
}

/// Sets up log lines and traces of this process. Must be called on the runtime that carries the connection to a
/// collector; drop the result before that runtime.
///
/// # Errors If the filter or a variable is invalid.
pub fn start(program: Program, log: Log<'_>) -> Result<Telemetry, Error> {
    // An invalid value that is not Unicode is shown lossily.
    let get = |name: &str| std::env::var_os(name).map(|value| value.to_string_lossy().into_owned());
    let (dispatch, telemetry) = build(program, log, get, std::io::stderr)?;
    tracing::dispatcher::set_global_default(dispatch).map_err(|_| Error::Twice)?;
    telemetry.record_spans()?;
    Ok(telemetry)
}

/// Sends the `engram-trace` spans of this process, without log lines: for clients. `None` = no endpoint is set. As for [`start`], the
/// runtime carries the connection.
///
/// # Errors If a variable is invalid, or spans are sent already.
pub fn start_traces(name: &'static str, version: &'static str) -> Result<Option<Telemetry>, Error> {
    let get = |name: &str| std::env::var_os(name).map(|value| value.to_string_lossy().into_owned());
    let Some(traces) = settings::read((name, version), get)? else { return Ok(None) };
    let telemetry = Telemetry::of(Some(&traces))?;
    telemetry.record_spans()?;
    Ok(Some(telemetry))
}

/// Returns the log filter of the variable `ENGRAM_LOG`; level info without a valid one.
pub fn environment_filter() -> String {
    let filter = std::env::var("ENGRAM_LOG").ok();
    filter.filter(|filter| EnvFilter::try_new(filter).is_ok()).unwrap_or_else(|| "info".into())
}

/// Like [`start`], with variables from `get`, and another writer for log lines.
///
/// # Errors As for [`start`].
pub fn build<W>(
    program: Program,
    log: Log<'_>,
    get: impl Fn(&str) -> Option<String>,
    writer: W,
) -> Result<(Dispatch, Telemetry), Error>
where
    W: for<'writer> MakeWriter<'writer> + Send + Sync + 'static,
{
    let filter = EnvFilter::try_new(log.filter).map_err(|error| Error::Filter(log.filter.to_owned(), error))?;
    // Reporting that stderr cannot be written to would write to stderr and panic.
    let lines = tracing_subscriber::fmt::layer().with_ansi(false).with_writer(writer).log_internal_errors(false);
    let lines = match log.format {
        LogFormat::Text => lines.event_format(TracedText::new()).boxed(),
        LogFormat::Json => lines.fmt_fields(JsonFields::new()).event_format(TracedFormat::new()).boxed(),
    };
    let telemetry = Telemetry::of(settings::read((program.name, program.version), get)?.as_ref())?;
    let export = telemetry.export.as_ref().filter(|_| program.spans == Spans::Tracing);
    let traces = export.map(|export| {
        // Source location and thread of a span do not help to understand a cluster.
        tracing_opentelemetry::layer()
            .with_tracer(export.provider.tracer(program.name))
            .with_location(false)
            .with_threads(false)
            .with_target(false)
            .with_tracked_inactivity(false)
            .with_filter(FilterFn::new(is_traced).with_max_level_hint(LevelFilter::DEBUG))
    });
    let subscriber = tracing_subscriber::registry().with(traces).with(lines.with_filter(filter));
    Ok((Dispatch::new(subscriber), telemetry))
}

/// Selects our own spans, and events in them. An allow-list: the crates below the exporter create spans, too (`h2`,
/// `hyper`, `tonic`, `tower`), and sending those would create more.
fn is_traced(metadata: &Metadata<'_>) -> bool {
    let target = metadata.target();
    let is_ours = target.starts_with("engram") && !target.starts_with(env!("CARGO_CRATE_NAME"));
    let least = if metadata.is_span() { Level::DEBUG } else { Level::INFO };
    is_ours && *metadata.level() <= least
}

fn export_of(traces: &Traces) -> Result<Export, Error> {
    let mut attributes = traces.resource.clone();
    // Outside a pod there is no unique name.
    let instance = || RandomIdGenerator::default().new_trace_id().to_string();
    attributes.entry("service.instance.id".into()).or_insert_with(instance);
    let attributes = attributes.into_iter().map(|(key, value)| KeyValue::new(key, value));
    let sdk = [KeyValue::new("telemetry.sdk.name", "opentelemetry"), KeyValue::new("telemetry.sdk.language", "rust")];
    let resource = Resource::builder_empty().with_attributes(sdk).with_attributes(attributes).build();
    let mut processor = BatchSpanProcessor::builder(export::exporter(traces)?).build();
    processor.set_resource(&resource);
    let processor = SharedProcessor::new(processor);
    let provider = SdkTracerProvider::builder()
        .with_resource(resource)
        .with_sampler(traces.sampler.clone())
        .with_span_processor(processor.clone())
        .build();
    Ok(Export { provider, processor, head: traces.head })
}
