//! Persistent state of a Replay run: the membership of its group, and the course of the training.

use super::history;
use serde::{Deserialize, Serialize};

/// State of a Replay run.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct TrainingState {
    /// Submission time of the run when it first started, which names its checkpoints.
    pub started_ms: u64,
    /// Generation of the group.
    pub generation: u64,
    /// Members in rank order; none before the first generation, and after the run was suspended.
    pub members: Vec<GroupMemberState>,
    /// Step from which the generation started.
    pub step: u64,
    /// Digest of the state after that step.
    pub digest: u64,
    /// Samples that were trained on.
    pub samples: u64,
    /// Members that left by failures.
    pub failures: u64,
    /// With differential privacy: 32 random bytes from which samples and noise follow.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub noise_secret: Vec<u8>,
    /// Course of the training, ascending by step.
    pub history: Vec<TrainingRow>,
}

/// A member of the group.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GroupMemberState {
    /// Identifies the process.
    pub id: u64,
    /// Its worker.
    pub ordinal: u32,
    /// Its address for reductions.
    pub address: String,
}

/// Figures of the training around a step.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct TrainingRow {
    /// The step.
    pub step: u64,
    /// Mean loss over the batch.
    pub loss: f64,
    /// Samples of all members per second.
    pub samples_per_s: f64,
    /// Samples per second divided by what the members compute without communication; 0 if unknown.
    pub efficiency: f64,
    /// Members.
    pub members: u32,
}

impl TrainingState {
    /// Adds a row to the history.
    pub fn note(&mut self, row: TrainingRow) {
        history::append(&mut self.history, row, |other, row| other.step < row.step);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_history_is_thinned_and_repeated_steps_replace_rows() {
        let mut state = TrainingState::default();
        (1..=1_000).for_each(|step| state.note(TrainingRow { step, ..TrainingRow::default() }));
        assert!(state.history.len() <= history::MAX_ROWS);
        assert_eq!(state.history.last().unwrap().step, 1_000);
        state.note(TrainingRow { step: 900, loss: 1.0, ..TrainingRow::default() });
        assert_eq!(state.history.last().unwrap().loss, 1.0);
        assert!(state.history.is_sorted_by_key(|row| row.step));
    }
}
