//! How many calls may be under way at once, found out from how long they take.
//!
//! ```text
//! latency
//!    │            ╱  whoever comes now waits for all before it
//!    │          ╱
//!    │─ ─ ─ ─ ╱─ ─ ─  slow: TOLERANCE times the usual
//!    │______╱         one more at once costs nobody anything: logs are synced, and copies sent, for many at a time
//!    └──────┴──────── calls under way
//!         limit
//! ```
//!
//! A bound by count alone lets a queue grow until everybody waits as long as the longest that a client has patience for, and then
//! nobody is served. So the limit follows the latency: where most calls of a moment are slow beside those that came while little was
//! under way, it falls; otherwise it rises. It never falls below [`FLOOR`], under which nothing queues that a group commit would
//! not take along. Each method has its own usual, so that a ranking beside reads of one memory is not taken for a queue.
//!
//! A machine that has become slow is not one with a queue: fewer calls under way do not make it faster. It is known by this, that calls
//! are slow at the floor too; then that much is put up with ([`Limit::patience`]), and the limit rises as far as it gets no worse.

use engram_proto::v1::{Problem, ProblemKind};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
// The runtime's clock: on a simulated machine a seed decides it.
use tokio::time::Instant;

/// Calls of a kind under way that are never too many. Higher, and small machines queue; lower, and a log that is synced slowly has too
/// little to sync at a time.
pub(crate) const FLOOR: usize = 64;
/// Calls of a kind under way that are always too many: each holds a message.
pub(crate) const CEILING: usize = 1_024;
/// While at most so many are under way, latency is taken for the usual.
const QUIET: usize = FLOOR * 3 / 4;
/// So many times the usual is slow. The median of those admitted settles near it.
const TOLERANCE: f64 = 2.0;
/// What is faster than this is never slow: below it latency says more about the scheduler than about a queue.
const NEVER_SLOW: Duration = Duration::from_millis(3);
/// A verdict is of at least so much time, and so many calls.
const WINDOW: Duration = Duration::from_millis(100);
const WINDOW_CALLS: u32 = 32;
/// What is left of the limit when calls are slow. Less would throw away more than the queue.
const FALL: f64 = 0.85;
/// How fast a usual follows: so much of itself at each call that is above or below, which leads to the median, whatever the outliers.
const FOLLOW: f64 = 0.02;
/// How patience grows where calls are slow at the floor, up to which, and what is left of its surplus after a window that is not.
const PATIENCE_GROWS: f64 = 1.25;
const PATIENCE_MOST: f64 = 16.0;
const PATIENCE_LEFT: f64 = 0.995;
/// When to come again, in milliseconds.
const RETRY_MS: u64 = 50;

/// The limit of calls of one kind; time and calls come from outside.
#[derive(Debug)]
pub(crate) struct Limit {
    limit: f64,
    under_way: usize,
    refused: u64,
    /// How many times slower than usual everything is, however little is under way.
    patience: f64,
    /// Median seconds of each method while little is under way.
    usual: BTreeMap<&'static str, f64>,
    window: Window,
    /// Most that were under way in the window before.
    most_before: usize,
}

/// Calls that ended since the last verdict.
#[derive(Debug)]
struct Window {
    since: Instant,
    calls: u32,
    slow: u32,
    /// Most that were under way.
    most: usize,
}

impl Window {
    const fn new(since: Instant) -> Self {
        Self { since, calls: 0, slow: 0, most: 0 }
    }
}

impl Limit {
    pub(crate) const fn new(now: Instant) -> Self {
        Self {
            limit: CEILING as f64,
            under_way: 0,
            refused: 0,
            patience: 1.0,
            usual: BTreeMap::new(),
            window: Window::new(now),
            most_before: 0,
        }
    }

    /// How many may be under way now.
    pub(crate) const fn limit(&self) -> usize {
        self.limit as usize
    }

    pub(crate) const fn under_way(&self) -> usize {
        self.under_way
    }

    /// How many were turned away.
    pub(crate) const fn refused(&self) -> u64 {
        self.refused
    }

    /// Takes one more; [`Limit::end`] follows.
    ///
    /// # Errors
    /// The limit, which is reached.
    pub(crate) fn begin(&mut self) -> Result<(), usize> {
        if self.under_way >= self.limit() {
            self.refused += 1;
            return Err(self.limit());
        }
        self.under_way += 1;
        self.window.most = self.window.most.max(self.under_way);
        Ok(())
    }

