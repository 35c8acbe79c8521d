//! A trace collector in the network of node 1, and the traces that operators send to it.

use crate::cluster::Cluster;
use crate::process::until;
use crate::suites::helpers::{WHILE, runtime};
use anyhow::{Context, Result, ensure};
use opentelemetry_proto::tonic::collector::trace::v1::trace_service_server::{TraceService, TraceServiceServer};
use opentelemetry_proto::tonic::collector::trace::v1::{ExportTraceServiceRequest, ExportTraceServiceResponse};
use opentelemetry_proto::tonic::common::v1::{KeyValue, any_value::Value};
use opentelemetry_proto::tonic::trace::v1::Span;
use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::runtime::Runtime;
use tonic::{Request, Response, Status};

/// Listen address of the collector.
const ADDRESS: &str = "127.0.0.1:4317";
/// Spans of a successful reconcile.
const STEPS: [&str; 4] = ["validate", "observe", "plan", "apply"];

/// The running collector with the received (service, span) pairs.
static COLLECTING: Mutex<Option<(Runtime, Collector)>> = Mutex::new(None);

#[derive(Clone, Default)]
struct Collector(Arc<Mutex<Vec<(String, Span)>>>);

#[tonic::async_trait]
impl TraceService for Collector {
    async fn export(
        &self,
        request: Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        for spans_of_resource in request.into_inner().resource_spans {
            let resource = spans_of_resource.resource.unwrap_or_default();
            let from = text(&resource.attributes, "service.name").unwrap_or_default().to_owned();
            let spans = spans_of_resource.scope_spans.into_iter().flat_map(|scope| scope.spans);
            held(&self.0).extend(spans.map(|span| (from.clone(), span)));
        }
        Ok(Response::new(ExportTraceServiceResponse::default()))
    }
}

fn held<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn text<'a>(attributes: &'a [KeyValue], key: &str) -> Option<&'a str> {
    match &attributes.iter().find(|pair| pair.key == key)?.value.as_ref()?.value {
        Some(Value::StringValue(text)) => Some(text),
        _ => None,
    }
}

/// Environment variables of an operator that sends its traces to the collector.
pub(super) fn variables() -> [String; 2] {
    [format!("OTEL_EXPORTER_OTLP_ENDPOINT=http://{ADDRESS}"), "OTEL_BSP_SCHEDULE_DELAY=500".into()]
}

/// Starts the collector.
pub(super) fn collect(cluster: &Cluster) -> Result<()> {
    let runtime = runtime(cluster)?;
    let (collector, address) = (Collector::default(), ADDRESS.parse::<SocketAddr>()?);
    let server = tonic::transport::Server::builder().add_service(TraceServiceServer::new(collector.clone()));
    runtime.spawn(server.serve(address));
    *held(&COLLECTING) = Some((runtime, collector));
    Ok(())
}

/// Checks that traces of a reconcile and of a map change arrive.
pub(super) fn arrive(_: &Cluster) -> Result<String> {
    let collecting = held(&COLLECTING);
    let (_, collector) = collecting.as_ref().context("no collector: this check needs the first of its suite")?;
    until("traces of a reconcile and of a map change", WHILE, || {
        let taken = held(&collector.0);
        let of_words = |name: &'static str, key: &'static str| {
            let is_root = move |span: &Span| span.name == name && span.parent_span_id.is_empty();
            taken.iter().filter(move |(_, span)| is_root(span) && text(&span.attributes, key) == Some("words"))
        };
        let steps = |root: &Span| -> BTreeSet<&str> {
            let within = taken.iter().filter(|(_, span)| span.trace_id == root.trace_id);
            within.map(|(_, span)| span.name.as_str()).collect()
        };
        let reconciles = || of_words("reconcile", "k8s.object.name");
        let mut ended_well = reconciles().filter(|(_, root)| text(&root.attributes, "outcome") == Some("ok"));
        let whole = ended_well.find(|(_, root)| STEPS.iter().all(|step| steps(root).contains(step)));
        let names = || taken.iter().map(|(_, span)| span.name.as_str()).collect::<BTreeSet<_>>();
        let (from, _) = whole.with_context(|| format!("no complete reconcile; there is {:?}", names()))?;
        ensure!(from == "engram-operator", "it came from {from:?}");
        let maps = of_words("write partition map", "engram.cluster.name").count();
        ensure!(maps > 0, "no change of the map; there is {:?}", names());
        Ok(Some(format!("{} reconciles, {maps} map changes", reconciles().count())))
    })
}
