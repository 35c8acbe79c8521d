//! Settings of a run with all defaults filled in.

use crate::source::{SourceOptions, SyntheticOptions};
use engram_memory::OnMissing;

/// Settings of a memory run.
#[derive(Debug, Clone, PartialEq)]
pub struct Job {
    /// Source of the epochs.
    pub source: SourceOptions,
    /// Most epochs; `None` = all of the source.
    pub epochs: Option<u64>,
    /// Decay per epoch, in [0, 1].
    pub decay: f64,
    /// Handling of unknown ids.
    pub on_missing: OnMissing,
    /// Sizes of the top for which hits are counted; empty = no prediction.
    pub top_k: Vec<u32>,
    /// Epochs before the first prediction.
    pub skip: u64,
    /// Whether the inversion ratio is counted over the full rank instead of a histogram.
    pub exact_inversion: bool,
    /// Whether the updates of each memory are counted.
    pub coverage: bool,
    /// Conditions that end a synthetic run early.
    pub until: Conditions,
}

/// Conditions of which the first one to hold ends a synthetic run.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Conditions {
    /// Separation at least this.
    pub separation: Option<f64>,
    /// Convergence factor at least this.
    pub convergence: Option<f64>,
}

impl Conditions {
    /// Returns whether one holds.
    pub fn hold(&self, separation: Option<f64>, convergence: Option<f64>) -> bool {
        let reached =
            |threshold: Option<f64>, current: Option<f64>| matches!((threshold, current), (Some(w), Some(f)) if f >= w);
        reached(self.separation, separation) || reached(self.convergence, convergence)
    }
}

impl Job {
    /// The experiment, when this is one.
    pub const fn experiment(&self) -> Option<&SyntheticOptions> {
        match &self.source {
            SourceOptions::Synthetic(options) => Some(options),
            _ => None,
        }
    }
}
