//! Random histories: after every batch the device and the CPU hold the same, by digest.

use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};

use super::Part;
use crate::past::History;
use crate::report::Found;

/// Updates of a batch, on average.
const BATCH: u64 = 5_000;
/// After so many everything has happened that may happen.
const MANY_BATCHES: usize = 100;
/// How often it is said how far a history is.
const PROGRESS: Duration = Duration::from_secs(30);

/// One history.
///
/// # Errors
/// When the device cannot be opened. What differs panics.
pub(super) fn run(part: &Part) -> Result<Found> {
    let (mut said, updates) = (Instant::now(), part.updates);
    let done = History::new(part.open()?, part.seed).run(updates as usize, batches(updates), |done| {
        if said.elapsed() >= PROGRESS {
            said = Instant::now();
            eprintln!("{} of {updates} updates", done.updates);
        }
    });
    ensure!(done.is_all() || done.batches < MANY_BATCHES, "something never happened: {done:?}");
    Ok(Found::done(format!(
        "{} updates in {} batches, {} folds, {} upserts, {} evictions, the same digests after each",
        done.updates, done.batches, done.folds, done.upserts, done.evictions
    )))
}

/// Several drivers of one process at the same time, each with streams and memory of its own.
///
/// # Errors
/// When the device cannot be opened so often, or a history differs.
pub(super) fn drivers(part: &Part) -> Result<Found> {
    let (drivers, updates) = (part.contexts.max(1), part.updates.div_ceil(part.contexts.max(1)));
    // All of them are open before the first begins.
    let opened: Vec<_> = (0..drivers).map(|_| part.open()).collect::<Result<_>>()?;
    let same = thread::scope(|scope| {
        let started: Vec<_> = (100..)
            .zip(opened)
            .map(|(seed, driver)| {
                scope.spawn(move || History::new(driver, seed).run(updates as usize, batches(updates), |_| ()).updates)
            })
            .collect();
        started.into_iter().map(thread::ScopedJoinHandle::join).collect::<Vec<_>>()
    });
    ensure!(same.iter().all(Result::is_ok), "a history differs");
    let all: usize = same.into_iter().flatten().sum();
    Ok(Found::done(format!("{drivers} drivers in one process: {all} updates, the same digests after each batch")))
}

/// At least so many, whatever their sizes.
const fn batches(updates: u64) -> usize {
    (updates / BATCH / 2) as usize
}
