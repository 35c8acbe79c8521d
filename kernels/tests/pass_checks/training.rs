//! Compares gradients of networks with their definition: each row alone, in double precision, without regard to speed. The definition itself is
//! compared with finite differences.

use super::PassChecks;
use crate::random_numbers::RandomNumbers;
use engram_kernels::gpu::{
    Activation, Driver, Layer, Operation, TrainedNetwork, TrainingBatch, TrainingGradient, TrainingKernels,
    TrainingLoss,
};

/// Relative to the largest value: kernels add up to 400 numbers in single precision.
const TOLERANCE: f64 = 2e-5;

/// An item of a layer list.
enum Item {
    Dense(usize, bool),
    Frozen(usize),
    Activation(Activation),
    Dropout(f32),
    Norm,
    Residual(Vec<Item>),
}

/// Builds a network as `engram-neural` does: layers overwrite buffers that no backward pass needs.
struct Builder {
    network: TrainedNetwork,
    current: usize,
    writable: bool,
    dropouts: u16,
}

impl Builder {
    fn build(inputs: usize, items: &[Item]) -> TrainedNetwork {
        let network = TrainedNetwork { widths: vec![inputs], operations: Vec::new(), parameters: 0 };
        let mut builder = Self { network, current: 0, writable: false, dropouts: 0 };
        builder.list(items);
        builder.network
    }

    fn push(&mut self, layer: Layer, width: usize, trains: bool, in_place: bool) {
        let input = self.current;
        if !in_place {
            self.network.widths.push(width);
            self.current = self.network.widths.len() - 1;
            self.writable = true;
        }
        self.network.operations.push(Operation { layer, input, output: self.current, trains });
    }

    fn parameters(&mut self, count: usize) -> usize {
        self.network.parameters += count;
        self.network.parameters - count
    }

    fn list(&mut self, items: &[Item]) {
        for item in items {
            let width = self.network.widths[self.current];
            match item {
                Item::Dense(outputs, bias) => self.dense(width, *outputs, *bias, true),
                Item::Frozen(outputs) => self.dense(width, *outputs, true, false),
                Item::Activation(kind) => {
                    let reads_input = *kind == Activation::Gelu;
                    self.push(Layer::Activation(*kind), width, false, self.writable && !reads_input);
                    self.writable = reads_input;
                }
                Item::Dropout(probability) => {
                    let layer = Layer::Dropout { probability: *probability, layer: self.dropouts };
                    self.dropouts += 1;
                    self.push(layer, width, false, false);
                }
                Item::Norm => {
                    let weight = self.parameters(2 * width);
                    self.push(Layer::Norm { epsilon: 1e-5, weight }, width, true, false);
                }
                Item::Residual(body) => {
                    let skip = self.current;
                    self.push(Layer::Fork, width, false, true);
                    self.writable = false;
                    self.list(body);
                    self.push(Layer::Add { skip }, width, false, self.writable);
                }
            }
        }
    }

    fn dense(&mut self, inputs: usize, outputs: usize, bias: bool, trains: bool) {
        let weight = self.parameters(inputs * outputs + if bias { outputs } else { 0 });
        self.push(Layer::Dense { inputs, outputs, weight, bias }, outputs, trains, false);
    }
}

/// The definition.
struct Definition<'a> {
    network: &'a TrainedNetwork,
    parameters: Vec<f64>,
    batch: TrainingBatch<'a>,
}

