use super::*;
use engram_memory::mix64;
use proptest::prelude::{any, prop_assert, prop_assert_eq, proptest};

/// Seeded random numbers.
struct Draw(u64);

impl Draw {
    /// Returns a number in `from..to`.
    fn between(&mut self, from: u64, to: u64) -> u64 {
        self.0 = self.0.wrapping_add(1);
        from + mix64(self.0) % (to - from)
    }
}

fn device(throughput: u64, latency_ns: u64, free_bytes: u64) -> Resource {
    Resource { throughput: Some(throughput), free_bytes, latency_ns, healthy: true }
}

fn sizes(memories: impl IntoIterator<Item = u64>) -> Vec<Size> {
    memories.into_iter().map(|memories| Size { memories, bytes: memories * 5 }).collect()
}

/// Returns the least cost of any assignment that fits, by exhaustive search; `None` if none fits.
fn least_cost(strategy: Strategy, resources: &[Resource], sizes: &[Size]) -> Option<f64> {
    let mut devices = vec![0; sizes.len()];
    let mut least: Option<f64> = None;
    loop {
        if fits(&devices, resources, sizes) {
            let cost = Assignment { strategy, devices: devices.clone() }.cost(resources, sizes);
            least = Some(least.map_or(cost, |least| least.min(cost)));
        }
        let Some(next) = devices.iter().position(|&device| device + 1 < resources.len()) else { return least };
        devices[..next].fill(0);
        devices[next] += 1;
    }
}

fn fits(devices: &[usize], resources: &[Resource], sizes: &[Size]) -> bool {
    let mut bytes = vec![0_u64; resources.len()];
    devices.iter().zip(sizes).for_each(|(&device, size)| bytes[device] += size.bytes);
    resources.iter().zip(&bytes).all(|(resource, &bytes)| bytes <= resource.free_bytes)
}

/// Returns the least cost of `n` equal partitions: tries every way to split `n` over the devices.
fn least_cost_of_equal(strategy: Strategy, resources: &[Resource], size: Size, n: u64) -> Option<f64> {
    fn cut(strategy: Strategy, resources: &[Resource], size: Size, left: u64, device: usize) -> Option<f64> {
        if device == resources.len() {
            return (left == 0).then_some(0.0);
        }
        let most = resources[device].free_bytes.checked_div(size.bytes).unwrap_or(left).min(left);
        let whole = |count: u64| {
            let own = Assignment { strategy, devices: vec![device] };
            let own = own.cost(resources, &[Size { memories: size.memories * count, bytes: size.bytes * count }]);
            Some(cut(strategy, resources, size, left - count, device + 1)?.max(own))
        };
        (0..=most).filter_map(whole).min_by(f64::total_cmp)
    }
    cut(strategy, resources, size, n, 0)
}

#[test]
fn partitions_of_one_size_are_assigned_optimally() {
    let mut draw = Draw(1);
    let mut full = 0;
    for case in 0..400 {
        let devices = draw.between(1, 5);
        let resources: Vec<Resource> = (0..devices)
            .map(|_| device(draw.between(1, 9), draw.between(0, 5) * 1_000_000_000, draw.between(0, 160)))
            .collect();
        let (size, n) = (Size { memories: draw.between(1, 4), bytes: 5 }, draw.between(1, 25));
        for strategy in Strategy::ALL {
            let least = least_cost_of_equal(strategy, &resources, size, n);
            match assign(strategy, &resources, &vec![size; n as usize]) {
                Ok(assignment) => {
                    let cost = assignment.cost(&resources, &vec![size; n as usize]);
                    let least = least.expect("an assignment fits");
                    assert!((cost - least).abs() < 1e-9, "case {case}, {strategy:?}: cost {cost}, optimum {least}");
                }
                Err(error) => {
                    assert_eq!(least, None, "case {case}, {strategy:?}: {error}, but a fitting assignment exists");
                    full += 1;
                }
            }
        }
    }
    assert!(full > 20, "only {full} cases were full");
}

