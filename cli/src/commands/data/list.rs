//! `engram list`: workers, partitions, runs and tasks of a cluster.

use super::job;
use crate::commands::partition::{self, Record};
use crate::context::Context;
use crate::local::admin;
use crate::output::{Table, bytes, count, seconds};
use crate::target::Target;
use engram_api::ExitCode;
use engram_client::{Client, QualityOptions};
use engram_memory::Ordinal;
use engram_proto::v1::{self, RunStatus, WorkerStatus};
use futures::future::join_all;
use serde::Serialize;
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// List workers, partitions, runs or tasks
#[derive(Debug, clap::Subcommand)]
pub(crate) enum List {
    /// List workers with their addresses and load
    #[command(before_help = "Examples:\n  engram list workers\n  engram list workers -o wide")]
    Workers,
    /// List partitions with their replicas
    Partitions(Partitions),
    /// List runs, including finished ones
    #[command(before_help = "Examples:\n  engram list runs\n  engram list runs -o name")]
    Runs,
    /// List tasks in execution, with their workers
    #[command(before_help = "Examples:\n  engram list tasks\n  engram list tasks -o json\n\n\
        Runs of kinds Geodesic, Tropical and Fisher are split into tasks. Completed and waiting tasks are counted by `engram list runs`.")]
    Tasks,
}

#[derive(Debug, clap::Args)]
#[command(before_help = "Examples:
  engram list partitions
  engram list partitions --unhealthy
  engram list partitions -o json | jq '.items[] | select(.activated | not)'")]
pub(crate) struct Partitions {
    /// Only partitions that are under-replicated or not activated
    #[arg(long)]
    unhealthy: bool,
}

impl List {
    pub(crate) async fn run(self, context: &Context) -> anyhow::Result<ExitCode> {
        let target = Target::find(context).await?;
        match self {
            Self::Workers => workers(&target.connect().await?, &target, context).await?,
            Self::Partitions(arguments) => partitions(&arguments, &target, context).await?,
            Self::Runs => runs(&target, context).await?,
            Self::Tasks => tasks(&target.connect().await?, context).await?,
        }
        Ok(ExitCode::Ok)
    }
}

/// Returns the status of every worker that responds; empty with `--address`.
async fn statuses(target: &Target) -> BTreeMap<Ordinal, WorkerStatus> {
    let admin_endpoints = target.admin_endpoints();
    let requests = admin_endpoints.iter().map(|(ordinal, endpoint)| async move {
        admin::status(endpoint).await.ok().map(|status| (Ordinal(*ordinal), status))
    });
    join_all(requests).await.into_iter().flatten().collect()
}

