//! Which item makes room when a buffer is full.

/// What a full buffer does with an insert.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Remover {
    /// Removes the oldest item.
    #[default]
    Fifo,
    /// Removes the newest item.
    Lifo,
    /// Removes the item with the lowest priority, the oldest among equals.
    LowestPriority,
    /// Removes the item with the highest priority, the oldest among equals.
    HighestPriority,
    /// Refuses the insert.
    Refuse,
}

/// A buffer that is full and refuses inserts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("buffer is full: {items} items of {capacity}, and {needed} more do not fit")]
pub struct Full {
    /// Items in the buffer.
    pub items: usize,
    /// Its capacity.
    pub capacity: usize,
    /// Items to insert.
    pub needed: usize,
}

impl Remover {
    /// Returns the handles to remove so that `needed` new items fit, in the order of removal. `items` holds (handle, priority) in order of
    /// insertion; new items are not candidates.
    ///
    /// # Errors
    /// [`Full`] under [`Remover::Refuse`], or when `needed` exceeds the capacity.
    pub fn victims(self, items: &[(u64, u32)], capacity: usize, needed: usize) -> Result<Vec<u64>, Full> {
        let excess = (items.len() + needed).saturating_sub(capacity);
        let full = Full { items: items.len(), capacity, needed };
        if needed > capacity || (excess > 0 && self == Self::Refuse) {
            return Err(full);
        }
        let mut order: Vec<usize> = (0..items.len()).collect();
        match self {
            Self::Fifo | Self::Refuse => {}
            Self::Lifo => order.reverse(),
            Self::LowestPriority => order.sort_by_key(|&index| items[index].1),
            Self::HighestPriority => order.sort_by_key(|&index| std::cmp::Reverse(items[index].1)),
        }
        Ok(order[..excess].iter().map(|&index| items[index].0).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_remover_takes_its_items_and_ties_go_to_the_oldest() {
        let items = [(10, 5), (11, 1), (12, 9), (13, 1)];
        let victims = |remover: Remover| remover.victims(&items, 4, 2).unwrap();
        assert_eq!(victims(Remover::Fifo), [10, 11]);
        assert_eq!(victims(Remover::Lifo), [13, 12]);
        assert_eq!(victims(Remover::LowestPriority), [11, 13]);
        assert_eq!(victims(Remover::HighestPriority), [12, 10]);
        assert_eq!(Remover::Fifo.victims(&items, 6, 2).unwrap(), [0_u64; 0]);
    }

    #[test]
    fn full_buffer_refuses_with_its_numbers() {
        let refused = Remover::Refuse.victims(&[(1, 1), (2, 1)], 2, 1).unwrap_err();
        assert_eq!(refused.to_string(), "buffer is full: 2 items of 2, and 1 more do not fit");
        assert!(Remover::Refuse.victims(&[(1, 1)], 2, 1).unwrap().is_empty());
        assert!(Remover::Fifo.victims(&[(1, 1)], 2, 3).is_err(), "more than the buffer holds");
    }
}
