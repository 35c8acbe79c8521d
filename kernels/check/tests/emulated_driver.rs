//! Runs the complete check with the emulated CUDA driver and fake versions of optional programs.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

#[path = "../../tests/host/build.rs"]
mod build;

use build::{Variant, program};
use serde_json::Value;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// A machine with the emulated driver; `None` without g++.
struct Machine {
    folder: tempfile::TempDir,
    library: PathBuf,
}

impl Machine {
    fn new() -> Option<Self> {
        let library = program(Variant::Library, None)?.parent().unwrap().to_owned();
        Some(Self { folder: tempfile::tempdir().unwrap(), library })
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Installs a program on the PATH.
    fn with_program(self, name: &str, script: &str) -> Self {
        let path = self.path(name);
        fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        self
    }

    /// Installs nvcc, which compiles one program.
    fn with_nvcc(self) -> Self {
        let twin = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/cub_on_cpu.cpp");
        let compiler = std::env::var("CXX").unwrap_or_else(|_| "g++".to_owned());
        let arguments = "case \"$*\" in *-arch=sm_90*cub_rank.cu) ;; *) exit 9 ;; esac\n\
            while [ $# -gt 0 ]; do case $1 in -o) out=$2 ;; esac; shift; done";
        self.with_program(
            "nvcc",
            &format!("{arguments}\nexec {compiler} -std=c++17 -O1 {} -o \"$out\"", twin.display()),
        )
    }

    fn check(&self, settings: &[(&str, &str)], arguments: &[&str]) -> Output {
        let mut path = self.folder.path().as_os_str().to_owned();
        path.push(":/usr/bin:/bin");
        let mut command = Command::new(env!("CARGO_BIN_EXE_engram-gpu-check"));
        command.current_dir(self.folder.path()).args(arguments).arg("--long-deadline");
        command.env("PATH", path).env("LD_LIBRARY_PATH", &self.library).env("CUDA_HOST_MEMORY_MIB", "128");
        command.envs(settings.iter().copied()).output().unwrap()
    }

    fn results(&self) -> Value {
        serde_json::from_str(&fs::read_to_string(self.path("gpu-check.json")).unwrap()).unwrap()
    }
}

fn printed(output: &Output) -> String {
    [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes).into_owned()).concat()
}

/// Returns name, outcome and detail of each check.
fn checks(results: &Value) -> Vec<(&str, &str, &str)> {
    let all = results["checks"].as_array().unwrap().iter();
    all.map(|it| (it["name"].as_str().unwrap(), it["outcome"].as_str().unwrap(), it["detail"].as_str().unwrap()))
        .collect()
}

const SUMMARY: &str = "echo '========= ERROR SUMMARY: 0 errors'";
const SMALL: [&str; 12] =
    ["--updates", "40k", "--rounds", "1", "--contexts", "2", "--memories", "9k", "--ranked", "9k", "--repeats", "1"];

#[test]
fn all_checks_pass_and_missing_programs_are_skipped() {
    let Some(machine) = Machine::new() else { return };
    let machine = machine.with_nvcc().with_program("compute-sanitizer", SUMMARY).with_program(
        "python3",
        "case $2 in torch) echo '{\"version\": \"9\", \"rows\": [{\"workload\": \"quality\", \"memories\": 9000, \"best\": 1, \
         \"median\": 2, \"repeats\": 3}]}' ;; *) echo '{\"skipped\": \"there is no cupy\"}' ;; esac",
    );
    let output = machine.check(&[], &SMALL);
    assert!(output.status.success(), "{}", printed(&output));

    let results = machine.results();
    let checks = checks(&results);
    let named = |outcome| checks.iter().filter(|it| it.1 == outcome).map(|it| it.0).collect::<Vec<_>>();
    assert_eq!(named("failed"), [""; 0]);
    assert_eq!(named("skipped"), ["failures-invalid-address", "bench-cupy"]);
    assert_eq!(
        named("passed"),
        [
            "passes",
            "training",
            "multiple-devices",
            "history",
            "drivers",
            "failures-out-of-memory",
            "failures-timeout",
            "failures-rejected-launch",
            "sanitizer-memcheck",
            "sanitizer-racecheck",
            "sanitizer-synccheck",
            "bench",
            "bench-cub",
            "bench-torch"
        ]
    );
    let training = checks.iter().find(|it| it.0 == "training").unwrap().2;
    assert!(training.contains("agree with the CPU") && training.contains("a step of 128 samples"), "{training}");
    assert_eq!(results["device"]["name"], "emulated 0");
    assert_eq!(results["device"]["capability"], "9.0");

    // Every row has a duration, and its peers.
    let rows = results["rows"].as_array().unwrap();
    assert!(rows.len() >= 18, "{} rows", rows.len());
    assert!(rows.iter().all(|row| row["device"]["median"].as_f64().unwrap() > 0.0), "{rows:?}");
    assert!(rows.iter().all(|row| row["call"]["median"].as_f64().unwrap() > 0.0), "{rows:?}");
    assert!(results["copy_gb_per_s"].as_f64().unwrap() > 0.0);
    let peers = |workload: &str| {
        let row = rows.iter().find(|row| row["workload"] == workload).unwrap();
        row["peers"].as_array().unwrap().iter().map(|peer| peer["name"].as_str().unwrap()).collect::<Vec<_>>()
    };
    assert_eq!((peers("sort"), peers("quality"), peers("top")), (vec!["CUB"], vec!["torch"], vec![]));

    // The printed table can be printed again from the file.
    let again = Command::new(env!("CARGO_BIN_EXE_engram-gpu-check"))
        .args(["table"])
        .arg(machine.path("gpu-check.json"))
        .output()
        .unwrap();
    assert!(again.status.success());
    assert!(printed(&output).contains(&String::from_utf8(again.stdout).unwrap()));
}

