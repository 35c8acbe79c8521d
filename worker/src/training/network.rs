//! The links of a group: measured when its members are connected, before the first reduction.

use super::connections::Generation;
use super::engine::Engine;
use super::reduce::Connections;
use super::work::EngineEvent;
use engram_collective::cost::Algorithm;
use engram_collective::group::{Cause, Suspicion};
use engram_collective::measure::measure;
use engram_collective::transport::{Error, Wait};
use engram_proto::v1::ReduceAlgorithm;

impl Engine {
    /// Measures the links between the members of a generation.
    ///
    /// # Errors
    /// The member that failed.
    pub(super) fn measure_links(&self, connections: &mut Connections, generation: &Generation) -> Result<(), Error> {
        let Some(transport) = &mut connections.transport else { return Ok(()) };
        let mut keep_waiting = |rank: usize| {
            let suspicion = Suspicion { peer: generation.members[rank].id, cause: Cause::Stalled };
            self.send(EngineEvent::PeerFailed { generation: generation.number, suspicion });
            true
        };
        let mut wait = Wait::new(self.connector.limit, &generation.cancel, &mut keep_waiting);
        connections.network = measure(transport, generation.number, &mut wait)?;
        let link = connections.network.link;
        tracing::debug!(
            generation = generation.number,
            latency_seconds = link.alpha,
            bytes_per_second = 1.0 / link.beta,
            "measured the links of a group"
        );
        Ok(())
    }
}

/// Returns the slowest link of a group as latency in seconds and bytes per second; zeros in a group of one.
pub(super) fn slowest_link(connections: &Connections) -> (f64, f64) {
    let link = connections.network.link;
    if connections.transport.is_some() { (link.alpha, 1.0 / link.beta) } else { (0.0, 0.0) }
}

/// Returns an algorithm as messages name it.
pub(super) const fn wire_algorithm(algorithm: Option<Algorithm>) -> ReduceAlgorithm {
    match algorithm {
        None => ReduceAlgorithm::Unspecified,
        Some(Algorithm::OneShot) => ReduceAlgorithm::OneShot,
        Some(Algorithm::RecursiveDoubling) => ReduceAlgorithm::RecursiveDoubling,
        Some(Algorithm::HalvingDoubling) => ReduceAlgorithm::HalvingDoubling,
        Some(Algorithm::Direct) => ReduceAlgorithm::Direct,
        Some(Algorithm::Ring) => ReduceAlgorithm::Ring,
        Some(Algorithm::GatherBroadcast) => ReduceAlgorithm::GatherBroadcast,
    }
}
