//! A collector of traces in the network of node 1, and what operators send to it of what they really do.

use crate::cluster::Cluster;
use crate::process::until;
use crate::suites::look::{WHILE, runtime};
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

/// Where it listens.
const ADDRESS: &str = "127.0.0.1:4317";
/// Steps of a look at a cluster that is not refused.
const STEPS: [&str; 4] = ["validate", "observe", "plan", "apply"];

/// What collects, for as long as the program runs, and what it has: (who sent it, span).
static COLLECTING: Mutex<Option<(Runtime, Collector)>> = Mutex::new(None);

#[derive(Clone, Default)]
struct Collector(Arc<Mutex<Vec<(String, Span)>>>);

#[tonic::async_trait]
impl TraceService for Collector {
    async fn export(
        &self,
        request: Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        for told in request.into_inner().resource_spans {
            let resource = told.resource.unwrap_or_default();
            let from = text(&resource.attributes, "service.name").unwrap_or_default().to_owned();
            let spans = told.scope_spans.into_iter().flat_map(|scope| scope.spans);
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

/// The variables of an operator that sends its traces there. One that is started when nobody collects sends them to nobody.
pub(super) fn variables() -> [String; 2] {
    [format!("OTEL_EXPORTER_OTLP_ENDPOINT=http://{ADDRESS}"), "OTEL_BSP_SCHEDULE_DELAY=500".into()]
}

/// Begins to collect.
pub(super) fn collect(cluster: &Cluster) -> Result<()> {
    let runtime = runtime(cluster)?;
    let (collector, address) = (Collector::default(), ADDRESS.parse::<SocketAddr>()?);
    let server = tonic::transport::Server::builder().add_service(TraceServiceServer::new(collector.clone()));
    runtime.spawn(server.serve(address));
    *held(&COLLECTING) = Some((runtime, collector));
    Ok(())
}

/// The look that made the cluster's objects, and the change that made its map, arrive as traces.
pub(super) fn arrive(_: &Cluster) -> Result<String> {
    let collecting = held(&COLLECTING);
    let (_, collector) = collecting.as_ref().context("nobody collects: this check needs the first of its suite")?;
    until("traces of a look at the cluster and of its map", WHILE, || {
        let taken = held(&collector.0);
        let of_words = |name: &'static str, key: &'static str| {
            let is_root = move |span: &Span| span.name == name && span.parent_span_id.is_empty();
            taken.iter().filter(move |(_, span)| is_root(span) && text(&span.attributes, key) == Some("words"))
        };
        let steps = |root: &Span| -> BTreeSet<&str> {
            let within = taken.iter().filter(|(_, span)| span.trace_id == root.trace_id);
            within.map(|(_, span)| span.name.as_str()).collect()
        };
        let looks = || of_words("reconcile", "k8s.object.name");
        let mut ended_well = looks().filter(|(_, root)| text(&root.attributes, "outcome") == Some("ok"));
        let whole = ended_well.find(|(_, root)| STEPS.iter().all(|step| steps(root).contains(step)));
        let names = || taken.iter().map(|(_, span)| span.name.as_str()).collect::<BTreeSet<_>>();
        let (from, _) = whole.with_context(|| format!("no look at the cluster is whole; there is {:?}", names()))?;
        ensure!(from == "engram-operator", "it came from {from:?}");
        let maps = of_words("change map", "engram.cluster.name").count();
        ensure!(maps > 0, "no change of the map; there is {:?}", names());
        Ok(Some(format!("{} looks at the cluster, {maps} changes of its map", looks().count())))
    })
}
