//! When to try again: jittered waits that grow, within a budget, until the deadline.

use crate::call::Failure;
use crate::client::Client;
use crate::error::Error;
use engram_proto::v1::Problem;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;
use tokio::time::{Instant, sleep, timeout};

/// First wait, in milliseconds.
const SHORTEST_MS: u64 = 10;
/// Longest wait, in milliseconds.
const LONGEST_MS: u64 = 200;
/// Retries that may be saved up: a burst after a quiet time.
const SAVED: f64 = 100.0;

/// How many retries are left: each request earns a part of one, time earns the rest.
#[derive(Debug)]
pub struct Budget {
    ratio: f64,
    floor: f64,
    state: Mutex<(f64, Instant)>,
}

impl Budget {
    /// A budget of `ratio` retries per request and `floor` a second.
    pub fn new(ratio: f64, floor: f64) -> Self {
        Self { ratio, floor, state: Mutex::new((SAVED, Instant::now())) }
    }

    /// A request was sent for the first time.
    pub fn earn(&self) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.0 = (state.0 + self.ratio).min(SAVED);
    }

    /// Takes one retry, if there is one.
    pub fn spend(&self, now: Instant) -> bool {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let (saved, since) = *state;
        let saved = (saved + self.floor * now.saturating_duration_since(since).as_secs_f64()).min(SAVED);
        let allowed = saved >= 1.0;
        *state = (if allowed { saved - 1.0 } else { saved }, now);
        allowed
    }

    /// How large it is, in words.
    fn size(&self) -> String {
        format!("{} for each request and {} a second", self.ratio, self.floor)
    }
}

/// One call and its attempts.
#[derive(Debug)]
pub(crate) struct Retry {
    allowed: Duration,
    pub(crate) deadline: Instant,
    attempts: u32,
    /// An attempt was due, and there was none left in the budget.
    is_starved: bool,
}

impl Retry {
    pub(crate) fn new(allowed: Duration) -> Self {
        Self { allowed, deadline: Instant::now() + allowed, attempts: 0, is_starved: false }
    }

    /// What is left until the deadline; `None` when it passed.
    pub(crate) fn left(&self) -> Option<Duration> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        (!left.is_zero()).then_some(left)
    }

    /// Waits before the next attempt and looks for a newer map. Where somebody did not answer, the wait ends when another has its place.
    ///
    /// # Errors
    /// A retry makes no sense, or the deadline would pass first.
    pub(crate) async fn after(&mut self, client: &Client, failure: Failure) -> Result<(), Error> {
        let lost = failure.lost.clone();
        let problem = failure.into_retryable()?;
        let at_once = self.attempts == 0 && problem.kind() == engram_proto::v1::ProblemKind::NotPrimary;
        let seen = client.version();
        loop {
            self.attempts += 1;
            let wait = if at_once && self.attempts == 1 { Duration::ZERO } else { self.wait(problem.retry_after_ms) };
            if self.deadline.saturating_duration_since(Instant::now()) <= wait {
                return Err(Error::Deadline { after: self.allowed, last: Box::new(self.told(client, problem)) });
            }
            match &lost {
                Some((map, owner)) => drop(timeout(wait, client.until_replaced(map, *owner)).await),
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

    /// What the last attempt met, and that no other was made since, where that is why.
    pub(crate) fn told(&self, client: &Client, mut problem: Problem) -> Problem {
        if self.is_starved {
            let size = client.budget().size();
            problem.message.push_str(&format!("; no retry is left in the budget, of {size}"));
        }
        problem
    }

    /// Full jitter between the shortest wait and one that doubles, at least what the server asks for.
    fn wait(&self, asked_ms: u64) -> Duration {
        let cap = (SHORTEST_MS << self.attempts.min(8)).min(LONGEST_MS);
        let jittered = rand::random_range(SHORTEST_MS..=cap.max(SHORTEST_MS));
        Duration::from_millis(jittered.max(asked_ms.min(LONGEST_MS)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn retries_stay_below_a_tenth_of_the_traffic_above_the_floor() {
        let start = Instant::now();
        let budget = Budget::new(0.1, 0.0);
        let spent = (0..10_000).filter(|_| {
            budget.earn();
            budget.spend(start)
        });
        let spent = spent.count();
        assert!((1_000..=1_101).contains(&spent), "{spent} retries of 10,000 requests, 100 of them saved up");

        let floor = Budget::new(0.0, 20.0);
        while floor.spend(start) {}
        let later = start + Duration::from_secs(2);
        assert_eq!((0..1_000).filter(|_| floor.spend(later)).count(), 40, "two seconds at 20 a second");
    }
}
