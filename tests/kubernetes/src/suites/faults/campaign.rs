//! The campaign: the kinds of fault in turn, and what came of all of them in a file.

use super::clients::Clients;
use super::kinds::{CONTAINER, Kind, NO_API_LONG, NODE, OPERATOR_AND_NODE, POD, WORKER};
use super::outcome::Event;
use super::{WORKERS, clients, suffered, watch};
use crate::cluster::Cluster;
use anyhow::{Context, Result, ensure};
use engram_faults::outages::Spread;
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
/// From the root of the checkout.
const RESULT: &str = "docs/results/kubernetes-faults.json";

/// Check: does them all, and writes the result whatever it is.
pub(super) fn run(cluster: &Cluster) -> Result<String> {
    let began = Instant::now();
    // Now: others may work on the files meanwhile.
    let commit = commit()?;
    let (events, problems) = suffer_all(cluster);
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
        "kinds": kinds(&events),
        "events": events,
    });
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(RESULT);
    std::fs::write(&path, serde_json::to_string_pretty(&result)? + "\n")
        .with_context(|| format!("failed to write {RESULT}"))?;
    ensure!(problems.is_empty(), "{} of {FAULTS} faults failed: {}", problems.len(), problems.join("; "));
    Ok(format!("{} faults; wrote {RESULT}", events.len()))
}

/// Does them all, one that fails too: what comes after it says whether the cluster got over it. Gives up on a cluster that does not.
fn suffer_all(cluster: &Cluster) -> (Vec<Event>, Vec<String>) {
    let (mut events, mut problems, mut in_a_row) = (Vec::new(), Vec::new(), 0);
    let kinds = (0..ROUNDS).flat_map(|round| (round == OUTAGE).then_some(NO_API_LONG).into_iter().chain(ROUND));
    for (place, kind) in (1..=FAULTS).zip(kinds) {
        match suffered(cluster, &kind, 1) {
            Ok(event) => {
                println!("      {place:>3} {}: {event}", event.fault);
                events.push(event);
                in_a_row = 0;
            }
            Err(error) => {
                let problem = format!("fault {place}, {}: {error:#}", kind.name);
                println!("      {problem}");
                problems.push(problem);
                in_a_row += 1;
            }
        }
        if in_a_row == HOPELESS {
            problems.push(format!("given up after {place} faults"));
            break;
        }
    }
    (events, problems)
}

/// The figures of each kind of fault.
fn kinds(events: &[Event]) -> Vec<Value> {
    let mut names: Vec<&str> = events.iter().map(|event| event.fault).collect();
    names.sort_unstable();
    names.dedup();
    let figures = |name: &str| {
        let of: Vec<&Event> = events.iter().filter(|event| event.fault == name).collect();
        let spread = |ms: fn(&Event) -> u64| Spread::of(of.iter().map(|event| Duration::from_millis(ms(event))));
        let sum = |count: fn(&Event) -> u64| of.iter().map(|event| count(event)).sum::<u64>();
        json!({
            "fault": name, "done": of.len(),
            "lost": sum(|it| it.lost), "doubled": sum(|it| it.doubled), "conjured": sum(|it| it.conjured),
            "writeGap": spread(|it| it.gap_ms), "copiesWhole": spread(|it| it.whole_ms),
            "overBudget": of.iter().filter(|event| event.missed()).count(),
        })
    };
    names.into_iter().map(figures).collect()
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
