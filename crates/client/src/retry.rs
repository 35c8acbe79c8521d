//! Retries: jittered exponential back-off within a budget, until the deadline.

use crate::call::Failure;
use crate::client::Client;
use crate::error::Error;
use crate::limit::limited;
use engram_proto::v1::Problem;
use parking_lot::Mutex;
use std::time::Duration;
use tokio::time::{Instant, sleep, timeout};

/// Shortest wait, in milliseconds.
const MIN_WAIT_MS: u64 = 10;
/// Longest wait, in milliseconds.
const MAX_WAIT_MS: u64 = 200;
/// Retries that can be saved up: a burst after a quiet time.
const MAX_SAVED: f64 = 100.0;

/// Remaining retries: each request earns a fraction of one, time earns the rest.
#[derive(Debug)]
pub struct RetryBudget {
    ratio: f64,
    floor: f64,
    state: Mutex<(f64, Instant)>,
}

impl RetryBudget {
    /// Creates a budget of `ratio` retries per request and `floor` per second.
    pub fn new(ratio: f64, floor: f64) -> Self {
        Self { ratio, floor, state: Mutex::new((MAX_SAVED, Instant::now())) }
    }

    /// Earns a fraction of a retry for a new request.
    pub fn earn(&self) {
        let mut state = self.state.lock();
        state.0 = (state.0 + self.ratio).min(MAX_SAVED);
    }

    /// Spends one retry, if available.
    pub fn spend(&self, now: Instant) -> bool {
        let mut state = self.state.lock();
        let (saved, since) = *state;
        let saved = (saved + self.floor * now.saturating_duration_since(since).as_secs_f64()).min(MAX_SAVED);
        let allowed = saved >= 1.0;
        *state = (if allowed { saved - 1.0 } else { saved }, now);
        allowed
    }

    /// Describes its size.
    fn size(&self) -> String {
        format!("{} per request and {} per second", self.ratio, self.floor)
    }
}

/// One call and its attempts.
#[derive(Debug)]
pub(crate) struct Retry {
    allowed: Duration,
    pub(crate) deadline: Instant,
    attempts: u32,
    /// The last attempt was delayed by an empty budget.
    is_starved: bool,
    /// Longest wait of a call for the limiter of a buffer, within the deadline.
    pub(crate) wait_ms: u32,
}

impl Retry {
    pub(crate) fn new(allowed: Duration) -> Self {
        let now = Instant::now();
        let deadline = limited(now + allowed);
        let allowed = deadline.saturating_duration_since(now);
        Self { allowed, deadline, attempts: 0, is_starved: false, wait_ms: 0 }
    }

    /// Lets calls wait for the limiter of a buffer, in addition to the deadline.
    pub(crate) fn waiting(mut self, wait: Duration) -> Self {
        self.wait_ms = u32::try_from(wait.as_millis()).unwrap_or(u32::MAX);
        let deadline = limited(self.deadline + wait);
        self.allowed += deadline.saturating_duration_since(self.deadline);
        self.deadline = deadline;
        self
    }

    /// Returns the time until the deadline; `None` after it.
    pub(crate) fn remaining(&self) -> Option<Duration> {
        let remaining = self.deadline.saturating_duration_since(Instant::now());
        (!remaining.is_zero()).then_some(remaining)
    }

    /// Waits before the next attempt and requests a newer map. If a worker was lost, the wait ends when another
    /// replaces it.
    ///
    /// # Errors
    /// The failure is not retryable, or the deadline would pass first.
    pub(crate) async fn after(&mut self, client: &Client, failure: Failure) -> Result<(), Error> {
        let lost = failure.lost.clone();
        let problem = failure.into_retryable()?;
        let retries_immediately = self.attempts == 0 && problem.kind() == engram_proto::v1::ProblemKind::NotPrimary;
        let seen = client.version();
        loop {
            self.attempts += 1;
            let wait = if retries_immediately && self.attempts == 1 {
                Duration::ZERO
            } else {
                self.wait(problem.retry_after_ms)
            };
            if self.deadline.saturating_duration_since(Instant::now()) <= wait {
                return Err(Error::Deadline { after: self.allowed, last: Box::new(self.annotate(client, problem)) });
            }
            match &lost {
                Some((map, owner)) => drop(timeout(wait, client.wait_until_replaced(map, *owner)).await),
                None => sleep(wait).await,
            }
            self.is_starved = !client.budget().spend(Instant::now());
            if !self.is_starved {
                break;
            }
        }
        client.refresh(seen, self.deadline).await;
        Ok(())
    }

    /// Adds to the last problem that the retry budget was exhausted, if it was.
    pub(crate) fn annotate(&self, client: &Client, mut problem: Problem) -> Problem {
        if self.is_starved {
            let size = client.budget().size();
            problem.message.push_str(&format!("; retry budget exhausted ({size})"));
        }
        problem
    }

    /// Full jitter between the shortest wait and a doubling limit, at least what the server requests.
    fn wait(&self, retry_after_ms: u64) -> Duration {
        let cap = (MIN_WAIT_MS << self.attempts.min(8)).min(MAX_WAIT_MS);
        let jittered = rand::random_range(MIN_WAIT_MS..=cap.max(MIN_WAIT_MS));
        Duration::from_millis(jittered.max(retry_after_ms.min(MAX_WAIT_MS)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn limit_of_the_caller_ends_calls_before_their_own_deadline() {
        let (hour, limit) = (Duration::from_secs(3_600), Instant::now() + Duration::from_secs(60));
        let retry = crate::limit::within(limit, async { Retry::new(hour).waiting(hour) }).await;
        assert_eq!(retry.deadline, limit);
        assert!(retry.allowed <= Duration::from_secs(60));
        let own = crate::limit::within(limit + 3 * hour, async { Retry::new(hour).waiting(hour) }).await;
        assert_eq!(own.allowed, 2 * hour);
        assert_eq!(Retry::new(hour).waiting(hour).allowed, 2 * hour);
    }

    #[test]
    fn retries_stay_below_a_tenth_of_the_traffic_above_the_floor() {
        let start = Instant::now();
        let budget = RetryBudget::new(0.1, 0.0);
        let spent = (0..10_000).filter(|_| {
            budget.earn();
            budget.spend(start)
        });
        let spent = spent.count();
        assert!((1_000..=1_101).contains(&spent), "{spent} retries of 10,000 requests, 100 of them saved up");

        let floor = RetryBudget::new(0.0, 20.0);
        while floor.spend(start) {}
        let later = start + Duration::from_secs(2);
        assert_eq!((0..1_000).filter(|_| floor.spend(later)).count(), 40, "two seconds at 20 a second");
    }
}
