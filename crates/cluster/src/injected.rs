//! Bugs that tests inject to verify that the checks find them.
//!
//! A mutation point is `injected!(Bug)` for a bug of the whole process, and `injected!(self.bug, Bug)` for a bug of one replica. Without the
//! feature `defects` both are constant `false`.

/// A rule that is broken on purpose.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Bug {
    /// Records are committed without acknowledgements of the backups.
    AckWithoutBackup,
    /// Acknowledgements count by ordinal: those of an empty disk count as the old member's.
    AckByOrdinal,
    /// A replica accepts messages of terms below its promise.
    AcceptOldTerm,
    /// A divergent tail is kept when a term is opened.
    KeepTail,
    /// A restarted primary continues under its term, although the map names its previous process.
    RestartSameTerm,
    /// A newcomer is proposed before it holds everything committed.
    AddBeforeCaughtUp,
    /// The primary does not wait for a newcomer that was proposed.
    AckIgnoresPendingAdd,
    /// A proposal without an answer counts as failed.
    TimeoutIsFailure,
    /// A process that lost what it had acknowledged may serve.
    RestartKeepsIsr,
    /// A primary proposes to be the only replica before its log is on disk.
    ShrinkWithoutFsync,
    /// A primary promoted as the only replica activates before its log is on disk.
    MarkSoloWithoutFsync,
    /// A single replica acknowledges from the page cache.
    SoloAckWithoutFsync,
    /// A primary that proposed to be the only replica acknowledges from the page cache until it is.
    ShrinkRaceAck,
    /// A single replica acknowledges from the page cache while a newcomer is pending.
    SoloFsyncOnlyWithoutLearner,
    /// A promoted primary serves while a lease that it granted may still be held.
    ServeBeforeGrantOver,
    /// A primary reads a tail that is not committed under its term.
    ReadUncommittedTail,
    /// A primary serves before it has read that its term is settled.
    ServeBeforeActivated,
    /// The primary of a planned leadership transfer returns its read leases, and keeps reading.
    ReleaseBeforeStop,
    /// A term that is opened again by a delayed message truncates records acknowledged under it.
    ReopenTruncates,
    /// A log that is not known to be a prefix of the primary's is acknowledged.
    AckWhileCopying,
    /// A snapshot replaces acknowledged records that it does not hold.
    CopyOverRecords,
    /// Acknowledgements of a process count after those of a later one.
    AckOfOlderProcess,
    /// Another disk under an old ordinal keeps the old membership, and the primary waits for it permanently.
    KeepsReplaced,
    /// A member that came back as a new process stays in the map as the old one.
    NeverRenews,
    /// A worker that is not a candidate is promoted.
    PromoteNonIsr,
    /// An activated entry is rolled back.
    RollbackActivated,
    /// The previous in-sync set is not updated when an entry is replaced.
    StalePrev,
    /// Members are identified by ordinal: an empty disk under an old ordinal may be promoted.
    EligibleByOrdinal,
    /// A newcomer enters as the process that runs now, not as the one whose acknowledgements were counted.
    AddWithoutIncarnation,
    /// A member that was promoted but never served is kept as that process.
    PromoteRelabels,
    /// A start does not recover the promise of the previous process.
    ForgetPromise,
    /// A start does not assume that the previous process granted read leases.
    ForgetLeaseGrant,
    /// A replica that granted leases to two processes remembers only the last.
    ForgetFirstGrant,
    /// Reads without leases.
    ReadWithoutLease,
    /// Leases count by ordinal: that of an empty disk counts as the old member's.
    LeaseByOrdinal,
    /// A closed stream counts as proof of death.
    ProofWithoutDeath,
    /// The death of an older process ends the lease of the one that runs.
    ProofByName,
    /// An orderly stop reports that everything is durable before it is.
    MarkBeforeFsync,
    /// The mark of an orderly stop is not erased at the next start.
    MarkNotErased,
    /// The page cache counts as kept although the kernel was rebooted.
    BootIdIgnored,
    /// A replica serves reads without confirming that it still may.
    ReadUnasked,
    /// A retried request is executed again.
    NoDedupe,
    /// A retried epoch is applied again.
    NoEpochTable,
    /// A start does not remember that a replica was damaged.
    ForgetDamage,
    /// A failed sync counts as a late one.
    ForgiveSyncFailure,
}

