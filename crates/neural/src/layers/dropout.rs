//! Dropout with counter-based random numbers: whether a unit is dropped is a function of seed, step, layer, sample and
//! unit, so it does not depend on the split of the batch or on the number of workers.

use crate::batch::Batch;
use crate::philox::{dropout_words, unit};

/// Identifies the random numbers of one training step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RandomStep {
    /// Seed of the run.
    pub seed: u64,
    /// Number of the step.
    pub step: u64,
}

/// Fills `mask` with 0 for dropped units and `1 / (1 - probability)` for the others.
pub(crate) fn fill_mask(
    probability: f32,
    layer: u16,
    random: RandomStep,
    batch: &Batch<'_>,
    width: usize,
    mask: &mut [f32],
) {
    let keep = 1.0 / (1.0 - probability);
    for (i, row) in mask.chunks_exact_mut(width).enumerate() {
        let sample = batch.position(i);
        for (block, units) in row.chunks_mut(4).enumerate() {
            let words = dropout_words(random.seed, random.step, layer, sample, block as u32);
            for (m, word) in units.iter_mut().zip(words) {
                *m = if unit(word) < probability { 0.0 } else { keep };
            }
        }
    }
}

/// `out = x * mask`.
pub(crate) fn apply(x: &[f32], mask: &[f32], out: &mut [f32]) {
    out.iter_mut().zip(x).zip(mask).for_each(|((o, x), m)| *o = x * m);
}

/// `delta *= mask`.
pub(crate) fn backward(mask: &[f32], delta: &mut [f32]) {
    delta.iter_mut().zip(mask).for_each(|(d, m)| *d *= m);
}
