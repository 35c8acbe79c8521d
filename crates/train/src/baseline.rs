//! Ridge regression on the training samples: a lower bound for what a model should reach.

use crate::dataset::Dataset;
use crate::rows::{Evaluation, measure};

/// Most features: the normal equations have their square.
const MAX_FEATURES: usize = 1_024;
/// Weight of the penalty, relative to the number of samples.
const PENALTY: f64 = 1e-3;

/// Fits a ridge regression, for classes one against all others each, and measures it on the held-out samples; `None` with more than 1,024 features or
/// without held-out samples.
pub fn ridge(data: &Dataset) -> Option<Evaluation> {
    let (count, size) = (data.training_len(), data.features + 1);
    if data.features > MAX_FEATURES || count == data.len() || count == 0 {
        return None;
    }
    let outputs = data.classes.max(1);
    let wanted = |sample: usize, output: usize| {
        let target = data.targets[sample];
        if data.classes == 0 { f64::from(target) } else { f64::from(u8::from(target as usize == output)) }
    };
    // The last input is 1.
    let inputs = |sample: usize| {
        let mut inputs = data.nonzero(sample);
        inputs.push((size - 1, 1.0));
        inputs
    };
    let (mut matrix, mut right) = (vec![0.0; size * size], vec![vec![0.0; size]; outputs]);
    for sample in 0..count {
        let inputs = inputs(sample);
        for (at, &(row, value)) in inputs.iter().enumerate() {
            inputs[..=at].iter().for_each(|(column, other)| matrix[row * size + column] += value * other);
            right.iter_mut().enumerate().for_each(|(output, right)| right[row] += value * wanted(sample, output));
        }
    }
    (0..size - 1).for_each(|at| matrix[at * size + at] += PENALTY * count as f64);
    decompose(&mut matrix, size)?;
    right.iter_mut().for_each(|right| solve(&matrix, size, right));
    let predict = |sample: usize| -> Vec<f32> {
        let inputs = inputs(sample);
        right.iter().map(|weights| inputs.iter().map(|(at, value)| weights[*at] * value).sum::<f64>() as f32).collect()
    };
    let held_out: Vec<usize> = (count..data.len()).collect();
    let predicted: Vec<f32> = held_out.iter().flat_map(|sample| predict(*sample)).collect();
    let targets: Vec<f32> = held_out.iter().map(|sample| data.targets[*sample]).collect();
    Some(measure(&predicted, &targets, data.classes))
}

/// Cholesky decomposition of the lower triangle, in place; `None` for a matrix that is not positive definite.
fn decompose(matrix: &mut [f64], size: usize) -> Option<()> {
    for row in 0..size {
        for column in 0..=row {
            let (a, b) = (&matrix[row * size..row * size + column], &matrix[column * size..column * size + column]);
            let rest = matrix[row * size + column] - a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
            matrix[row * size + column] = if row > column {
                rest / matrix[column * size + column]
            } else if rest > 0.0 {
                rest.sqrt()
            } else {
                return None;
            };
        }
    }
    Some(())
}

fn solve(matrix: &[f64], size: usize, right: &mut [f64]) {
    for row in 0..size {
        let known: f64 = (0..row).map(|column| matrix[row * size + column] * right[column]).sum();
        right[row] = (right[row] - known) / matrix[row * size + row];
    }
    for row in (0..size).rev() {
        let known: f64 = (row + 1..size).map(|column| matrix[column * size + row] * right[column]).sum();
        right[row] = (right[row] - known) / matrix[row * size + row];
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ridge_finds_a_linear_target_and_separates_classes() {
        let line = |i: u32| {
            let (a, b) = (i * 37 % 101, i * 53 % 97);
            (f64::from(a), f64::from(b), 0.5 * f64::from(a) - 0.25 * f64::from(b) + 3.0)
        };
        let text = (0..300).map(line).fold("a,b,y\n".to_owned(), |text, (a, b, y)| text + &format!("{a},{b},{y}\n"));
        let data = Dataset::table(text.as_bytes(), "y", false, 1).unwrap();
        let found = ridge(&data).unwrap();
        assert!(found.correlation > 0.9999 && found.samples == 30, "{found:?}");
        let text = (0..300)
            .map(line)
            .fold("a,b,y\n".to_owned(), |text, (a, b, y)| text + &format!("{a},{b},{}\n", u8::from(y > 15.0)));
        let found = ridge(&Dataset::table(text.as_bytes(), "y", true, 1).unwrap()).unwrap();
        assert!(found.accuracy > 0.9, "{found:?}");
        let wide = Dataset { features: 2_000, ..data };
        assert!(ridge(&wide).is_none());
    }
}
