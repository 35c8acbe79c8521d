//! Scores of samples, and their sums over a shard.

use super::{FisherTasks, information};
use crate::task_run::accelerated::{LIMIT, devices};
use crate::task_run::fit::{Classifier, failed, softmax};
use crate::task_run::wire::put_f64;
use crate::task_run::{TaskContext, TaskError};
use engram_api::FisherForm;
use engram_devices::{ComputeDevice, Distribution, Work, run_blocks_on};
use engram_information::{LEAVES, PartialSum, leaf_range, merge_subtrees};
use engram_kernels::partitioner::Strategy;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Rows of scores of a shard that are done, over all blocks, and their number.
struct Progress {
    done: AtomicUsize,
    rows: usize,
}

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

    /// Returns the sum of one shard, which is one aligned subtree of leaves, over one band of rows of the matrix. `index` counts the bands
    /// of all shards.
    pub(super) fn shard(
        &self,
        index: usize,
        parameters: &[f32],
        context: &dyn TaskContext,
    ) -> Result<Vec<u8>, TaskError> {
        let (shard, band) = (index / self.bands.len(), index % self.bands.len());
        if shard >= self.shards || parameters.len() != self.parameters {
            return Err(TaskError::Failed("failed to decode the input of a shard".to_owned()));
        }
        let width = LEAVES / self.shards;
        let own = self.rows_of(shard * width..(shard + 1) * width).len() as u64;
        let devices = devices(context, own * self.parameters as u64 * self.bands[band].len() as u64);
        let resources: Vec<_> = devices.iter().map(ComputeDevice::resource).collect();
        // Aligned blocks, so that each is one subtree.
        let block = (width / (2 * devices.len()).next_power_of_two()).max(1);
        let work = Work { kernel: "Fisher sums", items: width, block, bytes_per_item: 0 };
        let distribution = Distribution::new(work, Strategy::Balanced, &resources).map_err(failed)?;
        let samples = self.data.select(&self.split.all_but_test());
        let progress = Progress { done: AtomicUsize::new(0), rows: own as usize };
        let sums = run_blocks_on(&devices, distribution, LIMIT, |device, leaves| {
            let leaves = shard * width + leaves.start..shard * width + leaves.end;
            self.block(device, (leaves, &self.bands[band]), parameters, &samples, (context, &progress))
        });
        if context.stop().is_set() {
            return Err(TaskError::Stopped);
        }
        let sums = merge_subtrees(sums.map_err(failed)?.results.into_iter().flatten().collect());
        let mut bytes = Vec::new();
        sums.iter().for_each(|subtree| put_f64(&mut bytes, &subtree.sums));
        Ok(bytes)
    }

    /// Returns the rows of scores of some leaves.
    fn rows_of(&self, leaves: Range<usize>) -> Range<usize> {
        leaf_range(leaves.start, self.scores()).start..leaf_range(leaves.end - 1, self.scores()).end
    }

    /// Returns the sums of some leaves of a shard, over some rows of the matrix.
    fn block(
        &self,
        device: &ComputeDevice,
        (leaves, band): (Range<usize>, &Range<usize>),
        parameters: &[f32],
        (values, labels): &(Vec<f32>, Vec<u32>),
        (context, progress): (&dyn TaskContext, &Progress),
    ) -> Result<Vec<PartialSum>, TaskError> {
        let mut classifier = self.classifier()?;
        classifier.model.parameters_mut().copy_from_slice(parameters);
        let rows = self.rows_of(leaves.clone());
        let mut scores = Vec::with_capacity(rows.len() * self.parameters);
        for row in rows {
            let sample = row / self.rows();
            let values = &values[sample * self.data.width..][..self.data.width];
            scores.extend(self.score(&mut classifier, values, labels[sample], row % self.rows())?);
            if context.stop().is_set() {
                return Err(TaskError::Stopped);
            }
            let done = progress.done.fetch_add(1, Ordering::Relaxed) + 1;
            // A block of a device that was removed is computed again.
            context.progress((done as f64 / progress.rows as f64).min(1.0));
        }
        device.partial_sums(&scores, self.parameters, band, leaves, self.scores()).map_err(information)
    }

    /// Returns one row of scores. The model Fisher of a sample is `sum over c of p_c s_c s_c^T`: its rows are `sqrt(p_c) s_c`.
    pub(super) fn score(
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
