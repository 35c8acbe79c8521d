//! Learning epochs of a partition: numbered per run, applied once, resumable.
//!
//! A small epoch is one record; a large one consists of a beginning, parts 1, 2, ... and an end. A repeat gets the stored result,
//! and a gap is rejected, so any driver can query the progress of a partition and continue from there.

use crate::ids::{LearningEpoch, RunId};
use crate::outcome::{Outcome, Refusal};
use std::collections::{BTreeMap, VecDeque};

/// Results kept per run.
pub const KEPT_RESULTS: usize = 16;
/// Maximum number of runs with epochs in a partition. One run learns at a time, and an ended one needs its entry no more.
pub const MAX_RUNS: usize = 1_024;

/// A step of an epoch, as the log carries it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// The whole epoch in one record.
    Whole,
    /// The beginning of a large one.
    Begin,
    /// Part k of a large one, from 1.
    Part(u32),
    /// The end of a large one with this many parts.
    End(u32),
}

/// What to do with a step that arrives.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Admission {
    /// Execute it, then [`Table::complete`].
    Execute,
    /// Already done: reply with this, change nothing.
    Repeat(Outcome),
    /// Out of order.
    Refuse(Refusal),
}

/// Progress of a run in a partition.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Progress {
    /// Number of the last closed epoch, 0 before the first.
    pub done: u64,
    /// Applied parts of epoch `done + 1`, if it was begun.
    pub open: Option<u32>,
    /// Results of the last closed epochs, oldest first.
    pub results: VecDeque<(LearningEpoch, Outcome)>,
}

/// Runs with epochs in a partition.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Table {
    pub(crate) runs: BTreeMap<RunId, Progress>,
}

impl Table {
    /// Returns the progress of `run`; `None` before its first epoch.
    pub fn progress(&self, run: RunId) -> Option<&Progress> {
        self.runs.get(&run)
    }

    /// Returns the number of runs.
    pub fn len(&self) -> usize {
        self.runs.len()
    }

    /// Whether there is no run.
    pub fn is_empty(&self) -> bool {
        self.runs.is_empty()
    }

    /// Returns all runs, by id.
    pub fn iter(&self) -> impl Iterator<Item = (RunId, &Progress)> {
        self.runs.iter().map(|(run, progress)| (*run, progress))
    }

    /// Decides what to do with a step, changing nothing.
    pub fn admit(&self, run: RunId, n: LearningEpoch, step: Step) -> Admission {
        let new = Progress::default();
        let progress = self.runs.get(&run).unwrap_or(&new);
        if n.0 != 0 && n.0 <= progress.done {
            return match (step, progress.results.iter().find(|(kept, _)| *kept == n)) {
                // Applied with its epoch, of which only the final result is kept.
                (Step::Begin | Step::Part(_), _) => Admission::Repeat(Outcome::default()),
                (_, Some((_, outcome))) => Admission::Repeat(outcome.clone()),
                (_, None) => Admission::Refuse(Refusal::EpochForgotten { n }),
            };
        }
        let follows = n.0 != 0 && n.0 - 1 == progress.done;
        let gap = |expected_part, found_part| {
            Admission::Refuse(Refusal::EpochGap {
                expected: LearningEpoch(progress.done.saturating_add(1)),
                expected_part,
                found: n,
                found_part,
            })
        };
        let expected_part = progress.open.map_or(0, |applied| applied.saturating_add(1));
        match (step, progress.open) {
            (Step::Whole | Step::Begin, None) if follows => Admission::Execute,
            (Step::Begin, Some(_)) if follows => Admission::Repeat(Outcome::default()),
            (Step::Part(part), Some(applied)) if follows && applied.checked_add(1) == Some(part) => Admission::Execute,
            (Step::Part(part), Some(applied)) if follows && (1..=applied).contains(&part) => {
                Admission::Repeat(Outcome::default())
            }
            (Step::End(parts), Some(applied)) if follows && parts == applied => Admission::Execute,
            (Step::Whole | Step::Begin, _) => gap(expected_part, 0),
            (Step::Part(part), _) => gap(expected_part, part),
            (Step::End(parts), _) => gap(expected_part, parts.saturating_add(1)),
        }
    }

    /// Records an executed step. The outcome of a whole epoch or of an end is kept.
    pub fn complete(&mut self, run: RunId, n: LearningEpoch, step: Step, outcome: &Outcome) {
        if self.runs.len() >= MAX_RUNS && !self.runs.contains_key(&run) {
            self.evict();
        }
        let progress = self.runs.entry(run).or_default();
        match step {
            Step::Begin => progress.open = Some(0),
            Step::Part(part) => progress.open = Some(part),
            Step::Whole | Step::End(_) => {
                progress.open = None;
                progress.done = n.0;
                if progress.results.len() == KEPT_RESULTS {
                    progress.results.pop_front();
                }
                progress.results.push_back((n, outcome.clone()));
            }
        }
    }

    /// Removes the run that has done least: it has the least to lose, and the choice depends on the table only.
    fn evict(&mut self) {
        let least = self.runs.iter().map(|(run, progress)| (progress.done, *run)).min();
        if let Some((_, run)) = least {
            self.runs.remove(&run);
        }
    }

    /// Removes a run.
    pub fn remove(&mut self, run: RunId) {
        self.runs.remove(&run);
    }
}
