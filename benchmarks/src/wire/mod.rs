//! Calls over gRPC on loopback: workers, their coordinator and a client in this one process, on its cores.
//!
//! Workers are whole: listeners, heartbeats, logs that are synced before an answer (one copy, mode sync, where nothing else
//! is said).

mod backup;
mod cluster;
mod copies;
mod echo;
mod fleet;
mod healing;
mod overload;
mod processes;
mod single;
mod writers;

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use tokio::runtime::Runtime;

use crate::row::Row;

/// Measures what copies cost, by their number and the mode.
///
/// # Errors
/// As [`rows`].
pub(crate) fn copies(sizes: &[u32], threads: usize, scratch: &Path) -> Result<Vec<Row>> {
    let runtime = runtime(threads)?;
    let rows = sizes.iter().map(|&memories| copies::rows(&runtime, memories, scratch));
    Ok(rows.collect::<Result<Vec<_>>>()?.concat())
}

/// Measures how copies are re-made after a disk was lost, and what writers feel meanwhile.
///
/// # Errors
/// As [`rows`].
pub(crate) fn healing(sizes: &[u32], threads: usize, scratch: &Path) -> Result<Vec<Row>> {
    let runtime = runtime(threads)?;
    let rows = sizes.iter().map(|&memories| healing::rows(&runtime, memories, scratch));
    Ok(rows.collect::<Result<Vec<_>>>()?.concat())
}

/// Measures what writers feel while backups are made.
///
/// # Errors
/// As [`rows`].
pub(crate) fn backup(sizes: &[u32], threads: usize, scratch: &Path) -> Result<Vec<Row>> {
    let runtime = runtime(threads)?;
    let rows = sizes.iter().map(|&memories| backup::rows(&runtime, memories, scratch));
    Ok(rows.collect::<Result<Vec<_>>>()?.concat())
}

/// Measures what becomes of requests that are more than the cluster takes, for so long.
///
/// # Errors
/// As [`rows`].
pub(crate) fn overload(sizes: &[u32], threads: usize, lasts: Duration, scratch: &Path) -> Result<Vec<Row>> {
    let runtime = runtime(threads)?;
    let rows = sizes.iter().map(|&memories| overload::rows(&runtime, memories, lasts, scratch));
    Ok(rows.collect::<Result<Vec<_>>>()?.concat())
}

fn runtime(threads: usize) -> Result<Runtime> {
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    builder.worker_threads(threads).enable_all().build().context("failed to start threads")
}

/// Measures one worker at all sizes, then fleets whose workers have at most as many memories as the largest of them.
///
/// # Errors
/// When a cluster does not start, or does not answer what it should.
pub(crate) fn rows(sizes: &[u32], threads: usize, scratch: &Path) -> Result<Vec<Row>> {
    let runtime = runtime(threads)?;
    let mut rows = Vec::new();
    for &memories in sizes {
        rows.extend(single::rows(&runtime, memories, threads, scratch)?);
    }
    rows.extend(fleet::rows(&runtime, sizes.iter().copied().max().unwrap_or(0), scratch)?);
    Ok(rows)
}
