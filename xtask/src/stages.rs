//! Stages of a longer command: each is announced, timed, and listed at the end.

use std::fmt::Write as _;
use std::time::{Duration, Instant};

use anyhow::Result;

/// The stages that have run, in order.
#[derive(Default)]
pub(crate) struct Stages {
    done: Vec<Done>,
}

struct Done {
    name: &'static str,
    took: Duration,
    failed: bool,
}

impl Stages {
    /// Runs one stage. Its failure is printed and remembered, and later stages run all the same.
    pub(crate) fn run<T>(&mut self, name: &'static str, work: impl FnOnce() -> Result<T>) -> Option<T> {
        eprintln!("\n== {name}");
        let started = Instant::now();
        let outcome = work();
        self.done.push(Done { name, took: started.elapsed(), failed: outcome.is_err() });
        outcome.map_err(|error| eprintln!("xtask: {name}: {error:#}")).ok()
    }

    /// Whether any stage failed.
    pub(crate) fn any_failed(&self) -> bool {
        self.done.iter().any(|stage| stage.failed)
    }

    /// One line per stage: seconds, name, and whether it failed.
    pub(crate) fn table(&self) -> String {
        let mut table = String::from("\n   seconds  stage\n");
        for Done { name, took, failed } in &self.done {
            let mark = if *failed { "  FAILED" } else { "" };
            writeln!(table, "{:>10.1}  {name}{mark}", took.as_secs_f64()).expect("writing to a string does not fail");
        }
        table
    }
}
