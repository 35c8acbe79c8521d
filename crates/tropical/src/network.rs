//! A classifier with a tropical layer on top of a dense one: `logits[c] = max(max over h of ((x A + a)[h] + W[h][c]), b[c])`.
//!
//! Each hidden unit is one hyperplane; a class takes the largest of its shifted planes, so a logit is a convex piecewise linear function of
//! the inputs.

use crate::{Error, Gradient, Layer, Matrix, smooth_backward, smooth_forward};

/// Initial distance between a hidden unit's own class and the others: far enough for each class to start with planes of its own.
const SEPARATION: f32 = 4.0;
/// Initial bias of a class, below its planes: a bias that wins everywhere would leave its class without gradients.
const BIAS: f32 = -1.0;
/// Half-width of the noise on the initial tropical weights.
const NOISE: f32 = 0.1;

/// Sizes of a network.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NetworkShape {
    /// Values per sample.
    pub inputs: usize,
    /// Units of the dense layer.
    pub hidden: usize,
    /// Outputs of the tropical layer.
    pub classes: usize,
}

impl NetworkShape {
    /// Returns the number of parameters: dense weights (inputs x hidden), offsets (hidden), tropical weights (hidden x classes), biases
    /// (classes).
    pub const fn parameters(&self) -> usize {
        self.inputs * self.hidden + self.hidden + self.hidden * self.classes + self.classes
    }

    /// Returns where dense weights, offsets and tropical weights end.
    const fn ends(&self) -> [usize; 3] {
        let dense = self.inputs * self.hidden;
        [dense, dense + self.hidden, dense + self.hidden + self.hidden * self.classes]
    }
}

/// A network with its parameters in one flat buffer, in the order of [`NetworkShape::parameters`].
#[derive(Debug, Clone, PartialEq)]
pub struct Network {
    shape: NetworkShape,
    parameters: Vec<f32>,
}

/// Gradient of the summed cross-entropy of a batch.
#[derive(Debug, Clone, PartialEq)]
pub struct NetworkGradient {
    /// One value per parameter: sums over samples, never means.
    pub values: Vec<f32>,
    /// Sum of the losses.
    pub loss: f64,
    /// Number of samples.
    pub samples: usize,
}

impl Network {
    /// Creates a network with initial parameters from `seed`: dense weights as Glorot and Bengio (2010), tropical weights that give hidden
    /// unit h to class `h mod classes`.
    pub fn new(shape: NetworkShape, seed: u64) -> Self {
        let mut random = Random(seed);
        let limit = (6.0 / (shape.inputs + shape.hidden) as f32).sqrt();
        let mut parameters = vec![0.0; shape.parameters()];
        let [dense, offsets, weights] = shape.ends();
        parameters[..dense].iter_mut().for_each(|it| *it = limit * random.symmetric());
        for (index, weight) in parameters[offsets..weights].iter_mut().enumerate() {
            let own = index / shape.classes % shape.classes == index % shape.classes;
            *weight = NOISE * random.symmetric() - if own { 0.0 } else { SEPARATION };
        }
        parameters[weights..].fill(BIAS);
        Self { shape, parameters }
    }

    /// Creates a network from its parameters.
    ///
    /// # Errors
    /// The number of parameters does not fit the shape.
    pub fn from_parameters(shape: NetworkShape, parameters: Vec<f32>) -> Result<Self, Error> {
        Error::dimension("number of parameters", parameters.len(), shape.parameters())?;
        Ok(Self { shape, parameters })
    }

    /// Returns the parameters.
    pub fn parameters(&self) -> &[f32] {
        &self.parameters
    }

    /// Returns the parameters, to be changed.
    pub fn parameters_mut(&mut self) -> &mut [f32] {
        &mut self.parameters
    }

    /// Returns the logits of a batch (samples x inputs, row-major) as samples x classes.
    ///
    /// # Errors
    /// The length of `batch` is not a multiple of the inputs; a parameter or a value is NaN or positive infinity.
    pub fn logits(&self, batch: &[f32]) -> Result<Matrix, Error> {
        Ok(self.layer()?.forward(&self.planes(batch)?)?.values)
    }

    /// Returns the gradient of the summed cross-entropy of a batch. With a temperature above 0 the maxima are smooth; at 0 they are exact and
    /// only winners receive gradients.
    ///
    /// # Errors
    /// As [`Self::logits`]; the number of classes differs from that of the samples; a class out of range; a negative temperature.
    pub fn gradient(&self, batch: &[f32], classes: &[u32], temperature: f32) -> Result<NetworkGradient, Error> {
        let (layer, planes) = (self.layer()?, self.planes(batch)?);
        Error::dimension("number of classes of a batch", classes.len(), planes.rows())?;
        let limit = self.shape.classes;
        if let Some(&class) = classes.iter().find(|&&class| class as usize >= limit) {
            return Err(Error::Dimension {
                what: "classes up to the largest",
                found: class as usize + 1,
                expected: limit,
            });
        }
        let (loss, tropical) = if temperature == 0.0 {
            let output = layer.forward(&planes)?;
            let (upstream, loss) = cross_entropy(&output.values, classes);
            (loss, layer.backward(&output, &upstream)?)
        } else {
            let output = smooth_forward(&layer, &planes, temperature)?;
            let (upstream, loss) = cross_entropy(&output.values, classes);
            (loss, smooth_backward(&layer, &planes, &output, &upstream)?)
        };
        Ok(NetworkGradient { values: self.assemble(batch, &tropical), loss, samples: classes.len() })
    }

