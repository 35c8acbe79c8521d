//! `cargo xtask simulate`: runs seeds of the simulated cluster on every core.
//!
//! The binary of package engram-simulation runs the seeds, built with all assertions, and optimized unless `--debug` is set. This command first
//! checks that a seed produces the same trace in two processes, then divides the time among the modes. The last part of the time is for package
//! engram-network-simulation: fewer seeds, of whole workers over a simulated network.

use std::process::Command;

use anyhow::{Result, ensure};

use crate::process;
use crate::workspace::{self, Profile};

/// Seeds whose determinism is checked first.
const REPLAYED: &str = "20";
/// Seeds of the network simulation, each of which runs in its own process and takes as long as thousands of the others.
const NETWORK_REPLAYED: u64 = 2;
/// Divisor of the time and of the seeds for the network simulation.
const NETWORK_SHARE: u64 = 3;
const NETWORK_SEEDS: u64 = 10;
/// Divisor of the seeds that run again with a writer of items.
const ITEMS_SEEDS: u64 = 10;
/// Mode that may lose acknowledged writes, in which there is no writer of items.
const LOSSY: &str = "async";

#[derive(clap::Args)]
pub(crate) struct Options {
    /// Seeds to run in each mode; a tenth of them over a network
    #[arg(long, default_value_t = 5_000, value_name = "N")]
    seeds: u64,
    /// The first seed
    #[arg(long, default_value_t = 0, value_name = "S")]
    start: u64,
    /// Time limit in seconds for all modes together, without the build
    #[arg(long, default_value_t = 3_600, value_name = "T")]
    seconds: u64,
    /// sync, replicated or async; all of them by default
    #[arg(long, value_name = "MODE")]
    mode: Option<String>,
    /// Scenario of every run: open, alone, leases, promotions, restarts, copies or rot; drawn from the seed by default
    #[arg(long, value_name = "NAME")]
    scenario: Option<String>,
    /// Add a writer of items with payloads to every run; by default a tenth of the seeds of the modes that lose nothing run again with one
    #[arg(long)]
    items: bool,
    /// Run only this seed and print its trace, step by step
    #[arg(long, value_name = "S")]
    seed: Option<u64>,
    /// Inject a bug into every process and expect it to be found
    #[arg(long, value_name = "NAME")]
    injected_bug: Option<String>,
    /// Inject every bug, one after the other, each where it is found soonest, and print which seeds find it
    /// (docs/results/injected-bugs.md)
    #[arg(long, conflicts_with_all = ["injected_bug", "mode", "scenario", "seed"])]
    injected_bugs: bool,
    /// Run only real workers, coordinator and clients over a simulated network; by default they get the last third of the time and a tenth of the seeds
    #[arg(long, conflicts_with_all = ["mode", "scenario", "injected_bug", "injected_bugs"])]
    network: bool,
    /// Build like the tests: faster if those are built anyway, while each seed takes two to six times as long
    #[arg(long, conflicts_with_all = ["injected_bug", "injected_bugs"])]
    debug: bool,
}

/// Runs seeds.
///
/// # Errors
/// When an invariant was violated, a kind of fault never happened, or a trace was not reproducible.
pub(crate) fn run(options: &Options) -> Result<()> {
    if options.network {
        return network(options, options.seeds, options.seconds);
    }
    let chosen = options.mode.is_some() || options.scenario.is_some();
    let with_network = !chosen && options.injected_bug.is_none() && !options.injected_bugs && options.seed.is_none();
    let network_seconds = if with_network { options.seconds / NETWORK_SHARE } else { 0 };
    let with_bugs = options.injected_bug.is_some() || options.injected_bugs;
    let features: &[&str] = if with_bugs { &["--features", "engram-simulation/defects"] } else { &[] };
    build("engram-simulation", features, options)?;
    if options.injected_bugs {
        let mut score = simulation("sync", options)?;
        score.args(["--injected-bug", "all"]);
        for (name, value) in [("--seeds", options.seeds), ("--start", options.start), ("--seconds", options.seconds)] {
            score.arg(name).arg(value.to_string());
        }
        return process::run(&mut score);
    }
    let modes: Vec<&str> =
        options.mode.as_deref().map_or_else(|| vec!["sync", "replicated", "async"], |mode| vec![mode]);
    if let Some(seed) = options.seed {
        let mut replay = simulation(modes[0], options)?;
        return process::run(replay.arg("--seed").arg(seed.to_string()));
    }
    let seconds = ((options.seconds - network_seconds) / modes.len() as u64).max(1);
    for mode in modes {
        println!("mode {mode}");
        if options.injected_bug.is_none() {
            check_determinism(mode, options)?;
        }
        let mut seeds = simulation(mode, options)?;
        for (name, value) in [("--seeds", options.seeds), ("--start", options.start), ("--seconds", seconds)] {
            seeds.arg(name).arg(value.to_string());
        }
        process::run(&mut seeds)?;
        if !options.items && !with_bugs && mode != LOSSY {
            println!("mode {mode}, with items");
            let mut seeds = simulation(mode, options)?;
            let count = (options.seeds / ITEMS_SEEDS).max(1);
            for (name, value) in [("--seeds", count), ("--start", options.start), ("--seconds", seconds)] {
                seeds.arg(name).arg(value.to_string());
            }
            process::run(seeds.arg("--items"))?;
        }
    }
    if with_network { network(options, options.seeds / NETWORK_SEEDS, network_seconds) } else { Ok(()) }
}

