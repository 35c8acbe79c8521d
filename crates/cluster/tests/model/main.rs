//! A model check of the replica core.
//!
//! The core itself runs, not a description of it: a node of the model is a [`engram_cluster::Replica`] with its log, what of it
//! is durable, its disk and its process; the map is one [`engram_cluster::Entry`], changed as a coordinator changes it. What
//! may happen at any step: messages arrive, twice, late, in any order or never; proposals are applied late, also of dead
//! proposers; candidates are promoted while the primary is well; processes are killed, lose power, stop in order, come back
//! with an empty disk under the old name; the log reports late; maps are read late; leases end for their holder at any time,
//! for who granted them not before.
//!
//! - [`bounds`]: how much of each, and the properties that hold; [`start`]: where it begins.
//! - [`step`]: what may happen; [`take`]: what then changes; [`drive`]: a process around a replica, which does what the
//!   actions of the core say.
//! - [`walk`]: random walks; [`heal`]: that a partition comes back when faults cease.
//! - `score` (feature `defects`): every defect planted in the core, and every mistake planted around it ([`wrong`]), is found:
//!   `cargo test -p engram-cluster --features defects --test model -- --nocapture`.
//!
//! Searches are exhaustive within their bounds: two copies on three nodes or three on three, one or two operations, two to six
//! terms, one or two kinds of faults once each. Walks take everything at once: four operations, ten terms, three or four
//! nodes, two losses of power, a kill, a stop, an empty disk, hand-overs, suspicions, snapshots, read leases. Two hundred
//! thousand of them found what no search did: two kinds of restarts between three promotions.
//!
//! Not in the model: several partitions, records torn inside, time, a log of which a middle part is lost, mode `async`. A log of a
//! model is found again with its records in order; a promise is durable by itself, without the records before it, which is
//! less than a sequential log gives.

mod bounds;
mod drive;
mod heal;
#[cfg(feature = "defects")]
mod score;
mod start;
mod state;
mod step;
mod take;
mod walk;
mod wrong;

use bounds::{Bounds, REPLICATED, SYNC};
use stateright::{Checker, Expectation, HasDiscoveries, Model};
use std::time::Instant;
use step::Step;
use walk::walk;

/// States that a search generates at most; one that needs more is not exhaustive, and fails.
const MOST_STATES: usize = 12_000_000;

