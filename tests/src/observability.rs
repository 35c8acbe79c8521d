//! Jaeger and Prometheus as users run them, next to a cluster.

use crate::{DEADLINE, checkout, wait_for};
use serde_json::Value;
use std::fs::{self, File};
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// A server of a test, killed when dropped.
#[derive(Debug)]
struct Server(Child);

impl Server {
    fn start(command: &mut Command, log: &Path) -> Self {
        let log = File::create(log).expect("failed to create a log");
        let copy = log.try_clone().expect("failed to clone a file handle");
        Self(command.stdin(Stdio::null()).stdout(copy).stderr(log).spawn().expect("failed to start a server"))
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // Fails if it has exited.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Returns `count` ports that are free now.
fn free_ports<const COUNT: usize>() -> [u16; COUNT] {
    let listeners = std::array::from_fn::<_, COUNT, _>(|_| std::net::TcpListener::bind("127.0.0.1:0"));
    listeners.map(|listener| {
        let address = listener.and_then(|listener| listener.local_addr());
        address.expect("a port of the loopback interface is free").port()
    })
}

/// Requests a page; `None` without a response.
pub fn page(port: u16, path: &str) -> Option<String> {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).ok()?;
    stream.set_read_timeout(Some(Duration::from_secs(10))).ok()?;
    // Version 1.0: the end of the stream is the end of the response.
    write!(stream, "GET {path} HTTP/1.0\r\nHost: localhost\r\nAccept: application/openmetrics-text, */*;q=0.1\r\n\r\n")
        .ok()?;
    let mut response = String::new();
    stream.read_to_string(&mut response).ok()?;
    response.split_once("\r\n\r\n").map(|(_, body)| body.to_owned())
}

fn json(port: u16, path: &str) -> Option<Value> {
    serde_json::from_str(&page(port, path)?).ok()
}

/// Encodes a value of a query.
fn encoded(text: &str) -> String {
    let encode = |byte: u8| match byte {
        b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'_' | b'.' => char::from(byte).to_string(),
        _ => format!("%{byte:02X}"),
    };
    text.bytes().map(encode).collect()
}

/// A Jaeger that keeps traces in memory.
#[derive(Debug)]
pub struct Jaeger {
    _server: Server,
    otlp: u16,
    query: u16,
}

/// A span as Jaeger returns it.
#[derive(Debug, Clone)]
pub struct SpanRecord {
    /// Service that recorded it.
    pub service: String,
    /// Its name.
    pub name: String,
    /// Its trace.
    pub trace: String,
    /// Its id.
    pub id: String,
    /// Parents and links: kind, trace, span.
    pub references: Vec<(String, String, String)>,
    /// Attributes.
    pub tags: Vec<(String, Value)>,
}

impl SpanRecord {
    /// Returns the id of its parent.
    pub fn parent(&self) -> Option<&str> {
        let parent = self.references.iter().find(|(kind, trace, _)| kind == "CHILD_OF" && *trace == self.trace);
        parent.map(|(_, _, span)| span.as_str())
    }

    /// Returns an attribute.
    pub fn tag(&self, key: &str) -> Option<&Value> {
        self.tags.iter().find(|(name, _)| name == key).map(|(_, value)| value)
    }
}

impl Jaeger {
    /// Finds the program: the one that `ENGRAM_JAEGER` names, or packed in `shared/observability` next to the checkout.
    pub fn find(folder: &Path) -> Option<PathBuf> {
        if let Some(program) = std::env::var_os("ENGRAM_JAEGER") {
            return Some(program.into());
        }
        let unpack = checkout().join("../shared/observability/unpack");
        let unpacked = Command::new(unpack).arg(folder).stdout(Stdio::null()).status();
        unpacked.is_ok_and(|status| status.success()).then(|| folder.join("jaeger"))
    }

    /// Starts it on free ports.
    ///
    /// # Panics
    /// It does not start in time.
    pub fn start(program: &Path, folder: &Path) -> Self {
        let [otlp, query, rpc] = free_ports();
        let configuration = format!(
            "service:\n  extensions: [jaeger_storage, jaeger_query]\n  pipelines:\n    traces: {{ receivers: [otlp], exporters: \
             [jaeger_storage_exporter] }}\n  telemetry: {{ metrics: {{ level: none }}, logs: {{ level: error }} }}\nextensions:\n  \
             jaeger_query:\n    storage: {{ traces: memory }}\n    grpc: {{ endpoint: \"127.0.0.1:{rpc}\" }}\n    http: {{ endpoint: \
             \"127.0.0.1:{query}\" }}\n  jaeger_storage: {{ backends: {{ memory: {{ memory: {{ max_traces: 100000 }} }} }} }}\n\
             receivers: {{ otlp: {{ protocols: {{ grpc: {{ endpoint: \"127.0.0.1:{otlp}\" }} }} }} }}\nexporters: {{ \
             jaeger_storage_exporter: {{ trace_storage: memory }} }}\n"
        );
        let file = folder.join("jaeger.yaml");
        fs::write(&file, configuration).expect("failed to write the configuration of Jaeger");
        let server = Server::start(Command::new(program).arg("--config").arg(file), &folder.join("jaeger.log"));
        wait_for("Jaeger to start", DEADLINE, || page(query, "/api/services"));
        Self { _server: server, otlp, query }
    }