impl Definition<'_> {
    /// Weighted sum of the losses times the scale, its gradient, and losses and errors of the rows.
    fn gradient(&self) -> (f64, Vec<f64>, Vec<f64>, Vec<f64>) {
        let (mut total, mut gradient) = (0.0, vec![0.0; self.network.parameters]);
        let (mut losses, mut errors) = (Vec::new(), Vec::new());
        for row in 0..self.batch.positions.len() {
            let weight = f64::from(self.batch.weights.map_or(1.0, |weights| weights[row]) * self.batch.scale);
            let values = self.forward(row);
            let (loss, error, slopes) = self.loss(row, values.last().unwrap());
            total += weight * loss;
            self.backward(row, &values, slopes.into_iter().map(|it| it * weight).collect(), &mut gradient);
            losses.push(loss);
            errors.push(error);
        }
        let first = self.network.operations.iter().position(|operation| operation.trains).unwrap();
        for operation in &self.network.operations[first..] {
            if let Layer::Dense { inputs, outputs, weight, bias } = operation.layer
                && !operation.trains
            {
                gradient[weight..weight + inputs * outputs + usize::from(bias) * outputs].fill(0.0);
            }
        }
        (total, gradient, losses, errors)
    }

    /// Values before each operation, and at last those of the outputs.
    fn forward(&self, row: usize) -> Vec<Vec<f64>> {
        let width = self.network.widths[0];
        let mut values = vec![self.batch.rows[row * width..][..width].iter().map(|&x| f64::from(x)).collect()];
        let mut blocks = Vec::new();
        for operation in &self.network.operations {
            let x: &Vec<f64> = values.last().unwrap();
            values.push(match operation.layer {
                Layer::Dense { inputs, outputs, weight, bias } => (0..outputs)
                    .map(|output| {
                        let own = &self.parameters[weight + output * inputs..][..inputs];
                        let bias = if bias { self.parameters[weight + inputs * outputs + output] } else { 0.0 };
                        bias + own.iter().zip(x).map(|(w, x)| w * x).sum::<f64>()
                    })
                    .collect(),
                Layer::Activation(kind) => x.iter().map(|&x| activated(kind, x).0).collect(),
                Layer::Dropout { probability, layer } => {
                    x.iter().zip(self.mask(row, probability, layer)).map(|(x, kept)| x * kept).collect()
                }
                Layer::Norm { epsilon, weight } => {
                    let ((mean, inverse), n) = (statistics(x, epsilon), x.len());
                    let own = &self.parameters[weight..];
                    let scaled = |(i, x): (usize, &f64)| (x - mean) * inverse * own[i] + own[n + i];
                    x.iter().enumerate().map(scaled).collect()
                }
                Layer::Fork => {
                    blocks.push(x.clone());
                    x.clone()
                }
                Layer::Add { .. } => x.iter().zip(blocks.pop().unwrap()).map(|(x, skip)| x + skip).collect(),
            });
        }
        values
    }

    fn backward(&self, row: usize, values: &[Vec<f64>], mut delta: Vec<f64>, gradient: &mut [f64]) {
        let mut blocks = Vec::new();
        for (place, operation) in self.network.operations.iter().enumerate().rev() {
            let x = &values[place];
            match operation.layer {
                Layer::Dense { inputs, outputs, weight, bias } => {
                    let mut below = vec![0.0; inputs];
                    for (output, slope) in delta.iter().enumerate() {
                        for (input, x) in x.iter().enumerate() {
                            gradient[weight + output * inputs + input] += slope * x;
                            below[input] += slope * self.parameters[weight + output * inputs + input];
                        }
                        if bias {
                            gradient[weight + inputs * outputs + output] += slope;
                        }
                    }
                    delta = below;
                }
                Layer::Activation(kind) => {
                    delta.iter_mut().zip(x).for_each(|(slope, &x)| *slope *= activated(kind, x).1);
                }
                Layer::Dropout { probability, layer } => {
                    delta.iter_mut().zip(self.mask(row, probability, layer)).for_each(|(slope, kept)| *slope *= kept);
                }
                Layer::Norm { epsilon, weight } => {
                    let ((mean, inverse), n) = (statistics(x, epsilon), x.len());
                    let normal: Vec<f64> = x.iter().map(|x| (x - mean) * inverse).collect();
                    let own: Vec<f64> = delta.iter().zip(&self.parameters[weight..]).map(|(d, w)| d * w).collect();
                    let sum = own.iter().sum::<f64>() / n as f64;
                    let dot = own.iter().zip(&normal).map(|(d, x)| d * x).sum::<f64>() / n as f64;
                    for i in 0..n {
                        gradient[weight + i] += delta[i] * normal[i];
                        gradient[weight + n + i] += delta[i];
                        delta[i] = inverse * (own[i] - sum - normal[i] * dot);
                    }
                }
                Layer::Add { .. } => blocks.push(delta.clone()),
                Layer::Fork => {
                    delta.iter_mut().zip(blocks.pop().unwrap()).for_each(|(slope, skip)| *slope += skip);
                }
            }
        }
    }

    /// Loss, error and the gradient of the outputs.
    fn loss(&self, row: usize, outputs: &[f64]) -> (f64, f64, Vec<f64>) {
        let n = outputs.len();
        let mean = |values: &[f32], each: &dyn Fn(f64, f64) -> (f64, f64, f64)| {
            let own = values[row * n..][..n].iter().map(|&y| f64::from(y));
            let all: Vec<_> = outputs.iter().zip(own).map(|(&p, y)| each(p, y)).collect();
            let count = n as f64;
            let loss = all.iter().map(|it| it.0).sum::<f64>() / count;
            let error = all.iter().map(|it| it.2).sum::<f64>() / count;
            (loss, error, all.iter().map(|it| it.1 / count).collect())
        };
        match self.batch.loss {
            TrainingLoss::Mse(values) => mean(values, &|p, y| ((p - y) * (p - y), 2.0 * (p - y), (p - y).abs())),
            TrainingLoss::Huber(values, delta) => {
                let delta = f64::from(delta);
                mean(values, &|p, y| match p - y {
                    off if off.abs() <= delta => (0.5 * off * off, off, off.abs()),
                    off => (delta * (off.abs() - 0.5 * delta), delta.copysign(off), off.abs()),
                })
            }
            TrainingLoss::Bce(values) => mean(values, &|z, y| {
                let p = 1.0 / (1.0 + (-z).exp());
                (z.max(0.0) - z * y + (-z.abs()).exp().ln_1p(), p - y, (p - y).abs())
            }),
            TrainingLoss::CrossEntropy(classes) => {
                let class = classes[row] as usize;
                let sum: f64 = outputs.iter().map(|z| z.exp()).sum();
                let mut slopes: Vec<f64> = outputs.iter().map(|z| z.exp() / sum).collect();
                let error = 1.0 - slopes[class];
                slopes[class] -= 1.0;
                (sum.ln() - outputs[class], error, slopes)
            }
        }
    }

    fn mask(&self, row: usize, probability: f32, layer: u16) -> Vec<f64> {
        let mut all = Vec::new();
        for block in 0..1_000 {
            let (key, step) = (self.batch.key ^ u64::from(layer), self.batch.step);
            let words = philox(key, [block, self.batch.positions[row], step as u32, (step >> 32) as u32]);
            let unit = |word: u32| f64::from(word >> 8) / f64::from(1 << 24);
            let keep = 1.0 / (1.0 - f64::from(probability));
            all.extend(words.map(|word| if unit(word) < f64::from(probability) { 0.0 } else { keep }));
        }
        all
    }
}

