//! `engram status`: one page that answers "is it fine?".

use super::watch::{self, Look};
use crate::args::{Context, Named};
use crate::error::{self, Ended};
use crate::local::admin;
use crate::output::{Output, Style, Table, bytes, count, seconds};
use crate::target::Target;
use engram_api::ExitCode;
use engram_proto::v1::ClusterStatus;
use std::collections::BTreeMap;

/// Show whether a cluster is fine, and what to do if not
#[derive(Debug, clap::Args)]
#[command(before_help = "Examples:
  engram status
  engram status -o json | jq .ready
  engram status --address 127.0.0.1:7443
  engram -n research status words      LearnerCluster words in Kubernetes

Exit codes: 0 it is fine, 4 it is not ready, 3 or 6 there is none.")]
pub(crate) struct Arguments {
    #[command(flatten)]
    named: Named,
}

pub(crate) async fn run(arguments: &Arguments, context: &Context) -> anyhow::Result<ExitCode> {
    let target = Target::find(&context.of(&arguments.named)).await?;
    let client = target.connect().await?;
    let mut look = watch::look(&client, &target).await?;
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
            // What both see is said once.
            Ok(status) => {
                look.orders = status.orders.iter().map(super::orders::told).collect();
                for condition in status.conditions {
                    if !look.conditions.iter().any(|known| known.starts_with(&condition)) {
                        look.conditions.push(condition);
                    }
                }
            }
            // That the caller may not ask says nothing of the cluster.
            Err(error) if error::code(&error) == ExitCode::Denied => context.output.note(format!("note: {error:#}")),
            Err(_) => {
                look.conditions.push("the coordinator does not answer; workers go on under the map they have".into());
            }
        }
        look.ready = look.conditions.is_empty();
    }
    if context.output.is_structured() {
        context.output.value(&serde_json::to_value(&look)?)?;
    } else {
        context.output.text(&text(&look, &restarts, &context.output))?;
    }
    if look.ready { Ok(ExitCode::Ok) } else { Err(Ended(ExitCode::NotReady).into()) }
}

async fn coordinator(target: &Target) -> anyhow::Result<ClusterStatus> {
    let (coordinator, cluster) = target.coordinator().await?;
    admin::cluster(&coordinator, cluster).await
}

fn text(look: &Look, restarts: &BTreeMap<u32, u32>, output: &Output) -> String {
    let verdict = if look.ready { output.paint(Style::Good, "fine") } else { output.paint(Style::Bad, "not ready") };
    let mut text = format!(
        "{} {}: {verdict}\n{}\n",
        output.paint(Style::Bold, "cluster"),
        look.name,
        output.paint(
            Style::Dim,
            &format!(
                "{} memories in {} partitions on {} workers, map version {}, id {}",
                count(look.memories),
                look.partitions,
                look.workers.len(),
                look.map_version,
                look.cluster
            )
        )
    );
    if let Some(copies) = &look.copies {
        text.push_str(&format!("{}\n", output.paint(Style::Dim, &copies.told())));
    }
    for condition in &look.conditions {
        text.push_str(&format!("  {} {condition}\n", output.paint(Style::Warning, "!")));
    }
    for order in &look.orders {
        text.push_str(&format!("  {}\n", output.paint(Style::Dim, order)));
    }
    text.push('\n');
    let mut workers = Table::new(&[
        "worker",
        "state",
        "address",
        ">memories",
        ">leads",
        ">follows",
        ">updates",
        ">memory",
        ">log",
        ">uptime",
        ">restarts",
        "+device",
    ]);
    for worker in &look.workers {
        let state = match (worker.alive, worker.ready) {
            (false, _) => "silent",
            (true, false) => "starting",
            (true, true) => "ready",
        };
        let share = look.copies.as_ref().map(|it| it.workers.get(&worker.ordinal).copied().unwrap_or_default());
        let restarts = restarts.get(&worker.ordinal).map_or_else(|| "-".into(), ToString::to_string);
        workers.row([
            worker.ordinal.to_string(),
            state.into(),
            worker.address.clone(),
            count(worker.memories),
            share.map_or_else(|| worker.partitions.to_string(), |share| share.leads.to_string()),
            share.map_or_else(|| "-".into(), |share| share.follows.to_string()),
            count(worker.updates),
            bytes(worker.resident_bytes),
            bytes(worker.log_bytes),
            seconds(worker.uptime_seconds),
            restarts,
            worker.device.clone(),
        ]);
    }
    text.push_str(&workers.render(output));
    if !look.runs.is_empty() {
        let mut runs = Table::new(&["run", "phase", ">epoch", ">epochs", ">updates", ">elapsed", ">to go", "message"]);
        for run in &look.runs {
            runs.row([
                run.name.clone(),
                run.phase.clone(),
                count(run.epoch),
                if run.epochs == 0 { "-".into() } else { count(run.epochs) },
                count(run.updates),
                seconds(run.elapsed_seconds),
                run.eta_seconds.filter(|_| run.is_going_on()).map_or_else(|| "-".into(), seconds),
                run.message.clone(),
            ]);
        }
        text.push('\n');
        text.push_str(&runs.render(output));
    }
    if !look.quality.is_empty() {
        let mut groups = Table::new(&["group", ">memories", ">mean", ">min", ">max"]);
        for group in &look.quality {
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
    text.push_str(&format!("\nnext: {}\n", next(look)));
    text
}

/// What to do now.
fn next(look: &Look) -> &'static str {
    if look.workers.iter().any(|worker| !worker.alive) {
        "engram logs    says why a worker ended; it is started again by itself"
    } else if !look.ready {
        "engram logs -f    shows what is going on; recovery of a large log takes a while"
    } else if look.runs.iter().any(|run| run.phase == "Failed") {
        "engram describe run NAME    says why a run failed"
    } else if look.runs.iter().any(|run| run.phase == "Running") {
        "engram top    shows how the run goes on"
    } else if look.memories == 0 {
        "engram run FILE    learns; engram insert    adds memories"
    } else {
        "engram rank --limit 20    shows the memories of highest weight"
    }
}
