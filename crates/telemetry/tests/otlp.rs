//! Traces arrive at a collector, and one that is away holds up nobody.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::collections::BTreeMap;
use std::io::Write;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use engram_telemetry::{Log, LogFormat, Program, Telemetry, build};
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

const PROGRAM: Program = Program { name: "engram-operator", version: "1.2.3" };

/// Far more than the last spans are waited for, and less than it takes to send all of them to nobody.
const DEADLINE: Duration = Duration::from_secs(20);

/// A collector that keeps what it is sent.
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

fn telling(variables: &[(&str, &str)]) -> (Dispatch, Telemetry, Lines) {
    let variables: BTreeMap<String, String> =
        variables.iter().map(|&(name, value)| (name.to_owned(), value.to_owned())).collect();
    let (lines, log) = (Lines::default(), Log { filter: "info", format: LogFormat::Json });
    let writer = lines.clone();
    let (dispatch, telling) = build(PROGRAM, log, |name| variables.get(name).cloned(), move || writer.clone()).unwrap();
    (dispatch, telling, lines)
}

/// What an operator does, as far as this crate can tell.
fn look(dispatch: &Dispatch) {
    tracing::dispatcher::with_default(dispatch, || {
        let root = tracing::debug_span!(target: "engram_operator", "reconcile", k8s.namespace.name = "research");
        let _root = root.enter();
        tracing::debug_span!(target: "engram_operator", "observe").in_scope(|| {
            tracing::info!(target: "engram_operator", "observed");
        });
        // What carries traces is never part of one.
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
async fn the_last_spans_arrive_at_the_end_with_what_they_say_and_who_says_it() {
    let (collector, address) = listen().await;
    let endpoint = format!("http://{address}");
    let variables = [
        ("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint.as_str()),
        ("OTEL_RESOURCE_ATTRIBUTES", "team=ml"),
        ("POD_NAME", "engram-operator-0"),
        ("POD_NAMESPACE", "engram-system"),
    ];
    let (dispatch, telling, lines) = telling(&variables);
    look(&dispatch);
    tokio::task::spawn_blocking(move || drop(telling)).await.unwrap();

    let taken = collector.0.lock().unwrap().clone();
    let [request] = taken.as_slice() else { panic!("{taken:?}") };
    let [told] = request.resource_spans.as_slice() else { panic!("{request:?}") };
    let resource = read(&told.resource.as_ref().unwrap().attributes);
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
    let spans = &told.scope_spans[0].spans;
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
async fn without_an_endpoint_nobody_sends_and_lines_are_as_ever() {
    let (dispatch, telling, lines) = telling(&[("OTEL_SERVICE_NAME", "operator")]);
    assert!(!telling.traces());
    look(&dispatch);
    assert!(lines.read().contains("observed") && !lines.read().contains("trace_id"));
}

/// A collector that takes connections and never answers, and one that is not there at all.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_collector_that_is_away_holds_up_nobody() {
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let gone = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addresses = [silent.local_addr().unwrap(), gone.local_addr().unwrap()];
    drop(gone);
    for address in addresses {
        let endpoint = format!("http://{address}");
        let quick = [("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint.as_str()), ("OTEL_EXPORTER_OTLP_TIMEOUT", "60000")];
        let (dispatch, telling, _) = telling(&quick);
        // Far more than the queue holds: somebody who waited for room would wait for ever.
        for _ in 0..5_000 {
            look(&dispatch);
        }
        let end = tokio::task::spawn_blocking(move || drop(telling));
        let ended = tokio::time::timeout(DEADLINE, end).await;
        ended.expect("the end waits for a collector that is away").unwrap();
    }
}

/// A certificate that is its own authority, for a name; its key is in it.
fn certificate(name: &str) -> rcgen::CertifiedKey<rcgen::KeyPair> {
    rcgen::generate_simple_self_signed([name.to_owned()]).unwrap()
}

/// A door with a certificate before the collector, and whom to believe. With `guest` it opens for nobody else.
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

/// How many exports the collector has taken once these variables' last spans were sent.
async fn taken(collector: &Collector, variables: &[(&str, &str)]) -> usize {
    let (dispatch, telling, _) = telling(variables);
    look(&dispatch);
    tokio::task::spawn_blocking(move || drop(telling)).await.unwrap();
    collector.0.lock().unwrap().len()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_a_scheme_a_connection_is_encrypted_and_whom_to_believe_decides() {
    let (collector, address) = listen().await;
    let (door, certificate) = behind_tls(address, None).await;
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), certificate).unwrap();
    let endpoint = format!("localhost:{}", door.port());
    let believing = [
        ("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint.as_str()),
        ("OTEL_EXPORTER_OTLP_CERTIFICATE", file.path().to_str().unwrap()),
    ];
    assert_eq!(taken(&collector, &believing[..1]).await, 0);
    assert_eq!(taken(&collector, &believing).await, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_collector_that_asks_for_a_certificate_is_shown_the_one_that_is_named() {
    let (collector, address) = listen().await;
    let (guest, stranger) = (certificate("engram-operator"), certificate("engram-operator"));
    let (door, roots) = behind_tls(address, Some(&guest.cert)).await;
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, text: String| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let (endpoint, roots) = (format!("https://localhost:{}", door.port()), file("ca.crt", roots));
    let reaching =
        [("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint.as_str()), ("OTEL_EXPORTER_OTLP_CERTIFICATE", roots.as_str())];
    assert_eq!(taken(&collector, &reaching).await, 0, "none is shown");
    for (own, expected) in [(stranger, 0), (guest, 1)] {
        let shown = file("tls.crt", own.cert.pem());
        let key = file("tls.key", own.signing_key.serialize_pem());
        let own = [
            ("OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE", shown.as_str()),
            ("OTEL_EXPORTER_OTLP_CLIENT_KEY", key.as_str()),
        ];
        assert_eq!(taken(&collector, &[&reaching[..], &own].concat()).await, expected);
    }
}
