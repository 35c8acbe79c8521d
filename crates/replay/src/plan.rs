//! Which worker draws what: exact prioritized sampling over partitions, without moving payload.
//!
//! Every partition publishes 20 bytes ([`PartitionSum`]). In the global mode all workers know all thresholds, and each takes the draws that fall
//! into its partitions: the drawn items are those of an unsharded buffer, on any number of workers. In the local mode a member draws a number
//! of its choice from its own partitions ([`Plan::local`]) and scales by [`Plan::local_scale`].

use engram_kernels::priority::Draws;
use engram_memory::PartitionId;

/// What a partition publishes for a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PartitionSum {
    /// The partition.
    pub partition: PartitionId,
    /// Sum of its priorities.
    pub total: u64,
    /// Items with a positive priority.
    pub items: u32,
    /// The smallest positive priority; 0 if there is none.
    pub smallest: u32,
}

/// Why no item can be drawn.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The sum of all priorities is 0.
    #[error("the buffer has no item with a positive priority")]
    Empty,
    /// Sums at or above 2^62.
    #[error("sum of priorities: {0} is not allowed; allowed: below 2^62")]
    TooLarge(u128),
    /// A batch of no draws.
    #[error("batch size: 0 is not allowed; allowed: at least 1")]
    NoDraws,
}

/// The plan of one step, equal on all workers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    /// In order of partition id, with the offset of each.
    partitions: Vec<(PartitionSum, u64)>,
    total: u64,
    /// Stream of random numbers of the draws.
    stream: u32,
}

/// A draw of one partition.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PartitionDraw {
    /// Number of the draw in the batch.
    pub draw: u32,
    /// Threshold within the partition, below its total.
    pub threshold: u64,
}

impl Plan {
    /// Creates the plan from what the partitions published, in any order.
    ///
    /// # Errors
    /// [`Error::Empty`], [`Error::TooLarge`].
    pub fn new(mut sums: Vec<PartitionSum>) -> Result<Self, Error> {
        sums.sort_unstable_by_key(|sum| sum.partition);
        let total: u128 = sums.iter().map(|sum| u128::from(sum.total)).sum();
        if total == 0 {
            return Err(Error::Empty);
        }
        if total >= 1 << 62 {
            return Err(Error::TooLarge(total));
        }
        let mut offset = 0;
        let with_offset = sums.into_iter().map(|sum| {
            let start = offset;
            offset += sum.total;
            (sum, start)
        });
        Ok(Self { partitions: with_offset.collect(), total: total as u64, stream: 0 })
    }

    /// Returns the plan of a member that draws from its own partitions only. Draws of different ranks are independent.
    ///
    /// # Errors
    /// [`Error::Empty`] if its partitions have no item with a positive priority.
    pub fn local(&self, rank: u32, is_own: impl Fn(PartitionId) -> bool) -> Result<Self, Error> {
        let own = self.partitions.iter().map(|(sum, _)| *sum).filter(|sum| is_own(sum.partition));
        Ok(Self { stream: rank.saturating_add(1), ..Self::new(own.collect())? })
    }

    /// Returns the factor of the sum of weighted gradients of a member that has made `draws` draws with its [local](Self::local) plan:
    /// `T_k / (T b_k)`, with the priorities of the member, those of all members, and its draws. The sum over all members, reduced and divided by
    /// nothing, has the expectation of a draw from the whole buffer.
    ///
    /// # Errors
    /// [`Error::NoDraws`].
    pub fn local_scale(&self, local: &Self, draws: u32) -> Result<f64, Error> {
        if draws == 0 {
            return Err(Error::NoDraws);
        }
        Ok(local.total as f64 / (self.total as f64 * f64::from(draws)))
    }

    /// Returns the sum of all priorities.
    pub const fn total(&self) -> u64 {
        self.total
    }

    /// Returns the number of items with a positive priority.
    pub fn items(&self) -> u64 {
        self.partitions.iter().map(|(sum, _)| u64::from(sum.items)).sum()
    }

    /// Returns the smallest positive priority.
    pub fn smallest(&self) -> u32 {
        self.partitions.iter().map(|(sum, _)| sum.smallest).filter(|&it| it > 0).min().unwrap_or(0)
    }

