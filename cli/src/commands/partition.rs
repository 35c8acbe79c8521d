//! `engram partition`: manual overrides of the partition map, for when no automatic recovery is safe.
//!
//! The coordinator validates an override. A local coordinator also executes it; in Kubernetes the caller writes the map with their
//! own permissions. Every override is recorded permanently.

use crate::context::Context;
use crate::kubernetes;
use crate::local::admin;
use crate::output::{Table, count};
use crate::target::Target;
use anyhow::Context as _;
use engram_api::{Code, ExitCode, Problem};
use engram_cluster::PartitionMap;
use engram_mapstore::{EntryOverride, OverrideKind, unless_superseded};
use engram_memory::PartitionId;
use engram_proto::answers::identity;
use engram_proto::v1::{self, OverrideRefusal};
use engram_wire as wire;
use futures::FutureExt as _;
use jiff::Timestamp;
use serde::Serialize;
use serde_json::json;
use std::collections::BTreeMap;

/// Override the partition map when no automatic recovery is safe
#[derive(Debug, clap::Subcommand)]
pub(crate) enum Partition {
    ForcePromote(ForcePromote),
    RebuildMap(RebuildMap),
}

/// Promote a replica that is not in sync, because no in-sync replica will return
#[derive(Debug, clap::Args)]
#[command(before_help = "Examples:
  engram partition force-promote 12    show which data would be lost
  engram partition force-promote 12 --accept-data-loss 'both disks failed'
  engram partition force-promote 12 --worker 2 --accept-data-loss 'both disks failed'

Acknowledged writes that the chosen replica does not have are lost permanently. Restore a worker or a disk of the partition if
possible: the partition then recovers automatically without data loss. Rejected while automatic recovery is still possible.")]
pub(crate) struct ForcePromote {
    /// Number of the partition
    partition: u32,
    /// Worker to promote [default: the worker with the most recent replica]
    #[arg(long, value_name = "N")]
    worker: Option<u32>,
    /// Promote the replica and accept data loss; the reason is recorded permanently
    #[arg(long, value_name = "REASON")]
    accept_data_loss: Option<String>,
}

/// Rebuild a lost partition map from the states that workers report
#[derive(Debug, clap::Args)]
#[command(before_help = "Examples:
  engram partition rebuild-map             show the new map and which partitions are unproven
  engram partition rebuild-map --yes
  engram partition rebuild-map --yes --accept-data-loss 'worker 3 is lost permanently'

An entry is proven if every worker has reported and none can have acknowledged writes under a later term. For unproven entries
start the missing workers if possible; otherwise writes that only they acknowledged may be lost.")]
pub(crate) struct RebuildMap {
    /// Write the map
    #[arg(long)]
    yes: bool,
    /// Also write unproven entries; the reason is recorded permanently
    #[arg(long, value_name = "REASON")]
    accept_data_loss: Option<String>,
}

/// A manual override of one partition.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Record {
    operation: String,
    time: String,
    requested_by: String,
    reason: String,
    map_version: u64,
    before: Option<String>,
    after: String,
    data_loss: String,
}

pub(crate) async fn run(command: &Partition, context: &Context) -> anyhow::Result<ExitCode> {
    match command {
        Partition::ForcePromote(arguments) => force_promote(arguments, context).await,
        Partition::RebuildMap(arguments) => rebuild_map(arguments, context).await,
    }
}

