//! Buckets: the parts of a gradient that the group reduces while the backward pass computes the rest.

use std::ops::Range;

use engram_collective::bucket;
use engram_neural::tree::Node;
use engram_neural::{BatchError, GradientSum, LabeledBatch, Moments, RandomStep, SampleErrors};

use crate::ensemble::Ensemble;
use crate::trainer::{SummationOrder, Trainer, split};

/// Most bytes of a bucket of several layers. Most have half of it or more: at 10 Gbit/s the latency of its messages is then a tenth of its time or less.
const TARGET_BYTES: usize = 2 << 20;

impl Ensemble {
    /// As [`Trainer::buckets`]; several models are reduced as a whole.
    pub fn buckets(&self) -> Vec<Range<usize>> {
        match self.members() {
            [member] => member.buckets(),
            _ => Vec::new(),
        }
    }
}

impl Trainer {
    /// Returns the ranges of a gradient sum that a group which adds by rank reduces one by one, in the order in which the backward pass completes them.
    /// They are cut between layers and follow from the specification and, with automatic compression, its level, so that they are the same on all
    /// members. Empty where the sum is reduced as a whole: of a model of up to 1 MiB, and where a sum travels encoded, is computed by devices or
    /// stages that share a batch, or is one of several updates.
    pub fn buckets(&self) -> Vec<Range<usize>> {
        let spec = &self.spec;
        let is_encoded = self.encoding().is_some() || self.is_flushing() || spec.privacy.is_some();
        if is_encoded || spec.local_updates > 1 || self.pipelines.is_some() || self.place.is_some() {
            return Vec::new();
        }
        let layers = self.model.backward_order();
        let elements: Vec<usize> = layers.iter().map(Range::len).collect();
        let buckets = bucket::plan(&elements, TARGET_BYTES);
        if buckets.len() < 2 {
            return Vec::new();
        }
        buckets.iter().map(|it| layers[it.parameters.end - 1].start..layers[it.parameters.start].end).collect()
    }

    /// As [`Trainer::gradient`], for [`Trainer::buckets`] one after the other: calls `on_final` with the values of each once they are final, added to
    /// those of earlier batches.
    pub(crate) fn gradient_by_bucket(
        &mut self,
        data: &LabeledBatch<'_>,
        (order, random): (&SummationOrder, RandomStep),
        (moments, is_forwarded): (&Moments, bool),
        buckets: &[Range<usize>],
        earlier: Option<&GradientSum>,
        on_final: &mut dyn FnMut(&[f32]),
    ) -> Result<(Vec<(Node, GradientSum)>, SampleErrors), BatchError> {
        let scale = self.scaler.scale();
        let computed = self.device_gradient(data, order, random)?;
        if computed.is_none() && !is_forwarded {
            let split = split(order, data.batch.len());
            self.engine.forward(&self.model, data, &self.loss, &split, random)?;
        }
        let mut added = Vec::new();
        let mut on_bucket = |range: Range<usize>, values: &[f32]| match earlier {
            Some(earlier) => {
                added.clear();
                added.extend(earlier.values[range].iter().zip(values).map(|(earlier, value)| earlier + value));
                on_final(&added);
            }
            None => on_final(values),
        };
        if let Some((sums, samples)) = computed {
            buckets.iter().for_each(|range| on_bucket(range.clone(), &sums[0].1.values[range.clone()]));
            return Ok((sums, samples));
        }
        Ok(self.engine.backward_by_bucket(&self.model, data, &self.loss, (moments, scale), buckets, &mut on_bucket))
    }
}
