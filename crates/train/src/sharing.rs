//! Rows of a batch for each member of a generation, in rank order: equal at first, then by measured speed.
//!
//! The first rank plans and sends its plan with the sums of a step; all members use it from the next step on. So all have the same plan, whatever
//! their processors compute, and it ends with the generation.

use std::ops::Range;

use crate::balance::{Capacity, Limits, plan, replan};
use crate::throughput::TimeObserver;

/// Row counts of the members, in rank order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shares(Vec<usize>);

impl Shares {
    /// Equal parts of a batch.
    pub fn even(batch: usize, members: usize) -> Self {
        let bound = |rank: usize| batch * rank / members;
        Self((0..members).map(|rank| bound(rank + 1) - bound(rank)).collect())
    }

    /// Parts that another member planned; `None` unless they are a partition of the batch into parts of so many members.
    pub fn of(sizes: &[u32], batch: usize, members: usize) -> Option<Self> {
        let sizes: Vec<usize> = sizes.iter().map(|size| *size as usize).collect();
        (sizes.len() == members && sizes.iter().sum::<usize>() == batch).then_some(Self(sizes))
    }

    /// Rows of a rank.
    ///
    /// # Panics
    /// There is no such rank.
    pub fn rows(&self, rank: usize) -> Range<usize> {
        let start = self.0[..rank].iter().sum();
        start..start + self.0[rank]
    }

    /// Row counts in rank order.
    pub fn sizes(&self) -> &[usize] {
        &self.0
    }
}

/// When and how far parts are adjusted.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Balance {
    /// Steps between two adjustments.
    pub every: u64,
    /// Largest part divided by the smallest.
    pub max_ratio: f64,
}

/// The planner of the first rank.
#[derive(Debug)]
pub struct Planner {
    settings: Balance,
    observers: Vec<TimeObserver>,
    steps: u64,
    shares: Shares,
}

impl Planner {
    /// Starts with equal parts.
    pub fn new(settings: Balance, batch: usize, members: usize) -> Self {
        let observers = vec![TimeObserver::new(); members];
        Self { settings, observers, steps: 0, shares: Shares::even(batch, members) }
    }

    /// Records rows and seconds of every member in a step, in rank order, without communication.
    pub fn observe(&mut self, times: &[(usize, f64)]) {
        for (observer, (rows, seconds)) in self.observers.iter_mut().zip(times) {
            observer.observe(*rows, *seconds);
        }
        self.steps += 1;
        if self.steps.is_multiple_of(self.settings.every) {
            self.adjust();
        }
    }

    fn adjust(&mut self) {
        let batch: usize = self.shares.0.iter().sum();
        let capacity = |observer: &TimeObserver| Some(Capacity { time: observer.model()?, max_samples: batch });
        let Some(members) = self.observers.iter().map(capacity).collect::<Option<Vec<_>>>() else { return };
        let limits = Limits { max_ratio: self.settings.max_ratio, granule: 1 };
        // A batch that is smaller than the group has no plan with a bounded ratio: the parts stay.
        if let Ok(Some(sizes)) = replan(&self.shares.0, &members, limits) {
            self.shares = Shares(sizes);
        } else if self.exceeds_ratio()
            && let Ok(sizes) = plan(batch, &members, limits)
        {
            self.shares = Shares(sizes);
        }
    }

    fn exceeds_ratio(&self) -> bool {
        let (least, most) = (self.shares.0.iter().min(), self.shares.0.iter().max());
        least.zip(most).is_some_and(|(least, most)| *most as f64 > self.settings.max_ratio * (*least as f64 + 1.0))
    }

    /// The newest plan, as it travels.
    pub fn sizes(&self) -> Vec<u32> {
        self.shares.0.iter().map(|size| u32::try_from(*size).unwrap_or(u32::MAX)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slower_member_gets_a_smaller_part_within_the_ratio_and_rows_stay_a_partition() {
        for (slowdown, expected) in [(3.0, 2.0), (1.5, 1.5), (1.0, 1.0)] {
            let mut planner = Planner::new(Balance { every: 10, max_ratio: 2.0 }, 300, 3);
            for step in 0..100u32 {
                let shares = Shares::of(&planner.sizes(), 300, 3).unwrap();
                let rows: Vec<usize> = (0..3).flat_map(|rank| shares.rows(rank)).collect();
                assert_eq!(rows, (0..300).collect::<Vec<_>>());
                let noise = 1.0 + 0.01 * f64::from(step % 3);
                let seconds = |rank: usize| {
                    let size = shares.sizes()[rank] as f64;
                    1e-3 * noise + size * 1e-4 * if rank == 1 { slowdown } else { 1.0 }
                };
                planner.observe(&[0, 1, 2].map(|rank| (shares.sizes()[rank], seconds(rank))));
            }
            let sizes = planner.sizes();
            let ratio = f64::from(sizes[0]) / f64::from(sizes[1]);
            assert!((ratio - expected).abs() < 0.1, "{sizes:?} for a slowdown of {slowdown}");
        }
    }

    #[test]
    fn plans_that_are_no_partition_of_the_batch_are_rejected() {
        assert_eq!(Shares::of(&[3, 4], 7, 2), Some(Shares(vec![3, 4])));
        for sizes in [&[3, 4][..], &[7], &[3, 3, 1]] {
            assert_eq!(Shares::of(sizes, 8, 2), None);
        }
        assert_eq!(Shares::even(5, 3).sizes(), [1, 2, 2]);
    }
}
