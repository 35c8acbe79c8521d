//! Admission control: limits the calls in flight by their latency.
//!
//! ```text
//! latency
//!    │            ╱  queueing: a new call waits for all before it
//!    │          ╱
//!    │─ ─ ─ ─ ╱─ ─ ─  slow: TOLERANCE times the baseline
//!    │______╱         batching: log syncs and replication serve many calls at once
//!    └──────┴──────── calls in flight
//!         limit
//! ```
//!
//! A fixed limit lets a queue grow until every call waits as long as the most patient client, and no call is served in time. So the
//! limit follows the latency: it falls while most calls are slow compared to the baseline of their method, and rises otherwise.
//! Baselines are learned only while no call is rejected. They are kept per method, so that a ranking among point reads is not
//! mistaken for a queue.
//!
//! Slow calls alone are no queue: a queue is what can be shortened without reducing throughput. If log syncs are slow, fewer
//! concurrent calls only means fewer calls per sync. So throughput is recorded by the number of calls in flight, and if half as
//! many calls achieved much less, the latency is tolerated ([`ConcurrencyLimit::patience`]) and the limit rises again. CPU
//! contention looks the same from inside, because more concurrent calls get a larger share of the CPU until all wait longer; the
//! run queue of the scheduler reveals it.

use crate::observability::cpu_pressure::CpuPressure;
use engram_proto::v1::{Problem, ProblemKind};
use engram_trace::Span;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
// The runtime's clock, which a simulation controls.
use tokio::time::Instant;

/// Lower bound of the limit: one call executes, and the next one is ready.
const FLOOR: usize = 2;
/// Lower bound without evidence that slow calls are a queue.
const UNPROVEN_FLOOR: usize = 64;
/// Upper bound of the limit: each call holds a message.
pub(crate) const CEILING: usize = 1_024;
/// Number of powers of two up to the ceiling.
const LEVELS: usize = CEILING.ilog2() as usize + 1;
/// Multiple of the baseline above which a call is slow. The median latency of admitted calls settles near it.
const TOLERANCE: f64 = 2.0;
/// Calls faster than this are never slow: below it, latency depends on the scheduler more than on a queue.
const NEVER_SLOW: Duration = Duration::from_millis(3);
/// Minimum duration and number of calls of an evaluation window.
const WINDOW: Duration = Duration::from_millis(100);
const WINDOW_CALLS: u32 = 32;
/// Factor of the limit when calls are slow. A smaller one would reject more than the queue.
const LIMIT_DECREASE: f64 = 0.85;
/// Factor of the limit when fewer concurrent calls achieved less.
const LIMIT_INCREASE: f64 = 1.5;
/// If half as many concurrent calls achieve less than this share of the throughput, there was no queue.
const QUEUE_THROUGHPUT_SHARE: f64 = 0.75;
/// Weight of a new window in the throughput of a level, and decay of that throughput each time it was the reason for patience,
/// because it may be outdated.
const THROUGHPUT_WEIGHT: f64 = 0.2;
const THROUGHPUT_DECAY: f64 = 0.9;
/// Growth and maximum of patience, and its decay after a window that is not slow.
const PATIENCE_GROWTH: f64 = 1.25;
const MAX_PATIENCE: f64 = 16.0;
const PATIENCE_DECAY: f64 = 0.995;
/// Retry hint in milliseconds.
const RETRY_MS: u64 = 50;

/// Concurrency limit of calls of one kind. Pure: time, calls and CPU pressure are passed in.
#[derive(Debug)]
pub(crate) struct ConcurrencyLimit {
    limit: f64,
    in_flight: usize,
    rejected: u64,
    /// Tolerated slowdown over the baseline, for slowness that is no queue.
    patience: f64,
    baselines: BTreeMap<&'static str, Baseline>,
    window: Window,
    /// Whether calls were rejected in the previous window.
    rejected_before: bool,
    /// Throughput by the logarithm of the calls in flight; 0 = not known.
    throughput: [f64; LEVELS],
    cpu_pressure: CpuPressure,
}

/// Calls that ended since the last evaluation.
#[derive(Debug)]
struct Window {
    since: Instant,
    calls: u32,
    slow: u32,
    /// Sum of the baselines of the calls, in seconds.
    baseline_seconds: f64,
    /// Maximum number in flight.
    max_in_flight: usize,
    rejected: bool,
}

impl Window {
    const fn new(since: Instant) -> Self {
        Self { since, calls: 0, slow: 0, baseline_seconds: 0.0, max_in_flight: 0, rejected: false }
    }
}

/// Baseline latency of a method: the median of calls while none are rejected, robust to outliers.
#[derive(Debug)]
struct Baseline {
    seconds: f64,
    /// Number of calls so far, up to [`Baseline::FIRST`].
    calls: u32,
    /// Calls of this window that took longer than the baseline, less those that did not.
    longer: i32,
}

impl Baseline {
    /// Adaptation rate: per call at first, then per window. It rises slowly, because slowly rising load makes every call slower as
    /// well, and falls fast.
    const FIRST: u32 = 64;
    const INITIAL_RATE: f64 = 0.02;
    const RISE_RATE: f64 = 0.005;
    const FALL_RATE: f64 = 0.03;

