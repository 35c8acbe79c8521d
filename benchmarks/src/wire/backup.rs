//! What writers feel of backups: one after another, to a folder on the disk that has the logs as well.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use serde_json::{Value, json};
use tokio::runtime::Runtime;
use tokio::task::spawn_blocking;
use tokio::time::sleep;

use super::processes::Cluster;
use super::writers::{FEW, Load};
use crate::measure;
use crate::row::{Budget, Row};

const WORKERS: u32 = 3;
const COPIES: u32 = 2;
/// One is over too soon for a p99.
const BACKUPS: u32 = 10;
/// How long is looked at what nobody troubles.
const QUIET: Duration = Duration::from_secs(30);
const QUIET_NAME: &str = "before";

pub(super) fn rows(runtime: &Runtime, memories: u32, scratch: &Path) -> Result<Vec<Row>> {
    eprintln!("backup: {memories} memories, {COPIES} copies on {WORKERS} workers");
    // Nothing is to be evicted, however unevenly ids hash.
    let capacity = json!({ "memories": 2 * u64::from(memories) + 1_000_000 });
    let spec = json!({ "workers": WORKERS, "replicationFactor": COPIES, "capacity": capacity });
    let cluster = Arc::new(Cluster::start(scratch, &spec, |command| Ok(command.spawn()?))?);
    runtime.block_on(async {
        let client = cluster.filled(memories).await?;
        let load = Load::half_of_what_is_taken(&client, memories).await?;
        eprintln!("backup: {:.0} requests a second from now on, half of what is taken", load.per_second());

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

        let name = format!("{WORKERS} workers, R = {COPIES}, {BACKUPS} backups");
        let beside_quiet = |says: &str, share| {
            let ours = measure::quantile(&meanwhile, share);
            Row::lower(format!("{name}: write of {FEW} updates meanwhile, {says}"), memories, "ms", ours)
                .beside(QUIET_NAME, measure::quantile(&quiet, share))
        };
        Ok(vec![
            Row::lower(format!("{name}: one backup"), memories, "s", measure::lowest(took_s)),
            Row::lower(format!("{name}: a memory of a backup"), memories, "bytes", {
                measure::once(bytes as f64 / f64::from(memories))
            }),
            beside_quiet("p50", 0.5),
            beside_quiet("p99", 0.99).promised([Budget::Ratio { peer: QUIET_NAME.to_owned(), at_least: 0.5 }]),
        ])
    })
}

/// Makes a backup of all. Answers how many bytes it has.
fn back_up(cluster: &Cluster, number: u32) -> Result<u64> {
    let (name, to) = (format!("backup-{number}"), cluster.folder().join("backups"));
    let to = to.to_str().context("the scratch folder has a name that is no text")?;
    let told = cluster.engram(["snapshot", "create", &name, "--to", to, "-o", "json"])?;
    let made: Value = serde_json::from_slice(&told).context("engram snapshot create did not write JSON")?;
    made["items"][0]["bytes"].as_u64().context("engram snapshot create tells no bytes")
}
