//! The links of a group: measured when its members are connected, before the first reduction.

use crate::training::engine::Engine;
use crate::training::step::reduce::Connections;
use crate::training::transport::accelerator::GpuLibrary;
use engram_api::SumOrder;
use engram_collective::cost::Algorithm;
use engram_collective::library::{Accelerator, Library};
use engram_collective::measure::measure;
use engram_collective::transport::{Error, Wait};
use engram_proto::v1::ReduceAlgorithm;

impl Engine {
    /// Measures the links between the members of a generation.
    ///
    /// # Errors
    /// The member that failed.
    pub(in crate::training) fn measure_links(
        &self,
        connections: &mut Connections,
        wait: &mut Wait<'_>,
    ) -> Result<(), Error> {
        let generation = connections.generation;
        let Some(transport) = &mut connections.transport else { return Ok(()) };
        connections.network = measure(transport, generation, wait)?;
        let formed = match exclusion(self.job.order, self.job.parameter_server) {
            Some(reason) => Err(reason),
            None => {
                let library = GpuLibrary::find(&self.gpus);
                let library = library.as_ref().map(|it| it as &dyn Library).map_err(Clone::clone);
                let formed = Accelerator::form(library, transport, generation, wait)?;
                log_accelerator(generation, &formed);
                formed
            }
        };
        connections.nccl = match &formed {
            Ok(_) => "candidate".to_owned(),
            Err(reason) => format!("no candidate: {}", reason.strip_prefix("nccl: ").unwrap_or(reason)),
        };
        connections.accelerator = formed.ok();
        let link = connections.network.link;
        tracing::debug!(
            generation,
            latency_seconds = link.alpha,
            bytes_per_second = 1.0 / link.beta,
            "measured the links of a group"
        );
        Ok(())
    }
}

/// Returns the setting of a run that excludes NCCL, which adds in any order and without a server.
fn exclusion(order: SumOrder, is_parameter_server: bool) -> Option<String> {
    if is_parameter_server {
        return Some("sync is ParameterServer; allowed: AllReduce".to_owned());
    }
    (order != SumOrder::Fast).then(|| format!("order is {order:?}; allowed: Fast"))
}

/// Says whether NCCL is a candidate for the sums of a generation.
fn log_accelerator(generation: u64, formed: &Result<Accelerator, String>) {
    match formed {
        Ok(formed) => tracing::info!(
            generation,
            latency_seconds = formed.latency,
            bytes_per_second = formed.per_byte.recip(),
            "nccl is a candidate for sums over GPUs"
        ),
        Err(reason) => tracing::info!(generation, reason, "nccl is no candidate for sums"),
    }
}

/// Returns the slowest link of a group as latency in seconds and bytes per second; zeros in a group of one.
pub(in crate::training) fn slowest_link(connections: &Connections) -> (f64, f64) {
    let link = connections.network.link;
    if connections.transport.is_some() { (link.alpha, 1.0 / link.beta) } else { (0.0, 0.0) }
}

/// Returns an algorithm as messages name it.
pub(in crate::training) const fn wire_algorithm(algorithm: Algorithm) -> ReduceAlgorithm {
    match algorithm {
        Algorithm::OneShot => ReduceAlgorithm::OneShot,
        Algorithm::RecursiveDoubling => ReduceAlgorithm::RecursiveDoubling,
        Algorithm::HalvingDoubling => ReduceAlgorithm::HalvingDoubling,
        Algorithm::Direct => ReduceAlgorithm::Direct,
        Algorithm::Ring => ReduceAlgorithm::Ring,
        Algorithm::GatherBroadcast => ReduceAlgorithm::GatherBroadcast,
    }
}
