//! Runs of kind `Fisher`.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::DataFile;

/// Fisher information of a classifier.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct FisherRun {
    /// Seed of all random numbers.
    pub seed: u64,
}

impl Default for FisherRun {
    fn default() -> Self {
        Self { seed: 42 }
    }
}

impl FisherRun {
    /// Returns the data file, if the run reads one.
    pub const fn data_file(&self) -> Option<&DataFile> {
        None
    }

    /// See [`Self::data_file`].
    pub const fn data_file_mut(&mut self) -> Option<&mut DataFile> {
        None
    }
}
