//! Which device computes which block: a state machine without I/O.

use crate::Error;
use engram_kernels::partitioner::{Resource, Size, Strategy, assign};
use std::collections::VecDeque;
use std::ops::Range;

/// Most blocks of a work before the last ones are divided: an assignment takes well under 5 ms.
const MAX_BLOCKS: usize = 1_024;
/// One of so many blocks, the last ones, is divided into so many parts: devices then end within a part of a block of each other, and most
/// blocks keep the size at which a kernel is fast.
const DIVIDED: usize = 4;

/// Work that may be split at any multiple of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Work {
    /// Name of the kernel.
    pub kernel: &'static str,
    /// Number of items: samples, rows, leaves.
    pub items: usize,
    /// Most items that a device computes at a time, at least 1. The last blocks are smaller.
    pub block: usize,
    /// Memory per item on a device.
    pub bytes_per_item: u64,
}

/// What a device does next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Next {
    /// Computes these items.
    Block(Range<usize>),
    /// Waits: all blocks are assigned, but one may return from a device that is removed.
    Wait,
    /// Ends: every block is complete.
    Complete,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum BlockState {
    Waiting,
    Running(usize),
    Complete,
}

/// The blocks of some work and the devices that compute them.
///
/// The partitioner assigns blocks to queues; a device without work takes the last block of the queue that would end last, so that speeds
/// that are unknown or wrong cost at most one small block.
#[derive(Debug, Clone)]
pub struct Distribution {
    work: Work,
    /// First item of each block.
    starts: Vec<usize>,
    strategy: Strategy,
    resources: Vec<Resource>,
    queues: Vec<VecDeque<usize>>,
    states: Vec<BlockState>,
    complete: usize,
    reassigned: usize,
}

impl Distribution {
    /// Assigns the blocks to the healthy devices.
    ///
    /// # Errors
    /// A block of 0 items or more than 1,024 blocks; no healthy device; too little memory.
    pub fn new(work: Work, strategy: Strategy, resources: &[Resource]) -> Result<Self, Error> {
        if work.block == 0 {
            return Err(Error::argument("block", 0, "at least 1 item"));
        }
        let blocks = work.items.div_ceil(work.block);
        if blocks > MAX_BLOCKS {
            return Err(Error::argument("block", work.block, "blocks of items/1,024 or more"));
        }
        let starts = starts(work, blocks);
        let queues = vec![VecDeque::new(); resources.len()];
        let states = vec![BlockState::Waiting; starts.len()];
        let resources = resources.to_vec();
        let mut own = Self { work, starts, strategy, resources, queues, states, complete: 0, reassigned: 0 };
        own.assign((0..own.blocks()).collect())?;
        Ok(own)
    }

    /// Returns the work.
    pub const fn work(&self) -> Work {
        self.work
    }

    /// Returns the number of blocks.
    pub fn blocks(&self) -> usize {
        self.states.len()
    }

    /// Returns the number of blocks that removed devices have left to others.
    pub const fn reassigned(&self) -> usize {
        self.reassigned
    }

    /// Returns the items that are assigned to each device and not started.
    pub fn assigned_items(&self) -> Vec<usize> {
        let items = |queue: &VecDeque<usize>| queue.iter().map(|&block| self.items(block).len()).sum();
        self.queues.iter().map(items).collect()
    }

    /// Returns the items of a block.
    pub fn items(&self, block: usize) -> Range<usize> {
        self.starts[block]..self.starts.get(block + 1).copied().unwrap_or(self.work.items)
    }

    /// Returns the block that contains an item.
    pub fn block_of(&self, item: usize) -> usize {
        self.starts.partition_point(|&start| start <= item) - 1
    }

    /// Starts the next block of a healthy device.
    pub fn next(&mut self, device: usize) -> Next {
        if self.complete == self.states.len() {
            return Next::Complete;
        }
        let own = self.queues[device].pop_front();
        let block = own.or_else(|| {
            let last = (0..self.queues.len()).filter(|&other| !self.queues[other].is_empty());
            let busiest = last.max_by(|&one, &other| self.seconds_left(one).total_cmp(&self.seconds_left(other)))?;
            // A device takes only what fits by itself: blocks are released as they end.
            let fits = self.resources[device].free_bytes >= self.bytes(*self.queues[busiest].back()?);
            if fits { self.queues[busiest].pop_back() } else { None }
        });
        let Some(block) = block else { return Next::Wait };
        self.states[block] = BlockState::Running(device);
        Next::Block(self.items(block))
    }

    /// Completes the block that starts at item `begin`. Returns whether it counts: the first time, from the device that computes it.
    pub fn finish(&mut self, device: usize, begin: usize) -> bool {
        let block = self.block_of(begin);
        let counts = self.states[block] == BlockState::Running(device);
        if counts {
            self.states[block] = BlockState::Complete;
            self.complete += 1;
        }
        counts
    }

