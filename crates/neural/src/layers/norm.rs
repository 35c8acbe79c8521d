//! Layer normalization over the values of a row: `y = (x - mean) / sqrt(variance + epsilon) * weight + bias`, with the
//! biased variance (Ba, Kiros and Hinton, 2016).

use crate::plan::NormShape;

/// `statistics` receives the mean and the inverse standard deviation of each row.
pub(crate) fn forward(
    shape: &NormShape,
    parameters: &[f32],
    input: &[f32],
    output: &mut [f32],
    statistics: &mut [f32],
) {
    let n = shape.width;
    let (weight, bias) = (&parameters[shape.weight.clone()], &parameters[shape.bias.clone()]);
    let rows = input.chunks_exact(n).zip(output.chunks_exact_mut(n)).zip(statistics.chunks_exact_mut(2));
    for ((x, y), s) in rows {
        let mean = x.iter().sum::<f32>() / n as f32;
        let variance = x.iter().map(|v| (v - mean) * (v - mean)).sum::<f32>() / n as f32;
        let inverse = 1.0 / (variance + shape.epsilon).sqrt();
        for (((y, x), w), b) in y.iter_mut().zip(x).zip(weight).zip(bias) {
            *y = (x - mean) * inverse * w + b;
        }
        s.copy_from_slice(&[mean, inverse]);
    }
}

/// Gradient of weight and bias.
pub(crate) fn backward_parameters(
    shape: &NormShape,
    input: &[f32],
    statistics: &[f32],
    delta: &[f32],
    gradient: &mut [f32],
) {
    let n = shape.width;
    let (weight, bias) = gradient[shape.weight.start..shape.bias.end].split_at_mut(n);
    weight.fill(0.0);
    bias.fill(0.0);
    for ((x, d), s) in input.chunks_exact(n).zip(delta.chunks_exact(n)).zip(statistics.chunks_exact(2)) {
        for (((w, b), x), d) in weight.iter_mut().zip(bias.iter_mut()).zip(x).zip(d) {
            *w += d * (x - s[0]) * s[1];
            *b += d;
        }
    }
}

/// Replaces `delta`, the gradient of the outputs, by that of the inputs.
pub(crate) fn backward_input(
    shape: &NormShape,
    parameters: &[f32],
    input: &[f32],
    statistics: &[f32],
    delta: &mut [f32],
) {
    let n = shape.width;
    let weight = &parameters[shape.weight.clone()];
    for ((x, d), s) in input.chunks_exact(n).zip(delta.chunks_exact_mut(n)).zip(statistics.chunks_exact(2)) {
        let (mut sum, mut dot) = (0.0, 0.0);
        for ((d, x), w) in d.iter().zip(x).zip(weight) {
            sum += d * w;
            dot += d * w * (x - s[0]) * s[1];
        }
        let (sum, dot) = (sum / n as f32, dot / n as f32);
        for ((d, x), w) in d.iter_mut().zip(x).zip(weight) {
            *d = s[1] * (*d * w - sum - (x - s[0]) * s[1] * dot);
        }
    }
}
