//! Exactly-once requests: sessions and their window of requests, part of a partition's replicated state.
//!
//! A request is (session, seq), with seq dense from 1. A client sends seq s only after s - [`WINDOW`] has its final answer. All
//! cases are decided at apply, in log order. A session at or above the watermark was never removed, so if it is unknown, none of
//! its requests were applied, and creating it repeats nothing; all requests of one below are rejected. No clock is read: only
//! numbers in ids and log are compared.

use crate::outcome::{Refusal, Reply};
use std::collections::BTreeMap;

/// Requests of one session that may be open at once.
pub const WINDOW: u64 = 64;
/// Maximum bytes of the sessions of a partition, approximately: tens of thousands of idle sessions, or 200 whose kept answers are
/// all of the maximum size. Above it the sessions opened first expire.
pub const MAX_SESSION_BYTES: u64 = 16 << 20;
/// Approximate bytes of a session without its answers, and of an answer without a reply.
const ENTRY_BYTES: u64 = 160;

/// Id of a client session, issued by any worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SessionId {
    /// Opening time in milliseconds since the Unix epoch by the issuer's clock.
    pub opened_ms: u64,
    /// Distinguishes sessions opened in the same millisecond.
    pub random: u64,
}

/// One request of a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Request {
    /// The session.
    pub session: SessionId,
    /// Sequence number within the session and partition, from 1.
    pub seq: u64,
}

/// Final state of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Answer {
    /// Executed, with this reply.
    Done(Reply),
    /// Closed before it arrived: never executed.
    Never,
}

/// What to do with a request that arrives.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Admission {
    /// Execute it, then [`Table::complete`].
    Execute,
    /// Reply with this; change nothing.
    Stored(Reply),
    /// Refuse it; change nothing.
    Refuse(Refusal),
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Entry {
    /// Highest seq seen, 0 for a new session.
    pub(crate) high: u64,
    /// Answers of the seqs above `high - WINDOW`.
    pub(crate) answers: BTreeMap<u64, Answer>,
}

impl Entry {
    fn kept_bytes(&self) -> u64 {
        let answer = |answer: &Answer| match answer {
            Answer::Done(reply) => reply.kept_bytes(),
            Answer::Never => ENTRY_BYTES,
        };
        ENTRY_BYTES + self.answers.values().map(answer).sum::<u64>()
    }
}

/// The sessions of one partition.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Table {
    pub(crate) watermark_ms: u64,
    pub(crate) sessions: BTreeMap<SessionId, Entry>,
    /// Approximate bytes of the sessions, cached.
    kept_bytes: u64,
}

impl Table {
    pub(crate) fn new(watermark_ms: u64, sessions: BTreeMap<SessionId, Entry>) -> Self {
        let kept_bytes = sessions.values().map(Entry::kept_bytes).sum();
        Self { watermark_ms, sessions, kept_bytes }
    }

    /// Returns the watermark in milliseconds since the Unix epoch: sessions opened before it are expired.
    pub const fn watermark_ms(&self) -> u64 {
        self.watermark_ms
    }

    /// Returns the opening time of the newest session, if any.
    pub fn last_opened_ms(&self) -> Option<u64> {
        self.sessions.keys().next_back().map(|session| session.opened_ms)
    }

    /// Returns the number of sessions.
    pub fn len(&self) -> usize {
        self.sessions.len()
    }

    /// Whether there is no session.
    pub fn is_empty(&self) -> bool {
        self.sessions.is_empty()
    }

    /// Returns approximately the bytes of all sessions.
    pub const fn kept_bytes(&self) -> u64 {
        self.kept_bytes
    }

    /// Returns the highest answered seq of `session`; `None` if none was answered here.
    pub fn high(&self, session: SessionId) -> Option<u64> {
        self.sessions.get(&session).map(|entry| entry.high)
    }

