//! Faults on real nodes: the operator in pods, workers with disks, and clients whose every write is in a ledger.
//!
//! A write that is lost or applied twice, copies that do not come back and a partition that takes no writes afterwards fail the suite.
//! How long writes were held up is held against its budget and told, `MISSED` where it was longer: programs of the development profile
//! share two cores with a whole Kubernetes here, and stall for reasons of their own. Checks rest on one another, in order.

mod campaign;
mod clients;
pub(super) mod install;
mod kinds;
mod map;
mod outcome;
mod watch;

use self::clients::Clients;
use self::kinds::Kind;
use self::outcome::Event;
use super::Check;
use crate::cluster::Cluster;
use anyhow::{Context, Result, ensure};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The cluster that is put on trial.
const TRIALS: &str = "trials";
/// Its workers.
const WORKERS: usize = 3;

/// The clients, from one check to the next: the last one opens the books of all.
static CLIENTS: Mutex<Option<Clients>> = Mutex::new(None);

pub(super) fn checks() -> Vec<Check> {
    vec![
        Check { name: "two operators start from the chart", run: install::operator },
        Check { name: "a cluster with disks is Ready", run: install::trials },
        Check { name: "pod deleted", run: |it| trial(it, &kinds::POD) },
        Check { name: "worker killed", run: |it| trial(it, &kinds::WORKER) },
        Check { name: "container killed", run: |it| trial(it, &kinds::CONTAINER) },
        Check { name: "node killed", run: |it| trial(it, &kinds::NODE) },
        Check { name: "operator killed with a worker's node", run: |it| trial(it, &kinds::OPERATOR_AND_NODE) },
        Check { name: "node cut off", run: |it| trial(it, &kinds::CUT_OFF) },
        Check { name: "operator upgraded", run: |it| trial(it, &kinds::UPGRADE) },
        Check { name: "scaled from 3 to 5 and back", run: |it| trial(it, &kinds::SCALE) },
        Check { name: "disks grown", run: |it| trial(it, &kinds::GROWTH) },
        Check { name: "image changed", run: |it| trial(it, &kinds::IMAGE) },
        Check { name: "API server down for 30 s", run: |it| trial(it, &kinds::NO_API) },
        Check { name: "what was acknowledged at any time is there in the end", run: audit },
        Check { name: "a cluster that is deleted takes its pods along, and leaves its disks", run: install::deleted },
    ]
}

/// The same faults many times over.
pub(super) fn campaign() -> Vec<Check> {
    vec![
        Check { name: "two operators start from the chart", run: install::operator },
        Check { name: "a cluster with disks is Ready", run: install::trials },
        Check { name: "100 pods and containers, 30 nodes and the API server for 2 minutes", run: campaign::run },
        Check { name: "what was acknowledged at any time is there in the end", run: audit },
    ]
}

fn clients(cluster: &Cluster) -> Result<MutexGuard<'static, Option<Clients>>> {
    let mut clients = CLIENTS.lock().unwrap_or_else(PoisonError::into_inner);
    if clients.is_none() {
        *clients = Some(Clients::of(cluster)?);
    }
    Ok(clients)
}

/// A fault under load.
fn trial(cluster: &Cluster, kind: &Kind) -> Result<String> {
    let event = suffered(cluster, kind)?;
    Ok(event.to_string())
}

/// Does a fault to a cluster at rest while clients write, and waits until it is at rest again.
fn suffered(cluster: &Cluster, kind: &Kind) -> Result<Event> {
    watch::settled(cluster, WORKERS).context("before the fault")?;
    let mut clients = clients(cluster)?;
    let clients = clients.as_mut().context("there are clients")?;
    let working = clients.begin(cluster)?;
    let over = (kind.inflict)(cluster);
    // Whatever came of the fault: what became of the writes is of more weight.
    let closed = clients.close(working)?;
    ensure!(closed.tally.is_clean(), "writes are lost, doubled or conjured: {:?}; {:?}", closed.tally, over.err());
    let over = over?;
    ensure!(closed.unserved == 0, "{} partitions take no writes though their copies are whole", closed.unserved);
    let event = Event::new(kind.name, &closed, kind.promise.budget(clients.planned_budget()), over);
    watch::settled(cluster, WORKERS).context("after the fault")?;
    Ok(event)
}

fn audit(cluster: &Cluster) -> Result<String> {
    let mut clients = clients(cluster)?;
    let mut clients = clients.take().context("there are clients")?;
    let tally = clients.audit()?;
    ensure!(tally.is_clean(), "writes are lost, doubled or conjured: {tally:?}");
    let slow = clients.slowest_thousandth().as_secs_f64() * 1_000.0;
    Ok(format!("{} of {} were acknowledged; p99.9 without faults {slow:.0} ms", tally.acked, tally.operations))
}
