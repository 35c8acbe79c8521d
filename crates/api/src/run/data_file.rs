//! Files that runs read as a whole.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{ConfigMapKey, LearnerRunSpec, SpectraSource};

/// Maximum size of the data file of a run in bytes: it is part of every task's message.
pub const MAX_DATA_BYTES: usize = 3 << 20;

/// A file: exactly one of `path` and `configMap`. The run keeps its content when it starts, so that later changes of the file do not
/// matter.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct DataFile {
    /// Path of the file of at most 3 MiB, relative to the manifest or to `input`. On Kubernetes only with `input`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 4096), example = &"spectra.csv")]
    pub path: Option<String>,

    /// On Kubernetes: a ConfigMap in the run's namespace that holds the file, instead of `path`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub config_map: Option<ConfigMapKey>,

    /// On Kubernetes: entry of the cluster's `spec.inputs` that holds the file at `path`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("format" = "engram-name"))]
    pub input: Option<String>,
}

/// Paths of data files in a manifest.
pub(crate) const DATA_FILES: [&str; 5] = [
    "spec.geodesic.source.csv",
    "spec.tropical.classify.data.csv.file",
    "spec.tropical.graph.file",
    "spec.fisher.data.csv.file",
    "spec.replay.source.csv.file",
];

impl LearnerRunSpec {
    /// Returns the data file of a run.
    pub fn data_file(&self) -> Option<&DataFile> {
        if let Some(SpectraSource::Csv(file)) = self.geodesic.as_ref().map(|run| &run.source) {
            return Some(file);
        }
        let tropical = self.tropical.as_ref().and_then(|run| run.input_file());
        let fisher = || self.fisher.as_ref()?.data.csv_file();
        tropical.or_else(fisher).or_else(|| self.replay.as_ref()?.source.csv_file())
    }

    /// See [`Self::data_file`].
    pub fn data_file_mut(&mut self) -> Option<&mut DataFile> {
        if let Some(SpectraSource::Csv(file)) = self.geodesic.as_mut().map(|run| &mut run.source) {
            return Some(file);
        }
        let tropical = self.tropical.as_mut().and_then(|run| run.input_file_mut());
        let fisher = self.fisher.as_mut().and_then(|run| run.data.csv_file_mut());
        tropical.or(fisher).or_else(|| self.replay.as_mut()?.source.csv_file_mut())
    }
}
