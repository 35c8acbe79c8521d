//! `engram list` and `engram describe`: workers, partitions and runs.

use super::run;
use crate::args::Context;
use crate::error::problem;
use crate::local::admin;
use crate::output::{Table, bytes, count, seconds};
use crate::target::Target;
use engram_api::{Code, ExitCode};
use engram_client::{Client, QualityOptions};
use engram_learn::report;
use engram_memory::Ordinal;
use engram_proto::v1::{RunStatus, WorkerStatus};
use futures::future::join_all;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::PathBuf;

/// List workers, partitions or runs
#[derive(Debug, clap::Subcommand)]
pub(crate) enum List {
    /// List workers: where they are and what they hold
    #[command(before_help = "Examples:\n  engram list workers\n  engram list workers -o wide")]
    Workers,
    /// List partitions: who serves them, under which term, how far their log is
    #[command(before_help = "Examples:\n  engram list partitions\n  engram list partitions -o json")]
    Partitions,
    /// List learning runs, finished ones too
    #[command(before_help = "Examples:\n  engram list runs\n  engram list runs -o name")]
    Runs,
}

/// Show everything about one run or worker
#[derive(Debug, clap::Subcommand)]
pub(crate) enum Describe {
    /// Show how far a run is and what it found
    #[command(before_help = "Examples:
  engram describe run state-of-the-union
  engram describe run state-of-the-union -o json           the full report
  engram describe run state-of-the-union --report r.html   as a page with charts")]
    Run {
        /// Name of the run
        name: String,
        /// Write a self-contained HTML page about it
        #[arg(long, value_name = "FILE.html")]
        report: Option<PathBuf>,
    },
    /// Show what a worker says of itself
    #[command(before_help = "Examples:\n  engram describe worker worker-0\n  engram describe worker 0")]
    Worker {
        /// `worker-N` or N
        name: String,
    },
}

impl List {
    pub(crate) async fn run(self, context: &Context) -> anyhow::Result<ExitCode> {
        let target = Target::find(context).await?;
        let client = target.connect().await?;
        match self {
            Self::Workers => workers(&client, &target, context).await?,
            Self::Partitions => partitions(&client, &target, context).await?,
            Self::Runs => runs(&client, context).await?,
        }
        Ok(ExitCode::Ok)
    }
}

impl Describe {
    pub(crate) async fn run(self, context: &Context) -> anyhow::Result<ExitCode> {
        let target = Target::find(context).await?;
        match self {
            Self::Run { name, report } => describe_run(&target.connect().await?, &name, report, context).await?,
            Self::Worker { name } => describe_worker(&target, &name, context).await?,
        }
        Ok(ExitCode::Ok)
    }
}

/// What the workers of a cluster say of themselves; those that do not answer are absent, and so are all of one of which only
/// addresses are known.
async fn statuses(target: &Target) -> BTreeMap<Ordinal, WorkerStatus> {
    let doors = target.administration();
    let asked = doors
        .iter()
        .map(|(ordinal, door)| async move { admin::status(door).await.ok().map(|status| (Ordinal(*ordinal), status)) });
    join_all(asked).await.into_iter().flatten().collect()
}

async fn workers(client: &Client, target: &Target, context: &Context) -> anyhow::Result<()> {
    let (map, said) = (client.refreshed_map().await?, statuses(target).await);
    let mut table = Table::new(&[
        "worker",
        "state",
        ">partitions",
        ">memories",
        ">memory",
        ">log",
        "client",
        "+http",
        "+>incarnation",
        "+device",
        "+>uptime",
        "+version",
    ]);
    let mut items: Vec<Value> = Vec::new();
    for (ordinal, worker) in &map.workers {
        let partitions = map.partitions.iter().filter(|placement| placement.primary == *ordinal).count();
        let state = if worker.alive { "alive" } else { "silent" };
        let status = said.get(ordinal);
        let told = |text: &dyn Fn(&WorkerStatus) -> String| status.map_or_else(|| "-".to_owned(), text);
        table.row([
            format!("worker-{ordinal}"),
            state.to_owned(),
            partitions.to_string(),
            told(&|status| count(status.memories)),
            told(&|status| bytes(status.resident_bytes)),
            told(&|status| bytes(status.log_bytes)),
            worker.client_address.clone(),
            worker.http_address.clone(),
            worker.incarnation.to_string(),
            told(&|status| format!("{} x{}", status.device, status.device_threads)),
            told(&|status| seconds(status.uptime_ms as f64 / 1_000.0)),
            told(&|status| status.version.clone()),
        ]);
        items.push(json!({
            "name": format!("worker-{ordinal}"), "ordinal": ordinal.0, "alive": worker.alive, "partitions": partitions,
            "memories": status.map(|it| it.memories), "residentBytes": status.map(|it| it.resident_bytes),
            "logBytes": status.map(|it| it.log_bytes), "client": worker.client_address, "http": worker.http_address,
            "incarnation": worker.incarnation.0, "device": status.map(|it| &it.device),
            "gpu": status.map(|it| &it.gpu), "threads": status.map(|it| it.device_threads), "uptimeMs": status.map(|it| it.uptime_ms),
            "version": status.map(|it| &it.version),
        }));
    }
    context.output.list(&items, &table)
}

