//! Recall score of a memory: cosine of f16 features times weight.
//!
//! This is the only floating-point pass. It has a fixed order of additions, so that every device returns identical bits: column l of 32 adds the
//! products l, l + 32, ... in turn, then columns are added in pairs 16, 8, 4, 2, 1 apart. Each product is rounded before it is added:
//! no fused operations. `recall.cu` has the same order.

use crate::{Scope, Segment, Slot, Tiles};
use engram_memory::MemoryId;

/// Columns of the sum.
pub(crate) const COLUMNS: usize = 32;

/// The feature column of a host.
#[derive(Debug, Clone, Copy)]
pub struct FeatureColumn<'a> {
    /// Vector dimension, at least 1.
    pub dimension: usize,
    /// Finite f16 bits by slot, little-endian, in tiles of [`TILE`](crate::TILE) vectors.
    pub bits: &'a [Box<[u8]>],
    /// Inverse norm by slot ([`inverse_norm`]).
    pub inverse_norms: &'a Tiles<f32>,
    /// Change counter of each tile, by which a device detects outdated copies.
    pub changes: &'a [u64],
}

/// Request of a recall.
#[derive(Clone, Copy)]
pub struct RecallRequest<'a> {
    /// Segments by [`SegmentId`](crate::SegmentId).
    pub segments: &'a [Segment],
    /// The host's id column by slot, as in [`RankRequest::ids`](crate::RankRequest::ids).
    pub ids: &'a Tiles<MemoryId>,
    /// Query vector, of the column's dimension.
    pub query: &'a Query,
    /// Feature column.
    pub features: FeatureColumn<'a>,
    /// Memories to consider.
    pub scope: Scope,
    /// Maximum number of matches.
    pub limit: usize,
}

/// A recalled memory.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RecallMatch {
    /// Slot of the memory.
    pub slot: Slot,
    /// Weight in units.
    pub weight: u32,
    /// [`Query::score`], at most 1 except for rounding.
    pub score: f32,
}

/// A query vector in f32, with its norm.
#[derive(Debug, Clone, PartialEq)]
pub struct Query {
    pub(crate) features: Vec<f32>,
    pub(crate) inverse_norm: f32,
}

impl Query {
    /// Creates a query from finite f16 bits.
    pub fn new(features: &[u16]) -> Self {
        Self { features: features.iter().map(|&bits| widen_f16(bits)).collect(), inverse_norm: inverse_norm(features) }
    }

    /// Returns the score of a memory with these features (finite f16 bits, of the query's dimension) and this weight in units. Never NaN or
    /// -0; 0 if either vector is zero.
    pub fn score(&self, features: &[u16], inverse_norm: f32, weight: u32) -> f32 {
        let mut columns = [0_f32; COLUMNS];
        for (query, own) in self.features.chunks(COLUMNS).zip(features.chunks(COLUMNS)) {
            for (column, (&query, &own)) in columns.iter_mut().zip(query.iter().zip(own)) {
                *column += widen_f16(own) * query;
            }
        }
        self.score_from_dot(sum(columns), inverse_norm, weight)
    }

    /// Returns the dimension of the query.
    pub fn dimension(&self) -> usize {
        self.features.len()
    }

    /// Returns the score for the dot product with a memory's features.
    #[inline(always)]
    pub(crate) fn score_from_dot(&self, sum: f32, inverse_norm: f32, weight: u32) -> f32 {
        let score = ((sum * self.inverse_norm) * inverse_norm) * (weight as f32 * (1.0 / (1_u32 << 30) as f32));
        if score == 0.0 { 0.0 } else { score }
    }
}

/// Computes the dot product of a query with little-endian f16 bits, in whole rows of columns for vectorization.
#[inline(always)]
pub(crate) fn dot_f16_bytes(query: &[f32], features: &[u8]) -> f32 {
    let mut columns = [0_f32; COLUMNS];
    let (queries, last_query) = query.as_chunks::<COLUMNS>();
    let (rows, last_row) = features.as_chunks::<{ 2 * COLUMNS }>();
    for (query, row) in queries.iter().zip(rows) {
        for column in 0..COLUMNS {
            let own = u16::from_le_bytes([row[2 * column], row[2 * column + 1]]);
            columns[column] += widen_f16(own) * query[column];
        }
    }
    for (column, (query, own)) in columns.iter_mut().zip(last_query.iter().zip(last_row.as_chunks::<2>().0)) {
        *column += widen_f16(u16::from_le_bytes(*own)) * query;
    }
    sum(columns)
}

/// Sums the columns in pairs.
#[inline(always)]
fn sum(mut columns: [f32; COLUMNS]) -> f32 {
    let mut distance = COLUMNS / 2;
    while distance > 0 {
        for column in 0..distance {
            columns[column] += columns[column + distance];
        }
        distance /= 2;
    }
    columns[0]
}

