//! The table of stages, and what each runs.

use std::ffi::OsStr;
use std::fmt;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};

use super::job::{Job, Verdict};
use crate::workspace::{self, Profile};

/// A stage of `cargo xtask ci`.
pub(super) struct Stage {
    pub(super) name: &'static str,
    pub(super) about: &'static str,
    /// Stages that must have passed before, each earlier in the table.
    pub(super) needs: &'static [&'static str],
    /// Runs alone: it judges times, or its tests expect both processors.
    pub(super) exclusive: bool,
    /// Runs at the lowest priority, also next to exclusive stages: it takes the processors when others wait. One such stage runs at a time.
    pub(super) background: bool,
    /// Skipped without root.
    pub(super) root: bool,
    pub(super) run: fn(&Job) -> Result<Verdict>,
}

impl fmt::Debug for Stage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}

impl fmt::Display for Stage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, about, needs, .. } = self;
        write!(f, "{name:<11} {about}")?;
        if !needs.is_empty() {
            write!(f, " (needs {})", needs.join(", "))?;
        }
        if self.exclusive {
            f.write_str(" (exclusive)")?;
        }
        if self.background {
            f.write_str(" (background)")?;
        }
        if self.root {
            f.write_str(" (root)")?;
        }
        Ok(())
    }
}

/// A stage that needs nothing and may run next to another.
const BASE: Stage = Stage {
    name: "",
    about: "",
    needs: &[],
    exclusive: false,
    background: false,
    root: false,
    run: |_| Ok(Verdict::Passed),
};

/// In the order in which they start. What fails soonest comes first; builds come before what uses them.
pub(super) static STAGES: [Stage; 17] = [
    Stage { name: "format", about: "rustfmt", run: |job| xtask(job, &["fmt", "--check"]), ..BASE },
    Stage { name: "words", about: "terms of the glossary", run: |job| xtask(job, &["words"]), ..BASE },
    Stage { name: "build", about: "the release build, as users run it", run: build, ..BASE },
    Stage { name: "licences", about: "licences and bills of materials", run: licences, ..BASE },
    Stage { name: "lint", about: "clippy, warnings denied", background: true, run: lint, ..BASE },
    Stage { name: "generated", about: "generated files", run: |job| xtask(job, &["generate", "--check"]), ..BASE },
    Stage {
        name: "example",
        about: "the README's commands on the release build",
        needs: &["build"],
        exclusive: true,
        run: example,
        ..BASE
    },
    Stage {
        name: "test",
        about: "the README's test command",
        needs: &["build"],
        exclusive: true,
        run: |job| xtask(job, &["test"]),
        ..BASE
    },
    Stage {
        name: "images",
        about: "container images, checked for reproducibility",
        needs: &["build"],
        exclusive: true,
        root: true,
        run: |job| xtask(job, &["images", "--verify"]),
        ..BASE
    },
    Stage {
        name: "kubernetes",
        about: "suites on a real Kubernetes in namespaces",
        needs: &["build"],
        exclusive: true,
        root: true,
        run: kubernetes,
        ..BASE
    },
    Stage {
        name: "kernels",
        about: "CUDA kernels on the CPU under sanitizers, fatbins rebuilt",
        run: |job| xtask(job, &["kernels", "--check"]),
        ..BASE
    },
    Stage { name: "model", about: "model checking with injected bugs", run: model, ..BASE },
    Stage {
        name: "simulate",
        about: "400 simulated clusters per mode, 40 over a simulated network",
        run: |job| xtask(job, &["simulate", "--debug", "--seeds", "400", "--seconds", "360"]),
        ..BASE
    },
    Stage {
        name: "python",
        about: "the release wheel in a fresh environment: types, tests, examples",
        needs: &["build"],
        run: python,
        ..BASE
    },
    Stage { name: "bench", about: "benchmark suites, once and small", run: bench, ..BASE },
    Stage { name: "report", about: "the example's report in a browser", needs: &["example"], run: report, ..BASE },
    Stage {
        name: "fuzz",
        about: "each fuzz target for eight seconds",
        needs: &["build"],
        background: true,
        run: fuzz,
        ..BASE
    },
];

/// Returns the names of all stages, as values of a command line.
pub(super) fn names() -> Vec<&'static str> {
    STAGES.iter().map(|stage| stage.name).collect()
}

fn xtask(job: &Job, arguments: &[&str]) -> Result<Verdict> {
    job.xtask(arguments).map(|()| Verdict::Passed)
}

fn lint(job: &Job) -> Result<Verdict> {
    // In the folder of another profile: cargo would make the other stages wait until it ends.
    job.run(super::job::at_lowest_priority(super::job::xtask()?.arg("lint")).env(Profile::VARIABLE, "dev"))?;
    Ok(Verdict::Passed)
}

fn fuzz(job: &Job) -> Result<Verdict> {
    job.run(&mut super::job::at_lowest_priority(super::job::xtask()?.args(["fuzz", "--seconds", "8"])))?;
    Ok(Verdict::Passed)
}

fn build(job: &Job) -> Result<Verdict> {
    job.run(&mut workspace::cargo(["build", "--release", "--locked"]))?;
    Ok(Verdict::Passed)
}

