//! Geometric products of multivectors in Cl(p, q): pattern batch.

use super::Division;
use crate::{ComputeDevice, Error, Load, run_rows};

/// Largest dimension p + q.
const MAX_DIMENSION: u32 = 4;

/// The Clifford algebra Cl(p, q): p basis vectors with square +1, then q with square -1.
///
/// A multivector has 2^(p + q) components. Component `a` belongs to the blade whose basis vectors are the set bits of `a`: 0 is the scalar,
/// 1 is e1, 2 is e2, 3 is e1 e2.
///
/// ```
/// use engram_devices::workloads::Algebra;
///
/// // Cl(0, 2) are the quaternions: i = e1, j = e2, k = e1 e2; i j = k.
/// let quaternions = Algebra::new(0, 2)?;
/// assert_eq!(quaternions.product(&[0.0, 1.0, 0.0, 0.0], &[0.0, 0.0, 1.0, 0.0])?, [0.0, 0.0, 0.0, 1.0]);
/// # Ok::<(), engram_devices::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct Algebra {
    components: usize,
    /// Sign of blade `a` times blade `a ^ c` by `a * components + c`: the product is that sign times blade `c`.
    signs: Vec<f32>,
}

impl Algebra {
    /// Creates the table of signs.
    ///
    /// # Errors
    /// p + q is above 4.
    pub fn new(p: u32, q: u32) -> Result<Self, Error> {
        if p.saturating_add(q) > MAX_DIMENSION {
            return Err(Error::argument("p + q", u64::from(p) + u64::from(q), "at most 4"));
        }
        let components = 1_usize << (p + q);
        let pairs = (0..components).flat_map(|a| (0..components).map(move |c| (a, a ^ c)));
        Ok(Self { components, signs: pairs.map(|(a, b)| sign(a, b, p)).collect() })
    }

    /// Returns the number of components of a multivector.
    pub const fn components(&self) -> usize {
        self.components
    }

    /// Returns the products of the multivectors of two batches, one by one.
    ///
    /// # Errors
    /// The batches differ in length or end within a multivector.
    pub fn product(&self, left: &[f32], right: &[f32]) -> Result<Vec<f32>, Error> {
        self.check(left, right)?;
        let mut out = vec![0.0; left.len()];
        self.fill(left, right, &mut out);
        Ok(out)
    }

    /// Returns the same on several devices. A block is a number of multivectors.
    ///
    /// # Errors
    /// As [`product`](Self::product); those of [`run_rows`].
    pub fn product_on(
        &self,
        devices: &[ComputeDevice],
        left: &[f32],
        right: &[f32],
        division: &Division,
    ) -> Result<(Vec<f32>, Vec<Load>), Error> {
        self.check(left, right)?;
        let width = self.components;
        let bytes = 3 * width * size_of::<f32>();
        let distribution = division.distribute(devices, "geometric product", left.len() / width, bytes as u64)?;
        let kernel = |items: std::ops::Range<usize>, out: &mut [f32]| {
            let own = items.start * width..items.end * width;
            self.fill(&left[own.clone()], &right[own], out);
            Ok::<_, Error>(())
        };
        let (products, blocks) = run_rows(devices, distribution, division.limit, width, kernel)?;
        Ok((products, blocks.loads))
    }

    fn check(&self, left: &[f32], right: &[f32]) -> Result<(), Error> {
        if left.len() != right.len() || !left.len().is_multiple_of(self.components) {
            let value = format!("{} and {}", left.len(), right.len());
            return Err(Error::argument("numbers of components", value, "equal multiples of 2^(p + q)"));
        }
        Ok(())
    }

    fn fill(&self, left: &[f32], right: &[f32], out: &mut [f32]) {
        // Loops of known length are compiled to vector instructions.
        match self.components {
            1 => fill::<1>(&self.signs, left, right, out),
            2 => fill::<2>(&self.signs, left, right, out),
            4 => fill::<4>(&self.signs, left, right, out),
            8 => fill::<8>(&self.signs, left, right, out),
            _ => fill::<16>(&self.signs, left, right, out),
        }
    }
}

/// Adds the terms of each component by ascending blade of the left factor: the order, and with it the bits, is the same for any split.
fn fill<const N: usize>(signs: &[f32], left: &[f32], right: &[f32], out: &mut [f32]) {
    let (left, right) = (left.as_chunks::<N>().0, right.as_chunks::<N>().0);
    for ((left, right), out) in left.iter().zip(right).zip(out.as_chunks_mut::<N>().0) {
        let mut sums = [0.0_f32; N];
        for (a, signs) in signs.as_chunks::<N>().0.iter().enumerate() {
            for c in 0..N {
                sums[c] += signs[c] * left[a] * right[a ^ c];
            }
        }
        *out = sums;
    }
}

/// Returns the sign of the product of two blades: one change per exchange that sorts the basis vectors, one per common vector of square -1.
fn sign(a: usize, b: usize, p: u32) -> f32 {
    let exchanges: u32 = (1..usize::BITS).map(|shift| (a >> shift & b).count_ones()).sum();
    let negative = ((a & b) >> p).count_ones();
    if (exchanges + negative).is_multiple_of(2) { 1.0 } else { -1.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn blade(algebra: &Algebra, index: usize) -> Vec<f32> {
        (0..algebra.components()).map(|component| if component == index { 1.0 } else { 0.0 }).collect()
    }

    #[test]
    fn basis_vectors_have_their_squares_and_anticommute() {
        for (p, q) in [(0, 0), (1, 0), (0, 1), (2, 1), (3, 0), (1, 3), (0, 4), (4, 0)] {
            let algebra = Algebra::new(p, q).unwrap();
            for i in 0..p + q {
                let e = blade(&algebra, 1 << i);
                let square = if i < p { 1.0 } else { -1.0 };
                assert_eq!(algebra.product(&e, &e).unwrap()[0], square, "e{} in Cl({p}, {q})", i + 1);
                for j in (0..p + q).filter(|&j| j != i) {
                    let f = blade(&algebra, 1 << j);
                    let (ef, fe) = (algebra.product(&e, &f).unwrap(), algebra.product(&f, &e).unwrap());
                    assert!(ef.iter().zip(&fe).all(|(one, other)| *one == -other) && ef != fe);
                }
            }
        }
    }

    #[test]
    fn product_is_associative_in_every_algebra() {
        for (p, q) in (0..=4).flat_map(|p| (0..=4 - p).map(move |q| (p, q))) {
            let algebra = Algebra::new(p, q).unwrap();
            // Small integers: every sum is exact.
            let random = |key: usize| -> Vec<f32> {
                (0..algebra.components()).map(|at| ((at * 7 + key * 5) % 11) as f32 - 5.0).collect()
            };
            let (a, b, c) = (random(1), random(2), random(3));
            let left = algebra.product(&algebra.product(&a, &b).unwrap(), &c).unwrap();
            let right = algebra.product(&a, &algebra.product(&b, &c).unwrap()).unwrap();
            assert_eq!(left, right, "Cl({p}, {q})");
        }
    }

    #[test]
    fn shapes_and_dimensions_that_do_not_fit_are_refused() {
        assert_eq!(Algebra::new(3, 2).unwrap_err().to_string(), "p + q: 5 is not allowed; allowed: at most 4");
        assert!(Algebra::new(u32::MAX, 2).is_err());
        let algebra = Algebra::new(2, 0).unwrap();
        assert!(algebra.product(&[0.0; 4], &[0.0; 8]).is_err() && algebra.product(&[0.0; 3], &[0.0; 3]).is_err());
    }
}
