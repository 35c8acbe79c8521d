//! What a program tells of itself: log lines on standard error, and traces by OTLP over gRPC.
//!
//! Traces are sent where the standard variables name an endpoint (`OTEL_EXPORTER_OTLP_ENDPOINT`, `OTEL_EXPORTER_OTLP_TRACES_ENDPOINT`),
//! and nothing of all that exists where they do not. There are no variables of Engram's own for it. Everything of OpenTelemetry is in
//! this crate, since its crates break in minor versions; others make spans with `tracing`.
//!
//! - A variable that nobody can mean ends the start with an error, and none is passed over.
//! - A collector that is away holds up nobody: spans go into a bounded queue, a thread of its own sends them, and what finds no room or
//!   nobody to take it is lost.
//! - Spans of Engram's own crates alone are sent, from level debug on, so that they show in log lines only where somebody asks for that;
//!   what the connection to the collector does is no part of any trace.

mod export;
mod lines;
mod settings;

use std::time::Duration;

use opentelemetry::KeyValue;
use opentelemetry::trace::TracerProvider as _;
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::{IdGenerator as _, RandomIdGenerator, SdkTracerProvider};
use tracing::level_filters::LevelFilter;
use tracing::{Dispatch, Level, Metadata};
use tracing_subscriber::filter::FilterFn;
use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::fmt::format::JsonFields;
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::{EnvFilter, Layer as _};

pub use lines::LogFormat;
pub use settings::Invalid;

use lines::Traced;
use settings::Traces;

/// How long the end of a program waits for its last spans to be taken.
const FLUSH: Duration = Duration::from_secs(3);

/// Which program tells.
#[derive(Debug, Clone, Copy)]
pub struct Program {
    /// Its `service.name`, unless `OTEL_SERVICE_NAME` gives another.
    pub name: &'static str,
    /// Its `service.version`.
    pub version: &'static str,
}

/// Which lines are logged, and how.
#[derive(Debug, Clone, Copy)]
pub struct Log<'a> {
    /// A level, or targets with levels.
    pub filter: &'a str,
    /// How lines look.
    pub format: LogFormat,
}

/// Why a program cannot tell of itself as it was asked to.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The filter of log lines is none.
    #[error("log filter {0:?}: {1}")]
    Filter(String, tracing_subscriber::filter::ParseError),
    /// A variable is none.
    #[error(transparent)]
    Variable(#[from] Invalid),
    /// Nothing can be sent.
    #[error("failed to make an exporter of traces: {0}")]
    Exporter(String),
    /// Somebody else tells already.
    #[error("log lines were set up before")]
    Twice,
}

/// Keeps telling until it is dropped: then the last spans are sent, for a bounded time.
#[derive(Debug)]
#[must_use = "the last spans are lost without it"]
pub struct Telemetry {
    provider: Option<SdkTracerProvider>,
}

impl Telemetry {
    /// Whether traces are sent.
    pub const fn traces(&self) -> bool {
        self.provider.is_some()
    }
}

impl Drop for Telemetry {
    fn drop(&mut self) {
        if let Some(provider) = self.provider.take() {
            // What went wrong with the last of them was told by the exporter.
            let _ = provider.shutdown_with_timeout(FLUSH);
        }
    }
}

/// Sets up log lines and traces of this process. To be called on the runtime that carries the connection to a collector, and what it
/// returns is to be dropped before that runtime.
///
/// # Errors
/// The filter or a variable says nonsense.
pub fn start(program: Program, log: Log<'_>) -> Result<Telemetry, Error> {
    // One that is not Unicode is refused with what can be shown of it.
    let get = |name: &str| std::env::var_os(name).map(|value| value.to_string_lossy().into_owned());
    let (dispatch, telling) = build(program, log, get, std::io::stderr)?;
    tracing::dispatcher::set_global_default(dispatch).map_err(|_| Error::Twice)?;
    Ok(telling)
}

/// The same for whoever gives the variables by `get`, and wants the lines elsewhere.
///
/// # Errors
/// As for [`start`].
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
    // Telling that stderr cannot be written to would be a write to stderr, and a panic.
    let lines = tracing_subscriber::fmt::layer().with_ansi(false).with_writer(writer).log_internal_errors(false);
    let lines = match log.format {
        LogFormat::Text => lines.boxed(),
        LogFormat::Json => lines.fmt_fields(JsonFields::new()).event_format(Traced::new()).boxed(),
    };
    let provider = settings::read((program.name, program.version), get)?.map(|traces| provider(&traces)).transpose()?;
    let traces = provider.as_ref().map(|provider| {
        // Where a span was begun, and on which thread, is of no use to who looks at a cluster.
        tracing_opentelemetry::layer()
            .with_tracer(provider.tracer(program.name))
            .with_location(false)
            .with_threads(false)
            .with_target(false)
            .with_tracked_inactivity(false)
            .with_filter(FilterFn::new(is_traced).with_max_level_hint(LevelFilter::DEBUG))
    });
    let subscriber = tracing_subscriber::registry().with(traces).with(lines.with_filter(filter));
    Ok((Dispatch::new(subscriber), Telemetry { provider }))
}

/// Spans of our own, and what is logged in them. An allow-list: the crates below the exporter make spans too (`h2`, `hyper`, `tonic`,
/// `tower`), and sending those would make more.
fn is_traced(metadata: &Metadata<'_>) -> bool {
    let target = metadata.target();
    let is_ours = target.starts_with("engram") && !target.starts_with(env!("CARGO_CRATE_NAME"));
    let least = if metadata.is_span() { Level::DEBUG } else { Level::INFO };
    is_ours && *metadata.level() <= least
}

fn provider(traces: &Traces) -> Result<SdkTracerProvider, Error> {
    let mut attributes = traces.resource.clone();
    // Whoever runs outside a pod has no name that nobody else has.
    let instance = || RandomIdGenerator::default().new_trace_id().to_string();
    attributes.entry("service.instance.id".into()).or_insert_with(instance);
    let attributes = attributes.into_iter().map(|(key, value)| KeyValue::new(key, value));
    let sdk = [KeyValue::new("telemetry.sdk.name", "opentelemetry"), KeyValue::new("telemetry.sdk.language", "rust")];
    Ok(SdkTracerProvider::builder()
        .with_resource(Resource::builder_empty().with_attributes(sdk).with_attributes(attributes).build())
        .with_sampler(traces.sampler.clone())
        .with_batch_exporter(export::exporter(traces)?)
        .build())
}
