//! What the processors of this machine did, at any time since: where writes were held up while none was idle, or while the host of a virtual
//! machine gave them to others, the fault is not all of the cause.

use anyhow::{Context, Result};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How often the counters are read: Linux counts in hundredths of a second.
const EVERY: Duration = Duration::from_millis(20);
/// Counts of `/proc/stat` in a second: `USER_HZ`, which is the same on all machines.
const HERTZ: u64 = 100;

/// Reads the counters for as long as it lives, and keeps all: six megabytes an hour.
pub(super) struct Machine {
    readings: Arc<Mutex<Vec<Reading>>>,
    _ends: Sender<()>,
}

/// The counters of all processors together.
#[derive(Debug, Clone, Copy)]
struct Reading {
    at: Instant,
    idle: u64,
    stolen: u64,
}

/// What all processors together did for some time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Spent {
    /// They had nothing to do.
    pub(super) idle: Duration,
    /// They had something to do, and the host of this virtual machine gave them to others.
    pub(super) stolen: Duration,
}

impl Machine {
    /// # Errors
    /// The counters cannot be read.
    pub(super) fn watch() -> Result<Self> {
        let first = Reading::now()?;
        let readings = Arc::new(Mutex::new(vec![first]));
        let (ends, ended) = mpsc::channel();
        let kept = Arc::clone(&readings);
        std::thread::Builder::new().name("machine".into()).spawn(move || {
            while ended.recv_timeout(EVERY) == Err(RecvTimeoutError::Timeout) {
                let Ok(reading) = Reading::now() else { break };
                kept.lock().unwrap_or_else(PoisonError::into_inner).push(reading);
            }
        })?;
        Ok(Self { readings, _ends: ends })
    }

    /// What it did from one moment to another, to the readings next to them.
    pub(super) fn spent(&self, from: Instant, to: Instant) -> Spent {
        spent(&self.readings.lock().unwrap_or_else(PoisonError::into_inner), from, to)
    }
}

impl Reading {
    fn now() -> Result<Self> {
        let stat = std::fs::read_to_string("/proc/stat").context("failed to read /proc/stat")?;
        let (idle, stolen) = counters(&stat).with_context(|| format!("/proc/stat says {stat:?}"))?;
        Ok(Self { at: Instant::now(), idle, stolen })
    }
}

/// Idle, with or without a disk to wait for, and stolen, as proc_stat(5) has them.
fn counters(stat: &str) -> Option<(u64, u64)> {
    let all = stat.lines().next()?.strip_prefix("cpu ")?;
    let all = all.split_whitespace().map(str::parse).collect::<Result<Vec<u64>, _>>().ok()?;
    Some((all.get(3)? + all.get(4)?, *all.get(7)?))
}

fn spent(readings: &[Reading], from: Instant, to: Instant) -> Spent {
    let before = readings.iter().rev().find(|it| it.at <= from).or(readings.first());
    let after = readings.iter().find(|it| it.at >= to).or(readings.last());
    let between = |of: fn(&Reading) -> u64| {
        let counts = after.map_or(0, of).saturating_sub(before.map_or(0, of));
        Duration::from_millis(counts * 1_000 / HERTZ)
    };
    Spent { idle: between(|it| it.idle), stolen: between(|it| it.stolen) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_are_found_by_their_place() {
        let stat = "cpu  100 2 30 4000 50 0 6 70 0 0\ncpu0 1 1 1 1 1 1 1 1 0 0\n";
        assert_eq!(counters(stat), Some((4_050, 70)));
        assert_eq!(counters("cpu  1 2 3\n"), None);
        assert_eq!(counters(""), None);
    }

    #[test]
    fn processor_time_is_computed_from_the_readings_around_it() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let reading = |ms, idle, stolen| Reading { at: at(ms), idle, stolen };
        let readings = [reading(0, 10, 0), reading(20, 12, 1), reading(40, 13, 3), reading(60, 20, 3)];
        let ms = Duration::from_millis;
        assert_eq!(spent(&readings, at(25), at(35)), Spent { idle: ms(10), stolen: ms(20) });
        assert_eq!(spent(&readings, at(20), at(60)), Spent { idle: ms(80), stolen: ms(20) });
        // Nothing is known of what comes after.
        assert_eq!(spent(&readings, at(45), at(90)), Spent { idle: ms(70), stolen: ms(0) });
    }
}
