//! Validation against an existing cluster: the one in the state directory, or a running one.

use std::collections::BTreeSet;

use serde_json::Value;

use super::check::entry_place;
use super::rules::{self, find};
use super::{Manifest, foreign_clusters, place};
use crate::buffers::DeclaredBuffer;
use crate::cluster::{CapacityPolicy, LearnerClusterSpec};
use crate::code::Code;
use crate::problem::{Problem, Problems};

const BUFFERS: &str = "spec.buffers";

/// Compares the spec that a cluster was created with to a new one.
///
/// Returns one problem per changed immutable field and per changed setting of a declared buffer, without locations;
/// [`Manifest::check_against`] adds those.
pub fn check_immutable(old: &LearnerClusterSpec, new: &LearnerClusterSpec) -> Vec<Problem> {
    let fields: [(&str, String, String); 4] = [
        ("spec.partitions", old.partitions.to_string(), new.partitions.to_string()),
        ("spec.learning.law", old.learning.law.to_string(), new.learning.law.to_string()),
        ("spec.features.dimension", old.features.dimension.to_string(), new.features.dimension.to_string()),
        ("spec.features.dtype", old.features.dtype.to_string(), new.features.dtype.to_string()),
    ];
    let changed = fields.into_iter().filter(|(_, old, new)| old != new);
    let problem = |(path, old, new): (&str, String, String)| {
        let message = format!("{path} is {new}, but the cluster was created with {old}; it cannot change");
        Problem::new(Code::Immutable, message)
            .of(path)
            .help(format!("keep this cluster:   set {path}: {old}"))
            .help("or start another:    give it another metadata.name")
    };
    changed.map(problem).chain(changed_buffers(&old.buffers, &new.buffers)).collect()
}

/// Returns one problem per changed setting of a buffer that both specs declare.
fn changed_buffers(old: &[DeclaredBuffer], new: &[DeclaredBuffer]) -> Vec<Problem> {
    let mut problems = Vec::new();
    for (index, buffer) in new.iter().enumerate() {
        let Some(before) = old.iter().find(|before| before.name == buffer.name) else { continue };
        let value = |buffer| serde_json::to_value(buffer).expect("a declared buffer has only names as keys");
        let mut changes = Vec::new();
        differences(&format!("{BUFFERS}[{index}]"), &value(before), &value(buffer), &mut changes);
        problems.extend(changes.into_iter().map(|(path, old, new)| {
            let name = &buffer.name;
            let message =
                format!("{path} of buffer {name} is {new}, but the buffer was declared with {old}; it cannot change");
            let steps = "remove it from spec.buffers, run engram up and engram buffer delete";
            Problem::new(Code::Immutable, message)
                .of(path.clone())
                .help(format!("keep this buffer:    set {path}: {old}"))
                .help("or declare another:  give it another name")
                .help(format!("or replace it:       {steps} {name}, declare it again"))
        }));
    }
    problems
}

/// Collects the paths at which two values differ, with both values.
fn differences(path: &str, old: &Value, new: &Value, changes: &mut Vec<(String, String, String)>) {
    match (old, new) {
        (Value::Object(old), Value::Object(new)) => {
            let names: BTreeSet<&String> = old.keys().chain(new.keys()).collect();
            for name in names {
                let value = |of: &serde_json::Map<String, Value>| of.get(name).cloned().unwrap_or_default();
                differences(&format!("{path}.{name}"), &value(old), &value(new), changes);
            }
        }
        (Value::Array(old), Value::Array(new)) if old.len() == new.len() && old.iter().all(Value::is_object) => {
            for (index, (old, new)) in old.iter().zip(new).enumerate() {
                differences(&format!("{path}[{index}]"), old, new, changes);
            }
        }
        _ if old == new => {}
        _ => {
            let text = |value: &Value| match value {
                Value::Null => "absent".to_owned(),
                Value::String(text) => text.clone(),
                other => other.to_string(),
            };
            changes.push((path.to_owned(), text(old), text(new)));
        }
    }
}

impl Manifest {
    /// Compares the manifest's cluster with the one in the state directory, which was created with `old` and holds
    /// `held` memories.
    ///
    /// # Errors
    ///
    /// Returns changed immutable fields, and a capacity below the number of memories with `policy: Refuse`.
    pub fn check_against(&self, old: &LearnerClusterSpec, held: u64) -> Result<(), Problems> {
        let Some(new) = self.cluster.as_ref().map(|cluster| &cluster.spec) else { return Ok(()) };
        let mut problems = check_immutable(old, new);
        let capacity = &new.capacity;
        if capacity.policy == CapacityPolicy::Refuse && capacity.memories < held.min(old.capacity.memories) {
            let path = "spec.capacity.memories";
            let message = format!(
                "{path} is {}, but the cluster holds {held} and spec.capacity.policy is Refuse; allowed: at least that \
                 many",
                capacity.memories
            );
            let problem = Problem::new(Code::Conflicting, message).of(path);
            problems.push(
                problem
                    .help("set policy: Evict to evict the memories with the lowest weights, or remove memories first"),
            );
        }
        if problems.is_empty() {
            return Ok(());
        }
        let located = problems.into_iter().map(|problem| {
            // The problem of an absent field is reported at the spec, where it could be added.
            let path = problem.path().unwrap_or_default();
            let place = self.cluster_tree.as_ref().map(|tree| {
                find(tree, path)
                    .or_else(|| find(tree, BUFFERS).filter(|_| path.starts_with(BUFFERS)))
                    .or_else(|| find(tree, "spec"))
                    .map_or_else(|| place(tree.referenced), |entry| entry_place(entry, &self.text))
            });
            problem.at(place)
        });
        Err(Problems::new(&self.origin, &self.text, located.collect()))
    }

    /// Validates the runs against a cluster outside the file, called `name` with the spec `cluster`.
    ///
    /// # Errors
    ///
    /// Returns runs of another cluster, and runs that exceed the capacity of this one.
    pub fn check_runs_on(&self, name: &str, cluster: &LearnerClusterSpec) -> Result<(), Problems> {
        let mut problems = foreign_clusters(&self.text, &self.run_trees, name, "that runs");
        for run in &self.run_trees {
            problems.append(&mut rules::run(&self.text, run, Some(cluster.capacity.memories.into())));
        }
        if problems.is_empty() { Ok(()) } else { Err(Problems::new(&self.origin, &self.text, problems)) }
    }
}
