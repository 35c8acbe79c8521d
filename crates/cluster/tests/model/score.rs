//! Every planted defect is found: a checker that finds none shows nothing.

use crate::bounds::{Bounds, REPLICATED, SYNC};
use crate::search;
use crate::walk::walk;
use crate::wrong::Wrong;
use engram_cluster::injected::Bug;
use std::time::Instant;

/// States that a search generates before walks take over.
const SEARCHED: usize = 400_000;
/// Walks before a defect counts as not found.
const WALKS: u64 = 100_000;

/// The least bounds in which a defect of the core can do harm.
fn harmful_to_core(defect: Bug) -> Bounds {
    let quiet = Bounds { doubts: 0, hints: 0, ..SYNC };
    let with_leases = Bounds { leases: true, ..quiet };
    let forked = Bounds { forked: true, terms: 5, power: 0, doubts: 0, ops: 3, ..SYNC };
    let bounds = match defect {
        Bug::AckByOrdinal => Bounds { disks: 1, power: 0, hints: 1, ..quiet },
        Bug::RestartKeepsIsr => Bounds { careless: true, ..REPLICATED },
        Bug::RestartSameTerm
        | Bug::ShrinkWithoutFsync
        | Bug::MarkSoloWithoutFsync
        | Bug::SoloAckWithoutFsync
        | Bug::ShrinkRaceAck
        | Bug::SoloFsyncOnlyWithoutLearner => REPLICATED,
        Bug::ServeBeforeGrantOver => with_leases,
        Bug::ReleaseBeforeStop | Bug::ReadUncommittedTail => Bounds { drains: 1, ..with_leases },
        Bug::AckWhileCopying => Bounds { lazy: true, ..forked },
        Bug::KeepsReplaced => Bounds { disks: 1, power: 0, ..quiet },
        Bug::NeverRenews => Bounds { sync: false, ..quiet },
        Bug::CopyOverRecords => Bounds { terms: 4, ..forked },
        Bug::AckOfOlderProcess => Bounds { reconnects: 1, ..REPLICATED },
        _ => SYNC,
    };
    Bounds { defect: Some(defect), ..bounds }
}

/// The least bounds in which a mistake around it can.
fn harmful_around(wrong: Wrong) -> Bounds {
    let bounds = match wrong {
        Wrong::EligibleByOrdinal => Bounds { disks: 1, ..SYNC },
        Wrong::AddWithoutIncarnation => REPLICATED,
        Wrong::MarkBeforeFsync => Bounds { stops: 1, ..REPLICATED },
        Wrong::MarkNotErased => Bounds { stops: 1, doubts: 0, hints: 0, ..REPLICATED },
        Wrong::PromoteRelabels => Bounds { careless: true, any_subset: true, doubts: 0, hints: 0, ..REPLICATED },
        Wrong::LeaseByOrdinal => Bounds { leases: true, disks: 1, power: 0, doubts: 0, hints: 0, ..SYNC },
        Wrong::ForgetFirstGrant => {
            Bounds { leases: true, replicas: 3, kills: 1, power: 0, doubts: 0, hints: 0, ..SYNC }
        }
        Wrong::BootIdIgnored => Bounds { kills: 1, ..REPLICATED },
        Wrong::ReadWithoutLease | Wrong::ForgetLeaseGrant | Wrong::ProofWithoutDeath | Wrong::ProofByName => {
            Bounds { leases: true, doubts: 0, hints: 0, ..SYNC }
        }
        _ => SYNC,
    };
    Bounds { wrong: Some(wrong), ..bounds }
}

fn is_found(name: &str, bounds: Bounds) -> bool {
    let start = Instant::now();
    let by_search = search(bounds, SEARCHED).violation.map(|(property, trace)| ("search", property, trace));
    let found = by_search.or_else(|| {
        let violation =
            walk(&bounds, 0..WALKS, 60).violation.or_else(|| walk(&bounds.everything(), 0..WALKS, 150).violation)?;
        Some(("walk", violation.property, violation.trace))
    });
    let seconds = start.elapsed().as_secs_f64();
    match &found {
        Some((how, property, trace)) => {
            println!("{name}: {how}, {} steps, {seconds:.1} s, violates `{property}`", trace.len());
        }
        None => println!("{name}: NOT FOUND, {seconds:.1} s"),
    }
    found.is_some()
}

#[test]
fn every_defect_of_the_core_is_found() {
    let missed: Vec<_> = Bug::REPLICA
        .iter()
        .filter(|(defect, name)| !is_found(name, harmful_to_core(*defect)))
        .map(|known| known.1)
        .collect();
    assert!(missed.is_empty(), "not found: {missed:?}");
}

#[test]
fn every_mistake_around_the_core_is_found() {
    let missed: Vec<_> =
        Wrong::ALL.into_iter().filter(|wrong| !is_found(&format!("{wrong:?}"), harmful_around(*wrong))).collect();
    assert!(missed.is_empty(), "not found: {missed:?}");
}
