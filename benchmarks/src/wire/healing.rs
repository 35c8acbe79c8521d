//! A worker loses its disk: how long until there are as many copies as before, and what writers feel meanwhile.
//!
//! Until others serve what the lost worker led, writes wait for that: it is failover, which has a row of its own; what copies cost is
//! counted from then on.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use engram_api::DurabilityMode;
use engram_client::{Client, Session, Signals, Updates};
use tokio::runtime::Runtime;
use tokio::time::{sleep, timeout};

use super::cluster::{Cluster, Shape};
use super::writers::{FEW, Load};
use crate::measure;
use crate::population::{self, PARTITIONS, QUALITY};
use crate::row::{Budget, Row};

const WORKERS: u32 = 5;
const COPIES: u32 = 2;
/// How long is looked at what nobody troubles.
const QUIET: Duration = Duration::from_secs(10);
const DEADLINE: Duration = Duration::from_secs(600);
const POLL: Duration = Duration::from_millis(20);
const QUIET_NAME: &str = "before";

pub(super) fn rows(runtime: &Runtime, memories: u32, scratch: &Path) -> Result<Vec<Row>> {
    eprintln!("healing: {memories} memories, {COPIES} copies on {WORKERS} workers");
    runtime.block_on(async {
        let shape = Shape { workers: WORKERS, copies: COPIES, durability: DurabilityMode::Replicated };
        let mut cluster = Cluster::filled(shape, memories, 1, scratch).await?;
        whole(&cluster).await?;
        let load = Load::half_of_what_is_taken(&cluster.client, memories).await?;
        eprintln!("healing: {:.0} requests a second from now on, half of what is taken", load.per_second());

        let writers = load.start();
        sleep(QUIET).await;
        let quiet = writers.stop().await?;

        let lost = cluster.lose(0).await?;
        ensure!(lost > 0 && !cluster.is_whole()?, "nothing was lost with the disk");
        let begun = Instant::now();
        let writers = load.start();
        everywhere(&cluster.client.session(), memories).await?;
        let failed_over = begun.elapsed();
        writers.stop().await?;
        ensure!(!cluster.is_whole()?, "the copies are there before anybody could write");
        let writers = load.start();
        whole(&cluster).await?;
        let took = begun.elapsed();
        let healing = writers.stop().await?;
        check(&cluster.client, memories).await?;
        cluster.stop().await?;

        let name = format!("{WORKERS} workers, R = {COPIES}, a disk lost");
        let lost = f64::from(memories) * lost as f64 / f64::from(PARTITIONS);
        Ok(vec![
            Row::lower(
                format!("{name}: until all is served again"),
                memories,
                "s",
                measure::once(failed_over.as_secs_f64()),
            ),
            Row::lower(
                format!("{name}: until all copies are there again"),
                memories,
                "s",
                measure::once(took.as_secs_f64()),
            ),
            Row::higher(
                format!("{name}: memories copied"),
                memories,
                "M memories/s",
                measure::once(lost / took.as_secs_f64() / 1e6),
            ),
            Row::lower(
                format!("{name}: write of {FEW} updates meanwhile, p50"),
                memories,
                "ms",
                measure::quantile(&healing, 0.5),
            )
            .beside(QUIET_NAME, measure::quantile(&quiet, 0.5)),
            Row::lower(
                format!("{name}: write of {FEW} updates meanwhile, p99"),
                memories,
                "ms",
                measure::quantile(&healing, 0.99),
            )
            .beside(QUIET_NAME, measure::quantile(&quiet, 0.99))
            .promised([Budget::Ratio { peer: QUIET_NAME.to_owned(), at_least: 0.5 }]),
        ])
    })
}

/// Waits until every partition has all its copies.
async fn whole(cluster: &Cluster) -> Result<()> {
    let healed = async {
        loop {
            if cluster.is_whole()? {
                return Ok(());
            }
            sleep(POLL).await;
        }
    };
    timeout(DEADLINE, healed).await.context("the copies were not made in time")?
}

/// Writes to every partition, and waits until all of them have taken it.
async fn everywhere(session: &Session, memories: u32) -> Result<()> {
    // So many ids that each partition has some.
    let ids = population::drawn(64 * PARTITIONS as usize, memories, 1);
    session.reinforce(Updates { ids, signals: Signals::Quality(QUALITY), ..Updates::default() }).await?;
    Ok(())
}

async fn check(client: &Client, memories: u32) -> Result<()> {
    let held = client.digest().await?.memories;
    ensure!(held == u64::from(memories), "{held} of {memories} memories are there");
    Ok(())
}
