//! Cost of replication: small requests one after another, and large ones in parallel, by number of replicas and durability mode.
//!
//! The lower bound is the disk's: as many concurrent loops of write and `fdatasync` as there are logs on it.

pub(in crate::wire) mod backup;
pub(in crate::wire) mod re_replication;

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use engram_api::DurabilityMode;
use engram_client::{Signals, Updates};
use engram_store::FileDisk;
use engram_store::disk::Disk as _;
use futures::stream::{self, StreamExt as _, TryStreamExt as _};
use tokio::runtime::Runtime;

use crate::measure;
use crate::population::{self, QUALITY, UPDATES};
use crate::row::{Figure, Row};
use crate::wire::cluster::{Cluster, Shape};

const WORKERS: u32 = 5;
/// Updates of a small request: about one for each partition that it reaches.
const FEW: usize = 100;
/// Large requests per repeat, and how many are in flight.
const BATCHES: usize = 20;
const IN_FLIGHT: usize = 8;
/// Approximate bytes that a small request writes to each log.
const PAGE: usize = 4 << 10;
const SYNCS: usize = 100;

pub(super) fn replication_rows(runtime: &Runtime, memories: u32, scratch: &Path) -> Result<Vec<Row>> {
    let floor = floor(scratch)?;
    let mut rows = Vec::new();
    let modes = [DurabilityMode::Sync, DurabilityMode::Replicated, DurabilityMode::Async];
    for (replicas, durability) in (1..=3).flat_map(|replicas| modes.map(|mode| (replicas, mode))) {
        // With one replica, `Replicated` equals `Sync`.
        if replicas == 1 && durability == DurabilityMode::Replicated {
            continue;
        }
        eprintln!("replication: {memories} memories, {replicas} replicas, {durability:?}");
        let shape = Shape { workers: WORKERS, replicas, durability };
        let cluster = runtime.block_on(Cluster::start_filled(shape, memories, 1, scratch))?;
        let name = format!("{WORKERS} workers, R = {replicas}, {durability:?}");
        let few = measure::milliseconds(|| send(runtime, &cluster, memories, 1, FEW))?;
        let many = measure::milliseconds(|| send(runtime, &cluster, memories, BATCHES, UPDATES))?;
        runtime.block_on(cluster.stop())?;
        let rate = measure::millions_per_second(BATCHES * UPDATES, many);
        rows.push(
            Row::lower(format!("{name}: a request of {FEW} updates"), memories, "ms", few)
                .with_peer(&format!("{WORKERS} concurrent fdatasync"), floor),
        );
        rows.push(Row::higher(
            format!("{name}: requests of 10,000 updates, {IN_FLIGHT} in flight"),
            memories,
            "M updates/s",
            rate,
        ));
    }
    Ok(rows)
}

fn send(runtime: &Runtime, cluster: &Cluster, memories: u32, requests: usize, updates: usize) -> Result<()> {
    let session = cluster.client.session();
    let calls = (0..requests).map(|number| {
        let ids = population::drawn(updates, memories, number as u64);
        session.reinforce(Updates { ids, signals: Signals::Quality(QUALITY), ..Updates::default() })
    });
    let answers = stream::iter(calls).buffer_unordered(IN_FLIGHT);
    let counted = answers.try_fold(0, async |sum, written| Ok(sum + written.outcome.applied));
    let applied = runtime.block_on(counted)?;
    ensure!(applied == (requests * updates) as u64, "{applied} updates were applied");
    Ok(())
}

/// Measures a write and `fdatasync` of one page in milliseconds, while the other logs' files do the same.
fn floor(scratch: &Path) -> Result<Figure> {
    let folder = tempfile::Builder::new().prefix("engram-bench-").tempdir_in(scratch);
    let folder = folder.with_context(|| format!("failed to create a folder in {}", scratch.display()))?;
    let done = AtomicBool::new(false);
    let sync = |number: u32, record: bool| -> Result<Vec<f64>> {
        let disk = FileDisk::new(folder.path().join(number.to_string())).context("failed to create a folder")?;
        let file = disk.create("bare").context("failed to create a file")?;
        file.preallocate((SYNCS * PAGE) as u64).context("failed to preallocate a file")?;
        let (page, mut took_ms) = (vec![7; PAGE], Vec::new());
        while if record { took_ms.len() < SYNCS } else { !done.load(Ordering::Relaxed) } {
            let begun = Instant::now();
            file.write_at((took_ms.len() % SYNCS * PAGE) as u64, &page).context("failed to write")?;
            file.sync_data().context("failed to sync")?;
            took_ms.push(begun.elapsed().as_secs_f64() * 1e3);
        }
        done.store(true, Ordering::Relaxed);
        Ok(took_ms)
    };
    std::thread::scope(|scope| {
        let others: Vec<_> = (1..WORKERS).map(|number| scope.spawn(move || sync(number, false))).collect();
        let took_ms = sync(0, true);
        done.store(true, Ordering::Relaxed);
        for other in others {
            other.join().map_err(|_| anyhow::anyhow!("a loop of syncs panicked"))??;
        }
        Ok(measure::lowest(took_ms?))
    })
}
