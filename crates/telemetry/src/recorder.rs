//! Finished spans of `engram-trace` on their way to the exporter.

use std::sync::Arc;
use std::time::Duration;

use engram_trace::{Context, FinishedSpan, Kind, Recorder, Value};
use opentelemetry::trace::{Link, SpanContext, SpanId, SpanKind, Status, TraceFlags, TraceId, TraceState};
use opentelemetry::{InstrumentationScope, KeyValue};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::error::OTelSdkResult;
use opentelemetry_sdk::trace::{BatchSpanProcessor, Span, SpanData, SpanEvents, SpanLinks, SpanProcessor};

use crate::settings::HeadSampling;

/// The queue of spans, fed by the recorder and by the provider of `tracing` spans.
#[derive(Debug, Clone)]
pub(crate) struct SharedProcessor(Arc<BatchSpanProcessor>);

impl SharedProcessor {
    pub(crate) fn new(processor: BatchSpanProcessor) -> Self {
        Self(Arc::new(processor))
    }
}

impl SpanProcessor for SharedProcessor {
    fn on_start(&self, span: &mut Span, context: &opentelemetry::Context) {
        self.0.on_start(span, context);
    }

    fn on_end(&self, span: SpanData) {
        self.0.on_end(span);
    }

    fn force_flush(&self) -> OTelSdkResult {
        self.0.force_flush()
    }

    fn shutdown_with_timeout(&self, timeout: Duration) -> OTelSdkResult {
        self.0.shutdown_with_timeout(timeout)
    }

    // It was set before the processor was shared.
    fn set_resource(&mut self, _resource: &Resource) {}
}

/// Sends finished spans.
#[derive(Debug)]
pub(crate) struct SpanRecorder {
    processor: SharedProcessor,
    /// Traces whose id, by its lower 63 bits, is below this bound are sampled: as the SDK decides, so that all processes agree.
    bound: u64,
    follows_parent: bool,
    scope: InstrumentationScope,
}

impl SpanRecorder {
    pub(crate) fn new(processor: SharedProcessor, head: HeadSampling) -> Self {
        let HeadSampling { ratio, follows_parent } = head;
        let bound = if ratio >= 1.0 { u64::MAX } else { (ratio.max(0.0) * (1_u64 << 63) as f64) as u64 };
        Self { processor, bound, follows_parent, scope: InstrumentationScope::builder("engram").build() }
    }
}

impl Recorder for SpanRecorder {
    fn samples(&self, trace: u128) -> bool {
        (trace as u64) >> 1 < self.bound
    }

    fn follows_parent(&self) -> bool {
        self.follows_parent
    }

    fn record(&self, span: FinishedSpan) {
        let parent_span_id = SpanId::from(span.parent.unwrap_or_default());
        let links = span.links.into_iter().map(|other| Link::with_context(span_context(other))).collect();
        self.processor.on_end(SpanData {
            span_context: span_context(span.context),
            parent_span_id,
            parent_span_is_remote: span.parent_is_remote,
            span_kind: match span.kind {
                Kind::Internal => SpanKind::Internal,
                Kind::Client => SpanKind::Client,
                Kind::Server => SpanKind::Server,
            },
            name: span.name,
            start_time: span.started,
            end_time: span.ended,
            attributes: span.attributes.into_iter().map(|(key, value)| KeyValue::new(key, value_of(value))).collect(),
            dropped_attributes_count: 0,
            events: SpanEvents::default(),
            links: span_links(links),
            status: span.error.map_or(Status::Unset, |error| Status::Error { description: error.into() }),
            instrumentation_scope: self.scope.clone(),
        });
    }
}

fn span_links(links: Vec<Link>) -> SpanLinks {
    let mut all = SpanLinks::default();
    all.links = links;
    all
}

fn span_context(context: Context) -> SpanContext {
    let (trace, span) = (TraceId::from(context.trace), SpanId::from(context.span));
    SpanContext::new(trace, span, TraceFlags::new(context.flags), false, TraceState::default())
}

fn value_of(value: Value) -> opentelemetry::Value {
    match value {
        Value::Text(text) => text.into(),
        Value::Integer(number) => number.into(),
        Value::Number(number) => number.into(),
    }
}