#[test]
fn partitions_of_several_sizes_keep_the_bounds_of_lpt_and_mostly_reach_the_optimum() {
    let mut draw = Draw(2);
    let (mut optimal, mut cases) = (0, 0);
    for case in 0..200 {
        let m = draw.between(2, 4);
        let is_uniform = case % 2 == 0;
        let resources: Vec<Resource> =
            (0..m).map(|_| device(if is_uniform { 7 } else { draw.between(1, 10) }, 0, 100_000)).collect();
        let n = draw.between(2, 8);
        let sizes = sizes((0..n).map(|_| draw.between(1, 40)));
        for strategy in [Strategy::Balanced, Strategy::CapabilityAware, Strategy::MemoryAware] {
            let assignment = assign(strategy, &resources, &sizes).unwrap();
            let cost = assignment.cost(&resources, &sizes);
            let least = least_cost(strategy, &resources, &sizes).unwrap();
            let m = m as f64;
            let bound = if is_uniform { 4.0 / 3.0 - 1.0 / (3.0 * m) } else { 2.0 - 2.0 / (m + 1.0) };
            assert!(cost <= bound * least + 1e-9, "case {case}, {strategy:?}: cost {cost}, optimum {least}");
            cases += 1;
            optimal += u32::from(cost <= least + 1e-9);
        }
    }
    assert!(optimal * 10 >= cases * 9, "{optimal} of {cases} are optimal");
}

#[test]
fn many_partitions_finish_within_one_partition_of_the_fluid_bound() {
    let mut draw = Draw(3);
    for _ in 0..20 {
        let resources: Vec<Resource> =
            (0..8).map(|_| device(draw.between(100, 1_000), draw.between(0, 1_000) * 1_000, u64::MAX)).collect();
        let sizes = sizes((0..1_024).map(|_| draw.between(9_500, 10_500)));
        let assignment = assign(Strategy::LatencyOptimized, &resources, &sizes).unwrap();
        // If partitions were divisible, all devices would finish together: bisection over that time.
        let all: u64 = sizes.iter().map(|size| size.memories).sum();
        let done_by = |time: f64| -> f64 {
            let own = |it: &Resource| (time - it.latency_ns as f64 / 1e9).max(0.0) * it.throughput.unwrap() as f64;
            resources.iter().map(own).sum()
        };
        let (mut low, mut high) = (0.0, 1e9);
        for _ in 0..200 {
            let middle = (low + high) / 2.0;
            if done_by(middle) < all as f64 { low = middle } else { high = middle }
        }
        let largest = sizes.iter().map(|size| size.memories).max().unwrap() as f64;
        let slowest = resources.iter().map(|it| it.throughput.unwrap()).min().unwrap() as f64;
        let cost = assignment.cost(&resources, &sizes);
        assert!(cost >= high - 1e-6 && cost <= high + largest / slowest, "{cost}, fluid {high}");
    }
}

proptest! {
    #[test]
    fn every_partition_is_on_one_healthy_device_with_enough_memory(
        devices in proptest::collection::vec((0..3_u64, 0..50_u64, 0..2_000_u64, any::<bool>()), 0..6),
        parts in proptest::collection::vec((0..60_u64, 0..90_u64), 0..40),
        strategy in proptest::sample::select(Strategy::ALL.to_vec()),
    ) {
        let resources: Vec<Resource> = devices
            .iter()
            .map(|&(throughput, latency_ns, free_bytes, healthy)| Resource {
                throughput: (throughput > 0).then_some(throughput), latency_ns, free_bytes, healthy,
            })
            .collect();
        let sizes: Vec<Size> = parts.iter().map(|&(memories, bytes)| Size { memories, bytes }).collect();
        let largest = sizes.iter().map(|size| size.bytes).max().unwrap_or(0);
        let healthy = resources.iter().filter(|it| it.healthy);
        // Every device could hold the largest partition, wherever the others are.
        let surely_fits = healthy.clone().map(|it| it.free_bytes.saturating_sub(largest)).sum::<u64>()
            >= sizes.iter().map(|size| size.bytes).sum();
        match assign(strategy, &resources, &sizes) {
            Ok(assignment) => {
                prop_assert_eq!(assignment.devices.len(), sizes.len());
                prop_assert!(assignment.devices.iter().all(|&device| resources[device].healthy));
                prop_assert!(fits(&assignment.devices, &resources, &sizes));
                prop_assert_eq!(&assign(strategy, &resources, &sizes).unwrap(), &assignment);
                // A complete assignment stays; after a device failure only its partitions move.
                prop_assert_eq!(&repair(strategy, &resources, &sizes, &assignment.devices).unwrap(), &assignment);
                let mut fewer = resources.clone();
                if let Some(&failed) = assignment.devices.first() {
                    fewer[failed].healthy = false;
                    if let Ok(repaired) = repair(strategy, &fewer, &sizes, &assignment.devices) {
                        prop_assert!(repaired.devices.iter().all(|&device| device != failed));
                        prop_assert!(fits(&repaired.devices, &fewer, &sizes));
                    }
                }
            }
            Err(Error::NoDevice { partitions }) => {
                prop_assert!(partitions == sizes.len() && healthy.count() == 0);
            }
            Err(Error::Full { partition, bytes, missing_bytes }) => {
                prop_assert!(!surely_fits && sizes[partition].bytes == bytes && (1..=bytes).contains(&missing_bytes));
            }
        }
    }
}