    /// Removes a device and assigns its blocks to the others.
    ///
    /// # Errors
    /// No healthy device is left, or the others have too little memory.
    pub fn remove(&mut self, device: usize) -> Result<(), Error> {
        self.resources[device].healthy = false;
        let running = |&block: &usize| self.states[block] == BlockState::Running(device);
        let mut blocks: Vec<usize> = (0..self.states.len()).filter(running).collect();
        blocks.extend(std::mem::take(&mut self.queues[device]));
        blocks.iter().for_each(|&block| self.states[block] = BlockState::Waiting);
        self.reassigned += blocks.len();
        self.assign(blocks)
    }

    fn assign(&mut self, blocks: Vec<usize>) -> Result<(), Error> {
        let size = |&block: &usize| Size { memories: self.items(block).len() as u64, bytes: self.bytes(block) };
        let sizes: Vec<Size> = blocks.iter().map(size).collect();
        let devices = assign(self.strategy, &self.resources, &sizes)?.devices;
        blocks.into_iter().zip(devices).for_each(|(block, device)| self.queues[device].push_back(block));
        Ok(())
    }

    fn bytes(&self, block: usize) -> u64 {
        (self.items(block).len() as u64).saturating_mul(self.work.bytes_per_item)
    }

    fn seconds_left(&self, device: usize) -> f64 {
        let speed = self.resources[device].throughput.filter(|&it| it > 0).unwrap_or(1);
        let items: usize = self.queues[device].iter().map(|&block| self.items(block).len()).sum();
        items as f64 / speed as f64
    }
}

/// Returns the first item of every block: whole ones, then the parts of the last ones.
fn starts(work: Work, blocks: usize) -> Vec<usize> {
    let whole = blocks - blocks / DIVIDED;
    let part = work.block.div_ceil(DIVIDED);
    let parts = (whole * work.block..work.items).step_by(part);
    (0..whole).map(|block| block * work.block).chain(parts).collect()
}

