//! A tropical layer, softmax and quality as three stages: pattern pipeline.

use crate::members::{Item, Member, MemberPipelineRun, advance_pipeline};
use crate::{ComputeDevice, Error, PipelineRun, Stage, run_pipeline};
use engram_tropical::{Layer, Matrix};

/// Batch of samples: what one stage passes on to the next.
#[derive(Debug, Clone, PartialEq)]
pub struct QualityBatch {
    /// Number of samples.
    pub rows: usize,
    /// Values per sample: inputs, logits, probabilities, or 1 quality.
    pub width: usize,
    /// Rows x width, row-major.
    pub values: Vec<f32>,
}

/// Returns the quality of every sample, batch by batch: the certainty of a tropical classifier, 1 - entropy / ln(classes) of the softmax of
/// its outputs, in [0, 1].
///
/// # Errors
/// Fewer than 2 classes; a batch that does not fit the layer; an input that is NaN or +infinity; a sample without finite output; those of
/// [`run_pipeline`].
pub fn quality_pipeline(
    devices: &[ComputeDevice],
    layer: &Layer,
    batches: Vec<QualityBatch>,
    run: &PipelineRun,
) -> Result<Vec<QualityBatch>, Error> {
    run_pipeline(devices, &stages(layer)?, batches, run)
}

/// Returns the same over the members of a group; see [`advance_pipeline`].
///
/// # Errors
/// As [`quality_pipeline`]; those of [`advance_pipeline`].
pub fn advance_quality(
    member: &mut Member<'_>,
    layer: &Layer,
    batches: &[QualityBatch],
    qualities: &mut Vec<QualityBatch>,
    run: &MemberPipelineRun,
) -> Result<(), Error> {
    advance_pipeline(member, &stages(layer)?, batches, qualities, run)
}

fn stages(layer: &Layer) -> Result<[Stage<'_, QualityBatch>; 3], Error> {
    let classes = layer.biases().len();
    if classes < 2 {
        return Err(Error::argument("classes", classes, "at least 2"));
    }
    // Per sample: a maximum per weight; an exponential and a logarithm per class take about as long as 30 additions each.
    let layer_cost = (layer.weights().rows() * classes) as u64;
    Ok([
        Stage::new("tropical layer", layer_cost, move |batch: &QualityBatch| {
            let inputs = Matrix::new("inputs", batch.rows, batch.width, batch.values.clone())?;
            let values = layer.forward(&inputs)?.values.entries().to_vec();
            Ok::<_, engram_tropical::Error>(QualityBatch { rows: batch.rows, width: classes, values })
        }),
        Stage::new("softmax", 30 * classes as u64, softmax),
        Stage::new("quality", 30 * classes as u64, certainty),
    ])
}

/// Rows and width as u64, then the values, all little-endian.
impl Item for QualityBatch {
    fn encode(&self) -> Vec<u8> {
        let shape = [self.rows as u64, self.width as u64].map(u64::to_le_bytes).concat();
        shape.into_iter().chain(self.values.iter().flat_map(|value| value.to_le_bytes())).collect()
    }

    fn decode(bytes: &[u8]) -> Result<Self, String> {
        let (shape, values) =
            bytes.split_at_checked(16).ok_or_else(|| format!("{} bytes without shape", bytes.len()))?;
        let [rows, width] = [0, 8].map(|at| u64::from_le_bytes(std::array::from_fn(|index| shape[at + index])));
        let (words, rest) = values.as_chunks::<4>();
        if !rest.is_empty() || rows.checked_mul(width) != Some(words.len() as u64) {
            return Err(format!("{} bytes of values for {rows} rows of {width} values", values.len()));
        }
        let values = words.iter().map(|word| f32::from_le_bytes(*word)).collect();
        Ok(Self { rows: rows as usize, width: width as usize, values })
    }
}

fn softmax(batch: &QualityBatch) -> Result<QualityBatch, String> {
    let mut values = Vec::with_capacity(batch.values.len());
    for (row, logits) in batch.values.chunks_exact(batch.width).enumerate() {
        let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        if !largest.is_finite() {
            return Err(format!("sample {row}: no output is finite"));
        }
        let powers: Vec<f64> = logits.iter().map(|&logit| f64::from(logit - largest).exp()).collect();
        let sum: f64 = powers.iter().sum();
        values.extend(powers.iter().map(|power| (power / sum) as f32));
    }
    Ok(QualityBatch { values, ..*batch })
}

fn certainty(batch: &QualityBatch) -> Result<QualityBatch, String> {
    let most = (batch.width as f64).ln();
    let of = |probabilities: &[f32]| {
        let terms = probabilities.iter().filter(|&&it| it > 0.0).map(|&it| f64::from(it) * f64::from(it).ln());
        (1.0 + terms.sum::<f64>() / most).clamp(0.0, 1.0) as f32
    };
    let values = batch.values.chunks_exact(batch.width).map(of).collect();
    Ok(QualityBatch { rows: batch.rows, width: 1, values })
}

#[cfg(test)]
mod tests {
    use super::*;
    use engram_kernels::partitioner::Strategy;
    use std::time::Duration;

    fn layer() -> Layer {
        Layer::new(Matrix::new("weights", 1, 2, vec![0.0, 0.0]).unwrap(), vec![f32::NEG_INFINITY, 0.0]).unwrap()
    }

    fn quality(values: Vec<f32>) -> Result<Vec<QualityBatch>, Error> {
        let run =
            PipelineRun { name: "quality", capacity: 2, strategy: Strategy::Balanced, limit: Duration::from_secs(60) };
        let batch = QualityBatch { rows: values.len(), width: 1, values };
        quality_pipeline(&[ComputeDevice::new("a")], &layer(), vec![batch], &run)
    }

    #[test]
    fn quality_is_0_for_a_tie_and_1_for_certainty() {
        // Outputs (x, max(x, 0)): equal for 0, far apart for -100.
        let quality = quality(vec![0.0, -100.0, -1.0]).unwrap();
        assert_eq!((quality[0].rows, quality[0].width), (3, 1));
        assert_eq!(quality[0].values[..2], [0.0, 1.0]);
        let p = 1.0 / (1.0 + 1_f64.exp());
        let expected = 1.0 + (p * p.ln() + (1.0 - p) * (1.0 - p).ln()) / 2_f64.ln();
        assert!((f64::from(quality[0].values[2]) - expected).abs() < 1e-6);
    }

    #[test]
    fn batch_survives_encoding_and_damaged_bytes_are_refused() {
        let batch = QualityBatch { rows: 2, width: 3, values: vec![0.5, -0.0, f32::NEG_INFINITY, 1e-40, 2.0, 3.0] };
        let bytes = batch.encode();
        assert_eq!(QualityBatch::decode(&bytes).as_ref(), Ok(&batch));
        for damaged in [&bytes[..15], &bytes[..bytes.len() - 4], &bytes[..bytes.len() - 1], &[255; 16]] {
            assert!(QualityBatch::decode(damaged).is_err(), "{} bytes", damaged.len());
        }
    }

    #[test]
    fn inputs_that_are_not_allowed_are_named() {
        let error = quality(vec![0.0, f32::NAN]).unwrap_err().to_string();
        assert!(error.contains("tropical layer") && error.contains("inputs[1][0]: NaN"), "{error}");
        assert!(quality(vec![f32::INFINITY]).is_err());
    }
}
