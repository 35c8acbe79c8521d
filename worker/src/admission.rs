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
//! nobody is served. So the limit follows the latency: where most calls of a moment are slow beside what is usual for their method, it
//! falls; otherwise it rises. What is usual is learnt while nobody is turned away, so that a ranking beside reads of one memory is not
//! taken for a queue.
//!
//! Slow calls alone do not make a queue. A queue is what can be shortened without less being done; where a log is synced slowly, fewer
//! calls at once are fewer for each sync. So the work done is noted by how many were under way, and where half as many did much less,
//! that latency is put up with ([`Limit::patience`]) and the limit rises again. One thing looks the same from inside: a processor that
//! others want as well, of which more calls at once get a larger share, until all wait longer. Threads that wait for processors tell it.

use crate::processors::Waits;
use engram_proto::v1::{Problem, ProblemKind};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
// The runtime's clock: on a simulated machine a seed decides it.
use tokio::time::Instant;

/// Calls of a kind under way that are never too many: one is worked on, and the next one is there.
const FLOOR: usize = 2;
/// The same where nothing shows that what is slow is a queue.
const UNPROVEN: usize = 64;
/// Calls of a kind under way that are always too many: each holds a message.
pub(crate) const CEILING: usize = 1_024;
/// Powers of two up to that.
const LEVELS: usize = CEILING.ilog2() as usize + 1;
/// So many times the usual is slow. The median of those admitted settles near it.
const TOLERANCE: f64 = 2.0;
/// What is faster than this is never slow: below it latency says more about the scheduler than about a queue.
const NEVER_SLOW: Duration = Duration::from_millis(3);
/// A verdict is of at least so much time, and so many calls.
const WINDOW: Duration = Duration::from_millis(100);
const WINDOW_CALLS: u32 = 32;
/// What is left of the limit when calls are slow. Less would throw away more than the queue.
const FALL: f64 = 0.85;
/// How the limit rises where fewer calls at once were fewer done.
const RISE: f64 = 1.5;
/// Half as many calls at once that do less than this share of the work were no queue.
const QUEUE_DOES: f64 = 0.75;
/// What a window adds to what is known of a level, and what is left of that where it was the reason to be patient: it may be long ago.
const NOTED: f64 = 0.2;
const BELIEVED: f64 = 0.9;
/// How patience grows, up to which, and what is left of it after a window that is not slow.
const PATIENCE_GROWS: f64 = 1.25;
const PATIENCE_MOST: f64 = 16.0;
const PATIENCE_LEFT: f64 = 0.995;
/// When to come again, in milliseconds.
const RETRY_MS: u64 = 50;

/// The limit of calls of one kind; time, calls and what processors are short of come from outside.
#[derive(Debug)]
pub(crate) struct Limit {
    limit: f64,
    under_way: usize,
    refused: u64,
    /// How many times slower than usual everything is, although it is no queue.
    patience: f64,
    usual: BTreeMap<&'static str, Usual>,
    window: Window,
    /// Somebody was turned away in the window before.
    refused_before: bool,
    /// Work a second while so many were under way, by their logarithm; 0 = not known.
    done: [f64; LEVELS],
    processors: Waits,
}

/// Calls that ended since the last verdict.
#[derive(Debug)]
struct Window {
    since: Instant,
    calls: u32,
    slow: u32,
    /// Seconds that they usually take.
    work: f64,
    /// Most that were under way.
    most: usize,
    refused: bool,
}

impl Window {
    const fn new(since: Instant) -> Self {
        Self { since, calls: 0, slow: 0, work: 0.0, most: 0, refused: false }
    }
}

/// How long a method takes: the median, whatever the outliers, of times when nobody is turned away.
#[derive(Debug)]
struct Usual {
    seconds: f64,
    /// Calls so far, up to [`Usual::FIRST`].
    calls: u32,
    /// Calls of this window that took longer, less those that did not.
    longer: i32,
}

