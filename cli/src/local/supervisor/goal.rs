//! Follows the goal of a running cluster: starts missing workers, and stops surplus workers that have no partitions.

use super::{Desired, Event, ManagedProcess, Plan, Role, Shared, configure_worker};
use crate::local::endpoints::WorkerEndpoints;
use crate::local::{admin, state};
use crate::route::Endpoint;
use engram_proto::v1;
use std::rc::Rc;
use std::time::Duration;

/// Poll interval of the goal.
const POLL_INTERVAL: Duration = Duration::from_millis(500);

/// Follows the goal while the cluster runs.
pub(super) async fn follow(shared: Rc<Shared>) {
    loop {
        tokio::time::sleep(POLL_INTERVAL).await;
        if !shared.endpoints.borrow().ready {
            continue;
        }
        // Without a coordinator nothing changes.
        let Plan { ports, cluster, route, .. } = &shared.plan;
        let Ok(status) = admin::cluster(&Endpoint::at(ports.coordinator, route), *cluster).await else { continue };
        if let Err(error) = reconcile(&shared, &status).await {
            shared.publish(Event::Retrying(error));
        }
    }
}

/// Starts missing workers, and stops surplus workers that have no partitions.
async fn reconcile(shared: &Rc<Shared>, status: &v1::ClusterStatus) -> anyhow::Result<()> {
    let desired = status.expected_workers;
    let running: Vec<u32> = shared.workers.borrow().keys().copied().collect();
    let missing: Vec<u32> = (0..desired).filter(|ordinal| !running.contains(ordinal)).collect();
    let idle = running.into_iter().filter(|ordinal| *ordinal >= desired && !has_partitions(status, *ordinal));
    let idle: Vec<u32> = idle.collect();
    if missing.is_empty() && idle.is_empty() {
        return Ok(());
    }
    for ordinal in missing {
        start(shared, ordinal)?;
    }
    for ordinal in idle {
        stop(shared, ordinal).await;
    }
    // A failed write is ignored: the coordinator persists the goal.
    let _ = shared.write();
    let workers = shared.workers.borrow().len();
    shared.publish(Event::Resized { workers });
    // Workers that still have partitions are needed at the next start.
    let last = shared.workers.borrow().last_key_value().map_or(0, |(ordinal, _)| *ordinal);
    state::save_workers(&shared.plan.folder, last + 1)
}

fn start(shared: &Rc<Shared>, ordinal: u32) -> anyhow::Result<()> {
    let listen = shared.plan.ports.for_worker(ordinal)?;
    configure_worker(&shared.plan, ordinal, listen)?;
    {
        let workers = &mut shared.endpoints.borrow_mut().workers;
        workers.push(WorkerEndpoints::new(ordinal, listen));
        workers.sort_by_key(|worker| worker.ordinal);
    }
    let process = ManagedProcess::start(shared, Role::Worker(ordinal), tokio::task::spawn_local);
    shared.workers.borrow_mut().insert(ordinal, process);
    Ok(())
}

async fn stop(shared: &Shared, ordinal: u32) {
    let Some(mut process) = shared.workers.borrow_mut().remove(&ordinal) else { return };
    process.desired.send_replace(Desired::Stop);
    process.exited().await;
    shared.endpoints.borrow_mut().workers.retain(|worker| worker.ordinal != ordinal);
}

/// Whether the partition map names a worker in any role; `true` without a map.
fn has_partitions(status: &v1::ClusterStatus, ordinal: u32) -> bool {
    let Some(map) = &status.map else { return true };
    map.partitions.iter().any(|entry| {
        let members = entry.isr.iter().chain(&entry.previous).map(|member| member.ordinal);
        members.chain(entry.learners.iter().copied()).chain([entry.primary]).any(|member| member == ordinal)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn workers_in_the_partition_map_are_not_stopped() {
        let member = |ordinal| v1::MemberId { ordinal, ..Default::default() };
        let entry = v1::MapEntry {
            primary: 0,
            isr: vec![member(0), member(1)],
            previous: vec![member(2)],
            learners: vec![3],
            ..Default::default()
        };
        let map = v1::PartitionMap { partitions: vec![entry], ..Default::default() };
        let status = v1::ClusterStatus { map: Some(map), ..Default::default() };
        assert_eq!([0, 1, 2, 3, 4].map(|ordinal| has_partitions(&status, ordinal)), [true, true, true, true, false]);
        assert!(has_partitions(&v1::ClusterStatus::default(), 4), "without a map no worker is stopped");
    }
}
