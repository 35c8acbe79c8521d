//! Durable consumption: each consumer gets each item once, across crashes of consumer and worker.
//!
//! A consumer has a cursor (everything below it is done) and the items above it that are done out of order. Items that were handed out and not
//! yet done are leased: a lease that ends returns them. State is small: cursor plus at most [`MAX_AHEAD`] entries.

use std::collections::{BTreeMap, BTreeSet};

/// Items per consumer that may be done or leased above the cursor.
pub const MAX_AHEAD: usize = 65_536;

/// Position of an item: rises with each insert and is never reused.
pub type Position = u64;

/// The state of one consumer, replicated with the buffer.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Cursor {
    /// Every position below is done.
    pub(crate) next: Position,
    /// Positions at or above `next` that are done.
    pub(crate) done: BTreeSet<Position>,
    /// Leased positions with the time at which the lease ends, in milliseconds.
    pub(crate) leased: BTreeMap<Position, u64>,
}

/// Why an item could not be leased or acknowledged.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum LeaseError {
    /// Too many items are out of order.
    #[error("consumer has {0} unacknowledged or out-of-order items; allowed: at most {MAX_AHEAD}")]
    Ahead(usize),
    /// The item is done.
    #[error("position {0} is done")]
    Done(Position),
    /// The item is leased to a reader.
    #[error("position {0} is leased")]
    Leased(Position),
    /// The position is not leased: it was acknowledged before, or its lease ended and it went to another reader that acknowledged it.
    #[error("position {0} is not leased")]
    NotLeased(Position),
}

impl Cursor {
    /// Returns the cursor: every position below is done.
    pub const fn position(&self) -> Position {
        self.next
    }

    /// Returns the number of leased positions.
    pub fn leased(&self) -> usize {
        self.leased.len()
    }

    /// Checks whether a position can be leased at `now_ms`.
    ///
    /// # Errors
    /// Why not.
    pub fn check(&self, position: Position, now_ms: u64) -> Result<(), LeaseError> {
        if position < self.next || self.done.contains(&position) {
            return Err(LeaseError::Done(position));
        }
        match self.leased.get(&position) {
            Some(&end) if end > now_ms => Err(LeaseError::Leased(position)),
            Some(_) => Ok(()),
            None => {
                let ahead = self.done.len() + self.leased.len();
                if ahead < MAX_AHEAD { Ok(()) } else { Err(LeaseError::Ahead(ahead)) }
            }
        }
    }

    /// Leases a position until `until_ms`. An item whose lease has ended is leased again.
    ///
    /// # Errors
    /// As [`Self::check`].
    pub fn lease(&mut self, position: Position, now_ms: u64, until_ms: u64) -> Result<(), LeaseError> {
        self.check(position, now_ms)?;
        self.leased.insert(position, until_ms);
        Ok(())
    }

    /// Records that a leased item is done.
    ///
    /// # Errors
    /// [`LeaseError::NotLeased`].
    pub fn acknowledge(&mut self, position: Position) -> Result<(), LeaseError> {
        self.leased.remove(&position).ok_or(LeaseError::NotLeased(position))?;
        self.done.insert(position);
        Ok(())
    }

    /// Raises the cursor over done and removed items. `existing` are the positions of the existing items from the cursor on, ascending; `end` is
    /// above every position so far.
    pub fn advance(&mut self, existing: impl IntoIterator<Item = Position>, end: Position) {
        let open = existing.into_iter().find(|position| *position >= self.next && !self.done.contains(position));
        self.next = open.unwrap_or(end).max(self.next);
        self.done = self.done.split_off(&self.next);
        self.leased = self.leased.split_off(&self.next);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[derive(Debug, Clone)]
    enum Step {
        Lease { count: usize, wait: u64 },
        Acknowledge(prop::sample::Index),
        Insert(u64),
        Remove(prop::sample::Index),
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            (1_usize..6, 0_u64..200).prop_map(|(count, wait)| Step::Lease { count, wait }),
            any::<prop::sample::Index>().prop_map(Step::Acknowledge),
            (1_u64..5).prop_map(Step::Insert),
            any::<prop::sample::Index>().prop_map(Step::Remove),
        ]
    }

    proptest! {
        #[test]
        fn no_item_is_done_twice_and_none_is_skipped(steps in proptest::collection::vec(step(), 0..80)) {
            let mut cursor = Cursor::default();
            let (mut end, mut now) = (0, 0);
            let (mut items, mut done) = (BTreeSet::new(), BTreeSet::new());
            let mut held: Vec<Position> = Vec::new();
            for step in steps {
                match step {
                    Step::Insert(count) => {
                        // Positions are sparse.
                        items.extend((0..count).map(|it| end + 3 * it));
                        end += 3 * count;
                    }
                    Step::Remove(pick) if !items.is_empty() => {
                        let position = *items.iter().nth(pick.index(items.len())).unwrap();
                        items.remove(&position);
                    }
                    Step::Lease { count, wait } => {
                        now += wait;
                        let free: Vec<_> = items.iter().copied().filter(|it| cursor.check(*it, now).is_ok()).collect();
                        for position in free.into_iter().take(count) {
                            prop_assert!(!done.contains(&position), "leased again after it was done");
                            cursor.lease(position, now, now + 100).unwrap();
                            held.push(position);
                        }
                    }
                    Step::Acknowledge(pick) if !held.is_empty() => {
                        let position = held[pick.index(held.len())];
                        let accepted = cursor.acknowledge(position).is_ok();
                        prop_assert!(!accepted || done.insert(position), "done twice");
                        cursor.advance(items.iter().copied(), end);
                    }
                    _ => {}
                }
                let passed = items.iter().filter(|it| **it < cursor.position());
                prop_assert!(passed.into_iter().all(|it| done.contains(it)), "the cursor passed an item");
            }
        }
    }

    #[test]
    fn ended_lease_goes_to_the_next_reader_and_the_first_cannot_acknowledge_twice() {
        let mut cursor = Cursor::default();
        cursor.lease(0, 1_000, 1_050).unwrap();
        assert_eq!(cursor.lease(0, 1_040, 1_090), Err(LeaseError::Leased(0)));
        cursor.lease(0, 1_060, 1_110).unwrap();
        cursor.acknowledge(0).unwrap();
        assert_eq!(cursor.acknowledge(0), Err(LeaseError::NotLeased(0)));
        assert_eq!(cursor.lease(0, 2_000, 2_050), Err(LeaseError::Done(0)));
        cursor.advance([0, 7], 8);
        assert_eq!(cursor.position(), 7);
    }

    #[test]
    fn removed_item_does_not_hold_the_cursor() {
        let mut cursor = Cursor::default();
        for position in 1..4 {
            cursor.lease(position, 0, 10).unwrap();
            cursor.acknowledge(position).unwrap();
        }
        cursor.advance([1, 2, 3], 4);
        assert_eq!(cursor, Cursor { next: 4, ..Cursor::default() });
    }
}
