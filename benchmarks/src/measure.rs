//! Repeats and their summary, by the same rule as in peers: one warm-up run, then at least 5 repeats and one second, at most 5,000 repeats, so that
//! short operations are not judged by a few milliseconds of a busy machine.

use std::time::{Duration, Instant};

use anyhow::{Result, bail};

use crate::row::Figure;

const MIN_REPEATS: usize = 5;
const MAX_REPEATS: usize = 5_000;
const MIN_TIME: Duration = Duration::from_secs(1);

/// Upper bound of epochs until a decay clock folds at a decay of 0.01.
const FOLD_BY: u32 = 1_000;

/// Measures `work` in milliseconds.
///
/// # Errors
/// The first error of `work`.
pub(crate) fn milliseconds<E>(mut work: impl FnMut() -> Result<(), E>) -> Result<Figure, E> {
    work()?;
    let mut took_ms = Vec::new();
    let started = Instant::now();
    while took_ms.len() < MAX_REPEATS && (took_ms.len() < MIN_REPEATS || started.elapsed() < MIN_TIME) {
        took_ms.push(time_ms(&mut work)?);
    }
    Ok(lowest(took_ms))
}

/// Measures `work` and `floor` in milliseconds, alternately, so that disturbances affect both.
///
/// # Errors
/// The first error of either.
pub(crate) fn side_by_side<E>(
    mut work: impl FnMut() -> Result<(), E>,
    mut floor: impl FnMut() -> Result<(), E>,
) -> Result<(Figure, Figure), E> {
    work()?;
    floor()?;
    let (mut work_ms, mut floor_ms) = (Vec::new(), Vec::new());
    let started = Instant::now();
    while work_ms.len() < MAX_REPEATS && (work_ms.len() < MIN_REPEATS || started.elapsed() < 2 * MIN_TIME) {
        work_ms.push(time_ms(&mut work)?);
        floor_ms.push(time_ms(&mut floor)?);
    }
    Ok((lowest(work_ms), lowest(floor_ms)))
}

/// Measures milliseconds per epoch, from just after one fold of the decay clock up to and including the next. `turn` runs one epoch and returns
/// whether the clock folded.
///
/// # Errors
/// The first error of `turn`, or no fold.
pub(crate) fn mean_with_one_fold(mut turn: impl FnMut() -> Result<bool>) -> Result<Figure> {
    let mut until_fold = || -> Result<u32> {
        for epoch in 1..=FOLD_BY {
            if turn()? {
                return Ok(epoch);
            }
        }
        bail!("the decay clock did not fold within {FOLD_BY} epochs")
    };
    until_fold()?;
    let started = Instant::now();
    let epochs = until_fold()?;
    let mean_ms = started.elapsed().as_secs_f64() * 1e3 / f64::from(epochs);
    Ok(Figure { best: mean_ms, median: mean_ms, repeats: epochs })
}

/// Converts a figure to a unit that is `factor` times smaller.
pub(crate) fn scaled(figure: Figure, factor: f64) -> Figure {
    Figure { best: figure.best * factor, median: figure.median * factor, ..figure }
}

/// Converts to millions per second: work that handles `count` items in `milliseconds`.
pub(crate) fn millions_per_second(count: usize, milliseconds: Figure) -> Figure {
    let rate = |ms: f64| count as f64 / (ms * 1e3);
    Figure { best: rate(milliseconds.best), median: rate(milliseconds.median), ..milliseconds }
}

/// Summarizes values of which the lowest is the best.
///
/// # Panics
/// When `values` is empty.
pub(crate) fn lowest(mut values: Vec<f64>) -> Figure {
    values.sort_by(f64::total_cmp);
    Figure { best: values[0], median: values[values.len() / 2], repeats: values.len() as u32 }
}

/// Returns the value below which `share` of the `values` lie; NaN if empty.
pub(crate) fn quantile(values: &[f64], share: f64) -> Figure {
    let mut values = values.to_vec();
    values.sort_by(f64::total_cmp);
    let place = ((values.len() as f64 * share) as usize).min(values.len().saturating_sub(1));
    Figure { repeats: values.len() as u32, ..once(values.get(place).copied().unwrap_or(f64::NAN)) }
}

/// Returns a figure that was measured once.
pub(crate) const fn once(value: f64) -> Figure {
    Figure { best: value, median: value, repeats: 1 }
}

fn time_ms<E>(work: &mut impl FnMut() -> Result<(), E>) -> Result<f64, E> {
    let before = Instant::now();
    work()?;
    Ok(before.elapsed().as_secs_f64() * 1e3)
}
