//! Calls by method and code, with exemplars of sampled traces.

use super::registry::Registrar;
use engram_trace::Context;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::exemplar::HistogramWithExemplars;
use prometheus_client::metrics::family::Family;
use std::time::{Duration, SystemTime};
use tonic::Code;

/// Methods with their own series. All others share one, so that a client cannot create series.
const METHODS: [&str; 27] = [
    "OpenSession",
    "GetOutcome",
    "Upsert",
    "Remove",
    "ApplyReinforcement",
    "ApplyDecay",
    "LearnEpoch",
    "BroadcastQuality",
    "GetMemories",
    "ScanMemories",
    "GetQuality",
    "Rank",
    "Recall",
    "GetDigest",
    "GetPartitionMap",
    "SubmitRun",
    "WatchRun",
    "CancelRun",
    "ListRuns",
    "RemoveRun",
    "GetReport",
    "Predict",
    "GetWorkerStatus",
    "CreateSnapshot",
    "Stop",
    "Check",
    "other",
];

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct MethodLabels {
    method: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct CallLabels {
    method: &'static str,
    code: &'static str,
}

/// Labels of an exemplar.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct TraceLabels {
    trace_id: String,
    span_id: String,
}

impl TraceLabels {
    fn of(context: Context) -> Self {
        Self { trace_id: format!("{:032x}", context.trace), span_id: format!("{:016x}", context.span) }
    }
}

/// Calls by method and code.
#[derive(Debug, Clone)]
pub(crate) struct Calls {
    total: Family<CallLabels, Counter>,
    seconds: Family<MethodLabels, HistogramWithExemplars<TraceLabels>>,
}

impl Calls {
    pub(super) fn new(registrar: &mut Registrar) -> Self {
        // From 20 us, about the cost of a loopback call, to 10 s, the deadline of an attempt.
        let buckets = || {
            HistogramWithExemplars::new(
                [2e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.5, 1.0, 10.0].into_iter(),
            )
        };
        let calls = Self {
            total: Family::default(),
            seconds: Family::new_with_constructor(buckets as fn() -> HistogramWithExemplars<TraceLabels>),
        };
        registrar.register(
            "requests",
            &["method", "code"],
            "Calls by method and gRPC status code",
            calls.total.clone(),
        );
        let help = "Time from the head of a request to the head of its response";
        registrar.register("request_duration_seconds", &["method"], help, calls.seconds.clone());
        calls
    }

    /// The number of a method, by the path of its call.
    pub(crate) fn method(&self, path: &str) -> usize {
        let name = path.rsplit('/').next().unwrap_or_default();
        METHODS.iter().position(|method| *method == name).unwrap_or(METHODS.len() - 1)
    }

    pub(crate) const fn name(&self, method: usize) -> &'static str {
        METHODS[method]
    }

    /// Counts a call; `trace` is its span, if its trace is sampled, and becomes an exemplar.
    pub(crate) fn count(&self, method: usize, code: Code, elapsed: Duration, trace: Option<Context>) {
        let method = METHODS[method];
        self.total.get_or_create(&CallLabels { method, code: code_name(code) }).inc();
        self.seconds.get_or_create(&MethodLabels { method }).observe(
            elapsed.as_secs_f64(),
            trace.map(TraceLabels::of),
            trace.map(|_| SystemTime::now()),
        );
    }
}

const fn code_name(code: Code) -> &'static str {
    match code {
        Code::Ok => "OK",
        Code::Cancelled => "CANCELLED",
        Code::Unknown => "UNKNOWN",
        Code::InvalidArgument => "INVALID_ARGUMENT",
        Code::DeadlineExceeded => "DEADLINE_EXCEEDED",
        Code::NotFound => "NOT_FOUND",
        Code::AlreadyExists => "ALREADY_EXISTS",
        Code::PermissionDenied => "PERMISSION_DENIED",
        Code::ResourceExhausted => "RESOURCE_EXHAUSTED",
        Code::FailedPrecondition => "FAILED_PRECONDITION",
        Code::Aborted => "ABORTED",
        Code::OutOfRange => "OUT_OF_RANGE",
        Code::Unimplemented => "UNIMPLEMENTED",
        Code::Internal => "INTERNAL",
        Code::Unavailable => "UNAVAILABLE",
        Code::DataLoss => "DATA_LOSS",
        Code::Unauthenticated => "UNAUTHENTICATED",
    }
}
