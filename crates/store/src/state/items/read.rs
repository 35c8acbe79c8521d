//! Reads of items: sums for a plan, draws, items by age and by trajectory.

use super::index::Sampler;
use crate::state::partitions::Partitions;
use engram_kernels::Error;
use engram_memory::buffer::{Position, handle_at};
use engram_memory::{Group, MemoryId, PartitionId};

/// What a partition contributes to a plan.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ItemSums {
    /// Sum of the priorities.
    pub total: u64,
    /// Items with a positive priority.
    pub positive: u64,
    /// The smallest positive priority; 0 = none.
    pub smallest: u32,
    /// Items, whatever their priority or age.
    pub items: u64,
}

/// A drawn item.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DrawnItem {
    /// Handle.
    pub id: MemoryId,
    /// Its priority when it was drawn.
    pub priority: u32,
}

/// Which items of a buffer, in order of age.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ByAge {
    /// Whether the newest is the first.
    pub newest_first: bool,
    /// The first position that is read.
    pub from: Position,
    /// The oldest version.
    pub oldest_version: u64,
    /// Most items.
    pub count: usize,
}

/// Items of a trajectory or prompt in one partition.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Trajectory {
    /// Its number.
    pub number: u64,
    /// Handles, oldest first.
    pub items: Vec<MemoryId>,
    /// Position of the first.
    pub first: Position,
}

impl Partitions {
    /// Returns the sums of the items from a version on.
    ///
    /// # Errors
    /// The device failed.
    pub fn item_sums(
        &mut self,
        partition: PartitionId,
        group: Group,
        sampler: &Sampler,
        oldest_version: u64,
    ) -> Result<ItemSums, Error> {
        let Some((partition, arena)) = self.open_partition_mut(partition) else { return Ok(ItemSums::default()) };
        let index = partition.items(arena, group, true)?;
        let items = index.len() as u64;
        let sums = index.sums(sampler, oldest_version);
        let (positive, smallest) = sums.positive();
        Ok(ItemSums { total: sums.total(), positive, smallest: smallest.unwrap_or(0), items })
    }

    /// Draws items by thresholds below `total`, the sum that the plan was made with. If the sum has changed since, thresholds are scaled: each
    /// draw is then exact for the current priorities of the partition.
    ///
    /// # Errors
    /// The device failed.
    pub fn draw_items(
        &mut self,
        partition: PartitionId,
        group: Group,
        sampler: &Sampler,
        oldest_version: u64,
        total: u64,
        thresholds: &[u64],
    ) -> Result<Vec<DrawnItem>, Error> {
        let Some((partition, arena)) = self.open_partition_mut(partition) else { return Ok(Vec::new()) };
        let index = partition.items(arena, group, true)?;
        let sums = index.sums(sampler, oldest_version);
        let current = sums.total();
        let scaled = |threshold: u64| match current == total {
            true => threshold,
            false => (u128::from(threshold) * u128::from(current) / u128::from(total.max(1))) as u64,
        };
        let mut places = Vec::with_capacity(thresholds.len());
        sums.find_all(thresholds.iter().map(|threshold| scaled(*threshold)), &mut places);
        let priorities: Vec<u32> = places.iter().map(|place| sums.get(*place)).collect();
        let drawn = |(place, priority)| DrawnItem { id: handle_at(index.entry(place).position), priority };
        Ok(places.into_iter().zip(priorities).map(drawn).collect())
    }

    /// Returns items in order of age that pass `accepts`.
    ///
    /// # Errors
    /// The device failed.
    pub fn items_by_age(
        &mut self,
        partition: PartitionId,
        group: Group,
        order: ByAge,
        mut accepts: impl FnMut(Position) -> bool,
    ) -> Result<Vec<MemoryId>, Error> {
        let Some((partition, arena)) = self.open_partition_mut(partition) else { return Ok(Vec::new()) };
        let index = partition.items(arena, group, false)?;
        let mut items = index.from(order.from);
        let next = || if order.newest_first { items.next_back() } else { items.next() };
        let fresh = std::iter::from_fn(next).filter(|entry| entry.version >= order.oldest_version);
        Ok(fresh.map(|entry| entry.position).filter(|it| accepts(*it)).take(order.count).map(handle_at).collect())
    }

    /// Returns the items of a version or newer by trajectory. The cost grows with the number of items.
    ///
    /// # Errors
    /// The device failed.
    pub fn trajectories(
        &mut self,
        partition: PartitionId,
        group: Group,
        oldest_version: u64,
    ) -> Result<Vec<Trajectory>, Error> {
        let Some((partition, arena)) = self.open_partition_mut(partition) else { return Ok(Vec::new()) };
        let index = partition.items(arena, group, false)?;
        let trajectory = |(number, positions): (u64, Vec<Position>)| Trajectory {
            number,
            first: positions[0],
            items: positions.into_iter().map(handle_at).collect(),
        };
        Ok(index.trajectories(oldest_version).into_iter().map(trajectory).collect())
    }
}
