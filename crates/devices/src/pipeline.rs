//! Pattern pipeline: stages on different devices, with bounded queues between them.
//!
//! Each device has one or more stages; a stage has several devices if there are more devices than stages. A device executes the last of its
//! stages that has an item and space for the result, so that a pipeline drains before it fills, and never blocks itself. A device that has
//! nothing to do in its own stages executes another one: stages cannot be divided, and their costs are estimates, so no assignment of whole
//! stages keeps all devices busy.

use crate::{ComputeDevice, Error};
use engram_kernels::partitioner::{Resource, Size, Strategy, assign};
use engram_kernels::profiler::Kind;
use parking_lot::{Condvar, Mutex};
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

/// Computation of a stage: a pure function of an item.
type Compute<'a, T> = Box<dyn Fn(&T) -> Result<T, String> + Sync + 'a>;

/// One stage of a pipeline.
pub struct Stage<'a, T> {
    name: &'static str,
    cost: u64,
    compute: Compute<'a, T>,
}

impl<'a, T> Stage<'a, T> {
    /// Creates a stage with its relative cost per item.
    pub fn new<E: ToString>(name: &'static str, cost: u64, compute: impl Fn(&T) -> Result<T, E> + Sync + 'a) -> Self {
        Self { name, cost, compute: Box::new(move |item| compute(item).map_err(|error| error.to_string())) }
    }

    pub(crate) const fn name(&self) -> &'static str {
        self.name
    }

    pub(crate) const fn cost(&self) -> u64 {
        self.cost
    }

    pub(crate) fn compute(&self, item: &T) -> Result<T, String> {
        (self.compute)(item)
    }
}

/// How a pipeline is run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PipelineRun {
    /// Name of the pipeline, for errors.
    pub name: &'static str,
    /// Items of a queue between two stages, those that are computed for it included; at least 1.
    pub capacity: usize,
    /// How stages are assigned to devices.
    pub strategy: Strategy,
    /// Time limit.
    pub limit: Duration,
}

/// Returns the stages of each device, ascending. Every stage has a device; every healthy device has a stage.
///
/// # Errors
/// No healthy device.
pub fn stages_of_devices(costs: &[u64], strategy: Strategy, resources: &[Resource]) -> Result<Vec<Vec<usize>>, Error> {
    let sizes: Vec<Size> = costs.iter().map(|&cost| Size { memories: cost.max(1), bytes: 0 }).collect();
    let assignment = assign(strategy, resources, &sizes)?;
    let mut stages = vec![Vec::new(); resources.len()];
    assignment.devices.iter().enumerate().for_each(|(stage, &device)| stages[device].push(stage));
    let mut devices: Vec<u64> = vec![1; costs.len()];
    for device in 0..resources.len() {
        if resources[device].healthy && stages[device].is_empty() && !costs.is_empty() {
            // The stage with the highest cost per device; the first on ties.
            let cost = |&stage: &usize| (sizes[stage].memories / devices[stage], std::cmp::Reverse(stage));
            let busiest = (0..costs.len()).max_by_key(cost).expect("there is a stage");
            stages[device].push(busiest);
            devices[busiest] += 1;
        }
    }
    Ok(stages)
}

struct State<T> {
    /// Items that have not entered the first stage.
    inputs: std::vec::IntoIter<(usize, T)>,
    /// Items that wait for each stage.
    queues: Vec<VecDeque<(usize, T)>>,
    /// Items that each stage computes now.
    computing: Vec<usize>,
    results: Vec<Option<T>>,
    missing: usize,
    stages: Vec<Vec<usize>>,
    error: Option<Error>,
}

struct Pipeline<'a, T> {
    devices: &'a [ComputeDevice],
    stages: &'a [Stage<'a, T>],
    run: &'a PipelineRun,
    deadline: Instant,
    state: Mutex<State<T>>,
    changed: Condvar,
}

