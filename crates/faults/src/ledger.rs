//! The ledger in the weights: the final weight shows how often each operation was applied.
//!
//! An id starts at weight 0 and does not decay. Its `j`-th operation adds 4^j units (a unit is 2^-30, exact as an
//! `f32`), at most [`OPERATIONS`] of them: even if each were applied three times, the sum would be 2^30 - 1, so no
//! weight is ever clamped and additions commute. At the end the `j`-th base-4 digit of the weight is the **number of
//! times** operation `j` was applied. One binary digit would not suffice: an operation applied twice would look like
//! the next one applied once.

use engram_memory::ONE;
use serde::Serialize;

/// Operations on one id.
pub const OPERATIONS: u32 = 15;

/// Returns the change of weight by operation `j`, in [2^-30, 2^-2].
///
/// # Panics If `j` is not below [`OPERATIONS`].
pub fn delta(j: u32) -> f32 {
    assert!(j < OPERATIONS, "an id has {OPERATIONS} operations");
    // A power of two from 2^-30 up: every f32 holds it exactly.
    (1_u64 << (2 * j)) as f32 / ONE as f32
}

/// Response that the client got for an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Response {
    /// It was applied.
    Acked,
    /// It was not applied, and never will be.
    Never,
    /// The outcome is unknown.
    Unknown,
}

/// Operations on one id, or on several ids that always share them, as known by the client.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Account {
    issued: u32,
    /// One bit per operation.
    acked: u16,
    never: u16,
}

/// Result of comparing weights with accounts, in operations.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Tally {
    /// Requested.
    pub operations: u64,
    /// Acknowledged.
    pub acked: u64,
    /// Not executed according to their response.
    pub never: u64,
    /// Without a final response.
    pub unknown: u64,
    /// Acknowledged but not applied.
    pub lost: u64,
    /// Applied more than once.
    pub doubled: u64,
    /// Applied although never requested, or not executed according to their response.
    pub conjured: u64,
}

impl Account {
    /// Begins the next operation; `None` after the last one.
    pub fn begin(&mut self) -> Option<u32> {
        let next = self.issued;
        (next < OPERATIONS).then(|| {
            self.issued += 1;
            next
        })
    }

    /// Notes the response of operation `j`; without one it is unknown.
    ///
    /// # Panics If it has not begun.
    pub fn note(&mut self, j: u32, response: Response) {
        assert!(j < self.issued, "operation {j} has not begun");
        match response {
            Response::Acked => self.acked |= 1 << j,
            Response::Never => self.never |= 1 << j,
            Response::Unknown => {}
        }
    }

    /// Compares with the weight, in units; `None` = the id does not exist.
    pub fn check(&self, units: Option<u32>) -> Tally {
        let weight = units.unwrap_or(0);
        let mut tally = Tally { operations: self.issued.into(), ..Tally::default() };
        for j in 0..OPERATIONS {
            let times = (weight >> (2 * j)) & 3;
            let bit = |bits: u16| bits & (1 << j) != 0;
            let (acked, never, issued) = (bit(self.acked), bit(self.never), j < self.issued);
            tally.acked += u64::from(acked);
            tally.never += u64::from(never);
            tally.unknown += u64::from(issued && !acked && !never);
            tally.lost += u64::from(acked && times == 0);
            tally.doubled += u64::from(times > 1);
            tally.conjured += u64::from(times > 0 && (!issued || never));
        }
        // The highest digits: a sum above fifteen operations applied three times.
        tally.doubled += u64::from(weight >> (2 * OPERATIONS) != 0);
        tally
    }
}

impl Tally {
    /// Adds the tally of another id.
    pub fn add(&mut self, other: &Self) {
        self.operations += other.operations;
        self.acked += other.acked;
        self.never += other.never;
        self.unknown += other.unknown;
        self.lost += other.lost;
        self.doubled += other.doubled;
        self.conjured += other.conjured;
    }

    /// Whether every response was true.
    pub const fn is_clean(&self) -> bool {
        self.lost == 0 && self.doubled == 0 && self.conjured == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use engram_memory::edge;

    /// An account after all operations, every third of them unknown, every fifth never.
    fn account() -> Account {
        let mut account = Account::default();
        while let Some(j) = account.begin() {
            let response = match j {
                j if j % 3 == 0 => Response::Unknown,
                j if j % 5 == 0 => Response::Never,
                _ => Response::Acked,
            };
            account.note(j, response);
        }
        account
    }

    fn weight(times: impl Fn(u32) -> u32) -> u32 {
        (0..OPERATIONS).map(|j| times(j) << (2 * j)).sum()
    }

    #[test]
    fn deltas_are_exact_and_three_of_each_fit() {
        for j in 0..OPERATIONS {
            assert_eq!(edge::delta(delta(j)), Ok(1 << (2 * j)));
        }
        assert_eq!(weight(|_| 3), ONE - 1);
    }

    #[test]
    fn every_wrong_count_of_every_operation_is_found() {
        let account = account();
        let truth = |j: u32| u32::from(!j.is_multiple_of(3) && !j.is_multiple_of(5));
        let clean = account.check(Some(weight(truth)));
        assert_eq!((clean.operations, clean.acked, clean.never, clean.unknown), (15, 8, 2, 5));
        assert!(clean.is_clean());
        for wrong in 0..OPERATIONS {
            for times in 0..=3 {
                let found = account.check(Some(weight(|j| if j == wrong { times } else { truth(j) })));
                let (unknown, never) = (wrong % 3 == 0, wrong % 3 != 0 && wrong % 5 == 0);
                let acked = !unknown && !never;
                assert_eq!(found.lost, u64::from(acked && times == 0), "operation {wrong}, {times} times");
                assert_eq!(found.doubled, u64::from(times > 1), "operation {wrong}, {times} times");
                assert_eq!(found.conjured, u64::from(never && times > 0), "operation {wrong}, {times} times");
            }
        }
    }

    #[test]
    fn lost_ids_and_unrequested_operations_are_found() {
        assert_eq!(account().check(None).lost, 8);
        let mut young = Account::default();
        assert_eq!(young.begin(), Some(0));
        assert_eq!(young.check(Some(4)), Tally { operations: 1, unknown: 1, conjured: 1, ..Tally::default() });
        assert_eq!(young.check(Some(ONE)).doubled, 1);
    }
}