    const fn new(seconds: f64) -> Self {
        Self { seconds, calls: 0, longer: 0 }
    }

    fn observe(&mut self, seconds: f64) {
        let longer = seconds > self.seconds;
        self.longer += if longer { 1 } else { -1 };
        if self.calls < Self::FIRST {
            self.calls += 1;
            self.seconds *= if longer { 1.0 + Self::INITIAL_RATE } else { 1.0 - Self::INITIAL_RATE };
        }
    }

    fn adapt(&mut self, may_rise: bool) {
        match std::mem::take(&mut self.longer) {
            longer if longer < 0 => self.seconds *= 1.0 - Self::FALL_RATE,
            longer if longer > 0 && may_rise => self.seconds *= 1.0 + Self::RISE_RATE,
            _ => {}
        }
    }
}

impl ConcurrencyLimit {
    pub(crate) const fn new(now: Instant, cpu_pressure: CpuPressure) -> Self {
        Self {
            limit: CEILING as f64,
            in_flight: 0,
            rejected: 0,
            patience: 1.0,
            baselines: BTreeMap::new(),
            window: Window::new(now),
            rejected_before: false,
            throughput: [0.0; LEVELS],
            cpu_pressure,
        }
    }

    /// Returns the current limit.
    pub(crate) const fn limit(&self) -> usize {
        self.limit as usize
    }

    pub(crate) const fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// Returns the number of rejected calls.
    pub(crate) const fn rejected(&self) -> u64 {
        self.rejected
    }

    /// Checks whether another call fits.
    ///
    /// # Errors
    /// The limit, if it is reached. Counts a rejection.
    pub(crate) const fn check_capacity(&mut self) -> Result<(), usize> {
        if self.in_flight < self.limit() {
            return Ok(());
        }
        self.rejected += 1;
        self.window.rejected = true;
        Err(self.limit())
    }

    /// Admits a call, which [`ConcurrencyLimit::end`] completes.
    ///
    /// # Errors
    /// As of [`ConcurrencyLimit::check_capacity`].
    pub(crate) fn begin(&mut self) -> Result<(), usize> {
        self.check_capacity()?;
        self.in_flight += 1;
        self.window.max_in_flight = self.window.max_in_flight.max(self.in_flight);
        Ok(())
    }

    /// Completes a call; `latency` is `None` if it was abandoned, and its duration is meaningless.
    pub(crate) fn end(&mut self, method: &'static str, latency: Option<Duration>, now: Instant) {
        self.in_flight -= 1;
        let Some(latency) = latency else { return };
        let seconds = latency.as_secs_f64();
        let baseline = self.baselines.entry(method).or_insert_with(|| Baseline::new(seconds));
        let slow = (baseline.seconds * TOLERANCE * self.patience).max(NEVER_SLOW.as_secs_f64());
        self.window.calls += 1;
        self.window.slow += u32::from(seconds > slow);
        self.window.baseline_seconds += baseline.seconds;
        baseline.observe(seconds);
        let duration = now.saturating_duration_since(self.window.since);
        if self.window.calls >= WINDOW_CALLS && duration >= WINDOW {
            self.evaluate_window(duration, now);
            self.rejected_before = self.window.rejected;
            self.window = Window { max_in_flight: self.in_flight, ..Window::new(now) };
        }
    }

    fn evaluate_window(&mut self, duration: Duration, now: Instant) {
        let Window { calls, slow, max_in_flight, baseline_seconds, rejected, .. } = self.window;
        // A slow call without others in flight was not slow because of a queue.
        let is_slow = slow * 2 > calls && max_in_flight >= FLOOR;
        let is_reached = rejected || self.rejected_before;
        self.baselines.values_mut().for_each(|baseline| baseline.adapt(!is_slow && !is_reached));
        if is_slow || is_reached {
            // Otherwise throughput only reflects the offered load.
            let (recorded, current) =
                (&mut self.throughput[level(max_in_flight)], baseline_seconds / duration.as_secs_f64());
            *recorded = if *recorded == 0.0 {
                current
            } else {
                *recorded * (1.0 - THROUGHPUT_WEIGHT) + current * THROUGHPUT_WEIGHT
            };
        }
        if is_slow {
            self.lower(max_in_flight, now);
            return;
        }
        self.patience = (self.patience * PATIENCE_DECAY).max(1.0);
        // A limit that is far from being reached rises fast, to admit the next burst.
        let rise = if (max_in_flight as f64) < self.limit / 2.0 { self.limit } else { self.limit.sqrt() / 2.0 };
        self.limit = (self.limit + rise).min(CEILING as f64);
        if self.limit() == CEILING {
            // The overload is over; the next one may have another throughput.
            self.throughput = [0.0; LEVELS];
        }
    }

