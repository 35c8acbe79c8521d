//! `engram status`: health of a cluster on one page.

use super::overview::{self, Overview};
use crate::context::{ClusterArgument, Context};
use crate::error::{self, Exit};
use crate::local::admin;
use crate::output::{Output, Style, Table, bytes, count, seconds};
use crate::target::Target;
use engram_api::{ExitCode, printable};
use engram_proto::v1::ClusterStatus;
use std::collections::BTreeMap;

/// Show the health of a cluster and what to do next
#[derive(Debug, clap::Args)]
#[command(before_help = "Examples:
  engram status
  engram status -o json | jq .ready
  engram status --address 127.0.0.1:7443
  engram -n research status words      LearnerCluster words in Kubernetes

Exit codes: 0 ready, 4 not ready, 3 not found, 6 unreachable.")]
pub(crate) struct Status {
    #[command(flatten)]
    cluster: ClusterArgument,
}

pub(crate) async fn run(arguments: &Status, context: &Context) -> anyhow::Result<ExitCode> {
    let target = Target::find(&context.for_cluster(&arguments.cluster)).await?;
    let client = target.connect().await?;
    let mut overview = overview::read(&client, &target).await?;
    let mut restarts = BTreeMap::new();
    match &target {
        Target::Remote(..) => {}
        Target::Local(local) => {
            restarts = local.endpoints.workers.iter().map(|worker| (worker.ordinal, worker.restarts)).collect();
        }
        Target::Kubernetes(cluster) => {
            restarts = cluster.workers.iter().map(|worker| (worker.ordinal, worker.restarts)).collect();
        }
    }
    if !matches!(target, Target::Remote(..)) {
        match coordinator(&target).await {
            Ok(status) => {
                overview.overrides = status.overrides.iter().map(super::partition::describe).collect();
                for condition in status.conditions {
                    if !overview.conditions.iter().any(|it| it.starts_with(&condition)) {
                        overview.conditions.push(condition);
                    }
                }
            }
            // A caller without permission learns nothing about the health of the coordinator.
            Err(error) if error::code(&error) == ExitCode::Denied => context.output.note(format!("note: {error:#}")),
            Err(_) => {
                overview
                    .conditions
                    .push("the coordinator does not respond; workers continue with their current partition map".into());
            }
        }
        overview.ready = overview.conditions.is_empty();
    }
    overview.warnings.extend(restarts.iter().filter_map(|(ordinal, restarts)| {
        let worker = overview.workers.iter().find(|worker| worker.ordinal == *ordinal)?;
        crash_loop(*ordinal, *restarts, worker.uptime_seconds, &target)
    }));
    if context.output.is_structured() {
        context.output.value(&serde_json::to_value(&overview)?)?;
    } else {
        context.output.text(&text(&overview, &restarts, &target, &context.output))?;
    }
    if overview.ready { Ok(ExitCode::Ok) } else { Err(Exit(ExitCode::NotReady).into()) }
}

/// Describes a worker that exits again and again.
fn crash_loop(ordinal: u32, restarts: u32, uptime_seconds: f64, target: &Target) -> Option<String> {
    /// Fewer restarts are those of an upgrade or a single fault.
    const RESTARTS: u32 = 3;
    /// A worker that ran for longer recovered.
    const UPTIME_SECONDS: f64 = 600.0;
    (restarts >= RESTARTS && uptime_seconds < UPTIME_SECONDS).then(|| {
        let logs = match target {
            Target::Kubernetes(cluster) => cluster.logs_command(Some(ordinal), " --previous"),
            _ => format!("engram logs worker-{ordinal}"),
        };
        format!("worker {ordinal} restarted {restarts} times, last {} ago; {logs} shows why", seconds(uptime_seconds))
    })
}

async fn coordinator(target: &Target) -> anyhow::Result<ClusterStatus> {
    let (coordinator, cluster) = target.coordinator().await?;
    admin::cluster(&coordinator, cluster).await
}

