//! `engram scale` and `engram drain`: what a person wants of a cluster that runs. The coordinator keeps the goal and carries it
//! out while everything goes on being served; these commands set it, and wait if they are told to.

use crate::args::{Context, Named};
use crate::local::admin;
use crate::progress::Progress;
use crate::route::Door;
use crate::target::Target;
use engram_api::{Code, ExitCode, Problem};
use engram_memory::ClusterId;
use engram_proto::answers::identity;
use engram_proto::v1;
use futures::FutureExt as _;
use futures::future::LocalBoxFuture;
use std::collections::BTreeMap;
use std::time::Duration;
use tokio::time::Instant;

/// Between looks at how far it is.
const LOOK: Duration = Duration::from_millis(200);

/// Give the cluster more or fewer workers
#[derive(Debug, clap::Args)]
#[command(before_help = "Examples:
  engram scale --workers 7           two more; partitions move to them while everything is served
  engram scale --workers 3 --wait    and back: the last workers are emptied, then stopped
  engram -n research scale words --workers 7      LearnerCluster words in Kubernetes

The workers of highest number go first. Nothing is unavailable meanwhile but for moments.")]
pub(crate) struct Scale {
    #[command(flatten)]
    named: Named,
    /// Workers that the cluster shall have
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100))]
    workers: u32,
    #[command(flatten)]
    waiting: Waiting,
}

/// Empty a worker of its copies, so that it can be taken away without anybody noticing
#[derive(Debug, clap::Args)]
#[command(before_help = "Examples:
  engram drain 3 --wait    others take its partitions and hold copies of them
  engram drain 3 --undo    it may hold copies again")]
pub(crate) struct Drain {
    /// Number of the worker
    worker: u32,
    /// Use it again
    #[arg(long)]
    undo: bool,
    #[command(flatten)]
    waiting: Waiting,
}

#[derive(Debug, clap::Args)]
struct Waiting {
    /// Return when it is done
    #[arg(long)]
    wait: bool,
    /// How long it may take with --wait, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 300, requires = "wait")]
    timeout: u64,
}

pub(crate) async fn scale(arguments: &Scale, context: &Context) -> anyhow::Result<ExitCode> {
    let workers = arguments.workers;
    let target = Target::find(&context.of(&arguments.named)).await?;
    // The operator carries out what the object says; a goal of the coordinator's it would take back.
    if let Target::Kubernetes(cluster) = &target {
        cluster.scale(workers).await?;
        context.output.note(format!("{cluster} shall have {workers} worker(s)"));
        let look =
            || async { cluster.unscaled(workers).await.unwrap_or_else(|error| Some(error.to_string())) }.boxed_local();
        return arguments.waiting.until(context, &look).await;
    }
    let coordinator = set(&target, v1::SetGoalRequest { workers, ..Default::default() }).await?;
    context.output.note(format!("the cluster shall have {workers} worker(s)"));
    let look = || asked(&coordinator, move |status| unscaled(status, workers)).boxed_local();
    arguments.waiting.until(context, &look).await
}

pub(crate) async fn drain(arguments: &Drain, context: &Context) -> anyhow::Result<ExitCode> {
    let worker = arguments.worker;
    let (drain, undrain) = if arguments.undo { (vec![], vec![worker]) } else { (vec![worker], vec![]) };
    let target = Target::find(context).await?;
    let coordinator = set(&target, v1::SetGoalRequest { drain, undrain, ..Default::default() }).await?;
    if arguments.undo {
        context.output.note(format!("worker {worker} is used again"));
        return Ok(ExitCode::Ok);
    }
    context.output.note(format!("worker {worker} shall be emptied"));
    let look = || asked(&coordinator, move |status| undrained(status, worker)).boxed_local();
    arguments.waiting.until(context, &look).await
}

async fn set(target: &Target, goal: v1::SetGoalRequest) -> anyhow::Result<(Door, ClusterId)> {
    let (coordinator, cluster) = target.coordinator().await?;
    admin::set_goal(&coordinator, v1::SetGoalRequest { cluster: identity(cluster.0), ..goal }).await?;
    Ok((coordinator, cluster))
}

/// What is wanting, as the coordinator tells it.
async fn asked(
    (coordinator, cluster): &(Door, ClusterId),
    wanting: impl Fn(&v1::ClusterStatus) -> Option<String>,
) -> Option<String> {
    match admin::cluster(coordinator, *cluster).await {
        Ok(status) => wanting(&status),
        Err(error) => Some(error.to_string()),
    }
}

