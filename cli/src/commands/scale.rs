//! `engram scale` and `engram drain`: set the goal of a running cluster. The coordinator persists the goal and pursues it without
//! interrupting service; the commands optionally wait for it.

use crate::context::{ClusterArgument, Context};
use crate::local::admin;
use crate::progress::Progress;
use crate::route::Endpoint;
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

/// Poll interval of `--wait`.
const POLL_INTERVAL: Duration = Duration::from_millis(200);

/// Change the number of workers
#[derive(Debug, clap::Args)]
#[command(before_help = "Examples:
  engram scale --workers 7           add two workers to five
  engram scale --workers 3 --wait    drain and stop the last workers
  engram -n research scale words --workers 7      LearnerCluster words in Kubernetes

Workers with the highest number are removed first. Partitions move one by one while the cluster serves requests.")]
pub(crate) struct Scale {
    #[command(flatten)]
    cluster: ClusterArgument,
    /// Number of workers
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100))]
    workers: u32,
    #[command(flatten)]
    wait: WaitOptions,
}

/// Move all replicas off a worker, so that it can be removed
#[derive(Debug, clap::Args)]
#[command(before_help = "Examples:
  engram drain 3 --wait    wait until the worker has no replicas
  engram drain 3 --undo    allow replicas on the worker again")]
pub(crate) struct Drain {
    /// Number of the worker
    worker: u32,
    /// Allow replicas on the worker again
    #[arg(long)]
    undo: bool,
    #[command(flatten)]
    wait: WaitOptions,
}

#[derive(Debug, clap::Args)]
struct WaitOptions {
    /// Wait until the change is complete
    #[arg(long)]
    wait: bool,
    /// Timeout of --wait in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 300, requires = "wait")]
    timeout: u64,
}

pub(crate) async fn scale(arguments: &Scale, context: &Context) -> anyhow::Result<ExitCode> {
    let workers = arguments.workers;
    let target = Target::find(&context.for_cluster(&arguments.cluster)).await?;
    // In Kubernetes the spec is authoritative: the operator would revert a goal set at the coordinator.
    if let Target::Kubernetes(cluster) = &target {
        cluster.scale(workers).await?;
        context.output.note(format!("scaling {cluster} to {workers} worker(s)"));
        let check =
            || async { cluster.unscaled(workers).await.unwrap_or_else(|error| Some(error.to_string())) }.boxed_local();
        return arguments.wait.until(context, &check).await;
    }
    let coordinator = set(&target, v1::SetGoalRequest { workers, ..Default::default() }).await?;
    context.output.note(format!("scaling the cluster to {workers} worker(s)"));
    let check = || pending(&coordinator, move |status| unscaled(status, workers)).boxed_local();
    arguments.wait.until(context, &check).await
}

pub(crate) async fn drain(arguments: &Drain, context: &Context) -> anyhow::Result<ExitCode> {
    let worker = arguments.worker;
    let (drain, undrain) = if arguments.undo { (vec![], vec![worker]) } else { (vec![worker], vec![]) };
    let target = Target::find(context).await?;
    let coordinator = set(&target, v1::SetGoalRequest { drain, undrain, ..Default::default() }).await?;
    if arguments.undo {
        context.output.note(format!("worker {worker} accepts replicas again"));
        return Ok(ExitCode::Ok);
    }
    context.output.note(format!("draining worker {worker}"));
    let check = || pending(&coordinator, move |status| undrained(status, worker)).boxed_local();
    arguments.wait.until(context, &check).await
}

async fn set(target: &Target, goal: v1::SetGoalRequest) -> anyhow::Result<(Endpoint, ClusterId)> {
    let (coordinator, cluster) = target.coordinator().await?;
    admin::set_goal(&coordinator, v1::SetGoalRequest { cluster: identity(cluster.0), ..goal }).await?;
    Ok((coordinator, cluster))
}

/// Returns what is still missing according to the coordinator.
async fn pending(
    (coordinator, cluster): &(Endpoint, ClusterId),
    missing: impl Fn(&v1::ClusterStatus) -> Option<String>,
) -> Option<String> {
    match admin::cluster(coordinator, *cluster).await {
        Ok(status) => missing(&status),
        Err(error) => Some(error.to_string()),
    }
}