#[test]
fn strategies_differ_on_different_devices() {
    // The first is fast and small, the second slow and large, the third has a high latency.
    let resources = [device(800, 0, 4_000), device(200, 0, 40_000), device(800, 30_000_000_000, 40_000)];
    let sizes = sizes([100; 60]);
    let counts = |strategy| {
        let devices = assign(strategy, &resources, &sizes).unwrap().devices;
        [0, 1, 2].map(|device| devices.iter().filter(|&&other| other == device).count())
    };
    // The first has memory for eight only.
    assert_eq!(counts(Strategy::Balanced), [8, 26, 26]);
    assert_eq!(counts(Strategy::CapabilityAware), [8, 10, 42]);
    assert_eq!(counts(Strategy::MemoryAware), [2, 29, 29]);
    assert_eq!(counts(Strategy::LatencyOptimized), [8, 52, 0]);
    // 52 times 100 memories at 200 per second; the unused device adds nothing.
    let used = assign(Strategy::LatencyOptimized, &resources, &sizes).unwrap();
    assert_eq!(used.cost(&resources, &sizes), 26.0);
    assert_eq!(assign(Strategy::Balanced, &[], &[]).unwrap().devices, []);
}

#[test]
fn without_measurements_partitions_are_balanced() {
    let unmeasured = Resource { throughput: None, ..device(1, 0, 1_000) };
    let sizes = sizes([10; 6]);
    for strategy in [Strategy::CapabilityAware, Strategy::LatencyOptimized] {
        for unknown in [unmeasured, device(0, 0, 1_000)] {
            let assignment = assign(strategy, &[device(50, 0, 1_000), unknown], &sizes).unwrap();
            assert_eq!((assignment.strategy, assignment.cost(&[unmeasured; 2], &sizes)), (Strategy::Balanced, 30.0));
        }
        // A device that may hold nothing needs no measurement.
        let failed = Resource { healthy: false, ..unmeasured };
        assert_eq!(assign(strategy, &[device(50, 0, 1_000), failed], &sizes).unwrap().strategy, strategy);
    }
}

#[test]
fn partition_that_fits_nowhere_is_reported_with_missing_bytes() {
    let resources = [device(5, 0, 100), device(5, 0, 60)];
    let of = |bytes: &[u64]| -> Vec<Size> { bytes.iter().map(|&bytes| Size { memories: 1, bytes }).collect() };
    let full = Error::Full { partition: 1, bytes: 130, missing_bytes: 30 };
    assert_eq!(assign(Strategy::Balanced, &resources, &of(&[20, 130])), Err(full));
    assert_eq!(full.to_string(), "partition 1 of 130 bytes fits on no device: 30 more bytes are needed");
    // Balanced memories would separate the two of 50; only together do they leave memory for the one of 60.
    assert_eq!(assign(Strategy::Balanced, &resources, &of(&[50, 50, 60])).unwrap().devices, [0, 0, 1]);
    let failed = resources.map(|it| Resource { healthy: false, ..it });
    assert_eq!(assign(Strategy::Balanced, &failed, &of(&[1, 1])), Err(Error::NoDevice { partitions: 2 }));
}

