//! Networks and path features of the geodesic model, for a batch of models.
//!
//! `engram-geodesic` defines what is computed. All sums are in f64 and in a fixed order: a model has the same bits whatever else is in its
//! batch. The CPU adds in another order, so results of both agree to rounding.

use super::algebra::size;
use super::driver::{Argument, Driver, THREADS};
use super::{Gpu, Memory};
use crate::Error;

/// Units of the first hidden layer.
const FIRST: usize = 64;
/// Units of the second hidden layer.
const SECOND: usize = 128;
/// Most inputs of a network.
pub const MAX_INPUTS: usize = 5;
/// Rows that a block evaluates at a time.
const ROWS: usize = 16;
/// Most partial gradients per model: enough blocks for a GPU with few models, without much memory.
const MAX_GROUPS: usize = 32;

/// Networks `inputs -> 64 tanh -> 128 tanh -> 1`, and as many rows of inputs for each.
#[derive(Debug, Clone, Copy)]
pub struct NetworkBatch<'a> {
    /// Number of models, at least 1.
    pub models: usize,
    /// Inputs of a network, 1 to [`MAX_INPUTS`].
    pub inputs: usize,
    /// [model, parameter]: W1 [inputs, 64], b1, W2 [64, 128], b2, W3 [128], b3.
    pub parameters: &'a [f64],
    /// [model, row, input].
    pub rows: &'a [f64],
}

/// Gradients of a [`NetworkBatch`].
#[derive(Debug, Clone, PartialEq)]
pub struct NetworkGradient {
    /// [model, parameter].
    pub parameters: Vec<f64>,
    /// [model, row, input]; empty if it was not asked for.
    pub inputs: Vec<f64>,
}

/// Metrics and lattices of models of one shape.
#[derive(Debug, Clone, Copy)]
pub struct PathBatch<'a> {
    /// Networks of the metrics, with 2 inputs. Rows are (c, l) of [model, place, wavelength]: the nodes of all intervals between break
    /// points, then the break points.
    pub metrics: NetworkBatch<'a>,
    /// c of [model, place].
    pub points: &'a [f64],
    /// Weight of each node in c, [model, node].
    pub weights: &'a [f64],
    /// Source and target of each path: different numbers of break points.
    pub pairs: &'a [(u32, u32)],
    /// Number of wavelengths.
    pub wavelengths: usize,
    /// Nodes per interval.
    pub nodes: usize,
    /// Number of intervals.
    pub intervals: usize,
}

/// Features of paths, each [model, pair, wavelength], and what their gradient needs.
#[derive(Debug, Clone, PartialEq)]
pub struct PathFeatures {
    /// Signed length.
    pub displacement: Vec<f64>,
    /// Mean of c over time.
    pub mean: Vec<f64>,
    /// Largest velocity.
    pub velocity: Vec<f64>,
    /// Velocity at the start, signed.
    pub initial_velocity: Vec<f64>,
    lowest: Vec<u32>,
    /// Derivative of sqrt(g) by the network's output, [model, place, wavelength].
    slopes: Vec<f64>,
}

/// Gradients with respect to features, each [model, pair, wavelength].
#[derive(Debug, Clone, Copy)]
pub struct PathAdjoint<'a> {
    /// With respect to the length, without sign.
    pub length: &'a [f64],
    /// With respect to the mean of c.
    pub mean: &'a [f64],
    /// With respect to the largest velocity.
    pub velocity: &'a [f64],
}

/// A device that computes the geodesic model. Errors are [`Error::Full`] and [`Error::Failed`].
pub trait GeodesicKernels: Send {
    /// Returns the outputs of the networks, [model, row].
    ///
    /// # Errors
    /// Those of the device.
    fn network_values(&mut self, batch: &NetworkBatch<'_>) -> Result<Vec<f64>, Error>;

    /// Returns the gradient of the sum of `adjoint` [model, row] times output, with respect to the rows too if `inputs` is true.
    ///
    /// # Errors
    /// Those of the device.
    fn network_gradient(
        &mut self,
        batch: &NetworkBatch<'_>,
        adjoint: &[f64],
        inputs: bool,
    ) -> Result<NetworkGradient, Error>;

    /// Returns the features of all paths.
    ///
    /// # Errors
    /// Those of the device.
    fn path_features(&mut self, batch: &PathBatch<'_>) -> Result<PathFeatures, Error>;

    /// Returns the gradient with respect to the parameters of the metrics, [model, parameter].
    ///
    /// # Errors
    /// Those of the device.
    fn path_gradient(
        &mut self,
        batch: &PathBatch<'_>,
        features: &PathFeatures,
        adjoint: &PathAdjoint<'_>,
    ) -> Result<Vec<f64>, Error>;
}

impl NetworkBatch<'_> {
    const fn parameter_count(&self) -> usize {
        self.inputs * FIRST + FIRST + FIRST * SECOND + SECOND + SECOND + 1
    }

    /// Returns the rows of a model.
    fn count(&self) -> usize {
        assert!(self.models > 0 && (1..=MAX_INPUTS).contains(&self.inputs), "{} models", self.models);
        assert_eq!(self.parameters.len(), self.models * self.parameter_count(), "parameters of {} models", self.models);
        assert!(self.rows.len().is_multiple_of(self.models * self.inputs), "whole rows for each model");
        self.rows.len() / self.models / self.inputs
    }
}

impl PathBatch<'_> {
    const fn places(&self) -> usize {
        self.nodes * self.intervals + self.intervals + 1
    }

