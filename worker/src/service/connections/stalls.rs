//! Answers that a client does not read. The transport waits for the client's window without end and polls nothing meanwhile, so the
//! only way to free what it holds is to end the connection.

use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;

/// An answer of which the client takes nothing for this long ends with its connection.
pub(crate) const MAX_STALL: Duration = Duration::from_secs(60);

/// Answers in progress on one connection, each with the time since which the client has taken nothing.
#[derive(Debug, Default)]
pub(crate) struct AnswerStalls(Mutex<Answers>);

#[derive(Debug, Default)]
struct Answers {
    next: u64,
    /// `None` while the client waits for the worker.
    waiting_since: BTreeMap<u64, Option<Instant>>,
}

impl AnswerStalls {
    /// Registers an answer while the returned value lives.
    pub(crate) fn begin(self: &Arc<Self>) -> Answer {
        let mut answers = self.0.lock();
        let id = answers.next;
        answers.next += 1;
        answers.waiting_since.insert(id, None);
        Answer { stalls: Arc::clone(self), id }
    }

    /// Returns whether a client has taken nothing of one of its answers for too long.
    pub(crate) fn is_stalled(&self, now: Instant) -> bool {
        let is_stalled = |since: &Instant| now.saturating_duration_since(*since) >= MAX_STALL;
        self.0.lock().waiting_since.values().flatten().any(is_stalled)
    }
}

/// An answer in progress.
#[derive(Debug)]
pub(crate) struct Answer {
    stalls: Arc<AnswerStalls>,
    id: u64,
}

impl Answer {
    /// Part of the answer waits for the client since this time; `None` if the client waits for more.
    pub(crate) fn set_waiting(&self, since: Option<Instant>) {
        self.stalls.0.lock().waiting_since.insert(self.id, since);
    }
}

impl Drop for Answer {
    fn drop(&mut self) {
        self.stalls.0.lock().waiting_since.remove(&self.id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_an_answer_that_waits_for_its_client_stalls() {
        let (stalls, start) = (Arc::new(AnswerStalls::default()), Instant::now());
        let (read, unread) = (stalls.begin(), stalls.begin());
        unread.set_waiting(Some(start));
        read.set_waiting(Some(start));
        assert!(!stalls.is_stalled(start + MAX_STALL / 2));
        read.set_waiting(None);
        assert!(stalls.is_stalled(start + MAX_STALL));
        unread.set_waiting(Some(start + MAX_STALL));
        assert!(!stalls.is_stalled(start + MAX_STALL));
        drop((read, unread));
        assert!(!stalls.is_stalled(start + MAX_STALL * 3));
    }
}
