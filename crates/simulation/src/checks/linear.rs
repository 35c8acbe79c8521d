//! Linearizability check of one id: whether its calls fit an order in which each takes effect at one moment between
//! request and response.
//!
//! Search of Wing and Gong with memoization by Lowe: the calls ordered so far form a set, and no set is tried twice. Each
//! addition of 4^j units is recognizable in every later sum, so the set alone determines the value. A read that fits is
//! ordered at once, since it changes nothing. An addition with unknown outcome may take effect at any later moment, or
//! never.

use std::collections::HashSet;

/// Maximum number of calls of one id: the size of a set.
pub(crate) const MAX_CALLS: usize = 128;
/// Sets tried before a search is given up.
const MAX_SETS: usize = 200_000;

/// Kind of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CallKind {
    /// Adds units.
    Add(u32),
    /// Reads the value; `None` = the id does not exist.
    Read(Option<u32>),
}

/// One call as its client saw it, in logical time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Call {
    pub(crate) what: CallKind,
    pub(crate) requested: u64,
    /// `None` = its outcome is unknown.
    pub(crate) answered: Option<u64>,
}

/// Result of a search.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Linearization {
    /// An order exists.
    Order,
    /// No order exists.
    None,
    /// Too many states.
    GaveUp,
}

/// Searches an order.
pub(crate) fn search(calls: &[Call]) -> Linearization {
    assert!(calls.len() <= MAX_CALLS, "{} calls", calls.len());
    let mut tried = HashSet::new();
    let mut open = vec![(0_u128, 0_u64)];
    while let Some((mut done, value)) = open.pop() {
        let is_done = |done: u128, index: usize| done >> index & 1 == 1;
        // No call comes before one that was answered before its request.
        let limit = |done: u128| {
            let waiting = calls.iter().enumerate().filter(|(index, _)| !is_done(done, *index));
            waiting.filter_map(|(_, call)| call.answered).min()
        };
        let fits = |done: u128, limit: u64| {
            calls.iter().enumerate().position(|(index, call)| {
                let sees = call.what == CallKind::Read(u32::try_from(value).ok());
                sees && !is_done(done, index) && call.requested < limit
            })
        };
        let end = loop {
            let Some(limit) = limit(done) else { return Linearization::Order };
            match fits(done, limit) {
                Some(read) => done |= 1 << read,
                None => break limit,
            }
        };
        if !tried.insert(done) {
            continue;
        }
        if tried.len() > MAX_SETS {
            return Linearization::GaveUp;
        }
        for (index, call) in calls.iter().enumerate() {
            if let CallKind::Add(units) = call.what
                && !is_done(done, index)
                && call.requested < end
            {
                open.push((done | 1 << index, value + u64::from(units)));
            }
        }
    }
    Linearization::None
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn add(units: u32, requested: u64, answered: u64) -> Call {
        Call { what: CallKind::Add(units), requested, answered: Some(answered) }
    }

    const fn read(value: u32, requested: u64, answered: u64) -> Call {
        Call { what: CallKind::Read(Some(value)), requested, answered: Some(answered) }
    }

    const fn unknown(units: u32, requested: u64) -> Call {
        Call { what: CallKind::Add(units), requested, answered: None }
    }

    #[test]
    fn only_overlapping_calls_may_be_reordered() {
        assert_eq!(search(&[add(1, 0, 5), add(4, 1, 6), read(4, 2, 3), read(5, 7, 8)]), Linearization::Order);
        assert_eq!(search(&[add(1, 0, 1), read(0, 2, 3)]), Linearization::None, "a stale read");
        assert_eq!(search(&[add(1, 0, 9), read(1, 2, 3), read(0, 4, 5)]), Linearization::None, "new, then old again");
        assert_eq!(search(&[add(1, 0, 1), add(4, 2, 3), read(4, 4, 5)]), Linearization::None, "the first is lost");
        assert_eq!(search(&[add(1, 0, 1), read(2, 2, 3)]), Linearization::None, "applied twice");
        let missing = Call { what: CallKind::Read(None), requested: 2, answered: Some(3) };
        assert_eq!(search(&[add(1, 0, 1), missing]), Linearization::None);
    }

    #[test]
    fn call_with_unknown_outcome_may_take_effect_late_or_never_but_once() {
        assert_eq!(search(&[unknown(1, 0), read(0, 5, 6), read(1, 7, 8)]), Linearization::Order);
        assert_eq!(search(&[unknown(1, 0), read(0, 5, 6)]), Linearization::Order);
        assert_eq!(search(&[unknown(1, 0), read(1, 5, 6), read(0, 7, 8)]), Linearization::None);
        assert_eq!(search(&[read(1, 1, 2), unknown(1, 3)]), Linearization::None, "before its request");
    }

    #[test]
    fn search_of_many_overlapping_calls_terminates() {
        let mut calls: Vec<Call> = (0..15).map(|j| add(1 << (2 * j), 0, 1_000)).collect();
        calls.push(read(0b01_00_01, 1, 2));
        assert_eq!(search(&calls), Linearization::Order);
        calls.push(read(0b01, 3, 4));
        assert_eq!(search(&calls), Linearization::None);
    }
}