async fn force_promote(arguments: &ForcePromote, context: &Context) -> anyhow::Result<ExitCode> {
    let target = Target::find(context).await?;
    let (coordinator, cluster) = target.coordinator().await?;
    let acceptance = Acceptance::of(&target, arguments.accept_data_loss.as_deref());
    let request = v1::ForcePromoteRequest {
        cluster: identity(cluster.0),
        partition: arguments.partition,
        worker: arguments.worker,
        accept_data_loss: acceptance.by_coordinator.to_owned(),
        requested_by: requester(),
    };
    let reply = admin::force_promote(&coordinator, request).await?;
    acceptance.check(reply.refusal(), &reply.message)?;
    let step = reply.step.unwrap_or_default();
    if let Some((cluster, reason)) = acceptance.by_caller {
        let step = engram_coordinator::wire::step_from_proto(&step)?;
        cluster
            .override_map(OverrideKind::ForcePromote, reason, vec![step.clone()], move |current| step.apply_to(current))
            .boxed()
            .await?;
    }
    let after = step.after.unwrap_or_default();
    if context.output.is_structured() {
        context.output.value(&json!({
            "partition": step.partition, "primary": after.primary, "term": after.term, "dataLoss": step.data_loss,
        }))?;
    } else {
        let (partition, primary, term) = (step.partition, after.primary, after.term);
        context.output.note(format!(
            "promoted worker {primary} to primary of partition {partition} in term {term}; {}",
            step.data_loss
        ));
    }
    Ok(ExitCode::Ok)
}

async fn rebuild_map(arguments: &RebuildMap, context: &Context) -> anyhow::Result<ExitCode> {
    let target = Target::find(context).await?;
    let (coordinator, cluster) = target.coordinator().await?;
    let acceptance = Acceptance::of(&target, arguments.accept_data_loss.as_deref());
    let request = v1::RebuildMapRequest {
        cluster: identity(cluster.0),
        write: arguments.yes && acceptance.by_caller.is_none(),
        accept_data_loss: acceptance.by_coordinator.to_owned(),
        requested_by: requester(),
    };
    let reply = admin::rebuild_map(&coordinator, request).await?;
    let unproven: BTreeMap<u32, &str> =
        reply.unproven.iter().map(|entry| (entry.partition, entry.reason.as_str())).collect();
    let entries = reply.map.iter().flat_map(|map| &map.partitions);
    let mut table = Table::new(&["partition", ">term", "primary", "in-sync", "+proven"]);
    let mut rows = Vec::new();
    for (partition, entry) in (0..).zip(entries) {
        let in_sync: Vec<u32> = entry.isr.iter().map(|member| member.ordinal).collect();
        let reason = unproven.get(&partition).copied();
        table.row([
            partition.to_string(),
            entry.term.to_string(),
            entry.primary.to_string(),
            listed(&in_sync),
            reason.map_or_else(|| "yes".to_owned(), |reason| format!("no: {reason}")),
        ]);
        rows.push(json!({
            "partition": partition, "term": entry.term, "primary": entry.primary, "inSync": in_sync,
            "proven": reason.is_none(), "reason": reason,
        }));
    }
    if !rows.is_empty() {
        context.output.list(&rows, &table)?;
    }
    acceptance.check(reply.refusal(), &reply.message)?;
    let mut written = reply.map.as_ref().filter(|_| reply.written).map(|map| map.version);
    if let Some((cluster, reason)) = acceptance.by_caller.filter(|_| arguments.yes) {
        let (rebuilt, steps) = rebuilt_map(&reply)?;
        let written_map = cluster
            .override_map(OverrideKind::RebuildMap, reason, steps, move |current| unless_superseded(&rebuilt, current));
        written = Some(written_map.boxed().await?.version);
    }
    match written {
        Some(version) => context.output.note(format!("wrote partition map version {}", count(version))),
        None => context.output.note("nothing was written; run it again with --yes"),
    }
    Ok(ExitCode::Ok)
}

/// Returns the map that the coordinator rebuilt, and the unproven entries as steps for the record.
fn rebuilt_map(reply: &v1::RebuildMapResponse) -> anyhow::Result<(PartitionMap, Vec<EntryOverride>)> {
    let rebuilt = wire::map_from_proto(reply.map.as_ref().context("the coordinator returned no map")?)?;
    let step = |entry: &v1::UnprovenPartition| -> anyhow::Result<EntryOverride> {
        let after = rebuilt
            .partitions
            .get(entry.partition as usize)
            .context("the coordinator returned a map with too few partitions")?;
        let before = entry.last_observed.as_ref().map(wire::entry_from_proto).transpose()?;
        let (partition, after, lost) = (PartitionId(entry.partition), after.clone(), entry.reason.clone());
        Ok(EntryOverride { partition, before, after, lost })
    };
    let steps = reply.unproven.iter().map(step).collect::<Result<_, _>>()?;
    Ok((rebuilt, steps))
}

