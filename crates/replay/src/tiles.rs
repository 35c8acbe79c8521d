//! Priorities in slots, with sums of tiles and of their blocks that are kept up to date: a draw searches the sums of tiles, then those of the
//! blocks of one tile, and scans one block.

use std::hint::select_unpredictable;

/// Slots of a tile: the sums over the tiles of 10 M items fit into the second cache of a core.
pub const TILE: usize = 512;
/// Slots of a block. The sums of the blocks of a tile fill one line of a cache.
const BLOCK: usize = 64;
/// Slots that are added up at once in the scan of a block.
const LANES: usize = 16;

/// Priorities by slot. Slots are added at the end; a removed item keeps its slot with priority 0.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Priorities {
    slots: Vec<u32>,
    /// Fenwick tree over the sums of tiles: entry i is the sum of the tiles `i - (i & -i) + 1 ..= i`, from 1.
    tree: Vec<u64>,
    /// Sums of blocks.
    blocks: Vec<u64>,
    total: u64,
    /// Number of positive priorities.
    positive: u64,
    /// Binary tree over the smallest positive priority of each tile; [`NONE`] where there is none. Node 1 is the root, the tiles are the leaves.
    minima: Vec<u32>,
}

/// No positive priority.
const NONE: u32 = u32::MAX;

impl Priorities {
    /// Creates priorities from slots.
    pub fn new(slots: Vec<u32>) -> Self {
        let mut priorities = Self { slots, ..Self::default() };
        priorities.rebuild();
        priorities
    }

    /// Computes all sums again, as after a decay that changed every priority.
    pub fn rebuild(&mut self) {
        self.tree = std::iter::once(0).chain(self.slots.chunks(TILE).map(sum)).collect();
        for index in 1..self.tree.len() {
            let parent = index + lowest_bit(index);
            if parent < self.tree.len() {
                self.tree[parent] += self.tree[index];
            }
        }
        self.blocks = self.slots.chunks(BLOCK).map(sum).collect();
        self.total = sum(&self.slots);
        self.positive = self.slots.iter().filter(|&&it| it > 0).count() as u64;
        self.rebuild_minima();
    }

    fn rebuild_minima(&mut self) {
        let leaves = self.slots.len().div_ceil(TILE).next_power_of_two();
        self.minima = vec![NONE; 2 * leaves];
        for (tile, slots) in self.slots.chunks(TILE).enumerate() {
            self.minima[leaves + tile] = smallest(slots);
        }
        for node in (1..leaves).rev() {
            self.minima[node] = self.minima[2 * node].min(self.minima[2 * node + 1]);
        }
    }

    /// Updates the smallest priorities after a change of a slot.
    fn update_minima(&mut self, slot: usize, before: u32, after: u32) {
        let (tile, leaves) = (slot / TILE, self.minima.len() / 2);
        if tile >= leaves {
            return self.rebuild_minima();
        }
        let mut node = leaves + tile;
        let first = tile * TILE;
        let value = match after {
            1.. if after <= self.minima[node] => after,
            _ if before > 0 && before == self.minima[node] => {
                smallest(&self.slots[first..self.slots.len().min(first + TILE)])
            }
            _ => return,
        };
        self.minima[node] = value;
        while node > 1 {
            node /= 2;
            self.minima[node] = self.minima[2 * node].min(self.minima[2 * node + 1]);
        }
    }

    /// Returns the number of slots.
    pub const fn len(&self) -> usize {
        self.slots.len()
    }

    /// Returns whether there is no slot.
    pub const fn is_empty(&self) -> bool {
        self.slots.is_empty()
    }

    /// Returns the sum of all priorities.
    pub const fn total(&self) -> u64 {
        self.total
    }

    /// Returns the priority of a slot.
    ///
    /// # Panics
    /// There is no such slot.
    pub fn get(&self, slot: usize) -> u32 {
        self.slots[slot]
    }

    /// Adds a slot at the end and returns its number.
    pub fn push(&mut self, priority: u32) -> usize {
        let slot = self.slots.len();
        if self.tree.is_empty() {
            self.tree.push(0);
        }
        if slot.is_multiple_of(TILE) {
            // A new node covers the tiles below it; the new tile itself is still empty.
            let node = self.tree.len();
            let first = node - lowest_bit(node);
            self.tree.push(self.prefix(node - 1) - self.prefix(first));
        }
        if slot.is_multiple_of(BLOCK) {
            self.blocks.push(0);
        }
        self.slots.push(0);
        self.set(slot, priority);
        slot
    }

