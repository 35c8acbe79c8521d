//! Many workers: the quality of 50, and learning epochs of five.

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

/// Workers whose quality is asked for, and workers that learn.
const ASKED: u32 = 50;
const LEARNING: u32 = 5;

/// Memories per worker that learns; for a quick look fewer.
const EACH: u32 = 100_000;

/// Measures with at most `most` memories per worker.
pub(super) fn rows(runtime: &Runtime, most: u32, scratch: &Path) -> Result<Vec<Row>> {
    let each = most.min(EACH);
    let mut rows = quality(runtime, each, scratch)?;
    rows.extend(epochs(runtime, each * LEARNING, scratch)?);
    Ok(rows)
}

fn quality(runtime: &Runtime, memories: u32, scratch: &Path) -> Result<Vec<Row>> {
    eprintln!("wire: quality of {ASKED} workers");
    let cluster = runtime.block_on(Cluster::filled(Shape::plain(ASKED), memories, 1, scratch))?;
    let before = processor_time()?;
    let figure = measure::milliseconds(|| {
        let quality = runtime.block_on(cluster.client.quality(QualityOptions::default()))?;
        let counted = quality.vector.total().count;
        ensure!(counted == u64::from(memories), "quality is that of {counted} of {memories} memories");
        Ok(())
    })?;
    let spent = processor_time()? - before;
    // One more than the repeats ran, unmeasured.
    let calls = (figure.repeats + 1) * ASKED;
    let per_call_us = spent.as_secs_f64() * 1e6 / f64::from(calls);
    runtime.block_on(cluster.stop())?;
    let cpu = Figure { repeats: calls, ..measure::once(per_call_us) };
    Ok(vec![
        Row::lower(format!("quality of {ASKED} workers, aggregated by the client"), memories, "ms", figure)
            .promised([Budget::Absolute(5.0)]),
        Row::lower("processor time of one worker's part of it, client, heartbeats and all", memories, "us", cpu),
    ])
}

fn epochs(runtime: &Runtime, memories: u32, scratch: &Path) -> Result<Vec<Row>> {
    eprintln!("wire: learning epochs of {LEARNING} workers");
    let cluster = runtime.block_on(Cluster::filled(Shape::plain(LEARNING), memories, 1, scratch))?;
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
                let report = cluster.client.learn_epoch(run, n, DECAY, updates.clone()).await?;
                ensure!(report.outcome.applied == count, "{} of {count} updates applied", report.outcome.applied);
                let counted = report.quality.total().count;
                ensure!(counted == u64::from(memories), "quality is that of {counted} of {memories} memories");
                let told = cluster.client.broadcast_quality(run, n, &report.quality).await;
                ensure!(told == LEARNING as usize, "{told} of {LEARNING} workers took the quality");
                Ok(())
            })
        })
    };
    let some = learn(UPDATES)?;
    let all = learn(memories as usize)?;
    runtime.block_on(cluster.stop())?;
    let title = format!("learning epoch of {LEARNING} workers, one copy, sync, quality aggregated and broadcast");
    let budget = (memories == LEARNING * EACH).then_some(Budget::Absolute(5.0));
    Ok(vec![
        Row::lower(format!("{title}, 10,000 updates"), memories, "ms", some).promised(budget),
        Row::lower(format!("{title}, all memories updated"), memories, "ms", all),
    ])
}

/// What this process has used of its processors so far.
fn processor_time() -> Result<Duration> {
    let time = clock_gettime(ClockId::CLOCK_PROCESS_CPUTIME_ID).context("failed to read the clock of the process")?;
    Ok(time.into())
}
