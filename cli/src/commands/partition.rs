//! `engram partition`: partitions, their copies, who holds them, and the orders for when nothing automatic is safe.

use super::orders;
use crate::args::Context;
use crate::local::admin;
use crate::output::{Table, count};
use crate::target::Target;
use engram_api::ExitCode;
use engram_proto::v1;
use serde::Serialize;
use std::collections::BTreeMap;

/// Look at partitions and their copies; order what nothing automatic may do
#[derive(Debug, clap::Subcommand)]
pub(crate) enum Partition {
    /// List partitions: who leads each, which copies are in sync, which are being made
    List(List),
    ForcePromote(orders::ForcePromote),
    RebuildMap(orders::RebuildMap),
}

#[derive(Debug, clap::Args)]
#[command(before_help = "Examples:
  engram partition list
  engram partition list --short        those that lack a copy
  engram partition list -o json | jq '.items[] | select(.activated | not)'")]
pub(crate) struct List {
    /// Only partitions that lack a copy or do not serve
    #[arg(long)]
    short: bool,
}

/// A partition by the map, and what its primary says of it.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Row {
    partition: u32,
    term: u64,
    primary: u32,
    /// Copies in sync, the primary's included.
    in_sync: Vec<u32>,
    /// Copies being made.
    learners: Vec<u32>,
    /// Whether its primary may acknowledge.
    activated: bool,
    /// One copy, whose log was on disk when it became the only one.
    solo_safe: bool,
    /// Place in its log; absent where its primary does not answer.
    lsn: Option<u64>,
    memories: Option<u64>,
    /// What people ordered of it against the rules, oldest first.
    orders: Vec<orders::Record>,
    /// Records that the copy in sync which is furthest behind has not acknowledged.
    lag: Option<u64>,
}

pub(crate) async fn run(command: &Partition, context: &Context) -> anyhow::Result<ExitCode> {
    match command {
        Partition::List(arguments) => list_all(arguments, context).await,
        Partition::ForcePromote(arguments) => orders::force_promote(arguments, context).await,
        Partition::RebuildMap(arguments) => orders::rebuild_map(arguments, context).await,
    }
}

async fn list_all(arguments: &List, context: &Context) -> anyhow::Result<ExitCode> {
    let target = Target::find(context).await?;
    let (coordinator, cluster) = target.coordinator().await?;
    let status = admin::cluster(&coordinator, cluster).await?;
    let mut told: BTreeMap<u32, v1::PartitionStatus> = BTreeMap::new();
    for (_, door) in target.administration() {
        // Of a worker that does not answer the map is all that is known.
        let Ok(status) = admin::status(&door).await else { continue };
        told.extend(status.partition_status.into_iter().filter(|it| it.primary).map(|it| (it.partition, it)));
    }
    let copies = status.replication_factor.clamp(1, status.expected_workers.max(1)) as usize;
    let orders = status.orders;
    let entries = status.map.into_iter().flat_map(|map| map.partitions);
    let rows = (0..).zip(entries).map(|(partition, entry)| row(partition, entry, told.get(&partition), &orders));
    let rows: Vec<Row> = rows.filter(|row| !arguments.short || row.in_sync.len() < copies || !row.activated).collect();
    let mut table =
        Table::new(&["partition", ">term", "primary", "in sync", "learners", "state", ">lsn", ">lag", ">memories"]);
    for row in &rows {
        let known = |number: Option<u64>| number.map_or_else(|| "-".into(), count);
        table.row([
            row.partition.to_string(),
            row.term.to_string(),
            row.primary.to_string(),
            list(&row.in_sync),
            list(&row.learners),
            state(row, copies).into(),
            known(row.lsn),
            known(row.lag),
            known(row.memories),
        ]);
    }
    context.output.list(&rows, &table)?;
    for order in &orders {
        context.output.note(orders::told(order));
    }
    Ok(ExitCode::Ok)
}

fn row(partition: u32, entry: v1::MapEntry, told: Option<&v1::PartitionStatus>, orders: &[v1::MapOrder]) -> Row {
    Row {
        partition,
        term: entry.term,
        primary: entry.primary,
        in_sync: entry.isr.iter().map(|member| member.ordinal).collect(),
        learners: entry.learners,
        activated: entry.activated,
        solo_safe: entry.solo_safe,
        lsn: told.map(|told| told.lsn),
        memories: told.map(|told| told.memories),
        lag: told.map(|told| told.lag),
        orders: orders::of(partition, orders),
    }
}

fn state(row: &Row, copies: usize) -> &'static str {
    match row {
        row if !row.activated => "activating",
        row if row.in_sync.len() >= copies => "whole",
        row if row.learners.is_empty() => "short",
        _ => "healing",
    }
}

fn list(ordinals: &[u32]) -> String {
    if ordinals.is_empty() {
        return "-".into();
    }
    ordinals.iter().map(ToString::to_string).collect::<Vec<_>>().join(",")
}
