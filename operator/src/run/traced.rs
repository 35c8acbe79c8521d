//! What a look at an object says of itself in traces: whom it is about, and how it ended. What is at other times another name is an
//! attribute and never a part of a span's name, so that looks can be compared.

use kube::runtime::controller::Action;
use tracing::field::Empty;
use tracing::{Span, debug_span};

use super::Key;
use super::asking::Error;
use super::kinds::Kind;

/// Begins the trace of one look at an object.
pub(super) fn look(kind: Kind, key: &Key, uid: Option<&str>) -> Span {
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

/// Tells the trace of this look how it ended.
pub(super) fn ended(result: &Result<Action, Error>) {
    let span = Span::current();
    match result {
        Ok(_) => drop(span.record("outcome", "ok")),
        Err(error) => {
            span.record("outcome", "error");
            span.record("error.type", error.category());
            span.record("otel.status_code", "ERROR");
            span.record("otel.status_description", tracing::field::display(error));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use engram_telemetry::{Log, LogFormat, Program, build};

    use super::super::kinds::RUN;
    use super::*;

    #[test]
    fn a_look_says_whom_it_is_about_and_how_it_ended_and_its_name_says_neither() {
        let (lines, writer) = std::io::pipe().unwrap();
        let (program, log) =
            (Program { name: "engram-operator", version: "1.2.3" }, Log { filter: "debug", format: LogFormat::Json });
        let (dispatch, _telling) = build(program, log, |_| None, Arc::new(writer)).unwrap();
        tracing::dispatcher::with_default(&dispatch, || {
            let key = Key { namespace: "research".into(), name: "sales".into() };
            look(RUN, &key, Some("7b1e")).in_scope(|| {
                ended(&Err(Error::Deposed));
                tracing::info!("looked");
            });
        });
        drop(dispatch);
        let line: serde_json::Value = serde_json::from_reader(lines).unwrap();
        let expected = serde_json::json!({
            "name": "reconcile", "k8s.namespace.name": "research", "k8s.object.kind": "LearnerRun", "k8s.object.name": "sales",
            "k8s.object.uid": "7b1e", "outcome": "error", "error.type": "deposed", "otel.status_code": "ERROR",
            "otel.status_description": "another replica leads now",
        });
        assert_eq!(line["span"], expected);
    }
}
