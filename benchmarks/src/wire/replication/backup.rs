//! Write latency during backups: one after another, to a folder on the disk that also has the logs.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use serde_json::{Value, json};
use tokio::runtime::Runtime;
use tokio::task::spawn_blocking;
use tokio::time::sleep;

use crate::measure;
use crate::row::{Budget, Row};
use crate::wire::processes::Cluster;
use crate::wire::writers::{FEW, Load};

const WORKERS: u32 = 3;
const REPLICAS: u32 = 2;
/// Minimum number of backups: one is too short for a p99.
const BACKUPS: u32 = 10;
/// Duration of the baseline without backups.
const QUIET: Duration = Duration::from_secs(30);
const QUIET_NAME: &str = "before";

pub(in crate::wire) fn backup_rows(runtime: &Runtime, memories: u32, scratch: &Path) -> Result<Vec<Row>> {
    eprintln!("backup: {memories} memories, {REPLICAS} replicas on {WORKERS} workers");
    // Large enough that no memory is evicted, however unevenly ids hash.
    let capacity = json!({ "memories": 2 * u64::from(memories) + 1_000_000 });
    let spec = json!({ "workers": WORKERS, "replicationFactor": REPLICAS, "capacity": capacity });
    let cluster = Arc::new(Cluster::start(scratch, &spec, |command| Ok(command.spawn()?))?);
    runtime.block_on(async {
        let client = cluster.connect_and_fill(memories).await?;
        let load = Load::at_half_capacity(&client, memories).await?;
        eprintln!("backup: sending {:.0} requests per second, half of capacity", load.per_second());

        let writers = load.start();
        sleep(QUIET).await;
        let quiet = writers.stop().await?;

        let writers = load.start();
        let (mut took_s, mut bytes) = (Vec::new(), 0);
        for number in 0..BACKUPS {
            let (cluster, begun) = (Arc::clone(&cluster), Instant::now());
            bytes = spawn_blocking(move || back_up(&cluster, number)).await.context("a backup panicked")??;
            took_s.push(begun.elapsed().as_secs_f64());
        }
        let meanwhile = writers.stop().await?;

        let name = format!("{WORKERS} workers, R = {REPLICAS}, {BACKUPS} backups");
        let with_baseline = |says: &str, share| {
            let ours = measure::quantile(&meanwhile, share);
            Row::lower(format!("{name}: write of {FEW} updates meanwhile, {says}"), memories, "ms", ours)
                .with_peer(QUIET_NAME, measure::quantile(&quiet, share))
        };
        Ok(vec![
            Row::lower(format!("{name}: one backup"), memories, "s", measure::lowest(took_s)),
            Row::lower(format!("{name}: a memory of a backup"), memories, "bytes", {
                measure::once(bytes as f64 / f64::from(memories))
            }),
            with_baseline("p50", 0.5),
            with_baseline("p99", 0.99).with_budgets([Budget::Ratio { peer: QUIET_NAME.to_owned(), at_least: 0.5 }]),
        ])
    })
}

/// Backs up all partitions and returns the size in bytes.
fn back_up(cluster: &Cluster, number: u32) -> Result<u64> {
    let (name, to) = (format!("backup-{number}"), cluster.folder().join("backups"));
    let to = to.to_str().context("the path of the scratch folder is not UTF-8")?;
    let output = cluster.engram(["snapshot", "create", &name, "--to", to, "-o", "json"])?;
    let snapshot: Value = serde_json::from_slice(&output).context("engram snapshot create did not write JSON")?;
    snapshot["items"][0]["bytes"].as_u64().context("engram snapshot create returned no size")
}
