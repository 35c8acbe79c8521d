//! Which season and mode finds a planted defect soonest, and which defects the model of the core alone can find.

use crate::Durability;
use crate::season::Season;
use engram_cluster::replica::Defect;

/// Where a defect is looked for; `None` = no run can show it, and [`unseen`] says why.
pub const fn aim(defect: Defect) -> Option<(Season, Durability)> {
    if unseen(defect).is_some() {
        return None;
    }
    Some(match defect {
        Defect::ShrinkWithoutFsync
        | Defect::SoloAckWithoutFsync
        | Defect::SoloFsyncOnlyWithoutLearner
        | Defect::ShrinkRaceAck
        | Defect::AddWithoutIncarnation => (Season::Alone, Durability::Replicated),
        Defect::RestartKeepsIsr
        | Defect::EligibleByOrdinal
        | Defect::PromoteNonIsr
        | Defect::RollbackActivated
        | Defect::StalePrev
        | Defect::ServeBeforeActivated
        | Defect::PromoteRelabels => (Season::Promotions, Durability::Replicated),
        Defect::NeverRenews | Defect::MarkBeforeFsync | Defect::MarkNotErased | Defect::BootIdIgnored => {
            (Season::Restarts, Durability::Replicated)
        }
        Defect::ForgiveSyncFailure => (Season::Restarts, Durability::Sync),
        Defect::ServeBeforeGrantOver
        | Defect::ForgetFirstGrant
        | Defect::ReleaseBeforeStop
        | Defect::ReadWithoutLease
        | Defect::LeaseByOrdinal
        | Defect::ReadUnasked
        | Defect::ProofByName
        | Defect::ProofWithoutDeath => (Season::Leases, Durability::Sync),
        Defect::ForgetLeaseGrant | Defect::ForgetPromise => (Season::Leases, Durability::Replicated),
        Defect::AcceptOldTerm
        | Defect::AddBeforeCaughtUp
        | Defect::ReopenTruncates
        | Defect::AckWhileCopying
        | Defect::CopyOverRecords
        | Defect::AckOfOlderProcess => (Season::Copies, Durability::Replicated),
        Defect::ForgetDamage => (Season::Rot, Durability::Sync),
        Defect::AckByOrdinal | Defect::KeepsReplaced => (Season::Open, Durability::Sync),
        _ => (Season::Open, Durability::Replicated),
    })
}

/// The seed to begin with: one that shows in one of ten thousand seeds is looked for near such a one.
pub const fn first_seed(defect: Defect) -> u64 {
    match defect {
        Defect::ForgetDamage => 10_000,
        _ => 0,
    }
}

/// Why no run shows a defect that the model of the core finds.
pub const fn unseen(defect: Defect) -> Option<&'static str> {
    Some(match defect {
        Defect::MarkSoloWithoutFsync => "the promise before it syncs the same log",
        _ => return None,
    })
}

/// Whether the model of the core (`crates/cluster/tests/model`) finds it: in the core itself, or as the same mistake around it.
pub const fn is_in_model(defect: Defect) -> bool {
    let is_of_stores = matches!(
        defect,
        Defect::ReadUnasked | Defect::NoEpochTable | Defect::ForgetDamage | Defect::ForgiveSyncFailure
    );
    !is_of_stores
}
