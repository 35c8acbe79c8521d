//! Compares networks and path features of the geodesic model with their definitions, written without regard to speed.

use super::{Part, PassChecks};
use crate::random_numbers::RandomNumbers;
use engram_kernels::gpu::{Driver, GeodesicKernels, NetworkBatch, PathAdjoint, PathBatch};

/// Relative to the largest value: sums have another order than here.
const TOLERANCE: f64 = 1e-12;

/// A network `inputs -> 64 tanh -> 128 tanh -> 1`.
struct Network<'a> {
    inputs: usize,
    parameters: &'a [f64],
}

impl Network<'_> {
    /// W1, b1, W2, b2, W3, b3.
    fn parts(&self) -> [&[f64]; 6] {
        let mut rest = self.parameters;
        [self.inputs * 64, 64, 64 * 128, 128, 128, 1].map(|length| {
            let (part, left) = rest.split_at(length);
            rest = left;
            part
        })
    }

    fn layers(&self, row: &[f64]) -> (Vec<f64>, Vec<f64>, f64) {
        let [w1, b1, w2, b2, w3, b3] = self.parts();
        let first = |j: usize| (b1[j] + (0..self.inputs).map(|i| row[i] * w1[i * 64 + j]).sum::<f64>()).tanh();
        let first: Vec<f64> = (0..64).map(first).collect();
        let second = |j: usize| (b2[j] + (0..64).map(|i| first[i] * w2[i * 128 + j]).sum::<f64>()).tanh();
        let second: Vec<f64> = (0..128).map(second).collect();
        let out = b3[0] + second.iter().zip(w3).map(|(y, w)| y * w).sum::<f64>();
        (first, second, out)
    }

    /// Adds the gradient of `adjoint` times the output, and returns that with respect to the row.
    fn backward(&self, row: &[f64], adjoint: f64, gradient: &mut [f64]) -> Vec<f64> {
        let [w1, _, w2, _, w3, _] = self.parts();
        let (first, second, _) = self.layers(row);
        let (b1, w2_start) = (self.inputs * 64, self.inputs * 64 + 64);
        let (b2, w3_start) = (w2_start + 64 * 128, w2_start + 64 * 128 + 128);
        let delta: Vec<f64> = (0..128).map(|j| adjoint * w3[j] * (1.0 - second[j] * second[j])).collect();
        for j in 0..128 {
            gradient[w3_start + j] += adjoint * second[j];
            gradient[b2 + j] += delta[j];
            (0..64).for_each(|i| gradient[w2_start + i * 128 + j] += first[i] * delta[j]);
        }
        *gradient.last_mut().unwrap() += adjoint;
        let below = |i: usize| (0..128).map(|j| delta[j] * w2[i * 128 + j]).sum::<f64>() * (1.0 - first[i] * first[i]);
        let below: Vec<f64> = (0..64).map(below).collect();
        for i in 0..64 {
            gradient[b1 + i] += below[i];
            (0..self.inputs).for_each(|k| gradient[k * 64 + i] += row[k] * below[i]);
        }
        (0..self.inputs).map(|k| (0..64).map(|i| below[i] * w1[k * 64 + i]).sum()).collect()
    }
}

impl<D: Driver> PassChecks<D> {
    pub(super) fn geodesic(&mut self, part: Part) {
        match part {
            Part::Networks => {
                let shapes: &[[usize; 3]] = if self.lean { &[[1, 3, 5]] } else { &[[2, 2, 37], [1, 5, 16]] };
                shapes.iter().for_each(|&[models, inputs, rows]| self.networks(models, inputs, rows));
            }
            _ => self.paths(if self.lean { 1 } else { 2 }, 5),
        }
    }

    fn networks(&mut self, models: usize, inputs: usize, count: usize) {
        let each = inputs * 64 + 64 + 64 * 128 + 128 + 128 + 1;
        let parameters = uniform(&mut self.numbers, models * each, 0.3);
        let rows = uniform(&mut self.numbers, models * count * inputs, 1.0);
        let adjoint = uniform(&mut self.numbers, models * count, 1.0);
        let batch = NetworkBatch { models, inputs, parameters: &parameters, rows: &rows };
        let values = self.gpu.network_values(&batch).unwrap();
        let gradient = self.gpu.network_gradient(&batch, &adjoint, true).unwrap();
        let (mut expected, mut to_rows) = (Vec::new(), Vec::new());
        let mut to_parameters = vec![0.0; models * each];
        for (place, (row, adjoint)) in rows.chunks_exact(inputs).zip(&adjoint).enumerate() {
            let model = place / count;
            let network = Network { inputs, parameters: &parameters[model * each..(model + 1) * each] };
            expected.push(network.layers(row).2);
            to_rows.extend(network.backward(row, *adjoint, &mut to_parameters[model * each..(model + 1) * each]));
        }
        near("values of networks", &values, &expected);
        near("a gradient of networks", &gradient.parameters, &to_parameters);
        near("a gradient of rows", &gradient.inputs, &to_rows);
        let alone = NetworkBatch { models: 1, inputs, parameters: &parameters[..each], rows: &rows[..count * inputs] };
        let alone = self.gpu.network_gradient(&alone, &adjoint[..count], false).unwrap();
        assert!(alone.inputs.is_empty() && alone.parameters[..] == gradient.parameters[..each], "a batch changes bits");
    }

