//! The suites: checks that run sequentially on a cluster and report duration and measurements.
//!
//! A check may depend on earlier ones; a failure does not stop the others. To add a suite: a module with a function `checks`, and an entry
//! in `SUITES`. Suites for the same kind of cluster share one, in that order. Independent rows of checks in a suite run in parallel.

mod access;
mod backup;
mod chart;
mod command;
mod fake;
mod faults;
mod gpu;
mod helpers;
mod identity;
mod in_pod;
mod many;
mod operator;
mod orders;
mod registry;
mod rules;
mod run_graph;
mod runs;
mod smoke;
mod traces;
mod training;

use crate::cluster::{Cluster, Options};
use crate::requirements::Skip;
use anyhow::Result;
use std::thread;
use std::time::Instant;

/// One check of a suite. It returns a note for the report, which may be empty.
pub(crate) struct Check {
    pub(crate) name: &'static str,
    pub(crate) run: fn(&Cluster) -> Result<String>,
}

/// What a suite needs of its cluster.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Needs {
    /// Nothing but an API server; stand-ins for kubelets are enough.
    ApiServer,
    /// Pods, which may be of stand-ins.
    AnyPods,
    /// Nodes that run containers. Checks that need control over a node are skipped on a given cluster.
    Pods,
    /// Stand-ins for kubelets, whose pods turn Ready without a container.
    StandIns,
    /// Control over nodes: faults and programs of nodes are what it is about.
    Nodes,
}

/// Checks that share a cluster.
struct Suite {
    name: &'static str,
    needs: Needs,
    /// Whether it takes long and runs only if named.
    long: bool,
    /// Sequential parts; the rows of a part run in parallel.
    parts: &'static [&'static [Row]],
}

/// Checks that run sequentially.
type Row = fn() -> Vec<Check>;

const SUITES: [Suite; 17] = [
    Suite { name: "smoke", needs: Needs::Pods, long: false, parts: &[&[smoke::checks]] },
    Suite { name: "command", needs: Needs::Pods, long: false, parts: &[&[command::checks]] },
    Suite {
        name: "identity",
        needs: Needs::Pods,
        long: false,
        parts: &[&[identity::checks], &[identity::lives, identity::others]],
    },
    Suite { name: "training", needs: Needs::Pods, long: false, parts: &[&[training::checks]] },
    // Needs a program that takes long to build, and runs it on a node.
    Suite { name: "cert-manager", needs: Needs::Nodes, long: true, parts: &[&[identity::cert_manager]] },
    Suite { name: "access", needs: Needs::Pods, long: false, parts: &[&[access::checks]] },
    Suite { name: "backup", needs: Needs::Pods, long: false, parts: &[&[backup::checks]] },
    Suite { name: "million", needs: Needs::Pods, long: true, parts: &[&[backup::million]] },
    // Last suite with real nodes: kubelets recover slowly after an outage of the API server.
    Suite { name: "faults", needs: Needs::Nodes, long: false, parts: &[&[faults::checks]] },
    Suite { name: CAMPAIGN, needs: Needs::Nodes, long: true, parts: &[&[faults::campaign]] },
    // Needs a program of another checkout.
    Suite { name: VERSIONS, needs: Needs::Nodes, long: true, parts: &[&[faults::versions]] },
    Suite { name: "fake", needs: Needs::StandIns, long: false, parts: &[&[fake::checks]] },
    Suite { name: "rules", needs: Needs::ApiServer, long: false, parts: &[&[rules::checks]] },
    Suite { name: "operator", needs: Needs::StandIns, long: false, parts: &[&[operator::checks]] },
    Suite { name: "many", needs: Needs::StandIns, long: false, parts: &[&[many::checks]] },
    Suite { name: "hundreds", needs: Needs::StandIns, long: true, parts: &[&[many::hundreds]] },
    Suite { name: "chart", needs: Needs::AnyPods, long: false, parts: &[&[chart::checks], &[chart::releases]] },
];

impl Needs {
    /// Whether the built-in cluster for it has stand-ins for kubelets.
    const fn fake(self) -> bool {
        matches!(self, Self::ApiServer | Self::AnyPods | Self::StandIns)
    }

    /// Returns why a suite cannot run on a given cluster; `None` if it can. `loads_images`: images can be loaded into its nodes.
    fn refusal(self, loads_images: bool) -> Option<&'static str> {
        match self {
            Self::ApiServer | Self::AnyPods => None,
            Self::Pods if loads_images => None,
            Self::Pods => Some(
                "its pods need images of this build: name a command that loads an archive, such as --image-loader \"kind load image-archive\"",
            ),
            Self::StandIns => {
                Some("its pods are stand-ins that turn Ready without a container, which only the built-in cluster has")
            }
            Self::Nodes => Some("it needs control over nodes, which only the built-in cluster offers"),
        }
    }
}

/// Name of the suite that takes an hour.
pub const CAMPAIGN: &str = "campaign";

/// Name of the suite that needs the workers of an earlier build.
pub const VERSIONS: &str = "versions";

