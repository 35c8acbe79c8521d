//! Waits for items or for a rate limiter, until a deadline.

use super::Buffers;
use crate::shared::Shared;
use engram_client::BufferSpec;
use engram_proto::v1::{self, Problem, ProblemKind};
use engram_replay::limiter::{Counts, RateLimiter, Wait};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{Instant, sleep};

/// Interval of checks: what is waited for happens at other workers, which do not announce it.
const CHECKS: [Duration; 2] = [Duration::from_millis(2), Duration::from_millis(50)];

/// Label of a call that waits for items.
const ITEMS: &str = "items";

/// Why a call waits: the label of the metric, and the text for the caller.
#[derive(Debug, Clone)]
pub(crate) struct Waiting {
    pub(crate) reason: &'static str,
    pub(crate) text: String,
}

impl Waiting {
    pub(crate) fn for_items(text: String) -> Self {
        Self { reason: ITEMS, text }
    }

    pub(crate) fn is_for_items(&self) -> bool {
        self.reason == ITEMS
    }
}

impl From<Wait> for Waiting {
    fn from(wait: Wait) -> Self {
        let reason = match wait {
            Wait::Filling { .. } => "filling",
            Wait::Inserts { .. } => "inserts",
            Wait::Samples { .. } => "samples",
        };
        Self { reason, text: wait.to_string() }
    }
}

/// Returns the limiter of a buffer, as its partitions have counted; `None` if it has none.
///
/// The limiter decides about one item at a time, so that inserts and samples never block each other: a call is admitted with its first item,
/// and may take the cursor beyond a bound by the size of its batch.
pub(crate) fn limiter(spec: &BufferSpec, shares: &[v1::BufferShare]) -> Option<RateLimiter> {
    let sum = |of: fn(&v1::BufferShare) -> u64| shares.iter().map(of).sum::<u64>();
    let appended = sum(|share| share.appended);
    let counts = Counts {
        inserts: appended,
        samples: sum(|share| share.sampled),
        deletes: appended.saturating_sub(sum(|share| share.items)),
    };
    RateLimiter::restore(spec.limiter?, counts).ok().map(|(limiter, _)| limiter)
}

/// Checks whether an append may go on now.
///
/// While a sample that the limiter allows lacks items, appends may exceed the upper bound: there are fewer items than FIFO, LIFO or groups draw, or all
/// are too old, so that samples could only wait for appends, and appends for samples.
pub(crate) fn check_append(spec: &BufferSpec, shares: &[v1::BufferShare]) -> Result<(), Waiting> {
    match limiter(spec, shares) {
        Some(limiter) if shares.iter().all(|share| !share.lacks_items) => limiter.insert(1).map_err(Waiting::from),
        _ => Ok(()),
    }
}

/// The waits of a call, up to its deadline.
pub(crate) struct Waits {
    shared: Arc<Shared>,
    buffer: String,
    started: Instant,
    deadline: Instant,
    pause: Duration,
    /// What it waits for now, as counted in the metrics.
    reason: Option<&'static str>,
}

impl Drop for Waits {
    fn drop(&mut self) {
        self.shared.metrics.buffers.waits(&self.buffer, self.reason.take(), None);
    }
}

impl Waits {
    pub(crate) fn new(shared: &Arc<Shared>, buffer: &str, wait_ms: u32) -> Self {
        let started = Instant::now();
        let deadline = started + Duration::from_millis(wait_ms.into());
        Self {
            shared: Arc::clone(shared),
            buffer: buffer.to_owned(),
            started,
            deadline,
            pause: CHECKS[0],
            reason: None,
        }
    }

    /// Waits before the next attempt.
    ///
    /// The deadline would pass: an error with the reason.
    pub(crate) async fn pause(&mut self, waiting: Waiting) -> Result<(), Problem> {
        if Instant::now() + self.pause > self.deadline || self.shared.lifecycle.is_stopping() {
            let seconds = self.started.elapsed().as_secs_f64();
            let text = format!("deadline passed after {seconds:.1} s {}", waiting.text);
            return Err(Problem::of(ProblemKind::BufferWait, text));
        }
        self.shared.metrics.buffers.waits(&self.buffer, self.reason.replace(waiting.reason), Some(waiting.reason));
        sleep(self.pause).await;
        self.shared.metrics.buffers.waited(&self.buffer, waiting.reason, self.pause);
        self.pause = (self.pause * 2).min(CHECKS[1]);
        Ok(())
    }
}

impl Buffers {
    /// Waits until the limiter of a buffer allows an append.
    pub(crate) async fn wait_for_append(&self, name: &str, wait_ms: u32) -> Result<(), Problem> {
        let definition = self.definition(name).await?;
        if definition.spec.limiter.is_none() {
            return Ok(());
        }
        let request = v1::GetSharesRequest { buffer: name.to_owned(), ..v1::GetSharesRequest::default() };
        let mut waits = Waits::new(&self.shared, name, wait_ms);
        loop {
            let shares = self.shares(&request).await?;
            match check_append(&definition.spec, &shares) {
                Ok(()) => return Ok(()),
                Err(waiting) => waits.pause(waiting).await?,
            }
        }
    }
}
