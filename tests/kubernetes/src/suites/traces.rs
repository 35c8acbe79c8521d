//! Traces in a real Jaeger of node 1, which the chart's values name: those of operators and of workers in pods.
//!
//! Part of the suite of the command line.

use super::command::{NAME, NAMESPACE, program};
use super::faults::install::helm_set;
use super::helpers::WHILE;
use crate::cluster::Cluster;
use crate::network::address;
use crate::process::{self, until};
use crate::programs::checkout;
use crate::requirements::Skip;
use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use std::fs;
use std::process::Command;
use std::time::Duration;

const NODE: u8 = 1;
const OTLP: u16 = 4317;
const QUERIES: &str = "127.0.0.1:16686";
/// Unpacking takes seconds; Helm waits for rolled out operators.
const LIMIT: Duration = Duration::from_secs(120);

fn endpoint() -> String {
    format!("http://{}:{OTLP}", address(NODE))
}

/// Check: one upgrade of the release with an endpoint.
pub(super) fn enabled(cluster: &Cluster) -> Result<String> {
    let folder = cluster.path("jaeger");
    fs::create_dir_all(&folder)?;
    let unpack = checkout().join("../shared/observability/unpack");
    let unpacked = process::run(Command::new(&unpack).arg(&folder), b"", LIMIT);
    if !unpacked.is_ok_and(|ended| ended.status.success()) {
        return Err(Skip(format!("there is no Jaeger: {} failed", unpack.display())).into());
    }
    let listen = |endpoint: String| json!({ "endpoint": endpoint });
    let configuration = json!({
        "service": {
            "extensions": ["jaeger_storage", "jaeger_query"],
            "pipelines": { "traces": { "receivers": ["otlp"], "exporters": ["jaeger_storage_exporter"] } },
            "telemetry": { "metrics": { "level": "none" }, "logs": { "level": "error" } },
        },
        "extensions": {
            "jaeger_query": {
                "storage": { "traces": "memory" },
                "grpc": listen("127.0.0.1:16685".into()), "http": listen(QUERIES.into()),
            },
            "jaeger_storage": { "backends": { "memory": { "memory": { "max_traces": 10_000 } } } },
        },
        "receivers": { "otlp": { "protocols": { "grpc": listen(format!("{}:{OTLP}", address(NODE))) } } },
        "exporters": { "jaeger_storage_exporter": { "trace_storage": "memory" } },
    });
    let file = folder.join("jaeger.yaml");
    fs::write(&file, configuration.to_string())?;
    cluster.start_daemon(NODE, "jaeger", &folder.join("jaeger"), &["--config".into(), file.display().to_string()])?;
    until("Jaeger to start", WHILE, || traces(cluster, "none").map(Some))?;
    let value = format!("otel.endpoint={}", endpoint());
    until("operators that send traces", LIMIT, || helm_set(cluster, "worker.image.tag=1", &[&value]).map(Some))?;
    Ok(String::new())
}

/// Returns the traces of a service.
fn traces(cluster: &Cluster, service: &str) -> Result<Vec<Value>> {
    let url = format!("http://{QUERIES}/api/traces?service={service}&limit=500&lookback=1h");
    let page = cluster.in_network(NODE, "curl", ["-sSf", "--max-time", "10", "--noproxy", "*", &url])?;
    let mut page: Value = serde_json::from_str(&page)?;
    Ok(page["data"].as_array_mut().map(std::mem::take).unwrap_or_default())
}

/// Returns the spans of a path with these names, each the parent of the next.
fn path<'a>(trace: &'a Value, parent: Option<&'a Value>, names: &[&str]) -> Option<Vec<&'a Value>> {
    let [first, rest @ ..] = names else { return Some(Vec::new()) };
    let is_next = |span: &&Value| {
        let mut references = span["references"].as_array().into_iter().flatten();
        let parent_of = references.find(|it| it["refType"] == "CHILD_OF").map(|it| &it["spanID"]);
        span["operationName"] == *first && parent_of == parent.map(|it| &it["spanID"])
    };
    let mut candidates = trace["spans"].as_array()?.iter().filter(is_next);
    candidates.find_map(|span| Some([vec![span], path(trace, Some(span), rest)?].concat()))
}

/// Returns the service of a span and, of one in a pod, the name of the pod.
fn origin<'a>(trace: &'a Value, span: &Value) -> (&'a str, Option<&'a str>) {
    let process = &trace["processes"][span["processID"].as_str().unwrap_or_default()];
    let mut tags = process["tags"].as_array().into_iter().flatten();
    let pod = tags.find(|tag| tag["key"] == "k8s.pod.name").and_then(|tag| tag["value"].as_str());
    (process["serviceName"].as_str().unwrap_or_default(), pod)
}

/// Check: a write by a command is one trace of the command and of the workers that hold it, and a reconcile is one of the operator.
pub(super) fn arrive(cluster: &Cluster) -> Result<String> {
    const WRITE: [&str; 5] = ["engram insert", "write", "engram.v1.MemoryService/Upsert", "replicate", "append"];
    if cluster.daemon(NODE, "jaeger").is_none() {
        return Err(Skip("there is no Jaeger".into()).into());
    }
    let engram = program(cluster, "engram")?.display().to_string();
    let variable = format!("OTEL_EXPORTER_OTLP_ENDPOINT={}", endpoint());
    let keys: Vec<String> = (0..40).map(|number| format!("traced-{number}")).collect();
    let command = [&variable, &engram, "-n", NAMESPACE, "insert", "--group", "9"];
    let arguments = command.into_iter().chain(keys.iter().map(String::as_str));
    cluster.in_network(NODE, "/usr/bin/env", arguments)?;
    let pods = until("the trace of a write", WHILE, || {
        let traces = traces(cluster, "engram-cli")?;
        let mut paths = traces.iter().filter_map(|trace| Some((trace, path(trace, None, &WRITE)?)));
        let (trace, spans) = paths.next().with_context(|| format!("{} traces, none with {WRITE:?}", traces.len()))?;
        let [primary, backup] = [spans[2], spans[4]].map(|span| origin(trace, span));
        ensure!(origin(trace, spans[0]).0 == "engram-cli" && primary.0 == "engram-worker", "{trace:#}");
        let pods = primary.1.zip(backup.1).context("no k8s.pod.name")?;
        Ok(Some([pods.0, pods.1].map(str::to_owned)))
    })?;
    let prefix = format!("{NAME}-worker-");
    ensure!(pods.iter().all(|pod| pod.starts_with(&prefix)) && pods[0] != pods[1], "{pods:?}");
    until("the trace of a reconcile", WHILE, || {
        let traces = traces(cluster, "engram-operator")?;
        let is_whole = |trace: &&Value| {
            let steps = ["observe", "validate", "plan", "apply"];
            steps.iter().all(|step| path(trace, None, &["reconcile", step]).is_some())
        };
        Ok(traces.iter().any(|trace| is_whole(&trace)).then_some(()))
    })?;
    Ok(format!("a write on {} and {}", pods[0], pods[1]))
}