/// Sends items through the stages; returns their results in the order of the items.
///
/// # Errors
/// A stage fails or panics, all devices are removed, or the time limit passes.
pub fn run_pipeline<T: Send>(
    devices: &[ComputeDevice],
    stages: &[Stage<'_, T>],
    items: Vec<T>,
    run: &PipelineRun,
) -> Result<Vec<T>, Error> {
    if run.capacity == 0 {
        return Err(Error::argument("capacity", 0, "at least 1 item"));
    }
    if stages.is_empty() {
        return Ok(items);
    }
    let missing = items.len();
    let numbered: Vec<(usize, T)> = items.into_iter().enumerate().collect();
    let state = State {
        inputs: numbered.into_iter(),
        queues: stages.iter().map(|_| VecDeque::new()).collect(),
        computing: vec![0; stages.len()],
        results: (0..missing).map(|_| None).collect(),
        missing,
        stages: vec![Vec::new(); devices.len()],
        error: None,
    };
    let deadline = Instant::now() + run.limit;
    let pipeline = Pipeline { devices, stages, run, deadline, state: Mutex::new(state), changed: Condvar::new() };
    pipeline.place(&mut pipeline.state.lock())?;
    std::thread::scope(|scope| {
        for device in 1..devices.len() {
            let pipeline = &pipeline;
            scope.spawn(move || pipeline.work(device));
        }
        pipeline.work(0);
    });
    let state = pipeline.state.into_inner();
    if let Some(error) = state.error {
        return Err(error);
    }
    let results: Option<Vec<T>> = state.results.into_iter().collect();
    results.ok_or(Error::NoDevice { what: run.name, devices: devices.len() })
}

impl<T: Send> Pipeline<'_, T> {
    /// Assigns the stages to the devices that are left.
    fn place(&self, state: &mut State<T>) -> Result<(), Error> {
        let resources: Vec<Resource> = self.devices.iter().map(ComputeDevice::resource).collect();
        if !resources.iter().any(|resource| resource.healthy) {
            return Err(Error::NoDevice { what: self.run.name, devices: self.devices.len() });
        }
        let costs: Vec<u64> = self.stages.iter().map(|stage| stage.cost).collect();
        state.stages = stages_of_devices(&costs, self.run.strategy, &resources)?;
        Ok(())
    }

    /// Computes items on one device until all have a result, the device is removed, or the run has failed.
    fn work(&self, device: usize) {
        while let Some((stage, number, item)) = self.next(device) {
            let Stage { name, compute, .. } = &self.stages[stage];
            let result = catch_unwind(AssertUnwindSafe(|| self.devices[device].execute(name, || compute(&item))));
            let mut state = self.state.lock();
            state.computing[stage] -= 1;
            let ends = match result {
                Ok(Some(Ok(result))) => {
                    state.deliver(stage, number, result);
                    false
                }
                Ok(Some(Err(message))) => self.kernel_failed(&mut state, name, device, message),
                Ok(None) => {
                    state.queues[stage].push_front((number, item));
                    if let Err(error) = self.place(&mut state) {
                        state.error.get_or_insert(error);
                    }
                    true
                }
                Err(_) => self.kernel_failed(&mut state, name, device, "the stage panicked".to_owned()),
            };
            drop(state);
            self.changed.notify_all();
            if ends {
                return;
            }
        }
        self.changed.notify_all();
    }

    fn kernel_failed(&self, state: &mut State<T>, what: &'static str, device: usize, message: String) -> bool {
        let device = self.devices[device].name().to_owned();
        state.error.get_or_insert(Error::Kernel { what, device, message });
        true
    }

    /// Waits for an item that the device can compute; `None` ends the device.
    fn next(&self, device: usize) -> Option<(usize, usize, T)> {
        let mut state = self.state.lock();
        loop {
            if state.error.is_some() || state.missing == 0 {
                return None;
            }
            if Instant::now() >= self.deadline {
                state.error = Some(Error::Deadline { what: self.run.name, limit: self.run.limit });
                return None;
            }
            if let Some(found) = state.take(device, self.run.capacity) {
                return Some(found);
            }
            self.devices[device].recorder().span(Kind::Wait, "queue", || {
                self.changed.wait_until(&mut state, self.deadline);
            });
        }
    }
}

impl<T> State<T> {
    /// Takes an item for the last stage of the device that can compute one, or for the last stage of all.
    fn take(&mut self, device: usize, capacity: usize) -> Option<(usize, usize, T)> {
        let own = self.stages[device].iter().rev().copied();
        let order: Vec<usize> = own.chain((0..self.queues.len()).rev()).collect();
        order.into_iter().find_map(|stage| self.take_for(stage, capacity))
    }

    /// Takes an item for a stage, if there is one and space for its result.
    fn take_for(&mut self, stage: usize, capacity: usize) -> Option<(usize, usize, T)> {
        let next = self.queues.get(stage + 1);
        if next.is_some_and(|queue| queue.len() + self.computing[stage] >= capacity) {
            return None;
        }
        let returned = self.queues[stage].pop_front();
        let (number, item) = returned.or_else(|| if stage == 0 { self.inputs.next() } else { None })?;
        self.computing[stage] += 1;
        Some((stage, number, item))
    }

