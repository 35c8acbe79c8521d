//! The campaign: the kinds of fault in turn, and what came of all of them in a file.

use super::clients::Clients;
use super::kinds::{CONTAINER, Kind, NO_API_LONG, NODE, OPERATOR_AND_NODE, POD, WORKER};
use super::outcome::{describe, to_json};
use super::{WORKERS, clients, suffered, watch};
use crate::cluster::Cluster;
use anyhow::{Context, Result, ensure};
use engram_faults::outcome::{FaultKind, Outcome};
use engram_faults::runner::SeedRunner;
use serde_json::{Value, json};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

/// One round: ten pods and containers, and three nodes.
const ROUND: [Kind; 13] =
    [POD, WORKER, CONTAINER, NODE, POD, WORKER, POD, CONTAINER, OPERATOR_AND_NODE, POD, WORKER, NODE, POD];
const ROUNDS: usize = 10;
/// All of them, and the outage.
const FAULTS: usize = ROUNDS * ROUND.len() + 1;
/// After so many that failed one after the other there is no use in going on.
const HOPELESS: u32 = 3;
/// Before this round the API server is away for two minutes.
const OUTAGE: usize = 5;
/// Nothing is drawn: the order is fixed.
const SEED: u64 = 0;
/// From the root of the checkout.
const RESULT: &str = "docs/results/kubernetes-faults.json";

/// Check: does them all, and writes the result whatever it is.
pub(super) fn run(cluster: &Cluster) -> Result<String> {
    let began = Instant::now();
    // Now: others may work on the files meanwhile.
    let commit = commit()?;
    let outcome = suffer_all(cluster);
    let (events, problems) = (&outcome.faults, &outcome.problems);
    let slowest_thousandth = clients(cluster)?.as_ref().map_or(Duration::ZERO, Clients::slowest_thousandth);
    let result = json!({
        "command": "cargo xtask kubernetes --campaign",
        // Of this program, and of what was built with it.
        "profile": if cfg!(debug_assertions) { "dev" } else { "release" },
        "machine": machine(),
        "commit": commit,
        "nodes": 4, "workers": WORKERS, "copies": watch::COPIES,
        "seconds": began.elapsed().as_secs(),
        "faultFreeP999Ms": slowest_thousandth.as_secs_f64() * 1_000.0,
        "acknowledged": events.iter().map(|event| event.acknowledged).sum::<u64>(),
        "problems": problems,
        "kinds": outcome.by_kind().iter().map(figures).collect::<Vec<_>>(),
        "events": events.iter().map(to_json).collect::<Vec<_>>(),
    });
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(RESULT);
    std::fs::write(&path, serde_json::to_string_pretty(&result)? + "\n")
        .with_context(|| format!("failed to write {RESULT}"))?;
    ensure!(problems.is_empty(), "{} of {FAULTS} faults failed: {}", problems.len(), problems.join("; "));
    Ok(format!("{} faults; wrote {RESULT}", events.len()))
}

/// Does them all, one that fails too: what comes after it says whether the cluster got over it. Gives up on a cluster that does not.
fn suffer_all(cluster: &Cluster) -> Outcome {
    let mut runner = SeedRunner::new(SEED, FAULTS).tolerating(HOPELESS);
    let kinds = (0..ROUNDS).flat_map(|round| (round == OUTAGE).then_some(NO_API_LONG).into_iter().chain(ROUND));
    for kind in kinds {
        let Some(place) = runner.next_fault() else { break };
        match suffered(cluster, &kind, 1) {
            Ok(fault) => {
                println!("      {place:>3} {}: {}", fault.kind, describe(&fault));
                runner.note(Ok(fault));
            }
            Err(error) => {
                let problem = format!("fault {place}, {}: {error:#}", kind.name);
                println!("      {problem}");
                runner.note(Err(problem));
            }
        }
    }
    runner.finish()
}

/// The figures of a kind of fault.
fn figures(kind: &FaultKind) -> Value {
    let FaultKind { kind, done, longest, restored, over_budget, ledger, .. } = kind;
    json!({
        "fault": kind, "done": done,
        "lost": ledger.lost, "doubled": ledger.doubled, "conjured": ledger.conjured,
        "writeGap": longest, "copiesWhole": restored,
        "overBudget": over_budget,
    })
}

/// What the figures depend on most.
fn machine() -> Value {
    let text = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let line = |path: &str, name: &str| {
        let value = text(path).lines().find(|line| line.starts_with(name)).map(str::to_owned);
        value.and_then(|line| Some(line.split_once(':')?.1.trim().to_owned())).unwrap_or_else(|| "unknown".into())
    };
    json!({
        "kernel": text("/proc/sys/kernel/osrelease").trim(),
        "processor": line("/proc/cpuinfo", "model name"),
        "cores": std::thread::available_parallelism().map_or(0, usize::from),
        "memory": line("/proc/meminfo", "MemTotal"),
    })
}

/// The commit that was built, marked where files differ from it.
fn commit() -> Result<String> {
    let mut command = Command::new("git");
    command.current_dir(env!("CARGO_MANIFEST_DIR")).args(["describe", "--always", "--dirty", "--abbrev=40"]);
    let said = command.output().context("failed to ask git for the commit")?;
    Ok(String::from_utf8(said.stdout)?.trim().to_owned())
}