/// Returns the sort key of a score, ascending from the highest; the score is finite and not -0.
pub(crate) fn key(score: f32) -> u32 {
    let bits = score.to_bits();
    if bits >> 31 == 1 { bits } else { !(bits | 1 << 31) }
}

/// Returns the score of a key.
pub(crate) fn score_of(key: u32) -> f32 {
    f32::from_bits(if key >> 31 == 1 { key } else { !key & 0x7fff_ffff })
}

/// Returns the inverse norm of f16 bits, rounded once; 0 for a zero vector. The f64 sum, in index order, is exact enough.
pub fn inverse_norm(features: &[u16]) -> f32 {
    inverse_norm_of(features.iter().copied())
}

/// Returns the inverse norm of little-endian f16 bits.
pub fn inverse_norm_of_bytes(features: &[u8]) -> f32 {
    inverse_norm_of(features.as_chunks::<2>().0.iter().map(|bits| u16::from_le_bytes(*bits)))
}

fn inverse_norm_of(features: impl Iterator<Item = u16>) -> f32 {
    let square = |bits: u16| f64::from(widen_f16(bits)) * f64::from(widen_f16(bits));
    let sum: f64 = features.map(square).sum();
    if sum > 0.0 { (1.0 / sum.sqrt()) as f32 } else { 0.0 }
}

/// Converts f16 to f32 exactly, subnormal and infinite values included; NaN becomes quiet. Matches the processor's instruction.
#[inline(always)]
pub(crate) fn widen_f16(bits: u16) -> f32 {
    // Shifts the exponent to its f32 position; the product corrects the bias and normalizes subnormals.
    let magnitude = f32::from_bits(u32::from(bits & 0x7fff) << 13) * f32::from_bits((127 + 112) << 23);
    // The f16 exponent of infinity, or of NaN with any mantissa bit.
    let beyond = if bits & 0x7c00 == 0x7c00 { 0x7f80_0000 } else { 0 };
    let quiet = if bits & 0x7fff > 0x7c00 { 0x0040_0000 } else { 0 };
    f32::from_bits(magnitude.to_bits() | beyond | quiet | u32::from(bits & 0x8000) << 16)
}

#[cfg(test)]
mod tests {
    use super::*;
    use engram_memory::ONE;

    #[test]
    fn halves_widen_exactly() {
        let vectors = [
            (0x0000, 0.0),
            (0x3c00, 1.0),
            (0xc000, -2.0),
            (0x3555, 0.333_251_95),
            (0x7bff, 65_504.0),
            (0x0001, 2_f32.powi(-24)),
            (0x83ff, -1023.0 * 2_f32.powi(-24)),
            (0x0400, 2_f32.powi(-14)),
            (0x7c00, f32::INFINITY),
            (0xfc00, f32::NEG_INFINITY),
        ];
        for (bits, value) in vectors {
            assert_eq!(widen_f16(bits), value, "{bits:04x}");
        }
        assert_eq!(widen_f16(0xfd01).to_bits(), 0xffe0_2000, "NaN keeps its sign and payload, and is quiet");
    }

    #[test]
    fn scores_are_cosine_times_weight() {
        // (3, 4) and (4, 3): cosine 24/25.
        let query = Query::new(&[0x4200, 0x4400]);
        let other = [0x4400, 0x4200];
        let score = query.score(&other, inverse_norm(&other), ONE / 2);
        assert!((score - 0.48).abs() < 1e-6, "{score}");
        assert_eq!(query.score(&[0, 0], inverse_norm(&[0, 0]), ONE), 0.0);
        let opposite = [0xc400, 0xc200];
        assert_eq!(query.score(&opposite, inverse_norm(&opposite), 0).to_bits(), 0, "never -0");
    }

    #[test]
    fn keys_order_scores_descending_and_are_invertible() {
        let scores = [1.0, 0.5, f32::MIN_POSITIVE, 1e-45, 0.0, -1e-45, -0.5, -1.0_f32];
        assert!(scores.map(key).is_sorted(), "{:?}", scores.map(key));
        assert_eq!(scores.map(|score| score_of(key(score))), scores);
    }

    #[test]
    fn stored_bits_give_the_same_score() {
        let mut bits = 12_345_u16;
        let mut any = || {
            bits = bits.wrapping_mul(25_173).wrapping_add(13_849);
            bits & 0xbfff
        };
        for dimension in [1, 31, 32, 33, 64, 100, 384] {
            let [query, own] = [(); 2].map(|()| (0..dimension).map(|_| any()).collect::<Vec<_>>());
            let stored: Vec<u8> = own.iter().flat_map(|bits| bits.to_le_bytes()).collect();
            let (query, norm) = (Query::new(&query), inverse_norm(&own));
            assert_eq!(inverse_norm_of_bytes(&stored), norm);
            let dot = dot_f16_bytes(&query.features, &stored);
            let scores = [query.score(&own, norm, ONE / 3), query.score_from_dot(dot, norm, ONE / 3)];
            assert_eq!(scores[0].to_bits(), scores[1].to_bits(), "dimension {dimension}");
        }
    }
}