    /// Returns the endpoint for traces.
    pub fn endpoint(&self) -> String {
        format!("http://127.0.0.1:{}", self.otlp)
    }

    /// Returns all spans of the traces with a span of this name.
    pub fn spans(&self, service: &str, name: &str) -> Vec<SpanRecord> {
        let path =
            format!("/api/traces?service={}&operation={}&limit=200&lookback=1h", encoded(service), encoded(name));
        let traces = json(self.query, &path);
        let traces = traces.as_ref().and_then(|found| found["data"].as_array()).map_or(&[][..], Vec::as_slice);
        traces.iter().flat_map(spans_of).collect()
    }
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

fn spans_of(trace: &Value) -> Vec<SpanRecord> {
    let spans = trace["spans"].as_array().map_or(&[][..], Vec::as_slice);
    let record = |span: &Value| SpanRecord {
        service: text(&trace["processes"][text(&span["processID"])]["serviceName"]),
        name: text(&span["operationName"]),
        trace: text(&span["traceID"]),
        id: text(&span["spanID"]),
        references: span["references"].as_array().map_or(&[][..], Vec::as_slice).iter().map(reference).collect(),
        tags: span["tags"]
            .as_array()
            .map_or(&[][..], Vec::as_slice)
            .iter()
            .map(|tag| (text(&tag["key"]), tag["value"].clone()))
            .collect(),
    };
    spans.iter().map(record).collect()
}

fn reference(reference: &Value) -> (String, String, String) {
    (text(&reference["refType"]), text(&reference["traceID"]), text(&reference["spanID"]))
}

/// A Prometheus that scrapes every second.
#[derive(Debug)]
pub struct Prometheus {
    _server: Server,
    port: u16,
}

impl Prometheus {
    /// Finds the program: the one that `ENGRAM_PROMETHEUS` names, or `prometheus` on the path.
    pub fn find() -> Option<PathBuf> {
        let program = std::env::var_os("ENGRAM_PROMETHEUS").map_or_else(|| "prometheus".into(), PathBuf::from);
        let runs = Command::new(&program).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
        runs.is_ok_and(|status| status.success()).then_some(program)
    }

    /// Starts it with the rules of the chart, scraping `targets`.
    ///
    /// # Panics
    /// It does not start in time.
    pub fn start(program: &Path, folder: &Path, targets: &[String]) -> Self {
        let [port] = free_ports();
        let rules = checkout().join("charts/engram/files/alerts.yaml");
        let targets = serde_json::to_string(targets).expect("texts are JSON");
        let configuration = format!(
            "global: {{ scrape_interval: 1s, evaluation_interval: 1s }}\nrule_files: [{}]\nscrape_configs:\n  - job_name: engram\n    \
             static_configs: [{{ targets: {targets}, labels: {{ namespace: local }} }}]\n",
            rules.display()
        );
        let file = folder.join("prometheus.yaml");
        fs::write(&file, configuration).expect("failed to write the configuration of Prometheus");
        let mut command = Command::new(program);
        command.arg("--config.file").arg(file).arg("--storage.tsdb.path").arg(folder.join("prometheus"));
        command.arg(format!("--web.listen-address=127.0.0.1:{port}")).arg("--enable-feature=exemplar-storage");
        let server = Server::start(&mut command, &folder.join("prometheus.log"));
        wait_for("Prometheus to start", DEADLINE, || {
            page(port, "/-/ready").filter(|page| page.contains("Ready") || page.contains("ready"))
        });
        Self { _server: server, port }
    }

    /// Evaluates an expression now.
    ///
    /// # Panics
    /// Prometheus rejects it.
    pub fn query(&self, expression: &str) -> Vec<Value> {
        let found = json(self.port, &format!("/api/v1/query?query={}", encoded(expression))).unwrap_or_default();
        assert_ne!(found["status"], "error", "{expression}: {found}");
        found["data"]["result"].as_array().cloned().unwrap_or_default()
    }

    /// Returns the rules with the state of their last evaluation.
    pub fn rules(&self) -> Vec<Value> {
        let found = json(self.port, "/api/v1/rules").unwrap_or_default();
        let groups = found["data"]["groups"].as_array().cloned().unwrap_or_default();
        groups.iter().flat_map(|group| group["rules"].as_array().cloned().unwrap_or_default()).collect()
    }

    /// Evaluates an expression over the last `seconds`, each second.
    pub fn query_range(&self, expression: &str, seconds: u64) -> Vec<Value> {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |time| time.as_secs());
        let path =
            format!("/api/v1/query_range?query={}&start={}&end={now}&step=1", encoded(expression), now - seconds);
        json(self.port, &path).and_then(|found| found["data"]["result"].as_array().cloned()).unwrap_or_default()
    }

    /// Returns the exemplars of the last ten minutes.
    pub fn exemplars(&self, series: &str) -> Vec<Value> {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |time| time.as_secs());
        let path = format!("/api/v1/query_exemplars?query={}&start={}&end={}", encoded(series), now - 600, now + 60);
        json(self.port, &path).and_then(|found| found["data"].as_array().cloned()).unwrap_or_default()
    }
}
