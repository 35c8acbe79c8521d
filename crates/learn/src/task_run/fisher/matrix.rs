//! Scores of samples, and their sums over a shard.

use super::{FisherTasks, information};
use crate::task_run::fit::{Classifier, softmax};
use crate::task_run::wire::put_f64;
use crate::task_run::{TaskContext, TaskError};
use engram_api::FisherForm;
use engram_information::{LEAVES, leaf_range, partial_sums};

impl FisherTasks {
    /// Returns the rows of scores per sample: one per class for the model Fisher, one for the empirical one.
    fn rows(&self) -> usize {
        match self.spec.form {
            FisherForm::Model => self.data.classes.len(),
            FisherForm::Empirical => 1,
        }
    }

    /// Returns the number of rows of scores.
    pub(super) fn scores(&self) -> usize {
        self.split.all_but_test().len() * self.rows()
    }

    /// Returns the sum of one shard: one aligned subtree of leaves.
    pub(super) fn shard(
        &self,
        shard: usize,
        parameters: &[f32],
        context: &dyn TaskContext,
    ) -> Result<Vec<u8>, TaskError> {
        if shard >= self.shards || parameters.len() != self.parameters {
            return Err(TaskError::Failed("failed to decode the input of a shard".to_owned()));
        }
        let mut classifier = self.classifier()?;
        classifier.model.parameters_mut().copy_from_slice(parameters);
        let (values, labels) = self.data.select(&self.split.all_but_test());
        let width = LEAVES / self.shards;
        let leaves = shard * width..(shard + 1) * width;
        let (first, end) =
            (leaf_range(leaves.start, self.scores()).start, leaf_range(leaves.end - 1, self.scores()).end);
        let mut scores = Vec::with_capacity((end - first) * self.parameters);
        for row in first..end {
            let sample = row / self.rows();
            let values = &values[sample * self.data.width..][..self.data.width];
            scores.extend(self.score(&mut classifier, values, labels[sample], row % self.rows())?);
            if context.stop().is_set() {
                return Err(TaskError::Stopped);
            }
            context.progress((row - first) as f64 / (end - first) as f64);
        }
        let sums = partial_sums(&scores, self.parameters, leaves, self.scores()).map_err(information)?;
        let mut bytes = Vec::new();
        sums.iter().for_each(|subtree| put_f64(&mut bytes, &subtree.sums));
        Ok(bytes)
    }

    /// Returns one row of scores. The model Fisher of a sample is `sum over c of p_c s_c s_c^T`: its rows are `sqrt(p_c) s_c`.
    fn score(
        &self,
        classifier: &mut Classifier,
        values: &[f32],
        label: u32,
        row: usize,
    ) -> Result<Vec<f32>, TaskError> {
        match self.spec.form {
            FisherForm::Empirical => Ok(classifier.gradient(values, &[label])?.values),
            FisherForm::Model => {
                let root = softmax(&classifier.logits(values)?)[row].sqrt() as f32;
                let sum = classifier.gradient(values, &[row as u32])?;
                Ok(sum.values.iter().map(|score| root * score).collect())
            }
        }
    }
}
