//! Calls over gRPC on loopback: workers, their coordinator and a client in this one process, on its cores.
//!
//! Workers are whole: listeners, heartbeats, logs that are synced before an answer (one copy, mode sync).

mod cluster;
mod echo;
mod fleet;
mod single;

use std::path::Path;

use anyhow::{Context, Result};

use crate::row::Row;

/// Measures one worker at all sizes, then fleets whose workers have at most as many memories as the largest of them.
///
/// # Errors
/// When a cluster does not start, or does not answer what it should.
pub(crate) fn rows(sizes: &[u32], threads: usize, scratch: &Path) -> Result<Vec<Row>> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(threads)
        .enable_all()
        .build()
        .context("failed to start threads")?;
    let mut rows = Vec::new();
    for &memories in sizes {
        rows.extend(single::rows(&runtime, memories, threads, scratch)?);
    }
    rows.extend(fleet::rows(&runtime, sizes.iter().copied().max().unwrap_or(0), scratch)?);
    Ok(rows)
}
