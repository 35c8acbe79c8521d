//! Results of the check, as they are serialized.

use serde::{Deserialize, Serialize};

/// Complete results.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Report {
    /// Version of this program.
    pub(crate) engram: String,
    pub(crate) device: Device,
    pub(crate) checks: Vec<Check>,
    /// Throughput of copies within device memory, bytes read and written; `None` without measurements.
    pub(crate) copy_gb_per_s: Option<f64>,
    pub(crate) rows: Vec<Row>,
}

impl Report {
    /// Counts the checks with this outcome.
    pub(crate) fn count(&self, outcome: Outcome) -> usize {
        self.checks.iter().filter(|check| check.outcome == outcome).count()
    }
}

/// Properties of the GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Device {
    /// Vendor name.
    pub(crate) name: String,
    /// Device index.
    pub(crate) ordinal: usize,
    /// Compute capability: `9.0`.
    pub(crate) capability: String,
    /// CUDA version of the driver: `13.0`.
    pub(crate) driver: String,
    /// Total memory in bytes.
    pub(crate) memory_bytes: u64,
}

/// Result of one check.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Check {
    pub(crate) name: String,
    pub(crate) outcome: Outcome,
    /// Summary, reason of the failure, or missing prerequisite.
    pub(crate) detail: String,
    pub(crate) seconds: f64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Outcome {
    Passed,
    Failed,
    /// Not possible on this machine.
    Skipped,
}

impl Outcome {
    pub(crate) const fn label(self) -> &'static str {
        match self {
            Self::Passed => "passed",
            Self::Failed => "FAILED",
            Self::Skipped => "skipped",
        }
    }
}

/// Measurements of one pass.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Row {
    /// Display name.
    pub(crate) pass: String,
    /// Name of the peers' equivalent workload; empty if there is none.
    #[serde(default)]
    pub(crate) workload: String,
    pub(crate) memories: u64,
    /// Minimum bytes that the pass reads or writes; 0 if memory bandwidth is not its limit.
    pub(crate) bytes: u64,
    /// Duration of the kernels, by the device's clock.
    pub(crate) device: Figure,
    /// Duration from the call to the results.
    pub(crate) call: Figure,
    /// `bytes` over the median on the device, relative to the throughput of copies.
    pub(crate) of_copy: Option<f64>,
    /// Budget of the call in milliseconds.
    #[serde(default)]
    pub(crate) promised_ms: Option<f64>,
    #[serde(default)]
    pub(crate) peers: Vec<Peer>,
}

/// Durations in milliseconds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(crate) struct Figure {
    pub(crate) best: f64,
    pub(crate) median: f64,
    pub(crate) repeats: usize,
}

impl Figure {
    /// # Panics
    /// When `milliseconds` is empty.
    pub(crate) fn of(mut milliseconds: Vec<f64>) -> Self {
        milliseconds.sort_by(f64::total_cmp);
        Self { best: milliseconds[0], median: milliseconds[milliseconds.len() / 2], repeats: milliseconds.len() }
    }
}

/// Duration of a peer's equivalent work on the same device.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Peer {
    pub(crate) name: String,
    pub(crate) device: Figure,
}

/// Result of a part.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct PartResult {
    /// Summary of the work.
    pub(crate) detail: String,
    /// Reason why it was skipped.
    #[serde(default)]
    pub(crate) skipped: Option<String>,
    #[serde(default)]
    pub(crate) copy_gb_per_s: Option<f64>,
    #[serde(default)]
    pub(crate) rows: Vec<Row>,
}

impl PartResult {
    pub(crate) fn passed(detail: impl Into<String>) -> Self {
        Self { detail: detail.into(), ..Self::default() }
    }

    pub(crate) fn skipped(why: impl Into<String>) -> Self {
        Self { skipped: Some(why.into()), ..Self::default() }
    }
}