const CHEAP: MoveEstimate = MoveEstimate { bytes_per_second: 1e9, passes: 1e6 };

fn watch(resources: &[Resource], sizes: &[Size]) -> Rebalancer {
    Rebalancer::new(Strategy::CapabilityAware, Limits::default(), resources, sizes).unwrap()
}

#[test]
fn failed_device_is_evacuated_immediately_and_nothing_else_moves() {
    let sizes = sizes([10; 30]);
    let mut devices = [device(10, 0, 9_999), device(10, 0, 9_999), device(10, 0, 9_999)];
    let mut watch = watch(&devices, &sizes);
    let before = watch.assignment().devices.clone();
    devices[1].healthy = false;
    let verdict = watch.observe(&devices, &sizes, CHEAP).unwrap();
    assert_eq!(verdict, Decision::Reassigned(Cause::Failed { device: 1 }));
    for (before, after) in before.iter().zip(&watch.assignment().devices) {
        assert!(*after != 1 && (*before == 1 || before == after));
    }
    assert_eq!(watch.observe(&devices, &sizes, CHEAP).unwrap(), Decision::Keep);
    // The device recovers: using it pays off for many passes and not for few.
    devices[1].healthy = true;
    let brief = MoveEstimate { passes: 1e-9, ..CHEAP };
    assert_eq!(watch.observe(&devices, &sizes, brief).unwrap(), Decision::Keep);
    let verdict = watch.observe(&devices, &sizes, CHEAP).unwrap();
    assert_eq!(verdict, Decision::Reassigned(Cause::Returned { device: 1 }));
    // New partitions are assigned.
    let more: Vec<Size> = sizes.iter().copied().chain([Size { memories: 10, bytes: 50 }]).collect();
    assert_eq!(watch.observe(&devices, &more, CHEAP).unwrap(), Decision::Reassigned(Cause::Partitions));
    assert_eq!(watch.assignment().devices.len(), 31);
    // The partitions of the last device do not fit: the assignment stays, and the error reports the missing bytes.
    let held = watch.assignment().clone();
    let none = devices.map(|it| Resource { healthy: false, ..it });
    assert_eq!(watch.observe(&none, &more, CHEAP), Err(Error::NoDevice { partitions: 31 }));
    assert_eq!(*watch.assignment(), held);
}

#[test]
fn drift_counts_after_several_observations_and_does_not_oscillate() {
    let sizes = sizes([10; 40]);
    let devices = [device(100, 0, 9_999), device(100, 0, 9_999)];
    let at = |throughput| [devices[0], device(throughput, 0, 9_999)];
    let mut watch = watch(&devices, &sizes);
    let verdicts = |watch: &mut Rebalancer, throughputs: &[u64], moving| -> Vec<bool> {
        let observe = |&throughput| watch.observe(&at(throughput), &sizes, moving).unwrap() != Decision::Keep;
        throughputs.iter().map(observe).collect()
    };
    // Within 20 %: never. Beyond it twice, then settled: the count restarts. Between the limits: unchanged.
    assert_eq!(verdicts(&mut watch, &[81, 119, 100, 80], CHEAP), [false; 4]);
    assert_eq!(verdicts(&mut watch, &[70, 70, 95, 70, 70], CHEAP), [false; 5]);
    assert_eq!(verdicts(&mut watch, &[85, 85, 70], CHEAP), [false, false, true]);
    let slow = watch.assignment().devices.iter().filter(|&&device| device == 1).count();
    assert_eq!(slow, 16, "70 of 170 of 40 partitions");
    // The current measurements are those of the assignment: noise moves nothing.
    assert_eq!(verdicts(&mut watch, &[70, 80, 65, 75, 60, 70, 82, 70], CHEAP), [false; 8]);
    // Too expensive for the remaining passes: not moved, and reconsidered only after as many observations.
    let dear = MoveEstimate { bytes_per_second: 1.0, passes: 1.0 };
    assert_eq!(verdicts(&mut watch, &[20, 20, 20, 20, 20, 20], dear), [false; 6]);
    assert_eq!(verdicts(&mut watch, &[20, 20, 20], CHEAP), [false, false, true]);
}