async fn workers(client: &Client, target: &Target, context: &Context) -> anyhow::Result<()> {
    let (map, statuses) = (client.refreshed_map().await?, statuses(target).await);
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
        let state = if worker.alive { "alive" } else { "unreachable" };
        let status = statuses.get(ordinal);
        let show = |text: &dyn Fn(&WorkerStatus) -> String| status.map_or_else(|| "-".to_owned(), text);
        table.row([
            format!("worker-{ordinal}"),
            state.to_owned(),
            partitions.to_string(),
            show(&|status| count(status.memories)),
            show(&|status| bytes(status.resident_bytes)),
            show(&|status| bytes(status.log_bytes)),
            worker.client_address.clone(),
            worker.http_address.clone(),
            worker.incarnation.to_string(),
            show(&|status| format!("{} x{}", status.device, status.device_threads)),
            show(&|status| seconds(status.uptime_ms as f64 / 1_000.0)),
            show(&|status| status.version.clone()),
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

/// A partition: from the partition map, and from the status of its primary.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct PartitionRow {
    partition: u32,
    term: u64,
    primary: u32,
    /// Workers with an in-sync replica, including the primary. Absent with `--address`, as are the four fields below.
    in_sync: Option<Vec<u32>>,
    /// Workers that are creating a replica.
    learners: Option<Vec<u32>>,
    /// Whether the primary can acknowledge writes.
    activated: Option<bool>,
    /// Whether the log of a single replica was durable when it became the only one.
    solo_safe: Option<bool>,
    /// `healthy`, `under-replicated`, `re-replicating` or `activating`.
    state: Option<&'static str>,
    /// Last record of the log. Absent if the primary does not respond, as are `lag` and `memories`.
    lsn: Option<u64>,
    /// Records that the slowest in-sync replica has not acknowledged.
    lag: Option<u64>,
    memories: Option<u64>,
    /// Manual overrides, oldest first.
    overrides: Vec<Record>,
}

async fn partitions(arguments: &Partitions, target: &Target, context: &Context) -> anyhow::Result<()> {
    let (mut rows, overrides) = match target {
        Target::Remote(..) => (rows_from_client(&target.connect().await?).await?, Vec::new()),
        Target::Local(_) | Target::Kubernetes(_) => rows_from_coordinator(target).await?,
    };
    rows.retain(|row| !arguments.unhealthy || row.state.is_some_and(|state| state != "healthy"));
    let mut table =
        Table::new(&["partition", ">term", "primary", "in-sync", "learners", "state", ">lsn", ">lag", ">memories"]);
    for row in &rows {
        table.row([
            row.partition.to_string(),
            row.term.to_string(),
            row.primary.to_string(),
            join(row.in_sync.as_deref()),
            join(row.learners.as_deref()),
            row.state.unwrap_or("-").to_owned(),
            optional(row.lsn),
            optional(row.lag),
            optional(row.memories),
        ]);
    }
    context.output.list(&rows, &table)?;
    for map_override in &overrides {
        context.output.note(partition::describe(map_override));
    }
    Ok(())
}

/// Reads the partition map of the coordinator and the status of every primary.
async fn rows_from_coordinator(target: &Target) -> anyhow::Result<(Vec<PartitionRow>, Vec<v1::MapOverride>)> {
    let (coordinator, cluster) = target.coordinator().await?;
    let status = admin::cluster(&coordinator, cluster).await?;
    let replicas = status.replication_factor.clamp(1, status.expected_workers.max(1)) as usize;
    let workers = statuses(target).await;
    let reported = workers.into_values().flat_map(|worker| worker.partition_status).filter(|it| it.primary);
    let reported: BTreeMap<u32, v1::PartitionStatus> = reported.map(|it| (it.partition, it)).collect();
    let entries = status.map.into_iter().flat_map(|map| map.partitions);
    let rows = (0..).zip(entries).map(|(partition, entry)| {
        let reported = reported.get(&partition);
        PartitionRow {
            partition,
            term: entry.term,
            primary: entry.primary,
            state: Some(state(&entry, replicas)),
            in_sync: Some(entry.isr.iter().map(|member| member.ordinal).collect()),
            learners: Some(entry.learners),
            activated: Some(entry.activated),
            solo_safe: Some(entry.solo_safe),
            lsn: reported.map(|it| it.lsn),
            lag: reported.map(|it| it.lag),
            memories: reported.map(|it| it.memories),
            overrides: partition::of(partition, &status.overrides),
        }
    });
    Ok((rows.collect(), status.overrides.clone()))
}

/// Reads the partition map of a client, which knows primaries only.
async fn rows_from_client(client: &Client) -> anyhow::Result<Vec<PartitionRow>> {
    let versions = client.quality(QualityOptions::default()).await?.versions;
    let lsns: BTreeMap<u32, u64> = versions.into_iter().map(|version| (version.partition, version.lsn)).collect();
    let map = client.map()?;
    let rows = (0_u32..).zip(&map.partitions).map(|(partition, placement)| PartitionRow {
        partition,
        term: placement.term.0,
        primary: placement.primary.0,
        in_sync: None,
        learners: None,
        activated: None,
        solo_safe: None,
        state: None,
        lsn: lsns.get(&partition).copied(),
        lag: None,
        memories: None,
        overrides: Vec::new(),
    });
    Ok(rows.collect())
}

fn state(entry: &v1::MapEntry, replicas: usize) -> &'static str {
    if !entry.activated {
        "activating"
    } else if entry.isr.len() >= replicas {
        "healthy"
    } else if entry.learners.is_empty() {
        "under-replicated"
    } else {
        "re-replicating"
    }
}

fn optional(number: Option<u64>) -> String {
    number.map_or_else(|| "-".into(), count)
}

fn join(ordinals: Option<&[u32]>) -> String {
    match ordinals {
        None | Some([]) => "-".into(),
        Some(ordinals) => ordinals.iter().map(ToString::to_string).collect::<Vec<_>>().join(","),
    }
}

async fn runs(target: &Target, context: &Context) -> anyhow::Result<()> {
    let mut runs = target.connect().await?.list_runs().await?;
    runs.extend(job::entries(target).await?.into_iter().map(|entry| entry.status));
    let mut table = Table::new(&["run", "phase", ">epoch", ">updates", ">elapsed", "worker", "message"]);
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

async fn tasks(client: &Client, context: &Context) -> anyhow::Result<()> {
    let mut table = Table::new(&["run", ">task", "name", "worker", ">progress", ">lost workers"]);
    let mut items: Vec<Value> = Vec::new();
    for run in &client.list_runs().await? {
        for task in &run.tasks {
            table.row([
                run.name.clone(),
                task.number.to_string(),
                task.name.clone(),
                format!("worker-{}", task.worker),
                format!("{:.0} %", task.fraction * 100.0),
                task.losses.to_string(),
            ]);
            items.push(json!({
                "run": run.name, "task": task.number, "name": task.name, "worker": task.worker,
                "fraction": task.fraction, "lostWorkers": task.losses, "checkpoint": task.checkpoint,
            }));
        }
    }
    context.output.list(&items, &table)
}

/// Returns the phase as manifests spell it: `Succeeded`.
pub(super) fn phase(run: &RunStatus) -> String {
    let name = run.phase().as_str_name().trim_start_matches("RUN_PHASE_");
    let (first, rest) = name.split_at(1);
    first.to_owned() + &rest.to_lowercase()
}

pub(super) fn epochs(run: &RunStatus) -> String {
    let total = if run.epochs == 0 { "?".into() } else { run.epochs.to_string() };
    format!("{}/{total}", run.epoch)
}

pub(super) fn status_object(run: &RunStatus) -> Value {
    let metrics: BTreeMap<&String, &f64> = run.metrics.iter().collect();
    let outputs: BTreeMap<&String, &String> = run.outputs.iter().collect();
    json!({
        "name": run.name, "phase": phase(run), "epoch": run.epoch,
        "epochs": (run.epochs > 0).then_some(run.epochs), "updates": run.updates,
        "elapsedSeconds": run.elapsed_seconds, "etaSeconds": (run.eta_seconds >= 0.0).then_some(run.eta_seconds),
        "epochsPerSecond": run.epochs_per_second, "updatesPerSecond": run.updates_per_second, "label": run.label,
        "driver": run.driver, "message": run.message, "code": run.code, "metrics": metrics, "kind": run.kind,
        "outputs": outputs,
    })
}
