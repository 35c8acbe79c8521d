//! Data-parallel training as pure logic.
//!
//! Decides what a training step computes and when its result is applied ([`Trainer`]), what a checkpoint holds
//! ([`Checkpoint`]), how large each member's batch is ([`balance`]), and how efficiency is measured ([`efficiency`]).
//! It does no I/O and reads no clock: sums travel through the trait [`Reduce`], times are arguments, checkpoints are
//! bytes.
//!
//! Invariants:
//! - Members reduce sums of per-sample gradients and counts. The division happens once, after the reduction.
//! - Nothing that a step changes is changed before [`Trainer::commit`]; until then the local sums can be reduced again
//!   with other members.
//! - Whether a step is applied or skipped follows from the reduced gradient alone, so all members decide alike, and
//!   parameters and optimizer state keep the same bits on every member ([`Trainer::digest`]).
#![forbid(unsafe_code)]

mod automatic;
mod average;
pub mod balance;
pub mod baseline;
pub mod boosted;
mod buckets;
pub mod buffer;
mod check_parallelism;
mod check_sums;
mod checkpoint;
mod compression;
pub mod dataset;
mod devices;
pub mod efficiency;
pub mod ensemble;
mod ensemble_checkpoint;
mod in_process;
pub mod job;
mod models;
mod one_bit;
mod prediction;
mod private;
mod reduce;
mod rows;
pub mod sharing;
mod specification;
mod stages;
pub mod table;
mod throughput;
mod trainer;

pub use automatic::{AutomaticCompression, CompressionLevel, CompressionSwitch, StepTimes};
pub use checkpoint::{Checkpoint, CheckpointError, FileEntry, Manifest, TensorEntry};
pub use compression::{GradientCompression, GradientEncoding};
pub use ensemble::{Ensemble, EnsembleStep};
pub use ensemble_checkpoint::MemberEntry;
pub use in_process::{InProcess, InProcessError};
pub use prediction::{Prediction, evaluate_all, predict_all};
pub use private::{NoiseSecret, PrivacyCharge, PrivacySpec, PrivateGradient};
pub use reduce::{Alone, CompressedSum, LocalGradient, LowRankSum, Reduce, Round, SumError};
pub use stages::StagePlace;
pub use throughput::{TimeModel, TimeObserver};
pub use trainer::{
    Counters, LocalStep, Normalization, StepOutcome, StepReport, SummationOrder, TrainError, Trainer, TrainerError,
    TrainerSpec,
};
