//! Patterns that distribute stateless computations over devices, and the workloads that use them.
//!
//! | pattern | what is split | workload |
//! | --- | --- | --- |
//! | [batch](run_blocks) | items, in blocks | Fisher matrices, geometric products of multivectors |
//! | [rows](run_rows) | rows of a result | max-plus products |
//! | [halo exchange](run_grid) | a grid, in regions of rows | a cellular automaton, a heat equation |
//! | [pipeline](run_pipeline) | stages, with bounded queues | tropical layer, softmax, quality |
//!
//! The last two also run over the [members of a group](members), each with devices of its own.
//!
//! This crate decides which device computes what, and runs it on a thread per device. It does no other I/O than messages over the transport of a
//! group. The split follows from measured speeds by the [partitioner](engram_kernels::partitioner) of the workers.
//!
//! Invariants:
//! - **Same bits.** A result is a function of its inputs: neither the number of devices, their speeds, nor a device that is removed in the
//!   middle changes a bit. A kernel must be a pure function of its range.
//! - **No work is lost or counted twice.** The work of a removed device is assigned to the others; only a complete execution counts.
//! - **Every wait has a deadline, every queue a bound.** The first error ends the run on all devices. A kernel is never interrupted: a
//!   deadline that passes meanwhile takes effect when the kernel returns.

mod accelerator;
mod barrier;
mod blocks;
mod device;
mod distribution;
mod error;
mod grid;
pub mod members;
mod pipeline;
mod speed;
pub mod workloads;

pub use accelerator::Accelerator;
pub use barrier::{Barrier, BarrierError, Event};
pub use blocks::{BlockResults, Load, run_blocks, run_blocks_on, run_rows};
pub use device::{ComputeDevice, DeviceUsage, Health};
pub use distribution::{Distribution, Next, Work, shares};
pub use error::Error;
pub use grid::{Grid, GridRun, Rule, run_grid};
pub use pipeline::{PipelineRun, Stage, run_pipeline, stages_of_devices};
pub use speed::SpeedModel;