impl Bug {
    /// Bugs of the replica, by name.
    pub const REPLICA: [(Self, &'static str); 24] = [
        (Self::AckWithoutBackup, "ack_without_backup"),
        (Self::AckByOrdinal, "ack_by_ordinal"),
        (Self::AcceptOldTerm, "accept_old_term"),
        (Self::KeepTail, "keep_tail"),
        (Self::RestartSameTerm, "restart_same_term"),
        (Self::AddBeforeCaughtUp, "add_before_caught_up"),
        (Self::AckIgnoresPendingAdd, "ack_ignores_pending_add"),
        (Self::TimeoutIsFailure, "timeout_is_failure"),
        (Self::RestartKeepsIsr, "restart_keeps_isr"),
        (Self::ShrinkWithoutFsync, "shrink_without_fsync"),
        (Self::MarkSoloWithoutFsync, "mark_solo_without_fsync"),
        (Self::SoloAckWithoutFsync, "solo_ack_without_fsync"),
        (Self::ShrinkRaceAck, "shrink_race_ack"),
        (Self::SoloFsyncOnlyWithoutLearner, "solo_fsync_only_without_learner"),
        (Self::ServeBeforeGrantOver, "serve_before_grant_over"),
        (Self::ReadUncommittedTail, "read_uncommitted_tail"),
        (Self::ServeBeforeActivated, "serve_before_activated"),
        (Self::ReleaseBeforeStop, "release_before_stop"),
        (Self::ReopenTruncates, "reopen_truncates"),
        (Self::AckWhileCopying, "ack_while_copying"),
        (Self::CopyOverRecords, "copy_over_records"),
        (Self::AckOfOlderProcess, "ack_of_older_process"),
        (Self::KeepsReplaced, "keeps_replaced"),
        (Self::NeverRenews, "never_renews"),
    ];

    /// Bugs around the replica: the map, the start, the leases, the detector, the log, the store.
    pub const ENVIRONMENT: [(Self, &'static str); 21] = [
        (Self::PromoteNonIsr, "promote_non_isr"),
        (Self::RollbackActivated, "rollback_activated"),
        (Self::StalePrev, "stale_prev"),
        (Self::EligibleByOrdinal, "eligible_by_ordinal"),
        (Self::AddWithoutIncarnation, "add_without_incarnation"),
        (Self::PromoteRelabels, "promote_relabels"),
        (Self::ForgetPromise, "forget_promise"),
        (Self::ForgetLeaseGrant, "forget_lease_grant"),
        (Self::ForgetFirstGrant, "forget_first_grant"),
        (Self::ReadWithoutLease, "read_without_lease"),
        (Self::LeaseByOrdinal, "lease_by_ordinal"),
        (Self::ProofWithoutDeath, "proof_without_death"),
        (Self::ProofByName, "proof_by_name"),
        (Self::MarkBeforeFsync, "mark_before_fsync"),
        (Self::MarkNotErased, "mark_not_erased"),
        (Self::BootIdIgnored, "boot_id_ignored"),
        (Self::ReadUnasked, "read_unasked"),
        (Self::NoDedupe, "no_dedupe"),
        (Self::NoEpochTable, "no_epoch_table"),
        (Self::ForgetDamage, "forget_damage"),
        (Self::ForgiveSyncFailure, "forgive_sync_failure"),
    ];

    /// Finds a bug by name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::REPLICA.iter().chain(&Self::ENVIRONMENT).find(|(_, other)| *other == name).map(|(bug, _)| *bug)
    }
}

/// The bug of one replica; none without the feature `defects`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub(crate) struct InjectedBug(#[cfg(feature = "defects")] pub(crate) Option<Bug>);

impl InjectedBug {
    #[cfg(feature = "defects")]
    pub(crate) fn is(self, bug: Bug) -> bool {
        self.0 == Some(bug)
    }

    #[cfg(not(feature = "defects"))]
    #[expect(clippy::unused_self, reason = "as with the feature")]
    pub(crate) const fn is(self, _bug: Bug) -> bool {
        false
    }
}

/// The injected bug of this process as its discriminant plus one; 0 = none.
#[cfg(feature = "defects")]
static ACTIVE: std::sync::atomic::AtomicU8 = std::sync::atomic::AtomicU8::new(0);

/// Injects a bug into this process, except its replicas: each has its own ([`crate::Replica::with_bug`]).
#[cfg(feature = "defects")]
pub fn inject(bug: Option<Bug>) {
    let number = bug.map_or(0, |bug| bug as u8 + 1);
    ACTIVE.store(number, std::sync::atomic::Ordering::Relaxed);
}

/// Whether a bug is injected into this process.
#[cfg(feature = "defects")]
pub fn is_injected(bug: Bug) -> bool {
    ACTIVE.load(std::sync::atomic::Ordering::Relaxed) == bug as u8 + 1
}

/// Whether a bug is injected into this process: never without the feature `defects`.
#[cfg(not(feature = "defects"))]
pub const fn is_injected(_bug: Bug) -> bool {
    false
}

/// Whether a [`Bug`](crate::injected::Bug) is injected: into this process, or into the replica whose bug comes first.
#[macro_export]
macro_rules! injected {
    ($bug:ident) => {
        $crate::injected::is_injected($crate::injected::Bug::$bug)
    };
    ($replica:expr, $bug:ident) => {
        $replica.is($crate::injected::Bug::$bug)
    };
}
