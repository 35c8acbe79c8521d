//! `cargo xtask simulate`: seeds of the simulated cluster, on every core.
//!
//! The seeds are run by the binary of package engram-simulation, built with every assertion, and for release but for `--debug`. This command says how many, shows first that a seed leaves the same trace in two processes, and shares the time
//! between the modes. The last part of the time is for package engram-network-simulation: fewer seeds, of whole workers over a
//! simulated network.

use std::process::Command;

use anyhow::{Result, ensure};

use crate::process;
use crate::workspace::{self, Profile};

/// Seeds that are run in two processes before any other.
const REPLAYED: &str = "20";
/// The network simulation's: each is a process of its own, and takes as long as thousands of the others.
const NETWORK_REPLAYED: u64 = 2;
/// One part in so many of the time is for the network simulation, and at most one seed in so many of a mode's.
const NETWORK_SHARE: u64 = 3;
const NETWORK_SEEDS: u64 = 10;

#[derive(clap::Args)]
pub(crate) struct Options {
    /// Seeds to run in each mode; a tenth of them over a network
    #[arg(long, default_value_t = 5_000, value_name = "N")]
    seeds: u64,
    /// The first seed
    #[arg(long, default_value_t = 0, value_name = "S")]
    start: u64,
    /// Ends after so many seconds, all modes together, the build apart
    #[arg(long, default_value_t = 3_600, value_name = "T")]
    seconds: u64,
    /// sync, replicated or async; all of them without it
    #[arg(long, value_name = "MODE")]
    mode: Option<String>,
    /// What every run is about: open, alone, leases, promotions, restarts, copies or rot; without it each seed decides
    #[arg(long, value_name = "NAME")]
    season: Option<String>,
    /// Runs this seed alone and prints what happens, step by step
    #[arg(long, value_name = "S")]
    seed: Option<u64>,
    /// Plants a defect in every process and expects it to be found
    #[arg(long, value_name = "NAME")]
    defect: Option<String>,
    /// Plants every defect, one after the other, each where it shows soonest, and prints which seeds find which
    /// (docs/results/defects.md)
    #[arg(long, conflicts_with_all = ["defect", "mode", "season", "seed"])]
    defects: bool,
    /// Only real workers, coordinator and clients over a simulated network; without it they get the last third of the time, and a tenth of the seeds
    #[arg(long, conflicts_with_all = ["mode", "season", "defect", "defects"])]
    network: bool,
    /// Built as the tests are: sooner where these are built anyway, while each seed takes two to six times as long
    #[arg(long, conflicts_with_all = ["defect", "defects"])]
    debug: bool,
}

/// Runs seeds.
///
/// # Errors
/// When something did not hold, a kind of fault never happened, or a trace was not the same again.
pub(crate) fn run(options: &Options) -> Result<()> {
    if options.network {
        return network(options, options.seeds, options.seconds);
    }
    let chosen = options.mode.is_some() || options.season.is_some();
    let with_network = !chosen && options.defect.is_none() && !options.defects && options.seed.is_none();
    let network_seconds = if with_network { options.seconds / NETWORK_SHARE } else { 0 };
    let defects = options.defect.is_some() || options.defects;
    let features: &[&str] = if defects { &["--features", "engram-simulation/defects"] } else { &[] };
    build("engram-simulation", features, options)?;
    if options.defects {
        let mut score = simulation("sync", options)?;
        score.args(["--defect", "all"]);
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
        if options.defect.is_none() {
            replays(mode, options)?;
        }
        let mut seeds = simulation(mode, options)?;
        for (name, value) in [("--seeds", options.seeds), ("--start", options.start), ("--seconds", seconds)] {
            seeds.arg(name).arg(value.to_string());
        }
        process::run(&mut seeds)?;
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
        let told = || -> Result<Vec<u8>> {
            Ok(binary("engram-network-simulation", options)?.args(["--seed", &seed.to_string()]).output()?.stdout)
        };
        ensure!(told()? == told()?, "seed {seed} went another way the second time");
    }
    for (name, value) in [("--seeds", seeds.max(1)), ("--start", options.start), ("--seconds", seconds.max(1))] {
        command.arg(name).arg(value.to_string());
    }
    process::run(&mut command)
}

/// Runs some seeds in two processes: their traces are the same, whatever else the processes did.
fn replays(mode: &str, options: &Options) -> Result<()> {
    let traces = |threads: &str| -> Result<Option<String>> {
        let mut command = simulation(mode, options)?;
        let output = command.args(["--seeds", REPLAYED, "--threads", threads]).output()?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        Ok(text.lines().find_map(|line| line.split_once("; traces ")).map(|(_, traces)| traces.to_owned()))
    };
    let (one, two) = (traces("1")?, traces("2")?);
    ensure!(one.is_some() && one == two, "{REPLAYED} seeds left the traces {one:?}, and then {two:?}");
    Ok(())
}

fn simulation(mode: &str, options: &Options) -> Result<Command> {
    let mut command = binary("engram-simulation", options)?;
    command.args(["--mode", mode]);
    if let Some(season) = &options.season {
        command.args(["--season", season]);
    }
    if let Some(defect) = &options.defect {
        command.args(["--defect", defect]);
    }
    Ok(command)
}

/// Builds one of the simulators.
fn build(package: &str, arguments: &[&str], options: &Options) -> Result<()> {
    if options.debug {
        // Selected from the whole workspace together with a test: then everything has the features that it has in `cargo xtask test`.
        return process::run(
            &mut Profile::of_tests()?.cargo("build", ["--workspace", "--test", "worker", "--bin", package]),
        );
    }
    // Selected together with the binary of the product: then the crates of others have the features that they have there, as far
    // as they can, and a release build that exists is used. The wrapper adds the assertions of our own crates.
    let mut cargo = Profile::Release.cargo("build", ["-p", "engram-cli", "-p", package, "--bin", package]);
    let wrapper = workspace::root().join("crates/simulation/rustc.sh");
    process::run(cargo.args(arguments).env("RUSTC_WORKSPACE_WRAPPER", wrapper))
}

fn binary(name: &str, options: &Options) -> Result<Command> {
    let name = format!("{name}{}", std::env::consts::EXE_SUFFIX);
    let profile = if options.debug { Profile::of_tests()? } else { Profile::Release };
    Ok(Command::new(profile.folder().join(name)))
}
