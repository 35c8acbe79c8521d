//! Outages of partitions as seen by clients, and statistics of durations.

use serde::Serialize;
use std::time::Duration;
use tokio::time::Instant;

/// Time in which a partition did not answer: from the start of the first operation that failed or was slow to the end
/// of the next successful one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Outage {
    /// Start of the first affected operation.
    pub began: Instant,
    /// Time until an operation had succeeded.
    pub length: Duration,
}

/// Outages of one partition with sequential operations.
#[derive(Debug, Default)]
pub struct Outages {
    open: Option<Instant>,
    over: Vec<Outage>,
    /// Longest time without an answer since last taken, outage or not.
    longest: Duration,
    /// Start of the last successful operation.
    served: Option<Instant>,
}

impl Outages {
    /// Notes an operation; one that took longer than `slow` is an outage.
    pub fn note(&mut self, began: Instant, ended: Instant, succeeded: bool, slow: Duration) {
        if !succeeded {
            self.open.get_or_insert(began);
            return;
        }
        self.served = Some(began);
        self.longest = self.longest.max(ended - self.open.unwrap_or(began));
        let since = self.open.take().or_else(|| (ended - began > slow).then_some(began));
        self.over.extend(since.map(|began| Outage { began, length: ended - began }));
    }

    /// Takes the longest time without an answer.
    pub fn take_longest(&mut self) -> Duration {
        std::mem::take(&mut self.longest)
    }

    /// Whether an operation that began at `since` or later succeeded.
    pub fn is_served_since(&self, since: Instant) -> bool {
        self.open.is_none() && self.served.is_some_and(|served| served >= since)
    }

    /// Returns the outages that lasted until `from` or later, in order.
    pub fn since(&self, from: Instant) -> impl Iterator<Item = &Outage> {
        self.over.iter().filter(move |outage| outage.began + outage.length >= from)
    }
}

/// Statistics of durations, in milliseconds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Spread {
    /// Number of durations; the others are 0 if it is.
    pub count: usize,
    /// Median.
    pub p50_ms: f64,
    /// 99th percentile.
    pub p99_ms: f64,
    /// Maximum.
    pub max_ms: f64,
}

impl Spread {
    /// Computes the statistics of durations.
    pub fn of(times: impl IntoIterator<Item = Duration>) -> Self {
        let mut times: Vec<Duration> = times.into_iter().collect();
        times.sort_unstable();
        // Smallest duration not exceeded by this share of them.
        let at = |share: f64| {
            let rank = (share * times.len() as f64).ceil() as usize;
            times.get(rank.saturating_sub(1)).map_or(0.0, |time| milliseconds(*time))
        };
        Self { count: times.len(), p50_ms: at(0.5), p99_ms: at(0.99), max_ms: at(1.0) }
    }
}

/// Rounds to a hundredth of a millisecond.
pub(crate) fn milliseconds(time: Duration) -> f64 {
    (time.as_secs_f64() * 100_000.0).round() / 100.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_outage_lasts_from_the_first_failure_to_the_next_success() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let slow = Duration::from_millis(100);
        let mut outages = Outages::default();
        outages.note(at(0), at(10), true, slow);
        outages.note(at(20), at(130), false, slow);
        outages.note(at(140), at(200), false, slow);
        assert!(!outages.is_served_since(at(0)), "it is not served while an outage is open");
        outages.note(at(210), at(220), true, slow);
        outages.note(at(300), at(450), true, slow);
        let found: Vec<_> = outages.since(at(0)).copied().collect();
        let outage = |began, length| Outage { began: at(began), length: Duration::from_millis(length) };
        assert_eq!(
            found,
            [outage(20, 200), outage(300, 150)],
            "consecutive failures are one outage, a slow operation is another"
        );
        assert_eq!(outages.since(at(221)).count(), 1);
        assert_eq!((outages.take_longest(), outages.take_longest()), (Duration::from_millis(200), Duration::ZERO));
        assert!(outages.is_served_since(at(300)) && !outages.is_served_since(at(301)));
    }

    #[test]
    fn statistics_are_correct() {
        let spread = Spread::of((1..=200).rev().map(Duration::from_millis));
        assert_eq!(spread, Spread { count: 200, p50_ms: 100.0, p99_ms: 198.0, max_ms: 200.0 });
        assert_eq!(Spread::of([]), Spread::default());
    }
}
