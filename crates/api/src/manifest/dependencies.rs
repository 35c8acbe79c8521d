//! Order between the runs of a file: no cycles, and no unknown names where all runs must be in the file.

use super::suggestion::nearest;
use super::{Manifest, Requirement, place_of};
use crate::code::Code;
use crate::problem::Problem;
use crate::run::{LearnerRun, find_cycle};

const PATH: &str = "spec.dependsOn";

/// Checks the dependencies between the runs of a file.
pub(super) fn check(text: &str, manifest: &Manifest, needs: Requirement) -> Vec<Problem> {
    let mut problems = Vec::new();
    // A cluster that is being started has no other runs than those of the file and of earlier starts of it.
    if needs == Requirement::Cluster {
        problems.extend(unknown_names(text, manifest));
    }
    let of = |run: &LearnerRun| run.spec.depends_on.iter().map(|on| on.run.clone()).collect::<Vec<_>>();
    let names: Vec<(&str, Vec<String>)> =
        manifest.runs.iter().map(|run| (run.metadata.name.as_str(), of(run))).collect();
    let graph = names.iter().map(|(run, on)| (*run, on.iter().map(String::as_str).collect())).collect();
    if let Some(cycle) = find_cycle(&graph) {
        let message = format!("{PATH} is a cycle: {}; allowed: an order without cycles", cycle.join(" -> "));
        let at = names.iter().position(|(name, _)| *name == cycle[0]).and_then(|at| manifest.run_trees.get(at));
        let problem = Problem::new(Code::Conflicting, message).of(PATH).help("remove one of these dependencies");
        problems.push(match at {
            Some(tree) => problem.at(place_of(tree, PATH, text)),
            None => problem,
        });
    }
    problems
}

fn unknown_names(text: &str, manifest: &Manifest) -> Vec<Problem> {
    let known: Vec<&str> = manifest.runs.iter().map(|run| run.metadata.name.as_str()).collect();
    let mut problems = Vec::new();
    for (run, tree) in manifest.runs.iter().zip(&manifest.run_trees) {
        for dependency in run.spec.depends_on.iter().filter(|on| !known.contains(&on.run.as_str())) {
            let message = format!(
                "{PATH} of run {} has {}, but the file has no run of that name; allowed: {}",
                run.metadata.name,
                dependency.run,
                known.join(", ")
            );
            let problem = Problem::new(Code::Conflicting, message).of(PATH).at(place_of(tree, PATH, text));
            let near = nearest(&dependency.run, known.iter().copied());
            problems
                .push(near.into_iter().fold(problem, |problem, near| problem.help(format!("did you mean {near}?"))));
        }
    }
    problems
}