/// Names of all suites.
pub fn names() -> Vec<&'static str> {
    SUITES.iter().map(|suite| suite.name).collect()
}

/// Returns the clusters that these suites (all, if none is named) need.
pub fn clusters(suites: &[String]) -> Vec<Options> {
    let needed = |fake| SUITES.iter().any(|it| it.needs.fake() == fake && is_meant(it, suites));
    [false, true].into_iter().filter(|&it| needed(it)).map(|fake| Options { fake, ..Options::default() }).collect()
}

/// Why a suite that is meant does not run on a cluster.
enum Unfit {
    /// It runs on the other kind of built-in cluster.
    Elsewhere,
    /// It cannot run on a given cluster, for this reason.
    Refused(&'static str),
}

fn fit(suite: &Suite, cluster: &Cluster) -> Result<(), Unfit> {
    match &cluster.given {
        Some(given) => suite.needs.refusal(given.loads_images()).map_or(Ok(()), |reason| Err(Unfit::Refused(reason))),
        None if suite.needs.fake() == cluster.is_fake() => Ok(()),
        None => Err(Unfit::Elsewhere),
    }
}

fn is_meant(suite: &Suite, names: &[String]) -> bool {
    if names.is_empty() { !suite.long } else { names.iter().any(|it| it == suite.name) }
}

/// Results of checks.
#[derive(Debug, Clone, Copy, Default)]
pub struct Summary {
    /// Passed checks.
    pub passed: usize,
    /// Failed checks.
    pub failed: usize,
    /// Checks that could not run, with a reported reason.
    pub skipped: usize,
}

impl std::fmt::Display for Summary {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} passed, {} failed, {} skipped", self.passed, self.failed, self.skipped)
    }
}

impl Summary {
    /// Adds another summary.
    fn add(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.skipped += other.skipped;
    }

    /// Runs a check, and prints and counts its result.
    pub fn record(&mut self, name: &str, check: impl FnOnce() -> Result<String>) {
        let began = Instant::now();
        let ended = check();
        let seconds = began.elapsed().as_secs_f64();
        match ended {
            Ok(note) => {
                self.passed += 1;
                println!("ok    {name} ({seconds:.1} s) {note}");
            }
            Err(error) if error.is::<Skip>() => {
                self.skipped += 1;
                println!("SKIP  {name}: {error:#}");
            }
            Err(error) => {
                self.failed += 1;
                println!("FAIL  {name} ({seconds:.1} s): {error:#}");
            }
        }
    }
}

/// Runs those of these suites (all, if none is named) that match the cluster; `only` selects checks whose name contains it. Suites that
/// a given cluster cannot run are counted as skipped.
pub fn run(cluster: &Cluster, suites: &[String], only: Option<&str>, summary: &mut Summary) {
    for suite in SUITES.iter().filter(|it| is_meant(it, suites)) {
        match fit(suite, cluster) {
            Ok(()) => {}
            Err(Unfit::Elsewhere) => continue,
            Err(Unfit::Refused(reason)) => {
                summary.record(suite.name, || Err(Skip(reason.to_owned()).into()));
                continue;
            }
        }
        println!("\n{}", suite.name);
        for rows in suite.parts {
            thread::scope(|scope| {
                let running: Vec<_> =
                    rows.iter().map(|&row| scope.spawn(move || run_row(cluster, &row(), only))).collect();
                for row in running {
                    summary.add(row.join().expect("a check returns an error"));
                }
            });
        }
    }
}

/// Runs checks one after the other. On a given cluster the others are skipped with the first one, on which they rest.
fn run_row(cluster: &Cluster, checks: &[Check], only: Option<&str>) -> Summary {
    let mut summary = Summary::default();
    let mut missing = None;
    for (index, check) in checks.iter().enumerate() {
        if only.is_some_and(|text| !check.name.contains(text)) {
            continue;
        }
        let run = || match missing {
            Some(first) => Err(Skip(format!("it rests on \"{first}\", which was skipped")).into()),
            None => (check.run)(cluster),
        };
        summary.record(check.name, run);
        if index == 0 && cluster.is_given() && summary.skipped > 0 {
            missing = Some(check.name);
        }
    }
    summary
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn suites_that_need_the_built_in_cluster_are_refused_on_a_given_one_with_the_reason() {
        let runs = |loads_images| -> Vec<&str> {
            let fits = SUITES.iter().filter(|suite| suite.needs.refusal(loads_images).is_none());
            fits.map(|suite| suite.name).collect()
        };
        assert_eq!(runs(false), ["rules", "chart"]);
        assert_eq!(
            runs(true),
            ["smoke", "command", "identity", "training", "access", "backup", "million", "rules", "chart"]
        );
        let reason = |name: &str, loads_images| {
            SUITES.iter().find(|suite| suite.name == name).and_then(|suite| suite.needs.refusal(loads_images))
        };
        assert!(reason("faults", true).is_some_and(|reason| reason.contains("control over nodes")));
        assert!(reason("operator", true).is_some_and(|reason| reason.contains("stand-ins")));
        assert!(reason("smoke", false).is_some_and(|reason| reason.contains("--image-loader")));
    }
}
