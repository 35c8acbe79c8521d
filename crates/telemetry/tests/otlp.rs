//! Traces arrive at a collector, and an unavailable one does not delay the program.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::collections::BTreeMap;
use std::io::Write;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use engram_telemetry::{Log, LogFormat, Program, Spans, Telemetry, build};
use opentelemetry_proto::tonic::collector::trace::v1::trace_service_server::{TraceService, TraceServiceServer};
use opentelemetry_proto::tonic::collector::trace::v1::{ExportTraceServiceRequest, ExportTraceServiceResponse};
use opentelemetry_proto::tonic::common::v1::{KeyValue, any_value::Value};
use rustls::pki_types::PrivateKeyDer;
use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::{Request, Response, Status};
use tracing::Dispatch;

const PROGRAM: Program = Program { name: "engram-operator", version: "1.2.3", spans: Spans::Tracing };

/// Much more than the time limit of the last spans, and less than sending all of them would take.
const DEADLINE: Duration = Duration::from_secs(20);

/// A collector that stores what it receives.
#[derive(Clone, Default)]
struct Collector(Arc<Mutex<Vec<ExportTraceServiceRequest>>>);

#[tonic::async_trait]
impl TraceService for Collector {
    async fn export(
        &self,
        request: Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        self.0.lock().unwrap().push(request.into_inner());
        Ok(Response::new(ExportTraceServiceResponse::default()))
    }
}

/// Log lines in memory.
#[derive(Clone, Default)]
struct Lines(Arc<Mutex<Vec<u8>>>);

impl Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl Lines {
    fn read(&self) -> String {
        String::from_utf8(self.0.lock().unwrap().clone()).unwrap()
    }
}

async fn listen() -> (Collector, SocketAddr) {
    let (collector, listener) = (Collector::default(), TcpListener::bind("127.0.0.1:0").await.unwrap());
    let (service, address) = (TraceServiceServer::new(collector.clone()), listener.local_addr().unwrap());
    let server = tonic::transport::Server::builder().add_service(service);
    tokio::spawn(server.serve_with_incoming(TcpListenerStream::new(listener)));
    (collector, address)
}

fn set_up(variables: &[(&str, &str)]) -> (Dispatch, Telemetry, Lines) {
    let variables: BTreeMap<String, String> =
        variables.iter().map(|&(name, value)| (name.to_owned(), value.to_owned())).collect();
    let (lines, log) = (Lines::default(), Log { filter: "info", format: LogFormat::Json });
    let writer = lines.clone();
    let (dispatch, telemetry) =
        build(PROGRAM, log, |name| variables.get(name).cloned(), move || writer.clone()).unwrap();
    (dispatch, telemetry, lines)
}

/// Creates the spans of an operator's reconciliation.
fn reconcile(dispatch: &Dispatch) {
    tracing::dispatcher::with_default(dispatch, || {
        let root = tracing::debug_span!(target: "engram_operator", "reconcile", k8s.namespace.name = "research");
        let _root = root.enter();
        tracing::debug_span!(target: "engram_operator", "observe").in_scope(|| {
            tracing::info!(target: "engram_operator", "observed");
        });
        // The transport of traces is never part of a trace.
        let _wire = tracing::info_span!(target: "h2::client", "poll").entered();
    });
}