    /// Returns the number of features.
    fn total(&self) -> usize {
        self.metrics.models * self.pairs.len() * self.wavelengths
    }

    fn check(&self) {
        let models = self.metrics.models;
        assert_eq!(self.metrics.inputs, 2, "a metric has the inputs c and l");
        assert_eq!(self.metrics.count(), self.places() * self.wavelengths, "a row per place and wavelength");
        assert_eq!(self.points.len(), models * self.places(), "a point per place");
        assert_eq!(self.weights.len(), models * self.nodes * self.intervals, "a weight per node");
        let fits = |&(source, target): &(u32, u32)| source != target && source.max(target) as usize <= self.intervals;
        assert!(self.pairs.iter().all(fits), "pairs of different break points");
    }
}

/// Buffers of the lattices of a batch.
struct LatticeBuffers<B> {
    points: B,
    weights: B,
    pairs: B,
}

impl<B> LatticeBuffers<B> {
    fn upload<D: Driver<Buffer = B>>(memory: &mut Memory<D>, batch: &PathBatch<'_>) -> Result<Self, Error> {
        let pairs: Vec<u32> = batch.pairs.iter().flat_map(|&(source, target)| [source, target]).collect();
        Ok(Self {
            points: memory.uploaded(batch.points)?,
            weights: memory.uploaded(batch.weights)?,
            pairs: memory.uploaded(&pairs)?,
        })
    }

    /// Returns the kernel arguments: points, weights, pairs and all sizes.
    fn arguments(&self, batch: &PathBatch<'_>) -> [Argument<'_, B>; 8] {
        [
            Argument::Buffer(&self.points),
            Argument::Buffer(&self.weights),
            Argument::Buffer(&self.pairs),
            size(batch.pairs.len()),
            size(batch.wavelengths),
            size(batch.nodes),
            size(batch.intervals),
            size(batch.total()),
        ]
    }
}

impl<D: Driver> Memory<D> {
    /// Launches [`network_values`](GeodesicKernels::network_values) and returns the outputs on the device.
    fn outputs(&mut self, batch: &NetworkBatch<'_>) -> Result<D::Buffer, Error> {
        let count = batch.count();
        let (parameters, rows) = (self.uploaded(batch.parameters)?, self.uploaded(batch.rows)?);
        let out = self.undefined::<f64>(batch.models * count)?;
        let arguments = [
            Argument::Buffer(&parameters),
            size(batch.inputs),
            Argument::Buffer(&rows),
            size(count),
            Argument::Buffer(&out),
        ];
        self.launch("network_values", batch.models * count.div_ceil(ROWS), 1, &arguments)?;
        Ok(out)
    }

    /// Returns the gradient for adjoints on the device.
    fn gradient(
        &mut self,
        batch: &NetworkBatch<'_>,
        adjoint: &D::Buffer,
        inputs: bool,
    ) -> Result<NetworkGradient, Error> {
        let (count, each) = (batch.count(), batch.parameter_count());
        let groups = count.div_ceil(ROWS).clamp(1, MAX_GROUPS);
        let (parameters, rows) = (self.uploaded(batch.parameters)?, self.uploaded(batch.rows)?);
        let partial = self.undefined::<f64>(batch.models * groups * each)?;
        let sums = self.undefined::<f64>(batch.models * each)?;
        let to_inputs = if inputs { Some(self.undefined::<f64>(batch.rows.len())?) } else { None };
        let arguments = [
            Argument::Buffer(&parameters),
            size(batch.inputs),
            Argument::Buffer(&rows),
            Argument::Buffer(adjoint),
            size(count),
            size(groups),
            Argument::Buffer(&partial),
            to_inputs.as_ref().map_or(Argument::Null, Argument::Buffer),
        ];
        self.launch("network_gradient", batch.models * groups, 1, &arguments)?;
        let total = batch.models * each;
        let arguments = [Argument::Buffer(&partial), size(groups), size(each), size(total), Argument::Buffer(&sums)];
        self.launch("sum_gradients", total, THREADS, &arguments)?;
        let inputs = match &to_inputs {
            Some(to_inputs) => self.downloaded(to_inputs, batch.rows.len())?,
            None => Vec::new(),
        };
        Ok(NetworkGradient { parameters: self.downloaded(&sums, total)?, inputs })
    }
}