fn statistics(x: &[f64], epsilon: f32) -> (f64, f64) {
    let n = x.len() as f64;
    let mean = x.iter().sum::<f64>() / n;
    let variance = x.iter().map(|x| (x - mean) * (x - mean)).sum::<f64>() / n;
    (mean, 1.0 / (variance + f64::from(epsilon)).sqrt())
}

/// Value and derivative.
fn activated(kind: Activation, x: f64) -> (f64, f64) {
    match kind {
        Activation::Relu => (x.max(0.0), if x > 0.0 { 1.0 } else { 0.0 }),
        Activation::Gelu => {
            let density = (-0.5 * x * x).exp() / (2.0 * std::f64::consts::PI).sqrt();
            // Taylor series of the distribution function, for arguments of a few units.
            let (mut term, mut sum) = (x, x);
            for n in 1..200 {
                term *= -0.5 * x * x / f64::from(n);
                sum += term / f64::from(2 * n + 1);
            }
            let distribution = 0.5 + sum / (2.0 * std::f64::consts::PI).sqrt();
            (x * distribution, distribution + x * density)
        }
        Activation::Tanh => (x.tanh(), 1.0 - x.tanh() * x.tanh()),
        Activation::Sigmoid => {
            let y = 1.0 / (1.0 + (-x).exp());
            (y, y * (1.0 - y))
        }
    }
}

/// Philox4x32-10.
fn philox(key: u64, mut words: [u32; 4]) -> [u32; 4] {
    let mut key = [key as u32, (key >> 32) as u32];
    for _ in 0..10 {
        let (a, b) = (0xD251_1F53 * u64::from(words[0]), 0xCD9E_8D57 * u64::from(words[2]));
        words = [(b >> 32) as u32 ^ words[1] ^ key[0], b as u32, (a >> 32) as u32 ^ words[3] ^ key[1], a as u32];
        key = [key[0].wrapping_add(0x9E37_79B9), key[1].wrapping_add(0xBB67_AE85)];
    }
    words
}

fn uniform(numbers: &mut RandomNumbers, count: usize, largest: f32) -> Vec<f32> {
    (0..count).map(|_| (numbers.below(2_000_001) as f32 / 1e6 - 1.0) * largest).collect()
}

