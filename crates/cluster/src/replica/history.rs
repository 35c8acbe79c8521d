//! Which term wrote which part of a log.
//!
//! A record is identified by (lsn, term), and two logs that hold the same identifier are equal up to it: only one
//! process writes under a term. So the last common record of two logs is found without their records.

use engram_memory::{Lsn, Term};

/// Terms kept separately; older ones become part of the floor. Far more than a partition changes its primary while a
/// member is away.
const MAX_RUNS: usize = 64;

/// Identifiers of a log's records, as runs of equal terms above a floor.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct History {
    /// Below it terms are not known; everything up to it is committed.
    floor: (Lsn, Term),
    /// (last lsn of the run, its term), ascending in both.
    runs: Vec<(Lsn, Term)>,
}

impl History {
    /// Creates the history of a log that continues after a committed record, or of an empty log.
    pub const fn from_floor(lsn: Lsn, term: Term) -> Self {
        Self { floor: (lsn, term), runs: Vec::new() }
    }

    /// Validates a history received from a peer; `None` if it is impossible.
    pub fn from_parts(floor: (Lsn, Term), runs: Vec<(Lsn, Term)>) -> Option<Self> {
        let ascending = |a: &(Lsn, Term), b: &(Lsn, Term)| a.0 < b.0 && a.1 < b.1;
        let follows = runs.first().is_none_or(|first| floor.0 < first.0 && floor.1 <= first.1);
        (follows && runs.windows(2).all(|pair| ascending(&pair[0], &pair[1]))).then_some(Self { floor, runs })
    }

    /// Returns the floor: lsn and term.
    pub const fn floor(&self) -> (Lsn, Term) {
        self.floor
    }

    /// Returns the runs: last lsn and term of each.
    pub fn runs(&self) -> &[(Lsn, Term)] {
        &self.runs
    }

    /// Returns the last record; lsn 0 if the log is empty.
    pub fn last(&self) -> (Lsn, Term) {
        self.runs.last().copied().unwrap_or(self.floor)
    }

    /// Returns the last lsn.
    pub fn end(&self) -> Lsn {
        self.last().0
    }

    /// Returns the term that wrote a record; `None` below the floor and above the end.
    pub fn term_at(&self, lsn: Lsn) -> Option<Term> {
        if lsn == self.floor.0 {
            return Some(self.floor.1);
        }
        let run = self.runs.iter().find(|run| run.0 >= lsn).filter(|_| lsn > self.floor.0)?;
        Some(run.1)
    }

    /// Whether these runs can be appended in order.
    pub fn may_append<'a>(&self, runs: impl Iterator<Item = &'a (Lsn, Term)>) -> bool {
        let mut last = self.last();
        runs.into_iter().all(|run| {
            let before = std::mem::replace(&mut last, *run);
            run.0 > before.0 && run.1 >= before.1
        })
    }

    /// Appends records up to `lsn`, written under `term`.
    ///
    /// # Panics
    /// If they do not follow the last record, or their term is below its term.
    pub fn append(&mut self, lsn: Lsn, term: Term) {
        let last = self.last();
        assert!(lsn > last.0 && term >= last.1, "records {lsn} of term {term} do not follow {last:?}");
        match self.runs.last_mut() {
            Some(run) if run.1 == term => run.0 = lsn,
            _ => self.runs.push((lsn, term)),
        }
        if self.runs.len() > MAX_RUNS {
            self.floor = self.runs.remove(0);
        }
    }

    /// Drops the records above `lsn`.
    ///
    /// # Panics
    /// Below the floor: everything there is committed.
    pub fn truncate(&mut self, lsn: Lsn) {
        assert!(lsn >= self.floor.0, "{lsn} is below the floor {}", self.floor.0);
        while let Some(&(end, term)) = self.runs.last()
            && end > lsn
        {
            self.runs.pop();
            if self.last().0 < lsn {
                self.runs.push((lsn, term));
            }
        }
    }

    /// Returns the records above `lsn` as runs.
    pub fn above(&self, lsn: Lsn) -> Vec<(Lsn, Term)> {
        self.runs.iter().copied().filter(|run| run.0 > lsn).collect()
    }

    /// Returns the last record that both logs hold; `None` if that is unknown, and a snapshot is needed.
    pub fn last_common(&self, other: &Self) -> Option<Lsn> {
        let identifiers = |history: &Self| {
            let floor = std::iter::once(history.floor);
            floor.chain(history.runs.iter().copied()).collect::<Vec<_>>()
        };
        // The last record of a run is in the other log, or the other log's last of the same term is in this one.
        let ends = |of: &Self, within: &Self| {
            let names = identifiers(of).into_iter();
            names.filter(|&(lsn, term)| within.term_at(lsn) == Some(term)).map(|(lsn, _)| lsn).max()
        };
        ends(self, other).max(ends(other, self))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn log(runs: &[(u64, u64)]) -> History {
        let mut history = History::default();
        runs.iter().for_each(|&(lsn, term)| history.append(Lsn(lsn), Term(term)));
        history
    }

    #[test]
    fn last_common_record_is_found_without_the_records() {
        let ours = log(&[(100, 3), (120, 5)]);
        assert_eq!(ours.last_common(&log(&[(100, 3), (110, 4)])), Some(Lsn(100)));
        assert_eq!(ours.last_common(&log(&[(90, 3)])), Some(Lsn(90)));
        assert_eq!(ours.last_common(&log(&[(100, 3), (111, 5)])), Some(Lsn(111)));
        assert_eq!(ours.last_common(&log(&[(105, 4)])), Some(Lsn(0)), "nothing but the beginning");
        assert_eq!(ours.last_common(&History::from_floor(Lsn(50), Term(3))), Some(Lsn(50)));
        assert_eq!(ours.last_common(&History::from_floor(Lsn(50), Term(2))), None);
        assert_eq!(History::from_floor(Lsn(50), Term(3)).last_common(&log(&[(40, 3)])), None, "below the floor");
        assert_eq!(ours.last_common(&ours), Some(Lsn(120)));
    }

    #[test]
    fn truncation_and_appends_keep_the_remaining_identifiers() {
        let mut history = log(&[(10, 1), (20, 2), (30, 4)]);
        assert_eq!(
            [10, 11, 25, 31].map(|lsn| history.term_at(Lsn(lsn)).map(|term| term.0)),
            [Some(1), Some(2), Some(4), None]
        );
        history.truncate(Lsn(15));
        assert_eq!(history.last(), (Lsn(15), Term(2)));
        history.append(Lsn(16), Term(7));
        assert_eq!(history.above(Lsn(12)), [(Lsn(15), Term(2)), (Lsn(16), Term(7))]);
        history.truncate(Lsn(0));
        assert_eq!(history, History::default());
    }

    #[test]
    fn impossible_histories_are_rejected() {
        let zero = (Lsn(0), Term(0));
        assert!(History::from_parts(zero, vec![(Lsn(4), Term(1)), (Lsn(4), Term(2))]).is_none());
        assert!(History::from_parts(zero, vec![(Lsn(4), Term(3)), (Lsn(5), Term(2))]).is_none());
        assert!(History::from_parts((Lsn(9), Term(1)), vec![(Lsn(4), Term(3))]).is_none());
        assert!(History::from_parts(zero, vec![(Lsn(4), Term(1)), (Lsn(5), Term(2))]).is_some());
    }
}