impl Waiting {
    /// Waits until `look` finds nothing wanting any more, if it was asked for.
    async fn until<'a>(
        &self,
        context: &Context,
        look: &(dyn Fn() -> LocalBoxFuture<'a, Option<String>> + 'a),
    ) -> anyhow::Result<ExitCode> {
        if !self.wait {
            context.output.note("engram status    shows how far it is");
            return Ok(ExitCode::Ok);
        }
        let (since, limit) = (Instant::now(), Duration::from_secs(self.timeout));
        let mut progress = Progress::new(&context.output, "moving partitions", None);
        loop {
            let Some(wanting) = look().await else {
                progress.set(0, "done");
                return Ok(ExitCode::Ok);
            };
            if since.elapsed() >= limit {
                let message = format!("not done after {} s, and it goes on: {wanting}", limit.as_secs());
                return Err(Problem::new(Code::DeadlineExceeded, message)
                    .help("look how far it is:   engram status")
                    .help("wait longer:          --timeout SECONDS")
                    .into());
            }
            progress.set(0, &wanting);
            tokio::time::sleep(LOOK).await;
        }
    }
}

/// What keeps a cluster from having so many workers that all have their share.
fn unscaled(status: &v1::ClusterStatus, workers: u32) -> Option<String> {
    if status.expected_workers != workers {
        return Some(format!("the cluster shall have {} workers by now", status.expected_workers));
    }
    let held = held(status)?;
    if let Some((ordinal, partitions)) = held.iter().find(|(ordinal, _)| **ordinal >= workers) {
        return Some(format!("worker {ordinal} still holds {partitions} partition(s)"));
    }
    let copies = status.replication_factor.clamp(1, workers);
    if let Some(wanting) = engram_faults::health::wanting(status, copies, &Default::default()) {
        return Some(wanting);
    }
    // A copy is added before another one goes.
    let moves = |entry: &v1::MapEntry| entry.isr.len() > copies as usize || !entry.learners.is_empty();
    let partitions = || status.map.iter().flat_map(|map| &map.partitions);
    if let Some(partition) = partitions().position(moves) {
        return Some(format!("partition {partition} is being moved"));
    }
    // A worker may hold few, but one that holds nothing has not got its share yet, where there is enough to share.
    let partitions = partitions().count() as u32;
    let empty = (0..workers).find(|ordinal| !held.contains_key(ordinal)).filter(|_| partitions >= workers);
    empty.map(|ordinal| format!("worker {ordinal} holds nothing yet"))
}

/// What keeps a worker from being empty.
fn undrained(status: &v1::ClusterStatus, worker: u32) -> Option<String> {
    let held = held(status)?;
    held.get(&worker).map(|partitions| format!("worker {worker} still holds {partitions} partition(s)"))
}

/// Partitions of which each worker holds a copy; a worker that holds none is absent. `None` where there is no map, and nothing
/// to wait for.
fn held(status: &v1::ClusterStatus) -> Option<BTreeMap<u32, usize>> {
    let mut held = BTreeMap::new();
    for entry in &status.map.as_ref()?.partitions {
        for member in &entry.isr {
            *held.entry(member.ordinal).or_default() += 1;
        }
    }
    Some(held)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(holders: &[&[u32]], expected_workers: u32) -> v1::ClusterStatus {
        let member = |ordinal: &u32| v1::MemberId { ordinal: *ordinal, ..Default::default() };
        let entry = |isr: &&[u32]| v1::MapEntry {
            isr: isr.iter().map(member).collect(),
            activated: true,
            primary: isr[0],
            ..Default::default()
        };
        let members =
            (0..expected_workers).map(|ordinal| v1::MemberEntry { ordinal, alive: true, ..Default::default() });
        v1::ClusterStatus {
            members: members.collect(),
            map: Some(v1::ClusterMap { partitions: holders.iter().map(entry).collect(), ..Default::default() }),
            expected_workers,
            replication_factor: 2,
            ..Default::default()
        }
    }

    #[test]
    fn scaling_is_done_when_everybody_who_stays_has_a_share_and_nobody_else_has() {
        let says = |holders: &[&[u32]], workers| unscaled(&status(holders, workers), workers).unwrap_or_default();
        assert_eq!(says(&[&[0, 1], &[1, 2], &[2, 0]], 3), "");
        assert!(says(&[&[0, 1], &[1, 3], &[2, 0]], 3).contains("worker 3 still holds 1"));
        assert!(says(&[&[0, 1], &[1], &[2, 0]], 3).contains("1 of 2 copies"));
        assert!(says(&[&[0, 1], &[1, 2, 0], &[2, 0]], 3).contains("partition 1 is being moved"));
        assert!(says(&[&[0, 1], &[1, 0], &[1, 0]], 3).contains("worker 2 holds nothing yet"));
        assert!(unscaled(&status(&[&[0, 1]], 2), 3).is_some_and(|it| it.contains("2 workers by now")));
        assert_eq!(undrained(&status(&[&[0, 1], &[1, 2]], 3), 0), Some("worker 0 still holds 1 partition(s)".into()));
        assert_eq!(undrained(&status(&[&[2, 1], &[1, 2]], 3), 0), None);
    }
}
