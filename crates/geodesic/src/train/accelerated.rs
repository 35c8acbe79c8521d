//! Steps of several trainers at once on a GPU.
//!
//! The networks, the features and their gradients of all models are computed by one launch per kernel. Regularisers, which need second
//! derivatives at few points, flows and the optimizer stay on the CPU. A trainer makes the same steps, bit for bit, whatever other trainers
//! are in its batch; they differ from the steps on the CPU by rounding.

use super::{StepInput, Trainer};
use crate::closed::{Features, Lattice};
use crate::error::Error;
use crate::metric::MetricNetwork;
use crate::model::{DECODER_INPUTS, Loss, Model, SlopeErrors};
use crate::network::Network;
use engram_kernels::gpu::{GeodesicKernels, NetworkBatch, PathAdjoint, PathBatch, PathFeatures};

/// Inputs of a metric.
const METRIC_INPUTS: usize = 2;

/// Loss, gradient of the metric, gradient of the decoder.
type Gradient = (Loss, Vec<f64>, Vec<f64>);

/// Error of [`advance_all`].
#[derive(Debug, thiserror::Error)]
pub enum StepError {
    /// The loss of a model is not finite.
    #[error(transparent)]
    Model(#[from] Error),
    /// The GPU failed. No trainer has made the step.
    #[error("failed to compute a step on the GPU: {0}")]
    Device(#[from] engram_kernels::Error),
}

/// Makes a step with every trainer that has not finished. Trainers with a flow decoder compute it on the CPU.
///
/// # Errors
/// [`StepError::Device`] if no trainer has made the step; [`StepError::Model`] if the loss of one is not finite.
pub fn advance_all(trainers: &mut [&mut Trainer], gpu: &mut dyn GeodesicKernels) -> Result<(), StepError> {
    let active: Vec<usize> = (0..trainers.len()).filter(|&at| !trainers[at].finished()).collect();
    let (flows, slopes): (Vec<usize>, Vec<usize>) = active.iter().partition(|&&at| trainers[at].model.is_flow());
    let mut inputs = Vec::new();
    for at in slopes {
        inputs.push((at, trainers[at].step_input()?));
    }
    let mut gradients = Vec::new();
    for group in same_shapes(&inputs) {
        let models: Vec<_> = group.iter().map(|(at, input)| (&*trainers[*at], input)).collect();
        let computed = step_gradients(&models, gpu)?;
        gradients.extend(group.iter().map(|(at, _)| *at).zip(computed));
    }
    for (at, gradient) in gradients {
        trainers[at].apply(&gradient)?;
        trainers[at].evaluate_on(gpu)?;
    }
    for at in flows {
        trainers[at].advance()?;
    }
    Ok(())
}

/// Groups the inputs whose lattices have equal shapes.
fn same_shapes(inputs: &[(usize, StepInput)]) -> Vec<Vec<&(usize, StepInput)>> {
    let shape = |(_, input): &(usize, StepInput)| {
        (input.lattice.wavelengths().len(), input.lattice.breaks().len(), input.lattice.nodes())
    };
    let mut groups: Vec<Vec<&(usize, StepInput)>> = Vec::new();
    for input in inputs {
        match groups.iter_mut().find(|group| shape(group[0]) == shape(input)) {
            Some(group) => group.push(input),
            None => groups.push(vec![input]),
        }
    }
    groups
}

impl Trainer {
    /// Evaluates the validation split if that is due, on the CPU if the GPU fails.
    fn evaluate_on(&mut self, gpu: &mut dyn GeodesicKernels) -> Result<(), Error> {
        if self.evaluation_due() {
            let (lattice, pairs, targets) = self.validation()?;
            let computed = differences(&self.model, &lattice, &pairs, gpu);
            let predicted = computed.unwrap_or_else(|_| self.model.differences(&lattice, &pairs));
            self.evaluate(&predicted, &targets);
        }
        Ok(())
    }
}

/// Metrics and lattices of a batch, in the order of the kernels.
struct Paths {
    parameters: Vec<f64>,
    rows: Vec<f64>,
    points: Vec<f64>,
    weights: Vec<f64>,
    pairs: Vec<(u32, u32)>,
    /// Number of models, wavelengths, nodes per interval and intervals.
    shape: [usize; 4],
}

impl Paths {
    /// Lattices of one shape.
    fn new(models: &[(&MetricNetwork, &Lattice)], pairs: &[(usize, usize)]) -> Self {
        let first = models[0].1;
        let shape = [models.len(), first.wavelengths().len(), first.nodes(), first.breaks().len() - 1];
        let pairs = pairs.iter().map(|&(source, target)| (source as u32, target as u32)).collect();
        let (mut points, mut weights) = (Vec::new(), Vec::new());
        let mut own =
            Self { parameters: Vec::new(), rows: Vec::new(), points: Vec::new(), weights: Vec::new(), pairs, shape };
        for (metric, lattice) in models {
            own.parameters.extend_from_slice(metric.network().parameters());
            let row = |&c: &f64| lattice.wavelengths().iter().flat_map(move |&l| [c, l]);
            own.rows.extend(lattice.points().iter().flat_map(row));
            points.extend_from_slice(lattice.points());
            weights.extend_from_slice(lattice.weights());
        }
        (own.points, own.weights) = (points, weights);
        own
    }

    fn batch(&self) -> PathBatch<'_> {
        let [models, wavelengths, nodes, intervals] = self.shape;
        PathBatch {
            metrics: NetworkBatch { models, inputs: METRIC_INPUTS, parameters: &self.parameters, rows: &self.rows },
            points: &self.points,
            weights: &self.weights,
            pairs: &self.pairs,
            wavelengths,
            nodes,
            intervals,
        }
    }
}

/// The features of model number `model` of a batch of `models`.
fn features_of(all: &PathFeatures, model: usize, models: usize) -> Features {
    let own = |values: &[f64]| {
        let each = values.len() / models;
        values[model * each..(model + 1) * each].to_vec()
    };
    Features {
        displacement: own(&all.displacement),
        mean: own(&all.mean),
        velocity: own(&all.velocity),
        initial_velocity: own(&all.initial_velocity),
    }
}

/// Standardised differences of a model without a flow, as [`Model::differences`].
fn differences(
    model: &Model,
    lattice: &Lattice,
    pairs: &[(usize, usize)],
    gpu: &mut dyn GeodesicKernels,
) -> Result<Vec<f64>, engram_kernels::Error> {
    let paths = Paths::new(&[(&model.metric, lattice)], pairs);
    let features = features_of(&gpu.path_features(&paths.batch())?, 0, 1);
    let rows = Model::decoder_inputs(lattice, pairs, &features);
    let parameters = model.decoder.parameters();
    let mut out = gpu.network_values(&NetworkBatch { models: 1, inputs: DECODER_INPUTS, parameters, rows: &rows })?;
    out.iter_mut().zip(&features.displacement).for_each(|(slope, k)| *slope *= k);
    Ok(out)
}

/// The gradients of a step of models whose lattices have one shape, as [`Model::gradient`].
fn step_gradients(
    models: &[(&Trainer, &StepInput)],
    gpu: &mut dyn GeodesicKernels,
) -> Result<Vec<Gradient>, engram_kernels::Error> {
    let count = models.len();
    let lattices: Vec<_> = models.iter().map(|(it, input)| (&it.model.metric, &input.lattice)).collect();
    // All pairs of lattices with as many break points.
    let pairs = &models[0].1.pairs;
    let paths = Paths::new(&lattices, pairs);
    let all = gpu.path_features(&paths.batch())?;
    let features: Vec<Features> = (0..count).map(|model| features_of(&all, model, count)).collect();
    let mut rows = Vec::new();
    for ((_, lattice), features) in lattices.iter().zip(&features) {
        rows.extend(Model::decoder_inputs(lattice, pairs, features));
    }
    let parameters: Vec<f64> = models.iter().flat_map(|(it, _)| it.model.decoder.parameters()).copied().collect();
    let decoders = NetworkBatch { models: count, inputs: DECODER_INPUTS, parameters: &parameters, rows: &rows };
    let slopes = gpu.network_values(&decoders)?;
    let each = slopes.len() / count;
    let mut losses = vec![Loss::default(); count];
    let errors: Vec<SlopeErrors> = (0..count)
        .map(|at| {
            let slope = &slopes[at * each..(at + 1) * each];
            SlopeErrors::new(&features[at].displacement, slope, &models[at].1.targets, &mut losses[at])
        })
        .collect();
    let to_slope: Vec<f64> = errors.iter().flat_map(|errors| &errors.to_slope).copied().collect();
    let to_decoders = gpu.network_gradient(&decoders, &to_slope, true)?;
    let (mut length, mut mean, mut velocity) = (Vec::new(), Vec::new(), Vec::new());
    let inputs = to_decoders.inputs.chunks_exact(each * DECODER_INPUTS);
    for ((errors, to_inputs), ((trainer, _), features)) in errors.iter().zip(inputs).zip(models.iter().zip(&features)) {
        let adjoint = errors.adjoint(&features.displacement, to_inputs, &trainer.settings);
        length.extend(adjoint.length);
        mean.extend(adjoint.mean);
        velocity.extend(adjoint.velocity);
    }
    let adjoint = PathAdjoint { length: &length, mean: &mean, velocity: &velocity };
    let to_metrics = gpu.path_gradient(&paths.batch(), &all, &adjoint)?;
    let metrics = to_metrics.chunks_exact(Network::parameter_count(METRIC_INPUTS));
    let decoders = to_decoders.parameters.chunks_exact(Network::parameter_count(DECODER_INPUTS));
    let parts = losses.into_iter().zip(metrics.zip(decoders));
    Ok(models
        .iter()
        .zip(parts)
        .map(|((trainer, input), (errors, (metric, decoder)))| {
            let mut to_metric = metric.to_vec();
            let regularisers = trainer.model.regularisers(&trainer.settings, input.draws, &mut to_metric);
            let loss = Loss { reconstruction: errors.reconstruction, length: errors.length, ..regularisers };
            (loss, to_metric, decoder.to_vec())
        })
        .collect())
}
