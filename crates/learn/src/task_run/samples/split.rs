//! The split of samples into training, validation and test.

use super::Dataset;
use crate::task_run::TaskError;
use crate::task_run::random::Random;

/// Fraction of the samples outside the test set that validate choices such as step sizes.
const VALIDATION: f64 = 0.2;

/// Samples of each part, in random order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::task_run) struct Split {
    /// Samples that candidates are trained on.
    pub(in crate::task_run) training: Vec<usize>,
    /// Samples that choose between candidates.
    pub(in crate::task_run) validation: Vec<usize>,
    /// Samples that only the reported accuracy is measured on.
    pub(in crate::task_run) test: Vec<usize>,
}

impl Split {
    /// Splits samples by a permutation from `seed` and scales their values by the training part.
    ///
    /// # Errors
    /// A part is empty, or a class is in validation or test, but not in training.
    pub(in crate::task_run) fn of(data: &mut Dataset, test: f64, seed: u64) -> Result<Self, TaskError> {
        let order = Random::new(seed, 1).permutation(data.len());
        let test = (data.len() as f64 * test).round() as usize;
        let validation = ((data.len() - test) as f64 * VALIDATION).round() as usize;
        let (test, rest) = order.split_at(test);
        let (validation, training) = rest.split_at(validation);
        let split = Self { training: training.to_vec(), validation: validation.to_vec(), test: test.to_vec() };
        split.check(data)?;
        data.scale(&split.training);
        Ok(split)
    }

    /// Returns training and validation samples: what the chosen candidate is trained on in the end.
    pub(in crate::task_run) fn all_but_test(&self) -> Vec<usize> {
        self.training.iter().chain(&self.validation).copied().collect()
    }

    fn check(&self, data: &Dataset) -> Result<(), TaskError> {
        if self.training.is_empty() || self.validation.is_empty() || self.test.is_empty() {
            let count = data.len();
            return Err(TaskError::Invalid(format!("{}: {count} samples; allowed: at least 10", data.name)));
        }
        let mut seen = vec![false; data.classes.len()];
        self.training.iter().for_each(|&sample| seen[data.labels[sample] as usize] = true);
        let unseen = self.validation.iter().chain(&self.test).filter(|&&it| !seen[data.labels[it] as usize]);
        let Some(&sample) = unseen.min() else { return Ok(()) };
        let class = data.labels[sample];
        Err(TaskError::Invalid(format!(
            "{}, line {}: class {:?} has {} samples and none of them is in the training part; allowed: classes with more samples, or another seed",
            data.name,
            data.lines[sample],
            data.classes[class as usize],
            data.labels.iter().filter(|&&label| label == class).count()
        )))
    }
}

#[cfg(test)]
mod tests {
    use super::super::parse;
    use super::*;

    fn table(rows: usize, rare: usize) -> Dataset {
        let label = |row: usize| if row == rare { "rare" } else { ["x", "y"][row % 2] };
        let rows: String = (0..rows).map(|row| format!("{row},{}\n", label(row))).collect();
        parse(format!("a,kind\n{rows}").as_bytes(), "t.csv", "kind").unwrap()
    }

    #[test]
    fn parts_cover_every_sample_once_and_scaling_follows_training() {
        let mut data = table(200, usize::MAX);
        let split = Split::of(&mut data, 0.25, 7).unwrap();
        let mut all = [split.all_but_test(), split.test.clone()].concat();
        all.sort_unstable();
        assert_eq!(all, (0..200).collect::<Vec<_>>());
        assert_eq!((split.test.len(), split.validation.len()), (50, 30));
        let (values, _) = data.select(&split.training);
        let mean = values.iter().sum::<f32>() / values.len() as f32;
        assert!(mean.abs() < 1e-5, "{mean}");
        assert_eq!(Split::of(&mut table(200, usize::MAX), 0.25, 7).unwrap(), split, "the split follows the seed");
        assert_ne!(Split::of(&mut table(200, usize::MAX), 0.25, 8).unwrap(), split);
    }

    #[test]
    fn class_that_is_never_seen_in_training_is_an_error() {
        let errors: Vec<String> = (0..40)
            .filter_map(|seed| Split::of(&mut table(40, 11), 0.25, seed).err())
            .map(|error| error.to_string())
            .collect();
        assert!((8..30).contains(&errors.len()), "{} of 40: 2 of 5 expected", errors.len());
        assert!(errors[0].starts_with("t.csv, line 13: class \"rare\" has 1 samples"), "{}", errors[0]);
        assert!(Split::of(&mut table(3, usize::MAX), 0.25, 1).unwrap_err().to_string().contains("at least 10"));
    }
}
