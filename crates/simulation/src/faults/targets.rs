//! Scenario and mode that find each injected bug soonest, and the bugs that the model of the core can find.

use crate::Durability;
use crate::faults::scenario::Scenario;
use engram_cluster::injected::Bug;

/// Returns the scenario and mode in which to search for a bug; `None` if no run can show it, for the reason of
/// [`undetectable_reason`].
pub const fn target(bug: Bug) -> Option<(Scenario, Durability)> {
    if undetectable_reason(bug).is_some() {
        return None;
    }
    Some(match bug {
        Bug::ShrinkWithoutFsync
        | Bug::SoloAckWithoutFsync
        | Bug::SoloFsyncOnlyWithoutLearner
        | Bug::ShrinkRaceAck
        | Bug::AddWithoutIncarnation => (Scenario::Alone, Durability::Replicated),
        Bug::RestartKeepsIsr
        | Bug::EligibleByOrdinal
        | Bug::PromoteNonIsr
        | Bug::RollbackActivated
        | Bug::StalePrev
        | Bug::ServeBeforeActivated
        | Bug::PromoteRelabels => (Scenario::Promotions, Durability::Replicated),
        Bug::NeverRenews | Bug::MarkBeforeFsync | Bug::MarkNotErased | Bug::BootIdIgnored => {
            (Scenario::Restarts, Durability::Replicated)
        }
        Bug::ForgiveSyncFailure => (Scenario::Restarts, Durability::Sync),
        Bug::ServeBeforeGrantOver
        | Bug::ForgetFirstGrant
        | Bug::ReleaseBeforeStop
        | Bug::ReadWithoutLease
        | Bug::LeaseByOrdinal
        | Bug::ReadUnasked
        | Bug::ProofByName
        | Bug::ProofWithoutDeath => (Scenario::Leases, Durability::Sync),
        Bug::ForgetLeaseGrant | Bug::ForgetPromise => (Scenario::Leases, Durability::Replicated),
        Bug::AcceptOldTerm
        | Bug::AddBeforeCaughtUp
        | Bug::ReopenTruncates
        | Bug::AckWhileCopying
        | Bug::CopyOverRecords
        | Bug::AckOfOlderProcess => (Scenario::Copies, Durability::Replicated),
        Bug::ForgetDamage => (Scenario::Rot, Durability::Sync),
        Bug::AckByOrdinal | Bug::KeepsReplaced => (Scenario::Open, Durability::Sync),
        _ => (Scenario::Open, Durability::Replicated),
    })
}

/// Returns the first seed of the search: bugs that show in one of ten thousand seeds are searched near such a seed.
pub const fn first_seed(bug: Bug) -> u64 {
    match bug {
        Bug::ForgetDamage => 10_000,
        _ => 0,
    }
}

/// Explains why no run shows a bug that the model of the core finds.
pub const fn undetectable_reason(bug: Bug) -> Option<&'static str> {
    Some(match bug {
        Bug::MarkSoloWithoutFsync => "the promise before it syncs the same log",
        _ => return None,
    })
}

/// Whether the model of the core (`crates/cluster/tests/model`) finds it: in the core itself, or as the same bug around
/// it.
pub const fn is_in_model(bug: Bug) -> bool {
    let is_of_stores =
        matches!(bug, Bug::ReadUnasked | Bug::NoEpochTable | Bug::ForgetDamage | Bug::ForgiveSyncFailure);
    !is_of_stores
}
