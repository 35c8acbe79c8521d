//! `engram ps`: processes of a local cluster.

use crate::context::Context;
use crate::local::admin;
use crate::local::process::Process;
use crate::output::{Table, bytes, count, seconds};
use crate::route::Endpoint;
use crate::target::Local;
use engram_api::ExitCode;
use serde::Serialize;

/// List the processes of a local cluster
#[derive(Debug, clap::Args)]
#[command(before_help = "Examples:
  engram ps
  engram ps -o wide
  engram ps -o json")]
pub(crate) struct Ps {}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct ProcessRow {
    name: String,
    pid: Option<u32>,
    state: &'static str,
    client_address: Option<String>,
    http_address: Option<String>,
    peer_address: Option<String>,
    admin_address: String,
    resident_bytes: Option<u64>,
    uptime_seconds: Option<f64>,
    restarts: u32,
    memories: Option<u64>,
    partitions: Option<u32>,
}

pub(crate) async fn run(_arguments: &Ps, context: &Context) -> anyhow::Result<ExitCode> {
    let Local { endpoints, route, .. } = Local::find(context)?;
    let mut rows = vec![row("up", Some(endpoints.supervisor), 0)];
    let coordinator = &endpoints.coordinator;
    rows.push(ProcessRow {
        admin_address: coordinator.address.to_string(),
        ..row("coordinator", coordinator.process, coordinator.restarts)
    });
    for worker in &endpoints.workers {
        let status = admin::status(&Endpoint::at(worker.admin, &route)).await.ok();
        let process = row(&worker.name(), worker.process, worker.restarts);
        rows.push(ProcessRow {
            state: if status.is_none() && process.state == "running" { "unresponsive" } else { process.state },
            client_address: Some(worker.client.to_string()),
            http_address: Some(worker.http.to_string()),
            peer_address: Some(worker.peer.to_string()),
            admin_address: worker.admin.to_string(),
            memories: status.as_ref().map(|status| status.memories),
            partitions: status.as_ref().map(|status| status.partitions),
            ..process
        });
    }
    let mut table = Table::new(&[
        "name",
        ">pid",
        "state",
        "client",
        "http",
        "+peer",
        "+admin",
        ">memory",
        ">uptime",
        ">restarts",
        ">memories",
        "+>partitions",
    ]);
    let or_dash = |text: Option<String>| text.unwrap_or_else(|| "-".into());
    for row in &rows {
        table.row([
            row.name.clone(),
            or_dash(row.pid.map(|pid| pid.to_string())),
            row.state.to_owned(),
            or_dash(row.client_address.clone()),
            or_dash(row.http_address.clone()),
            or_dash(row.peer_address.clone()),
            row.admin_address.clone(),
            or_dash(row.resident_bytes.map(bytes)),
            or_dash(row.uptime_seconds.map(seconds)),
            row.restarts.to_string(),
            or_dash(row.memories.map(count)),
            or_dash(row.partitions.map(|partitions| partitions.to_string())),
        ]);
    }
    context.output.list(&rows, &table)?;
    Ok(ExitCode::Ok)
}

fn row(name: &str, process: Option<Process>, restarts: u32) -> ProcessRow {
    let alive = process.filter(|process| process.is_alive());
    ProcessRow {
        name: name.to_owned(),
        pid: alive.map(|process| process.pid),
        state: if alive.is_some() { "running" } else { "restarting" },
        client_address: None,
        http_address: None,
        peer_address: None,
        admin_address: "-".into(),
        resident_bytes: alive.and_then(Process::resident_bytes),
        uptime_seconds: alive.and_then(Process::uptime_seconds),
        restarts,
        memories: None,
        partitions: None,
    }
}
