//! Labelled samples and their split into training, validation and test.

mod split;
mod table;

pub(super) use split::Split;
use table::parse;

use super::TaskError;
use engram_api::{DataFile, Samples};
use std::io::Read;

/// 1,797 lines of 64 pixels from 0 to 16 and the digit. `data/PROVENANCE.md` names source and licence.
const DIGITS: &[u8] = include_bytes!("../../../data/digits.csv.gz");
/// Largest pixel of [`DIGITS`].
const DIGIT_SCALE: f32 = 16.0;

/// Labelled samples, scaled for training.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Dataset {
    /// What the samples are, for people.
    pub(super) name: String,
    /// Values per sample.
    pub(super) width: usize,
    /// Samples x width, row-major.
    pub(super) values: Vec<f32>,
    /// Class of each sample.
    pub(super) labels: Vec<u32>,
    /// Names of the classes.
    pub(super) classes: Vec<String>,
    /// Line of the file of each sample.
    lines: Vec<u64>,
    /// Whether values are shifted and scaled to mean 0 and variance 1 of the training samples.
    standardize: bool,
}

impl Dataset {
    /// Loads the samples; `file` is the content of the file that they name. `field` is the place in the manifest, for errors.
    pub(super) fn load(samples: &Samples, file: Option<&[u8]>, field: &str) -> Result<Self, TaskError> {
        match samples {
            Samples::Example(_) => digits(),
            Samples::Csv(csv) => {
                let missing = || TaskError::Invalid(format!("{field}.csv.file: the content of the file is missing"));
                parse(file.ok_or_else(missing)?, &file_name(&csv.file), &csv.label)
            }
        }
    }

    /// Creates samples from values that need no scaling.
    #[cfg(test)]
    pub(super) fn unscaled(values: Vec<f32>, labels: Vec<u32>, classes: usize) -> Self {
        Self {
            name: "test".to_owned(),
            width: values.len() / labels.len(),
            lines: (1..=labels.len() as u64).collect(),
            values,
            labels,
            classes: (0..classes).map(|class| class.to_string()).collect(),
            standardize: false,
        }
    }

    /// Returns the number of samples.
    pub(super) const fn len(&self) -> usize {
        self.labels.len()
    }

    /// Returns values and labels of some samples, in their order.
    pub(super) fn select(&self, samples: &[usize]) -> (Vec<f32>, Vec<u32>) {
        let values = samples.iter().flat_map(|&it| &self.values[it * self.width..][..self.width]).copied().collect();
        (values, samples.iter().map(|&it| self.labels[it]).collect())
    }

    /// Scales the values by mean and standard deviation of the samples that a model is trained on, which others must not influence.
    fn scale(&mut self, training: &[usize]) {
        if !self.standardize {
            return;
        }
        for column in 0..self.width {
            let at = |sample: usize| f64::from(self.values[sample * self.width + column]);
            let count = training.len() as f64;
            let mean = training.iter().map(|&it| at(it)).sum::<f64>() / count;
            let variance = training.iter().map(|&it| (at(it) - mean).powi(2)).sum::<f64>() / count;
            let factor = if variance > 0.0 { variance.sqrt().recip() } else { 0.0 };
            for value in self.values.iter_mut().skip(column).step_by(self.width) {
                *value = ((f64::from(*value) - mean) * factor) as f32;
            }
        }
    }
}

/// Returns the name of a file for errors and reports: of its path, or the key of its ConfigMap.
pub(super) fn file_name(file: &DataFile) -> String {
    let key = file.config_map.as_ref().map(|map| map.key.as_str());
    let path = file.path.as_deref().or(key).unwrap_or("the data file");
    path.rsplit('/').next().unwrap_or(path).to_owned()
}

fn digits_text() -> Result<String, TaskError> {
    let mut text = String::new();
    let unpacked = flate2::read::GzDecoder::new(DIGITS).read_to_string(&mut text);
    unpacked.map_err(|error| TaskError::Failed(format!("failed to unpack the built-in digits: {error}")))?;
    Ok(text)
}

/// Returns the built-in digits as a table: 64 columns of pixels and the column `digit`.
///
/// # Errors
/// They cannot be unpacked.
pub fn digits_table() -> Result<Vec<u8>, TaskError> {
    let names: Vec<String> = (0..64).map(|pixel| format!("pixel{pixel}")).collect();
    Ok(format!("{},digit\n{}", names.join(","), digits_text()?).into_bytes())
}

fn digits() -> Result<Dataset, TaskError> {
    let text = digits_text()?;
    let mut dataset = Dataset {
        name: "handwritten digits (built in)".to_owned(),
        width: 64,
        values: Vec::with_capacity(1_797 * 64),
        labels: Vec::with_capacity(1_797),
        classes: (0..10).map(|digit: u32| digit.to_string()).collect(),
        lines: Vec::with_capacity(1_797),
        standardize: false,
    };
    for (line, row) in (1..).zip(text.lines()) {
        let numbers: Vec<f32> = row.split(',').filter_map(|cell| cell.parse().ok()).collect();
        let (label, pixels) = numbers.split_last().filter(|(_, pixels)| pixels.len() == 64).ok_or_else(|| {
            TaskError::Failed(format!("failed to read the built-in digits: line {line} has another number of columns"))
        })?;
        dataset.values.extend(pixels.iter().map(|pixel| pixel / DIGIT_SCALE));
        dataset.labels.push(*label as u32);
        dataset.lines.push(line);
    }
    Ok(dataset)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn built_in_digits_are_complete() {
        let digits = Dataset::load(&Samples::default(), None, "spec.fisher.data").unwrap();
        assert_eq!((digits.len(), digits.values.len(), digits.classes.len()), (1_797, 1_797 * 64, 10));
        let mut counts = [0; 10];
        digits.labels.iter().for_each(|&label| counts[label as usize] += 1);
        assert_eq!(counts, [178, 182, 177, 183, 181, 182, 181, 179, 174, 180], "as scikit-learn counts them");
        assert!(digits.values.iter().all(|value| (0.0..=1.0).contains(value)));
    }
}
