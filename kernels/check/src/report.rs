//! What was found, as it is written.

use serde::{Deserialize, Serialize};

/// All of it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Report {
    /// Version of this program.
    pub(crate) engram: String,
    pub(crate) device: Device,
    pub(crate) checks: Vec<Check>,
    /// What copies within the device's memory reach, read and written bytes together; none where nothing was timed.
    pub(crate) copy_gb_per_s: Option<f64>,
    pub(crate) rows: Vec<Row>,
}

impl Report {
    /// How many checks ended so.
    pub(crate) fn count(&self, outcome: Outcome) -> usize {
        self.checks.iter().filter(|check| check.outcome == outcome).count()
    }
}

/// The GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Device {
    /// What the vendor calls it.
    pub(crate) name: String,
    /// Its number.
    pub(crate) ordinal: usize,
    /// Compute capability: `9.0`.
    pub(crate) capability: String,
    /// The CUDA of the driver: `13.0`.
    pub(crate) driver: String,
    /// Bytes, all of them.
    pub(crate) memory_bytes: u64,
}

/// One check.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Check {
    pub(crate) name: String,
    pub(crate) outcome: Outcome,
    /// What was done; why it failed; what is lacking.
    pub(crate) detail: String,
    pub(crate) seconds: f64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Outcome {
    Passed,
    Failed,
    /// Could not be done here.
    Skipped,
}

impl Outcome {
    pub(crate) const fn word(self) -> &'static str {
        match self {
            Self::Passed => "passed",
            Self::Failed => "FAILED",
            Self::Skipped => "skipped",
        }
    }
}

/// One pass that was timed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Row {
    /// For people.
    pub(crate) pass: String,
    /// What peers call the same work; empty where they have nothing like it.
    #[serde(default)]
    pub(crate) workload: String,
    pub(crate) memories: u64,
    /// Bytes that the pass cannot do without reading or writing, each once; 0 where that is not what bounds it.
    pub(crate) bytes: u64,
    /// On the device, by its own clock: the kernels of the pass.
    pub(crate) device: Figure,
    /// From the call until its results are there.
    pub(crate) call: Figure,
    /// `bytes` over the median on the device, over what copies reach.
    pub(crate) of_copy: Option<f64>,
    /// Milliseconds that were promised for the call.
    #[serde(default)]
    pub(crate) promised_ms: Option<f64>,
    #[serde(default)]
    pub(crate) peers: Vec<Peer>,
}

/// Milliseconds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(crate) struct Figure {
    pub(crate) best: f64,
    pub(crate) median: f64,
    pub(crate) repeats: usize,
}

impl Figure {
    /// # Panics
    /// Without one.
    pub(crate) fn of(mut milliseconds: Vec<f64>) -> Self {
        milliseconds.sort_by(f64::total_cmp);
        Self { best: milliseconds[0], median: milliseconds[milliseconds.len() / 2], repeats: milliseconds.len() }
    }
}

/// The same work, done by somebody else on the same device.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Peer {
    pub(crate) name: String,
    pub(crate) device: Figure,
}

/// What a part prints.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct Found {
    /// What was done.
    pub(crate) detail: String,
    /// Why it could not be done here.
    #[serde(default)]
    pub(crate) skipped: Option<String>,
    #[serde(default)]
    pub(crate) copy_gb_per_s: Option<f64>,
    #[serde(default)]
    pub(crate) rows: Vec<Row>,
}

impl Found {
    pub(crate) fn done(detail: impl Into<String>) -> Self {
        Self { detail: detail.into(), ..Self::default() }
    }

    pub(crate) fn skipped(why: impl Into<String>) -> Self {
        Self { skipped: Some(why.into()), ..Self::default() }
    }
}
