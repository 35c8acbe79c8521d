//! What a person wants of a cluster that runs: more workers are started, those too many are stopped once they hold nothing.

use super::{Event, Kept, Plan, Role, Shared, Will, configure_worker};
use crate::local::endpoints::WorkerEndpoints;
use crate::local::{admin, state};
use crate::route::Door;
use engram_proto::v1;
use std::rc::Rc;
use std::time::Duration;

/// Between looks at the goal: people wait for it.
const LOOK: Duration = Duration::from_millis(500);

/// Follows the goal as long as the cluster runs.
pub(super) async fn follow(shared: Rc<Shared>) {
    loop {
        tokio::time::sleep(LOOK).await;
        if !shared.endpoints.borrow().ready {
            continue;
        }
        // Without a coordinator there is no goal, and everything goes on as it is.
        let Plan { ports, cluster, route, .. } = &shared.plan;
        let Ok(status) = admin::cluster(&Door::at(ports.coordinator, route), *cluster).await else { continue };
        if let Err(error) = pursue(&shared, &status).await {
            shared.tell(Event::Trouble(error));
        }
    }
}

/// Starts who is missing, and stops who is too many and holds nothing.
async fn pursue(shared: &Rc<Shared>, status: &v1::ClusterStatus) -> anyhow::Result<()> {
    let wanted = status.expected_workers;
    let running: Vec<u32> = shared.workers.borrow().keys().copied().collect();
    let missing: Vec<u32> = (0..wanted).filter(|ordinal| !running.contains(ordinal)).collect();
    let idle = running.into_iter().filter(|ordinal| *ordinal >= wanted && !holds(status, *ordinal));
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
    // A note that cannot be written costs nobody a process; the goal itself is the coordinator's to keep.
    let _ = shared.write();
    let workers = shared.workers.borrow().len();
    shared.tell(Event::Resized { workers });
    // Those that still hold something are needed for the next start.
    let last = shared.workers.borrow().last_key_value().map_or(0, |(ordinal, _)| *ordinal);
    state::note_workers(&shared.plan.folder, last + 1)
}

fn start(shared: &Rc<Shared>, ordinal: u32) -> anyhow::Result<()> {
    let listen = shared.plan.ports.more(ordinal)?;
    configure_worker(&shared.plan, ordinal, listen)?;
    {
        let workers = &mut shared.endpoints.borrow_mut().workers;
        workers.push(WorkerEndpoints::new(ordinal, listen));
        workers.sort_by_key(|worker| worker.ordinal);
    }
    let kept = Kept::start(shared, Role::Worker(ordinal), tokio::task::spawn_local);
    shared.workers.borrow_mut().insert(ordinal, kept);
    Ok(())
}

async fn stop(shared: &Shared, ordinal: u32) {
    let Some(mut kept) = shared.workers.borrow_mut().remove(&ordinal) else { return };
    kept.will.send_replace(Will::Stop);
    kept.ended().await;
    shared.endpoints.borrow_mut().workers.retain(|worker| worker.ordinal != ordinal);
}

/// Whether the map gives anything to a worker. Without a map nobody knows.
fn holds(status: &v1::ClusterStatus, ordinal: u32) -> bool {
    let Some(map) = &status.map else { return true };
    map.partitions.iter().any(|entry| {
        let members = entry.isr.iter().chain(&entry.prev).map(|member| member.ordinal);
        members.chain(entry.learners.iter().copied()).chain([entry.primary]).any(|named| named == ordinal)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_worker_that_the_map_names_in_any_role_is_not_stopped() {
        let member = |ordinal| v1::MemberId { ordinal, ..Default::default() };
        let entry = v1::MapEntry {
            primary: 0,
            isr: vec![member(0), member(1)],
            prev: vec![member(2)],
            learners: vec![3],
            ..Default::default()
        };
        let map = v1::ClusterMap { partitions: vec![entry], ..Default::default() };
        let status = v1::ClusterStatus { map: Some(map), ..Default::default() };
        assert_eq!([0, 1, 2, 3, 4].map(|ordinal| holds(&status, ordinal)), [true, true, true, true, false]);
        assert!(holds(&v1::ClusterStatus::default(), 4), "without a map nobody knows");
    }
}
