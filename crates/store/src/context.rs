//! What the owners of a store share.

use crate::serving::Serving;
use crate::session_clock::SessionClock;
use crate::stats::Shared;
use crate::{Clock, Disk, FileHead, Identity, Options};
use engram_memory::{Member, PartitionId};
use std::sync::Arc;

/// Disk, clocks, options and counters of a store, fixed at its start.
pub(crate) struct Context {
    pub(crate) disk: Arc<dyn Disk>,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) session_clock: Arc<SessionClock>,
    pub(crate) options: Options,
    /// This process as a member of its cluster.
    pub(crate) member: Member,
    /// Head of its files.
    pub(crate) file_head: FileHead,
    pub(crate) shared: Arc<Shared>,
    pub(crate) serving: Arc<Serving>,
}

impl Context {
    pub(crate) fn new(disk: Arc<dyn Disk>, clock: Arc<dyn Clock>, options: Options, identity: &Identity) -> Self {
        let ordinal = options.replication.ordinal;
        let member = Member { ordinal, store: identity.store(), incarnation: identity.incarnation() };
        let replicated = options.replication.replicas > 1;
        let session_clock = Arc::new(SessionClock::new(Arc::clone(&clock), replicated));
        let serving = Arc::new(Serving::new(options.shape.partitions));
        let shared = Arc::new(Shared::default());
        Self { disk, clock, session_clock, options, member, file_head: identity.head(), shared, serving }
    }

    /// Returns the milliseconds of the monotonic clock.
    pub(crate) fn now_ms(&self) -> u64 {
        self.clock.elapsed_ms()
    }

    /// Whether partitions are configured with several replicas.
    pub(crate) const fn is_replicated(&self) -> bool {
        self.options.replication.replicas > 1
    }

    /// Returns all partitions of the cluster.
    pub(crate) fn all_partitions(&self) -> impl Iterator<Item = PartitionId> + use<> {
        (0..self.options.shape.partitions).map(PartitionId)
    }
}
