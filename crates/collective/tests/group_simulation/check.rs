//! What must hold in every run.

use std::collections::{BTreeMap, BTreeSet};

use engram_collective::group::{MemberId, Position, Record};

/// A finished step in the history of a member.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Entry {
    /// The reduced gradient; `None` if the step was skipped.
    pub(crate) gradient: Option<Vec<f32>>,
    /// Digest of the state after the step.
    pub(crate) digest: u64,
}

/// Global knowledge that no participant has.
#[derive(Debug, Default)]
pub(crate) struct Checker {
    generations: BTreeMap<u64, Record>,
    /// Per generation and step: who finished it.
    finished: BTreeMap<(u64, u64), BTreeSet<MemberId>>,
    /// Digest of each committed step.
    committed: BTreeMap<u64, u64>,
    /// Digest of each step that any process applied, members that were removed later included.
    applied: BTreeMap<u64, u64>,
    /// Without a failover of the service, not even a removed member has another history. With one, the digest finds it when it returns.
    pub(crate) strict: bool,
    pub(crate) violation: Option<String>,
}

impl Checker {
    fn fail(&mut self, text: String) {
        self.violation.get_or_insert(text);
    }

    pub(crate) fn generations(&self) -> u64 {
        self.generations.len() as u64
    }

    pub(crate) fn committed_step(&self) -> u64 {
        self.committed.last_key_value().map_or(0, |(step, _)| *step)
    }

    fn commit(&mut self, position: Position, how: &str) {
        let known = *self.committed.entry(position.step).or_insert(position.digest);
        if known != position.digest {
            self.fail(format!("second history: step {} committed again {how}", position.step));
        }
    }

    /// A record was published.
    pub(crate) fn published(&mut self, record: &Record) {
        let known = self.generations.entry(record.generation).or_insert_with(|| record.clone());
        if known != record {
            let text = format!("generation {} has two records: {known:?} and {record:?}", record.generation);
            self.fail(text);
        }
        self.commit(record.position, "by a record");
    }

    /// A member finished a step in a generation.
    pub(crate) fn finished(&mut self, member: MemberId, generation: u64, step: u64, entry: &Entry) {
        let Some(record) = self.generations.get(&generation).cloned() else {
            return self.fail(format!("generation {generation} was not published"));
        };
        if let Some(gradient) = &entry.gradient {
            for (index, value) in gradient.iter().enumerate() {
                let expected = f32::from(u8::from(record.members.contains(&MemberId(index as u64))));
                if *value != expected {
                    let text = format!(
                        "gradient of member {index} counted {value} times in step {step}, generation {generation}"
                    );
                    return self.fail(text);
                }
            }
        }
        let applied = *self.applied.entry(step).or_insert(entry.digest);
        if self.strict && applied != entry.digest {
            self.fail(format!("second history: {member:?} applied step {step} of generation {generation} differently"));
        }
        let members = self.finished.entry((generation, step)).or_default();
        members.insert(member);
        if record.members.iter().all(|it| members.contains(it)) {
            self.commit(Position { step, digest: entry.digest }, "by its members");
        }
    }

    /// The history of a member of the newest generation.
    pub(crate) fn history(&mut self, member: MemberId, history: &[Entry]) {
        for (index, entry) in history.iter().enumerate().rev().take(4) {
            let step = index as u64 + 1;
            if self.committed.get(&step).is_some_and(|digest| *digest != entry.digest) {
                self.fail(format!("digest of member {member:?} differs from the committed one of step {step}"));
            }
        }
    }
}
