//! `cargo xtask chaos`: the fault campaign on real processes, and its result with a description of the machine.
//!
//! The campaign is `engram chaos`, built in release; this command sets its size and writes the figures.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use crate::process;
use crate::results;
use crate::workspace::{self, Profile};

#[derive(clap::Args)]
pub(crate) struct Options {
    /// Run 300 kills, 100 pauses and 100 network cuts at half load, then a tenth of them at full load, and write the figures to
    /// docs/results/chaos.json
    #[arg(long)]
    full: bool,
    /// Seed of the order and targets of faults
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
    /// Kill and pause workers and cut their links at random points of trainings on 2 to 5 workers instead, and compare with an undisturbed training
    #[arg(long, group = "subject", conflicts_with = "full")]
    training: bool,
    /// Kill and pause processes, empty disks and cut links under appends, draws, priority updates and readers of replay buffers instead
    #[arg(long, group = "subject", conflicts_with = "full")]
    buffers: bool,
    /// Number of faults (with --training or --buffers)
    #[arg(long, value_name = "N", default_value_t = 200, requires = "subject")]
    count: u32,
}

/// Runs the campaign.
///
/// # Errors
/// When a write was lost, applied twice or different, or the cluster did not recover.
pub(crate) fn run(options: &Options) -> Result<()> {
    if options.training {
        return training(options);
    }
    if options.buffers {
        return buffers(options);
    }
    process::run(&mut Profile::Release.cargo("build", ["-p", "engram-cli"]))?;
    if !options.full {
        return campaign(["20", "5", "5", "240", "0.5"], options.seed).map(drop);
    }
    let half = campaign(["300", "100", "100", "10800", "0.5"], options.seed)?;
    let full = campaign(["30", "10", "10", "1800", "1"], options.seed)?;
    let result = json!({
        "command": "cargo xtask chaos --full",
        "machine": machine(),
        "commit": commit()?,
        "halfLoad": half,
        "fullLoad": full,
    });
    let path = workspace::root().join("docs/results/chaos.json");
    fs::create_dir_all(path.parent().context("the path has a parent")?)?;
    let text = serde_json::to_string_pretty(&result).context("failed to write JSON")? + "\n";
    fs::write(&path, text).with_context(|| format!("failed to write {}", path.display()))?;
    println!("wrote {}", path.display());
    Ok(())
}

/// Campaign of trainings.
fn training(options: &Options) -> Result<()> {
    let report: TrainingReport =
        campaign_of_tests("training", ("runs", "trainings_lose_no_step_and_no_bit_to_random_faults"), options)?;
    let section = recovery_section(options.count, &report, &commit()?);
    results::replace_section("train.md", crate::bench::TRAIN_TITLE, "Recovery under faults", &section)
}

/// Campaign of replay buffers.
fn buffers(options: &Options) -> Result<()> {
    let report: BufferReport =
        campaign_of_tests("buffer", ("buffers", "faults_lose_no_item_and_let_none_be_consumed_twice"), options)?;
    let section = buffer_section(options.count, &report, &commit()?);
    results::replace_section("replay.md", "Replay buffers", "Faults", &section)
}

/// Runs a test that is a campaign with another number of faults, on the release build of `engram`, and returns its report.
fn campaign_of_tests<Report: serde::de::DeserializeOwned>(
    subject: &str,
    (program, test): (&str, &str),
    options: &Options,
) -> Result<Report> {
    process::run(&mut Profile::Release.cargo("build", ["-p", "engram-cli"]))?;
    let mut command = Profile::of_tests()?.cargo("test", ["-p", "engram-tests", "--test", program]);
    let variable = |name: &str| format!("ENGRAM_{}_{name}", subject.to_uppercase());
    command.args(["--", "--nocapture", test]).env(variable("FAULTS"), options.count.to_string());
    command.env("ENGRAM_BIN", released());
    if let Some(seed) = options.seed {
        command.env(variable("SEED"), seed.to_string());
    }
    let report = workspace::target().join(format!("{subject}-faults.json"));
    process::run(command.env(variable("REPORT"), &report))?;
    let text = fs::read_to_string(&report).with_context(|| format!("failed to read {}", report.display()))?;
    serde_json::from_str(&text).context("the campaign did not write a report")
}

