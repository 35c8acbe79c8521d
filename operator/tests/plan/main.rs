//! Property tests of plans in a simulated world, and tests of single decisions.

mod coordination;
mod gpus;
mod stalled;
mod updates;
mod world;

use crate::world::{World, assert_explained};
use engram_api::status::{Truth, condition};
use engram_operator::Action;
use proptest::prelude::*;
use serde_json::json;

#[derive(Clone, Debug)]
enum Event {
    Plan,
    Pods,
    Copies,
    Image(u8),
    Workers(u32),
    Replace(usize),
    Grow(u32),
    Suspend(bool),
}

fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        6 => Just(Event::Plan),
        3 => Just(Event::Pods),
        2 => Just(Event::Copies),
        1 => any::<u8>().prop_map(Event::Image),
        1 => (3..7_u32).prop_map(Event::Workers),
        1 => (0..7_usize).prop_map(Event::Replace),
        1 => (50..60_u32).prop_map(Event::Grow),
        1 => any::<bool>().prop_map(Event::Suspend),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]

    #[test]
    fn partitions_lose_at_most_one_replica_and_the_cluster_becomes_idle(
        workers in 3..7_u32,
        copies in 1..4_u32,
        events in proptest::collection::vec(event(), 0..40),
    ) {
        let mut world = World::idle(workers, copies);
        let mut size = 50;
        for event in events {
            match event {
                Event::Plan => {
                    let plan = world.plan();
                    assert_explained(&plan);
                    let taken = plan.actions.iter().filter(|action| matches!(action, Action::DeletePod { .. })).count();
                    prop_assert!(taken <= 1, "one worker at a time");
                    world.apply(plan);
                }
                Event::Pods => world.pods(),
                Event::Copies => world.re_replicate(),
                Event::Image(tag) => world.spec("image", format!("a/b:{tag}").into()),
                Event::Workers(workers) => world.spec("workers", workers.into()),
                Event::Replace(index) => {
                    if let Some(pod) = world.observed.pods.get(index) {
                        world.object["metadata"]["annotations"] = json!({ "engram.dev/replace": pod.uid });
                    }
                }
                Event::Grow(to) => {
                    size = size.max(to);
                    world.spec("storage", json!({ "size": format!("{size}Gi") }));
                }
                Event::Suspend(suspend) => world.spec("suspend", suspend.into()),
            }
            world.check();
        }
        world.spec("suspend", false.into());
        world.run_until_idle();
        let cluster = world.cluster();
        let set = world.observed.set.clone().expect("a set");
        prop_assert_eq!(world.observed.pods.len(), cluster.spec.workers as usize);
        prop_assert!(world.observed.pods.iter().all(|pod| pod.revision == set.update_revision));
        prop_assert!(world.observed.claims.iter().all(|claim| claim.ordinal < cluster.spec.workers));
        prop_assert_eq!(world.truth(condition::READY), Truth::True);
        prop_assert_eq!(world.plan().requeue.as_secs(), 60);
    }
}
