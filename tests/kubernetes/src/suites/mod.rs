//! The suites: checks that run one after the other on a cluster, each told with its time and what it measured.
//!
//! A check may rest on what those before it left; one that fails does not stop the others. To add a suite: a module with a
//! function `checks`, and its line in `SUITES`. Suites for the same kind of cluster run on one, in that order.

mod access;
mod backup;
mod chart;
mod command;
mod fake;
mod faults;
mod gpu;
mod identity;
mod in_pod;
mod look;
mod many;
mod operator;
mod orders;
mod rules;
mod runs;
mod smoke;

use crate::cluster::{Cluster, Options};
use crate::requirements::Skip;
use anyhow::Result;
use std::time::Instant;

/// One promise of a suite. What it returns is a note for the reader, and may be empty.
pub(crate) struct Check {
    pub(crate) name: &'static str,
    pub(crate) run: fn(&Cluster) -> Result<String>,
}

/// Checks that share a cluster.
struct Suite {
    name: &'static str,
    /// Fake kubelets are enough.
    fake: bool,
    /// It takes long, and runs where it is named alone.
    long: bool,
    checks: fn() -> Vec<Check>,
}

const SUITES: [Suite; 16] = [
    Suite { name: "smoke", fake: false, long: false, checks: smoke::checks },
    Suite { name: "command", fake: false, long: false, checks: command::checks },
    Suite { name: "identity", fake: false, long: false, checks: identity::checks },
    // It needs a program that takes a while to build.
    Suite { name: "cert-manager", fake: false, long: true, checks: identity::cert_manager },
    Suite { name: "access", fake: false, long: false, checks: access::checks },
    Suite { name: "backup", fake: false, long: false, checks: backup::checks },
    Suite { name: "million", fake: false, long: true, checks: backup::million },
    // Last of the real nodes: after an outage of the API server kubelets take their time.
    Suite { name: "faults", fake: false, long: false, checks: faults::checks },
    Suite { name: CAMPAIGN, fake: false, long: true, checks: faults::campaign },
    // It needs a program that is not of this checkout.
    Suite { name: VERSIONS, fake: false, long: true, checks: faults::versions },
    Suite { name: "fake", fake: true, long: false, checks: fake::checks },
    Suite { name: "rules", fake: true, long: false, checks: rules::checks },
    Suite { name: "operator", fake: true, long: false, checks: operator::checks },
    Suite { name: "many", fake: true, long: false, checks: many::checks },
    Suite { name: "hundreds", fake: true, long: true, checks: many::hundreds },
    Suite { name: "chart", fake: true, long: false, checks: chart::checks },
];

/// Name of the suite that takes an hour.
pub const CAMPAIGN: &str = "campaign";

/// Name of the suite that needs the workers of an earlier build.
pub const VERSIONS: &str = "versions";

/// Names of all suites.
pub fn names() -> Vec<&'static str> {
    SUITES.iter().map(|suite| suite.name).collect()
}

/// The clusters that these suites need, or all when none is named.
pub fn clusters(suites: &[String]) -> Vec<Options> {
    let needed = |fake| SUITES.iter().any(|it| it.fake == fake && is_meant(it, suites));
    [false, true].into_iter().filter(|&it| needed(it)).map(|fake| Options { fake, ..Options::default() }).collect()
}

fn is_meant(suite: &Suite, names: &[String]) -> bool {
    if names.is_empty() { !suite.long } else { names.iter().any(|it| it == suite.name) }
}

/// How checks ended.
#[derive(Debug, Clone, Copy, Default)]
pub struct Summary {
    /// They hold.
    pub passed: usize,
    /// They do not.
    pub failed: usize,
    /// They could not run, for a reason that was told.
    pub skipped: usize,
}

impl std::fmt::Display for Summary {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} passed, {} failed, {} skipped", self.passed, self.failed, self.skipped)
    }
}

impl Summary {
    /// Runs a check, tells how it ended, and counts it.
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

/// Runs those of these suites (all when none is named) that are meant for such a cluster; `only` keeps the checks whose name
/// contains it.
pub fn run(cluster: &Cluster, suites: &[String], only: Option<&str>, summary: &mut Summary) {
    for suite in SUITES.iter().filter(|it| it.fake == cluster.is_fake() && is_meant(it, suites)) {
        println!("\n{}", suite.name);
        for check in (suite.checks)() {
            if only.is_none_or(|text| check.name.contains(text)) {
                summary.record(check.name, || (check.run)(cluster));
            }
        }
    }
}
