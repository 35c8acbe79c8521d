//! Barriers and events between the threads of a computation: with deadlines, and with errors that reach every waiting thread.

use parking_lot::{Condvar, Mutex};
use std::time::Instant;

/// Why a wait failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BarrierError {
    /// The deadline passed: some thread did not arrive. Every other waiting thread receives the same error.
    #[error("deadline passed")]
    Deadline,
    /// A thread reported an error.
    #[error("{0}")]
    Failed(String),
}

/// Lets a fixed number of threads wait for each other, any number of times. A failed barrier stays failed.
#[derive(Debug)]
pub struct Barrier {
    members: usize,
    state: Mutex<BarrierState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct BarrierState {
    arrived: usize,
    /// Number of completed rounds: a thread that wakes late compares it and misses nothing.
    generation: u64,
    failure: Option<BarrierError>,
}

impl Barrier {
    /// Creates a barrier for `members` threads.
    pub fn new(members: usize) -> Self {
        Self { members, state: Mutex::default(), changed: Condvar::new() }
    }

    /// Waits until all members have arrived; returns the number of completed rounds. Either all members of a round succeed, or none does.
    ///
    /// # Errors
    /// A member did not arrive before the deadline, or reported an error.
    pub fn wait(&self, deadline: Instant) -> Result<u64, BarrierError> {
        let mut state = self.state.lock();
        if let Some(failure) = &state.failure {
            return Err(failure.clone());
        }
        let round = state.generation + 1;
        state.arrived += 1;
        if state.arrived == self.members {
            (state.arrived, state.generation) = (0, round);
            self.changed.notify_all();
            return Ok(round);
        }
        loop {
            let timed_out = self.changed.wait_until(&mut state, deadline).timed_out();
            if state.generation >= round {
                return Ok(round);
            }
            if timed_out && state.failure.is_none() {
                state.failure = Some(BarrierError::Deadline);
                self.changed.notify_all();
            }
            if let Some(failure) = &state.failure {
                return Err(failure.clone());
            }
        }
    }

    /// Reports an error to all members that wait or arrive later.
    pub fn fail(&self, message: impl Into<String>) {
        self.state.lock().failure.get_or_insert_with(|| BarrierError::Failed(message.into()));
        self.changed.notify_all();
    }
}

/// A value that one thread publishes repeatedly and another waits for, version by version.
#[derive(Debug)]
pub struct Event<T> {
    state: Mutex<Result<Option<(u64, T)>, String>>,
    changed: Condvar,
}

impl<T> Default for Event<T> {
    fn default() -> Self {
        Self { state: Mutex::new(Ok(None)), changed: Condvar::new() }
    }
}

impl<T: Clone> Event<T> {
    /// Publishes a version; it replaces earlier ones.
    pub fn publish(&self, version: u64, value: T) {
        let mut state = self.state.lock();
        if let Ok(published) = &mut *state {
            *published = Some((version, value));
        }
        self.changed.notify_all();
    }

    /// Waits until this version or a later one is published.
    ///
    /// # Errors
    /// The deadline passed, or an error was reported.
    pub fn wait(&self, version: u64, deadline: Instant) -> Result<T, BarrierError> {
        let mut state = self.state.lock();
        loop {
            match &*state {
                Err(message) => return Err(BarrierError::Failed(message.clone())),
                Ok(Some((published, value))) if *published >= version => return Ok(value.clone()),
                Ok(_) => {}
            }
            if Instant::now() >= deadline {
                return Err(BarrierError::Deadline);
            }
            self.changed.wait_until(&mut state, deadline);
        }
    }

    /// Reports an error to the threads that wait or will wait.
    pub fn fail(&self, message: impl Into<String>) {
        *self.state.lock() = Err(message.into());
        self.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use engram_memory::mix64;
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::time::Duration;

    /// Far away: a test that waits for it has failed.
    fn far() -> Instant {
        Instant::now() + Duration::from_secs(60)
    }

    #[test]
    fn no_round_loses_a_wake_up() {
        const ROUNDS: u64 = 100_000;
        const MEMBERS: u64 = 3;
        let barrier = Barrier::new(MEMBERS as usize);
        let arrived = AtomicU64::new(0);
        std::thread::scope(|scope| {
            for member in 0..MEMBERS {
                let (barrier, arrived) = (&barrier, &arrived);
                scope.spawn(move || {
                    for round in 0..ROUNDS {
                        // Random delays, so that members arrive in every order.
                        (0..mix64(round * MEMBERS + member) % 3).for_each(|_| std::thread::yield_now());
                        arrived.fetch_add(1, Ordering::SeqCst);
                        assert_eq!(barrier.wait(far()), Ok(round + 1));
                        let count = arrived.load(Ordering::SeqCst);
                        assert!(count >= (round + 1) * MEMBERS, "{count} arrivals in round {round}");
                    }
                });
            }
        });
    }

    #[test]
    fn stalled_member_fails_the_round_for_all_others() {
        let barrier = Barrier::new(3);
        std::thread::scope(|scope| {
            // One has a deadline of its own; the other learns of it without waiting for its own.
            let late = scope.spawn(|| barrier.wait(far()));
            assert_eq!(barrier.wait(Instant::now() + Duration::from_millis(20)), Err(BarrierError::Deadline));
            assert_eq!(late.join().unwrap(), Err(BarrierError::Deadline));
        });
        assert_eq!(barrier.wait(far()), Err(BarrierError::Deadline), "the third, once it arrives");
    }

    #[test]
    fn errors_reach_threads_that_wait() {
        let (barrier, event) = (Barrier::new(2), Event::<u8>::default());
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| (barrier.wait(far()), event.wait(1, far())));
            barrier.fail("out of memory");
            event.fail("removed");
            let failed = |text: &str| BarrierError::Failed(text.to_owned());
            assert_eq!(waiting.join().unwrap(), (Err(failed("out of memory")), Err(failed("removed"))));
        });
    }

    #[test]
    fn event_returns_the_version_and_keeps_the_deadline() {
        let event = Event::default();
        event.publish(1, "one");
        assert_eq!(event.wait(1, far()), Ok("one"));
        assert_eq!(event.wait(2, Instant::now()), Err(BarrierError::Deadline));
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| event.wait(2, far()));
            event.publish(2, "two");
            assert_eq!(waiting.join().unwrap(), Ok("two"));
        });
    }
}
