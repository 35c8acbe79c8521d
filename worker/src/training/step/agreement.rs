//! Whether the members of a new generation reduce the gradient sums that they kept from an earlier one.
//!
//! The rows of sums of one generation do not overlap. Those of two generations may: the parts of a batch differ. So kept sums count only where all
//! members kept sums of the same generation. Otherwise, as after a join, or where a member learned of no earlier generation, all members compute
//! their parts of the new one.

use crate::training::engine::{Kept, Part};
use crate::training::step::reduce::{Connections, exchange_all};
use engram_api::SumOrder;
use engram_collective::message::Tag;
use engram_collective::transport::{Error, Wait};
use engram_train::job::Job;

/// Bucket of the messages.
const KEPT: u32 = 7;
/// Sent by a member that kept no sums: no generation has this number.
const NONE: u64 = 0;

impl Kept {
    /// Whether the sums cannot count as those of a part of a step.
    pub(super) fn is_stale(&self, job: &Job, part: Part) -> bool {
        match job.order {
            // A private step that is repeated uses the same samples, so that it is the same release. A stage needs all others.
            _ if job.spec.privacy.is_some() || job.stages.is_some() => self.part != part,
            // In the order of a tree no leaf may be missing.
            SumOrder::PartitionInvariant => (self.part.rank, self.part.members) != (part.rank, part.members),
            SumOrder::Rank | SumOrder::Fast => self.counts_in != part.generation,
        }
    }
}

/// Lets kept sums count in a new generation, if all its members kept sums of one generation.
///
/// # Errors
/// The member that failed.
pub(super) fn agree(
    connections: &mut Connections,
    step: u64,
    kept: &mut Option<Kept>,
    wait: &mut Wait<'_>,
) -> Result<(), Error> {
    let own = kept.as_ref().map_or(NONE, |kept| kept.part.generation);
    let all = match &mut connections.transport {
        Some(transport) => {
            let (generation, own) = (connections.generation, own.to_le_bytes());
            let tag = |from: usize| Tag { generation, step, bucket: KEPT, phase: 0, chunk: 0, from: from as u16 };
            exchange_all(transport, tag, &own, |_| size_of::<u64>(), wait)?
        }
        None => Vec::new(),
    };
    let is_common = own != NONE && all.iter().all(|other| *other == own.to_le_bytes());
    if let Some(kept) = kept.as_mut().filter(|_| is_common) {
        kept.counts_in = connections.generation;
    }
    Ok(())
}