    /// Changes the priority of a slot.
    ///
    /// # Panics
    /// There is no such slot.
    pub fn set(&mut self, slot: usize, priority: u32) {
        let replaced = std::mem::replace(&mut self.slots[slot], priority);
        self.update_minima(slot, replaced, priority);
        self.positive = self.positive + u64::from(priority > 0) - u64::from(replaced > 0);
        let (before, after) = (u64::from(replaced), u64::from(priority));
        let block = &mut self.blocks[slot / BLOCK];
        *block = *block - before + after;
        let mut node = slot / TILE + 1;
        while node < self.tree.len() {
            self.tree[node] = self.tree[node] - before + after;
            node += lowest_bit(node);
        }
        self.total = self.total - before + after;
    }

    /// Returns the first slot whose inclusive prefix sum exceeds `threshold`; `None` if the threshold is not below the total.
    pub fn find(&self, threshold: u64) -> Option<usize> {
        (threshold < self.total).then(|| {
            let (tile, left) = self.tile_of(threshold);
            let (block, left) = self.block_of(tile, left);
            self.slot_of(block, left)
        })
    }

    /// Appends the slots of several thresholds, as [`Self::find`] returns them, to `found`; those that are not below the total have none.
    ///
    /// Faster than one by one: the memory of all draws is read at once, instead of waiting for each.
    pub fn find_all(&self, thresholds: impl IntoIterator<Item = u64>, found: &mut Vec<usize>) {
        let below = thresholds.into_iter().filter(|threshold| *threshold < self.total);
        let mut places: Vec<(usize, u64)> = below.map(|threshold| self.tile_of(threshold)).collect();
        // Loads that depend on nothing: the processor has many of them in flight.
        std::hint::black_box(places.iter().fold(0, |touched, (tile, _)| touched ^ self.blocks[tile * (TILE / BLOCK)]));
        for (place, left) in &mut places {
            (*place, *left) = self.block_of(*place, *left);
        }
        let touched = places.iter().fold(0, |touched, (block, _)| {
            self.slots_of(*block).iter().step_by(LANES).fold(touched, |touched, priority| touched ^ priority)
        });
        std::hint::black_box(touched);
        found.extend(places.into_iter().map(|(block, left)| self.slot_of(block, left)));
    }

    /// Returns the tile with the slot of a threshold that is below the total, and the threshold within it.
    fn tile_of(&self, threshold: u64) -> (usize, u64) {
        let (mut tile, mut left) = (0, threshold);
        let mut step = (self.tree.len() - 1).next_power_of_two();
        while step > 0 {
            // Without branches, which would be predicted wrongly every other time.
            let below = self.tree.get(tile + step).copied().unwrap_or(u64::MAX);
            let is_after = below <= left;
            tile += select_unpredictable(is_after, step, 0);
            left -= select_unpredictable(is_after, below, 0);
            step /= 2;
        }
        (tile, left)
    }

    /// Returns the block with the slot of a threshold within a tile, and the threshold within it.
    fn block_of(&self, tile: usize, left: u64) -> (usize, u64) {
        let first = tile * (TILE / BLOCK);
        let sums = &self.blocks[first..self.blocks.len().min(first + TILE / BLOCK)];
        let (block, left) = passed(sums.iter().copied(), left);
        (first + block, left)
    }

    fn slots_of(&self, block: usize) -> &[u32] {
        let first = block * BLOCK;
        &self.slots[first..self.slots.len().min(first + BLOCK)]
    }

    /// Returns the slot of a threshold within a block.
    fn slot_of(&self, block: usize, left: u64) -> usize {
        let slots = self.slots_of(block);
        let (lanes, left) = passed(slots.chunks(LANES).map(sum), left);
        let first = lanes * LANES;
        let lanes = &slots[first..slots.len().min(first + LANES)];
        let (offset, _) = passed(lanes.iter().map(|it| u64::from(*it)), left);
        block * BLOCK + first + offset
    }

    /// Returns the number of slots with a positive priority and the smallest of these priorities.
    pub fn positive(&self) -> (u64, Option<u32>) {
        let smallest = self.minima.get(1).copied().filter(|&it| it != NONE);
        (self.positive, smallest)
    }

