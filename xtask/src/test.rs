//! `cargo xtask test`: runs every test of the workspace and prints a summary line.
//!
//! The counts come from the `test result:` lines of cargo's test harness, which stay visible. A stage that fails without counting a failed test
//! (a compile error, or a killed test binary) counts as one failed test, so that the summary always reflects the exit status.

use std::ops::AddAssign;
use std::path::PathBuf;
use std::process::{Command, ExitStatus};

use anyhow::{Context, Result, ensure};

use crate::stages::Stages;
use crate::test_programs::{self, TestProgram};
use crate::workspace::{self, Profile};
use crate::{process, tools};

/// Tests that take a minute or two, started first so that they do not run alone at the end.
const LONGEST: [&str; 2] = ["chaos", "model"];

/// Start of the line that a test prints to standard error when this machine cannot run it.
const SKIPPED: &str = "skipped: ";

/// The package with the tests that start real processes.
const PROCESS_TESTS: &str = "engram-tests";

#[derive(clap::Args)]
pub(crate) struct Options {
    /// Also run the tests that take minutes (`#[ignore = "full: ..."]`)
    #[arg(long)]
    full: bool,
    /// Run only the tests whose name contains this
    filter: Option<String>,
}

/// Runs the tests.
///
/// # Errors
/// When a test failed or a stage could not run.
pub(crate) fn run(options: &Options) -> Result<()> {
    let mut stages = Stages::default();
    let mut total = Counts::default();
    let filter = options.filter.as_deref();

    let arguments = harness_arguments(filter, options.full);

    let mut units = cargo_test(["--workspace", "--exclude", PROCESS_TESTS, "--lib", "--bins", "--tests"])?;
    match stages.run("build of the tests", || test_programs::build(&mut units)) {
        Some(programs) => {
            stages.run("unit and property tests", || count_programs(&programs, &arguments, &[], &mut total));
        }
        None => total += Counts::CRASH,
    }

    let mut documentation = cargo_test(["--workspace", "--exclude", PROCESS_TESTS, "--doc"])?;
    // Ignored documentation tests are examples that are not meant to run.
    documentation.arg("--").args(harness_arguments(filter, false));
    stages.run("documentation tests", || count(&mut documentation, &mut total));

    if process_tests_match(filter)? {
        let mut binary = Profile::Release.cargo("build", ["-p", "engram-cli"]);
        let mut tests = process_tests()?;
        let built = stages.run("release build of the binary", || {
            let programs = test_programs::build(&mut tests)?;
            // Last: it may have the folder of the tests.
            process::run(&mut binary)?;
            Ok(programs)
        });
        if let Some(programs) = built {
            let mut environment = vec![("ENGRAM_BIN", release_binary())];
            environment.extend(object_storage().map(|python| ("ENGRAM_S3_SERVER", python)));
            stages.run("process tests", || count_programs(&programs, &arguments, &environment, &mut total));
        } else {
            total += Counts::CRASH;
        }
    }

    eprint!("{}", stages.table());
    println!("\n{} passed, {} failed, {} skipped", total.passed, total.failed, total.skipped);
    ensure!(total.failed == 0 && !stages.any_failed(), "tests failed");
    Ok(())
}

/// Returns the command for the process tests by name, selected from the whole workspace: another selection of packages would change features and
/// rebuild dependencies.
///
/// # Errors
/// When their folder cannot be read.
fn process_tests() -> Result<Command> {
    let folder = workspace::root().join("tests/tests");
    let mut command = Profile::of_tests()?.cargo("test", ["--workspace"]);
    for entry in std::fs::read_dir(&folder).with_context(|| format!("failed to read {}", folder.display()))? {
        let path = entry?.path();
        if let (Some(name), Some("rs")) = (path.file_stem(), path.extension().and_then(|it| it.to_str())) {
            command.arg("--test").arg(name);
        }
    }
    Ok(command)
}

/// Returns the Python that runs the S3-compatible storage of the process tests; `None`, with a message, if it is not available: tests that need it
/// report themselves as skipped.
fn object_storage() -> Option<PathBuf> {
    let made = tools::python("object-storage", "moto", &["moto[s3]==5.2.5", "flask==3.1.3", "flask-cors==6.0.5"]);
    made.inspect_err(|error| eprintln!("skipped: backups to object storage: {error:#}")).ok()
}

fn release_binary() -> PathBuf {
    Profile::Release.folder().join(format!("engram{}", std::env::consts::EXE_SUFFIX))
}

/// Returns whether the filter matches a process test: otherwise the release build would be wasted.
fn process_tests_match(filter: Option<&str>) -> Result<bool> {
    let Some(filter) = filter else { return Ok(true) };
    let mut command = Profile::of_tests()?.cargo("test", ["-q", "-p", PROCESS_TESTS, "--", "--list", filter]);
    let listed = process::read(&mut command).context("failed to list the process tests")?;
    Ok(listed.lines().any(|line| line.ends_with(": test")))
}