    /// One ended; `took`: `None` where it was given up and says nothing.
    pub(crate) fn end(&mut self, method: &'static str, took: Option<Duration>, now: Instant) {
        self.under_way -= 1;
        let Some(took) = took else { return };
        let seconds = took.as_secs_f64();
        let usual = self.usual.entry(method).or_insert(seconds);
        let slow = (*usual * TOLERANCE * self.patience).max(NEVER_SLOW.as_secs_f64());
        self.window.calls += 1;
        self.window.slow += u32::from(seconds > slow);
        if self.window.most.max(self.most_before) <= QUIET {
            *usual *= if seconds > *usual { 1.0 + FOLLOW } else { 1.0 - FOLLOW };
        }
        if self.window.calls >= WINDOW_CALLS && now.saturating_duration_since(self.window.since) >= WINDOW {
            self.judge();
            self.most_before = self.window.most;
            self.window = Window { most: self.under_way, ..Window::new(now) };
        }
    }

    fn judge(&mut self) {
        let Window { calls, slow, most, .. } = self.window;
        // What is slow although little is under way is not so for a queue.
        if slow * 2 > calls && most >= FLOOR {
            if self.limit <= FLOOR as f64 {
                self.patience = (self.patience * PATIENCE_GROWS).min(PATIENCE_MOST);
            }
            self.limit = (self.limit.min(most as f64) * FALL).max(FLOOR as f64);
            return;
        }
        self.patience = (self.patience * PATIENCE_LEFT).max(1.0);
        // What is far from being reached need not be low: the next burst is taken in.
        let rise = if (most as f64) < self.limit / 2.0 { self.limit } else { self.limit.sqrt() / 2.0 };
        self.limit = (self.limit + rise).min(CEILING as f64);
    }
}

/// What of a worker's work a call is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Read,
    Write,
}

impl Kind {
    pub(crate) const ALL: [Self; 2] = [Self::Read, Self::Write];

    pub(crate) const fn word(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write => "write",
        }
    }
}

/// The limits of a worker, of all its listeners together.
#[derive(Debug, Clone)]
pub(crate) struct Admission(Arc<[Mutex<Limit>; 2]>);

impl Admission {
    pub(crate) fn new() -> Self {
        let now = Instant::now();
        Self(Arc::new(Kind::ALL.map(|_| Mutex::new(Limit::new(now)))))
    }

    /// Does what a call asks for whose message is here: who sends slowly keeps nobody out.
    ///
    /// # Errors
    /// Its own, or that too much of its kind is under way.
    pub(crate) async fn within<T>(
        &self,
        kind: Kind,
        method: &'static str,
        work: impl Future<Output = Result<T, Problem>>,
    ) -> Result<T, Problem> {
        let place = self.begin(kind, method)?;
        let done = work.await;
        // One that was turned away further in took no time, and says nothing of how long it would have taken.
        if !matches!(&done, Err(problem) if problem.kind() == ProblemKind::Overloaded) {
            place.answered();
        }
        done
    }

    fn begin(&self, kind: Kind, method: &'static str) -> Result<Place, Problem> {
        self.with(kind, Limit::begin).map_err(|limit| {
            let text = format!("{limit} {}s are under way, as many as this worker answers in time", kind.word());
            Problem::of(ProblemKind::Overloaded, text).retry_after(RETRY_MS)
        })?;
        Ok(Place { admission: self.clone(), kind, method, begun: Instant::now(), is_answered: false })
    }

    pub(crate) fn with<T>(&self, kind: Kind, look: impl FnOnce(&mut Limit) -> T) -> T {
        look(&mut self.0[kind as usize].lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// A call under way, until it is dropped.
#[derive(Debug)]
struct Place {
    admission: Admission,
    kind: Kind,
    method: &'static str,
    begun: Instant,
    is_answered: bool,
}

impl Place {
    /// The call has its answer. Without this one it was given up, and its time says nothing.
    fn answered(mut self) {
        self.is_answered = true;
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let now = Instant::now();
        let took = self.is_answered.then(|| now.saturating_duration_since(self.begun));
        self.admission.with(self.kind, |limit| limit.end(self.method, took, now));
    }
}

#[cfg(test)]
mod tests;
