//! Search for an assignment: LPT, then moves and exchanges.

use super::{Error, Resource, Size, Strategy};
use std::cmp::{Ordering, Reverse};

/// Budget of cost comparisons for improvements: below a millisecond for a thousand partitions on 8 devices.
const BUDGET: usize = 30_000;
/// Candidates on either side of the best size that an exchange tries: the best one may not fit.
const NEIGHBOURS: usize = 2;
const NS_PER_SECOND: u128 = 1_000_000_000;

/// Total size of the partitions on a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Load {
    device: usize,
    /// Memories or bytes, depending on the strategy.
    work: u128,
    bytes: u128,
}

/// A cost as an exact fraction. Costs beyond 128 bits, which are unrealistic, compare as equal.
#[derive(Debug, Clone, Copy)]
struct Cost {
    /// 10^9 times the work, including work equivalent to the latency.
    numerator: u128,
    rate: u64,
}

impl Cost {
    fn cmp(self, other: Self) -> Ordering {
        let own = self.numerator.saturating_mul(u128::from(other.rate));
        own.cmp(&other.numerator.saturating_mul(u128::from(self.rate)))
    }

    fn less(self, other: Self) -> bool {
        self.cmp(other) == Ordering::Less
    }
}

/// Work unit and rates of a strategy.
pub(super) struct Rates {
    strategy: Strategy,
    /// By device: work per second, at least 1, and latency in nanoseconds.
    devices: Vec<(u64, u64)>,
}

impl Rates {
    pub(super) fn of(strategy: Strategy, resources: &[Resource]) -> Self {
        let of = |it: &Resource| match strategy {
            Strategy::Balanced => (1, 0),
            Strategy::CapabilityAware => (it.throughput.unwrap_or(0), 0),
            Strategy::MemoryAware => (it.free_bytes, 0),
            Strategy::LatencyOptimized => (it.throughput.unwrap_or(0), it.latency_ns),
        };
        let devices = resources.iter().map(of).map(|(rate, latency)| (rate.max(1), latency));
        Self { strategy, devices: devices.collect() }
    }

    fn work(&self, size: Size) -> u128 {
        u128::from(if self.strategy == Strategy::MemoryAware { size.bytes } else { size.memories })
    }

    fn cost(&self, load: Load) -> Cost {
        let (rate, latency) = self.devices[load.device];
        let waits = if load.work == 0 { 0 } else { u128::from(latency).saturating_mul(u128::from(rate)) };
        Cost { numerator: (load.work * NS_PER_SECOND).saturating_add(waits), rate }
    }

    pub(super) fn units(&self, load: Load) -> f64 {
        let Cost { numerator, rate } = self.cost(load);
        numerator as f64 / NS_PER_SECOND as f64 / rate as f64
    }

    pub(super) fn loads(&self, devices: &[usize], sizes: &[Size]) -> Vec<Load> {
        let mut loads: Vec<_> = (0..self.devices.len()).map(|device| Load { device, work: 0, bytes: 0 }).collect();
        for (&device, &size) in devices.iter().zip(sizes) {
            loads[device] = self.with(loads[device], size);
        }
        loads
    }

    fn with(&self, load: Load, size: Size) -> Load {
        Load { work: load.work + self.work(size), bytes: load.bytes + u128::from(size.bytes), ..load }
    }

    fn without(&self, load: Load, size: Size) -> Load {
        Load { work: load.work - self.work(size), bytes: load.bytes - u128::from(size.bytes), ..load }
    }
}

/// Assigns every partition; at least one device is healthy, or there are no partitions.
pub(super) fn best(rates: &Rates, resources: &[Resource], sizes: &[Size]) -> Result<Vec<usize>, Error> {
    let mut search = Search::new(rates, resources, sizes);
    if !search.largest_first((0..sizes.len()).collect()) {
        search.tightest_first()?;
    }
    search.improve();
    Ok(search.devices)
}

/// Like [`best`], but keeps partitions on healthy devices with enough memory; `None` if the others do not fit then.
pub(super) fn best_with_fixed(
    rates: &Rates,
    resources: &[Resource],
    sizes: &[Size],
    current: &[usize],
) -> Option<Vec<usize>> {
    let mut search = Search::new(rates, resources, sizes);
    let mut homeless = Vec::new();
    for (partition, &size) in sizes.iter().enumerate() {
        let device = current.get(partition).filter(|&device| search.usable.contains(device));
        let load = device.map(|&device| rates.with(search.loads[device], size)).filter(|&load| search.fits(load));
        match load {
            Some(load) => search.place(partition, load),
            None => homeless.push(partition),
        }
    }
    search.largest_first(homeless).then_some(search.devices)
}

struct Search<'a> {
    rates: &'a Rates,
    /// Free bytes by device.
    room: Vec<u128>,
    /// The healthy devices, ascending.
    usable: Vec<usize>,
    sizes: &'a [Size],
    devices: Vec<usize>,
    loads: Vec<Load>,
}

impl<'a> Search<'a> {
    fn new(rates: &'a Rates, resources: &[Resource], sizes: &'a [Size]) -> Self {
        let room = |it: &Resource| if it.healthy { u128::from(it.free_bytes) } else { 0 };
        Self {
            rates,
            room: resources.iter().map(room).collect(),
            usable: (0..resources.len()).filter(|&device| resources[device].healthy).collect(),
            sizes,
            devices: vec![0; sizes.len()],
            loads: rates.loads(&[], &[]),
        }
    }

    fn fits(&self, load: Load) -> bool {
        load.bytes <= self.room[load.device]
    }