fn cargo_test<const N: usize>(selection: [&str; N]) -> Result<Command> {
    let mut command = Profile::of_tests()?.cargo("test", ["--no-fail-fast"]);
    command.args(selection);
    Ok(command)
}

fn harness_arguments(filter: Option<&str>, include_ignored: bool) -> Vec<String> {
    include_ignored.then_some("--include-ignored").into_iter().chain(filter).map(str::to_owned).collect()
}

/// Runs test programs and adds their counts to `total`.
///
/// # Errors
/// When a test failed, or a program could not run.
fn count_programs(
    programs: &[TestProgram],
    arguments: &[String],
    environment: &[(&str, PathBuf)],
    total: &mut Counts,
) -> Result<()> {
    let mut counts = Counts::default();
    let (mut programs, others): (Vec<_>, Vec<_>) = programs.iter().partition(|it| LONGEST.contains(&it.name()));
    programs.extend(others);
    let ran = test_programs::run(&programs, arguments, environment, |output, well| {
        let mut of_this = Counts::default();
        output.lines().filter_map(Counts::parse).for_each(|line| of_this += line);
        of_this.move_skipped(output);
        // Killed, or failed outside of a test.
        if !well && of_this.failed == 0 {
            of_this += Counts::CRASH;
        }
        counts += of_this;
    });
    if ran.is_err() {
        counts += Counts::CRASH;
    }
    *total += counts;
    ran?;
    ensure!(counts.failed == 0, "{} failed", counts.failed);
    Ok(())
}

/// Runs one stage of tests and adds its counts to `total`.
///
/// # Errors
/// When a test failed, or cargo did.
fn count(command: &mut Command, total: &mut Counts) -> Result<()> {
    let mut counts = Counts::default();
    let ended = process::run_observed(command, |line| counts += Counts::parse(line).unwrap_or_default());
    let clean = ended.as_ref().is_ok_and(ExitStatus::success);
    if !clean && counts.failed == 0 {
        counts += Counts::CRASH;
    }
    *total += counts;
    let status = ended?;
    ensure!(status.success(), "{} failed ({status})", counts.failed);
    Ok(())
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Counts {
    passed: u64,
    failed: u64,
    skipped: u64,
}

impl Counts {
    /// Counts of a stage that failed without naming a failed test.
    const CRASH: Self = Self { passed: 0, failed: 1, skipped: 0 };

    /// Moves the tests that could not run from passed to skipped: each prints one line `skipped: REASON`.
    fn move_skipped(&mut self, output: &str) {
        let lines = output.lines().filter(|line| line.starts_with(SKIPPED)).count() as u64;
        let moved = lines.min(self.passed);
        self.passed -= moved;
        self.skipped += moved;
    }

    /// Parses a line like `test result: ok. 3 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.1s`.
    fn parse(line: &str) -> Option<Self> {
        let (_, numbers) = line.strip_prefix("test result: ")?.split_once(". ")?;
        let mut counts = Self::default();
        for part in numbers.split("; ") {
            match part.split_once(' ')? {
                (number, "passed") => counts.passed = number.parse().ok()?,
                (number, "failed") => counts.failed = number.parse().ok()?,
                (number, "ignored") => counts.skipped = number.parse().ok()?,
                _ => {}
            }
        }
        Some(counts)
    }
}

impl AddAssign for Counts {
    fn add_assign(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.skipped += other.skipped;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_that_could_not_run_counts_as_skipped() {
        let output = "test a ... ok\nskipped: no g++ here\ntest b ... ok\n";
        let mut counts = Counts { passed: 2, failed: 0, skipped: 1 };
        counts.move_skipped(output);
        assert_eq!(counts, Counts { passed: 1, failed: 0, skipped: 2 });
    }

    #[test]
    fn counts_are_parsed_from_result_lines_only() {
        let ok = "test result: ok. 12 passed; 0 failed; 3 ignored; 0 measured; 7 filtered out; finished in 0.05s";
        assert_eq!(Counts::parse(ok), Some(Counts { passed: 12, failed: 0, skipped: 3 }));
        let failed =
            "test result: FAILED. 1 passed; 2 failed; 0 ignored; 0 measured; 0 filtered out; finished in 1.00s";
        assert_eq!(Counts::parse(failed), Some(Counts { passed: 1, failed: 2, skipped: 0 }));
        assert_eq!(Counts::parse("test a_test ... ok"), None);
        assert_eq!(Counts::parse("thread panicked: test result: ok. 12 passed"), None);
        assert_eq!(Counts::parse("test result: ok. many passed"), None);
    }
}
