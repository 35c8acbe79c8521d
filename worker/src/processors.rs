//! Whether processors are short: whether threads of this process wait for one, beside others.

use std::fs;
use std::time::Duration;
use tokio::time::Instant;

/// Threads that wait, on average, where processors are short: of two processes that both want one processor each waits half of the time.
const SHORT: f64 = 0.33;

/// How long threads of a process have waited for a processor, looked at from time to time.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Waits {
    /// Since they exist, all threads together; `None` where that is not known.
    waited: fn() -> Option<Duration>,
    before: Option<(Instant, Duration)>,
}

impl Waits {
    /// Of this process.
    pub(crate) const fn here() -> Self {
        Self::told_by(waited)
    }

    /// Nothing is known, as of a simulated machine.
    pub(crate) const fn unknown() -> Self {
        Self::told_by(|| None)
    }

    pub(crate) const fn told_by(waited: fn() -> Option<Duration>) -> Self {
        Self { waited, before: None }
    }

    /// Whether they were since the look before. The first look says no.
    pub(crate) fn are_short(&mut self, now: Instant) -> bool {
        let Some(waited) = (self.waited)() else { return false };
        let Some((then, before)) = self.before.replace((now, waited)) else { return false };
        // Threads that ended take what they waited along.
        let share = waited.saturating_sub(before).as_secs_f64();
        share > now.saturating_duration_since(then).as_secs_f64() * SHORT
    }
}

/// The second number of `schedstat` of each thread: nanoseconds in a queue of the scheduler (Linux, Documentation/scheduler/sched-stats.rst).
fn waited() -> Option<Duration> {
    let mut nanoseconds = 0;
    for thread in fs::read_dir("/proc/self/task").ok()? {
        // One that has ended meanwhile has no file.
        let Ok(text) = fs::read_to_string(thread.ok()?.path().join("schedstat")) else { continue };
        nanoseconds += text.split_ascii_whitespace().nth(1)?.parse::<u64>().ok()?;
    }
    Some(Duration::from_nanos(nanoseconds))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU64, Ordering};

    #[test]
    fn processors_are_short_where_threads_wait_for_a_third_of_the_time() {
        static WAITED_MS: AtomicU64 = AtomicU64::new(700);
        let mut waits = Waits::told_by(|| Some(Duration::from_millis(WAITED_MS.load(Ordering::Relaxed))));
        let mut now = Instant::now();
        let mut after = |waited_ms| {
            now += Duration::from_millis(100);
            WAITED_MS.fetch_add(waited_ms, Ordering::Relaxed);
            waits.are_short(now)
        };
        assert_eq!([after(100), after(20), after(40), after(200), after(0)], [false, false, true, true, false]);
        assert!(!Waits::unknown().are_short(now));
    }

    #[test]
    fn what_threads_have_waited_grows() {
        let Some(before) = waited() else {
            eprintln!("skipped: this system does not count how long threads wait for a processor");
            return;
        };
        assert!(waited().is_some_and(|now| now >= before));
    }
}
