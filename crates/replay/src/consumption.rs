//! Durable consumption: each consumer gets each item once, in order of the log, across crashes of consumer and worker.
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
    next: Position,
    /// Positions at or above `next` that are done.
    done: BTreeSet<Position>,
    /// Leased positions with the time at which the lease ends, in milliseconds.
    leased: BTreeMap<Position, u64>,
}

/// Why items could not be leased or acknowledged.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// Too many items are out of order.
    #[error("consumer has {0} unacknowledged or out-of-order items; allowed: at most {MAX_AHEAD}")]
    Ahead(usize),
    /// The position is not leased: it was acknowledged before, or its lease ended and it went to another reader.
    #[error("position {0} is not leased")]
    NotLeased(Position),
}

impl Cursor {
    /// Returns the cursor: every position below is done.
    pub const fn position(&self) -> Position {
        self.next
    }

    /// Leases up to `count` of the `available` positions (ascending) until `now + lease_ms`. Items whose lease has ended are leased again first.
    ///
    /// # Errors
    /// [`Error::Ahead`].
    pub fn lease(
        &mut self,
        available: impl IntoIterator<Item = Position>,
        count: usize,
        now_ms: u64,
        lease_ms: u64,
    ) -> Result<Vec<Position>, Error> {
        let ahead = self.done.len() + self.leased.len();
        let mut taken = Vec::new();
        for position in available {
            if taken.len() == count {
                break;
            }
            if position < self.next || self.done.contains(&position) {
                continue;
            }
            let held = self.leased.get(&position).copied();
            if held.is_some_and(|end| end > now_ms) {
                continue;
            }
            if held.is_none() && ahead + taken.len() >= MAX_AHEAD {
                if taken.is_empty() {
                    return Err(Error::Ahead(ahead));
                }
                break;
            }
            taken.push(position);
        }
        self.leased.extend(taken.iter().map(|&position| (position, now_ms + lease_ms)));
        Ok(taken)
    }

    /// Records that leased items are done. All or none.
    ///
    /// # Errors
    /// [`Error::NotLeased`] names the first position without a lease.
    pub fn acknowledge(&mut self, positions: &[Position]) -> Result<(), Error> {
        if let Some(&position) = positions.iter().find(|position| !self.leased.contains_key(position)) {
            return Err(Error::NotLeased(position));
        }
        for position in positions {
            self.leased.remove(position);
            self.done.insert(*position);
        }
        Ok(())
    }

    /// Raises the cursor over done items. `exists` says whether a position still has an item: removed items do not hold it up.
    pub fn advance(&mut self, end: Position, mut exists: impl FnMut(Position) -> bool) {
        while self.next < end
            && (self.done.remove(&self.next) || (!self.leased.contains_key(&self.next) && !exists(self.next)))
        {
            self.next += 1;
        }
        self.done = self.done.split_off(&self.next);
        self.leased = self.leased.split_off(&self.next);
    }
}

/// How often an item may be sampled before it is removed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MaxReuse(pub u32);

impl MaxReuse {
    /// Returns the use count after a sample, and whether the item is spent.
    pub const fn sampled(self, uses: u32) -> (u32, bool) {
        let uses = uses.saturating_add(1);
        (uses, uses >= self.0)
    }
}

/// Returns whether an item is too old for a learner: its policy version is more than `max_age` behind.
pub const fn is_stale(item_version: u64, current_version: u64, max_age: u64) -> bool {
    current_version.saturating_sub(item_version) > max_age
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[derive(Debug, Clone)]
    enum Step {
        Lease { count: usize, wait: u64 },
        Acknowledge { pick: Vec<prop::sample::Index> },
        Insert(u64),
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            (1_usize..6, 0_u64..200).prop_map(|(count, wait)| Step::Lease { count, wait }),
            proptest::collection::vec(any::<prop::sample::Index>(), 1..4).prop_map(|pick| Step::Acknowledge { pick }),
            (1_u64..5).prop_map(Step::Insert),
        ]
    }

    proptest! {
        #[test]
        fn no_item_is_done_twice_and_none_is_skipped(steps in proptest::collection::vec(step(), 0..80)) {
            let mut cursor = Cursor::default();
            let (mut end, mut now) = (0, 0);
            let mut held: Vec<Position> = Vec::new();
            let mut done = BTreeSet::new();
            for step in steps {
                match step {
                    Step::Insert(count) => end += count,
                    Step::Lease { count, wait } => {
                        now += wait;
                        let taken = cursor.lease(cursor.position()..end, count, now, 100).unwrap();
                        prop_assert!(taken.iter().all(|it| !done.contains(it)), "leased again after it was done");
                        held.extend(taken);
                    }
                    Step::Acknowledge { pick } => {
                        if held.is_empty() {
                            continue;
                        }
                        let position = held[pick[0].index(held.len())];
                        let accepted = cursor.acknowledge(&[position]).is_ok();
                        prop_assert_eq!(accepted, done.insert(position));
                        cursor.advance(end, |_| true);
                    }
                }
                prop_assert!((0..cursor.position()).all(|it| done.contains(&it)), "the cursor passed an item");
            }
        }
    }

    #[test]
    fn ended_lease_goes_to_the_next_reader_and_the_first_cannot_acknowledge_twice() {
        let mut cursor = Cursor::default();
        assert_eq!(cursor.lease(0..3, 2, 1_000, 50).unwrap(), [0, 1]);
        assert_eq!(cursor.lease(0..3, 2, 1_040, 50).unwrap(), [2], "0 and 1 are leased");
        assert_eq!(cursor.lease(0..3, 2, 1_060, 50).unwrap(), [0, 1], "their lease has ended");
        cursor.acknowledge(&[0, 1]).unwrap();
        assert_eq!(cursor.acknowledge(&[0]), Err(Error::NotLeased(0)));
        cursor.advance(3, |_| true);
        assert_eq!(cursor.position(), 2);
    }

    #[test]
    fn removed_item_does_not_hold_the_cursor() {
        let mut cursor = Cursor::default();
        cursor.lease(1..4, 3, 0, 10).unwrap();
        cursor.acknowledge(&[1, 2, 3]).unwrap();
        cursor.advance(4, |position| position != 0);
        assert_eq!(cursor, Cursor { next: 4, ..Cursor::default() });
    }

    #[test]
    fn reuse_and_age_have_exact_limits() {
        assert_eq!(MaxReuse(2).sampled(0), (1, false));
        assert_eq!(MaxReuse(2).sampled(1), (2, true));
        assert!(!is_stale(8, 10, 2) && is_stale(7, 10, 2) && !is_stale(12, 10, 0));
    }
}