/// What a campaign of faults of buffers counted.
#[derive(serde::Deserialize)]
#[serde(rename_all = "camelCase")]
struct BufferReport {
    outcome: BufferOutcome,
    /// All that were appended, each once.
    consumed: u64,
    draws: u64,
    /// Items that may be drawn twice.
    reused: u64,
    reused_draws: u64,
}

#[derive(serde::Deserialize)]
struct BufferOutcome {
    seed: u64,
    faults: Vec<RestoredFaults>,
}

#[derive(serde::Deserialize)]
struct RestoredFaults {
    kind: String,
    done: u32,
    restored: Spread,
}

#[derive(serde::Deserialize)]
#[serde(rename_all = "camelCase")]
struct Spread {
    p50_ms: f64,
    max_ms: f64,
}

/// Renders the section of a campaign of buffers that passed.
fn buffer_section(count: u32, report: &BufferReport, commit: &str) -> String {
    let BufferReport { outcome: BufferOutcome { seed, faults }, consumed, draws, reused, reused_draws } = report;
    let line = |RestoredFaults { kind, done, restored }: &RestoredFaults| {
        format!("| {kind} | {done} | {:.1} s | {:.1} s |\n", restored.p50_ms / 1e3, restored.max_ms / 1e3)
    };
    let lines: String = faults.iter().map(line).collect();
    format!(
        "Command: `cargo xtask chaos --buffers --count {count} --seed {seed}`. Commit: {commit}. Two cores. Three workers, \
         two replicas, `Replicated`, under two writers, a learner that draws and sets priorities, two readers of one consumer, and a buffer whose items leave it \
         after two draws.\n\n{consumed} items were appended, and each was consumed once. After {draws} prioritized draws every item had the last priority that \
         was set. {reused} items that may be drawn twice were drawn {reused_draws} times, none of them three times. No handle was used twice. After one more \
         kill statistics, draws and cursors were the same to the bit.\n\n| fault | number | until all replicas were in sync, median | longest |\n| --- | --- | --- | --- |\n{lines}"
    )
}

/// What a campaign of faults of trainings measured.
#[derive(serde::Deserialize)]
#[serde(rename_all = "camelCase")]
struct TrainingReport {
    outcome: TrainingOutcome,
    trainings: u64,
    /// In ascending order.
    recovery_seconds: Vec<f64>,
}

/// What is read of the outcome that all campaigns of faults have.
#[derive(serde::Deserialize)]
struct TrainingOutcome {
    seed: u64,
    faults: Vec<FaultsOfKind>,
}

#[derive(serde::Deserialize)]
struct FaultsOfKind {
    kind: String,
    done: u32,
}

/// Renders the section of a campaign that passed.
fn recovery_section(count: u32, report: &TrainingReport, commit: &str) -> String {
    let TrainingReport { outcome: TrainingOutcome { seed, faults }, trainings, recovery_seconds: seconds } = report;
    let faults: Vec<String> = faults.iter().map(|FaultsOfKind { kind, done }| format!("{kind} {done}")).collect();
    let at = |share: f64| {
        let index = (seconds.len() as f64 * share) as usize;
        seconds
            .get(index.min(seconds.len().saturating_sub(1)))
            .map_or_else(|| "-".to_owned(), |it| format!("{it:.2} s"))
    };
    let upper = [0.05, 0.1, 0.25, 0.5, 1.0, 2.0, f64::INFINITY];
    let mut lower = 0.0;
    let mut header = "| recoveries | median | p99 | longest | floor of p99 |".to_owned();
    let (mut rule, mut line) =
        ("| --- ".repeat(5), format!("| {} | {} | {} | {} | 1.0 s |", seconds.len(), at(0.5), at(0.99), at(1.0)));
    for bound in upper {
        let name = if bound.is_finite() { format!("up to {bound} s") } else { "longer".to_owned() };
        let number = seconds.iter().filter(|it| **it > lower && **it <= bound).count();
        header.push_str(&format!(" {name} |"));
        rule.push_str("| --- ");
        line.push_str(&format!(" {number} |"));
        lower = bound;
    }
    format!(
        "Command: `cargo xtask chaos --training --count {count} --seed {seed}`. Commit: {commit}. Two cores. Trainings on \
         2 to 5 workers: {trainings}. Faults: {}. No step was lost or repeated, and parameters and optimizer state equal those of an undisturbed training, \
         bit by bit.\n\nA recovery is the time from the last step with a lost worker to the next committed step. Faults that end within the detection time, or hit \
         a worker that had not joined, have none.\n\n{header}\n{rule}|\n{line}\n",
        faults.join(", ")
    )
}

