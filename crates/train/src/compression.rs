//! Compression of gradient sums with error feedback.

use engram_collective::compress::{Compression, Compressor};
use engram_neural::{GradientSum, SettingError};
use serde::{Deserialize, Serialize};

use crate::reduce::CompressedSum;

/// How the gradient sums of members travel. What the encoding of a step loses is added to the next sum of the same member.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct GradientCompression {
    /// The encoding.
    pub kind: GradientEncoding,
    /// With `TopK`: share of the values that is sent, in (0, 1].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub share: Option<f64>,
    /// Samples of a whole batch: sums in `F16` are divided by it, so that they do not overflow.
    pub samples: usize,
}

/// Encoding of a gradient sum.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum GradientEncoding {
    /// bfloat16.
    Bf16,
    /// float16.
    F16,
    /// The largest values by magnitude.
    TopK,
}

/// Share of the values that `TopK` sends if none is set.
const DEFAULT_SHARE: f64 = 0.01;

impl GradientCompression {
    pub(crate) fn check(&self) -> Result<(), SettingError> {
        if let Some(share) = self.share {
            let valid = self.kind == GradientEncoding::TopK && share > 0.0 && share <= 1.0;
            SettingError::unless(valid, "compression.share", share, "above 0 and at most 1, with TopK only")?;
        }
        SettingError::unless(self.samples > 0, "compression.samples", self.samples, "at least 1")
    }

    const fn encoding(&self) -> Compression {
        match (self.kind, self.share) {
            (GradientEncoding::Bf16, _) => Compression::BFloat16,
            (GradientEncoding::F16, _) => Compression::Float16,
            (GradientEncoding::TopK, Some(share)) => Compression::TopK(share),
            (GradientEncoding::TopK, None) => Compression::TopK(DEFAULT_SHARE),
        }
    }

    /// Compresses a sum plus what was lost before; returns it with what is lost then.
    pub(crate) fn compress(&self, sum: &GradientSum, feedback: &[f32]) -> (CompressedSum, Vec<f32>) {
        let compression = self.encoding();
        let mut compressor =
            Compressor::restore(compression, feedback.to_vec()).expect("the share was checked with the specification");
        let elements = sum.values.len();
        let bytes = compressor.encode(&sum.values, self.samples).expect("the feedback has a value per parameter");
        let lost = compressor.error().to_vec();
        let GradientSum { samples, loss, .. } = *sum;
        (CompressedSum { compression, divisor: self.samples, bytes, elements, samples, loss }, lost)
    }
}
