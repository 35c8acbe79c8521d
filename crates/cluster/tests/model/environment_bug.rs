//! Bugs in the environment of the core: the deciding coordinator, the recovery of a log, the holders of leases.

/// A rule that the model violates on purpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EnvironmentBug {
    /// A process that is not a candidate is promoted.
    PromoteNonIsr,
    /// An activated entry is rolled back.
    RollbackActivated,
    /// The previous in-sync set is not updated when an entry is replaced.
    StalePrev,
    /// Members are identified by ordinal: an empty disk under the old name may be promoted.
    EligibleByOrdinal,
    /// A newcomer is added as its current process, not as the one whose acknowledgements were counted.
    AddWithoutIncarnation,
    /// A power loss loses the promise.
    ForgetPromise,
    /// A power loss loses the memory of a granted lease.
    ForgetLeaseGrant,
    /// An orderly stop marks everything as durable although it is not.
    MarkBeforeFsync,
    /// The mark of an orderly stop survives to a later start.
    MarkNotErased,
    /// The page cache is considered intact although power was lost.
    BootIdIgnored,
    /// Reads need no leases.
    ReadWithoutLease,
    /// A lease expires for its granter before it expires for its holder.
    ProofWithoutDeath,
    /// The death of an older process ends the lease of the current one.
    ProofByName,
    /// A member that was in sync but never served is promoted as another process.
    PromoteRelabels,
    /// Leases count by ordinal: one of an empty disk counts for the old member.
    LeaseByOrdinal,
    /// After leases to two processes only the last one is remembered.
    ForgetFirstGrant,
    /// An operation that is already in the log is appended again.
    NoDedupe,
}

impl EnvironmentBug {
    #[cfg(feature = "defects")]
    pub(crate) const ALL: [Self; 17] = [
        Self::PromoteNonIsr,
        Self::RollbackActivated,
        Self::StalePrev,
        Self::EligibleByOrdinal,
        Self::AddWithoutIncarnation,
        Self::ForgetPromise,
        Self::ForgetLeaseGrant,
        Self::MarkBeforeFsync,
        Self::MarkNotErased,
        Self::BootIdIgnored,
        Self::ReadWithoutLease,
        Self::ProofWithoutDeath,
        Self::ProofByName,
        Self::PromoteRelabels,
        Self::LeaseByOrdinal,
        Self::ForgetFirstGrant,
        Self::NoDedupe,
    ];
}
