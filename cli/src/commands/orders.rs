//! `engram partition force-promote` and `rebuild-map`: the two ways out when nothing automatic is safe. The coordinator judges
//! and carries them out; each leaves a record that stays.

use crate::args::Context;
use crate::kubernetes;
use crate::local::admin;
use crate::output::{Table, count};
use crate::target::Target;
use anyhow::Context as _;
use engram_api::{Code, ExitCode, Problem};
use engram_cluster::PartitionMap;
use engram_coordinator::wire;
use engram_mapstore::{Step, What, unless_followed};
use engram_memory::PartitionId;
use engram_proto::answers::identity;
use engram_proto::v1::{self, OrderRefusal};
use futures::FutureExt as _;
use jiff::Timestamp;
use serde::Serialize;
use serde_json::json;
use std::collections::BTreeMap;

/// Let a copy lead that is not in sync, since none that is will come back
#[derive(Debug, clap::Args)]
#[command(before_help = "Examples:
  engram partition force-promote 12        what would be lost
  engram partition force-promote 12 --accept-data-loss 'both disks burnt'
  engram partition force-promote 12 --worker 2 --accept-data-loss '...'

Everything that was acknowledged and is not in the chosen copy is lost for good. Bring a worker or a disk of the partition
back if there is any way to: then it is served again by itself, and nothing is lost. Refused while that may still happen.")]
pub(crate) struct ForcePromote {
    /// Number of the partition
    partition: u32,
    /// The worker that shall lead [default: the one whose copy knows most]
    #[arg(long, value_name = "N")]
    worker: Option<u32>,
    /// Do it; the reason stays on record
    #[arg(long, value_name = "REASON")]
    accept_data_loss: Option<String>,
}

/// Make a lost partition map anew from what the workers have seen of it
#[derive(Debug, clap::Args)]
#[command(before_help = "Examples:
  engram partition rebuild-map             what would be written, and whether it is proven
  engram partition rebuild-map --yes
  engram partition rebuild-map --yes --accept-data-loss 'worker 3 is gone for good'

A partition is proven where every worker has answered and none can have gone on after what was seen last. For the others start
the missing worker if there is any way to; otherwise changes that it alone acknowledged may be lost.")]
pub(crate) struct RebuildMap {
    /// Write it
    #[arg(long)]
    yes: bool,
    /// Also where it is guessed, not proven; the reason stays on record
    #[arg(long, value_name = "REASON")]
    accept_data_loss: Option<String>,
}

/// What a person ordered of one partition.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Record {
    what: String,
    at: String,
    by: String,
    reason: String,
    map_version: u64,
    before: Option<String>,
    after: String,
    lost: String,
}

pub(crate) async fn force_promote(arguments: &ForcePromote, context: &Context) -> anyhow::Result<ExitCode> {
    let target = Target::find(context).await?;
    let (coordinator, cluster) = target.coordinator().await?;
    let accepted = Accepted::of(&target, arguments.accept_data_loss.as_deref());
    let order = v1::ForcePromoteRequest {
        cluster: identity(cluster.0),
        partition: arguments.partition,
        worker: arguments.worker,
        accept_data_loss: accepted.by_coordinator.to_owned(),
        by: who(),
    };
    let reply = admin::force_promote(&coordinator, order).await?;
    accepted.refused(reply.refusal(), &reply.text)?;
    let step = reply.step.unwrap_or_default();
    if let Some((cluster, reason)) = accepted.by_person {
        let step = wire::step_from_proto(&step)?;
        cluster.order(What::ForcePromote, reason, vec![step.clone()], move |there| step.taken(there)).boxed().await?;
    }
    let after = step.after.unwrap_or_default();
    if context.output.is_structured() {
        context.output.value(&json!({
            "partition": step.partition, "primary": after.primary, "term": after.term, "lost": step.lost,
        }))?;
    } else {
        let (partition, primary, term) = (step.partition, after.primary, after.term);
        context.output.note(format!("worker {primary} leads partition {partition} from term {term} on; {}", step.lost));
    }
    Ok(ExitCode::Ok)
}

