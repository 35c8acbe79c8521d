//! Runs the complete check, part by part.

use std::io::Write as _;
use std::process::Command;
use std::thread;
use std::time::Instant;

use anyhow::{Context, Result, ensure};

use crate::report::{Check, Outcome, PartResult, Report};
use crate::{Options, child, machine, peers, sanitizer, table};

/// Random arenas under a sanitizer, which slows kernels down a hundredfold.
const SANITIZED_ROUNDS: u64 = 1;

/// Runs all checks, writes the results, and prints them.
///
/// # Errors
/// Without a GPU, when a check failed, or when the results cannot be written.
pub(crate) fn run(options: &Options) -> Result<()> {
    let device = machine::device(options.device)?;
    eprintln!("{} (compute capability {}, driver of CUDA {})", device.name, device.capability, device.driver);
    let report = Report {
        engram: env!("CARGO_PKG_VERSION").to_owned(),
        device,
        checks: Vec::new(),
        copy_gb_per_s: None,
        rows: Vec::new(),
    };
    let mut run = Run { options, report };
    run.correctness()?;
    run.sanitizers()?;
    run.bench()?;
    let report = run.report;
    ensure!(!report.checks.is_empty(), "--only matches no check");

    let text = serde_json::to_string_pretty(&report).context("failed to write the results")? + "\n";
    std::fs::write(&options.json, text).with_context(|| format!("failed to write {}", options.json.display()))?;
    print!("{}", table::markdown(&report));
    println!("\n{}; results are in {}", summary(&report), options.json.display());
    ensure!(report.count(Outcome::Failed) == 0, "{}", summary(&report));
    Ok(())
}

fn summary(report: &Report) -> String {
    let count = |outcome| report.count(outcome);
    format!("{} passed, {} failed, {} skipped", count(Outcome::Passed), count(Outcome::Failed), count(Outcome::Skipped))
}

struct Run<'a> {
    options: &'a Options,
    report: Report,
}

impl Run<'_> {
    fn correctness(&mut self) -> Result<()> {
        let Options { device: _, updates, rounds, contexts, memories, repeats, .. } = *self.options;
        self.check("passes", |run| run.part("passes", &[("--rounds", rounds)]))?;
        let of_training = [("--memories", memories), ("--repeats", repeats as u64)];
        self.check("training", |run| run.part("training", &of_training))?;
        let of_several = [("--rounds", rounds), ("--contexts", u64::from(contexts))];
        self.check("multiple-devices", |run| run.part("multiple-devices", &of_several))?;
        self.check("history", |run| run.histories(updates, u64::from(contexts)))?;
        self.check("drivers", |run| {
            run.part(
                "drivers",
                &[("--contexts", u64::from(contexts)), ("--updates", (updates / 100).clamp(20_000, 10_000_000))],
            )
        })?;
        for part in
            ["failures-out-of-memory", "failures-timeout", "failures-rejected-launch", "failures-invalid-address"]
        {
            self.check(part, |run| run.part(part, &[]))?;
        }
        Ok(())
    }

    /// Runs histories in concurrent processes, each with its own context.
    fn histories(&self, updates: u64, contexts: u64) -> Result<PartResult> {
        let contexts = contexts.max(1);
        let results: Vec<Result<PartResult>> = thread::scope(|scope| {
            let started: Vec<_> = (0..contexts)
                .map(|seed| {
                    let own = [("--updates", updates.div_ceil(contexts)), ("--seed", seed)];
                    scope.spawn(move || self.part("history", &own))
                })
                .collect();
            started.into_iter().map(|thread| thread.join().expect("the thread only waits for a process")).collect()
        });
        let details: Vec<String> =
            results.into_iter().map(|result| result.map(|it| it.detail)).collect::<Result<_>>()?;
        Ok(PartResult::passed(format!("{contexts} concurrent contexts: {}", details.join("; "))))
    }

    fn sanitizers(&mut self) -> Result<()> {
        for tool in sanitizer::TOOLS {
            self.check(&format!("sanitizer-{tool}"), |run| {
                let mut part = run.command("passes", &[("--rounds", SANITIZED_ROUNDS)])?;
                if !run.options.long_deadline {
                    part.arg("--long-deadline");
                }
                sanitizer::run(tool, &mut part)
            })?;
        }
        Ok(())
    }

    fn bench(&mut self) -> Result<()> {
        let scratch = tempfile::tempdir().context("failed to create a temporary directory")?;
        let Options { memories, ranked, repeats, .. } = *self.options;
        let before = self.report.checks.len();
        self.check("bench", |run| {
            let mut command =
                run.command("bench", &[("--memories", memories), ("--ranked", ranked), ("--repeats", repeats as u64)])?;
            command.arg("--scratch").arg(scratch.path());
            run_part(&mut command, "bench")
        })?;
        // Without measurements there is nothing to compare.
        if self.report.checks.len() == before || self.report.rows.is_empty() {
            return Ok(());
        }
        let capability = self.report.device.capability.replace('.', "");
        let device = self.options.device;
        let mut rows = std::mem::take(&mut self.report.rows);
        self.check("bench-cub", |_| peers::cub(&mut rows, scratch.path(), &capability, device, repeats))?;
        for peer in ["cupy", "torch"] {
            self.check(&format!("bench-{peer}"), |_| peers::python(&mut rows, scratch.path(), peer, device, repeats))?;
        }
        self.report.rows = rows;
        Ok(())
    }

    /// Runs one check if it is selected, and reports its outcome.
    fn check(&mut self, name: &str, work: impl FnOnce(&Self) -> Result<PartResult>) -> Result<()> {
        let only = &self.options.only;
        if !only.is_empty() && !only.iter().any(|prefix| name.starts_with(prefix.as_str())) {
            return Ok(());
        }
        eprintln!("{name} ...");
        let begin = Instant::now();
        let result = work(self);
        let seconds = begin.elapsed().as_secs_f64();
        let (outcome, detail) = match result {
            Ok(PartResult { skipped: Some(why), .. }) => (Outcome::Skipped, why),
            Ok(result) => {
                self.report.rows.extend(result.rows);
                self.report.copy_gb_per_s = result.copy_gb_per_s.or(self.report.copy_gb_per_s);
                (Outcome::Passed, result.detail)
            }
            Err(error) => (Outcome::Failed, format!("{error:#}")),
        };
        eprintln!("{name}: {} ({seconds:.1} s): {detail}", outcome.label());
        std::io::stderr().flush().context("failed to write to standard error")?;
        self.report.checks.push(Check { name: name.to_owned(), outcome, detail, seconds });
        Ok(())
    }

    fn part(&self, name: &str, numbers: &[(&str, u64)]) -> Result<PartResult> {
        run_part(&mut self.command(name, numbers)?, name)
    }

    /// Returns the command that runs one part.
    fn command(&self, name: &str, numbers: &[(&str, u64)]) -> Result<Command> {
        let own = std::env::current_exe().context("failed to find this executable")?;
        let mut command = Command::new(own);
        command.args(["part", name, "--device"]).arg(self.options.device.to_string());
        if self.options.long_deadline {
            command.arg("--long-deadline");
        }
        for (option, number) in numbers {
            command.arg(format!("{option}={number}"));
        }
        Ok(command)
    }
}

fn run_part(command: &mut Command, name: &str) -> Result<PartResult> {
    let out = child::run(command)?.expect(name)?;
    serde_json::from_str(&out).with_context(|| format!("failed to parse the result of {name}"))
}