    /// Lowers the limit, or tolerates the latency, when calls are slow with `max_in_flight` calls.
    fn lower(&mut self, max_in_flight: usize, now: Instant) {
        let current_level = level(max_in_flight);
        let throughput_above = self.throughput.get(current_level + 1).copied().unwrap_or_default();
        let is_under_pressure = self.cpu_pressure.is_short(now);
        if !is_under_pressure && self.throughput[current_level] < throughput_above * QUEUE_THROUGHPUT_SHARE {
            self.patience = (self.patience * PATIENCE_GROWTH).min(MAX_PATIENCE);
            self.limit = (self.limit * LIMIT_INCREASE).min(CEILING as f64);
            self.throughput[current_level + 1] *= THROUGHPUT_DECAY;
            return;
        }
        let floor = if is_under_pressure || throughput_above > 0.0 { FLOOR } else { UNPROVEN_FLOOR };
        let lowered = self.limit.min(max_in_flight as f64) * LIMIT_DECREASE;
        self.limit = lowered.max(self.limit.min(floor as f64));
    }
}

/// Returns the level at which throughput is recorded.
const fn level(in_flight: usize) -> usize {
    match in_flight.checked_ilog2() {
        Some(level) if (level as usize) < LEVELS => level as usize,
        Some(_) => LEVELS - 1,
        None => 0,
    }
}

/// Kind of a call for admission control.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RequestKind {
    Read,
    Write,
}

impl RequestKind {
    pub(crate) const ALL: [Self; 2] = [Self::Read, Self::Write];

    /// Returns the kind of a method; `None` if it is not limited.
    pub(crate) fn of(method: &str) -> Option<Self> {
        match method {
            "ApplyDecay" | "ApplyReinforcement" | "GetOutcome" | "Remove" | "Upsert" => Some(Self::Write),
            "GetDigest" | "GetMemories" | "GetQuality" | "Rank" | "Recall" | "ScanMemories" => Some(Self::Read),
            _ => None,
        }
    }

    pub(crate) const fn as_str(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write => "write",
        }
    }
}

/// Limits of a worker, over all its listeners.
#[derive(Debug, Clone)]
pub(crate) struct Admission(Arc<[Mutex<ConcurrencyLimit>; 2]>);

impl Admission {
    pub(crate) fn new(cpu_pressure: CpuPressure) -> Self {
        let now = Instant::now();
        Self(Arc::new(RequestKind::ALL.map(|_| Mutex::new(ConcurrencyLimit::new(now, cpu_pressure)))))
    }

    /// Checks capacity before a call's message is read: an early rejection costs least.
    ///
    /// # Errors
    /// The limit of its kind is reached.
    pub(crate) fn check_capacity(&self, method: &str) -> Result<(), Problem> {
        RequestKind::of(method).map_or(Ok(()), |kind| {
            self.with(kind, ConcurrencyLimit::check_capacity).map_err(|limit| too_many(kind, limit))
        })
    }

    /// Runs a call whose message was read, so that slow senders occupy no capacity.
    ///
    /// # Errors
    /// The error of `work`, or that the limit of its kind is reached.
    pub(crate) async fn run<T>(
        &self,
        method: &'static str,
        baseline_seconds: impl Future<Output = Result<T, Problem>>,
    ) -> Result<T, Problem> {
        let Some(kind) = RequestKind::of(method) else { return baseline_seconds.await };
        let mut span = Span::child("admission");
        let permit = self.begin(kind, method);
        span.note(&permit.as_ref().map_err(|problem| &problem.message));
        drop(span);
        let permit = permit?;
        let result = baseline_seconds.await;
        // A call that was rejected further down took no time, and its duration is meaningless.
        if !matches!(&result, Err(problem) if problem.kind() == ProblemKind::Overloaded) {
            permit.mark_answered();
        }
        result
    }

    fn begin(&self, kind: RequestKind, method: &'static str) -> Result<Permit, Problem> {
        self.with(kind, ConcurrencyLimit::begin).map_err(|limit| too_many(kind, limit))?;
        Ok(Permit { admission: self.clone(), kind, method, started: Instant::now(), is_answered: false })
    }

    pub(crate) fn with<T>(&self, kind: RequestKind, access: impl FnOnce(&mut ConcurrencyLimit) -> T) -> T {
        access(&mut self.0[kind as usize].lock())
    }
}

fn too_many(kind: RequestKind, limit: usize) -> Problem {
    let text = format!("{limit} {}s are in flight, the most that this worker can answer in time", kind.as_str());
    Problem::of(ProblemKind::Overloaded, text).retry_after(RETRY_MS)
}

/// A call in flight, until it is dropped.
#[derive(Debug)]
struct Permit {
    admission: Admission,
    kind: RequestKind,
    method: &'static str,
    started: Instant,
    is_answered: bool,
}

impl Permit {
    /// Marks the call as answered. Otherwise it counts as abandoned and its duration is ignored.
    fn mark_answered(mut self) {
        self.is_answered = true;
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        let now = Instant::now();
        let latency = self.is_answered.then(|| now.saturating_duration_since(self.started));
        self.admission.with(self.kind, |limit| limit.end(self.method, latency, now));
    }
}

#[cfg(test)]
mod tests;