impl<D: Driver> PassChecks<D> {
    pub(super) fn training(&mut self) {
        use Item::{Activation as Act, Dense, Dropout, Frozen, Norm, Residual};
        let block = |width: usize| {
            Residual(vec![Norm, Dense(width, true), Act(Activation::Gelu), Dropout(0.25), Dense(width, false)])
        };
        let small = [
            Dense(9, true),
            Act(Activation::Tanh),
            block(9),
            Act(Activation::Sigmoid),
            Residual(vec![Dense(9, true), Act(Activation::Gelu)]),
            Norm,
            Dense(3, true),
        ];
        let network = Builder::build(18, &small);
        let rows = 6;
        let [values, targets] = [18, 3].map(|width| uniform(&mut self.numbers, rows * width, 2.0));
        let units: Vec<f32> = targets.iter().map(|target| target.abs() / 2.0).collect();
        let classes: Vec<u32> = (0..rows).map(|_| self.numbers.below(3) as u32).collect();
        let huber = TrainingLoss::Huber(&targets, 0.7);
        for loss in
            [huber, TrainingLoss::Mse(&targets), TrainingLoss::Bce(&units), TrainingLoss::CrossEntropy(&classes)]
        {
            self.gradients(&network, &values, loss, rows);
        }
        if self.lean {
            return;
        }
        // Several tiles, sums in parts, a warp of outputs, an activation of the batch, and a frozen layer above one that trains.
        let large = [
            Act(Activation::Relu),
            Dropout(0.5),
            Dense(130, true),
            Act(Activation::Relu),
            Frozen(70),
            Norm,
            block(70),
            Act(Activation::Tanh),
            Dense(40, true),
        ];
        let (network, rows) = (Builder::build(67, &large), 301);
        let values = uniform(&mut self.numbers, rows * 67, 1.0);
        let targets = uniform(&mut self.numbers, rows * 40, 1.0);
        self.gradients(&network, &values, TrainingLoss::Mse(&targets), rows);
        let classes: Vec<u32> = (0..rows).map(|_| self.numbers.below(40) as u32).collect();
        self.gradients(&network, &values, TrainingLoss::CrossEntropy(&classes), rows);
    }

    fn gradients(&mut self, network: &TrainedNetwork, values: &[f32], loss: TrainingLoss<'_>, rows: usize) {
        let parameters = uniform(&mut self.numbers, network.parameters, 0.4);
        let positions: Vec<u32> = (0..rows).map(|_| self.numbers.below(1 << 32) as u32).collect();
        let weights: Vec<f32> = uniform(&mut self.numbers, rows, 1.0).iter().map(|weight| weight.abs()).collect();
        let (key, step) = (self.numbers.next(), self.numbers.next());
        let weights = (key % 2 == 0).then_some(&weights[..]);
        let batch = TrainingBatch {
            parameters: &parameters,
            rows: values,
            positions: &positions,
            loss,
            weights,
            scale: 1.5,
            key,
            step,
        };
        let found = self.gpu.training_gradient(network, &batch).unwrap();
        let doubles = |values: &[f32]| values.iter().map(|&it| f64::from(it)).collect::<Vec<f64>>();
        let mut definition = Definition { network, parameters: doubles(&parameters), batch };
        let (_, gradient, losses, errors) = definition.gradient();
        let TrainingGradient { parameters: own, losses: own_losses, errors: own_errors } = &found;
        near("losses of rows", &doubles(own_losses), &losses);
        near("errors of rows", &doubles(own_errors), &errors);
        near("a gradient of a network", &doubles(own), &gradient);
        let again = self.gpu.training_gradient(network, &batch).unwrap();
        assert!(again == found, "a repeated gradient has other bits");
        if self.lean || rows > 100 {
            return;
        }
        // Other parameters of the same size are uploaded; finite differences of the definition.
        for _ in 0..20 {
            let place = self.numbers.below(network.parameters as u64) as usize;
            let (start, width) = (definition.parameters[place], 1e-5);
            let [above, below] = [width, -width].map(|by| {
                definition.parameters[place] = start + by;
                definition.gradient().0
            });
            definition.parameters[place] = start;
            let (numeric, expected) = ((above - below) / (2.0 * width), gradient[place]);
            assert!((numeric - expected).abs() < 1e-6 * (1.0 + expected.abs()), "{place}: {numeric} {expected}");
        }
        let moved: Vec<f32> = parameters.iter().map(|parameter| parameter + 0.01).collect();
        let batch = TrainingBatch { parameters: &moved, ..batch };
        let found = self.gpu.training_gradient(network, &batch).unwrap();
        let (_, gradient, ..) = Definition { network, parameters: doubles(&moved), batch }.gradient();
        near("a gradient of other parameters", &doubles(&found.parameters), &gradient);
    }
}

fn near(what: &str, found: &[f64], expected: &[f64]) {
    let largest = expected.iter().map(|it| it.abs()).fold(1e-6, f64::max);
    assert_eq!(found.len(), expected.len(), "{what}");
    for (place, (found, expected)) in found.iter().zip(expected).enumerate() {
        assert!((found - expected).abs() <= TOLERANCE * largest, "{what} differs: {place}: {found} {expected}");
    }
}
