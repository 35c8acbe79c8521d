//! Labelled samples that a run trains a classifier on.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::DataFile;
use crate::manifest_enum::words;

/// Labelled samples of a classification: exactly one source.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub enum Samples {
    /// A built-in data set.
    Example(SampleExample),
    /// A CSV file with a header line, one column of labels and numbers in the other columns.
    Csv(SampleFile),
}

/// A built-in data set of labelled samples.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct SampleExample {
    /// Name of the data set.
    #[schemars(example = &"Digits")]
    pub name: SampleExampleName,
}

words! {
    /// A built-in data set of labelled samples.
    pub enum SampleExampleName {
        /// Handwritten digits: 1,797 images of 8 x 8 pixels in 10 classes.
        Digits,
    }
}

/// A CSV file of labelled samples.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct SampleFile {
    /// The file.
    #[schemars(example = serde_json::json!({ "path": "samples.csv" }))]
    pub file: DataFile,

    /// Column of the class labels, any text. All other columns are numeric features.
    #[schemars(length(min = 1), example = &"label")]
    pub label: String,
}

impl Default for Samples {
    fn default() -> Self {
        Self::Example(SampleExample { name: SampleExampleName::Digits })
    }
}

impl Samples {
    /// Returns the file, if the samples are in one.
    pub const fn csv_file(&self) -> Option<&DataFile> {
        match self {
            Self::Example(_) => None,
            Self::Csv(samples) => Some(&samples.file),
        }
    }

    /// See [`Self::csv_file`].
    pub const fn csv_file_mut(&mut self) -> Option<&mut DataFile> {
        match self {
            Self::Example(_) => None,
            Self::Csv(samples) => Some(&mut samples.file),
        }
    }
}