#[test]
fn without_a_gpu_the_check_fails_with_the_reason() {
    let Some(machine) = Machine::new() else { return };
    let reason = |settings: &[(&str, &str)]| {
        let output = machine.check(settings, &SMALL);
        assert_eq!(output.status.code(), Some(1), "{}", printed(&output));
        assert!(!machine.path("gpu-check.json").exists());
        printed(&output)
    };
    assert!(reason(&[("CUDA_HOST_DEVICES", "0")]).contains("no GPU to check: no CUDA device 0: the driver reports 0"));
    assert!(reason(&[("CUDA_HOST_DRIVER", "12080")]).contains("CUDA driver is too old: it supports CUDA 12.8"));
    assert!(reason(&[("CUDA_HOST_CAPABILITY", "75")]).contains("does not support compute capability 7.5"));
}

#[test]
fn failures_are_reported_and_other_checks_continue() {
    let Some(machine) = Machine::new() else { return };
    let hazards = "echo '========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)'; exit 86";
    let machine = machine.with_program(
        "compute-sanitizer",
        &format!("case $2 in racecheck) {hazards} ;; memcheck) exit 0 ;; *) {SUMMARY} ;; esac"),
    );
    let failing = [("CUDA_HOST_FAIL", "cuLaunchKernel:9:700")];
    let output = machine.check(&failing, &[&SMALL[..], &["--only", "passes,training,sanitizer"]].concat());
    assert_eq!(output.status.code(), Some(1), "{}", printed(&output));
    let results = machine.results();
    let checks = checks(&results);
    let outcome = |name: &str| {
        let check = checks.iter().find(|check| check.0 == name).unwrap();
        (check.1, check.2)
    };
    assert!(matches!(outcome("passes"), ("failed", why) if why.contains("code: 700")), "{checks:?}");
    assert!(
        matches!(outcome("training"), ("failed", why) if why.contains("the device failed: gpu failed")),
        "{checks:?}"
    );
    assert!(matches!(outcome("sanitizer-racecheck"), ("failed", why) if why.contains("2 hazards")), "{checks:?}");
    assert!(matches!(outcome("sanitizer-memcheck"), ("failed", why) if why.contains("no summary")), "{checks:?}");
    assert_eq!(outcome("sanitizer-synccheck").0, "passed");
    assert!(printed(&output).contains("1 passed, 4 failed, 0 skipped"));
}

#[test]
fn peer_with_another_order_fails_and_missing_peer_is_skipped() {
    let Some(machine) = Machine::new() else { return };
    let bench = [&SMALL[..], &["--only", "bench,sanitizer"]].concat();
    let machine = machine.with_nvcc().with_program("python3", "echo nonsense");
    let output = machine.check(&[("WRONG", "1")], &bench);
    assert_eq!(output.status.code(), Some(1), "{}", printed(&output));
    let results = machine.results();
    let of: Vec<_> = checks(&results).into_iter().filter(|it| it.1 == "failed").map(|it| (it.0, it.2)).collect();
    assert_eq!(of.iter().map(|it| it.0).collect::<Vec<_>>(), ["bench-cub", "bench-cupy", "bench-torch"]);
    assert!(of[0].1.contains("another order"), "{of:?}");
    assert!(of[1].1.contains("failed to parse the output"), "{of:?}");
    assert!(results["rows"].as_array().unwrap().iter().all(|row| row["peers"].as_array().unwrap().is_empty()));
    let skipped = checks(&results).into_iter().filter(|it| it.1 == "skipped");
    let lacking = "no compute-sanitizer on the PATH or in /usr/local/cuda/bin";
    assert_eq!(skipped.map(|it| it.2).collect::<Vec<_>>(), [lacking; 3]);
}

#[test]
fn python_peers_accept_their_arguments() {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("peers/gpu_peer.py");
    for peer in ["cupy", "torch"] {
        let mut command = Command::new("python3");
        command.arg(&script).args([peer, "--device", "0", "--repeats", "1", "copy:10", "rank:10"]);
        let Ok(output) = command.output() else { return eprintln!("SKIPPED: no python3") };
        assert!(output.status.success(), "{}", printed(&output));
        let printed: Value = serde_json::from_slice(&output.stdout).unwrap();
        // Without a supported GPU it reports the reason.
        assert!(printed["skipped"].is_string() != printed["rows"].is_array(), "{printed}");
    }
}