impl WaitOptions {
    /// With `--wait`: waits until `check` returns nothing missing.
    async fn until<'a>(
        &self,
        context: &Context,
        check: &(dyn Fn() -> LocalBoxFuture<'a, Option<String>> + 'a),
    ) -> anyhow::Result<ExitCode> {
        if !self.wait {
            context.output.note(format!("{}    shows the progress", context.output.command_line("status")));
            return Ok(ExitCode::Ok);
        }
        let (since, limit) = (Instant::now(), Duration::from_secs(self.timeout));
        let mut progress = Progress::new(&context.output, "moving partitions", None);
        loop {
            let Some(missing) = check().await else {
                progress.set(0, "done");
                return Ok(ExitCode::Ok);
            };
            if since.elapsed() >= limit {
                let message =
                    format!("timed out after {} s, the change continues in the background: {missing}", limit.as_secs());
                return Err(Problem::new(Code::DeadlineExceeded, message)
                    .help("check the progress: engram status")
                    .help("wait longer: --timeout SECONDS")
                    .into());
            }
            progress.set(0, &missing);
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }
}

/// Returns why scaling to `workers` is not complete: workers to drain, under-replicated or moving partitions, idle workers.
fn unscaled(status: &v1::ClusterStatus, workers: u32) -> Option<String> {
    if status.expected_workers != workers {
        return Some(format!("the goal was changed to {} workers", status.expected_workers));
    }
    let held = held(status)?;
    if let Some((ordinal, partitions)) = held.iter().find(|(ordinal, _)| **ordinal >= workers) {
        return Some(format!("worker {ordinal} still has {partitions} partition(s)"));
    }
    let replicas = status.replication_factor.clamp(1, workers);
    if let Some(missing) = engram_faults::health::find_problem(status, replicas, &Default::default()) {
        return Some(missing);
    }
    // A replica is added before another one is removed.
    let is_moving = |entry: &v1::MapEntry| entry.isr.len() > replicas as usize || !entry.learners.is_empty();
    let partitions = || status.map.iter().flat_map(|map| &map.partitions);
    if let Some(partition) = partitions().position(is_moving) {
        return Some(format!("partition {partition} is being moved"));
    }
    // With enough partitions for all, a worker without any is not done.
    let partitions = partitions().count() as u32;
    let empty = (0..workers).find(|ordinal| !held.contains_key(ordinal)).filter(|_| partitions >= workers);
    empty.map(|ordinal| format!("worker {ordinal} has no partitions yet"))
}

/// Returns why draining a worker is not complete.
fn undrained(status: &v1::ClusterStatus, worker: u32) -> Option<String> {
    let held = held(status)?;
    held.get(&worker).map(|partitions| format!("worker {worker} still has {partitions} partition(s)"))
}

/// Counts the replicas of each worker; workers without any are absent. `None` without a map.
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
            map: Some(v1::PartitionMap { partitions: holders.iter().map(entry).collect(), ..Default::default() }),
            expected_workers,
            replication_factor: 2,
            ..Default::default()
        }
    }

    #[test]
    fn scaling_is_complete_when_exactly_the_remaining_workers_have_partitions() {
        let missing = |holders: &[&[u32]], workers| unscaled(&status(holders, workers), workers).unwrap_or_default();
        assert_eq!(missing(&[&[0, 1], &[1, 2], &[2, 0]], 3), "");
        assert!(missing(&[&[0, 1], &[1, 3], &[2, 0]], 3).contains("worker 3 still has 1"));
        assert!(missing(&[&[0, 1], &[1], &[2, 0]], 3).contains("1 of 2 replicas"));
        assert!(missing(&[&[0, 1], &[1, 2, 0], &[2, 0]], 3).contains("partition 1 is being moved"));
        assert!(missing(&[&[0, 1], &[1, 0], &[1, 0]], 3).contains("worker 2 has no partitions yet"));
        assert!(unscaled(&status(&[&[0, 1]], 2), 3).is_some_and(|it| it.contains("changed to 2 workers")));
        assert_eq!(undrained(&status(&[&[0, 1], &[1, 2]], 3), 0), Some("worker 0 still has 1 partition(s)".into()));
        assert_eq!(undrained(&status(&[&[2, 1], &[1, 2]], 3), 0), None);
    }
}
