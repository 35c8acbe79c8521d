//! Model check of elastic groups.
//!
//! The real state machines run: a world of the model has [`engram_collective::group::Member`]s, a [`engram_collective::group::Service`], sometimes
//! the one that it replaced, and the store of the record. At any step: sums, flags, notices and reports arrive, late or never; members are killed, start
//! again with their old state, leave, suspect each other; time passes, so that the service removes members that did not report; another service takes
//! over.
//!
//! - [`bounds`]: how much of each, and the properties.
//! - [`world`]: the state, and what a driver does; [`step`]: the possible steps and their effects; [`history`]: who finished which step.
//!
//! Searches are exhaustive within their bounds: two or three members, one or two steps, one or two kinds of faults once each. Injected bugs are found
//! within the same bounds. The simulation (`--test group_simulation`) goes deeper, and has time, repeated messages and recovery.
//!
//! Not modeled: messages of a stream out of order, quarantine of members whose links fail again and again.

mod bounds;
mod history;
mod step;
mod world;

use bounds::{Bounds, Bug, THREE, TWO};
use stateright::{Checker, Expectation, HasDiscoveries, Model};
use std::time::Instant;
use step::Step;

/// Maximum number of generated states; a search that needs more is not exhaustive, and fails.
const MAX_STATES: usize = 6_000_000;

/// Searches breadth-first; returns the violated property and the steps that lead there.
fn search(name: &str, bounds: Bounds) -> Option<(&'static str, Vec<Step>)> {
    let start = Instant::now();
    let checker = bounds.checker().threads(1).target_state_count(MAX_STATES);
    let found = checker.finish_when(HasDiscoveries::AnyFailures).spawn_bfs().join();
    let (states, generated, depth) = (found.unique_state_count(), found.state_count(), found.max_depth());
    let seconds = start.elapsed().as_secs_f64();
    println!("{name}: {states} states ({generated} generated), {depth} steps deep, {seconds:.1} s");
    assert!(generated < MAX_STATES, "{name}: there are more states than {MAX_STATES}");
    for property in bounds.properties() {
        let discovery = found.discovery(property.name);
        match property.expectation {
            Expectation::Always => {
                if let Some(path) = discovery {
                    return Some((property.name, path.into_actions()));
                }
            }
            // A search that ends with a violation has not seen all states.
            _ if bounds.bug.is_none() => assert!(discovery.is_some(), "{name}: never `{}`", property.name),
            _ => {}
        }
    }
    None
}

fn exhaust(name: &str, bounds: Bounds) {
    if let Some((property, trace)) = search(name, bounds) {
        let trace: String = trace.iter().map(|step| format!("    {step:?}\n")).collect();
        panic!("{name}: violates `{property}`\n{trace}");
    }
}

#[test]
fn groups_are_safe_in_every_state_within_small_bounds() {
    exhaust("two members, killed", Bounds { steps: 2, kills: 1, ..TWO });
    exhaust("two members, silent", Bounds { steps: 2, silences: 1, ..TWO });
    exhaust("two members, failing link", Bounds { steps: 2, suspicions: 1, ..TWO });
    exhaust("two members, one leaves", Bounds { leaves: 1, ..TWO });
    exhaust("two members, one joins", Bounds { starts: 1, waits: 1, ..TWO });
    exhaust("two members, killed, failover of the service", Bounds { kills: 1, failovers: 1, ..TWO });
    exhaust("three members, killed", Bounds { kills: 1, ..THREE });
}

#[test]
#[ignore = "minutes: `cargo test --release -p engram-collective --test model -- --ignored --nocapture`"]
fn groups_are_safe_in_every_state_within_larger_bounds() {
    exhaust("two members, silent, failover of the service", Bounds { silences: 1, failovers: 1, ..TWO });
    exhaust("two members, killed, one joins", Bounds { kills: 1, starts: 1, waits: 1, ..TWO });
    exhaust("three members, silent", Bounds { silences: 1, ..THREE });
    exhaust("three members, failing link", Bounds { suspicions: 1, ..THREE });
}

/// The property that a bug violates within some bounds.
fn violated(bug: Bug, bounds: Bounds) -> &'static str {
    let found = search(&format!("{bug:?}"), Bounds { bug: Some(bug), ..bounds });
    found.unwrap_or_else(|| panic!("{bug:?} is not found")).0
}

#[test]
fn injected_bugs_are_found() {
    let second = "a step has one outcome";
    assert_eq!(violated(Bug::CommitsAlone, Bounds { kills: 1, ..TWO }), second);
    assert_eq!(violated(Bug::ForgetsPrepared, Bounds { kills: 1, ..THREE }), second);
    let with_failover = Bounds { silences: 1, failovers: 1, ..TWO };
    assert_eq!(violated(Bug::PublishesBeforeRecord, with_failover), "a generation has one record");
}