/// Returns how many of `items` consecutive items each device has, in the order of the devices; for work that must not be split further.
///
/// # Errors
/// No healthy device; too little memory.
pub fn shares(
    items: usize,
    bytes_per_item: u64,
    strategy: Strategy,
    resources: &[Resource],
) -> Result<Vec<usize>, Error> {
    let block = items.div_ceil(MAX_BLOCKS).max(1);
    let work = Work { kernel: "shares", items, block, bytes_per_item };
    Ok(Distribution::new(work, strategy, resources)?.assigned_items())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::{prop_assert, proptest};

    fn resource(speed: Option<u64>) -> Resource {
        Resource { throughput: speed, free_bytes: u64::MAX, latency_ns: 0, healthy: true }
    }

    fn work(items: usize, block: usize) -> Work {
        Work { kernel: "test", items, block, bytes_per_item: 1 }
    }

    #[test]
    fn shares_follow_speeds_and_memory() {
        let fast_and_slow = [resource(Some(300)), resource(Some(100))];
        assert_eq!(shares(400, 1, Strategy::CapabilityAware, &fast_and_slow).unwrap(), [300, 100]);
        assert_eq!(shares(400, 1, Strategy::Balanced, &fast_and_slow).unwrap(), [200, 200]);
        // Without measurements: equal shares, not a division by zero.
        let unknown = [resource(Some(0)), resource(None), resource(None)];
        assert_eq!(shares(3, 1, Strategy::CapabilityAware, &unknown).unwrap(), [1, 1, 1]);
        let small = [Resource { free_bytes: 100, ..resource(Some(300)) }, resource(Some(100))];
        assert_eq!(shares(400, 1, Strategy::CapabilityAware, &small).unwrap(), [100, 300]);
        let refused = shares(400, 1, Strategy::Balanced, &[Resource { free_bytes: 100, ..resource(None) }]);
        assert!(refused.unwrap_err().to_string().contains("more bytes are needed"));
    }

    #[test]
    fn arguments_that_cannot_be_used_are_refused() {
        let refused = Distribution::new(work(10, 0), Strategy::Balanced, &[resource(None)]).unwrap_err();
        assert_eq!(refused.to_string(), "block: 0 is not allowed; allowed: at least 1 item");
        assert!(Distribution::new(work(5_000, 1), Strategy::Balanced, &[resource(None)]).is_err());
        let removed = Resource { healthy: false, ..resource(None) };
        assert!(Distribution::new(work(5, 1), Strategy::Balanced, &[removed]).is_err());
        let nothing = Distribution::new(work(0, 1), Strategy::Balanced, &[resource(None)]).unwrap().next(0);
        assert_eq!(nothing, Next::Complete);
    }

    /// Runs the blocks in virtual time; returns the busy time of each device.
    fn busy(work: Work, declared: &[Option<u64>], actual: &[f64]) -> Vec<f64> {
        let resources: Vec<Resource> = declared.iter().copied().map(resource).collect();
        let mut distribution = Distribution::new(work, Strategy::CapabilityAware, &resources).unwrap();
        let mut busy = vec![0.0_f64; actual.len()];
        let mut idle = vec![false; actual.len()];
        while let Some(device) = (0..busy.len()).filter(|&it| !idle[it]).min_by(|&a, &b| busy[a].total_cmp(&busy[b])) {
            match distribution.next(device) {
                Next::Block(items) => {
                    busy[device] += items.len() as f64 / actual[device];
                    assert!(distribution.finish(device, items.start));
                }
                Next::Wait | Next::Complete => idle[device] = true,
            }
        }
        busy
    }

    #[test]
    fn devices_of_speeds_that_differ_from_the_measured_ones_end_together() {
        for percent in 0..=40 {
            let actual = [1.0, 1.0 - f64::from(percent) / 100.0];
            let busy = busy(work(64, 4), &[Some(100); 2], &actual);
            let mean = (busy[0] + busy[1]) / 2.0;
            let deviation = busy[0].max(busy[1]) / mean - 1.0;
            assert!(deviation < 0.03, "second device {percent} % slower: {busy:?}");
        }
    }

    #[test]
    fn blocks_cover_the_items_in_order_and_only_the_last_are_divided() {
        let distribution = |items, block| {
            let it = Distribution::new(work(items, block), Strategy::Balanced, &[resource(None)]).unwrap();
            (0..it.blocks()).map(|block| it.items(block)).collect::<Vec<_>>()
        };
        assert_eq!(distribution(16, 4), [0..4, 4..8, 8..12, 12..13, 13..14, 14..15, 15..16]);
        assert_eq!(distribution(10, 4), [0..4, 4..8, 8..10], "too few blocks to divide one");
        assert_eq!(distribution(7, 1), (0..7).map(|item| item..item + 1).collect::<Vec<_>>());
        for (items, block) in [(1_000, 7), (999, 1_000), (5_121, 6)] {
            let blocks = distribution(items, block);
            assert!(blocks.iter().all(|it| !it.is_empty() && it.len() <= block), "{blocks:?}");
            assert_eq!(blocks.into_iter().flatten().collect::<Vec<_>>(), (0..items).collect::<Vec<_>>());
        }
    }

    #[test]
    fn device_without_work_takes_over_from_the_busiest() {
        let mut distribution = Distribution::new(work(8, 1), Strategy::Balanced, &[resource(None); 2]).unwrap();
        let mut of_first = 0;
        while let Next::Block(items) = distribution.next(0) {
            assert!(distribution.finish(0, items.start));
            of_first += items.len();
        }
        assert_eq!(of_first, 8, "the second device never asked for work");
    }

    proptest! {
        /// Whatever is removed at any time, as long as one device is left, every block completes exactly once.
        #[test]
        fn every_block_completes_once(
            items in 0_usize..60,
            block in 1_usize..9,
            speeds in proptest::collection::vec(proptest::option::of(0_u64..9), 1..5),
            choices in proptest::collection::vec((0_usize..5, 0_u8..10), 0..400),
        ) {
            let resources: Vec<Resource> = speeds.into_iter().map(resource).collect();
            let devices = resources.len();
            let mut distribution = Distribution::new(work(items, block), Strategy::LatencyOptimized, &resources).unwrap();
            let mut running: Vec<Option<Range<usize>>> = vec![None; devices];
            let mut removed = vec![false; devices];
            let mut counted = vec![0; items];
            let to_the_end = (0..2 * items + 2).flat_map(|_| (0..devices).map(|device| (device, 9)));
            for (device, choice) in choices.into_iter().chain(to_the_end) {
                let device = device % devices;
                if removed[device] {
                    continue;
                }
                let left = removed.iter().filter(|removed| !**removed).count();
                match running[device].take() {
                    _ if choice == 0 && left > 1 => {
                        distribution.remove(device).unwrap();
                        removed[device] = true;
                    }
                    Some(range) => {
                        prop_assert!(distribution.finish(device, range.start));
                        prop_assert!(!distribution.finish(device, range.start), "counted twice");
                        counted[range].iter_mut().for_each(|times| *times += 1);
                    }
                    None => if let Next::Block(range) = distribution.next(device) {
                        running[device] = Some(range);
                    }
                }
            }
            prop_assert!(counted.iter().all(|&times| times == 1), "{counted:?}");
        }
    }
}
