//! A worker loses its disk: how long until there are as many copies as before, and what writers feel meanwhile.
//!
//! Writers send on a schedule, at half of what the cluster takes, and a request counts from when it was due: one that waits
//! makes those behind it late too. Until others serve what the lost worker led, writes wait for that: it is failover, which has a
//! row of its own; what copies cost is counted from then on.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use engram_api::DurabilityMode;
use engram_client::{Client, Session, Signals, Updates};
use tokio::runtime::Runtime;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{interval, sleep, timeout};

use super::cluster::{Cluster, Shape};
use crate::measure;
use crate::population::{self, PARTITIONS, QUALITY};
use crate::row::{Budget, Figure, Row};

const WORKERS: u32 = 5;
const COPIES: u32 = 2;
/// Updates of a request, and writers that send them.
const FEW: usize = 100;
const WRITERS: usize = 8;
/// How long is looked for the highest rate, and at what nobody troubles.
const FULL: Duration = Duration::from_secs(3);
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
        let sessions: Vec<Arc<Session>> = (0..WRITERS).map(|_| Arc::new(cluster.client.session())).collect();
        let full = rate(&sessions, memories).await?;
        let pause = Duration::from_secs_f64(2.0 * WRITERS as f64 / full);
        eprintln!("healing: {full:.0} requests a second, half of them from now on");

        let writers = Writers::start(&sessions, memories, pause);
        sleep(QUIET).await;
        let quiet = writers.stop().await?;

        let lost = cluster.lose(0).await?;
        ensure!(lost > 0 && !cluster.is_whole()?, "nothing was lost with the disk");
        let begun = Instant::now();
        let writers = Writers::start(&sessions, memories, pause);
        everywhere(&sessions[0], memories).await?;
        let failed_over = begun.elapsed();
        writers.stop().await?;
        ensure!(!cluster.is_whole()?, "the copies are there before anybody could write");
        let writers = Writers::start(&sessions, memories, pause);
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
                quantile(&healing, 0.5),
            )
            .beside(QUIET_NAME, quantile(&quiet, 0.5)),
            Row::lower(
                format!("{name}: write of {FEW} updates meanwhile, p99"),
                memories,
                "ms",
                quantile(&healing, 0.99),
            )
            .beside(QUIET_NAME, quantile(&quiet, 0.99))
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

/// Requests a second when each writer sends the next as soon as the last is answered.
async fn rate(sessions: &[Arc<Session>], memories: u32) -> Result<f64> {
    let writers = Writers::start(sessions, memories, Duration::ZERO);
    sleep(FULL).await;
    Ok(writers.stop().await?.len() as f64 / FULL.as_secs_f64())
}

/// Writers under way; each notes how many milliseconds its requests took.
struct Writers {
    stop: watch::Sender<bool>,
    running: JoinSet<Result<Vec<f64>>>,
}

impl Writers {
    fn start(sessions: &[Arc<Session>], memories: u32, pause: Duration) -> Self {
        let stop = watch::Sender::new(false);
        let mut running = JoinSet::new();
        for (number, session) in sessions.iter().enumerate() {
            let (session, stopped) = (Arc::clone(session), stop.subscribe());
            running.spawn(async move {
                let mut took_ms = Vec::new();
                let mut schedule = interval(pause.max(Duration::from_nanos(1)));
                while !*stopped.borrow() {
                    let due = schedule.tick().await.into_std();
                    let begun = if pause.is_zero() { Instant::now() } else { due };
                    let ids = population::drawn(FEW, memories, (number + took_ms.len() * WRITERS) as u64);
                    let updates = Updates { ids, signals: Signals::Quality(QUALITY), ..Updates::default() };
                    let written = session.reinforce(updates).await?;
                    ensure!(written.outcome.applied == FEW as u64, "{} updates were applied", written.outcome.applied);
                    took_ms.push(begun.elapsed().as_secs_f64() * 1e3);
                }
                Ok(took_ms)
            });
        }
        Self { stop, running }
    }

    async fn stop(mut self) -> Result<Vec<f64>> {
        self.stop.send_replace(true);
        let mut took_ms = Vec::new();
        while let Some(ended) = self.running.join_next().await {
            took_ms.extend(ended.context("a writer panicked")??);
        }
        took_ms.sort_by(f64::total_cmp);
        Ok(took_ms)
    }
}

/// The value below which `share` of the ascending `values` lie, among how many.
fn quantile(values: &[f64], share: f64) -> Figure {
    let place = ((values.len() as f64 * share) as usize).min(values.len().saturating_sub(1));
    Figure { repeats: values.len() as u32, ..measure::once(values.get(place).copied().unwrap_or(f64::NAN)) }
}

async fn check(client: &Client, memories: u32) -> Result<()> {
    let held = client.digest().await?.memories;
    ensure!(held == u64::from(memories), "{held} of {memories} memories are there");
    Ok(())
}
