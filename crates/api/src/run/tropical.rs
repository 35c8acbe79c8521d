//! Runs of kind `Tropical`.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::DataFile;

/// Max-plus workloads.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct TropicalRun {
    /// Seed of all random numbers.
    pub seed: u64,
}

impl Default for TropicalRun {
    fn default() -> Self {
        Self { seed: 42 }
    }
}

impl TropicalRun {
    /// Returns the data file, if the run reads one.
    pub const fn data_file(&self) -> Option<&DataFile> {
        None
    }

    /// See [`Self::data_file`].
    pub const fn data_file_mut(&mut self) -> Option<&mut DataFile> {
        None
    }
}
