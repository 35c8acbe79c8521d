//! The whole check, part by part.

use std::io::Write as _;
use std::process::Command;
use std::thread;
use std::time::Instant;

use anyhow::{Context, Result, ensure};

use crate::report::{Check, Found, Outcome, Report};
use crate::{Options, child, machine, peers, sanitizer, table};

/// Random arenas under a sanitizer, which makes kernels some hundred times slower.
const SANITIZED_ROUNDS: u64 = 1;

/// Runs everything, writes the results, and prints them.
///
/// # Errors
/// Without a GPU, when a check failed, and when the results cannot be written.
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
    ensure!(!report.checks.is_empty(), "--only named nothing that there is");

    let text = serde_json::to_string_pretty(&report).context("failed to write the results")? + "\n";
    std::fs::write(&options.json, text).with_context(|| format!("failed to write {}", options.json.display()))?;
    print!("{}", table::markdown(&report));
    println!("\n{}; all of it is in {}", summary(&report), options.json.display());
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
        let Options { device: _, updates, rounds, contexts, .. } = *self.options;
        self.check("passes", |run| run.part("passes", &[("--rounds", rounds)]))?;
        let of_several = [("--rounds", rounds), ("--contexts", u64::from(contexts))];
        self.check("several", |run| run.part("several", &of_several))?;
        self.check("history", |run| run.histories(updates, u64::from(contexts)))?;
        self.check("drivers", |run| {
            run.part(
                "drivers",
                &[("--contexts", u64::from(contexts)), ("--updates", (updates / 100).clamp(20_000, 10_000_000))],
            )
        })?;
        for part in ["failures-memory", "failures-no-answer", "failures-refused-launch", "failures-wrong-address"] {
            self.check(part, |run| run.part(part, &[]))?;
        }
        Ok(())
    }

    /// Histories in as many processes at once, each with a context of its own.
    fn histories(&self, updates: u64, contexts: u64) -> Result<Found> {
        let contexts = contexts.max(1);
        let found: Vec<Result<Found>> = thread::scope(|scope| {
            let started: Vec<_> = (0..contexts)
                .map(|seed| {
                    let own = [("--updates", updates.div_ceil(contexts)), ("--seed", seed)];
                    scope.spawn(move || self.part("history", &own))
                })
                .collect();
            started.into_iter().map(|thread| thread.join().expect("a part is a process")).collect()
        });
        let details: Vec<String> = found.into_iter().map(|found| found.map(|it| it.detail)).collect::<Result<_>>()?;
        Ok(Found::done(format!("{contexts} contexts at once: {}", details.join("; "))))
    }

    fn sanitizers(&mut self) -> Result<()> {
        for tool in sanitizer::TOOLS {
            self.check(&format!("sanitizer-{tool}"), |run| {
                let mut part = run.command("passes", &[("--rounds", SANITIZED_ROUNDS)])?;
                if !run.options.patient {
                    part.arg("--patient");
                }
                sanitizer::run(tool, &mut part)
            })?;
        }
        Ok(())
    }

    fn bench(&mut self) -> Result<()> {
        let scratch = tempfile::tempdir().context("failed to make a folder")?;
        let Options { memories, ranked, repeats, .. } = *self.options;
        let before = self.report.checks.len();
        self.check("bench", |run| {
            let mut command =
                run.command("bench", &[("--memories", memories), ("--ranked", ranked), ("--repeats", repeats as u64)])?;
            command.arg("--scratch").arg(scratch.path());
            found(&mut command, "bench")
        })?;
        // Without figures there is nothing to stand beside.
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

    /// Does one check, if it is wanted, and says how it went.
    fn check(&mut self, name: &str, work: impl FnOnce(&Self) -> Result<Found>) -> Result<()> {
        let only = &self.options.only;
        if !only.is_empty() && !only.iter().any(|wanted| name.starts_with(wanted.as_str())) {
            return Ok(());
        }
        eprintln!("{name} ...");
        let begin = Instant::now();
        let found = work(self);
        let seconds = begin.elapsed().as_secs_f64();
        let (outcome, detail) = match found {
            Ok(Found { skipped: Some(why), .. }) => (Outcome::Skipped, why),
            Ok(found) => {
                self.report.rows.extend(found.rows);
                self.report.copy_gb_per_s = found.copy_gb_per_s.or(self.report.copy_gb_per_s);
                (Outcome::Passed, found.detail)
            }
            Err(error) => (Outcome::Failed, format!("{error:#}")),
        };
        eprintln!("{name}: {} ({seconds:.1} s): {detail}", outcome.word());
        std::io::stderr().flush().context("failed to write to standard error")?;
        self.report.checks.push(Check { name: name.to_owned(), outcome, detail, seconds });
        Ok(())
    }

    fn part(&self, name: &str, numbers: &[(&str, u64)]) -> Result<Found> {
        found(&mut self.command(name, numbers)?, name)
    }

    /// This program, for one part.
    fn command(&self, name: &str, numbers: &[(&str, u64)]) -> Result<Command> {
        let own = std::env::current_exe().context("failed to name this program")?;
        let mut command = Command::new(own);
        command.args(["part", name, "--device"]).arg(self.options.device.to_string());
        if self.options.patient {
            command.arg("--patient");
        }
        for (option, number) in numbers {
            command.arg(format!("{option}={number}"));
        }
        Ok(command)
    }
}

fn found(command: &mut Command, name: &str) -> Result<Found> {
    let out = child::run(command)?.expect(name)?;
    serde_json::from_str(&out).with_context(|| format!("{name} printed something else than what it found"))
}
