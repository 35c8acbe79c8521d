//! NCCL between the GPUs of the members of a group: a candidate for their sums.

use engram_collective::library::{Communicator, ID_BYTES, Library, Offer};
use engram_kernels::gpu::nccl::{self, Nccl, NcclError};
use std::sync::Arc;

/// NCCL with a GPU of this worker.
pub(in crate::training) struct GpuLibrary {
    nccl: Arc<Nccl>,
    ordinal: usize,
    gpu: [u8; 16],
}

impl GpuLibrary {
    /// Finds NCCL for the first of the GPUs that this worker uses.
    ///
    /// # Errors
    /// Why it is no candidate: `nccl: not found`.
    pub(in crate::training) fn find(ordinals: &[usize]) -> Result<Self, String> {
        let nccl = Arc::new(Nccl::load().map_err(text)?);
        let ordinal = *ordinals.first().ok_or("nccl: this worker uses no GPU")?;
        Ok(Self { nccl, ordinal, gpu: nccl::device_uuid(ordinal).map_err(text)? })
    }
}

#[allow(clippy::needless_pass_by_value)] // For `map_err`.
fn text(error: NcclError) -> String {
    error.to_string()
}

impl Library for GpuLibrary {
    fn offer(&self) -> Offer {
        Offer { version: self.nccl.version().cast_unsigned(), gpu: self.gpu }
    }

    fn unique_id(&self) -> Result<[u8; ID_BYTES], String> {
        self.nccl.unique_id().map_err(text)
    }

    fn join(
        &self,
        id: &[u8; ID_BYTES],
        rank: (usize, usize),
        keep_waiting: &mut dyn FnMut() -> bool,
    ) -> Result<Box<dyn Communicator>, String> {
        let joined = nccl::Communicator::join(&self.nccl, id, rank, self.ordinal, keep_waiting).map_err(text)?;
        Ok(Box::new(Rank(joined)))
    }
}

struct Rank(nccl::Communicator);

impl Communicator for Rank {
    fn all_reduce(
        &mut self,
        input: &[f32],
        output: &mut [f32],
        keep_waiting: &mut dyn FnMut() -> bool,
    ) -> Result<(), String> {
        self.0.all_reduce(input, output, keep_waiting).map_err(text)
    }
}