pub(crate) async fn rebuild_map(arguments: &RebuildMap, context: &Context) -> anyhow::Result<ExitCode> {
    let target = Target::find(context).await?;
    let (coordinator, cluster) = target.coordinator().await?;
    let accepted = Accepted::of(&target, arguments.accept_data_loss.as_deref());
    let order = v1::RebuildMapRequest {
        cluster: identity(cluster.0),
        write: arguments.yes && accepted.by_person.is_none(),
        accept_data_loss: accepted.by_coordinator.to_owned(),
        by: who(),
    };
    let reply = admin::rebuild_map(&coordinator, order).await?;
    let doubts: BTreeMap<u32, &str> = reply.doubts.iter().map(|doubt| (doubt.partition, doubt.why.as_str())).collect();
    let entries = reply.map.iter().flat_map(|map| &map.partitions);
    let mut table = Table::new(&["partition", ">term", "primary", "in sync", "+proven"]);
    let mut rows = Vec::new();
    for (partition, entry) in (0..).zip(entries) {
        let in_sync: Vec<u32> = entry.isr.iter().map(|member| member.ordinal).collect();
        let doubt = doubts.get(&partition).copied();
        table.row([
            partition.to_string(),
            entry.term.to_string(),
            entry.primary.to_string(),
            listed(&in_sync),
            doubt.map_or_else(|| "yes".to_owned(), |why| format!("no: {why}")),
        ]);
        rows.push(json!({
            "partition": partition, "term": entry.term, "primary": entry.primary, "inSync": in_sync,
            "proven": doubt.is_none(), "why": doubt,
        }));
    }
    if !rows.is_empty() {
        context.output.list(&rows, &table)?;
    }
    accepted.refused(reply.refusal(), &reply.text)?;
    let mut written = reply.map.as_ref().filter(|_| reply.written).map(|map| map.version);
    if let Some((cluster, reason)) = accepted.by_person.filter(|_| arguments.yes) {
        let (made, steps) = made_anew(&reply)?;
        let ordered = cluster.order(What::RebuildMap, reason, steps, move |there| unless_followed(&made, there));
        written = Some(ordered.boxed().await?.version);
    }
    match written {
        Some(version) => context.output.note(format!("written: partition map version {}", count(version))),
        None => context.output.note("nothing was written; repeat it with --yes"),
    }
    Ok(ExitCode::Ok)
}

/// The map that the coordinator has made of what workers told, and its steps for the record: those that are guessed.
fn made_anew(reply: &v1::RebuildMapReply) -> anyhow::Result<(PartitionMap, Vec<Step>)> {
    let made = wire::map_from_proto(reply.map.as_ref().context("the coordinator told no map")?)?;
    let step = |doubt: &v1::MapDoubt| -> anyhow::Result<Step> {
        let after = made.partitions.get(doubt.partition as usize).context("the coordinator told too small a map")?;
        let before = doubt.seen.as_ref().map(wire::entry_from_proto).transpose()?;
        let (partition, after, lost) = (PartitionId(doubt.partition), after.clone(), doubt.why.clone());
        Ok(Step { partition, before, after, lost })
    };
    let steps = reply.doubts.iter().map(step).collect::<Result<_, _>>()?;
    Ok((made, steps))
}

/// Who acts on the word of a person that gives up what may be lost.
struct Accepted<'a> {
    /// The reason that the coordinator is told: it does what is ordered then. Empty = it says what it would do.
    by_coordinator: &'a str,
    /// In Kubernetes: the coordinator judges, and whoever orders writes, by rights of their own.
    by_person: Option<(&'a kubernetes::Cluster, &'a str)>,
    is_given: bool,
}

impl<'a> Accepted<'a> {
    fn of(target: &'a Target, reason: Option<&'a str>) -> Self {
        let reason = reason.unwrap_or_default().trim();
        let is_given = !reason.is_empty();
        match target {
            Target::Kubernetes(cluster) => Self { by_coordinator: "", by_person: Some((cluster, reason)), is_given },
            Target::Local(_) | Target::Remote(..) => Self { by_coordinator: reason, by_person: None, is_given },
        }
    }

    /// Ends with what the coordinator refuses, but for a loss that whoever writes has accepted.
    fn refused(&self, refusal: OrderRefusal, text: &str) -> anyhow::Result<()> {
        match refusal {
            OrderRefusal::NotAccepted if self.is_given && self.by_person.is_some() => Ok(()),
            refusal => refused(refusal, text),
        }
    }
}

fn refused(refusal: OrderRefusal, text: &str) -> anyhow::Result<()> {
    match refusal {
        OrderRefusal::Unspecified => Ok(()),
        OrderRefusal::NotNeeded => Err(Problem::new(Code::OrderNotNeeded, text).help("look:   engram status").into()),
        OrderRefusal::NotAccepted => Err(Problem::new(Code::LossNotAccepted, text)
            .help("bring the missing worker or disk back, and nothing is lost")
            .help("give it up for good:   --accept-data-loss REASON")
            .into()),
    }
}

/// Who orders, for the record.
fn who() -> String {
    let name = ["USER", "LOGNAME"].into_iter().find_map(|name| std::env::var(name).ok());
    name.filter(|name| !name.is_empty()).unwrap_or_else(|| "somebody without a name".to_owned())
}

