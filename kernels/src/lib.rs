//! Compute devices that execute passes over millions of memories.
//!
//! A [`Device`] holds the columns that passes read (potential, group) for many partitions in one arena of [`TILE`]-slot tiles per column, and
//! executes a pass over all of them in one call. It makes no decisions: the caller maps tiles to segments and slots to ids, and decides when a
//! clock folds.
//!
//! Invariant: every implementation returns identical bits. There are three: [`Cpu`]; [`Gpu`] over a [`gpu::Driver`], whose kernels are the
//! `.cu` files in `cuda/`; and [`MirroredDevice`], a CPU that offloads large passes to any number of GPUs.

mod arena;
mod cpu;
mod device;
pub mod gpu;
mod instructions;
mod mirror;
pub mod partitioner;
mod pool;
pub mod priority;
pub mod profiler;
pub mod recall;
mod requests;
pub mod threshold;
mod tiles;

pub use arena::{Segment, SegmentId, Slot, Tile, TileId};
pub use cpu::Cpu;
pub use device::{Device, Error, Info};
pub use gpu::Gpu;
pub use instructions::Instructions;
pub use mirror::{AvailableDevice, DeviceStatus, LogicalDevice, Mirror, MirrorStatus, MirroredDevice};
pub use requests::{DigestRequest, GroupUpdate, Order, RankRequest, Scope, Update};
pub use tiles::{TILE, Tiles};
