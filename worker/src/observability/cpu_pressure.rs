//! Detects CPU pressure: whether threads of this process wait for a processor that other processes use.

use std::fs;
use std::time::Duration;
use tokio::time::Instant;

/// Average number of waiting threads that counts as pressure. Of two processes that compete for one processor each waits half of
/// the time.
const SHORT: f64 = 0.33;

/// Samples how long the threads of a process have waited for a processor.
#[derive(Debug, Clone, Copy)]
pub(crate) struct CpuPressure {
    /// Source of the total wait time of all threads; `None` if the system does not report it.
    run_queue_wait: fn() -> Option<Duration>,
    previous: Option<(Instant, Duration)>,
}

impl CpuPressure {
    /// Measures this process.
    pub(crate) const fn of_process() -> Self {
        Self::from_source(run_queue_wait)
    }

    /// Never reports pressure, for simulated machines.
    pub(crate) const fn unknown() -> Self {
        Self::from_source(|| None)
    }

    pub(crate) const fn from_source(run_queue_wait: fn() -> Option<Duration>) -> Self {
        Self { run_queue_wait, previous: None }
    }

    /// Returns whether there was pressure since the previous sample. The first sample returns `false`.
    pub(crate) fn is_short(&mut self, now: Instant) -> bool {
        let Some(run_queue_wait) = (self.run_queue_wait)() else { return false };
        let Some((previous_time, previous)) = self.previous.replace((now, run_queue_wait)) else { return false };
        // The time of threads that ended is no longer counted.
        let waited = run_queue_wait.saturating_sub(previous).as_secs_f64();
        waited > now.saturating_duration_since(previous_time).as_secs_f64() * SHORT
    }
}

/// Returns the total time in the run queue of the threads that live.
fn run_queue_wait() -> Option<Duration> {
    let mut total = Duration::ZERO;
    for thread in fs::read_dir("/proc/self/task").ok()? {
        // A thread that ended in the meantime has no file.
        let Ok(schedstat) = fs::read_to_string(thread.ok()?.path().join("schedstat")) else { continue };
        total += wait_of_thread(&schedstat)?;
    }
    Some(total)
}

/// Returns the time in the run queue from a thread's `schedstat`: the second number, in nanoseconds (Linux, Documentation/scheduler/sched-stats.rst).
fn wait_of_thread(schedstat: &str) -> Option<Duration> {
    schedstat.split_ascii_whitespace().nth(1)?.parse().ok().map(Duration::from_nanos)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU64, Ordering};

    #[test]
    fn a_third_of_the_time_in_the_run_queue_is_cpu_pressure() {
        static WAITED_MS: AtomicU64 = AtomicU64::new(700);
        let mut waits = CpuPressure::from_source(|| Some(Duration::from_millis(WAITED_MS.load(Ordering::Relaxed))));
        let mut now = Instant::now();
        let mut is_short_after = |waited_ms| {
            now += Duration::from_millis(100);
            WAITED_MS.fetch_add(waited_ms, Ordering::Relaxed);
            waits.is_short(now)
        };
        assert_eq!(
            [is_short_after(100), is_short_after(20), is_short_after(40), is_short_after(200), is_short_after(0)],
            [false, false, true, true, false]
        );
        assert!(!CpuPressure::unknown().is_short(now));
    }

    #[test]
    fn the_wait_of_a_thread_is_the_second_number_of_its_schedstat() {
        assert_eq!(wait_of_thread("123456 789 12\n"), Some(Duration::from_nanos(789)));
        assert_eq!([wait_of_thread(""), wait_of_thread("1"), wait_of_thread("1 -2 3")], [None; 3]);
    }

    #[test]
    fn the_run_queue_wait_of_this_process_is_known_where_the_system_counts_it() {
        let Ok(own) = fs::read_to_string("/proc/thread-self/schedstat") else {
            eprintln!("skipped: this system does not count how long threads wait for a processor");
            return;
        };
        // This thread lives, so that its part of the total does not fall.
        assert!(run_queue_wait().expect("the system counts it") >= wait_of_thread(&own).expect("a number"));
    }
}
