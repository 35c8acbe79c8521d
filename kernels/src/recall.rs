//! The score of a memory for a query: cosine of f16 features times weight.
//!
//! The one pass over floats. It has a fixed order of additions, so that every device gives the same bits: column l of 32 adds the
//! products l, l + 32, ... in turn, then columns are added in pairs 16, 8, 4, 2, 1 apart. Each product is rounded before it is added:
//! no fused operations. The twin is `recall.cu`.

/// Columns of the sum.
const COLUMNS: usize = 32;

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
        let mut distance = COLUMNS / 2;
        while distance > 0 {
            for column in 0..distance {
                columns[column] += columns[column + distance];
            }
            distance /= 2;
        }
        let score = ((columns[0] * self.inverse_norm) * inverse_norm) * (weight as f32 * (1.0 / (1_u32 << 30) as f32));
        if score == 0.0 { 0.0 } else { score }
    }
}

/// One over the norm of f16 bits, rounded once; 0 for a zero vector. The sum is exact enough in f64, in the order of the index.
pub fn inverse_norm(features: &[u16]) -> f32 {
    let square = |&bits: &u16| f64::from(widened(bits)) * f64::from(widened(bits));
    let sum: f64 = features.iter().map(square).sum();
    if sum > 0.0 { (1.0 / sum.sqrt()) as f32 } else { 0.0 }
}

/// f16 to f32, exact for finite values, subnormal ones included.
#[inline(always)]
fn widened(bits: u16) -> f32 {
    // The exponent is put where that of f32 lies; the product corrects its bias, and normalises what was subnormal.
    let magnitude = f32::from_bits(u32::from(bits & 0x7fff) << 13) * f32::from_bits((127 + 112) << 23);
    f32::from_bits(magnitude.to_bits() | u32::from(bits & 0x8000) << 16)
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
        ];
        for (bits, value) in vectors {
            assert_eq!(widened(bits), value, "{bits:04x}");
        }
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
}