    /// Returns the draws of a batch of `count` that fall into `partition`, in order; none for an unknown partition.
    ///
    /// # Errors
    /// [`Error::NoDraws`].
    pub fn draws(&self, partition: PartitionId, seed: u64, step: u64, count: u32) -> Result<Vec<PartitionDraw>, Error> {
        if count == 0 {
            return Err(Error::NoDraws);
        }
        let found = self.partitions.binary_search_by_key(&partition, |(sum, _)| sum.partition);
        let Ok(index) = found else { return Ok(Vec::new()) };
        let (sum, offset) = self.partitions[index];
        let draws = Draws { seed, step, stream: self.stream, count, total: self.total };
        // Thresholds rise with the draws: the first of this partition is found by bisection.
        let mut first = 0;
        let mut beyond = count;
        while first < beyond {
            let middle = first + (beyond - first) / 2;
            if draws.threshold(middle) < offset { first = middle + 1 } else { beyond = middle }
        }
        let end = offset + sum.total;
        let own =
            (first..count).map(|draw| (draw, draws.threshold(draw))).take_while(|(_, threshold)| *threshold < end);
        Ok(own.map(|(draw, threshold)| PartitionDraw { draw, threshold: threshold - offset }).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tiles::Priorities;
    use proptest::prelude::*;

    fn published(partition: u32, priorities: &Priorities) -> PartitionSum {
        let (items, smallest) = priorities.positive();
        PartitionSum {
            partition: PartitionId(partition),
            total: priorities.total(),
            items: items as u32,
            smallest: smallest.unwrap_or(0),
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(60))]
        #[test]
        fn sharded_draws_are_those_of_one_buffer(
            parts in proptest::collection::vec(proptest::collection::vec(0_u32..100, 0..60), 1..8),
            seed: u64, step: u64, count in 1_u32..80,
        ) {
            let shards: Vec<Priorities> = parts.iter().cloned().map(Priorities::new).collect();
            let whole = Priorities::new(parts.concat());
            let mut sums: Vec<_> = (0..).zip(&shards).map(|(partition, shard)| published(partition, shard)).collect();
            sums.reverse();
            if whole.total() == 0 {
                prop_assert_eq!(Plan::new(sums), Err(Error::Empty));
                return Ok(());
            }
            let plan = Plan::new(sums).unwrap();
            let mut drawn = Vec::new();
            let mut before = 0;
            for (partition, shard) in (0..).zip(&shards) {
                for draw in plan.draws(PartitionId(partition), seed, step, count).unwrap() {
                    drawn.push((draw.draw, before + shard.find(draw.threshold).unwrap()));
                }
                before += shard.len();
            }
            drawn.sort_unstable();
            let draws = Draws { seed, step, stream: 0, count, total: whole.total() };
            let expected: Vec<_> = (0..count).map(|draw| (draw, whole.find(draws.threshold(draw)).unwrap())).collect();
            prop_assert_eq!(drawn, expected);
            let (items, smallest) = whole.positive();
            prop_assert_eq!((plan.items(), plan.smallest()), (items, smallest.unwrap()));
        }
    }

    #[test]
    fn expected_gradient_of_both_modes_equals_the_exact_one() {
        let parts = [vec![3_u32, 1, 0], vec![6, 2]];
        let gradient = [[0.5_f64, -1.0, 9.0], [2.0, 0.25, 0.0]];
        let shards: Vec<Priorities> = parts.iter().cloned().map(Priorities::new).collect();
        let plan =
            Plan::new((0..).zip(&shards).map(|(partition, shard)| published(partition, shard)).collect()).unwrap();
        let total = plan.total();
        for beta in [0.0, 0.4, 1.0] {
            let weighted = |shard: usize, item: usize| {
                crate::importance::weight(&plan, parts[shard][item], beta) * gradient[shard][item]
            };
            let items = (0..2).flat_map(|shard| (0..parts[shard].len()).map(move |item| (shard, item)));
            let exact: f64 = items
                .filter(|&(shard, item)| parts[shard][item] > 0)
                .map(|(shard, item)| f64::from(parts[shard][item]) / total as f64 * weighted(shard, item))
                .sum();

            // As many draws as units of priority: each threshold once, whatever the seed.
            let count = total as u32;
            let mut global = 0.0;
            for (partition, shard) in (0..).zip(&shards) {
                let draws = plan.draws(PartitionId(partition), 3, 7, count).unwrap();
                let item = |draw: &PartitionDraw| weighted(partition as usize, shard.find(draw.threshold).unwrap());
                global += draws.iter().map(item).sum::<f64>() / f64::from(count);
            }
            assert!((exact - global).abs() < 1e-9, "beta {beta}: {exact}, global {global}");

            // Each worker enumerates its own thresholds, one of them five times: shares of the batch are not shares of the priorities.
            let mut local = 0.0;
            for (index, (shard, repeats)) in shards.iter().zip([5, 1]).enumerate() {
                let own: f64 = (0..shard.total()).map(|at| weighted(index, shard.find(at).unwrap())).sum();
                let draws = repeats * shard.total() as u32;
                let local_plan = plan.local(index as u32, |partition| partition.0 == index as u32).unwrap();
                local += plan.local_scale(&local_plan, draws).unwrap() * f64::from(repeats) * own;
            }
            assert!((exact - local).abs() < 1e-9, "beta {beta}: {exact}, local {local}");
        }
    }

    #[test]
    fn members_draw_locally_from_their_own_partitions_and_independently() {
        let sum = |partition| PartitionSum { partition: PartitionId(partition), total: 1 << 40, items: 9, smallest: 1 };
        let plan = Plan::new((0..4).map(sum).collect()).unwrap();
        let local = |rank| plan.local(rank, |partition| partition.0 % 2 == rank).unwrap();
        let all = |plan: &Plan| (0..4).map(|it| plan.draws(PartitionId(it), 3, 7, 64).unwrap()).collect::<Vec<_>>();
        let (even, odd) = (all(&local(0)), all(&local(1)));
        // Every draw is one of the member's, whatever the other draws.
        assert_eq!(even[0].len() + even[2].len(), 64);
        assert!(even[1].is_empty() && even[3].is_empty() && odd[0].is_empty() && odd[2].is_empty());
        // The same thresholds would be drawn with one stream of random numbers for both.
        assert!(even[0].iter().zip(&odd[1]).all(|(a, b)| a.threshold != b.threshold));
        assert_eq!(plan.local_scale(&local(0), 64).unwrap(), 0.5 / 64.0);
        assert_eq!(plan.local_scale(&local(0), 0), Err(Error::NoDraws));
        assert_eq!(plan.local(0, |_| false), Err(Error::Empty));
    }

    #[test]
    fn forgotten_buffer_is_an_error_never_a_uniform_draw() {
        let none = PartitionSum { partition: PartitionId(0), total: 0, items: 0, smallest: 0 };
        assert_eq!(Plan::new(vec![none]), Err(Error::Empty));
        let huge = PartitionSum { total: 1 << 62, ..none };
        assert_eq!(Plan::new(vec![huge]), Err(Error::TooLarge(1 << 62)));
    }
}
