//! Checks against what exists already: the cluster in the state directory, the cluster that runs.

use super::check::entry_place;
use super::rules::{self, find};
use super::{Manifest, clusters_of_runs, place};
use crate::cluster::{CapacityPolicy, LearnerClusterSpec};
use crate::code::Code;
use crate::problem::{Problem, Problems};

/// Compares what a cluster was created with to what a manifest asks for.
///
/// Returns one problem per immutable field that differs, without places; [`Manifest::check_against`] adds those.
pub fn check_immutable(old: &LearnerClusterSpec, new: &LearnerClusterSpec) -> Vec<Problem> {
    let fields: [(&str, String, String); 4] = [
        ("spec.partitions", old.partitions.to_string(), new.partitions.to_string()),
        ("spec.learning.law", old.learning.law.to_string(), new.learning.law.to_string()),
        ("spec.features.dimension", old.features.dimension.to_string(), new.features.dimension.to_string()),
        ("spec.features.dtype", old.features.dtype.to_string(), new.features.dtype.to_string()),
    ];
    let changed = fields.into_iter().filter(|(_, old, new)| old != new);
    changed
        .map(|(path, old, new)| {
            let message = format!("{path} is {new}, but the cluster was created with {old}; it cannot change");
            Problem::new(Code::Immutable, message)
                .of(path)
                .help(format!("keep this cluster:   set {path}: {old}"))
                .help("or start another:    give it another metadata.name")
        })
        .collect()
}

impl Manifest {
    /// Compares the manifest's cluster with the one in the state directory, which was created with `old` and holds
    /// `held` memories.
    ///
    /// # Errors
    ///
    /// Immutable fields that differ, and a capacity below what is held where nothing may be evicted.
    pub fn check_against(&self, old: &LearnerClusterSpec, held: u64) -> Result<(), Problems> {
        let Some(new) = self.cluster.as_ref().map(|cluster| &cluster.spec) else { return Ok(()) };
        let mut problems = check_immutable(old, new);
        let capacity = &new.capacity;
        if capacity.policy == CapacityPolicy::Refuse && capacity.memories < held.min(old.capacity.memories) {
            let path = "spec.capacity.memories";
            let message = format!(
                "{path} is {}, but the cluster holds {held} and spec.capacity.policy is Refuse; allowed: at least what \
                 is held",
                capacity.memories
            );
            let problem = Problem::new(Code::Conflicting, message).of(path);
            problems.push(problem.help("set policy: Evict to drop the weakest, or remove memories first"));
        }
        if problems.is_empty() {
            return Ok(());
        }
        let located = problems.into_iter().map(|problem| {
            // A field that is absent has its default; the spec that lacks it is the place to add it.
            let path = problem.path().unwrap_or_default();
            let place = self.cluster_tree.as_ref().map(|tree| {
                find(tree, path)
                    .or_else(|| find(tree, "spec"))
                    .map_or_else(|| place(tree.referenced), |entry| entry_place(entry, &self.text))
            });
            problem.at(place)
        });
        Err(Problems::new(&self.origin, &self.text, located.collect()))
    }
    /// Checks the runs against a cluster that is not in the file, called `name`, whose spec is `cluster`.
    ///
    /// # Errors
    ///
    /// Runs of another cluster, and those that do not fit into this one.
    pub fn check_runs_on(&self, name: &str, cluster: &LearnerClusterSpec) -> Result<(), Problems> {
        let mut problems = clusters_of_runs(&self.text, &self.run_trees, name, "that runs");
        for run in &self.run_trees {
            problems.append(&mut rules::run(&self.text, run, Some(cluster.capacity.memories.into())));
        }
        if problems.is_empty() { Ok(()) } else { Err(Problems::new(&self.origin, &self.text, problems)) }
    }
}
