//! The score of a memory for a query: cosine of f16 features times weight.
//!
//! The one pass over floats. It has a fixed order of additions, so that every device gives the same bits: column l of 32 adds the
//! products l, l + 32, ... in turn, then columns are added in pairs 16, 8, 4, 2, 1 apart. Each product is rounded before it is added:
//! no fused operations. The twin is `recall.cu`.

use crate::{Scope, Slot, Tiles};

/// Columns of the sum.
pub(crate) const COLUMNS: usize = 32;

/// The feature column of a host.
#[derive(Debug, Clone, Copy)]
pub struct FeatureColumn<'a> {
    /// Elements of a vector, at least 1.
    pub dimension: usize,
    /// f16 bits by slot, finite, little-endian, in tiles of [`TILE`](crate::TILE) vectors.
    pub bits: &'a [Box<[u8]>],
    /// One over the norm by slot ([`inverse_norm`]).
    pub inverse_norms: &'a Tiles<f32>,
    /// Rises with each change in a tile, so that a device which keeps the column knows what to take anew.
    pub changes: &'a [u64],
}

/// What to recall.
#[derive(Debug, Clone, Copy)]
pub struct Recall<'a> {
    /// What memories shall be like, of the column's dimension.
    pub query: &'a Query,
    /// What they are.
    pub features: FeatureColumn<'a>,
    /// Among which memories.
    pub scope: Scope,
    /// How many at most.
    pub limit: usize,
}

/// A memory that was recalled.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Alike {
    /// Its slot.
    pub slot: Slot,
    /// Its weight in units.
    pub weight: u32,
    /// [`Query::score`], at most 1 but for rounding.
    pub score: f32,
}

/// A query: features widened once, and its norm.
#[derive(Debug, Clone, PartialEq)]
pub struct Query {
    pub(crate) features: Vec<f32>,
    pub(crate) inverse_norm: f32,
}

impl Query {
    /// From f16 bits, finite.
    pub fn new(features: &[u16]) -> Self {
        Self { features: features.iter().map(|&bits| widened(bits)).collect(), inverse_norm: inverse_norm(features) }
    }

    /// The score of a memory with these features (f16 bits, finite, of the query's dimension) and this weight in units. Never NaN or
    /// -0; 0 where either vector is zero.
    pub fn score(&self, features: &[u16], inverse_norm: f32, weight: u32) -> f32 {
        let mut columns = [0_f32; COLUMNS];
        for (query, own) in self.features.chunks(COLUMNS).zip(features.chunks(COLUMNS)) {
            for (column, (&query, &own)) in columns.iter_mut().zip(query.iter().zip(own)) {
                *column += widened(own) * query;
            }
        }
        self.scored(sum(columns), inverse_norm, weight)
    }

    /// Elements of the query.
    pub fn dimension(&self) -> usize {
        self.features.len()
    }

    /// The score from the dot product with a memory's features.
    #[inline(always)]
    pub(crate) fn scored(&self, sum: f32, inverse_norm: f32, weight: u32) -> f32 {
        let score = ((sum * self.inverse_norm) * inverse_norm) * (weight as f32 * (1.0 / (1_u32 << 30) as f32));
        if score == 0.0 { 0.0 } else { score }
    }
}

/// The dot product of a query with features as they are stored: f16 bits, little-endian. In whole rows of columns, for vector instructions.
#[inline(always)]
pub(crate) fn dot_stored(query: &[f32], features: &[u8]) -> f32 {
    let mut columns = [0_f32; COLUMNS];
    let (queries, last_query) = query.as_chunks::<COLUMNS>();
    let (rows, last_row) = features.as_chunks::<{ 2 * COLUMNS }>();
    for (query, row) in queries.iter().zip(rows) {
        for column in 0..COLUMNS {
            let own = u16::from_le_bytes([row[2 * column], row[2 * column + 1]]);
            columns[column] += widened(own) * query[column];
        }
    }
    for (column, (query, own)) in columns.iter_mut().zip(last_query.iter().zip(last_row.as_chunks::<2>().0)) {
        *column += widened(u16::from_le_bytes(*own)) * query;
    }
    sum(columns)
}

/// The sum of the columns, in pairs.
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

/// The key by which a higher score comes first; the score is finite and not -0.
pub(crate) fn key(score: f32) -> u32 {
    let bits = score.to_bits();
    if bits >> 31 == 1 { bits } else { !(bits | 1 << 31) }
}

/// The score of a key.
pub(crate) fn score_of(key: u32) -> f32 {
    f32::from_bits(if key >> 31 == 1 { key } else { !key & 0x7fff_ffff })
}

/// One over the norm of f16 bits, rounded once; 0 for a zero vector. The sum is exact enough in f64, in the order of the index.
pub fn inverse_norm(features: &[u16]) -> f32 {
    inverse_norm_of(features.iter().copied())
}

/// The same of bits as they are stored, little-endian.
pub fn inverse_norm_stored(features: &[u8]) -> f32 {
    inverse_norm_of(features.as_chunks::<2>().0.iter().map(|bits| u16::from_le_bytes(*bits)))
}

fn inverse_norm_of(features: impl Iterator<Item = u16>) -> f32 {
    let square = |bits: u16| f64::from(widened(bits)) * f64::from(widened(bits));
    let sum: f64 = features.map(square).sum();
    if sum > 0.0 { (1.0 / sum.sqrt()) as f32 } else { 0.0 }
}

/// f16 to f32, exactly, subnormal and infinite ones included; a NaN becomes a quiet one. The bits of the processor's instruction.
#[inline(always)]
pub(crate) fn widened(bits: u16) -> f32 {
    // The exponent is put where that of f32 lies; the product corrects its bias, and normalises what was subnormal.
    let magnitude = f32::from_bits(u32::from(bits & 0x7fff) << 13) * f32::from_bits((127 + 112) << 23);
    // Beyond the largest f16: its exponent says infinity, or NaN with any bit below.
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
            assert_eq!(widened(bits), value, "{bits:04x}");
        }
        assert_eq!(widened(0xfd01).to_bits(), 0xffe0_2000, "a NaN keeps its sign and its bits, and is quiet");
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
    fn keys_ascend_as_scores_descend_and_give_them_back() {
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
            assert_eq!(inverse_norm_stored(&stored), norm);
            let dot = dot_stored(&query.features, &stored);
            let scores = [query.score(&own, norm, ONE / 3), query.scored(dot, norm, ONE / 3)];
            assert_eq!(scores[0].to_bits(), scores[1].to_bits(), "dimension {dimension}");
        }
    }
}
