//! Element-wise functions and their derivatives.

use crate::spec::Activation;

const SQRT_HALF: f32 = std::f32::consts::FRAC_1_SQRT_2;
/// 1 / sqrt(2 pi).
const NORMAL: f32 = 0.398_942_3;

/// Applies the function to every value.
pub(crate) fn forward_in_place(activation: Activation, values: &mut [f32]) {
    match activation {
        Activation::Relu => values.iter_mut().for_each(|x| *x = x.max(0.0)),
        Activation::Gelu => values.iter_mut().for_each(|x| *x *= normal_distribution(*x)),
        Activation::Tanh => values.iter_mut().for_each(|x| *x = x.tanh()),
        Activation::Sigmoid => values.iter_mut().for_each(|x| *x = sigmoid(*x)),
    }
}

/// Multiplies `delta` by the derivative. `kept` holds the inputs for `Gelu`, the outputs for the others.
pub(crate) fn backward(activation: Activation, kept: &[f32], delta: &mut [f32]) {
    let pairs = delta.iter_mut().zip(kept);
    match activation {
        Activation::Relu => pairs.for_each(|(d, y)| *d = if *y > 0.0 { *d } else { 0.0 }),
        Activation::Gelu => pairs.for_each(|(d, x)| {
            *d *= normal_distribution(*x) + x * NORMAL * (-0.5 * x * x).exp();
        }),
        Activation::Tanh => pairs.for_each(|(d, y)| *d *= 1.0 - y * y),
        Activation::Sigmoid => pairs.for_each(|(d, y)| *d *= y * (1.0 - y)),
    }
}

/// `1 / (1 + exp(-x))`, without overflow for any x.
pub(crate) fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}

fn normal_distribution(x: f32) -> f32 {
    0.5 * (1.0 + libm::erff(x * SQRT_HALF))
}