    fn paths(&mut self, models: usize, wavelengths: usize) {
        let (nodes, intervals) = (3, 2);
        let (rule, places, each) = (nodes * intervals, nodes * intervals + intervals + 1, 8_641);
        let pairs = [(0, 1), (2, 0), (1, 2), (1, 0)];
        let parameters = uniform(&mut self.numbers, models * each, 0.4);
        let points = uniform(&mut self.numbers, models * places, 1.0);
        let weights: Vec<f64> = uniform(&mut self.numbers, models * rule, 0.2).iter().map(|w| w + 0.3).collect();
        let row = |place: usize| (0..wavelengths).flat_map(move |w| [place, w]).collect::<Vec<_>>();
        let rows: Vec<f64> = (0..models * places)
            .flat_map(|place| {
                row(place).chunks_exact(2).flat_map(|it| [points[it[0]], it[1] as f64 / 7.0 - 0.3]).collect::<Vec<_>>()
            })
            .collect();
        let metrics = NetworkBatch { models, inputs: 2, parameters: &parameters, rows: &rows };
        let batch =
            PathBatch { metrics, points: &points, weights: &weights, pairs: &pairs, wavelengths, nodes, intervals };
        let total = models * pairs.len() * wavelengths;
        let [length, mean, velocity] = [0, 1, 2].map(|_| uniform(&mut self.numbers, total, 1.0));
        let found = self.gpu.path_features(&batch).unwrap();
        let adjoint = PathAdjoint { length: &length, mean: &mean, velocity: &velocity };
        let gradient = self.gpu.path_gradient(&batch, &found, &adjoint).unwrap();

        let mut expected = [const { Vec::new() }; 4];
        let mut to_parameters = vec![0.0; models * each];
        for entry in 0..total {
            let (model, pair, w) =
                (entry / wavelengths / pairs.len(), entry / wavelengths % pairs.len(), entry % wavelengths);
            let network = Network { inputs: 2, parameters: &parameters[model * each..(model + 1) * each] };
            let row = |place: usize| &rows[((model * places + place) * wavelengths + w) * 2..][..2];
            let z = |place: usize| network.layers(row(place)).2;
            let root = |place: usize| ((1.0 + z(place).exp()).ln() + 0.1).sqrt();
            let (source, target) = (pairs[pair].0 as usize, pairs[pair].1 as usize);
            let (low, high) = (source.min(target), source.max(target));
            let own: Vec<usize> = (low * nodes..high * nodes).collect();
            let part = |place: usize| weights[model * rule + place] * root(place);
            let c = |place: usize| points[model * places + place];
            let total_length: f64 = own.iter().map(|&place| part(place)).sum();
            let average = own.iter().map(|&place| part(place) * c(place)).sum::<f64>() / total_length;
            let path = own.iter().copied().chain(rule + low..=rule + high);
            let lowest = path.reduce(|best, place| if root(place) < root(best) { place } else { best }).unwrap();
            let sign = if source < target { 1.0 } else { -1.0 };
            let values =
                [sign * total_length, average, total_length / root(lowest), sign * total_length / root(rule + source)];
            expected.iter_mut().zip(values).for_each(|(column, value)| column.push(value));
            // d sqrt(g) / dz
            let slope = |place: usize| 0.5 / root(place) / (1.0 + (-z(place)).exp());
            let gradient = &mut to_parameters[model * each..(model + 1) * each];
            for &place in &own {
                let by_length = length[entry] + velocity[entry] / root(lowest);
                let by_root = by_length + mean[entry] * (c(place) - average) / total_length;
                network.backward(row(place), weights[model * rule + place] * by_root * slope(place), gradient);
            }
            let by_lowest = -velocity[entry] * total_length / root(lowest).powi(2);
            network.backward(row(lowest), by_lowest * slope(lowest), gradient);
        }
        let columns = [&found.displacement, &found.mean, &found.velocity, &found.initial_velocity];
        columns.iter().zip(&expected).for_each(|(found, expected)| near("path features", found, expected));
        near("a gradient of path features", &gradient, &to_parameters);
    }
}

fn uniform(numbers: &mut RandomNumbers, count: usize, magnitude: f64) -> Vec<f64> {
    (0..count).map(|_| (numbers.below(2_000_001) as f64 / 1e6 - 1.0) * magnitude).collect()
}

fn near(what: &str, found: &[f64], expected: &[f64]) {
    assert_eq!(found.len(), expected.len(), "{what}");
    let largest = expected.iter().fold(0.0_f64, |largest, value| largest.max(value.abs()));
    let error = found.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
    assert!(error <= TOLERANCE * largest && largest > 1e-3, "{what} differ: {error:e} of {largest:e}");
}