impl<D: Driver> GeodesicKernels for Gpu<D> {
    fn network_values(&mut self, batch: &NetworkBatch<'_>) -> Result<Vec<f64>, Error> {
        let out = self.memory.outputs(batch)?;
        self.memory.downloaded(&out, batch.models * batch.count())
    }

    fn network_gradient(
        &mut self,
        batch: &NetworkBatch<'_>,
        adjoint: &[f64],
        inputs: bool,
    ) -> Result<NetworkGradient, Error> {
        assert_eq!(adjoint.len(), batch.models * batch.count(), "an adjoint per row");
        let adjoint = self.memory.uploaded(adjoint)?;
        self.memory.gradient(batch, &adjoint, inputs)
    }

    fn path_features(&mut self, batch: &PathBatch<'_>) -> Result<PathFeatures, Error> {
        batch.check();
        let (memory, total) = (&mut self.memory, batch.total());
        let values = batch.metrics.models * batch.metrics.count();
        let lattice = LatticeBuffers::upload(memory, batch)?;
        let outputs = memory.outputs(&batch.metrics)?;
        let (roots, slopes) = (memory.undefined::<f64>(values)?, memory.undefined::<f64>(values)?);
        let arguments = [Argument::Buffer(&outputs), size(values), Argument::Buffer(&roots), Argument::Buffer(&slopes)];
        memory.launch("metric_roots", values, THREADS, &arguments)?;
        let (features, lowest) = (memory.undefined::<f64>(4 * total)?, memory.undefined::<u32>(total)?);
        let [points, weights, pairs, pair_count, wavelengths, nodes, intervals, all] = lattice.arguments(batch);
        let (root, out, place) = (Argument::Buffer(&roots), Argument::Buffer(&features), Argument::Buffer(&lowest));
        let arguments = [root, points, weights, pairs, pair_count, wavelengths, nodes, intervals, all, out, place];
        memory.launch("path_features", total, THREADS, &arguments)?;
        let mut columns = memory.downloaded::<f64>(&features, 4 * total)?;
        let initial_velocity = columns.split_off(3 * total);
        let velocity = columns.split_off(2 * total);
        let mean = columns.split_off(total);
        let (lowest, slopes) = (memory.downloaded(&lowest, total)?, memory.downloaded(&slopes, values)?);
        Ok(PathFeatures { displacement: columns, mean, velocity, initial_velocity, lowest, slopes })
    }

    fn path_gradient(
        &mut self,
        batch: &PathBatch<'_>,
        features: &PathFeatures,
        adjoint: &PathAdjoint<'_>,
    ) -> Result<Vec<f64>, Error> {
        batch.check();
        let (memory, total) = (&mut self.memory, batch.total());
        let values = batch.metrics.models * batch.metrics.count();
        assert_eq!((features.lowest.len(), features.slopes.len()), (total, values), "features of this batch");
        for part in [adjoint.length, adjoint.mean, adjoint.velocity] {
            assert_eq!(part.len(), total, "an adjoint per feature");
        }
        let lattice = LatticeBuffers::upload(memory, batch)?;
        let known = [&features.displacement[..], &features.mean, &features.velocity].concat();
        let (known, slopes) = (memory.uploaded(&known)?, memory.uploaded(&features.slopes)?);
        let lowest = memory.uploaded(&features.lowest)?;
        let adjoint = memory.uploaded(&[adjoint.length, adjoint.mean, adjoint.velocity].concat())?;
        let out = memory.undefined::<f64>(values)?;
        let [points, weights, pairs, pair_count, wavelengths, nodes, intervals, all] = lattice.arguments(batch);
        let arguments = [
            Argument::Buffer(&slopes),
            points,
            weights,
            pairs,
            pair_count,
            wavelengths,
            nodes,
            intervals,
            all,
            Argument::Buffer(&known),
            Argument::Buffer(&lowest),
            Argument::Buffer(&adjoint),
            size(values),
            Argument::Buffer(&out),
        ];
        memory.launch("path_adjoint", values, THREADS, &arguments)?;
        memory.gradient(&batch.metrics, &out, false).map(|gradient| gradient.parameters)
    }
}