impl Usual {
    /// How fast it follows: at first so much at each call, then at each window. It rises slowly, since load that rises slowly makes
    /// everything slower as well, and falls as fast as it can be believed.
    const FIRST: u32 = 64;
    const AT_FIRST: f64 = 0.02;
    const RISES: f64 = 0.005;
    const FALLS: f64 = 0.03;

    const fn new(seconds: f64) -> Self {
        Self { seconds, calls: 0, longer: 0 }
    }

    fn heard(&mut self, seconds: f64) {
        let longer = seconds > self.seconds;
        self.longer += if longer { 1 } else { -1 };
        if self.calls < Self::FIRST {
            self.calls += 1;
            self.seconds *= if longer { 1.0 + Self::AT_FIRST } else { 1.0 - Self::AT_FIRST };
        }
    }

    fn follow(&mut self, may_rise: bool) {
        match std::mem::take(&mut self.longer) {
            longer if longer < 0 => self.seconds *= 1.0 - Self::FALLS,
            longer if longer > 0 && may_rise => self.seconds *= 1.0 + Self::RISES,
            _ => {}
        }
    }
}

impl Limit {
    pub(crate) const fn new(now: Instant, processors: Waits) -> Self {
        Self {
            limit: CEILING as f64,
            under_way: 0,
            refused: 0,
            patience: 1.0,
            usual: BTreeMap::new(),
            window: Window::new(now),
            refused_before: false,
            done: [0.0; LEVELS],
            processors,
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

    /// Whether there is room for one more.
    ///
    /// # Errors
    /// The limit, which is reached. Somebody was turned away for it.
    pub(crate) const fn room(&mut self) -> Result<(), usize> {
        if self.under_way < self.limit() {
            return Ok(());
        }
        self.refused += 1;
        self.window.refused = true;
        Err(self.limit())
    }

    /// Takes one more; [`Limit::end`] follows.
    ///
    /// # Errors
    /// As of [`Limit::room`].
    pub(crate) fn begin(&mut self) -> Result<(), usize> {
        self.room()?;
        self.under_way += 1;
        self.window.most = self.window.most.max(self.under_way);
        Ok(())
    }

    /// One ended; `took`: `None` where it was given up and says nothing.
    pub(crate) fn end(&mut self, method: &'static str, took: Option<Duration>, now: Instant) {
        self.under_way -= 1;
        let Some(took) = took else { return };
        let seconds = took.as_secs_f64();
        let usual = self.usual.entry(method).or_insert_with(|| Usual::new(seconds));
        let slow = (usual.seconds * TOLERANCE * self.patience).max(NEVER_SLOW.as_secs_f64());
        self.window.calls += 1;
        self.window.slow += u32::from(seconds > slow);
        self.window.work += usual.seconds;
        usual.heard(seconds);
        let lasted = now.saturating_duration_since(self.window.since);
        if self.window.calls >= WINDOW_CALLS && lasted >= WINDOW {
            self.judge(lasted, now);
            self.refused_before = self.window.refused;
            self.window = Window { most: self.under_way, ..Window::new(now) };
        }
    }

    fn judge(&mut self, lasted: Duration, now: Instant) {
        let Window { calls, slow, most, work, refused, .. } = self.window;
        // What is slow although nothing else is under way is not so for a queue.
        let is_slow = slow * 2 > calls && most >= FLOOR;
        let is_reached = refused || self.refused_before;
        self.usual.values_mut().for_each(|usual| usual.follow(!is_slow && !is_reached));
        if is_slow || is_reached {
            // Otherwise as much is done as is asked for.
            let (done, now) = (&mut self.done[level(most)], work / lasted.as_secs_f64());
            *done = if *done == 0.0 { now } else { *done * (1.0 - NOTED) + now * NOTED };
        }
        if is_slow {
            self.lower(most, now);
            return;
        }
        self.patience = (self.patience * PATIENCE_LEFT).max(1.0);
        // What is far from being reached need not be low: the next burst is taken in.
        let rise = if (most as f64) < self.limit / 2.0 { self.limit } else { self.limit.sqrt() / 2.0 };
        self.limit = (self.limit + rise).min(CEILING as f64);
        if self.limit() == CEILING {
            // It is over; what is done next time may be something else.
            self.done = [0.0; LEVELS];
        }
    }

    /// Calls are slow with so many under way at most.
    fn lower(&mut self, most: usize, now: Instant) {
        let here = level(most);
        let of_more = self.done.get(here + 1).copied().unwrap_or_default();
        let is_short = self.processors.are_short(now);
        if !is_short && self.done[here] < of_more * QUEUE_DOES {
            self.patience = (self.patience * PATIENCE_GROWS).min(PATIENCE_MOST);
            self.limit = (self.limit * RISE).min(CEILING as f64);
            self.done[here + 1] *= BELIEVED;
            return;
        }
        let floor = if is_short || of_more > 0.0 { FLOOR } else { UNPROVEN };
        let fallen = self.limit.min(most as f64) * FALL;
        self.limit = fallen.max(self.limit.min(floor as f64));
    }
}

/// Of how many calls what is done is noted together.
const fn level(under_way: usize) -> usize {
    match under_way.checked_ilog2() {
        Some(level) if (level as usize) < LEVELS => level as usize,
        Some(_) => LEVELS - 1,
        None => 0,
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

    /// Of a method of the service for memories; `None`: it is neither, or may begin whatever is under way.
    pub(crate) fn of(method: &str) -> Option<Self> {
        match method {
            "ApplyDecay" | "ApplyReinforcement" | "Remove" | "Upsert" => Some(Self::Write),
            "GetDigest" | "GetMemories" | "GetQuality" | "Rank" | "Recall" | "ScanMemories" => Some(Self::Read),
            _ => None,
        }
    }

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
    pub(crate) fn new(processors: Waits) -> Self {
        let now = Instant::now();
        Self(Arc::new(Kind::ALL.map(|_| Mutex::new(Limit::new(now, processors)))))
    }

    /// Whether a call may come in whose message is not here yet: what is turned away costs least before it is read.
    ///
    /// # Errors
    /// Too much of its kind is under way.
    pub(crate) fn room(&self, method: &str) -> Result<(), Problem> {
        Kind::of(method).map_or(Ok(()), |kind| self.with(kind, Limit::room).map_err(|limit| too_many(kind, limit)))
    }

    /// Does what a call asks for whose message is here: who sends slowly keeps nobody out.
    ///
    /// # Errors
    /// Its own, or that too much of its kind is under way.
    pub(crate) async fn within<T>(
        &self,
        method: &'static str,
        work: impl Future<Output = Result<T, Problem>>,
    ) -> Result<T, Problem> {
        let Some(kind) = Kind::of(method) else { return work.await };
        let place = self.begin(kind, method)?;
        let done = work.await;
        // One that was turned away further in took no time, and says nothing of how long it would have taken.
        if !matches!(&done, Err(problem) if problem.kind() == ProblemKind::Overloaded) {
            place.answered();
        }
        done
    }

    fn begin(&self, kind: Kind, method: &'static str) -> Result<Place, Problem> {
        self.with(kind, Limit::begin).map_err(|limit| too_many(kind, limit))?;
        Ok(Place { admission: self.clone(), kind, method, begun: Instant::now(), is_answered: false })
    }

    pub(crate) fn with<T>(&self, kind: Kind, look: impl FnOnce(&mut Limit) -> T) -> T {
        look(&mut self.0[kind as usize].lock().unwrap_or_else(PoisonError::into_inner))
    }
}

fn too_many(kind: Kind, limit: usize) -> Problem {
    let text = format!("{limit} {}s are under way, as many as this worker answers in time", kind.word());
    Problem::of(ProblemKind::Overloaded, text).retry_after(RETRY_MS)
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
