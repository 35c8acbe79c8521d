//! Tracing span of a reconcile, with the object and the outcome as attributes. Span names have low cardinality.

use kube::runtime::controller::Action;
use tracing::field::Empty;
use tracing::{Span, debug_span};

use crate::context::Key;
use crate::kube::failure::Failure;
use crate::kube::resource_kinds::Kind;

/// Starts the span of one reconcile.
pub(crate) fn reconcile_span(kind: Kind, key: &Key, uid: Option<&str>) -> Span {
    debug_span!(
        "reconcile",
        k8s.namespace.name = key.namespace,
        k8s.object.kind = kind.name,
        k8s.object.name = key.name,
        k8s.object.uid = uid,
        outcome = Empty,
        error.type = Empty,
        otel.status_code = Empty,
        otel.status_description = Empty,
    )
}

/// Records the outcome in the current span.
pub(crate) fn record_outcome(result: &Result<Action, impl Failure>) {
    let span = Span::current();
    match result {
        Ok(_) => drop(span.record("outcome", "ok")),
        Err(error) => {
            span.record("outcome", "error");
            span.record("error.type", error.root_cause().category());
            span.record("otel.status_code", "ERROR");
            span.record("otel.status_description", tracing::field::display(error));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use engram_telemetry::{Log, LogFormat, Program, Spans, build};

    use super::*;
    use crate::kube::api_request::WriteError;
    use crate::kube::resource_kinds::RUN;

    #[test]
    fn a_reconcile_span_has_object_and_outcome_as_attributes() {
        let (lines, writer) = std::io::pipe().unwrap();
        let program = Program { name: "engram-operator", version: "1.2.3", spans: Spans::Tracing };
        let log = Log { filter: "debug", format: LogFormat::Json };
        let (dispatch, _telemetry) = build(program, log, |_| None, Arc::new(writer)).unwrap();
        tracing::dispatcher::with_default(&dispatch, || {
            let key = Key { namespace: "research".into(), name: "sales".into() };
            reconcile_span(RUN, &key, Some("7b1e")).in_scope(|| {
                record_outcome(&Err(WriteError::NotLeader));
                tracing::info!("reconciled");
            });
        });
        drop(dispatch);
        let line: serde_json::Value = serde_json::from_reader(lines).unwrap();
        let expected = serde_json::json!({
            "name": "reconcile", "k8s.namespace.name": "research", "k8s.object.kind": "LearnerRun", "k8s.object.name": "sales",
            "k8s.object.uid": "7b1e", "outcome": "error", "error.type": "not_leader", "otel.status_code": "ERROR",
            "otel.status_description": "lost leadership to another replica",
        });
        assert_eq!(line["span"], expected);
    }
}