    fn place(&mut self, partition: usize, load: Load) {
        self.devices[partition] = load.device;
        self.loads[load.device] = load;
    }

    /// LPT: assigns these partitions in descending work, each to the device with the least resulting cost; `false` if one does not fit.
    fn largest_first(&mut self, partitions: Vec<usize>) -> bool {
        let mut order = partitions;
        order.sort_by_key(|&partition| Reverse(self.rates.work(self.sizes[partition])));
        for partition in order {
            let with = self.usable.iter().map(|&device| self.rates.with(self.loads[device], self.sizes[partition]));
            let fitting = with.filter(|&load| self.fits(load));
            match fitting.min_by(|&one, &other| self.rates.cost(one).cmp(self.rates.cost(other))) {
                Some(load) => self.place(partition, load),
                None => return false,
            }
        }
        true
    }

    /// Best fit decreasing: assigns partitions in descending bytes, each to the fitting device with the least free memory.
    fn tightest_first(&mut self) -> Result<(), Error> {
        self.loads = self.rates.loads(&[], &[]);
        let mut order: Vec<usize> = (0..self.sizes.len()).collect();
        order.sort_by_key(|&partition| Reverse(self.sizes[partition].bytes));
        for partition in order {
            let size = self.sizes[partition];
            let left = |load: &Load| self.room[load.device] - load.bytes;
            let with = self.usable.iter().map(|&device| self.rates.with(self.loads[device], size));
            match with.filter(|&load| self.fits(load)).min_by_key(left) {
                Some(load) => self.place(partition, load),
                None => {
                    let most = self.usable.iter().map(|&device| left(&self.loads[device])).max().unwrap_or(0);
                    // It exceeds the largest free memory, which is a 64-bit value, so the difference fits.
                    let missing_bytes = size.bytes - most as u64;
                    return Err(Error::Full { partition, bytes: size.bytes, missing_bytes });
                }
            }
        }
        Ok(())
    }

    /// Applies the most helpful move or exchange from the device with the maximum cost until none helps or the budget is spent.
    ///
    /// Every step reduces the cost of that device and keeps all others below its old cost, so no assignment repeats.
    fn improve(&mut self) {
        let mut held: Vec<Vec<usize>> = vec![Vec::new(); self.loads.len()];
        let mut order: Vec<usize> = (0..self.sizes.len()).collect();
        order.sort_by_key(|&partition| self.rates.work(self.sizes[partition]));
        order.into_iter().for_each(|partition| held[self.devices[partition]].push(partition));
        let mut budget = BUDGET;
        while let Some(step) = self.next_step(&held, &mut budget) {
            let from = self.devices[step.given];
            let to = step.to.device;
            self.loads[from] = step.from;
            self.loads[to] = step.to;
            for (partition, source, target) in
                std::iter::once((step.given, from, to)).chain(step.taken.map(|taken| (taken, to, from)))
            {
                self.devices[partition] = target;
                held[source].retain(|&other| other != partition);
                let work = self.rates.work(self.sizes[partition]);
                let at = held[target].partition_point(|&other| self.rates.work(self.sizes[other]) < work);
                held[target].insert(at, partition);
            }
        }
    }

    /// Returns the best step; `held` has the partitions of each device by ascending work.
    fn next_step(&self, held: &[Vec<usize>], budget: &mut usize) -> Option<Step> {
        let rates = self.rates;
        // Ties go to the first device; `max_by` returns the last.
        let costs = self.usable.iter().rev().map(|&device| self.loads[device]);
        let dearest = costs.max_by(|&one, &other| rates.cost(one).cmp(rates.cost(other)))?;
        let mut best = None;
        let mut bound = rates.cost(dearest);
        for &other in self.usable.iter().filter(|&&other| other != dearest.device) {
            let other = self.loads[other];
            let surplus = self.surplus(dearest, other);
            for &given in &held[dearest.device] {
                let size = self.sizes[given];
                // Exchange candidates: none, or about the size that equalizes both devices.
                let wanted = rates.work(size).saturating_sub(surplus);
                let partners = &held[other.device];
                let at = partners.partition_point(|&partner| rates.work(self.sizes[partner]) < wanted);
                let near = at.saturating_sub(NEIGHBOURS)..(at + NEIGHBOURS).min(partners.len());
                for taken in std::iter::once(None).chain(partners[near].iter().copied().map(Some)) {
                    *budget = budget.checked_sub(1)?;
                    let (mut from, mut to) = (rates.without(dearest, size), rates.with(other, size));
                    if let Some(taken) = taken {
                        from = rates.with(from, self.sizes[taken]);
                        to = rates.without(to, self.sizes[taken]);
                    }
                    let cost = if rates.cost(from).less(rates.cost(to)) { rates.cost(to) } else { rates.cost(from) };
                    if cost.less(bound) && self.fits(from) && self.fits(to) {
                        bound = cost;
                        best = Some(Step { given, taken, from, to });
                    }
                }
            }
        }
        best
    }

    /// Returns the work that equalizes the costs of both devices when moved.
    fn surplus(&self, one: Load, other: Load) -> u128 {
        let (own, their) = (self.rates.cost(one), self.rates.cost(other));
        let own_scaled = own.numerator.saturating_mul(u128::from(their.rate));
        let their_scaled = their.numerator.saturating_mul(u128::from(own.rate));
        own_scaled.saturating_sub(their_scaled) / (u128::from(own.rate) + u128::from(their.rate)) / NS_PER_SECOND
    }
}

/// Moves one partition from the costliest device to another, and optionally one back.
struct Step {
    given: usize,
    taken: Option<usize>,
    from: Load,
    to: Load,
}
