//! Replay buffers over gRPC on loopback: one client, one worker.

use std::path::Path;

use anyhow::{Result, ensure};
use engram_api::DurabilityMode;
use engram_client::{Buffer, BufferSpec, Column, DType, Field, Items, Sample, SampleBy};
use engram_memory::mix64;
use tokio::runtime::Runtime;

use crate::measure::{self, scaled};
use crate::replay::{BATCH, INSERT, ITEM_BYTES};
use crate::row::{Budget, Row};
use crate::wire::cluster::{Cluster, Shape};

/// Exponents of priorities and importance weights.
const ALPHA: f64 = 0.6;
const BETA: f64 = 0.4;

pub(in crate::wire) fn loopback_rows(
    runtime: &Runtime,
    items: u32,
    threads: usize,
    scratch: &Path,
) -> Result<Vec<Row>> {
    eprintln!("replay: {items} items over loopback");
    let shape = Shape { durability: DurabilityMode::Async, ..Shape::plain(1) };
    let cluster = runtime.block_on(Cluster::start(shape, items, threads, scratch))?;
    // Room for the inserts that are measured, so that sampling sees `items` of them.
    let spec = BufferSpec::new("bench", fields(), u64::from(items));
    let buffer = runtime.block_on(cluster.client.create_buffer(&spec))?;
    runtime.block_on(fill(&buffer, items))?;
    let mut step = 0;
    let mut handles = Vec::new();
    let sample = measure::milliseconds(|| {
        step += 1;
        let by = SampleBy::Prioritized { alpha: ALPHA, beta: BETA };
        let batch = runtime.block_on(buffer.sample(Sample::new(by, BATCH as u32, 42, step)))?;
        let bytes: usize = batch.columns.iter().map(|column| column.data.len()).sum();
        ensure!(batch.len() == BATCH && bytes == BATCH * ITEM_BYTES, "a batch is incomplete");
        handles = batch.handles;
        Ok::<_, anyhow::Error>(())
    })?;
    let update = measure::milliseconds(|| {
        step += 1;
        let priorities: Vec<f64> = (0..BATCH as u64).map(|row| priority(step ^ row)).collect();
        let changed = runtime.block_on(buffer.update_priorities(&handles, &priorities))?;
        ensure!(changed.stale == 0, "{} items are gone", changed.stale);
        Ok::<_, anyhow::Error>(())
    })?;
    let insert = measure::milliseconds(|| {
        step += 1;
        let appended = runtime.block_on(buffer.append(rows(INSERT, step)))?;
        ensure!(appended.handles.len() == INSERT, "an insert is incomplete");
        Ok::<_, anyhow::Error>(())
    })?;
    runtime.block_on(cluster.stop())?;
    let budget = (items == 100_000).then(|| Budget::Ratio { peer: "reverb".to_owned(), at_least: 10.0 });
    let row = |title: &str, figure| Row::lower(title, items, "us", scaled(figure, 1e3));
    Ok(vec![
        row("over loopback: prioritized sample of 512 items of 256 B", sample)
            .workload("replay-loopback-sample")
            .with_budgets(budget),
        row("over loopback: 512 new priorities", update).workload("replay-loopback-update"),
        row("over loopback: insert of 4,096 items", insert).workload("replay-loopback-insert"),
    ])
}

fn fields() -> Vec<Field> {
    let field =
        |name: &str, dtype, shape: &[u32]| Field { name: name.into(), dtype, shape: shape.to_vec(), jagged: false };
    vec![field("obs", DType::Float32, &[2, 31]), field("act", DType::Int32, &[1]), field("rew", DType::Float32, &[1])]
}

async fn fill(buffer: &Buffer, items: u32) -> Result<()> {
    for start in (0..items as usize).step_by(INSERT) {
        buffer.append(rows(INSERT.min(items as usize - start), start as u64)).await?;
    }
    Ok(())
}

fn rows(count: usize, seed: u64) -> Items {
    let column = |name: &str, dtype, shape: &[u32]| {
        let bytes = 4 * count * shape.iter().product::<u32>() as usize;
        Column::new(name, dtype, shape.to_vec(), vec![seed as u8; bytes])
    };
    Items {
        count,
        columns: vec![
            column("obs", DType::Float32, &[2, 31]),
            column("act", DType::Int32, &[1]),
            column("rew", DType::Float32, &[1]),
        ],
        priorities: (0..count as u64).map(|row| priority(seed ^ row)).collect(),
        ..Items::default()
    }
}

/// Returns a priority from 1 to 101.
fn priority(number: u64) -> f64 {
    1.0 + (mix64(number) % 10_000) as f64 / 100.0
}