/// What a search has seen.
pub(crate) struct Searched {
    /// Different ones.
    pub(crate) states: usize,
    /// With those that were met again.
    pub(crate) generated: usize,
    pub(crate) depth: usize,
    pub(crate) violation: Option<(&'static str, Vec<Step>)>,
}

/// Breadth first, until about so many states were generated.
pub(crate) fn search(bounds: Bounds, most: usize) -> Searched {
    let checker = bounds.checker().threads(1).target_state_count(most);
    let found = checker.finish_when(HasDiscoveries::AnyFailures).spawn_bfs().join();
    let properties = bounds.properties();
    let violation = properties
        .iter()
        .filter(|property| property.expectation == Expectation::Always)
        .find_map(|property| found.discovery(property.name).map(|path| (property.name, path.into_actions())));
    Searched { states: found.unique_state_count(), generated: found.state_count(), depth: found.max_depth(), violation }
}

fn show(trace: &[Step]) -> String {
    trace.iter().map(|step| format!("    {step:?}\n")).collect()
}

/// Searches every state within bounds.
fn exhaust(name: &str, bounds: Bounds) {
    let start = Instant::now();
    let found = search(bounds, MOST_STATES);
    let (states, depth, seconds) = (found.states, found.depth, start.elapsed().as_secs_f64());
    println!("{name}: {states} states ({} generated), {depth} steps deep, {seconds:.1} s", found.generated);
    if let Some((property, trace)) = found.violation {
        panic!("{name}: violates `{property}`\n{}", show(&trace));
    }
    assert!(found.generated < MOST_STATES, "{name}: there are more states than {MOST_STATES}");
}

/// Two copies, one operation, three terms, nothing disturbs.
const FEW: Bounds = Bounds { power: 0, doubts: 0, hints: 0, ..SYNC };
const FEW_REPLICATED: Bounds = Bounds { sync: false, ..FEW };

#[test]
fn the_core_is_safe_in_every_state_within_small_bounds() {
    exhaust("sync, power, 6 terms", Bounds { power: 1, terms: 6, ..FEW });
    exhaust("sync, power, suspicion, 4 terms", Bounds { power: 1, doubts: 1, terms: 4, ..FEW });
    exhaust("sync, suspicion, new copies, 4 terms", Bounds { doubts: 1, hints: 1, terms: 4, ..FEW });
    exhaust("sync, suspicion, empty disk", Bounds { disks: 1, doubts: 1, ..FEW });
    exhaust("sync, power, suspicion, late log", Bounds { power: 1, doubts: 1, lazy: true, ..FEW });
    exhaust("sync, power, late maps", Bounds { power: 1, late: true, ..FEW });
    exhaust("sync, power, leases, hand-over", Bounds { power: 1, leases: true, drains: 1, ..FEW });
    exhaust("sync, power, who leaves, late", Bounds { power: 1, departures: 1, late: true, terms: 2, ..FEW });
    exhaust("replicated, kill, who leaves, hand-over", Bounds { kills: 1, departures: 1, drains: 1, ..FEW_REPLICATED });
    exhaust("sync, 2 operations", Bounds { ops: 2, ..FEW });
    exhaust("sync, two logs, copies, 5 terms", Bounds { forked: true, ops: 2, hints: 1, terms: 5, ..FEW });
    exhaust("sync, three copies", Bounds { replicas: 3, ..FEW });
    exhaust("replicated, power, 5 terms", Bounds { power: 1, terms: 5, ..FEW_REPLICATED });
    exhaust("replicated, power, suspicion", Bounds { power: 1, doubts: 1, ..FEW_REPLICATED });
    exhaust("replicated, kill", Bounds { kills: 1, ..FEW_REPLICATED });
    exhaust("replicated, power, kill, 2 terms", Bounds { power: 1, kills: 1, terms: 2, ..FEW_REPLICATED });
    exhaust("replicated, power, stop, 2 terms", Bounds { power: 1, stops: 1, terms: 2, ..FEW_REPLICATED });
    exhaust("replicated, suspicion, new copies", Bounds { doubts: 1, hints: 1, ..FEW_REPLICATED });
    exhaust("replicated, three copies", Bounds { replicas: 3, ..FEW_REPLICATED });
}

/// Minutes, and some gigabytes.
#[test]
#[ignore = "minutes: `cargo test --release -p engram-cluster --test model -- --ignored --nocapture`"]
fn the_core_is_safe_in_every_state_within_larger_bounds() {
    exhaust("sync, power, suspicion, new copies", Bounds { power: 1, doubts: 1, hints: 1, ..FEW });
    exhaust("sync, power, suspicion, empty disk", Bounds { power: 1, disks: 1, doubts: 1, ..FEW });
    exhaust("sync, new copies, empty disk", Bounds { disks: 1, hints: 1, ..FEW });
    exhaust("sync, power, 2 operations, 2 terms", Bounds { power: 1, ops: 2, terms: 2, ..FEW });
    exhaust("sync, two logs, copies, 3 operations", Bounds { forked: true, ops: 3, hints: 1, terms: 4, ..FEW });
    exhaust("sync, power, three copies", Bounds { power: 1, replicas: 3, ..FEW });
    exhaust("sync, leases, hand-over, 2 operations", Bounds { leases: true, drains: 1, ops: 2, ..FEW });
    exhaust(
        "replicated, power, any promotion",
        Bounds { power: 1, careless: true, any_subset: true, ..FEW_REPLICATED },
    );
    exhaust("replicated, power, new copies", Bounds { power: 1, hints: 1, ..FEW_REPLICATED });
    exhaust("replicated, power, kill", Bounds { power: 1, kills: 1, ..FEW_REPLICATED });
    exhaust("replicated, power, three copies, 2 terms", Bounds { power: 1, replicas: 3, terms: 2, ..FEW_REPLICATED });
}

#[test]
fn the_core_is_safe_and_heals_on_random_walks_that_reach_what_matters() {
    let three = Bounds { replicas: 3, ..SYNC };
    let walks = [
        ("sync, two copies", SYNC.everything()),
        ("sync, three copies", three.everything()),
        // Rollbacks are rare here as it is.
        ("sync, two logs", Bounds { forked: true, terms: 12, departures: 0, ..SYNC.everything() }),
        ("replicated, two copies", REPLICATED.everything()),
        ("replicated, three copies", Bounds { sync: false, ..three }.everything()),
        ("sync, two needed of three", Bounds { min_in_sync: 2, snapshots: 0, ..three.everything() }),
    ];
    let seeds = seeds();
    for (name, bounds) in walks {
        let start = Instant::now();
        let walked = walk(&bounds, seeds.clone(), 160);
        let seconds = start.elapsed().as_secs_f64();
        println!("{name}: {} steps, {} walks healed, {seconds:.1} s", walked.steps, walked.healed);
        if let Some(violation) = walked.violation {
            panic!(
                "{name}: violates `{}` with seed {}\n{}",
                violation.property,
                violation.seed,
                show(&violation.trace)
            );
        }
        for wanted in bounds.properties().iter().filter(|property| property.expectation == Expectation::Sometimes) {
            let few = seeds.end - seeds.start < 1000;
            assert!(few || walked.reached.contains(wanted.name), "{name}: never `{}`", wanted.name);
        }
    }
}

/// The seeds of the walks. `ENGRAM_MODEL_SEEDS=7..8` replays the walk of seed 7.
fn seeds() -> std::ops::Range<u64> {
    let Ok(named) = std::env::var("ENGRAM_MODEL_SEEDS") else { return 0..3_000 };
    let (first, end) = named.split_once("..").expect("seeds are named as `first..end`");
    first.parse().expect("the first seed is a number")..end.parse().expect("the end of the seeds is a number")
}
