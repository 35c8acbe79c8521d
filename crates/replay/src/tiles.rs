//! Priorities in slots, with sums of tiles that are kept up to date: a draw searches the sums and scans one tile.

/// Slots of a tile: a scan of one takes about as long as the search over the tiles of 10 M items.
pub const TILE: usize = 512;

/// Priorities by slot. Slots are added at the end; a removed item keeps its slot with priority 0.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Priorities {
    slots: Vec<u32>,
    /// Fenwick tree over the sums of tiles: entry i is the sum of the tiles `i - (i & -i) + 1 ..= i`, from 1.
    tree: Vec<u64>,
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
        let mut node = slot / TILE + 1;
        while node < self.tree.len() {
            self.tree[node] = self.tree[node] - before + after;
            node += lowest_bit(node);
        }
        self.total = self.total - before + after;
    }

    /// Returns the first slot whose inclusive prefix sum exceeds `threshold`; `None` if the threshold is not below the total.
    pub fn find(&self, threshold: u64) -> Option<usize> {
        if threshold >= self.total {
            return None;
        }
        let (mut tiles, mut left) = (0, threshold);
        let mut step = (self.tree.len() - 1).next_power_of_two();
        while step > 0 {
            if let Some(&below) = self.tree.get(tiles + step)
                && below <= left
            {
                tiles += step;
                left -= below;
            }
            step /= 2;
        }
        let first = tiles * TILE;
        for (offset, &priority) in self.slots[first..].iter().take(TILE).enumerate() {
            if u64::from(priority) > left {
                return Some(first + offset);
            }
            left -= u64::from(priority);
        }
        unreachable!("the tile holds more than what is left of the threshold")
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
            let positive = slots.iter().copied().filter(|&it| it > 0);
            prop_assert_eq!(priorities.positive(), (positive.clone().count() as u64, positive.min()));
            let rebuilt = Priorities::new(slots);
            prop_assert_eq!(rebuilt.tree, priorities.tree);
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
