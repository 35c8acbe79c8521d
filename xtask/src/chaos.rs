//! `cargo xtask chaos`: the fault campaign on real processes, and its result with a description of the machine.
//!
//! The campaign is `engram chaos`, built in release; this command sets its size and writes the figures.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use crate::process;
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
    /// Kill and pause workers at random points of trainings on 2 to 5 workers instead, and compare with an undisturbed training
    #[arg(long, conflicts_with = "full")]
    training: bool,
    /// Number of faults (with --training)
    #[arg(long, value_name = "N", default_value_t = 200, requires = "training")]
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

/// Runs the test of trainings under faults with another number of them. It starts the newest `engram` of target, which is built first.
fn training(options: &Options) -> Result<()> {
    let profile = Profile::of_tests()?;
    process::run(&mut profile.cargo("build", ["-p", "engram-cli"]))?;
    let name = "trainings_lose_no_step_and_no_bit_to_random_faults";
    let mut command = profile.cargo("test", ["-p", "engram-tests", "--test", "runs"]);
    command.args(["--", "--nocapture", name]).env("ENGRAM_TRAINING_FAULTS", options.count.to_string());
    command.env("ENGRAM_BIN", profile.folder().join(format!("engram{}", std::env::consts::EXE_SUFFIX)));
    if let Some(seed) = options.seed {
        command.env("ENGRAM_TRAINING_SEED", seed.to_string());
    }
    process::run(&mut command)
}

/// Runs one campaign: kills, pauses, cuts, seconds and the share of load. Its progress goes to stderr.
fn campaign(figures: [&str; 5], seed: Option<u64>) -> Result<Value> {
    let binary: PathBuf = Profile::Release.folder().join(format!("engram{}", std::env::consts::EXE_SUFFIX));
    let mut command = Command::new(binary);
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
