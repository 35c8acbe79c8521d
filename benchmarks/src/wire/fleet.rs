//! Many workers: quality of 50, and learning epochs of five.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use engram_client::{EpochUpdates, QualityOptions, Signals, Updates};
use engram_memory::{LearningEpoch, RunId};
use nix::time::{ClockId, clock_gettime};
use tokio::runtime::Runtime;

use super::cluster::{Cluster, Shape};
use crate::measure;
use crate::population::{self, DECAY, QUALITY, UPDATES};
use crate::row::{Budget, Figure, Row};

/// Workers of the quality suite, and of the learning suite.
const QUALITY_WORKERS: u32 = 50;
const LEARNING_WORKERS: u32 = 5;

/// Maximum memories per learning worker.
const EACH: u32 = 100_000;

/// Measures with at most `most` memories per worker.
pub(super) fn fleet_rows(runtime: &Runtime, most: u32, scratch: &Path) -> Result<Vec<Row>> {
    let each = most.min(EACH);
    let mut rows = quality(runtime, each, scratch)?;
    rows.extend(epochs(runtime, each * LEARNING_WORKERS, scratch)?);
    Ok(rows)
}

fn quality(runtime: &Runtime, memories: u32, scratch: &Path) -> Result<Vec<Row>> {
    eprintln!("wire: quality of {QUALITY_WORKERS} workers");
    let cluster = runtime.block_on(Cluster::start_filled(Shape::plain(QUALITY_WORKERS), memories, 1, scratch))?;
    let before = processor_time()?;
    let figure = measure::milliseconds(|| {
        let quality = runtime.block_on(cluster.client.quality(QualityOptions::default()))?;
        let counted = quality.vector.total().count;
        ensure!(counted == u64::from(memories), "quality covers {counted} of {memories} memories");
        Ok(())
    })?;
    let spent = processor_time()? - before;
    // One more than the repeats, for the warm-up.
    let calls = (figure.repeats + 1) * QUALITY_WORKERS;
    let per_call_us = spent.as_secs_f64() * 1e6 / f64::from(calls);
    runtime.block_on(cluster.stop())?;
    let cpu = Figure { repeats: calls, ..measure::once(per_call_us) };
    Ok(vec![
        Row::lower(format!("quality of {QUALITY_WORKERS} workers, aggregated by the client"), memories, "ms", figure)
            .with_budgets([Budget::Absolute(5.0)]),
        Row::lower("processor time per worker, including client and heartbeats", memories, "us", cpu),
    ])
}

fn epochs(runtime: &Runtime, memories: u32, scratch: &Path) -> Result<Vec<Row>> {
    eprintln!("wire: learning epochs of {LEARNING_WORKERS} workers");
    let cluster = runtime.block_on(Cluster::start_filled(Shape::plain(LEARNING_WORKERS), memories, 1, scratch))?;
    // The driver of a run is a worker.
    let driver = runtime.block_on(cluster.peer_client())?;
    let mut n = 0;
    let mut learn = |count: usize| {
        let ids: Vec<_> = population::distinct(count, memories).into_iter().map(population::id).collect();
        let count = ids.len() as u64;
        let updates = Updates { ids, signals: Signals::Quality(QUALITY), ..Updates::default() };
        let updates = EpochUpdates::ById(updates);
        measure::milliseconds(|| {
            n += 1;
            runtime.block_on(async {
                let (run, n) = (RunId(1), LearningEpoch(n));
                let report = driver.learn_epoch(run, n, DECAY, updates.clone()).await?;
                ensure!(report.outcome.applied == count, "{} of {count} updates applied", report.outcome.applied);
                let counted = report.quality.total().count;
                ensure!(counted == u64::from(memories), "quality covers {counted} of {memories} memories");
                let received = driver.broadcast_quality(run, n, &report.quality).await;
                ensure!(
                    received == LEARNING_WORKERS as usize,
                    "{received} of {LEARNING_WORKERS} workers received the quality"
                );
                Ok(())
            })
        })
    };
    let some = learn(UPDATES)?;
    let all = learn(memories as usize)?;
    runtime.block_on(cluster.stop())?;
    let title =
        format!("learning epoch of {LEARNING_WORKERS} workers, one replica, sync, quality aggregated and broadcast");
    let budget = (memories == LEARNING_WORKERS * EACH).then_some(Budget::Absolute(5.0));
    Ok(vec![
        Row::lower(format!("{title}, 10,000 updates"), memories, "ms", some).with_budgets(budget),
        Row::lower(format!("{title}, all memories updated"), memories, "ms", all),
    ])
}

/// Returns the processor time that this process has used.
fn processor_time() -> Result<Duration> {
    let time = clock_gettime(ClockId::CLOCK_PROCESS_CPUTIME_ID).context("failed to read the clock of the process")?;
    Ok(time.into())
}
