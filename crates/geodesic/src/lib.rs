//! The geodesic spectral model: predicts an absorbance spectrum at one concentration from spectra at others by
//! following geodesics of a learned one-dimensional metric.
//!
//! Decides what a geodesic and its features are, how a (metric, decoder) pair is trained and validated, and what a
//! report says. It reads no clock and starts no threads: random numbers are functions of (seed, stream, index), and data
//! come and go as text or bytes. It does no I/O, except that a [`GridCache`] reads and writes the files of its folder.
//!
//! Invariants:
//! - A metric is at least 0.1, so every boundary value problem of one dimension has exactly one solution.
//! - Gradients are exact: reverse mode on sums, implicit differentiation for positions. Nothing is detached.
//! - A leave-one-out task is a pure function of the training spectra and its settings. The held-out spectrum enters
//!   only the scores.
//! - A solution of an iterative engine carries its residual; a cached value carries the version of its metric.

mod band;
mod baseline;
mod cache;
mod closed;
mod engine;
mod error;
mod figure;
mod flow;
mod fold;
mod generate;
mod grid;
mod grid_cache;
mod grid_file;
mod integrate;
mod inverse;
mod latent;
mod manifold;
mod measure;
mod metric;
mod mixed;
mod model;
mod network;
mod paths;
mod quadrature;
mod random;
mod report;
mod settings;
mod shooting;
mod spectra;
mod train;
mod trajectory;
mod vector;

pub use band::{BAND_PROBABILITY, Band, CalibrationResult, CalibrationTask, MIN_CALIBRATED_FOLDS, calibration_tasks};
pub use baseline::{Baseline, GP_LENGTHS, gp_length, gp_prediction};
pub use cache::{CachedSolution, SolutionCache};
pub use closed::{FeatureAdjoint, FeaturePass, Features, Lattice};
pub use engine::{Agreement, Closed1D, GeodesicBvp, GridEngine, ShootingEngine, Solution, agreement};
pub use error::Error;
pub use figure::{LossPoint, MetricFigure};
pub use fold::{LeakingResult, Task, TaskResult, leaking_trainer, tasks};
pub use generate::{Generator, Noise};
pub use grid::{ChristoffelGrid, GridAccuracy, GridColumns, GridSource, Interpolation};
pub use grid_cache::GridCache;
pub use grid_file::{GridFile, ReadAt};
pub use inverse::{ErrorProfile, Inversion, invert};
pub use latent::{LATENT_WIDTHS, LatentMetric, LatentModel, LatentPath};
pub use manifold::{Line, Manifold, Surface, TensorJet};
pub use measure::{Scores, noise_level, peak, r2, rmse};
pub use metric::{FLOOR, LinearRootMetric, Metric, MetricJet, MetricNetwork};
pub use mixed::MixedPrecision;
pub use model::{DECODER_INPUTS, Loss, Model};
pub use network::{HIDDEN_1, HIDDEN_2, Network};
pub use paths::PathTable;
pub use quadrature::gauss_legendre;
pub use report::{BaselineScores, FoldReport, Report};
pub use settings::{Decoder, Engine, Settings};
pub use shooting::{BatchedShooting, Shot};
pub use spectra::{REFERENCE_PPB, Sample, Spectra, reference_nm};
pub use train::{Axes, Prediction, StepError, Trainer, advance_all};
pub use trajectory::{Problem, Trajectory, trajectory, trajectory_gradient};
