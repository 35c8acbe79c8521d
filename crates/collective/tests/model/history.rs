//! What no participant knows: who finished which step in which generation.

use engram_collective::group::{MemberId, Position, Record};
use std::collections::{BTreeMap, BTreeSet};

/// What must not happen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Harm {
    /// A generation has two records.
    TwoRecords,
    /// A step has a second outcome.
    SecondHistory,
    /// A generation starts before a step that all members of one finished.
    LostStep,
    /// A member trains on another state than that of the committed steps.
    OtherState,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub(crate) struct History {
    generations: BTreeMap<u64, Record>,
    /// By generation and step.
    finished: BTreeMap<(u64, u64), BTreeSet<MemberId>>,
    /// Digests of steps that any member finished.
    applied: BTreeMap<u64, u64>,
    /// Digests of steps that all members of a generation finished, or from which one starts.
    committed: BTreeMap<u64, u64>,
    pub(crate) harm: Option<Harm>,
}

impl History {
    fn harm(&mut self, harm: Harm) {
        self.harm.get_or_insert(harm);
    }

    fn commit(&mut self, position: Position) {
        let known = *self.committed.entry(position.step).or_insert(position.digest);
        if known != position.digest {
            self.harm(Harm::SecondHistory);
        }
    }

    /// Record of a generation that was published.
    pub(crate) fn record(&self, generation: u64) -> Option<&Record> {
        self.generations.get(&generation)
    }

    pub(crate) fn committed_steps(&self) -> u64 {
        self.committed.last_key_value().map_or(0, |(step, _)| *step)
    }

    /// A record was published.
    pub(crate) fn published(&mut self, record: &Record) {
        let is_new = !self.generations.contains_key(&record.generation);
        if self.generations.entry(record.generation).or_insert_with(|| record.clone()) != record {
            self.harm(Harm::TwoRecords);
        }
        if is_new && record.position.step < self.committed_steps() {
            self.harm(Harm::LostStep);
        }
        self.commit(record.position);
    }

    /// A member finished a step in a generation.
    pub(crate) fn finished(&mut self, member: MemberId, generation: u64, position: Position) {
        let members = self.finished.entry((generation, position.step)).or_default();
        members.insert(member);
        let known = *self.applied.entry(position.step).or_insert(position.digest);
        let all = self.generations.get(&generation).is_some_and(|it| it.members.iter().all(|it| members.contains(it)));
        if all {
            self.commit(position);
        }
        if known != position.digest {
            self.harm(Harm::SecondHistory);
        }
    }

    /// A member trains after these steps.
    pub(crate) fn trains_after(&mut self, digests: &[u64]) {
        let differs =
            |(index, digest): (usize, &u64)| self.committed.get(&(index as u64)).is_some_and(|it| it != digest);
        if digests.iter().enumerate().any(differs) {
            self.harm(Harm::OtherState);
        }
    }
}
