//! Without a collector spans cost nothing. In its own process: a subscriber of another test would enable spans for all.

use engram_telemetry::{Log, LogFormat, Program, Spans, build};
use tracing::level_filters::LevelFilter;

#[test]
fn without_an_endpoint_no_span_is_created() {
    let program = Program { name: "engram-operator", version: "1.2.3", spans: Spans::Tracing };
    let log = Log { filter: "info", format: LogFormat::Json };
    let (dispatch, telemetry) = build(program, log, |_| None, std::io::sink).unwrap();
    tracing::dispatcher::set_global_default(dispatch).unwrap();
    assert!(!telemetry.traces());
    assert_eq!(LevelFilter::current(), LevelFilter::INFO);
    assert!(tracing::debug_span!(target: "engram_operator", "reconcile").is_disabled());
    assert!(!tracing::info_span!(target: "engram_operator", "line").is_disabled());
}