async fn partitions(client: &Client, target: &Target, context: &Context) -> anyhow::Result<()> {
    let versions = client.quality(QualityOptions::default()).await?.versions;
    let lsns: BTreeMap<u32, u64> = versions.into_iter().map(|version| (version.partition, version.lsn)).collect();
    let (map, said) = (client.map()?, statuses(target).await);
    let held = |partition: u32, ordinal| {
        let status = said.get(&ordinal)?.partition_status.iter().find(|status| status.partition == partition);
        Some(status.map_or(0, |status| status.memories))
    };
    let mut table = Table::new(&["partition", "worker", ">term", ">lsn", ">memories"]);
    let mut items: Vec<Value> = Vec::new();
    for (partition, placement) in (0_u32..).zip(&map.partitions) {
        let (lsn, memories) = (lsns.get(&partition).copied().unwrap_or(0), held(partition, placement.primary));
        table.row([
            partition.to_string(),
            format!("worker-{}", placement.primary),
            placement.term.to_string(),
            lsn.to_string(),
            memories.map_or_else(|| "-".into(), count),
        ]);
        items.push(json!({
            "partition": partition, "worker": format!("worker-{}", placement.primary), "term": placement.term.0,
            "lsn": lsn, "memories": memories,
        }));
    }
    context.output.list(&items, &table)
}

async fn runs(client: &Client, context: &Context) -> anyhow::Result<()> {
    let runs = client.list_runs().await?;
    let mut table = Table::new(&["run", "phase", ">epoch", ">updates", ">learning", "worker", "message"]);
    for run in &runs {
        table.row([
            run.name.clone(),
            phase(run),
            epochs(run),
            count(run.updates),
            seconds(run.elapsed_seconds),
            run.driver.map_or_else(|| "-".into(), |driver| format!("worker-{driver}")),
            run.message.clone(),
        ]);
    }
    let items: Vec<Value> = runs.iter().map(status_object).collect();
    context.output.list(&items, &table)
}

/// The phase in the words of manifests: `Succeeded`.
fn phase(run: &RunStatus) -> String {
    let word = run.phase().as_str_name().trim_start_matches("RUN_PHASE_");
    let (first, rest) = word.split_at(1);
    first.to_owned() + &rest.to_lowercase()
}

fn epochs(run: &RunStatus) -> String {
    let all = if run.epochs == 0 { "?".into() } else { run.epochs.to_string() };
    format!("{}/{all}", run.epoch)
}

fn status_object(run: &RunStatus) -> Value {
    let metrics: BTreeMap<&String, &f64> = run.metrics.iter().collect();
    json!({
        "name": run.name, "phase": phase(run), "epoch": run.epoch,
        "epochs": (run.epochs > 0).then_some(run.epochs), "updates": run.updates,
        "elapsedSeconds": run.elapsed_seconds, "etaSeconds": (run.eta_seconds >= 0.0).then_some(run.eta_seconds),
        "epochsPerSecond": run.epochs_per_second, "updatesPerSecond": run.updates_per_second, "label": run.label,
        "driver": run.driver, "message": run.message, "code": run.code, "metrics": metrics,
    })
}