    /// Decides what to do with `request`, changing nothing.
    pub fn admit(&self, request: Request) -> Admission {
        let Request { session, seq } = request;
        if session.opened_ms < self.watermark_ms {
            return Admission::Refuse(Refusal::SessionExpired);
        }
        let entry = self.sessions.get(&session);
        let high = entry.map_or(0, |entry| entry.high);
        if seq == 0 || is_behind_window(seq, high) {
            return Admission::Refuse(Refusal::AlreadyClosed);
        }
        if seq > high.saturating_add(WINDOW) {
            return Admission::Refuse(Refusal::OutOfWindow { window: WINDOW });
        }
        match entry.and_then(|entry| entry.answers.get(&seq)) {
            Some(Answer::Done(reply)) => Admission::Stored(reply.clone()),
            Some(Answer::Never) => Admission::Refuse(Refusal::AlreadyClosed),
            None => Admission::Execute,
        }
    }

    /// Stores the reply of a request admitted by [`Table::admit`]. The first answer is kept, and none if the request's own command
    /// expired its session or closed a seq a window ahead.
    pub fn complete(&mut self, request: Request, reply: Reply) {
        self.store(request, Answer::Done(reply));
    }

    /// Closes a request: returns its final state, and prevents later execution if it was not executed.
    ///
    /// # Errors
    /// [`Refusal::SessionExpired`], or [`Refusal::OutOfWindow`] on either side of the window: answers older than the window are no
    /// longer kept, so the final state is unknown.
    pub fn close(&mut self, request: Request) -> Result<Answer, Refusal> {
        match self.admit(request) {
            Admission::Stored(reply) => Ok(Answer::Done(reply)),
            Admission::Execute => {
                self.store(request, Answer::Never);
                Ok(Answer::Never)
            }
            Admission::Refuse(Refusal::AlreadyClosed) if self.is_closed_unexecuted(request) => Ok(Answer::Never),
            Admission::Refuse(Refusal::AlreadyClosed) => Err(Refusal::OutOfWindow { window: WINDOW }),
            Admission::Refuse(refusal) => Err(refusal),
        }
    }

    /// Raises the watermark, which never falls, and removes every session opened before it.
    pub fn expire(&mut self, before_ms: u64) {
        if before_ms > self.watermark_ms {
            self.watermark_ms = before_ms;
            let kept = self.sessions.split_off(&SessionId { opened_ms: before_ms, random: 0 });
            let expired = std::mem::replace(&mut self.sessions, kept);
            self.kept_bytes -= expired.values().map(Entry::kept_bytes).sum::<u64>();
        }
    }

    fn is_closed_unexecuted(&self, request: Request) -> bool {
        self.sessions.get(&request.session).is_some_and(|entry| entry.answers.get(&request.seq) == Some(&Answer::Never))
    }

    fn store(&mut self, request: Request, answer: Answer) {
        let high = self.sessions.get(&request.session).map_or(0, |entry| entry.high);
        if request.session.opened_ms < self.watermark_ms || is_behind_window(request.seq, high) {
            return;
        }
        self.kept_bytes -= self.sessions.get(&request.session).map_or(0, Entry::kept_bytes);
        let entry = self.sessions.entry(request.session).or_default();
        entry.answers.entry(request.seq).or_insert(answer);
        if request.seq > entry.high {
            entry.high = request.seq;
            entry.answers = entry.answers.split_off(&(request.seq.saturating_sub(WINDOW) + 1));
        }
        self.kept_bytes += entry.kept_bytes();
        self.bound();
    }

    /// Expires the sessions opened first while all take too much. The watermark rises with them, so that none of them is taken for a
    /// new one.
    fn bound(&mut self) {
        while self.kept_bytes > MAX_SESSION_BYTES {
            let next_ms = self.sessions.keys().next().and_then(|oldest| oldest.opened_ms.checked_add(1));
            let Some(next_ms) = next_ms else { return };
            self.expire(next_ms);
        }
    }
}

/// Whether `seq` is older than the window that ends at `high`.
pub(crate) const fn is_behind_window(seq: u64, high: u64) -> bool {
    seq <= high.saturating_sub(WINDOW)
}