    fn deliver(&mut self, stage: usize, number: usize, result: T) {
        if let Some(queue) = self.queues.get_mut(stage + 1) {
            queue.push_back((number, result));
        } else {
            self.results[number] = Some(result);
            self.missing -= 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn devices(count: usize) -> Vec<ComputeDevice> {
        (0..count).map(|number| ComputeDevice::new(format!("logical {number}"))).collect()
    }

    fn run(capacity: usize) -> PipelineRun {
        PipelineRun { name: "test", capacity, strategy: Strategy::Balanced, limit: Duration::from_secs(60) }
    }

    #[test]
    fn stages_and_devices_are_matched_in_every_number() {
        let resources = |count| devices(count).iter().map(ComputeDevice::resource).collect::<Vec<_>>();
        let place = |count| stages_of_devices(&[10, 1, 2], Strategy::Balanced, &resources(count)).unwrap();
        assert_eq!(place(1), [vec![0, 1, 2]]);
        assert_eq!(place(2), [vec![0], vec![1, 2]]);
        let mut five = place(5);
        five.sort();
        assert_eq!(five, [[0], [0], [0], [1], [2]], "the costliest stage has the devices that are left");
        assert!(stages_of_devices(&[1], Strategy::Balanced, &[]).is_err());
    }

    #[test]
    fn queues_never_exceed_their_capacity() {
        for capacity in [1, 3] {
            let between = Mutex::new((0_usize, 0_usize));
            let first = Stage::new("first", 1, |item: &u64| {
                let mut between = between.lock();
                between.0 += 1;
                between.1 = between.1.max(between.0);
                Ok::<_, String>(item + 1)
            });
            let second = Stage::new("second", 1, |item: &u64| {
                between.lock().0 -= 1;
                (0..50).for_each(|_| std::thread::yield_now());
                Ok::<_, String>(item * 2)
            });
            let results = run_pipeline(&devices(2), &[first, second], (0..200).collect(), &run(capacity)).unwrap();
            assert_eq!(results, (0..200).map(|item| (item + 1) * 2).collect::<Vec<_>>());
            // One more: the item that the second stage has taken and not counted yet.
            let most = between.lock().1;
            assert!(most <= capacity + 1, "{most} items between the stages");
        }
    }

    #[test]
    fn device_without_an_item_for_its_own_stage_executes_another_one() {
        // Returns when two devices are in the first stage at the same time, for every pair of items.
        let arrivals = (Mutex::new(0_u64), Condvar::new());
        let slow = Stage::new("slow", 1, |item: &u64| {
            let mut arrived = arrivals.0.lock();
            *arrived += 1;
            arrivals.1.notify_all();
            let pair = (*arrived).next_multiple_of(2);
            let waited = arrivals.1.wait_while_for(&mut arrived, |it| *it < pair, Duration::from_secs(20));
            if waited.timed_out() { Err("the other device is idle".to_owned()) } else { Ok(item + 1) }
        });
        let fast = Stage::new("fast", 1, |item: &u64| Ok::<_, String>(item * 2));
        let results = run_pipeline(&devices(2), &[slow, fast], (0..10).collect(), &run(4)).unwrap();
        assert_eq!(results, (0..10).map(|item| (item + 1) * 2).collect::<Vec<_>>());
    }

    #[test]
    fn errors_name_stage_and_device() {
        let failing = Stage::new("parse", 1, |item: &u64| if *item == 7 { Err("item 7 is odd") } else { Ok(*item) });
        let error = run_pipeline(&devices(1), &[failing], (0..100).collect(), &run(2)).unwrap_err();
        assert_eq!(error.to_string(), "failed to compute parse on device logical 0: item 7 is odd");
        let panics = Stage::new("parse", 1, |item: &u64| Ok::<_, String>(7 / (7 - item)));
        let error = run_pipeline(&devices(3), &[panics], (0..100).collect(), &run(2)).unwrap_err();
        assert!(error.to_string().ends_with("the stage panicked"), "{error}");
        let slow = PipelineRun { limit: Duration::ZERO, ..run(1) };
        let same = Stage::new("same", 1, |item: &u64| Ok::<_, String>(*item));
        assert!(matches!(run_pipeline(&devices(1), &[same], vec![1], &slow), Err(Error::Deadline { .. })));
        assert!(run_pipeline::<u64>(&devices(1), &[], vec![1], &run(0)).is_err());
    }
}
