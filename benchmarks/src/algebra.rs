//! Products of max-plus matrices and Fisher matrices, on as many threads as the peers have.

use std::thread;

use anyhow::{Context, Result, ensure};
use engram_information::{LEAVES, PartialSum, combine, leaf_range, partial_sums};
use engram_memory::mix64;
use engram_tropical::{Matrix, product};

use crate::measure;
use crate::row::{Budget, Row};

/// Rows and columns of the max-plus matrices.
const NODES: usize = 1_024;
/// Samples of the Fisher matrix.
const SAMPLES: usize = 10_000;
/// Parameters of the Fisher matrix.
const PARAMETERS: usize = 1_000;

/// Measures both; the sizes are fixed.
///
/// # Errors
/// When a result is wrong.
pub(crate) fn algebra_rows(threads: usize) -> Result<Vec<Row>> {
    Ok(vec![max_plus(threads)?, fisher(threads)?])
}

fn max_plus(threads: usize) -> Result<Row> {
    eprintln!("algebra: max-plus product of {NODES} x {NODES}");
    let matrix = |name, key: u64| Matrix::new(name, NODES, NODES, numbers(NODES * NODES, key));
    let (left, right) = (matrix("left", 1)?, matrix("right", 2)?);
    let expected = (0..NODES).map(|k| left.row(3)[k] + right.row(k)[5]).fold(f32::NEG_INFINITY, f32::max);
    let ours = measure::milliseconds(|| -> Result<()> {
        let result = product(&left, &right, threads)?;
        ensure!(result.row(3)[5] == expected, "{} instead of {expected}", result.row(3)[5]);
        Ok(())
    })?;
    let budget = Budget::Ratio { peer: "numpy".to_owned(), at_least: 3.0 };
    Ok(Row::lower("max-plus product of two square matrices of f32, size: rows", NODES as u32, "ms", ours)
        .workload("max-plus")
        .with_budgets([budget]))
}

fn fisher(threads: usize) -> Result<Row> {
    eprintln!("algebra: Fisher matrix of {SAMPLES} samples and {PARAMETERS} parameters");
    let scores = numbers(SAMPLES * PARAMETERS, 3);
    let expected: f64 = scores.chunks(PARAMETERS).map(|row| f64::from(row[3]) * f64::from(row[5])).sum();
    let ours = measure::milliseconds(|| -> Result<()> {
        let matrix = combine(parts(&scores, threads)?, PARAMETERS, SAMPLES as u64)?;
        let found = matrix.get(3, 5) * SAMPLES as f64;
        ensure!((found - expected).abs() < 1e-6, "{found} instead of {expected}");
        Ok(())
    })?;
    let budget = Budget::Ratio { peer: "numpy".to_owned(), at_least: 1.0 };
    let title =
        format!("Fisher matrix of {PARAMETERS} parameters, partition-invariant (peer: S.T @ S in f64), size: samples");
    Ok(Row::lower(title, SAMPLES as u32, "ms", ours).workload("fisher").with_budgets([budget]))
}

/// Returns the sums of all leaves; threads have consecutive leaves, as workers do.
fn parts(scores: &[f32], threads: usize) -> Result<Vec<PartialSum>> {
    let border = |thread: usize| thread * LEAVES / threads;
    let first = |leaf: usize| if leaf == LEAVES { SAMPLES } else { leaf_range(leaf, SAMPLES).start };
    let part = |thread: usize| {
        let leaves = border(thread)..border(thread + 1);
        let rows = &scores[first(leaves.start) * PARAMETERS..first(leaves.end) * PARAMETERS];
        partial_sums(rows, PARAMETERS, leaves, SAMPLES)
    };
    thread::scope(|scope| {
        let others: Vec<_> = (1..threads).map(|thread| scope.spawn(move || part(thread))).collect();
        let mut parts = part(0)?;
        for other in others {
            parts.extend(other.join().ok().context("a thread panicked")??);
        }
        Ok(parts)
    })
}

/// Returns numbers in [-1, 1).
fn numbers(count: usize, key: u64) -> Vec<f32> {
    (0..count as u64).map(|index| (mix64(mix64(key) ^ index) >> 40) as f32 / (1 << 23) as f32 - 1.0).collect()
}
