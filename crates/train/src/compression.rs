//! Compression of gradient sums with error feedback.

use std::sync::Arc;

use engram_collective::compress::{Compression, Compressor};
use engram_collective::low_rank::{LowRank, MAX_RANK};
use engram_neural::{GradientSum, SettingError, View};
use serde::{Deserialize, Serialize};

use crate::reduce::{CompressedSum, LowRankSum};

/// How the gradient sums of members travel. What the encoding of a step loses is added to the next sum of the same member.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct GradientCompression {
    /// The encoding.
    pub kind: GradientEncoding,
    /// With `TopK`: share of the values that is sent, in (0, 1].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub share: Option<f64>,
    /// With `PowerSgd` and `Automatic`: rank of the approximation of each matrix, from 1 to 64.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rank: Option<usize>,
    /// With `OneBitAdam`: updates with whole sums before, at least 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub warmup_steps: Option<u64>,
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
    /// Matrices as products of two thin ones.
    PowerSgd,
    /// Signs of the mean of gradients of AdamW, after a warm-up with whole sums.
    OneBitAdam,
    /// One of none, `Bf16` and `PowerSgd`, by the measured share of reductions.
    Automatic,
}

/// Share of the values that `TopK` sends if none is set.
const DEFAULT_SHARE: f64 = 0.01;
/// Rank of `PowerSgd` if none is set.
const DEFAULT_RANK: usize = 1;

impl GradientCompression {
    pub(crate) fn check(&self) -> Result<(), SettingError> {
        if let Some(share) = self.share {
            let valid = self.kind == GradientEncoding::TopK && share > 0.0 && share <= 1.0;
            SettingError::unless(valid, "compression.share", share, "above 0 and at most 1, with TopK only")?;
        }
        if let Some(rank) = self.rank {
            let valid = self.has_factors() && (1..=MAX_RANK).contains(&rank);
            SettingError::unless(valid, "compression.rank", rank, "1 to 64, with PowerSgd or Automatic only")?;
        }
        let warmup = self.warmup_steps.unwrap_or_default();
        let valid = (self.kind == GradientEncoding::OneBitAdam) == (warmup > 0);
        SettingError::unless(valid, "compression.warmupSteps", warmup, "1 or more with OneBitAdam, absent otherwise")?;
        SettingError::unless(self.samples > 0, "compression.samples", self.samples, "at least 1")
    }

    fn has_factors(&self) -> bool {
        matches!(self.kind, GradientEncoding::PowerSgd | GradientEncoding::Automatic)
    }

    /// The encoding of the values of gradients one by one; `None` with another.
    fn encoding(&self) -> Option<Compression> {
        Some(match self.kind {
            GradientEncoding::Bf16 => Compression::BFloat16,
            GradientEncoding::F16 => Compression::Float16,
            GradientEncoding::TopK => Compression::TopK(self.share.unwrap_or(DEFAULT_SHARE)),
            GradientEncoding::PowerSgd | GradientEncoding::OneBitAdam | GradientEncoding::Automatic => return None,
        })
    }

    /// The approximation of the tensors of a model by matrices of low rank, with its first basis; `None` with another encoding.
    pub(crate) fn factors(&self, views: &[View]) -> Option<Factors> {
        if !self.has_factors() {
            return None;
        }
        let tensors = views.iter().map(|view| (view.range.clone(), &view.shape[..]));
        let plan = LowRank::new(tensors, self.rank.unwrap_or(DEFAULT_RANK));
        Some(Factors { basis: Arc::new(plan.first_basis()), plan: Arc::new(plan) })
    }

    /// Compresses a sum plus what was lost before; returns it with what is lost then.
    pub(crate) fn compress(&self, sum: &GradientSum, feedback: &[f32]) -> (CompressedSum, Vec<f32>) {
        let compression = self.encoding().expect("other encodings send no gradients");
        let mut compressor =
            Compressor::restore(compression, feedback.to_vec()).expect("the share was checked with the specification");
        let elements = sum.values.len();
        let bytes = compressor.encode(&sum.values, self.samples).expect("the feedback has a value per parameter");
        let lost = compressor.error().to_vec();
        let GradientSum { samples, loss, .. } = *sum;
        (CompressedSum { compression, divisor: self.samples, bytes, elements, samples, loss }, lost)
    }
}

/// State of low-rank sums that all members have in common.
#[derive(Debug, Clone)]
pub(crate) struct Factors {
    pub(crate) plan: Arc<LowRank>,
    /// Basis of the next step.
    pub(crate) basis: Arc<Vec<f32>>,
}

impl Factors {
    /// Returns a sum plus what was lost before, as the group reduces it.
    pub(crate) fn correct(&self, sum: &GradientSum, feedback: &[f32]) -> LowRankSum {
        let values = sum.values.iter().zip(feedback).map(|(value, lost)| value + lost).collect();
        let GradientSum { samples, loss, .. } = *sum;
        LowRankSum { plan: Arc::clone(&self.plan), basis: Arc::clone(&self.basis), values, samples, loss }
    }

    /// Moves on to the next step; returns what this member lost of its sum.
    pub(crate) fn finish(&mut self, own: &LowRankSum, reduced: &GradientSum) -> Vec<f32> {
        let (basis, lost) = self.plan.finish(&own.values, &reduced.values, &self.basis);
        self.basis = Arc::new(basis);
        lost
    }
}
