//! gRPC calls on loopback: workers, coordinator and client in this process.
//!
//! Workers are complete: listeners, heartbeats, logs that are synced before a response (one replica, mode sync, unless stated otherwise).

mod cluster;
mod echo;
mod fleet;
mod learning;
mod overload;
mod processes;
mod replication;
mod single;
mod writers;

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use tokio::runtime::Runtime;

use crate::row::Row;

/// Measures the cost of replication, by number of replicas and mode.
///
/// # Errors
/// As [`rows`].
pub(crate) fn replication(sizes: &[u32], threads: usize, scratch: &Path) -> Result<Vec<Row>> {
    let runtime = runtime(threads)?;
    let wire_rows = sizes.iter().map(|&memories| replication::replication_rows(&runtime, memories, scratch));
    Ok(wire_rows.collect::<Result<Vec<_>>>()?.concat())
}

/// Measures replay buffers over loopback.
///
/// # Errors
/// As [`rows`].
pub(crate) fn replay(sizes: &[u32], threads: usize, scratch: &Path) -> Result<Vec<Row>> {
    let runtime = runtime(threads)?;
    let rows = sizes.iter().map(|&items| learning::replay::loopback_rows(&runtime, items, threads, scratch));
    Ok(rows.collect::<Result<Vec<_>>>()?.concat())
}

/// Measures federated runs over real connections, at each number of clients.
///
/// # Errors
/// As [`rows`].
pub(crate) fn federated(clients: &[u32], threads: usize, scratch: &Path) -> Result<Vec<Row>> {
    learning::federated::federated_rows(&runtime(threads)?, clients, scratch)
}

/// Measures trainings on clusters of one and two workers.
///
/// # Errors
/// A cluster does not start, or a run fails.
pub(crate) fn training(scratch: &Path) -> Result<Vec<Row>> {
    learning::training::training_rows(scratch)
}

/// Measures re-replication after the loss of a disk, and write latency meanwhile.
///
/// # Errors
/// As [`rows`].
pub(crate) fn re_replication(sizes: &[u32], threads: usize, scratch: &Path) -> Result<Vec<Row>> {
    let runtime = runtime(threads)?;
    let rows =
        sizes.iter().map(|&memories| replication::re_replication::re_replication_rows(&runtime, memories, scratch));
    Ok(rows.collect::<Result<Vec<_>>>()?.concat())
}

/// Measures write latency during backups.
///
/// # Errors
/// As [`rows`].
pub(crate) fn backup(sizes: &[u32], threads: usize, scratch: &Path) -> Result<Vec<Row>> {
    let runtime = runtime(threads)?;
    let rows = sizes.iter().map(|&memories| replication::backup::backup_rows(&runtime, memories, scratch));
    Ok(rows.collect::<Result<Vec<_>>>()?.concat())
}

/// Measures requests above capacity, for this duration.
///
/// # Errors
/// As [`rows`].
pub(crate) fn overload(sizes: &[u32], threads: usize, lasts: Duration, scratch: &Path) -> Result<Vec<Row>> {
    let runtime = runtime(threads)?;
    let rows = sizes.iter().map(|&memories| overload::overload_rows(&runtime, memories, lasts, scratch));
    Ok(rows.collect::<Result<Vec<_>>>()?.concat())
}

fn runtime(threads: usize) -> Result<Runtime> {
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    builder.worker_threads(threads).enable_all().build().context("failed to start threads")
}

/// Measures one worker at all sizes, then fleets whose workers have at most as many memories as the largest of them.
///
/// # Errors
/// When a cluster does not start, or returns unexpected results.
pub(crate) fn rows(sizes: &[u32], threads: usize, scratch: &Path) -> Result<Vec<Row>> {
    let runtime = runtime(threads)?;
    let mut rows = Vec::new();
    for &memories in sizes {
        rows.extend(single::single_worker_rows(&runtime, memories, threads, scratch)?);
    }
    rows.extend(fleet::fleet_rows(&runtime, sizes.iter().copied().max().unwrap_or(0), scratch)?);
    Ok(rows)
}
