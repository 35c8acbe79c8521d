//! Whether what clients saw of one id fits an order of its operations in which each takes effect at one moment between its
//! request and its answer.
//!
//! The search of Wing and Gong with the memory of Lowe: what was put in order so far is a set of calls, and a set that led nowhere
//! once is not tried again. An addition of 4^j units names itself in every later sum, so the set alone gives the value. A read
//! that fits now is taken now, since it changes nothing. An addition whose outcome nobody learned may come at any later moment, or
//! never.

use std::collections::HashSet;

/// Calls of one id that are searched together, at most: as many as a set has places.
pub(crate) const MOST_CALLS: usize = 128;
/// Sets that are tried before a search is given up.
const MOST_SETS: usize = 200_000;

/// What was asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum What {
    /// These units were added.
    Add(u32),
    /// The value was read; `None` = the id was not there.
    Read(Option<u32>),
}

/// One operation as its client saw it. Moments are numbers of a count that all clients share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Call {
    pub(crate) what: What,
    pub(crate) asked: u64,
    /// `None` = its outcome is unknown.
    pub(crate) answered: Option<u64>,
}

/// What a search found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Found {
    /// There is such an order.
    Order,
    /// There is none.
    None,
    /// Too much to try.
    GaveUp,
}

/// Looks for an order.
pub(crate) fn search(calls: &[Call]) -> Found {
    assert!(calls.len() <= MOST_CALLS, "{} calls", calls.len());
    let mut tried = HashSet::new();
    let mut open = vec![(0_u128, 0_u64)];
    while let Some((mut done, value)) = open.pop() {
        let is_done = |done: u128, index: usize| done >> index & 1 == 1;
        // Nothing comes before what had its answer when it was asked.
        let limit = |done: u128| {
            let waiting = calls.iter().enumerate().filter(|(index, _)| !is_done(done, *index));
            waiting.filter_map(|(_, call)| call.answered).min()
        };
        let fits = |done: u128, limit: u64| {
            calls.iter().enumerate().position(|(index, call)| {
                let sees = call.what == What::Read(u32::try_from(value).ok());
                sees && !is_done(done, index) && call.asked < limit
            })
        };
        let end = loop {
            let Some(limit) = limit(done) else { return Found::Order };
            match fits(done, limit) {
                Some(read) => done |= 1 << read,
                None => break limit,
            }
        };
        if !tried.insert(done) {
            continue;
        }
        if tried.len() > MOST_SETS {
            return Found::GaveUp;
        }
        for (index, call) in calls.iter().enumerate() {
            if let What::Add(units) = call.what
                && !is_done(done, index)
                && call.asked < end
            {
                open.push((done | 1 << index, value + u64::from(units)));
            }
        }
    }
    Found::None
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn add(units: u32, asked: u64, answered: u64) -> Call {
        Call { what: What::Add(units), asked, answered: Some(answered) }
    }

    const fn read(value: u32, asked: u64, answered: u64) -> Call {
        Call { what: What::Read(Some(value)), asked, answered: Some(answered) }
    }

    const fn unknown(units: u32, asked: u64) -> Call {
        Call { what: What::Add(units), asked, answered: None }
    }

    #[test]
    fn what_overlaps_may_come_in_any_order_and_what_does_not_may_not() {
        assert_eq!(search(&[add(1, 0, 5), add(4, 1, 6), read(4, 2, 3), read(5, 7, 8)]), Found::Order);
        assert_eq!(search(&[add(1, 0, 1), read(0, 2, 3)]), Found::None, "a stale read");
        assert_eq!(search(&[add(1, 0, 9), read(1, 2, 3), read(0, 4, 5)]), Found::None, "new, then old again");
        assert_eq!(search(&[add(1, 0, 1), add(4, 2, 3), read(4, 4, 5)]), Found::None, "the first is lost");
        assert_eq!(search(&[add(1, 0, 1), read(2, 2, 3)]), Found::None, "applied twice");
        let missing = Call { what: What::Read(None), asked: 2, answered: Some(3) };
        assert_eq!(search(&[add(1, 0, 1), missing]), Found::None);
    }

    #[test]
    fn what_nobody_learned_may_come_late_or_never_but_once() {
        assert_eq!(search(&[unknown(1, 0), read(0, 5, 6), read(1, 7, 8)]), Found::Order);
        assert_eq!(search(&[unknown(1, 0), read(0, 5, 6)]), Found::Order);
        assert_eq!(search(&[unknown(1, 0), read(1, 5, 6), read(0, 7, 8)]), Found::None);
        assert_eq!(search(&[read(1, 1, 2), unknown(1, 3)]), Found::None, "before it was asked for");
    }

    #[test]
    fn a_search_among_many_that_overlap_ends() {
        let mut calls: Vec<Call> = (0..15).map(|j| add(1 << (2 * j), 0, 1_000)).collect();
        calls.push(read(0b01_00_01, 1, 2));
        assert_eq!(search(&calls), Found::Order);
        calls.push(read(0b01, 3, 4));
        assert_eq!(search(&calls), Found::None);
    }
}
