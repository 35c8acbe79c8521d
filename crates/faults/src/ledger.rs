//! The ledger in the weights: what became of every single operation is read off the weight it left.
//!
//! An id starts at weight 0 and decays by 0. The `j`-th operation on it adds 4^j units (a unit is 2^-30, exact as an `f32`), at
//! most [`OPERATIONS`] of them: were each applied three times, their sum would still be 2^30 - 1, so that no weight is ever
//! clamped and additions commute. In the end the `j`-th base-4 digit of the weight is the **number of times** that operation
//! `j` was applied. One binary digit would not do: an operation applied twice would look like its neighbour applied once.

use engram_memory::ONE;
use serde::Serialize;

/// Operations on one id.
pub const OPERATIONS: u32 = 15;

/// The change of weight that operation `j` asks for, in [2^-30, 2^-2].
///
/// # Panics
/// `j` is not below [`OPERATIONS`].
pub fn delta(j: u32) -> f32 {
    assert!(j < OPERATIONS, "an id has {OPERATIONS} operations");
    // A power of two from 2^-30 up: every f32 holds it exactly.
    (1_u64 << (2 * j)) as f32 / ONE as f32
}

/// What the client was told of an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Response {
    /// It was applied.
    Acked,
    /// It was not applied, and never will be.
    Never,
    /// Nobody could say.
    Unknown,
}

/// What the client knows of the operations on one id, or on several that always share them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Account {
    issued: u32,
    /// A bit per operation.
    acked: u16,
    never: u16,
}

/// What a look at weights brought to light, counted in operations.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Tally {
    /// Asked for.
    pub operations: u64,
    /// Acknowledged.
    pub acked: u64,
    /// Told never to be applied.
    pub never: u64,
    /// Without an answer for good.
    pub unknown: u64,
    /// Acknowledged and not there.
    pub lost: u64,
    /// There more than once.
    pub doubled: u64,
    /// There, though never asked for, or told never to be applied.
    pub conjured: u64,
}

impl Account {
    /// Begins the next operation; `None` when all have been done.
    pub fn begin(&mut self) -> Option<u32> {
        let next = self.issued;
        (next < OPERATIONS).then(|| {
            self.issued += 1;
            next
        })
    }

    /// Notes what the client was told of operation `j`; one without a note is unknown.
    ///
    /// # Panics
    /// It has not begun.
    pub fn note(&mut self, j: u32, told: Response) {
        assert!(j < self.issued, "operation {j} has not begun");
        match told {
            Response::Acked => self.acked |= 1 << j,
            Response::Never => self.never |= 1 << j,
            Response::Unknown => {}
        }
    }

    /// Compares with the weight, in units; `None` = the id is not there.
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
        // The highest digits: a sum that ran over fifteen operations applied three times.
        tally.doubled += u64::from(weight >> (2 * OPERATIONS) != 0);
        tally
    }
}

impl Tally {
    /// Adds what another id showed.
    pub fn add(&mut self, other: &Self) {
        self.operations += other.operations;
        self.acked += other.acked;
        self.never += other.never;
        self.unknown += other.unknown;
        self.lost += other.lost;
        self.doubled += other.doubled;
        self.conjured += other.conjured;
    }

    /// Whether every answer was true.
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
            let told = match j {
                j if j % 3 == 0 => Response::Unknown,
                j if j % 5 == 0 => Response::Never,
                _ => Response::Acked,
            };
            account.note(j, told);
        }
        account
    }

    fn weight(times: impl Fn(u32) -> u32) -> u32 {
        (0..OPERATIONS).map(|j| times(j) << (2 * j)).sum()
    }

    #[test]
    fn a_delta_is_exact_at_the_edge_and_three_of_each_still_fit() {
        for j in 0..OPERATIONS {
            assert_eq!(edge::delta(delta(j)), Ok(1 << (2 * j)));
        }
        assert_eq!(weight(|_| 3), ONE - 1);
    }

    #[test]
    fn every_wrong_count_of_every_operation_is_told() {
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
    fn an_id_that_is_gone_has_lost_all_and_what_nobody_asked_for_is_told() {
        assert_eq!(account().check(None).lost, 8);
        let mut young = Account::default();
        assert_eq!(young.begin(), Some(0));
        assert_eq!(young.check(Some(4)), Tally { operations: 1, unknown: 1, conjured: 1, ..Tally::default() });
        assert_eq!(young.check(Some(ONE)).doubled, 1);
    }
}