/// Runs seeds of whole workers, coordinator and clients over a simulated network.
fn network(options: &Options, seeds: u64, seconds: u64) -> Result<()> {
    build("engram-network-simulation", &[], options)?;
    let mut command = binary("engram-network-simulation", options)?;
    if let Some(seed) = options.seed {
        return process::run(command.args(["--seed", &seed.to_string()]));
    }
    println!("network");
    for seed in options.start..options.start + NETWORK_REPLAYED {
        let trace = || -> Result<Vec<u8>> {
            Ok(binary("engram-network-simulation", options)?.args(["--seed", &seed.to_string()]).output()?.stdout)
        };
        ensure!(trace()? == trace()?, "seed {seed} is not deterministic: its traces differ");
    }
    for (name, value) in [("--seeds", seeds.max(1)), ("--start", options.start), ("--seconds", seconds.max(1))] {
        command.arg(name).arg(value.to_string());
    }
    process::run(&mut command)
}

/// Runs some seeds in two processes and compares the traces.
fn check_determinism(mode: &str, options: &Options) -> Result<()> {
    let traces = |threads: &str| -> Result<Option<String>> {
        let mut command = simulation(mode, options)?;
        let output = command.args(["--seeds", REPLAYED, "--threads", threads]).output()?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        Ok(text.lines().find_map(|line| line.split_once("; traces ")).map(|(_, traces)| traces.to_owned()))
    };
    let (one, two) = (traces("1")?, traces("2")?);
    ensure!(one.is_some() && one == two, "{REPLAYED} seeds are not deterministic: traces {one:?} and {two:?}");
    Ok(())
}

fn simulation(mode: &str, options: &Options) -> Result<Command> {
    let mut command = binary("engram-simulation", options)?;
    command.args(["--mode", mode]);
    if let Some(scenario) = &options.scenario {
        command.args(["--scenario", scenario]);
    }
    if let Some(bug) = &options.injected_bug {
        command.args(["--injected-bug", bug]);
    }
    if options.items {
        command.arg("--items");
    }
    Ok(command)
}

/// Builds one of the simulators.
fn build(package: &str, arguments: &[&str], options: &Options) -> Result<()> {
    if options.debug {
        // Selected from the whole workspace together with a test: features are then those of `cargo xtask test`.
        return process::run(
            &mut Profile::of_tests()?.cargo("build", ["--workspace", "--test", "worker", "--bin", package]),
        );
    }
    // Selected together with the product's binary: other crates then have mostly the same features, and an existing release build is reused. The
    // wrapper adds the assertions of the workspace's crates.
    let mut cargo = Profile::Release.cargo("build", ["-p", "engram-cli", "-p", package, "--bin", package]);
    let wrapper = workspace::root().join("crates/simulation/rustc.sh");
    process::run(cargo.args(arguments).env("RUSTC_WORKSPACE_WRAPPER", wrapper))
}

fn binary(name: &str, options: &Options) -> Result<Command> {
    let name = format!("{name}{}", std::env::consts::EXE_SUFFIX);
    let profile = if options.debug { Profile::of_tests()? } else { Profile::Release };
    Ok(Command::new(profile.folder().join(name)))
}
