//! Progress messages of a member: sums over the steps since the last one.

use super::priorities::PriorityUpdates;
use engram_collective::group::MemberId;
use engram_proto::v1;
use engram_train::StepReport;
use std::time::{Duration, Instant};

/// Shortest time between two progress messages.
const INTERVAL: Duration = Duration::from_millis(100);

/// Sums since the last progress message.
pub(super) struct Meter {
    sent: Instant,
    /// Begin of the time that the sums cover.
    pub(super) since: Instant,
    pub(super) progress: v1::TrainingProgress,
    reduced_bytes: u64,
    /// Generation and members of the last step, and when it was finished.
    last: Option<(u64, Vec<MemberId>, Instant)>,
}

/// Counts of the member when a step is finished.
pub(super) struct Totals {
    pub(super) sent_bytes: u64,
    pub(super) checkpoint_step: u64,
    pub(super) samples: u64,
}

impl Meter {
    pub(super) fn new() -> Self {
        let now = Instant::now();
        Self { sent: now, since: now, progress: v1::TrainingProgress::default(), reduced_bytes: 0, last: None }
    }

    /// Adds a finished step.
    pub(super) fn add(&mut self, report: &StepReport, own_samples: u64) {
        let progress = &mut self.progress;
        progress.step = report.step + 1;
        progress.steps += 1;
        progress.samples += report.samples;
        progress.own_samples += own_samples;
        (progress.loss, progress.gradient_norm) = (report.loss, report.gradient_norm);
        progress.learning_rate = report.rate.into();
    }

    /// Notes who took part in a finished step; measures the time since the last one if a member was lost between them.
    pub(super) fn note_members(&mut self, generation: u64, members: &[MemberId]) {
        let now = Instant::now();
        match &mut self.last {
            Some((last, _, finished)) if *last == generation => *finished = now,
            last => {
                if let Some((_, before, finished)) = last
                    && before.iter().any(|member| !members.contains(member))
                {
                    let longest = &mut self.progress.recovery_seconds;
                    *longest = longest.max(now.duration_since(*finished).as_secs_f64());
                }
                *last = Some((generation, members.to_vec(), now));
            }
        }
    }

    /// Bytes that new connections sent before the first reduction do not count.
    pub(super) const fn begin_connections(&mut self, sent_bytes: u64) {
        self.reduced_bytes = sent_bytes;
    }

    /// Whether a message is due.
    pub(super) fn is_due(&self) -> bool {
        self.sent.elapsed() >= INTERVAL
    }

    /// Returns the message, and begins the next one.
    pub(super) fn take_message(&mut self, totals: &Totals, updates: Option<&PriorityUpdates>) -> v1::TrainingProgress {
        let progress = &mut self.progress;
        progress.wall_seconds = self.since.elapsed().as_secs_f64();
        progress.reduced_bytes = totals.sent_bytes.saturating_sub(self.reduced_bytes);
        self.reduced_bytes = totals.sent_bytes;
        progress.checkpoint_step = totals.checkpoint_step;
        progress.total_samples = totals.samples;
        count_priorities(updates, progress);
        (self.sent, self.since) = (Instant::now(), Instant::now());
        std::mem::take(progress)
    }
}

/// Moves what became of updated priorities into a progress message.
pub(super) fn count_priorities(updates: Option<&PriorityUpdates>, progress: &mut v1::TrainingProgress) {
    let Some(updates) = updates else { return };
    let counts = updates.take_counts();
    progress.priorities_changed += counts.changed;
    progress.priorities_stale += counts.stale;
    progress.priorities_skipped += counts.skipped;
}