/// Acceptance of data loss: who executes the override, and why.
struct Acceptance<'a> {
    /// Reason sent to the coordinator, which then executes the override. Empty = dry run.
    by_coordinator: &'a str,
    /// In Kubernetes: the coordinator only validates, and the caller writes with their own permissions.
    by_caller: Option<(&'a kubernetes::Cluster, &'a str)>,
    is_accepted: bool,
}

impl<'a> Acceptance<'a> {
    fn of(target: &'a Target, reason: Option<&'a str>) -> Self {
        let reason = reason.unwrap_or_default().trim();
        let is_accepted = !reason.is_empty();
        match target {
            Target::Kubernetes(cluster) => Self { by_coordinator: "", by_caller: Some((cluster, reason)), is_accepted },
            Target::Local(_) | Target::Remote(..) => Self { by_coordinator: reason, by_caller: None, is_accepted },
        }
    }

    /// Fails if the coordinator refused, except for data loss that the caller accepts and writes.
    fn check(&self, refusal: OverrideRefusal, text: &str) -> anyhow::Result<()> {
        match refusal {
            OverrideRefusal::DataLossNotAccepted if self.is_accepted && self.by_caller.is_some() => Ok(()),
            refusal => check_refusal(refusal, text),
        }
    }
}

fn check_refusal(refusal: OverrideRefusal, text: &str) -> anyhow::Result<()> {
    match refusal {
        OverrideRefusal::Unspecified => Ok(()),
        OverrideRefusal::NotNeeded => {
            Err(Problem::new(Code::OrderNotNeeded, text).help("check the state: engram status").into())
        }
        OverrideRefusal::DataLossNotAccepted => Err(Problem::new(Code::LossNotAccepted, text)
            .help("restore the missing worker or disk to avoid data loss")
            .help("accept data loss: --accept-data-loss REASON")
            .into()),
    }
}

/// Returns the name of the user, for the record.
fn requester() -> String {
    let name = ["USER", "LOGNAME"].into_iter().find_map(|name| std::env::var(name).ok());
    name.filter(|name| !name.is_empty()).unwrap_or_else(|| "unknown".to_owned())
}

/// Returns the overrides of a partition.
pub(crate) fn of(partition: u32, overrides: &[v1::MapOverride]) -> Vec<Record> {
    let step_index =
        |map_override: &v1::MapOverride| map_override.steps.iter().position(|step| step.partition == partition);
    let record = |map_override: &v1::MapOverride, step: &v1::MapOverrideStep| Record {
        operation: map_override.operation.clone(),
        time: date(map_override.at_ms),
        requested_by: map_override.requested_by.clone(),
        reason: map_override.reason.clone(),
        map_version: map_override.map_version,
        before: step.before.as_ref().map(entry),
        after: step.after.as_ref().map(entry).unwrap_or_default(),
        data_loss: step.data_loss.clone(),
    };
    overrides.iter().filter_map(|it| step_index(it).map(|index| record(it, &it.steps[index]))).collect()
}

/// Describes an override in one line.
pub(crate) fn describe(map_override: &v1::MapOverride) -> String {
    let mut text = format!(
        "manual override at {} by {}: {}",
        date(map_override.at_ms),
        map_override.requested_by,
        map_override.operation
    );
    match map_override.steps.as_slice() {
        [] => text.push_str(", all entries proven"),
        [step] => {
            let before = step.before.as_ref().map_or_else(|| "an unknown entry".into(), entry);
            let after = step.after.as_ref().map(entry).unwrap_or_default();
            text.push_str(&format!(" of partition {} from {before} to {after}", step.partition));
        }
        steps => text.push_str(&format!(", {} partitions unproven", steps.len())),
    }
    if !map_override.reason.is_empty() {
        text.push_str(&format!("; reason: {}", map_override.reason));
    }
    text
}

