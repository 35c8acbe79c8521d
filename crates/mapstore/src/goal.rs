//! The goal of a cluster, stored with its map.

use crate::format::{DecodeError, seal, unseal};
use engram_memory::Ordinal;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;

/// Goal set by administrators.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Goal {
    /// Number of workers, if it was scaled.
    pub workers: Option<Scale>,
    /// Workers to evacuate.
    pub draining: BTreeSet<Ordinal>,
}

/// A number of workers set at runtime. It is valid until the manifest changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Scale {
    /// Number of workers.
    pub to: u32,
    /// Number in the manifest at that time.
    pub from: u32,
}

impl Goal {
    /// Returns the desired number of workers, where the manifest has `manifest`.
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
