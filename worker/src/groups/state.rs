//! The replicated record of a group.

use crate::runs::record;
use crate::shared::Shared;
use engram_collective::group::{MemberId, Position, Quorum, Record, Settings, Timing};
use engram_memory::{Command, PartitionId, RunId};
use engram_proto::v1::{self, Problem, ProblemKind};
use serde::{Deserialize, Serialize};

/// Prefix of such a record; records of runs are JSON.
const PREFIX: &[u8] = b"group\n";

/// Returns whether a record is that of a group rather than of a run.
pub(crate) fn is_group(state: &[u8]) -> bool {
    state.starts_with(PREFIX)
}

/// A member in the record.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct MemberState {
    pub(super) id: u64,
    pub(super) reduce_address: String,
    pub(super) state_address: String,
}

/// Settings and membership of a group.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct GroupState {
    pub(super) name: String,
    pub(super) layout: u64,
    pub(super) detect_ms: u64,
    pub(super) min_members: u32,
    pub(super) generation: u64,
    pub(super) step: u64,
    pub(super) digest: u64,
    /// In rank order.
    pub(super) members: Vec<MemberState>,
}

impl GroupState {
    /// Creates a group with the settings of its first process.
    pub(super) const fn new(name: String, layout: u64, detect_ms: u64, min_members: u32) -> Self {
        Self { name, layout, detect_ms, min_members, generation: 0, step: 0, digest: 0, members: Vec::new() }
    }

    pub(super) const fn timing(&self) -> Timing {
        Timing::new(self.detect_ms)
    }

    /// Returns the settings of the membership service. The store rejects the record of an older host, so one survivor is enough.
    pub(super) const fn settings(&self) -> Settings {
        Settings { timing: self.timing(), min_members: self.min_members as usize, quorum: Quorum::StoreTerm }
    }

    pub(super) fn group_record(&self) -> Record {
        Record {
            generation: self.generation,
            members: self.members.iter().map(|member| MemberId(member.id)).collect(),
            position: Position { step: self.step, digest: self.digest },
        }
    }

    /// Returns why a process with other settings can't take part.
    pub(super) fn check(&self, join: &v1::JoinGroup) -> Result<(), Problem> {
        let fields = [
            ("timeout", join.detect_ms, self.detect_ms, " ms"),
            ("min_members", join.min_members.into(), self.min_members.into(), ""),
        ];
        if let Some((field, given, allowed, unit)) = fields.into_iter().find(|(_, given, allowed, _)| given != allowed)
        {
            let name = &self.name;
            let text =
                format!("{field} is {given}{unit}; allowed: {allowed}{unit}, with which group {name} was created");
            return Err(Problem::of(ProblemKind::Invalid, text));
        }
        if join.layout != self.layout {
            let text = format!(
                "model: its parameters, or the buckets of their gradients, are not those of group {}; allowed: the same names, shapes, order \
                 and bucket size on all members",
                self.name
            );
            return Err(Problem::of(ProblemKind::Invalid, text));
        }
        Ok(())
    }

    fn encode(&self) -> Vec<u8> {
        let json = serde_json::to_vec(self).expect("it has string keys only");
        [PREFIX, &json].concat()
    }

    fn decode(bytes: &[u8]) -> Result<Self, Problem> {
        let json = bytes.strip_prefix(PREFIX).unwrap_or(bytes);
        serde_json::from_slice(json)
            .map_err(|error| Problem::of(ProblemKind::DataCorruption, format!("the record of a group: {error}")))
    }

    /// Reads the record of a group and its version, if there is one.
    pub(super) async fn load(
        shared: &Shared,
        partition: PartitionId,
        run: RunId,
    ) -> Result<Option<(Self, u64)>, Problem> {
        let entry = record::load(shared, partition, run).await?;
        entry.map(|entry| Ok((Self::decode(&entry.state)?, entry.version))).transpose()
    }

    /// Writes the record; `false` if another host wrote it since `expected`.
    pub(super) async fn store_state(
        &self,
        shared: &Shared,
        (partition, run): (PartitionId, RunId),
        expected: u64,
    ) -> Result<bool, Problem> {
        let command = Command::RunRecord { run, expected, state: self.encode(), row: None };
        match record::write(shared, partition, command).await? {
            Ok(()) => Ok(true),
            Err(engram_memory::Refusal::RunConflict { .. }) => Ok(false),
            Err(refusal) => Err(Problem::from(&refusal)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn record_survives_and_differs_from_that_of_a_run() {
        let mut state = GroupState::new("demo".into(), 7, 500, 2);
        state.members.push(MemberState { id: 9, reduce_address: "h:1".into(), state_address: "h:2".into() });
        let bytes = state.encode();
        assert!(is_group(&bytes) && !is_group(b"{}"));
        assert_eq!(GroupState::decode(&bytes), Ok(state));
    }

    #[test]
    fn process_with_other_settings_is_rejected_with_the_field() {
        let state = GroupState::new("demo".into(), 7, 500, 2);
        let join = v1::JoinGroup { layout: 7, detect_ms: 500, min_members: 2, ..v1::JoinGroup::default() };
        assert_eq!(state.check(&join), Ok(()));
        let text = |join| state.check(&join).unwrap_err().message;
        assert!(
            text(v1::JoinGroup { detect_ms: 100, ..join.clone() }).starts_with("timeout is 100 ms; allowed: 500 ms")
        );
        assert!(text(v1::JoinGroup { min_members: 3, ..join.clone() }).starts_with("min_members is 3; allowed: 2"));
        assert!(text(v1::JoinGroup { layout: 8, ..join }).starts_with("model: "));
    }
}
