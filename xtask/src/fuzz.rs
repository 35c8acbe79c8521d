//! `cargo xtask fuzz`: runs every fuzz target for a bounded time, starting from the committed corpora.
//!
//! `fuzz/rustc.sh` compiles the workspace's own crates with coverage, on the pinned stable compiler; other crates are those of the release build.
//! The output of libFuzzer goes to a log; one line per target is shown. New inputs are collected under `target/fuzz`; `--keep` adds those that
//! reach more code to the committed corpora; `--report` writes the figures.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};

use crate::bench::parse_count;
use crate::process;
use crate::workspace::{self, Profile};

/// An input that takes longer is a finding.
const INPUT_SECONDS: u32 = 10;
/// Address space limit of a target, including the program itself (about 0.3 GiB): inputs have kilobytes, so an allocation sized by an
/// unchecked length exceeds it.
const ADDRESS_SPACE_KIB: u64 = 2 << 20;
/// Maximum input length: fits segments and snapshots of several pages.
const INPUT_BYTES: u32 = 32 << 10;
/// Log lines shown for a failed target.
const SHOWN_LINES: usize = 40;

#[derive(clap::Args)]
pub(crate) struct Options {
    /// Run only these targets (default: all)
    #[arg(value_name = "TARGET")]
    targets: Vec<String>,
    /// Time for each target
    #[arg(long, value_name = "N", default_value_t = 60)]
    seconds: u32,
    /// Total inputs, divided equally among the targets, instead of a time: 10m is ten million
    #[arg(long, value_name = "N", value_parser = parse_count, conflicts_with_all = ["seconds", "replay"])]
    inputs: Option<u64>,
    /// Write the figures of all targets, as JSON
    #[arg(long, value_name = "FILE", conflicts_with = "replay")]
    report: Option<PathBuf>,
    /// Number of targets that run in parallel
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u8).range(1..=64))]
    jobs: u8,
    /// Add new inputs that reach more code to the committed corpora
    #[arg(long, conflicts_with = "replay")]
    keep: bool,
    /// Run one target on this input only
    #[arg(long, value_name = "FILE")]
    replay: Option<PathBuf>,
}

/// Runs the targets.
///
/// # Errors
/// When a target failed: the input is under fuzz/artifacts, and the command that replays it is shown.
pub(crate) fn run(options: &Options) -> Result<()> {
    let all = all_targets()?;
    let targets = if options.targets.is_empty() { &all } else { &options.targets };
    if let Some(unknown) = targets.iter().find(|target| !all.contains(target)) {
        bail!("unknown target {unknown:?}; available: {}", all.join(", "));
    }
    let binary = build()?;
    if let Some(input) = &options.replay {
        ensure!(targets.len() == 1, "--replay takes one target");
        return process::run(target_command(&binary, &targets[0]).arg(input));
    }
    let amount = match options.inputs {
        Some(inputs) => format!("-runs={}", inputs.div_ceil(targets.len() as u64)),
        None => format!("-max_total_time={}", options.seconds),
    };
    let (next, failed, figures) = (AtomicUsize::new(0), Mutex::new(Vec::new()), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..options.jobs {
            scope.spawn(|| {
                while let Some(target) = targets.get(next.fetch_add(1, Ordering::Relaxed)) {
                    match fuzz(&binary, target, &amount, options.keep) {
                        Ok(found) => figures.lock().expect("no thread panicked").push((target.clone(), found)),
                        Err(error) => {
                            eprintln!("xtask: {target}: {error:#}");
                            failed.lock().expect("no thread panicked").push(target.as_str());
                        }
                    }
                }
            });
        }
    });
    let failed = failed.into_inner().expect("no thread panicked");
    ensure!(failed.is_empty(), "{} of {} targets failed: {}", failed.len(), targets.len(), failed.join(", "));
    let mut figures = figures.into_inner().expect("no thread panicked");
    figures.sort_by(|a, b| a.0.cmp(&b.0));
    let inputs: u64 = figures.iter().map(|(_, figures)| figures.inputs).sum();
    if let Some(path) = &options.report {
        let text = serde_json::to_string_pretty(&json_report(&figures, inputs))? + "\n";
        fs::write(path, text).with_context(|| format!("failed to write {}", path.display()))?;
    }
    println!("{} targets, {inputs} inputs, nothing found", targets.len());
    Ok(())
}

/// Returns the report of a run without findings.
fn json_report(figures: &[(String, Figures)], inputs: u64) -> Value {
    let target = |(name, it): &(String, Figures)| {
        json!({
            "target": name, "inputs": it.inputs, "inputsPerSecond": it.per_second, "edges": it.edges,
            "peakResidentMebibytes": it.peak_mebibytes,
        })
    };
    json!({
        "inputs": inputs,
        "limits": {
            "secondsPerInput": INPUT_SECONDS, "bytesPerInput": INPUT_BYTES, "addressSpaceMebibytes": ADDRESS_SPACE_KIB >> 10,
        },
        "crashes": 0, "hangs": 0,
        "targets": figures.iter().map(target).collect::<Vec<_>>(),
    })
}

fn folder() -> PathBuf {
    workspace::root().join("fuzz")
}

/// Lists the targets: each has a corpus of its name.
fn all_targets() -> Result<Vec<String>> {
    let corpus = folder().join("corpus");
    let listed = fs::read_dir(&corpus).with_context(|| format!("failed to read {}", corpus.display()))?;
    let mut targets =
        listed.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned())).collect::<Result<Vec<_>>>()?;
    targets.sort();
    Ok(targets)
}

