//! Compares computations without state with their definitions.

use super::{Part, PassChecks};
use crate::random_numbers::RandomNumbers;
use engram_kernels::gpu::{Driver, ProductShape};
use std::ops::Range;

impl<D: Driver> PassChecks<D> {
    pub(super) fn algebra(&mut self, part: Part) {
        match part {
            Part::MaxPlus => {
                let shapes = [[1, 1, 1], [20, 17, 30], [3, 0, 2], [130, 37, 135], [257, 16, 5]];
                for [rows, depth, columns] in shapes.into_iter().take(if self.lean { 3 } else { 5 }) {
                    self.max_plus(ProductShape { rows, depth, columns });
                }
            }
            _ => {
                self.outer_products(20, &[0..20, 3..11, 19..20, 4..4], &[9]);
                if !self.lean {
                    self.outer_products(133, &[0..133, 0..64, 64..133, 70..131], &[20, 0, 17, 3]);
                }
            }
        }
    }

    fn max_plus(&mut self, shape: ProductShape) {
        let ProductShape { rows, depth, columns } = shape;
        let numbers = &mut self.numbers;
        let mut matrix = |count: usize| -> Vec<f32> { (0..count).map(|_| entry(numbers)).collect() };
        let (mut left, right) = (matrix(rows * depth), matrix(depth * columns));
        // A node without edges reaches nothing.
        left[..depth].fill(f32::NEG_INFINITY);
        let found = self.gpu.max_plus_product(&left, &right, shape).unwrap();
        let mut expected = Vec::new();
        for row in 0..rows {
            for column in 0..columns {
                let sums = (0..depth).map(|step| left[row * depth + step] + right[step * columns + column]);
                expected.push(sums.fold(f32::NEG_INFINITY, f32::max).to_bits());
            }
        }
        assert!(found.into_iter().map(f32::to_bits).eq(expected), "a max-plus product differs: {shape:?}");
    }

    fn outer_products(&mut self, parameters: usize, bands: &[Range<usize>], leaves: &[u32]) {
        let samples = leaves.iter().sum::<u32>() as usize;
        let scores: Vec<f32> = (0..samples * parameters).map(|_| number(&mut self.numbers)).collect();
        for rows in bands {
            let found = self.gpu.outer_products(&scores, parameters, rows, leaves).unwrap();
            let mut expected = Vec::new();
            for row in rows.clone() {
                for column in row..parameters {
                    let product = |at: &[f32]| f64::from(at[row]) * f64::from(at[column]);
                    let mut first = 0;
                    let leaf = |&count: &u32| {
                        let own = &scores[first * parameters..(first + count as usize) * parameters];
                        first += count as usize;
                        own.chunks_exact(parameters).fold(0.0, |sum, sample| sum + product(sample))
                    };
                    let mut sums: Vec<f64> = leaves.iter().map(leaf).collect();
                    while sums.len() > 1 {
                        sums = sums.chunks(2).map(|pair| pair[0] + pair[1]).collect();
                    }
                    expected.push(sums[0].to_bits());
                }
            }
            let bits = found.into_iter().map(f64::to_bits);
            assert!(bits.eq(expected), "sums of outer products differ: rows {rows:?} of {parameters}");
        }
    }
}

/// Returns a number of any small exponent, so that additions round.
fn number(numbers: &mut RandomNumbers) -> f32 {
    let magnitude = 2_f32.powi(numbers.below(12) as i32 - 6);
    (numbers.below(2_000_001) as f32 / 1e6 - 1.0) * magnitude + 0.0
}

/// Returns a number, a missing edge for one of five, or a zero.
fn entry(numbers: &mut RandomNumbers) -> f32 {
    match numbers.below(10) {
        0 | 1 => f32::NEG_INFINITY,
        2 => 0.0,
        _ => number(numbers),
    }
}
