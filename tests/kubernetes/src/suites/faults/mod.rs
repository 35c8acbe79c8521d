//! Faults on real nodes: the operator in pods, workers with disks, and clients whose every write is in a ledger.
//!
//! A write that is lost or applied twice, copies that do not come back and a partition that takes no writes afterwards fail the suite.
//! The write gap is compared with its budget and reported, as `MISSED` where it is longer: a whole Kubernetes shares two cores
//! with what is tried, and holds it up for reasons of its own. Checks rest on one another, in order.

mod campaign;
pub(super) mod clients;
pub(super) mod install;
mod kinds;
mod machine;
mod map;
mod outcome;
mod watch;

use self::clients::{Clients, Working};
use self::kinds::Kind;
use self::outcome::Over;
use super::Check;
use crate::cluster::Cluster;
use anyhow::{Context, Result, ensure};
use engram_faults::outcome::FaultReport;
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
        Check { name: "worker killed", run: |it| trial(it, &kinds::WORKER) },
        // Others than those whose containers have ended already: a kubelet lets such wait for longer each time.
        Check { name: "pod deleted", run: |it| trial(it, &kinds::POD) },
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

/// Workers of two builds under load.
pub(super) fn versions() -> Vec<Check> {
    vec![
        Check { name: "two operators start from the chart", run: install::operator },
        Check { name: "nodes have the workers of an earlier build", run: install::earlier },
        Check { name: "a cluster with disks is Ready", run: install::trials },
        Check { name: "workers of an earlier build, and back", run: |it| trial(it, &kinds::VERSIONS) },
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

/// A fault under load, one time after the other: reports the longest gap.
fn trial(cluster: &Cluster, kind: &Kind) -> Result<String> {
    let fault = suffered(cluster, kind, kind.times)?;
    Ok(outcome::describe(&fault))
}

/// Inflicts a fault repeatedly on an idle cluster while clients write, and waits each time until it is idle again.
fn suffered(cluster: &Cluster, kind: &Kind, times: u32) -> Result<FaultReport> {
    wait_until_idle(cluster, kind).context("before the fault")?;
    let mut clients = clients(cluster)?;
    let clients = clients.as_mut().context("there are clients")?;
    let mut working = clients.begin(cluster)?;
    let mut over = (kind.inflict)(cluster);
    working = clients.measure(working)?;
    for time in 2..=times {
        let Ok(before) = over else { break };
        over = once_more(cluster, clients, &mut working, kind).with_context(|| format!("time {time}"));
        over = over.map(|next| before.and(&next));
        working = clients.measure(working)?;
    }
    // Whatever came of the fault: what became of the writes is of more weight.
    let closed = clients.close(working)?;
    ensure!(closed.tally.is_clean(), "writes are lost, doubled or conjured: {:?}; {:?}", closed.tally, over.err());
    let over = over?;
    ensure!(closed.unserved == 0, "{} partitions take no writes though their copies are whole", closed.unserved);
    let fault = outcome::report(kind.name, &closed, kind.promise.budget(clients.planned_budget()), over);
    watch::settled(cluster, WORKERS).context("after the fault")?;
    Ok(fault)
}

/// Does a fault again under the same load, once nothing is left of the last time.
fn once_more(cluster: &Cluster, clients: &mut Clients, working: &mut Working, kind: &Kind) -> Result<Over> {
    wait_until_idle(cluster, kind)?;
    clients.rest(cluster, working)?;
    (kind.inflict)(cluster)
}

/// Brings about what a fault needs, and waits until nothing is left of that either.
fn wait_until_idle(cluster: &Cluster, kind: &Kind) -> Result<()> {
    watch::settled(cluster, WORKERS)?;
    (kind.prepare)(cluster)?;
    watch::settled(cluster, WORKERS)
}

fn audit(cluster: &Cluster) -> Result<String> {
    let mut clients = clients(cluster)?;
    let mut clients = clients.take().context("there are clients")?;
    let tally = clients.audit()?;
    ensure!(tally.is_clean(), "writes are lost, doubled or conjured: {tally:?}");
    let slow = clients.slowest_thousandth().as_secs_f64() * 1_000.0;
    Ok(format!("{} of {} were acknowledged; p99.9 without faults {slow:.0} ms", tally.acked, tally.operations))
}