fn licences(job: &Job) -> Result<Verdict> {
    job.xtask(&["deny"])?;
    let folder = job.scratch.join("sbom");
    job.xtask(&["sbom", "--output", &folder.to_string_lossy()])?;
    Ok(Verdict::Passed)
}

/// Lines that the shipped example must end with: digest and hit rates are known, because all weights and counts are integers.
const EXPECTED: [&[&str]; 3] =
    [&["82de3b4850164e2866d319c3c0dab744"], &["top 500 ", "*0.7808"], &["top 1000 ", "*0.6353"]];

/// The README's main command on the shipped example, then its other commands on the same cluster.
fn example(job: &Job) -> Result<Verdict> {
    let state = job.scratch.join("state");
    let report = report_path(job);
    let text = job.output(
        engram(&["up", "examples/cluster.yaml", "--exit-when-done", "--port-base", "0"])
            .arg("--state-dir")
            .arg(&state)
            .arg("--report")
            .arg(&report),
    )?;
    for parts in EXPECTED {
        let holds = |line: &str| parts.iter().all(|part| line.contains(part));
        ensure!(text.lines().any(holds), "the example did not print a line with {parts:?}");
    }
    job.run(&mut engram(&["up", "--help"]))?;
    let started = ["up", "examples/cluster.yaml", "-d", "--wait", "--port-base", "0"];
    job.run(engram(&started).arg("--state-dir").arg(&state))?;
    for arguments in [&["rank", "--limit", "20"][..], &["top", "--once"], &["down"]] {
        job.run(engram(arguments).arg("--state-dir").arg(&state))?;
    }
    for manifest in ["own-events", "own-repository", "geodesic"] {
        let path = format!("examples/{manifest}.yaml");
        let mut up = engram(&["up", &path, "--exit-when-done", "--port-base", "0"]);
        job.run(up.arg("--state-dir").arg(job.scratch.join(manifest)))?;
    }
    Ok(Verdict::Passed)
}

/// `cargo run --release -- ARGUMENTS`, ended after ten minutes.
fn engram(arguments: &[&str]) -> Command {
    let mut command = workspace::command_for_cargo("timeout");
    command.arg("600").arg(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.args(["run", "--quiet", "--release", "--locked", "--"]).args(arguments);
    command
}

fn report_path(job: &Job) -> std::path::PathBuf {
    job.scratch.join("report.html")
}

fn report(job: &Job) -> Result<Verdict> {
    xtask(job, &["page", &report_path(job).to_string_lossy()])
}

/// Status of a machine that cannot run the Kubernetes suites.
const KUBERNETES_SKIPPED: i32 = 77;
/// Memory for the volumes of the test cluster, in KiB: more than the suites write, with the rest of the machine left alone.
const VOLUMES_KIB: u64 = 8 << 20;
/// Names the folder of the test cluster.
const KUBERNETES_STATE: &str = "ENGRAM_KUBERNETES_STATE";

/// The suites, with the programs that users build.
fn kubernetes(job: &Job) -> Result<Verdict> {
    let mut command = super::job::xtask()?;
    command.args(["kubernetes", "--release"]);
    let in_memory = Path::new("/dev/shm");
    // On a shared disk a flush takes longer than most planned changes, and the write gap would measure the disk.
    if std::env::var_os(KUBERNETES_STATE).is_none() && available_kib(in_memory).is_ok_and(|kib| kib > VOLUMES_KIB) {
        command.env(KUBERNETES_STATE, in_memory.join("engram-kubernetes"));
    }
    match job.status(&mut command)? {
        0 => Ok(Verdict::Passed),
        KUBERNETES_SKIPPED => Ok(Verdict::Skipped("this machine cannot run the suites, see above".into())),
        status => anyhow::bail!("cargo xtask kubernetes failed (status {status})"),
    }
}

fn available_kib(folder: &Path) -> Result<u64> {
    let arguments = [OsStr::new("--output=avail"), OsStr::new("-k"), folder.as_os_str()];
    let output = Command::new("df").args(arguments).output().context("failed to start df")?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    text.lines().last().unwrap_or_default().trim().parse().context("failed to read the output of df")
}

/// The model of the replica core with injected bugs: each has to be found, also in simulated clusters.
fn model(job: &Job) -> Result<Verdict> {
    // Of the whole workspace, so that dependencies have the features that they have in the tests.
    let mut cargo = Profile::Ci.cargo("test", ["--locked", "--workspace"]);
    cargo.args(["--features", "engram-simulation/defects", "--test", "model", "--test", "defects"]);
    job.run(cargo.args(["--", "--nocapture", "--skip", "the_core_is_safe", "--skip", "groups_are_safe"]))?;
    Ok(Verdict::Passed)
}

fn python(job: &Job) -> Result<Verdict> {
    let mut command = super::job::xtask()?;
    match job.status(command.args(["python", "--test", "--release"]))? {
        0 => Ok(Verdict::Passed),
        status if status == i32::from(crate::python::SKIPPED) => {
            Ok(Verdict::Skipped("maturin or pytest can't be installed, see the log".into()))
        }
        status => anyhow::bail!("the Python package failed (status {status})"),
    }
}

fn bench(job: &Job) -> Result<Verdict> {
    for suite in ["epoch", "rank", "recall", "store", "wire", "replication"] {
        job.xtask(&["bench", suite, "--peers", "none", "--memories", "10k"])?;
    }
    Ok(Verdict::Passed)
}
