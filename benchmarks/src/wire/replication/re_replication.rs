//! A worker loses its disk: duration of re-replication, and write latency meanwhile.
//!
//! Writes first wait for failover of the lost primaries, which has its own row; re-replication is measured from then on.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use engram_api::DurabilityMode;
use engram_client::{Client, Session, Signals, Updates};
use tokio::runtime::Runtime;
use tokio::time::{sleep, timeout};

use crate::measure;
use crate::population::{self, PARTITIONS, QUALITY};
use crate::row::{Budget, Row};
use crate::wire::cluster::{Cluster, Shape};
use crate::wire::writers::{FEW, Load};

const WORKERS: u32 = 5;
const REPLICAS: u32 = 2;
/// Duration of the baseline without faults.
const QUIET: Duration = Duration::from_secs(10);
const DEADLINE: Duration = Duration::from_secs(600);
const POLL: Duration = Duration::from_millis(20);
const QUIET_NAME: &str = "before";

pub(in crate::wire) fn re_replication_rows(runtime: &Runtime, memories: u32, scratch: &Path) -> Result<Vec<Row>> {
    eprintln!("re-replication: {memories} memories, {REPLICAS} replicas on {WORKERS} workers");
    runtime.block_on(async {
        let shape = Shape { workers: WORKERS, replicas: REPLICAS, durability: DurabilityMode::Replicated };
        let mut cluster = Cluster::start_filled(shape, memories, 1, scratch).await?;
        wait_until_fully_replicated(&cluster).await?;
        let load = Load::at_half_capacity(&cluster.client, memories).await?;
        eprintln!("re-replication: sending {:.0} requests per second, half of capacity", load.per_second());

        let writers = load.start();
        sleep(QUIET).await;
        let quiet = writers.stop().await?;

        let lost = cluster.lose_disk(0).await?;
        ensure!(lost > 0 && !cluster.is_fully_replicated()?, "no replica was lost with the disk");
        let begun = Instant::now();
        let writers = load.start();
        write_to_every_partition(&cluster.client.session(), memories).await?;
        let failed_over = begun.elapsed();
        writers.stop().await?;
        ensure!(!cluster.is_fully_replicated()?, "re-replication finished before the first write");
        let writers = load.start();
        wait_until_fully_replicated(&cluster).await?;
        let took = begun.elapsed();
        let durations = writers.stop().await?;
        check(&cluster.client, memories).await?;
        cluster.stop().await?;

        let name = format!("{WORKERS} workers, R = {REPLICAS}, a disk lost");
        let lost = f64::from(memories) * lost as f64 / f64::from(PARTITIONS);
        Ok(vec![
            Row::lower(
                format!("{name}: failover of all partitions"),
                memories,
                "s",
                measure::once(failed_over.as_secs_f64()),
            ),
            Row::lower(format!("{name}: re-replication"), memories, "s", measure::once(took.as_secs_f64())),
            Row::higher(
                format!("{name}: replicated memories"),
                memories,
                "M memories/s",
                measure::once(lost / took.as_secs_f64() / 1e6),
            ),
            Row::lower(
                format!("{name}: write of {FEW} updates meanwhile, p50"),
                memories,
                "ms",
                measure::quantile(&durations, 0.5),
            )
            .with_peer(QUIET_NAME, measure::quantile(&quiet, 0.5)),
            Row::lower(
                format!("{name}: write of {FEW} updates meanwhile, p99"),
                memories,
                "ms",
                measure::quantile(&durations, 0.99),
            )
            .with_peer(QUIET_NAME, measure::quantile(&quiet, 0.99))
            .with_budgets([Budget::Ratio { peer: QUIET_NAME.to_owned(), at_least: 0.5 }]),
        ])
    })
}

/// Waits until every partition has all its replicas.
async fn wait_until_fully_replicated(cluster: &Cluster) -> Result<()> {
    let replicated = async {
        loop {
            if cluster.is_fully_replicated()? {
                return Ok(());
            }
            sleep(POLL).await;
        }
    };
    timeout(DEADLINE, replicated).await.context("re-replication timed out")?
}

/// Writes to every partition and waits for all responses.
async fn write_to_every_partition(session: &Session, memories: u32) -> Result<()> {
    // Enough ids that each partition has some.
    let ids = population::drawn(64 * PARTITIONS as usize, memories, 1);
    session.reinforce(Updates { ids, signals: Signals::Quality(QUALITY), ..Updates::default() }).await?;
    Ok(())
}

async fn check(client: &Client, memories: u32) -> Result<()> {
    let held = client.digest().await?.memories;
    ensure!(held == u64::from(memories), "{held} of {memories} memories exist");
    Ok(())
}
