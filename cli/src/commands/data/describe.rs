//! `engram describe`: details of a run or a worker.

use super::job;
use super::list::{epochs, phase, status_object};
use super::run::step;
use super::run_report::Report;
use crate::context::Context;
use crate::error::problem;
use crate::local::admin;
use crate::output::{Table, bytes, count, seconds};
use crate::target::Target;
use engram_api::{Code, ExitCode, printable};
use engram_client::Client;
use serde_json::{Value, json};
use std::path::PathBuf;

/// Show details of a run or a worker
#[derive(Debug, clap::Subcommand)]
pub(crate) enum Describe {
    /// Show progress and results of a run
    #[command(before_help = "Examples:
  engram describe run state-of-the-union
  engram describe run state-of-the-union -o json           full report as JSON
  engram describe run state-of-the-union --report r.html   report as an HTML page with charts")]
    Run {
        /// Name of the run
        name: String,
        /// Write the report as a self-contained HTML page
        #[arg(long, value_name = "FILE.html")]
        report: Option<PathBuf>,
    },
    /// Show the status of a worker
    #[command(before_help = "Examples:\n  engram describe worker worker-0\n  engram describe worker 0")]
    Worker {
        /// Name (`worker-N`) or number of the worker
        name: String,
    },
}

impl Describe {
    pub(crate) async fn run(self, context: &Context) -> anyhow::Result<ExitCode> {
        let target = Target::find(context).await?;
        match self {
            Self::Run { name, report: None } if job::describe_job(&target, &name, context).await? => {}
            Self::Run { name, report } => describe_run(&target.connect().await?, &name, report, context).await?,
            Self::Worker { name } => describe_worker(&target, &name, context).await?,
        }
        Ok(ExitCode::Ok)
    }
}

async fn describe_run(client: &Client, name: &str, page: Option<PathBuf>, context: &Context) -> anyhow::Result<()> {
    let runs = client.list_runs().await?;
    let Some(status) = runs.iter().find(|run| run.name == name) else {
        let names: Vec<&str> = runs.iter().map(|run| run.name.as_str()).collect();
        let names = if names.is_empty() { "none".to_owned() } else { names.join(", ") };
        return Err(problem(Code::RunUnknown, format!("run {name} not found; existing runs: {names}")));
    };
    let report = Report::read(client, name).await?;
    if let Some(path) = page {
        report.write_page(&path)?;
        context.output.note(format!("wrote {}", path.display()));
    }
    if context.output.is_structured() {
        return context.output.value(&json!({ "status": status_object(status), "report": report }));
    }
    let mut text = format!("{}: {}, {} {}\n", status.name, phase(status), step(status), epochs(status));
    if !status.message.is_empty() {
        text.push_str(&format!("  {} {}\n", status.code, printable(&status.message)));
    }
    text.push_str(&report.summary());
    Ok(context.output.text(&text)?)
}

async fn describe_worker(target: &Target, name: &str, context: &Context) -> anyhow::Result<()> {
    let wanted = name.strip_prefix("worker-").unwrap_or(name).parse::<u32>().ok();
    // How the worker process or pod was started.
    let started = match target {
        Target::Remote(..) => {
            let message = "this command needs the admin port of a worker, and --address names client ports only";
            return Err(problem(Code::NoLocalCluster, message));
        }
        Target::Local(local) => {
            local.endpoints.workers.iter().find(|worker| Some(worker.ordinal) == wanted).map(|it| {
                let addresses = json!({ "client": it.client, "peer": it.peer, "admin": it.admin, "http": it.http });
                (json!({ "process": it.process, "restarts": it.restarts }), addresses)
            })
        }
        Target::Kubernetes(cluster) => cluster
            .workers
            .iter()
            .find(|worker| Some(worker.ordinal) == wanted)
            .map(|it| (json!({ "pod": it.pod, "restarts": it.restarts }), json!({}))),
    };
    let admin_endpoints = target.admin_endpoints();
    let endpoint = admin_endpoints.iter().find(|(ordinal, _)| Some(*ordinal) == wanted);
    let (Some((ordinal, endpoint)), Some((started, addresses))) = (endpoint, started) else {
        let names: Vec<String> = admin_endpoints.iter().map(|(ordinal, _)| format!("worker-{ordinal}")).collect();
        let message = format!("worker {name} not found; existing workers: {}", names.join(", "));
        return Err(problem(Code::NoLocalCluster, message));
    };
    let status = admin::status(endpoint).await?;
    let served = status.partition_status.iter().filter(|partition| partition.primary);
    let fields = [
        ("uptime", seconds(status.uptime_ms as f64 / 1_000.0)),
        ("version", status.version.clone()),
        ("memories", format!("{} of {}", count(status.memories), count(status.capacity))),
        ("partitions", served.count().to_string()),
        ("device", format!("{}, {} threads, {}", status.device, status.device_threads, bytes(status.device_bytes))),
        ("gpu", status.gpu.clone()),
        ("resident memory", bytes(status.resident_bytes)),
        ("log", bytes(status.log_bytes)),
        ("updates", count(status.updates_total)),
        ("recovery", status.recovery.clone()),
    ];
    let mut table = Table::new(&["field", "value"]);
    let mut row = |field: &str, value: String| table.row([field.to_owned(), value]);
    let show = |value: &Value| match value.get("pid").unwrap_or(value) {
        Value::Null => "-".to_owned(),
        Value::String(text) => text.clone(),
        value => value.to_string(),
    };
    row("worker", format!("worker-{ordinal}"));
    started.as_object().into_iter().flatten().for_each(|(field, value)| row(field, show(value)));
    fields.into_iter().for_each(|(field, value)| row(field, value));
    addresses.as_object().into_iter().flatten().for_each(|(field, value)| row(field, show(value)));
    let mut object = json!({
        "name": format!("worker-{ordinal}"), "ordinal": ordinal,
        "uptimeMs": status.uptime_ms, "version": status.version, "memories": status.memories,
        "capacity": status.capacity, "partitions": status.partitions, "device": status.device,
        "gpu": status.gpu, "threads": status.device_threads, "deviceBytes": status.device_bytes, "residentBytes": status.resident_bytes,
        "logBytes": status.log_bytes, "updates": status.updates_total, "recovery": status.recovery,
    });
    if let (Some(object), Value::Object(started), Value::Object(addresses)) =
        (object.as_object_mut(), started, addresses)
    {
        object.extend(started.into_iter().chain(addresses));
    }
    context.output.object(&object, &table)
}
