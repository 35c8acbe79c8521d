//! Mistakes around the core: of the coordinator that decides, of the start that finds a log, of who holds leases.

/// A rule that the model breaks on purpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wrong {
    /// Somebody is promoted who is no candidate.
    PromoteNonIsr,
    /// An activated entry is rolled back.
    RollbackActivated,
    /// The in-sync set before is not renewed when an entry is replaced.
    StalePrev,
    /// Who stands in the map is known by place: an empty disk under the old name may be promoted.
    EligibleByOrdinal,
    /// A newcomer enters as the process that runs now, not as the one whose acknowledgements were counted.
    AddWithoutIncarnation,
    /// A loss of power takes the promise along.
    ForgetPromise,
    /// A loss of power takes the memory of a lease that was granted along.
    ForgetLeaseGrant,
    /// An orderly stop says that all is durable, and it is not.
    MarkBeforeFsync,
    /// The mark of an orderly stop is found again by a later start.
    MarkNotErased,
    /// The page cache is taken for kept although the power was lost.
    BootIdIgnored,
    /// Reads without leases.
    ReadWithoutLease,
    /// A lease ends for who granted it before it ends for who holds it.
    ProofWithoutDeath,
    /// The death of an older process ends the lease of the one that runs.
    ProofByName,
    /// A member that was to serve, and never did, is promoted along as the process that was to serve.
    PromoteRelabels,
    /// Leases count by place: that of an empty disk for the old member's.
    LeaseByOrdinal,
    /// Who granted leases to two processes remembers the last alone.
    ForgetFirstGrant,
    /// An operation that is in the log already is appended again.
    NoDedupe,
}

impl Wrong {
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