/// Runs one campaign: kills, pauses, cuts, seconds and the share of load. Its progress goes to stderr.
fn campaign(figures: [&str; 5], seed: Option<u64>) -> Result<Value> {
    let mut command = Command::new(released());
    command.args(["chaos", "-o", "json"]);
    for (name, figure) in ["--kills", "--pauses", "--network-faults", "--seconds", "--load"].into_iter().zip(figures) {
        command.args([name, figure]);
    }
    if let Some(seed) = seed {
        command.arg("--seed").arg(seed.to_string());
    }
    let output = command.stderr(std::process::Stdio::inherit()).output().context("failed to start `engram chaos`")?;
    print!("{}", String::from_utf8_lossy(&output.stdout));
    ensure!(output.status.success(), "`engram chaos` exited with {}", output.status);
    serde_json::from_slice(&output.stdout).context("`engram chaos` did not print JSON")
}

/// Path of the release build of `engram`.
fn released() -> PathBuf {
    Profile::Release.folder().join(format!("engram{}", std::env::consts::EXE_SUFFIX))
}

/// Describes the machine.
fn machine() -> Value {
    let text = |path: &str| fs::read_to_string(path).unwrap_or_default();
    let line = |path: &str, name: &str| {
        let value = text(path)
            .lines()
            .find(|line| line.starts_with(name))
            .and_then(|line| line.split_once(':').map(|it| it.1.trim().to_owned()));
        value.unwrap_or_else(|| "unknown".into())
    };
    json!({
        "system": std::env::consts::OS,
        "kernel": text("/proc/sys/kernel/osrelease").trim(),
        "processor": line("/proc/cpuinfo", "model name"),
        "cores": std::thread::available_parallelism().map_or(0, usize::from),
        "memory": line("/proc/meminfo", "MemTotal"),
    })
}

/// Returns the built commit, marked if files differ from it.
fn commit() -> Result<String> {
    let described = process::read(Command::new("git").current_dir(workspace::root()).args([
        "describe",
        "--always",
        "--dirty",
        "--abbrev=40",
    ]));
    Ok(described.context("failed to read the commit from git")?.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn section_of_buffers_has_a_line_for_each_kind() {
        let restored = json!({ "count": 2, "p50Ms": 1500.0, "p99Ms": 2000.0, "maxMs": 2000.0 });
        let outcome = json!({ "seed": 7, "faults": [{ "kind": "kill a worker", "done": 2, "restored": restored }], "ledger": null });
        let outcome = serde_json::from_value(outcome).unwrap();
        let report = BufferReport { outcome, consumed: 9, draws: 8, reused: 7, reused_draws: 14 };
        let text = buffer_section(2, &report, "abc");
        assert!(text.contains("| kill a worker | 2 | 1.5 s | 2.0 s |\n"), "{text}");
        assert!(text.contains("--count 2 --seed 7`. Commit: abc."), "{text}");
    }

    #[test]
    fn section_has_percentiles_and_every_recovery_in_one_range() {
        let outcome = json!({ "seed": 7, "faults": [{ "kind": "Kill", "done": 9, "restored": {} }], "ledger": null });
        let recovery_seconds = (1..=100).map(|it| f64::from(it) * 0.02).collect();
        let report =
            TrainingReport { outcome: serde_json::from_value(outcome).unwrap(), trainings: 2, recovery_seconds };
        let text = recovery_section(12, &report, "abc");
        assert!(text.contains("| 100 | 1.02 s | 2.00 s | 2.00 s | 1.0 s | 2 | 3 | 7 | 13 | 25 | 50 | 0 |\n"), "{text}");
        assert!(text.contains("--count 12 --seed 7`. Commit: abc.") && text.contains("Faults: Kill 9."), "{text}");
    }
}
