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

/// Checks that share a cluster.
struct Suite {
    name: &'static str,
    /// Fake kubelets are enough.
    fake: bool,
    /// Whether it takes long and runs only if named.
    long: bool,
    /// Sequential parts; the rows of a part run in parallel.
    parts: &'static [&'static [Row]],
}

/// Checks that run sequentially.
type Row = fn() -> Vec<Check>;

const SUITES: [Suite; 17] = [
    Suite { name: "smoke", fake: false, long: false, parts: &[&[smoke::checks]] },
    Suite { name: "command", fake: false, long: false, parts: &[&[command::checks]] },
    Suite {
        name: "identity",
        fake: false,
        long: false,
        parts: &[&[identity::checks], &[identity::lives, identity::others]],
    },
    Suite { name: "training", fake: false, long: false, parts: &[&[training::checks]] },
    // Needs a program that takes long to build.
    Suite { name: "cert-manager", fake: false, long: true, parts: &[&[identity::cert_manager]] },
    Suite { name: "access", fake: false, long: false, parts: &[&[access::checks]] },
    Suite { name: "backup", fake: false, long: false, parts: &[&[backup::checks]] },
    Suite { name: "million", fake: false, long: true, parts: &[&[backup::million]] },
    // Last suite with real nodes: kubelets recover slowly after an outage of the API server.
    Suite { name: "faults", fake: false, long: false, parts: &[&[faults::checks]] },
    Suite { name: CAMPAIGN, fake: false, long: true, parts: &[&[faults::campaign]] },
    // Needs a program of another checkout.
    Suite { name: VERSIONS, fake: false, long: true, parts: &[&[faults::versions]] },
    Suite { name: "fake", fake: true, long: false, parts: &[&[fake::checks]] },
    Suite { name: "rules", fake: true, long: false, parts: &[&[rules::checks]] },
    Suite { name: "operator", fake: true, long: false, parts: &[&[operator::checks]] },
    Suite { name: "many", fake: true, long: false, parts: &[&[many::checks]] },
    Suite { name: "hundreds", fake: true, long: true, parts: &[&[many::hundreds]] },
    Suite { name: "chart", fake: true, long: false, parts: &[&[chart::checks]] },
];

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
    let needed = |fake| SUITES.iter().any(|it| it.fake == fake && is_meant(it, suites));
    [false, true].into_iter().filter(|&it| needed(it)).map(|fake| Options { fake, ..Options::default() }).collect()
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

/// Runs those of these suites (all, if none is named) that match the cluster; `only` selects checks whose name contains it.
pub fn run(cluster: &Cluster, suites: &[String], only: Option<&str>, summary: &mut Summary) {
    let run_row = |row: Row| {
        let mut summary = Summary::default();
        for check in row() {
            if only.is_none_or(|text| check.name.contains(text)) {
                summary.record(check.name, || (check.run)(cluster));
            }
        }
        summary
    };
    for suite in SUITES.iter().filter(|it| it.fake == cluster.is_fake() && is_meant(it, suites)) {
        println!("\n{}", suite.name);
        for rows in suite.parts {
            thread::scope(|scope| {
                let running: Vec<_> = rows.iter().map(|&row| scope.spawn(move || run_row(row))).collect();
                for row in running {
                    summary.add(row.join().expect("a check returns an error"));
                }
            });
        }
    }
}
