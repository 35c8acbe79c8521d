//! What people ordered for a cluster, kept beside its map.

use crate::format::{DecodeError, seal, unseal};
use engram_memory::Ordinal;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;

/// What people ordered.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Goal {
    /// How many workers the cluster shall have.
    pub workers: Option<Scale>,
    /// Who shall be emptied of copies.
    pub draining: BTreeSet<Ordinal>,
}

/// A number of workers that was ordered of a running cluster. It holds until the manifest says something new.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Scale {
    /// Workers ordered.
    pub to: u32,
    /// What the manifest said then.
    pub from: u32,
}

impl Goal {
    /// How many workers the cluster shall have, where its manifest says `manifest`.
    pub fn workers(&self, manifest: u32) -> u32 {
        self.workers.filter(|scale| scale.from == manifest).map_or(manifest, |scale| scale.to)
    }
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct GoalFile {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    workers: Option<ScaleFile>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    draining: Vec<u32>,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct ScaleFile {
    to: u32,
    from: u32,
}

pub(crate) fn encode(goal: &Goal) -> String {
    let file = GoalFile {
        workers: goal.workers.map(|Scale { to, from }| ScaleFile { to, from }),
        draining: goal.draining.iter().map(|ordinal| ordinal.0).collect(),
    };
    seal("goal", serde_json::to_value(file).expect("a goal has string keys only"))
}

pub(crate) fn decode(text: &str) -> Result<Goal, DecodeError> {
    let file: GoalFile =
        serde_json::from_value(unseal("goal", text)?).map_err(|error| DecodeError::Damaged(error.to_string()))?;
    let draining = file.draining.into_iter().map(Ordinal).collect();
    Ok(Goal { workers: file.workers.map(|ScaleFile { to, from }| Scale { to, from }), draining })
}
