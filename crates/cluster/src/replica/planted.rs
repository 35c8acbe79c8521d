//! Defects that can be planted to see whether the checks find them. Compiled in by the feature `defects` alone.

/// A rule that is broken on purpose.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Defect {
    /// Records are committed without the other copies.
    AckWithoutBackup,
    /// Acknowledgements count by place: those of an empty disk count as the old member's.
    AckByOrdinal,
    /// A replica takes messages of terms below its promise.
    AcceptOldTerm,
    /// A divergent tail is kept when a term is opened.
    KeepTail,
    /// A restarted primary goes on under its term, although the map names the process before.
    RestartSameTerm,
    /// A newcomer is proposed before it holds what is committed.
    AddBeforeCaughtUp,
    /// A newcomer that was proposed is not waited for.
    AckIgnoresPendingAdd,
    /// A proposal without an answer is taken for lost.
    TimeoutIsFailure,
    /// A process that lost what it had acknowledged may serve.
    RestartKeepsIsr,
    /// A primary asks to be alone before its log is on disk.
    ShrinkWithoutFsync,
    /// A primary that was promoted to be alone says so before its log is on disk.
    MarkSoloWithoutFsync,
    /// Who is alone acknowledges from the page cache.
    SoloAckWithoutFsync,
    /// Who asked to be alone acknowledges from the page cache until it is.
    ShrinkRaceAck,
    /// Who is alone acknowledges from the page cache while a newcomer is pending.
    SoloFsyncOnlyWithoutLearner,
    /// A promoted primary serves while a lease that it granted may be held.
    ServeBeforeGrantOver,
    /// A primary reads a tail that is not committed at its term.
    ReadUncommittedTail,
    /// A primary serves before it has read that its term is settled.
    ServeBeforeActivated,
    /// The primary of a planned hand-over gives its read leases back, and reads on.
    ReleaseBeforeStop,
    /// A term that is opened again, by a message of before, takes what was acknowledged at this term since.
    ReopenTruncates,
    /// A log that is not known to be the primary's prefix is acknowledged.
    AckWhileCopying,
    /// A copy of the state replaces records that it does not hold and that were acknowledged.
    CopyOverRecords,
    /// Acknowledgements of a process count after those of a later one.
    AckOfOlderProcess,
    /// Another disk under an old name keeps the old one's place, and is waited for for ever.
    KeepsReplaced,
    /// A member that came back as a new process stays in the map as the old one.
    NeverRenews,
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
    /// A member that was to serve, and never did, is promoted along as the process that was to serve.
    PromoteRelabels,
    /// A start does not find the promise of the process before.
    ForgetPromise,
    /// A start does not assume that the process before granted read leases.
    ForgetLeaseGrant,
    /// Who granted leases to two processes remembers the last alone.
    ForgetFirstGrant,
    /// Reads without leases.
    ReadWithoutLease,
    /// Leases count by place: that of an empty disk for the old member's.
    LeaseByOrdinal,
    /// A stream that ended is taken for proof of death.
    ProofWithoutDeath,
    /// The death of an older process ends the lease of the one that runs.
    ProofByName,
    /// An orderly stop says that all is durable, and it is not.
    MarkBeforeFsync,
    /// The mark of an orderly stop is found again by a later start.
    MarkNotErased,
    /// The page cache is taken for kept although the kernel was booted since.
    BootIdIgnored,
    /// Whoever is asked reads, and asks nobody whether it still may.
    ReadUnasked,
    /// A request that comes again is executed again.
    NoDedupe,
    /// An epoch that comes again is applied again.
    NoEpochTable,
    /// A start does not remember that a copy was not whole.
    ForgetDamage,
    /// A sync that failed is taken for one that came late.
    ForgiveSyncFailure,
}

impl Defect {
    /// Those of the replica, by name.
    pub const ALL: [(Self, &'static str); 24] = [
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

    /// Those of what is around it: the map, the start, the leases, the detector, the log, the store.
    pub const AROUND: [(Self, &'static str); 21] = [
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

    /// The defect of a name.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.iter().chain(&Self::AROUND).find(|(_, known)| *known == name).map(|(defect, _)| *defect)
    }
}

/// The defect that is active, if the feature is on and one was chosen.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub(super) struct Planted(#[cfg(feature = "defects")] pub(super) Option<Defect>);

impl Planted {
    #[cfg(feature = "defects")]
    pub(super) fn has(self, defect: Defect) -> bool {
        self.0 == Some(defect)
    }

    #[cfg(not(feature = "defects"))]
    #[expect(clippy::unused_self, reason = "as with the feature")]
    pub(super) const fn has(self, _defect: Defect) -> bool {
        false
    }
}

/// The defect around the replica that this whole process has, as its number and one; 0 = none.
#[cfg(feature = "defects")]
static ACTIVE: std::sync::atomic::AtomicU8 = std::sync::atomic::AtomicU8::new(0);

/// Plants a defect in everything of this process but its replicas, each of which has its own ([`super::Replica::with_defect`]).
#[cfg(feature = "defects")]
pub fn plant(defect: Option<Defect>) {
    let number = defect.map_or(0, |defect| defect as u8 + 1);
    ACTIVE.store(number, std::sync::atomic::Ordering::Relaxed);
}

/// Whether a defect around the replica is planted in this process; never without the feature.
#[cfg(feature = "defects")]
pub fn is_planted(defect: Defect) -> bool {
    ACTIVE.load(std::sync::atomic::Ordering::Relaxed) == defect as u8 + 1
}

/// Whether a defect around the replica is planted in this process; never without the feature.
#[cfg(not(feature = "defects"))]
pub const fn is_planted(_defect: Defect) -> bool {
    false
}