async fn describe_run(client: &Client, name: &str, page: Option<PathBuf>, context: &Context) -> anyhow::Result<()> {
    let runs = client.list_runs().await?;
    let Some(status) = runs.iter().find(|run| run.name == name) else {
        let known: Vec<&str> = runs.iter().map(|run| run.name.as_str()).collect();
        let known =
            if known.is_empty() { "there are none".to_owned() } else { format!("there are {}", known.join(", ")) };
        return Err(problem(Code::RunUnknown, format!("run {name} is not on the cluster; {known}")));
    };
    let report = run::read(client, name).await?;
    if let Some(path) = page {
        run::write_page(&report, &path)?;
        context.output.note(format!("wrote {}", path.display()));
    }
    if context.output.is_structured() {
        return context.output.value(&json!({ "status": status_object(status), "report": report }));
    }
    let mut text = format!("{}: {}, epoch {}\n", status.name, phase(status), epochs(status));
    if !status.message.is_empty() {
        text.push_str(&format!("  {} {}\n", status.code, status.message));
    }
    text.push_str(&report::summary(&report));
    Ok(context.output.text(&text)?)
}

async fn describe_worker(target: &Target, name: &str, context: &Context) -> anyhow::Result<()> {
    let wanted = name.strip_prefix("worker-").unwrap_or(name).parse::<u32>().ok();
    // How it was started, by whoever started it.
    let started = match target {
        Target::Remote(..) => {
            let message = "workers are described over their administration port, which a cluster given by --address does not tell";
            return Err(problem(Code::NoLocalCluster, message));
        }
        Target::Local(local) => {
            local.endpoints.workers.iter().find(|worker| Some(worker.ordinal) == wanted).map(|it| {
                let places = json!({ "client": it.client, "peer": it.peer, "admin": it.admin, "http": it.http });
                (json!({ "process": it.process, "restarts": it.restarts }), places)
            })
        }
        Target::Kubernetes(cluster) => cluster
            .workers
            .iter()
            .find(|worker| Some(worker.ordinal) == wanted)
            .map(|it| (json!({ "pod": it.pod, "restarts": it.restarts }), json!({}))),
    };
    let doors = target.administration();
    let door = doors.iter().find(|(ordinal, _)| Some(*ordinal) == wanted);
    let (Some((ordinal, door)), Some((started, places))) = (door, started) else {
        let known: Vec<String> = doors.iter().map(|(ordinal, _)| format!("worker-{ordinal}")).collect();
        let message = format!("there is no worker {name}; there are: {}", known.join(", "));
        return Err(problem(Code::NoLocalCluster, message));
    };
    let status = admin::status(door).await?;
    let served = status.partition_status.iter().filter(|partition| partition.primary);
    let own = [
        ("uptime", seconds(status.uptime_ms as f64 / 1_000.0)),
        ("version", status.version.clone()),
        ("memories", format!("{} of {}", count(status.memories), count(status.capacity))),
        ("partitions", served.count().to_string()),
        ("device", format!("{}, {} threads, {}", status.device, status.device_threads, bytes(status.device_bytes))),
        ("gpu", status.gpu.clone()),
        ("resident", bytes(status.resident_bytes)),
        ("log", bytes(status.log_bytes)),
        ("updates", count(status.updates_total)),
        ("recovery", status.recovery.clone()),
    ];
    let mut table = Table::new(&["field", "value"]);
    let mut row = |field: &str, value: String| table.row([field.to_owned(), value]);
    let told = |value: &Value| match value.get("pid").unwrap_or(value) {
        Value::Null => "-".to_owned(),
        Value::String(text) => text.clone(),
        value => value.to_string(),
    };
    row("worker", format!("worker-{ordinal}"));
    started.as_object().into_iter().flatten().for_each(|(field, value)| row(field, told(value)));
    own.into_iter().for_each(|(field, value)| row(field, value));
    places.as_object().into_iter().flatten().for_each(|(field, value)| row(field, told(value)));
    let mut object = json!({
        "name": format!("worker-{ordinal}"), "ordinal": ordinal,
        "uptimeMs": status.uptime_ms, "version": status.version, "memories": status.memories,
        "capacity": status.capacity, "partitions": status.partitions, "device": status.device,
        "gpu": status.gpu, "threads": status.device_threads, "deviceBytes": status.device_bytes, "residentBytes": status.resident_bytes,
        "logBytes": status.log_bytes, "updates": status.updates_total, "recovery": status.recovery,
    });
    if let (Some(object), Value::Object(started), Value::Object(places)) = (object.as_object_mut(), started, places) {
        object.extend(started.into_iter().chain(places));
    }
    context.output.object(&object, &table)
}