/// What was ordered of a partition.
pub(crate) fn of(partition: u32, orders: &[v1::MapOrder]) -> Vec<Record> {
    let of_it = |order: &v1::MapOrder| order.steps.iter().position(|step| step.partition == partition);
    let record = |order: &v1::MapOrder, step: &v1::MapOrderStep| Record {
        what: order.what.clone(),
        at: date(order.at_ms),
        by: order.by.clone(),
        reason: order.reason.clone(),
        map_version: order.map_version,
        before: step.before.as_ref().map(entry),
        after: step.after.as_ref().map(entry).unwrap_or_default(),
        lost: step.lost.clone(),
    };
    orders.iter().filter_map(|order| of_it(order).map(|at| record(order, &order.steps[at]))).collect()
}

/// An order in a line for people.
pub(crate) fn told(order: &v1::MapOrder) -> String {
    let mut text = format!("ordered {} by {}: {}", date(order.at_ms), order.by, order.what);
    match order.steps.as_slice() {
        [] => text.push_str(", all of it proven"),
        [step] => {
            let before = step.before.as_ref().map_or_else(|| "nothing known".into(), entry);
            let after = step.after.as_ref().map(entry).unwrap_or_default();
            text.push_str(&format!(" of partition {} from {before} to {after}", step.partition));
        }
        steps => text.push_str(&format!(", {} partitions of it guessed", steps.len())),
    }
    if !order.reason.is_empty() {
        text.push_str(&format!("; reason: {}", order.reason));
    }
    text
}

/// An entry of the map in words.
fn entry(entry: &v1::MapEntry) -> String {
    let in_sync: Vec<u32> = entry.isr.iter().map(|member| member.ordinal).collect();
    format!("term {} (primary {}, in sync {})", entry.term, entry.primary, listed(&in_sync))
}

fn listed(ordinals: &[u32]) -> String {
    ordinals.iter().map(ToString::to_string).collect::<Vec<_>>().join(",")
}

/// `2026-01-31T23:59:59Z`, of milliseconds since 1970.
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
    fn what_a_person_writes_is_the_map_that_the_coordinator_made_with_its_guesses_on_record() {
        let entry = |term, ordinal| {
            let (ordinal, incarnation) = (Ordinal(ordinal), Incarnation(1));
            Entry::solo(Term(term), Member { ordinal, store: StoreId(7), incarnation })
        };
        let map = PartitionMap { cluster: ClusterId(5), version: 9, partitions: vec![entry(3, 0), entry(8, 1)] };
        let before = PartitionMap { partitions: vec![entry(4, 2)], ..map };
        let seen = wire::map_to_proto(&before).partitions.pop();
        let doubt = v1::MapDoubt { partition: 1, why: "worker 2 did not answer".into(), seen };
        let mut reply =
            v1::RebuildMapReply { map: Some(wire::map_to_proto(&map)), doubts: vec![doubt], ..Default::default() };
        let (made, steps) = made_anew(&reply).unwrap();
        assert_eq!(made, map);
        let lost = "worker 2 did not answer".to_owned();
        assert_eq!(
            steps,
            [Step { partition: PartitionId(1), before: Some(entry(4, 2)), after: map.partitions[1].clone(), lost }]
        );
        reply.doubts[0].partition = 2;
        assert!(made_anew(&reply).is_err(), "a guess about no partition");
        assert!(made_anew(&v1::RebuildMapReply::default()).is_err());
    }

    #[test]
    fn an_order_is_told_with_when_who_why_and_from_what_to_what() {
        let member = |ordinal| v1::MemberId { ordinal, ..Default::default() };
        let entry = |term, isr: &[u32]| v1::MapEntry {
            term,
            primary: isr[0],
            isr: isr.iter().copied().map(member).collect(),
            ..Default::default()
        };
        let step = v1::MapOrderStep {
            partition: 3,
            before: Some(entry(9, &[0, 1])),
            after: Some(entry(10, &[2])),
            lost: "all after lsn 7".into(),
        };
        let order = v1::MapOrder {
            at_ms: 1_709_251_199_999,
            by: "ann".into(),
            reason: "both disks burnt".into(),
            what: "force-promote".into(),
            map_version: 12,
            steps: vec![step],
        };
        assert_eq!(
            told(&order),
            "ordered 2024-02-29T23:59:59Z by ann: force-promote of partition 3 from term 9 (primary 0, in sync 0,1) to term 10 \
             (primary 2, in sync 2); reason: both disks burnt"
        );
        assert_eq!(of(3, std::slice::from_ref(&order))[0].lost, "all after lsn 7");
        assert!(of(2, &[order]).is_empty());
        assert_eq!(date(0), "1970-01-01T00:00:00Z");
        assert_eq!(date(946_684_800_000), "2000-01-01T00:00:00Z");
    }
}
