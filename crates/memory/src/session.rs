//! Exactly once: sessions and their window of requests, part of a partition's replicated state.
//!
//! A request is (session, seq), seq dense from 1. A client sends seq s only after s - [`WINDOW`] has its final answer.
//! All cases are decided at apply, in log order. A session at or above the watermark was never removed, so if it is unknown
//! nothing of it was applied and creating it repeats nothing; one below is refused whole. No clock is read: only numbers
//! in ids and log are compared.

use crate::outcome::{Refusal, Reply};
use std::collections::BTreeMap;

/// Requests of one session that may be open at once.
pub const WINDOW: u64 = 64;

/// Who sends requests, issued by any worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SessionId {
    /// When it was opened, in milliseconds since the Unix epoch by the issuer's clock.
    pub opened_ms: u64,
    /// Tells apart what was opened in one millisecond.
    pub random: u64,
}

/// One request of a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Request {
    /// The session.
    pub session: SessionId,
    /// Its number within the session and partition, from 1.
    pub seq: u64,
}

/// What became of a request.
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
    /// Answer this; change nothing.
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

/// The sessions of one partition.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Table {
    pub(crate) watermark_ms: u64,
    pub(crate) sessions: BTreeMap<SessionId, Entry>,
}

impl Table {
    /// Sessions opened before this are gone, in milliseconds since the Unix epoch.
    pub const fn watermark_ms(&self) -> u64 {
        self.watermark_ms
    }

    /// When the youngest session was opened, `None` where there is none.
    pub fn last_opened_ms(&self) -> Option<u64> {
        self.sessions.keys().next_back().map(|session| session.opened_ms)
    }

    /// Number of sessions.
    pub fn len(&self) -> usize {
        self.sessions.len()
    }

    /// Whether there is no session.
    pub fn is_empty(&self) -> bool {
        self.sessions.is_empty()
    }

    /// Highest seq seen of `session`, `None` when nothing of it was answered here.
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
        if seq == 0 || behind(seq, high) {
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

    /// Stores the reply of a request that [`Table::admit`] let through. The first answer stands, and nothing is kept of a
    /// request that its own command put out of reach: one that expired its session, or closed a seq a window ahead.
    pub fn complete(&mut self, request: Request, reply: Reply) {
        self.store(request, Answer::Done(reply));
    }

    /// Closes a request: answers what became of it, and where it was never executed makes sure that it never is.
    ///
    /// # Errors
    /// [`Refusal::SessionExpired`], or [`Refusal::OutOfWindow`] on either side of the window: behind it an answer was given
    /// once and is no longer kept, so "never" would be a guess.
    pub fn close(&mut self, request: Request) -> Result<Answer, Refusal> {
        match self.admit(request) {
            Admission::Stored(reply) => Ok(Answer::Done(reply)),
            Admission::Execute => {
                self.store(request, Answer::Never);
                Ok(Answer::Never)
            }
            Admission::Refuse(Refusal::AlreadyClosed) if self.known_never(request) => Ok(Answer::Never),
            Admission::Refuse(Refusal::AlreadyClosed) => Err(Refusal::OutOfWindow { window: WINDOW }),
            Admission::Refuse(refusal) => Err(refusal),
        }
    }

    /// Raises the watermark, which never falls, and removes every session opened before it.
    pub fn expire(&mut self, before_ms: u64) {
        if before_ms > self.watermark_ms {
            self.watermark_ms = before_ms;
            self.sessions = self.sessions.split_off(&SessionId { opened_ms: before_ms, random: 0 });
        }
    }

    fn known_never(&self, request: Request) -> bool {
        self.sessions.get(&request.session).is_some_and(|entry| entry.answers.get(&request.seq) == Some(&Answer::Never))
    }

    fn store(&mut self, request: Request, answer: Answer) {
        let high = self.sessions.get(&request.session).map_or(0, |entry| entry.high);
        if request.session.opened_ms < self.watermark_ms || behind(request.seq, high) {
            return;
        }
        let entry = self.sessions.entry(request.session).or_default();
        entry.answers.entry(request.seq).or_insert(answer);
        if request.seq > entry.high {
            entry.high = request.seq;
            entry.answers = entry.answers.split_off(&(request.seq.saturating_sub(WINDOW) + 1));
        }
    }
}

/// Whether `seq` left the window that ends at `high`.
pub(crate) const fn behind(seq: u64, high: u64) -> bool {
    seq <= high.saturating_sub(WINDOW)
}
