//! Decisions about GPUs.

use std::collections::BTreeMap;

use crate::world::World;
use engram_api::status::{Truth, condition};
use engram_coordinator::GpuFault;
use serde_json::json;

#[test]
fn gpus_are_decided_once_per_generation() {
    let mut world = World::new(3, 2);
    world.spec("gpu", json!({ "mode": "Auto" }));
    world.observed.gpu_offered = Some(false);
    world.run_until_idle();
    world.observed.gpu_offered = Some(true);
    assert!(world.plan().objects.is_empty(), "a new node moves no pod");
    world.spec("gpu", json!({ "mode": "Auto", "count": 2 }));
    let requests_gpus =
        world.plan().objects.iter().any(|object| object.content().to_string().contains(r#""nvidia.com/gpu":"2""#));
    assert!(requests_gpus);
    let reasons: BTreeMap<_, _> = world.plan().status.conditions.into_iter().map(|it| (it.kind, it.reason)).collect();
    assert_eq!(reasons[condition::GPU_AVAILABLE], "GpuNodesAvailable");
}

#[test]
fn an_unused_gpu_is_reported_and_moves_no_pod() {
    let of = |world: &World| {
        let conditions = world.plan().status.conditions;
        conditions.into_iter().find(|it| it.kind == condition::GPU_AVAILABLE).expect("the condition")
    };
    let fault = |was_in_use: bool, why: &str| GpuFault { was_in_use, reason: why.into() };
    let mut world = World::new(3, 2);
    world.spec("gpu", json!({ "mode": "Auto" }));
    world.observed.gpu_problems = [(1, fault(false, "there is no CUDA driver"))].into();
    world.observed.gpu_offered = Some(false);
    assert_eq!(of(&world).reason, "NoGpuNodes", "its pod has no GPU");
    world.observed.gpu_offered = Some(true);
    world.run_until_idle();
    let condition = of(&world);
    assert_eq!(
        (condition.status, condition.reason.as_str()),
        (Truth::True, "GpuNodesAvailable"),
        "its pod has none yet"
    );
    world.observed.pods.iter_mut().for_each(|pod| pod.has_devices = true);
    let condition = of(&world);
    assert_eq!((condition.status, condition.reason.as_str()), (Truth::False, "GpuUnusable"));
    assert!(condition.message.starts_with("worker 1: there is no CUDA driver; "), "{}", condition.message);
    world.observed.gpu_problems.insert(2, fault(true, "H100 failed"));
    let condition = of(&world);
    assert_eq!(condition.reason, "GpuFailed");
    assert!(condition.message.contains("; worker 2: H100 failed"), "{}", condition.message);
    assert!(world.plan().objects.is_empty(), "pods keep their GPUs");
    world.observed.gpu_problems.clear();
    assert_eq!((of(&world).status, of(&world).reason.as_str()), (Truth::True, "GpuNodesAvailable"));

    let mut world = World::new(9, 2);
    world.spec("gpu", json!({ "mode": "Required" }));
    world.run_until_idle();
    world.observed.pods.iter_mut().for_each(|pod| pod.has_devices = true);
    world.observed.gpu_problems = (0..9).map(|ordinal| (ordinal, fault(true, "lost"))).collect();
    assert!(of(&world).message.contains("worker 3: lost; and 5 more; "), "{}", of(&world).message);
    world.spec("gpu", json!({ "mode": "Disabled" }));
    assert_eq!(of(&world).reason, "Disabled");
}
