//! Waits between attempts.

use std::time::Duration;

/// Exponential waits with full jitter: many devices that lost the same server do not come back at once.
#[derive(Debug, Clone)]
pub struct Backoff {
    least: Duration,
    most: Duration,
    attempts: u32,
}

impl Backoff {
    /// Creates waits up to `least`, doubled per failure up to `most`.
    #[must_use]
    pub const fn new(least: Duration, most: Duration) -> Self {
        Self { least, most, attempts: 0 }
    }

    /// Forgets the failures: a call succeeded.
    pub const fn reset(&mut self) {
        self.attempts = 0;
    }

    /// Failures since the last success.
    #[must_use]
    pub const fn failures(&self) -> u32 {
        self.attempts
    }

    /// Bound of the next wait.
    #[must_use]
    pub fn bound(&self) -> Duration {
        self.least.saturating_mul(1_u32.checked_shl(self.attempts).unwrap_or(u32::MAX)).min(self.most)
    }

    /// Returns the next wait: a random share of the bound, which doubles.
    pub fn next_wait(&mut self) -> Duration {
        let bound = self.bound();
        self.attempts = self.attempts.saturating_add(1);
        bound.mul_f64(rand::random::<f64>().max(0.05))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_grow_to_a_bound_and_differ() {
        let mut backoff = Backoff::new(Duration::from_secs(1), Duration::from_secs(60));
        let waits: Vec<Duration> = (0..200).map(|_| backoff.next_wait()).collect();
        assert!(waits[0] <= Duration::from_secs(1) && waits.iter().all(|wait| *wait <= Duration::from_secs(60)));
        assert!(waits[20..].iter().any(|wait| *wait > Duration::from_secs(40)));
        assert!(waits[20..].iter().any(|wait| *wait < Duration::from_secs(20)), "jitter");
        assert_eq!((backoff.failures(), backoff.bound()), (200, Duration::from_secs(60)));
        backoff.reset();
        assert!(backoff.next_wait() <= Duration::from_secs(1));
    }
}
