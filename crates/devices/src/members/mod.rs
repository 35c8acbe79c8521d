//! Patterns over the members of a group: workers that exchange tagged messages, each with devices of its own.
//!
//! | pattern | what a member has | what it exchanges |
//! | --- | --- | --- |
//! | [halo exchange](advance_grid) | a region of rows, which its devices advance | border rows, every few steps |
//! | [pipeline](advance_pipeline) | consecutive stages | items, as far as the receiver has granted credit |
//!
//! Every member calls the same function with the same settings, over a [`Transport`] of one generation
//! of its group. Results have the bits of one device. A run advances from boundary to boundary: when a member is lost, the others return
//! [`Error::Member`](crate::Error::Member), form a new generation and call the function again, which goes on from the furthest boundary that
//! one of them has reached. A run never waits for a member longer than its time limit, and a member that fails reports the cause to the others.

mod exchange;
mod grid;
mod pipeline;
mod placement;

pub use exchange::MemberFailure;
pub use grid::{GridState, MemberGridRun, advance_grid};
pub use pipeline::{Item, MemberPipelineRun, advance_pipeline};
pub use placement::{Part, place_stages};

pub use bytemuck::Pod;
pub use engram_collective::transport;

use crate::ComputeDevice;
use std::fmt;
use transport::Transport;

/// One member of a generation of a group.
pub struct Member<'a> {
    /// Messages to and from the others. It must be dropped after an error.
    pub transport: &'a mut dyn Transport,
    /// Generation of the group.
    pub generation: u64,
    /// Devices of this member, at least one.
    pub devices: &'a [ComputeDevice],
}

impl fmt::Debug for Member<'_> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut fields = formatter.debug_struct("Member");
        fields.field("rank", &self.transport.rank()).field("generation", &self.generation).finish_non_exhaustive()
    }
}

impl Member<'_> {
    /// Returns the speed of all devices together; 0 if one is unmeasured.
    fn speed(&self) -> u64 {
        let speeds = self.devices.iter().map(ComputeDevice::resource).filter(|it| it.healthy);
        speeds.map(|it| it.throughput).try_fold(0, |sum: u64, speed| Some(sum.saturating_add(speed?))).unwrap_or(0)
    }
}
