//! Repeats and their summary, by the rule that the peers follow too: one unmeasured run, then until both 5 repeats and one
//! second are done, at most 200 repeats.

use std::time::{Duration, Instant};

use crate::row::Figure;

const MIN_REPEATS: usize = 5;
const MAX_REPEATS: usize = 200;
const MIN_TIME: Duration = Duration::from_secs(1);

/// Milliseconds that `work` takes.
///
/// # Errors
/// The first error of `work`.
pub(crate) fn milliseconds<E>(mut work: impl FnMut() -> Result<(), E>) -> Result<Figure, E> {
    work()?;
    let mut took_ms = Vec::new();
    let started = Instant::now();
    while took_ms.len() < MAX_REPEATS && (took_ms.len() < MIN_REPEATS || started.elapsed() < MIN_TIME) {
        let before = Instant::now();
        work()?;
        took_ms.push(before.elapsed().as_secs_f64() * 1e3);
    }
    took_ms.sort_by(f64::total_cmp);
    Ok(Figure { best: took_ms[0], median: took_ms[took_ms.len() / 2], repeats: took_ms.len() as u32 })
}