    fn prefix(&self, tiles: usize) -> u64 {
        let (mut node, mut sum) = (tiles, 0);
        while node > 0 {
            sum += self.tree[node];
            node -= lowest_bit(node);
        }
        sum
    }
}

/// Returns how many of `sums` a threshold below their total passes, and what is left of it.
fn passed(sums: impl Iterator<Item = u64>, threshold: u64) -> (usize, u64) {
    let (mut count, mut left, mut end) = (0, threshold, 0);
    for sum in sums {
        end += sum;
        let is_after = end <= threshold;
        count += usize::from(is_after);
        left = select_unpredictable(is_after, threshold.wrapping_sub(end), left);
    }
    (count, left)
}

const fn lowest_bit(number: usize) -> usize {
    number & number.wrapping_neg()
}

fn smallest(priorities: &[u32]) -> u32 {
    priorities.iter().copied().filter(|&it| it > 0).min().unwrap_or(NONE)
}

fn sum(priorities: &[u32]) -> u64 {
    priorities.iter().map(|&it| u64::from(it)).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn by_scan(slots: &[u32], threshold: u64) -> Option<usize> {
        let mut sum = 0;
        slots.iter().position(|&it| {
            sum += u64::from(it);
            sum > threshold
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(40))]
        #[test]
        fn sums_and_draws_equal_those_of_a_scan_after_any_changes(
            begin in proptest::collection::vec(0_u32..9, 0..2_000),
            changes in proptest::collection::vec((any::<prop::sample::Index>(), 0_u32..9), 0..50),
            pushes in proptest::collection::vec(0_u32..9, 0..1_200),
        ) {
            let mut slots = begin.clone();
            let mut priorities = Priorities::new(begin);
            for it in pushes {
                prop_assert_eq!(priorities.push(it), slots.len());
                slots.push(it);
            }
            for (index, value) in changes {
                if slots.is_empty() {
                    break;
                }
                let slot = index.index(slots.len());
                slots[slot] = value;
                priorities.set(slot, value);
            }
            let total = sum(&slots);
            prop_assert_eq!(priorities.total(), total);
            for threshold in (0..total).step_by(1 + total as usize / 97).chain([total.saturating_sub(1), total]) {
                prop_assert_eq!(priorities.find(threshold), by_scan(&slots, threshold), "threshold {}", threshold);
            }
            let thresholds: Vec<u64> = (0..=total).step_by(1 + total as usize / 41).collect();
            let mut found = vec![usize::MAX];
            priorities.find_all(thresholds.iter().copied(), &mut found);
            let expected = thresholds.iter().filter_map(|threshold| by_scan(&slots, *threshold));
            prop_assert_eq!(&found[1..], &expected.collect::<Vec<_>>()[..]);
            let positive = slots.iter().copied().filter(|&it| it > 0);
            prop_assert_eq!(priorities.positive(), (positive.clone().count() as u64, positive.min()));
            let rebuilt = Priorities::new(slots);
            prop_assert_eq!((rebuilt.tree, rebuilt.blocks), (priorities.tree, priorities.blocks));
        }
    }

    #[test]
    fn item_with_almost_all_priority_is_drawn_that_often() {
        for items in [7_usize, 8, 1_000] {
            let mut slots = vec![1_u32; items];
            let heavy = items / 2;
            slots[heavy] = (0.993 * (items - 1) as f64 / 0.007) as u32;
            let priorities = Priorities::new(slots);
            let total = priorities.total();
            let draws = 100_000_u64;
            let hits = (0..draws).filter(|it| priorities.find(it * total / draws) == Some(heavy)).count();
            let share = hits as f64 / draws as f64;
            assert!((share - 0.993).abs() < 0.005, "{items} items: {share}");
        }
    }

    #[test]
    fn root_is_the_sum_of_the_leaves_after_ten_thousand_updates() {
        let mut priorities = Priorities::new(vec![5; 3_000]);
        for step in 0..10_000_u32 {
            priorities.set(step.wrapping_mul(2_654_435_761) as usize % 3_000, step % 1_000);
        }
        assert_eq!(priorities.total(), (0..3_000).map(|slot| u64::from(priorities.get(slot))).sum());
        assert_eq!(Priorities::default().find(0), None);
    }
}
