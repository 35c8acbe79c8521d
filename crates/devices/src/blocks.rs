//! Patterns batch and rows: independent blocks of items.

use crate::distribution::{Distribution, Next};
use crate::{ComputeDevice, Error};
use engram_kernels::partitioner;
use engram_kernels::profiler::Kind;
use parking_lot::{Condvar, Mutex, MutexGuard};
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

/// What a device has contributed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Load {
    /// Items whose results count.
    pub items: usize,
    /// Memory of these items, as planned.
    pub bytes: u64,
    /// Time in kernels, lost ones included.
    pub busy: Duration,
}

/// Results of all blocks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BlockResults<R> {
    /// One per block, in the order of the items.
    pub results: Vec<R>,
    /// By device.
    pub loads: Vec<Load>,
    /// Blocks that removed devices have left to others.
    pub reassigned: usize,
}

struct State<R> {
    distribution: Distribution,
    results: Vec<Option<R>>,
    loads: Vec<Load>,
    error: Option<Error>,
}

struct Shared<R> {
    state: Mutex<State<R>>,
    changed: Condvar,
    what: &'static str,
    limit: Duration,
    deadline: Instant,
}

/// Pattern batch: computes every block of the work on the devices, each on a thread of its own.
///
/// # Errors
/// A kernel fails or panics, all devices are removed, or the time limit passes.
pub fn run_blocks<R: Send, E: ToString>(
    devices: &[ComputeDevice],
    distribution: Distribution,
    limit: Duration,
    kernel: impl Fn(Range<usize>) -> Result<R, E> + Sync,
) -> Result<BlockResults<R>, Error> {
    run_blocks_on(devices, distribution, limit, |_, items| kernel(items))
}

/// [`run_blocks`] with a kernel that uses the device it runs on.
///
/// # Errors
/// As [`run_blocks`].
pub fn run_blocks_on<R: Send, E: ToString>(
    devices: &[ComputeDevice],
    distribution: Distribution,
    limit: Duration,
    kernel: impl Fn(&ComputeDevice, Range<usize>) -> Result<R, E> + Sync,
) -> Result<BlockResults<R>, Error> {
    let what = distribution.work().kernel;
    let results = (0..distribution.blocks()).map(|_| None).collect();
    let state = State { distribution, results, loads: vec![Load::default(); devices.len()], error: None };
    let deadline = Instant::now() + limit;
    let shared = Shared { state: Mutex::new(state), changed: Condvar::new(), what, limit, deadline };
    std::thread::scope(|scope| {
        for (index, device) in devices.iter().enumerate().skip(1) {
            let (shared, kernel) = (&shared, &kernel);
            scope.spawn(move || shared.work(device, index, kernel));
        }
        if let Some(first) = devices.first() {
            shared.work(first, 0, &kernel);
        }
    });
    let State { distribution, results, loads, error } = shared.state.into_inner();
    if let Some(error) = error {
        return Err(error);
    }
    let results: Option<Vec<R>> = results.into_iter().collect();
    let results = results.ok_or(Error::NoDevice { what, devices: devices.len() })?;
    Ok(BlockResults { results, loads, reassigned: distribution.reassigned() })
}

/// Pattern rows: computes a result of `width` values per item. The kernel writes all values of its items.
///
/// # Errors
/// As [`run_blocks`].
pub fn run_rows<T: Copy + Default + Send, E: ToString>(
    devices: &[ComputeDevice],
    distribution: Distribution,
    limit: Duration,
    width: usize,
    kernel: impl Fn(Range<usize>, &mut [T]) -> Result<(), E> + Sync,
) -> Result<(Vec<T>, BlockResults<()>), Error> {
    run_rows_on(devices, distribution, limit, width, |_, items, out| kernel(items, out))
}

