//! Progress messages of a member: sums over the steps since the last one.

use crate::training::step::priorities::PriorityUpdates;
use engram_collective::group::MemberId;
use engram_proto::v1;
use engram_train::{StepReport, StepTimes};
use std::time::{Duration, Instant};

/// Shortest time between two progress messages.
const INTERVAL: Duration = Duration::from_millis(100);

/// Sums since the last progress message.
pub(in crate::training) struct Meter {
    sent: Instant,
    /// Begin of the time that the sums cover.
    pub(in crate::training) since: Instant,
    pub(in crate::training) progress: v1::TrainingProgress,
    reduced_bytes: u64,
    /// Generation and members of the last step, and when it was finished.
    last: Option<(u64, Vec<MemberId>, Instant)>,
    /// Reductions since the last finished step.
    reduction: Duration,
    /// Times of the last finished step, from the one before in the same generation; 0 without one.
    pub(in crate::training) last_step: StepTimes,
}

/// Counts of the member when a step is finished.
pub(in crate::training) struct Totals {
    pub(in crate::training) sent_bytes: u64,
    pub(in crate::training) checkpoint_step: u64,
    pub(in crate::training) samples: u64,
}

impl Meter {
    pub(in crate::training) fn new() -> Self {
        let now = Instant::now();
        Self {
            sent: now,
            since: now,
            progress: v1::TrainingProgress::default(),
            reduced_bytes: 0,
            last: None,
            reduction: Duration::ZERO,
            last_step: StepTimes::default(),
        }
    }

    /// Adds a finished step.
    pub(in crate::training) fn add(&mut self, report: &StepReport, own_samples: u64) {
        let progress = &mut self.progress;
        progress.step = report.step + 1;
        progress.steps += 1;
        progress.samples += report.samples;
        progress.own_samples += own_samples;
        (progress.loss, progress.gradient_norm) = (report.loss, report.gradient_norm);
        progress.learning_rate = report.rate.into();
    }

    /// Adds time of a reduction that no computation hid.
    pub(in crate::training) fn add_reduction(&mut self, seconds: f64) {
        self.progress.reduce_seconds += seconds;
        self.reduction += Duration::from_secs_f64(seconds);
    }

    /// Notes when a step was finished and who took part; measures its times, or the time since the last one if a member was lost between them.
    pub(in crate::training) fn note_members(&mut self, generation: u64, members: &[MemberId], now: Instant) {
        let reduction = std::mem::take(&mut self.reduction);
        self.last_step = StepTimes::default();
        match &mut self.last {
            Some((last, _, finished)) if *last == generation => {
                let step = now.duration_since(*finished);
                self.last_step =
                    StepTimes { step: step.as_nanos() as u64, reduction: reduction.min(step).as_nanos() as u64 };
                *finished = now;
            }
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
    pub(in crate::training) const fn begin_connections(&mut self, sent_bytes: u64) {
        self.reduced_bytes = sent_bytes;
    }

    /// Whether a message is due.
    pub(in crate::training) fn is_due(&self) -> bool {
        self.sent.elapsed() >= INTERVAL
    }

    /// Returns the message, and begins the next one.
    pub(in crate::training) fn take_message(
        &mut self,
        totals: &Totals,
        updates: Option<&PriorityUpdates>,
    ) -> v1::TrainingProgress {
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
pub(in crate::training) fn count_priorities(updates: Option<&PriorityUpdates>, progress: &mut v1::TrainingProgress) {
    let Some(updates) = updates else { return };
    let counts = updates.take_counts();
    progress.priorities_changed += counts.changed;
    progress.priorities_stale += counts.stale;
    progress.priorities_skipped += counts.skipped;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_of_a_step_are_those_between_two_steps_of_one_generation() {
        let (mut meter, began) = (Meter::new(), Instant::now());
        let at = |milliseconds: u64| began + Duration::from_millis(milliseconds);
        let milliseconds =
            |step: u64, reduction: u64| StepTimes { step: step * 1_000_000, reduction: reduction * 1_000_000 };
        let (three, two) = ([1, 2, 3].map(MemberId), [1, 2].map(MemberId));
        meter.add_reduction(0.5);
        meter.note_members(1, &three, at(1_000));
        assert_eq!(meter.last_step, StepTimes::default(), "no step before");
        meter.add_reduction(0.25);
        meter.add_reduction(0.125);
        meter.note_members(1, &three, at(2_000));
        assert_eq!(meter.last_step, milliseconds(1_000, 375));
        // A failure is no property of the links.
        meter.add_reduction(4.0);
        meter.note_members(2, &two, at(7_000));
        assert_eq!(meter.last_step, StepTimes::default());
        meter.note_members(2, &two, at(7_500));
        assert_eq!(meter.last_step, milliseconds(500, 0), "reductions count in one step");
        assert_eq!(meter.progress.reduce_seconds, 4.875);
    }
}