/// Describes an entry of the partition map.
fn entry(entry: &v1::MapEntry) -> String {
    let in_sync: Vec<u32> = entry.isr.iter().map(|member| member.ordinal).collect();
    format!("term {} (primary {}, in sync {})", entry.term, entry.primary, listed(&in_sync))
}

fn listed(ordinals: &[u32]) -> String {
    ordinals.iter().map(ToString::to_string).collect::<Vec<_>>().join(",")
}

/// Formats milliseconds since 1970 as RFC 3339: `2026-01-31T23:59:59Z`.
fn date(at_ms: u64) -> String {
    let seconds = i64::try_from(at_ms / 1_000).ok().and_then(|seconds| Timestamp::from_second(seconds).ok());
    seconds.map_or_else(|| format!("{at_ms} ms after 1970"), |time| time.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use engram_cluster::Entry;
    use engram_memory::{ClusterId, Incarnation, Member, Ordinal, StoreId, Term};

    #[test]
    fn rebuilt_map_is_the_coordinators_with_unproven_entries_recorded() {
        let entry = |term, ordinal| {
            let (ordinal, incarnation) = (Ordinal(ordinal), Incarnation(1));
            Entry::solo(Term(term), Member { ordinal, store: StoreId(7), incarnation })
        };
        let map = PartitionMap { cluster: ClusterId(5), version: 9, partitions: vec![entry(3, 0), entry(8, 1)] };
        let before = PartitionMap { partitions: vec![entry(4, 2)], ..map };
        let last = wire::map_to_proto(&before).partitions.pop();
        let reason =
            v1::UnprovenPartition { partition: 1, reason: "worker 2 did not answer".into(), last_observed: last };
        let mut reply = v1::RebuildMapResponse {
            map: Some(wire::map_to_proto(&map)),
            unproven: vec![reason],
            ..Default::default()
        };
        let (rebuilt, steps) = rebuilt_map(&reply).unwrap();
        assert_eq!(rebuilt, map);
        let lost = "worker 2 did not answer".to_owned();
        assert_eq!(
            steps,
            [EntryOverride {
                partition: PartitionId(1),
                before: Some(entry(4, 2)),
                after: map.partitions[1].clone(),
                lost
            }]
        );
        reply.unproven[0].partition = 2;
        assert!(rebuilt_map(&reply).is_err(), "an unproven entry of no partition");
        assert!(rebuilt_map(&v1::RebuildMapResponse::default()).is_err());
    }

    #[test]
    fn override_description_has_time_requester_reason_and_change() {
        let member = |ordinal| v1::MemberId { ordinal, ..Default::default() };
        let entry = |term, isr: &[u32]| v1::MapEntry {
            term,
            primary: isr[0],
            isr: isr.iter().copied().map(member).collect(),
            ..Default::default()
        };
        let step = v1::MapOverrideStep {
            partition: 3,
            before: Some(entry(9, &[0, 1])),
            after: Some(entry(10, &[2])),
            data_loss: "all after lsn 7".into(),
        };
        let map_override = v1::MapOverride {
            at_ms: 1_709_251_199_999,
            requested_by: "ann".into(),
            reason: "both disks failed".into(),
            operation: "force-promote".into(),
            map_version: 12,
            steps: vec![step],
        };
        assert_eq!(
            describe(&map_override),
            "manual override at 2024-02-29T23:59:59Z by ann: force-promote of partition 3 from term 9 (primary 0, in sync 0,1) to term 10 \
             (primary 2, in sync 2); reason: both disks failed"
        );
        assert_eq!(of(3, std::slice::from_ref(&map_override))[0].data_loss, "all after lsn 7");
        assert!(of(2, &[map_override]).is_empty());
        assert_eq!(date(0), "1970-01-01T00:00:00Z");
        assert_eq!(date(946_684_800_000), "2000-01-01T00:00:00Z");
    }
}
