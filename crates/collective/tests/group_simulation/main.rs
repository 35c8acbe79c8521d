//! Deterministic simulation of elastic groups: virtual time, lost and delayed messages, killed and stopped members, cut links, failover of the service.
//!
//! A failing seed is printed; `ENGRAM_GROUP_SEED=<seed> cargo test -p engram-collective --test group_simulation` repeats it, and `ENGRAM_GROUP_TRACE=1` prints its events;
//! `ENGRAM_GROUP_SEEDS=<count>` runs more seeds.

mod check;
mod plan;
mod world;

use engram_collective::group::{MemberId, PauseReason, Position, Record, Service, ServiceAction, ServiceEvent};
use plan::{Bug, Fault, Plan, Summary};
use world::World;

/// Runs a seed to its end and returns what the checks found.
fn run(seed: u64, bug: Option<Bug>) -> Result<Summary, String> {
    World::new(Plan::random(seed), bug).run()
}

#[test]
fn no_step_is_lost_or_applied_twice_under_random_faults() {
    let variable = |name: &str| std::env::var(name).ok().and_then(|it| it.parse::<u64>().ok());
    let only = variable("ENGRAM_GROUP_SEED").map(|seed| seed..seed + 1);
    let seeds = only.unwrap_or(0..variable("ENGRAM_GROUP_SEEDS").unwrap_or(400));
    let mut total = Summary::default();
    let count = seeds.clone().count();
    for seed in seeds {
        match run(seed, None) {
            Ok(summary) => total += summary,
            Err(failure) => panic!("seed {seed}: {failure}"),
        }
    }
    println!("{count} seeds: {total:?}");
    if count > 1 {
        // The faults reached what they should reach.
        assert!(total.generations > 4 * count as u64, "{total:?}");
        assert!(total.repeated_reductions > 100, "{total:?}");
        assert!(total.finished_by_service > 20, "{total:?}");
        assert!(total.replays > 20 && total.transfers > 100, "{total:?}");
        assert!(total.deposed > 5, "{total:?}");
    }
}

/// Returns the first failure that a bug causes within some seeds.
fn find(bug: Bug) -> Option<String> {
    (0..200).find_map(|seed| run(seed, Some(bug)).err())
}

#[test]
fn reduction_in_place_is_found_as_a_gradient_counted_twice() {
    let failure = find(Bug::ReducesInPlace).expect("the injected bug is found");
    assert!(failure.contains("counted"), "{failure}");
}

#[test]
fn returner_that_trusts_its_step_number_is_found_as_another_history() {
    let failure = find(Bug::TrustsStepNumber).expect("the injected bug is found");
    assert!(failure.contains("digest") || failure.contains("history"), "{failure}");
}

#[test]
fn generation_published_before_it_is_durable_is_found_as_a_second_history() {
    let failure = find(Bug::PublishesBeforeRecord).expect("the injected bug is found");
    assert!(failure.contains("history") || failure.contains("generation"), "{failure}");
}

#[test]
fn heartbeat_of_a_stopped_member_is_found_as_a_hang() {
    let failure = find(Bug::HeartbeatWithoutProgress).expect("the injected bug is found");
    assert!(failure.contains("no step"), "{failure}");
}

/// Recovery time in milliseconds of virtual time, from a fault to the next commit of the survivors.
fn recovery_ms(detect_ms: u64, fault: Fault) -> u64 {
    let mut plan = Plan::quiet(3, detect_ms);
    plan.faults = vec![(2_000, fault)];
    World::new(plan, None).run().expect("no violation").longest_gap_ms
}

#[test]
fn halving_the_detection_time_halves_the_time_to_recover_from_a_stopped_member() {
    let stop = Fault::Stop { member: 1, for_ms: 60_000 };
    let (whole, half) = (recovery_ms(500, stop), recovery_ms(250, stop));
    // Two probes after three missing reports, then one generation change; steps take up to 45 ms.
    assert!(whole <= 500 + 150, "{whole}");
    assert!(half <= 250 + 150 && whole > half + 150, "{whole} {half}");
}

#[test]
fn killed_member_costs_less_than_half_a_second() {
    // A dead process is found by its closed connections and a refused probe, a dead host by two unanswered probes.
    let slowest = |broken: bool| (0..3).map(|member| recovery_ms(500, Fault::Kill { member, broken })).max();
    let (process, host) = (slowest(true), slowest(false));
    assert!(process.is_some_and(|it| it < 150), "{process:?}");
    assert!(host.is_some_and(|it| it < 500 + 150), "{host:?}");
}

#[test]
fn group_whose_last_member_died_is_reported_as_paused() {
    let (last, settings) = (MemberId(1), Plan::quiet(1, 200).settings);
    let record = Record { generation: 2, members: vec![last], position: Position { step: 154, digest: 9 } };
    let mut service = Service::new(record, 1, settings, 0);
    let mut actions = service.step(ServiceEvent::Died(last), 0);
    actions.extend((0..10_000).step_by(50).flat_map(|now_ms| service.step(ServiceEvent::Tick, now_ms)));
    let paused = |it: &&ServiceAction| matches!(it, ServiceAction::Paused(PauseReason::Quorum { present: 0, .. }));
    assert_eq!(actions.iter().filter(paused).count(), 1, "{actions:?}");
}