/// [`run_rows`] with a kernel that uses the device it runs on.
pub(crate) fn run_rows_on<T: Copy + Default + Send, E: ToString>(
    devices: &[ComputeDevice],
    distribution: Distribution,
    limit: Duration,
    width: usize,
    kernel: impl Fn(&ComputeDevice, Range<usize>, &mut [T]) -> Result<(), E> + Sync,
) -> Result<(Vec<T>, BlockResults<()>), Error> {
    let work = distribution.work();
    let mut values = vec![T::default(); work.items * width];
    let results = {
        let blocks: Vec<Range<usize>> = (0..distribution.blocks()).map(|block| distribution.items(block)).collect();
        let mut rest = &mut values[..];
        // Only the device that computes a block locks it.
        let mut parts: Vec<Mutex<&mut [T]>> = Vec::with_capacity(blocks.len());
        for items in &blocks {
            let (part, after) = std::mem::take(&mut rest).split_at_mut(items.len() * width);
            parts.push(Mutex::new(part));
            rest = after;
        }
        run_blocks_on(devices, distribution, limit, |device, items| {
            let block = blocks.partition_point(|it| it.start < items.start);
            kernel(device, items, &mut parts[block].lock())
        })?
    };
    Ok((values, results))
}

impl<R: Send> Shared<R> {
    /// Computes blocks on one device until all are complete, the device is removed, or the run has failed.
    fn work<E: ToString>(
        &self,
        device: &ComputeDevice,
        index: usize,
        kernel: &impl Fn(&ComputeDevice, Range<usize>) -> Result<R, E>,
    ) {
        while let Some(items) = self.next(device, index) {
            let begin = items.start;
            let count = items.len();
            let started = Instant::now();
            let result = catch_unwind(AssertUnwindSafe(|| device.execute(self.what, || kernel(device, items))));
            let mut state = self.state.lock();
            state.loads[index].busy += started.elapsed();
            match result {
                Ok(Some(Ok(result))) => {
                    if state.distribution.finish(index, begin) {
                        let block = state.distribution.block_of(begin);
                        state.results[block] = Some(result);
                        state.loads[index].items += count;
                        state.loads[index].bytes += count as u64 * state.distribution.work().bytes_per_item;
                    }
                }
                Ok(Some(Err(error))) => return self.fail(state, self.kernel_error(device, error.to_string())),
                Ok(None) => {
                    if let Err(error) = state.distribution.remove(index) {
                        let error = self.removal_error(error, state.loads.len());
                        return self.fail(state, error);
                    }
                    self.changed.notify_all();
                    return;
                }
                Err(_) => return self.fail(state, self.kernel_error(device, "the kernel panicked".to_owned())),
            }
        }
        self.changed.notify_all();
    }

    /// Waits for the next block; `None` ends the device.
    fn next(&self, device: &ComputeDevice, index: usize) -> Option<Range<usize>> {
        let mut state = self.state.lock();
        loop {
            if state.error.is_some() {
                return None;
            }
            if Instant::now() >= self.deadline {
                let (what, limit) = (self.what, self.limit);
                self.fail(state, Error::Deadline { what, limit });
                return None;
            }
            match state.distribution.next(index) {
                Next::Block(items) => return Some(items),
                Next::Complete => return None,
                Next::Wait => device.recorder().span(Kind::Wait, "other devices", || {
                    self.changed.wait_until(&mut state, self.deadline);
                }),
            }
        }
    }

    fn fail(&self, mut state: MutexGuard<'_, State<R>>, error: Error) {
        state.error.get_or_insert(error);
        drop(state);
        self.changed.notify_all();
    }

    fn kernel_error(&self, device: &ComputeDevice, message: String) -> Error {
        Error::Kernel { what: self.what, device: device.name().to_owned(), message }
    }

    /// Names the computation when the last device is removed.
    fn removal_error(&self, error: Error, devices: usize) -> Error {
        match error {
            Error::Assignment(partitioner::Error::NoDevice { .. }) => Error::NoDevice { what: self.what, devices },
            error => error,
        }
    }
}