    /// Writes the gradients of the two layers into one flat buffer.
    fn assemble(&self, batch: &[f32], tropical: &Gradient) -> Vec<f32> {
        let NetworkShape { inputs, hidden, .. } = self.shape;
        let [dense, offsets, weights] = self.shape.ends();
        let mut values = vec![0.0; self.parameters.len()];
        for (sample, to_planes) in batch.chunks_exact(inputs).zip(tropical.inputs.chunks_exact(hidden)) {
            for (input, &x) in sample.iter().enumerate() {
                let row = &mut values[input * hidden..][..hidden];
                row.iter_mut().zip(to_planes).for_each(|(sum, plane)| *sum += x * plane);
            }
            values[dense..offsets].iter_mut().zip(to_planes).for_each(|(sum, plane)| *sum += plane);
        }
        tropical.weights.iter().for_each(|&(entry, value)| values[offsets + entry as usize] = value);
        values[weights..].copy_from_slice(&tropical.biases);
        values
    }

    fn layer(&self) -> Result<Layer, Error> {
        let [_, offsets, weights] = self.shape.ends();
        let entries = self.parameters[offsets..weights].to_vec();
        let matrix = Matrix::new("weights", self.shape.hidden, self.shape.classes, entries)?;
        Layer::new(matrix, self.parameters[weights..].to_vec())
    }

    /// Returns `x A + a`, samples x hidden.
    fn planes(&self, batch: &[f32]) -> Result<Matrix, Error> {
        let NetworkShape { inputs, hidden, .. } = self.shape;
        let samples = batch.len().checked_div(inputs).unwrap_or(0);
        Error::dimension("number of values of a batch", batch.len(), samples * inputs)?;
        let [dense, offsets, _] = self.shape.ends();
        let mut planes = Vec::with_capacity(samples * hidden);
        for sample in batch.chunks_exact(inputs.max(1)) {
            let start = planes.len();
            planes.extend_from_slice(&self.parameters[dense..offsets]);
            let row = &mut planes[start..];
            for (&x, weights) in sample.iter().zip(self.parameters[..dense].chunks_exact(hidden)) {
                row.iter_mut().zip(weights).for_each(|(plane, weight)| *plane += x * weight);
            }
        }
        Matrix::new("planes", samples, hidden, planes)
    }
}

/// Returns `softmax(logits) - one_hot(class)` of each sample, and the sum of the losses.
fn cross_entropy(logits: &Matrix, classes: &[u32]) -> (Vec<f32>, f64) {
    let mut upstream = Vec::with_capacity(logits.entries().len());
    let mut loss = 0.0;
    for (sample, &class) in classes.iter().enumerate() {
        let row = logits.row(sample);
        let largest = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let powers: Vec<f64> = row.iter().map(|&logit| f64::from(logit - largest).exp()).collect();
        let sum: f64 = powers.iter().sum();
        loss += sum.ln() - f64::from(row[class as usize] - largest);
        let hit = |output: usize| if output == class as usize { 1.0 } else { 0.0 };
        upstream.extend(powers.iter().enumerate().map(|(output, power)| (power / sum - hit(output)) as f32));
    }
    (upstream, loss)
}

/// SplitMix64 (Steele, Lea and Flood, 2014).
struct Random(u64);

impl Random {
    /// Returns a number in [-1, 1).
    fn symmetric(&mut self) -> f32 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut word = self.0;
        word = (word ^ (word >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((word ^ (word >> 31)) >> 40) as f32 / (1 << 23) as f32 - 1.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: NetworkShape = NetworkShape { inputs: 3, hidden: 5, classes: 2 };

    fn batch() -> (Vec<f32>, [u32; 4]) {
        let mut random = Random(7);
        ((0..12).map(|_| random.symmetric()).collect(), [0, 1, 1, 0])
    }

    #[test]
    fn gradient_equals_finite_differences_at_any_temperature() {
        let (batch, classes) = batch();
        for temperature in [0.0, 0.5] {
            let network = Network::new(SHAPE, 3);
            let gradient = network.gradient(&batch, &classes, temperature).unwrap();
            for index in 0..SHAPE.parameters() {
                let loss = |by: f32| {
                    let mut moved = network.clone();
                    moved.parameters_mut()[index] += by;
                    moved.gradient(&batch, &classes, temperature).unwrap().loss
                };
                let numeric = (loss(1e-3) - loss(-1e-3)) / 2e-3;
                let exact = f64::from(gradient.values[index]);
                assert!((numeric - exact).abs() < 3e-3, "parameter {index} at {temperature}: {numeric} {exact}");
            }
        }
    }

    #[test]
    fn initial_weights_give_every_class_its_own_winners() {
        let network = Network::new(NetworkShape { inputs: 4, hidden: 12, classes: 3 }, 1);
        let layer = network.layer().unwrap();
        for unit in 0..12 {
            let row = layer.weights().row(unit);
            assert!((0..3).all(|class| (row[class] > -1.0) == (class == unit % 3)), "{row:?}");
        }
        assert_eq!(network, Network::new(NetworkShape { inputs: 4, hidden: 12, classes: 3 }, 1));
    }

    #[test]
    fn shapes_and_classes_that_do_not_fit_are_refused() {
        let network = Network::new(SHAPE, 3);
        assert!(network.gradient(&[0.0; 3], &[2], 0.0).unwrap_err().to_string().contains('3'));
        assert!(network.gradient(&[0.0; 3], &[0, 1], 0.0).is_err());
        assert!(network.logits(&[0.0; 4]).is_err());
        assert!(network.logits(&[f32::NAN, 0.0, 0.0]).unwrap_err().to_string().starts_with("planes[0]"));
        assert!(Network::from_parameters(SHAPE, vec![0.0; 3]).is_err());
    }
}
