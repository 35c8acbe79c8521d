//! Random histories: after every batch the digests of device and CPU are equal.

use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};

use super::Part;
use crate::random_history::History;
use crate::report::PartResult;

/// Average updates per batch.
const BATCH: u64 = 5_000;
/// After this many batches every kind of operation must have occurred.
const MANY_BATCHES: usize = 100;
/// Interval of progress reports.
const PROGRESS: Duration = Duration::from_secs(30);

/// Runs one history.
///
/// # Errors
/// When the device cannot be opened. A difference panics.
pub(super) fn run(part: &Part) -> Result<PartResult> {
    let (mut said, updates) = (Instant::now(), part.updates);
    let done = History::new(part.open()?, part.seed).run(updates as usize, batches(updates), |done| {
        if said.elapsed() >= PROGRESS {
            said = Instant::now();
            eprintln!("{} of {updates} updates", done.updates);
        }
    });
    ensure!(done.is_complete() || done.batches < MANY_BATCHES, "some kind of operation never occurred: {done:?}");
    Ok(PartResult::passed(format!(
        "{} updates in {} batches, {} folds, {} upserts, {} evictions, equal digests after each batch",
        done.updates, done.batches, done.folds, done.upserts, done.evictions
    )))
}

/// Runs several drivers of one process concurrently, each with its own streams and memory.
///
/// # Errors
/// When a device cannot be opened, or a history differs.
pub(super) fn drivers(part: &Part) -> Result<PartResult> {
    let (drivers, updates) = (part.contexts.max(1), part.updates.div_ceil(part.contexts.max(1)));
    // All drivers are opened before the first history starts.
    let opened: Vec<_> = (0..drivers).map(|_| part.open()).collect::<Result<_>>()?;
    let results = thread::scope(|scope| {
        let started: Vec<_> = (100..)
            .zip(opened)
            .map(|(seed, driver)| {
                scope.spawn(move || History::new(driver, seed).run(updates as usize, batches(updates), |_| ()).updates)
            })
            .collect();
        started.into_iter().map(thread::ScopedJoinHandle::join).collect::<Vec<_>>()
    });
    ensure!(results.iter().all(Result::is_ok), "a history differs");
    let all: usize = results.into_iter().flatten().sum();
    Ok(PartResult::passed(format!("{drivers} drivers in one process: {all} updates, equal digests after each batch")))
}

/// Returns the minimum number of batches for these updates.
const fn batches(updates: u64) -> usize {
    (updates / BATCH / 2) as usize
}
