//! `cargo xtask ci`: everything that must hold at every commit, as a table of stages.
//!
//! A stage runs after the stages that it needs have passed. Stages that are not exclusive run two at a time; an exclusive stage has
//! the machine to itself, because it judges times or needs both processors; only the stages in the background, of the lowest priority, take what
//! it leaves, one after the other. A failed stage does not stop stages that do not need it.
//!
//! Tests and tools are built in the profile `bench`, which shares dependencies with `release`. The programs of `example`, of the process tests, of
//! the Kubernetes suites and of the images are those of `build`, in the profile `release`, which users build.

mod job;
mod schedule;
mod stages;

use std::collections::BTreeSet;
use std::fs;
use std::process::Command;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use self::job::{Job, Verdict};
use self::schedule::{Decision, Schedule};
use self::stages::{STAGES, Stage};
use crate::workspace;

/// Stages that run at the same time: as many as the processors of the smallest machine that CI uses.
const LANES: usize = 2;

#[derive(clap::Args)]
pub(crate) struct Options {
    /// Stages to run, with the stages that they need [default: all]
    #[arg(value_name = "STAGE", value_parser = stages::names())]
    stages: Vec<String>,
    /// Prints the stages with their needs and runs nothing
    #[arg(long)]
    list: bool,
}

/// How a stage ended.
struct Outcome {
    stage: &'static Stage,
    began: Duration,
    took: Duration,
    result: Result<Verdict>,
}

/// Runs the stages and prints how long each took.
///
/// # Errors
/// A stage failed, or was not run because a stage that it needs failed.
pub(crate) fn run(options: &Options) -> Result<()> {
    if options.list {
        STAGES.iter().for_each(|stage| println!("{stage}"));
        return Ok(());
    }
    let selected = selection(&options.stages);
    let scratch = workspace::target().join("ci-stages");
    // State directories of an earlier run would be restored instead of created.
    if scratch.exists() {
        fs::remove_dir_all(&scratch).with_context(|| format!("failed to remove {}", scratch.display()))?;
    }
    fs::create_dir_all(&scratch).with_context(|| format!("failed to create {}", scratch.display()))?;

    let is_root = is_root()?;
    let started = Instant::now();
    let mut schedule = Schedule::new(STAGES.iter().filter(|stage| selected.contains(stage.name)), LANES);
    let mut outcomes = Vec::new();
    let (sender, receiver) = mpsc::channel();
    std::thread::scope(|scope| -> Result<()> {
        loop {
            match schedule.next() {
                Decision::Start(stage) => {
                    println!("\n=== {} started", stage.name);
                    let job = Job::new(stage, &scratch)?;
                    let (sender, began) = (sender.clone(), started.elapsed());
                    scope.spawn(move || {
                        let result = if stage.root && !is_root {
                            Ok(Verdict::Skipped("needs root".into()))
                        } else {
                            (stage.run)(&job)
                        };
                        let took = started.elapsed() - began;
                        // The receiver outlives every stage of this scope.
                        let _ = sender.send((job, Outcome { stage, began, took, result }));
                    });
                }
                Decision::Wait => {
                    let (job, outcome) = receiver.recv().expect("a running stage reports its end");
                    schedule.finish(outcome.stage.name, outcome.result.is_ok());
                    report(&job, &outcome)?;
                    outcomes.push(outcome);
                }
                Decision::Done => return Ok(()),
            }
        }
    })?;
    summary(&outcomes, &schedule.blocked(), started.elapsed())
}

fn is_root() -> Result<bool> {
    let output = Command::new("id").arg("-u").output().context("failed to start id")?;
    Ok(output.stdout.trim_ascii() == b"0")
}

/// Returns the selected stages with everything that they need; all stages when none is named.
fn selection(named: &[String]) -> BTreeSet<&'static str> {
    let mut selected: BTreeSet<&str> = STAGES
        .iter()
        .map(|stage| stage.name)
        .filter(|name| named.is_empty() || named.iter().any(|it| it == name))
        .collect();
    // The table is ordered so that needs come first: from the end, one pass is enough.
    for stage in STAGES.iter().rev() {
        if selected.contains(stage.name) {
            selected.extend(stage.needs);
        }
    }
    selected
}

/// Prints the output of a stage that has ended, in one piece.
fn report(job: &Job, outcome: &Outcome) -> Result<()> {
    let seconds = outcome.took.as_secs();
    job.print()?;
    match &outcome.result {
        Ok(Verdict::Passed) => println!("=== {} passed after {seconds} s", outcome.stage.name),
        Ok(Verdict::Skipped(reason)) => println!("=== {} SKIPPED: {reason}", outcome.stage.name),
        Err(error) => println!("=== {} FAILED after {seconds} s: {error:#}", outcome.stage.name),
    }
    Ok(())
}

fn summary(outcomes: &[Outcome], blocked: &[&str], total: Duration) -> Result<()> {
    println!("\n{:>8}  {:>8}  stage", "started", "seconds");
    for Outcome { stage, began, took, result } in outcomes {
        let mark = match result {
            Ok(Verdict::Passed) => "",
            Ok(Verdict::Skipped(_)) => "  (skipped)",
            Err(_) => "  FAILED",
        };
        println!("{:>8}  {:>8}  {}{mark}", began.as_secs(), took.as_secs(), stage.name);
    }
    blocked.iter().for_each(|name| println!("{:>8}  {:>8}  {name}  NOT RUN, a stage that it needs failed", "", ""));
    println!("{:>8}  {:>8}  total", "", total.as_secs());
    let failed: Vec<&str> = outcomes.iter().filter(|it| it.result.is_err()).map(|it| it.stage.name).collect();
    ensure!(failed.is_empty(), "stages failed: {}", failed.join(", "));
    if !blocked.is_empty() {
        bail!("stages not run: {}", blocked.join(", "));
    }
    println!("\nall stages passed");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stages_are_ordered_so_that_needs_come_first() {
        for (index, stage) in STAGES.iter().enumerate() {
            for need in stage.needs {
                assert!(STAGES[..index].iter().any(|it| it.name == *need), "{} needs {need}", stage.name);
            }
        }
    }

    #[test]
    fn selected_stage_brings_the_stages_it_needs() {
        assert_eq!(selection(&["report".into()]), BTreeSet::from(["build", "example", "report"]));
        assert_eq!(selection(&[]).len(), STAGES.len());
    }
}