#[test]
fn move_must_gain_one_and_a_half_times_its_cost() {
    // Two equal devices; the second becomes half as fast: moving 5 of 20 partitions of 50 bytes shortens a pass from about 4/3 s to 1.0 s.
    let sizes = sizes([10; 20]);
    let devices = [device(100, 0, 9_999), device(100, 0, 9_999)];
    let slower = [devices[0], device(50, 0, 9_999)];
    let mut fresh = watch(&devices, &sizes);
    let before = fresh.assignment().cost(&slower, &sizes);
    let after = assign(Strategy::CapabilityAware, &slower, &sizes).unwrap();
    let moved = fresh.assignment().devices.iter().zip(&after.devices).filter(|(from, to)| from != to).count() as f64;
    let gain = before - after.cost(&slower, &sizes);
    assert!(gain > 0.0 && moved > 0.0);
    let break_even = 1.5 * (moved * 50.0) / gain;
    for (passes, moves) in [(break_even * 0.99, false), (break_even * 1.01, true)] {
        let mut watch = fresh.clone();
        let moving = MoveEstimate { bytes_per_second: 1.0, passes };
        let verdicts: Vec<_> = (0..3).map(|_| watch.observe(&slower, &sizes, moving).unwrap()).collect();
        assert_eq!(verdicts[2] != Decision::Keep, moves, "{passes} passes");
    }
    assert_eq!(fresh.observe(&devices, &sizes, CHEAP).unwrap(), Decision::Keep);
}

#[test]
fn only_partitions_that_no_longer_fit_move() {
    let devices = [device(10, 0, 300), device(10, 0, 300)];
    let mut watch = watch(&devices, &sizes([10; 8]));
    let before = watch.assignment().devices.clone();
    assert_eq!(watch.place_unassigned(&devices, &sizes([10; 8])).unwrap(), Decision::Keep);
    // The first device has memory for one of its four.
    let less = [device(10, 0, 50), devices[1]];
    let few = sizes([10, 10, 10, 10, 5, 5, 5, 5]);
    let verdict = watch.observe(&less, &few, MoveEstimate { passes: 0.0, ..CHEAP }).unwrap();
    assert_eq!(verdict, Decision::Reassigned(Cause::Full { device: 0 }));
    let after = watch.assignment().devices.clone();
    assert!(before.iter().zip(&after).all(|(before, after)| *before == 0 || before == after));
    assert!(after.iter().zip(&few).filter(|(device, _)| **device == 0).map(|(_, size)| size.bytes).sum::<u64>() <= 50);
    // Too much for both: an error, and the assignment stays.
    let error = watch.place_unassigned(&[device(10, 0, 0), device(10, 0, 100)], &few).unwrap_err();
    assert!(matches!(error, Error::Full { .. }));
    assert_eq!(watch.assignment().devices, after);
}

#[test]
fn doubled_store_is_reassigned_if_that_pays_off() {
    let devices = [device(100, 0, 9_999), device(100, 0, 9_999)];
    let at_first = sizes([10; 10]);
    let mut watch = watch(&devices, &at_first);
    // All growth is on one device.
    let held = watch.assignment().devices.clone();
    let grown = |to: u64| sizes(held.iter().map(|&device| if device == 0 { to } else { 10 }));
    assert_eq!(watch.observe(&devices, &grown(29), CHEAP).unwrap(), Decision::Keep);
    let brief = MoveEstimate { passes: 0.0, ..CHEAP };
    assert_eq!(watch.observe(&devices, &grown(30), brief).unwrap(), Decision::Keep, "the move does not pay off");
    assert_eq!(
        watch.observe(&devices, &grown(40), CHEAP).unwrap(),
        Decision::Keep,
        "reconsidered when it has doubled again"
    );
    assert_eq!(watch.observe(&devices, &grown(80), CHEAP).unwrap(), Decision::Reassigned(Cause::Resized));
}