fn build() -> Result<PathBuf> {
    // Selected together with the product's binary: other crates then have the same features, and an existing release build is reused.
    let selection = ["-p", "engram-cli", "-p", "engram-fuzz", "--features", "engram-fuzz/libfuzzer"];
    let profile = Profile::of_tools()?;
    let mut cargo = profile.cargo("build", ["--bin", "engram-fuzz"]);
    process::run(cargo.args(selection).env("RUSTC_WORKSPACE_WRAPPER", folder().join("rustc.sh")))?;
    Ok(profile.folder().join("engram-fuzz"))
}

/// Returns the command of one target, with limited address space: the shell sets it without unsafe code.
fn target_command(binary: &Path, target: &str) -> Command {
    let mut command = Command::new("sh");
    command.args(["-c", &format!("ulimit -v {ADDRESS_SPACE_KIB} && exec \"$0\" \"$@\"")]).arg(binary);
    command.env("ENGRAM_FUZZ_TARGET", target);
    command.arg(format!("-timeout={INPUT_SECONDS}"));
    command
}

fn fuzz(binary: &Path, target: &str, amount: &str, keep: bool) -> Result<Figures> {
    let work = workspace::target().join("fuzz").join(target);
    let (found, artifacts) = (work.join("found"), folder().join("artifacts").join(target));
    for folder in [&found, &artifacts] {
        fs::create_dir_all(folder).with_context(|| format!("failed to create {}", folder.display()))?;
    }
    let corpus = folder().join("corpus").join(target);
    let log = work.join("log");
    let mut command = target_command(binary, target);
    command.args([amount, "-print_final_stats=1"]);
    command.arg(format!("-max_len={INPUT_BYTES}"));
    command.arg(format!("-artifact_prefix={}/", artifacts.display()));
    let dictionary = folder().join("dictionaries").join(target);
    if dictionary.exists() {
        command.arg(format!("-dict={}", dictionary.display()));
    }
    let log_file = fs::File::create(&log).with_context(|| format!("failed to write {}", log.display()))?;
    let status = command.args([&found, &corpus]).stdout(log_file.try_clone()?).stderr(log_file).status();
    let status = status.context("failed to start the fuzzer")?;
    let text = String::from_utf8_lossy(&fs::read(&log)?).into_owned();
    if !status.success() {
        let lines: Vec<&str> = text.lines().collect();
        eprintln!("{}", lines[lines.len().saturating_sub(SHOWN_LINES)..].join("\n"));
        let artifact = text.lines().rev().find_map(|line| line.split("Test unit written to ").nth(1));
        let replay = artifact.map(|artifact| format!("; replay with: cargo xtask fuzz {target} --replay {artifact}"));
        bail!("target failed ({status}){}", replay.unwrap_or_default());
    }
    let figures = Figures::read(&text).context("libFuzzer printed no summary")?;
    println!("{target}: {figures}");
    if keep {
        let mut merge = target_command(binary, target);
        // Edges only, without hit counts: the corpus is part of every checkout.
        merge
            .args(["-merge=1", "-use_counters=0"])
            .args([&corpus, &found])
            .stdout(fs::File::create(work.join("merge"))?);
        let merged =
            merge.stderr(fs::File::create(work.join("merge"))?).status().context("failed to start the merge")?;
        ensure!(merged.success(), "the merge failed ({merged}); see {}", work.join("merge").display());
    }
    Ok(figures)
}

/// Parsed summary of libFuzzer, `#123 DONE cov: 4 ft: 5 corp: 6/7Kb ...`, with inputs per second and peak memory.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Figures {
    inputs: u64,
    per_second: u64,
    edges: u64,
    corpus: String,
    peak_mebibytes: u64,
}

impl Figures {
    fn read(text: &str) -> Option<Self> {
        let last = text.lines().rev().find(|line| line.contains("\tDONE "))?;
        let words: Vec<&str> = last.split_whitespace().collect();
        let after = |name: &str| words.iter().skip_while(|word| **word != name).nth(1).copied();
        let stat = |name: &str| {
            let line = text.lines().rev().find(|line| line.starts_with(name))?;
            line.rsplit(' ').next()?.parse::<u64>().ok()
        };
        Some(Self {
            inputs: words.first()?.trim_start_matches('#').parse().ok()?,
            per_second: after("exec/s:")?.parse().ok()?,
            edges: after("cov:")?.parse().ok()?,
            corpus: after("corp:")?.to_owned(),
            peak_mebibytes: stat("stat::peak_rss_mb:")?,
        })
    }
}

impl std::fmt::Display for Figures {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { inputs, per_second, edges, corpus, peak_mebibytes } = self;
        write!(
            f,
            "{inputs} inputs ({per_second} a second), {edges} edges, corpus {corpus}, {peak_mebibytes} MiB at most"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fuzzer_summary_is_parsed() {
        let text = "INFO: seed\n#2\tINITED cov: 1 ft: 1 corp: 1/1b\n\
                    #812\tDONE   cov: 61 ft: 80 corp: 12/99b lim: 8 exec/s: 406 rss: 80Mb\nDone 812 runs in 2 second(s)\n\
                    stat::number_of_executed_units: 812\nstat::peak_rss_mb:              81\n";
        let figures = Figures::read(text).unwrap();
        assert_eq!(figures.to_string(), "812 inputs (406 a second), 61 edges, corpus 12/99b, 81 MiB at most");
        let kept = json_report(&[("map_json".into(), figures)], 812);
        assert_eq!((&kept["inputs"], &kept["targets"][0]["edges"]), (&json!(812), &json!(61)));
        assert_eq!(kept["limits"]["addressSpaceMebibytes"], 2048);
        // A killed fuzzer prints no summary.
        assert_eq!(Figures::read("#2\tINITED cov: 1 ft: 1 corp: 1/1b\n"), None);
    }
}