fn text(overview: &Overview, restarts: &BTreeMap<u32, u32>, target: &Target, output: &Output) -> String {
    let verdict =
        if overview.ready { output.paint(Style::Good, "ready") } else { output.paint(Style::Bad, "not ready") };
    let mut text = format!(
        "{} {}: {verdict}\n{}\n",
        output.paint(Style::Bold, "cluster"),
        overview.name,
        output.paint(
            Style::Dim,
            &format!(
                "{} memories in {} partitions on {} workers, map version {}, id {}",
                count(overview.memories),
                overview.partitions,
                overview.workers.len(),
                overview.map_version,
                overview.cluster
            )
        )
    );
    if let Some(replication) = &overview.replication {
        text.push_str(&format!("{}\n", output.paint(Style::Dim, &replication.describe())));
    }
    for condition in &overview.conditions {
        text.push_str(&format!("  {} {}\n", output.paint(Style::Warning, "!"), printable(condition)));
    }
    for warning in &overview.warnings {
        text.push_str(&format!("  {} {warning}\n", output.paint(Style::Warning, "!")));
    }
    for map_override in &overview.overrides {
        text.push_str(&format!("  {}\n", output.paint(Style::Dim, map_override)));
    }
    text.push('\n');
    let mut workers = Table::new(&[
        "worker",
        "state",
        "address",
        ">memories",
        ">primaries",
        ">backups",
        ">updates",
        ">memory",
        ">log",
        ">uptime",
        ">restarts",
        "+device",
    ]);
    for worker in &overview.workers {
        let state = match (worker.alive, worker.ready) {
            (false, _) => "unreachable",
            (true, false) => "starting",
            (true, true) => "ready",
        };
        let share =
            overview.replication.as_ref().map(|it| it.workers.get(&worker.ordinal).copied().unwrap_or_default());
        let restarts = restarts.get(&worker.ordinal).map_or_else(|| "-".into(), ToString::to_string);
        workers.row([
            worker.ordinal.to_string(),
            state.into(),
            worker.address.clone(),
            count(worker.memories),
            share.map_or_else(|| worker.partitions.to_string(), |share| share.primaries.to_string()),
            share.map_or_else(|| "-".into(), |share| share.backups.to_string()),
            count(worker.updates),
            bytes(worker.resident_bytes),
            bytes(worker.log_bytes),
            seconds(worker.uptime_seconds),
            restarts,
            worker.device.clone(),
        ]);
    }
    text.push_str(&workers.render(output));
    if !overview.runs.is_empty() {
        let mut runs =
            Table::new(&["run", "phase", ">epoch", ">epochs", ">updates", ">elapsed", ">remaining", "message"]);
        for run in &overview.runs {
            runs.row([
                run.name.clone(),
                run.phase.clone(),
                count(run.epoch),
                if run.epochs == 0 { "-".into() } else { count(run.epochs) },
                count(run.updates),
                seconds(run.elapsed_seconds),
                run.eta_seconds.filter(|_| run.is_active()).map_or_else(|| "-".into(), seconds),
                run.message.clone(),
            ]);
        }
        text.push('\n');
        text.push_str(&runs.render(output));
    }
    if !overview.buffers.is_empty() {
        let mut buffers = Table::new(&["buffer", ">items", ">capacity", ">appended", "+waits"]);
        for buffer in &overview.buffers {
            let numbers = [buffer.items, buffer.capacity, buffer.appended].map(count);
            buffers.row(std::iter::once(buffer.name.clone()).chain(numbers).chain([buffer.waits.join("; ")]));
        }
        text.push('\n');
        text.push_str(&buffers.render(output));
    }
    if !overview.quality.is_empty() {
        let mut groups = Table::new(&["group", ">memories", ">mean", ">min", ">max"]);
        for group in &overview.quality {
            groups.row([
                group.group.to_string(),
                count(group.count),
                format!("{:.6}", group.mean),
                format!("{:.6}", group.min),
                format!("{:.6}", group.max),
            ]);
        }
        text.push('\n');
        text.push_str(&groups.render(output));
    }
    let (arguments, purpose) = next(overview);
    // The logs of pods are no files of this machine.
    let command = match (target, arguments.strip_prefix("logs")) {
        (Target::Kubernetes(cluster), Some(options)) => cluster.logs_command(None, options),
        _ => output.command_line(arguments),
    };
    text.push_str(&format!("\nnext: {command}    {purpose}\n"));
    text
}

/// Suggests the next command: its arguments, and what it does.
fn next(overview: &Overview) -> (&'static str, &'static str) {
    if overview.workers.iter().any(|worker| !worker.alive) {
        ("logs", "shows why a worker exited; it is restarted automatically")
    } else if !overview.ready {
        ("logs -f", "follows the logs; recovery of a large log takes a while")
    } else if overview.runs.iter().any(|run| run.phase == "Failed") {
        ("describe run NAME", "shows why a run failed")
    } else if overview.runs.iter().any(|run| run.phase == "Running") {
        ("top", "shows the progress of the run")
    } else if overview.memories == 0 {
        ("run FILE", "submits a run")
    } else {
        ("rank --limit 20", "lists the memories with the highest weight")
    }
}
