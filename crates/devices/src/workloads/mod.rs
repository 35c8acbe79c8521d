//! Workloads that run on the patterns of this crate.

mod fisher;
mod grids;
mod multivector;
mod product;
mod quality;

pub use fisher::fisher_matrix;
pub use grids::{HeatEquation, LifeAutomaton};
pub use multivector::Algebra;
pub use product::{max_plus_product, max_plus_product_rows};
pub use quality::{QualityBatch, advance_quality, quality_pipeline};

use crate::{ComputeDevice, Distribution, Error, Work};
use engram_kernels::partitioner::{Resource, Strategy};
use std::time::Duration;

/// How work is divided and how long it may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Division {
    /// Strategy of the partitioner.
    pub strategy: Strategy,
    /// Items that a device computes at a time, at least 1.
    pub block: usize,
    /// Time limit.
    pub limit: Duration,
}

impl Division {
    fn distribute(
        &self,
        devices: &[ComputeDevice],
        kernel: &'static str,
        items: usize,
        bytes_per_item: u64,
    ) -> Result<Distribution, Error> {
        let resources: Vec<Resource> = devices.iter().map(ComputeDevice::resource).collect();
        let work = Work { kernel, items, block: self.block, bytes_per_item };
        Distribution::new(work, self.strategy, &resources)
    }
}