fn read(attributes: &[KeyValue]) -> BTreeMap<&str, &str> {
    let text = |pair: &KeyValue| match pair.value.as_ref().and_then(|value| value.value.as_ref()) {
        Some(Value::StringValue(text)) => text.clone().leak(),
        other => panic!("{other:?}"),
    };
    attributes.iter().map(|pair| (pair.key.as_str(), &*text(pair))).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_last_spans_arrive_with_their_attributes_and_resource() {
    let (collector, address) = listen().await;
    let endpoint = format!("http://{address}");
    let variables = [
        ("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint.as_str()),
        ("OTEL_RESOURCE_ATTRIBUTES", "team=ml"),
        ("POD_NAME", "engram-operator-0"),
        ("POD_NAMESPACE", "engram-system"),
    ];
    let (dispatch, telemetry, lines) = set_up(&variables);
    reconcile(&dispatch);
    tokio::task::spawn_blocking(move || drop(telemetry)).await.unwrap();

    let taken = collector.0.lock().unwrap().clone();
    let [request] = taken.as_slice() else { panic!("{taken:?}") };
    let [resource_spans] = request.resource_spans.as_slice() else { panic!("{request:?}") };
    let resource = read(&resource_spans.resource.as_ref().unwrap().attributes);
    for (key, value) in [
        ("service.name", "engram-operator"),
        ("service.version", "1.2.3"),
        ("service.instance.id", "engram-operator-0"),
        ("k8s.pod.name", "engram-operator-0"),
        ("k8s.namespace.name", "engram-system"),
        ("team", "ml"),
    ] {
        assert_eq!(resource.get(key), Some(&value), "{key}");
    }
    let spans = &resource_spans.scope_spans[0].spans;
    let [observe, reconcile] = spans.as_slice() else { panic!("{spans:?}") };
    assert_eq!((reconcile.name.as_str(), observe.name.as_str()), ("reconcile", "observe"));
    assert!(reconcile.parent_span_id.is_empty());
    assert_eq!((&observe.parent_span_id, &observe.trace_id), (&reconcile.span_id, &reconcile.trace_id));
    assert_eq!(read(&reconcile.attributes), BTreeMap::from([("k8s.namespace.name", "research")]));
    assert_eq!(observe.events[0].name, "observed");

    let line: serde_json::Value = serde_json::from_str(lines.read().trim()).unwrap();
    let hex = |id: &[u8]| id.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    assert_eq!(line["fields"]["message"], "observed");
    assert_eq!(line["trace_id"], hex(&observe.trace_id));
    assert_eq!(line["span_id"], hex(&observe.span_id));
}

#[tokio::test]
async fn without_an_endpoint_lines_have_no_trace_ids() {
    let (dispatch, telemetry, lines) = set_up(&[("OTEL_SERVICE_NAME", "operator")]);
    assert!(!telemetry.traces());
    reconcile(&dispatch);
    assert!(lines.read().contains("observed") && !lines.read().contains("trace_id"));
}

/// One collector accepts connections and never answers, the other does not exist.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unavailable_collector_delays_nothing() {
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let gone = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addresses = [silent.local_addr().unwrap(), gone.local_addr().unwrap()];
    drop(gone);
    for address in addresses {
        let endpoint = format!("http://{address}");
        let quick = [("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint.as_str()), ("OTEL_EXPORTER_OTLP_TIMEOUT", "60000")];
        let (dispatch, telemetry, _) = set_up(&quick);
        // Far more than the queue holds: waiting for room would never end.
        for _ in 0..5_000 {
            reconcile(&dispatch);
        }
        let end = tokio::task::spawn_blocking(move || drop(telemetry));
        let ended = tokio::time::timeout(DEADLINE, end).await;
        ended.expect("shutdown waits for an unavailable collector").unwrap();
    }
}

/// A self-signed certificate with its key.
fn certificate(name: &str) -> rcgen::CertifiedKey<rcgen::KeyPair> {
    rcgen::generate_simple_self_signed([name.to_owned()]).unwrap()
}

/// Starts a TLS proxy for the collector; returns its address and trusted root. With `guest` it accepts only that
/// client.
async fn behind_tls(collector: SocketAddr, guest: Option<&rcgen::Certificate>) -> (SocketAddr, String) {
    let made = certificate("localhost");
    let key = PrivateKeyDer::try_from(made.signing_key.serialize_der()).unwrap();
    let ring = Arc::new(rustls::crypto::ring::default_provider());
    let server = ServerConfig::builder_with_provider(Arc::clone(&ring)).with_safe_default_protocol_versions().unwrap();
    let server = match guest {
        None => server.with_no_client_auth(),
        Some(guest) => {
            let mut guests = RootCertStore::empty();
            guests.add(guest.der().clone()).unwrap();
            let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(guests), ring).build().unwrap();
            server.with_client_cert_verifier(verifier)
        }
    };
    let mut server = server.with_single_cert(vec![made.cert.der().clone()], key).unwrap();
    server.alpn_protocols = vec![b"h2".to_vec()];
    let (acceptor, listener) = (TlsAcceptor::from(Arc::new(server)), TcpListener::bind("127.0.0.1:0").await.unwrap());
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((tcp, _)) = listener.accept().await {
            let Ok(mut outside) = acceptor.accept(tcp).await else { continue };
            let mut inside = TcpStream::connect(collector).await.unwrap();
            tokio::spawn(async move { tokio::io::copy_bidirectional(&mut outside, &mut inside).await });
        }
    });
    (address, made.cert.pem())
}

/// Returns the number of exports that the collector received once the last spans of these variables were sent.
async fn taken(collector: &Collector, variables: &[(&str, &str)]) -> usize {
    let (dispatch, telemetry, _) = set_up(variables);
    reconcile(&dispatch);
    tokio::task::spawn_blocking(move || drop(telemetry)).await.unwrap();
    collector.0.lock().unwrap().len()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_a_scheme_the_connection_uses_tls_with_the_trusted_roots() {
    let (collector, address) = listen().await;
    let (proxy, certificate) = behind_tls(address, None).await;
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), certificate).unwrap();
    let endpoint = format!("localhost:{}", proxy.port());
    let trusting = [
        ("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint.as_str()),
        ("OTEL_EXPORTER_OTLP_CERTIFICATE", file.path().to_str().unwrap()),
    ];
    assert_eq!(taken(&collector, &trusting[..1]).await, 0);
    assert_eq!(taken(&collector, &trusting).await, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_client_certificate_is_presented_to_the_collector() {
    let (collector, address) = listen().await;
    let (guest, other) = (certificate("engram-operator"), certificate("engram-operator"));
    let (proxy, roots) = behind_tls(address, Some(&guest.cert)).await;
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, text: String| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let (endpoint, roots) = (format!("https://localhost:{}", proxy.port()), file("ca.crt", roots));
    let connecting =
        [("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint.as_str()), ("OTEL_EXPORTER_OTLP_CERTIFICATE", roots.as_str())];
    assert_eq!(taken(&collector, &connecting).await, 0, "no certificate is presented");
    for (own, expected) in [(other, 0), (guest, 1)] {
        let shown = file("tls.crt", own.cert.pem());
        let key = file("tls.key", own.signing_key.serialize_pem());
        let own = [
            ("OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE", shown.as_str()),
            ("OTEL_EXPORTER_OTLP_CLIENT_KEY", key.as_str()),
        ];
        assert_eq!(taken(&collector, &[&connecting[..], &own].concat()).await, expected);
    }
}
