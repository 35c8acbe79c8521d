//! The whole check on the stand-in for libcuda, with programs in the place of those that a GPU machine may have.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

#[path = "../../tests/host/build.rs"]
mod build;

use build::{Variant, program};
use serde_json::Value;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// A machine with the stand-in as its driver; `None` without g++.
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

    /// Puts a program on the PATH.
    fn has(self, name: &str, script: &str) -> Self {
        let path = self.path(name);
        fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        self
    }

    /// nvcc, for the one program that it is to compile.
    fn has_nvcc(self) -> Self {
        let twin = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/cub_on_cpu.cpp");
        let compiler = std::env::var("CXX").unwrap_or_else(|_| "g++".to_owned());
        let arguments = "case \"$*\" in *-arch=sm_90*cub_rank.cu) ;; *) exit 9 ;; esac\n\
            while [ $# -gt 0 ]; do case $1 in -o) out=$2 ;; esac; shift; done";
        self.has("nvcc", &format!("{arguments}\nexec {compiler} -std=c++17 -O1 {} -o \"$out\"", twin.display()))
    }

    fn check(&self, settings: &[(&str, &str)], arguments: &[&str]) -> Output {
        let mut path = self.folder.path().as_os_str().to_owned();
        path.push(":/usr/bin:/bin");
        let mut command = Command::new(env!("CARGO_BIN_EXE_engram-gpu-check"));
        command.current_dir(self.folder.path()).args(arguments).arg("--patient");
        command.env("PATH", path).env("LD_LIBRARY_PATH", &self.library).env("CUDA_HOST_MEMORY_MIB", "128");
        command.envs(settings.iter().copied()).output().unwrap()
    }

    fn results(&self) -> Value {
        serde_json::from_str(&fs::read_to_string(self.path("gpu-check.json")).unwrap()).unwrap()
    }
}

fn said(output: &Output) -> String {
    [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes).into_owned()).concat()
}

/// Name, outcome and detail of each check.
fn checks(results: &Value) -> Vec<(&str, &str, &str)> {
    let all = results["checks"].as_array().unwrap().iter();
    all.map(|it| (it["name"].as_str().unwrap(), it["outcome"].as_str().unwrap(), it["detail"].as_str().unwrap()))
        .collect()
}

const SUMMARY: &str = "echo '========= ERROR SUMMARY: 0 errors'";
const SMALL: [&str; 12] =
    ["--updates", "40k", "--rounds", "1", "--contexts", "2", "--memories", "9k", "--ranked", "9k", "--repeats", "1"];

#[test]
fn all_of_it_passes_and_what_is_lacking_is_skipped() {
    let Some(machine) = Machine::new() else { return };
    let machine = machine.has_nvcc().has("compute-sanitizer", SUMMARY).has(
        "python3",
        "case $2 in torch) echo '{\"version\": \"9\", \"rows\": [{\"workload\": \"quality\", \"memories\": 9000, \"best\": 1, \
         \"median\": 2, \"repeats\": 3}]}' ;; *) echo '{\"skipped\": \"there is no cupy\"}' ;; esac",
    );
    let output = machine.check(&[], &SMALL);
    assert!(output.status.success(), "{}", said(&output));

    let results = machine.results();
    let checks = checks(&results);
    let named = |outcome| checks.iter().filter(|it| it.1 == outcome).map(|it| it.0).collect::<Vec<_>>();
    assert_eq!(named("failed"), [""; 0]);
    assert_eq!(named("skipped"), ["failures-wrong-address", "bench-cupy"]);
    assert_eq!(
        named("passed"),
        [
            "passes",
            "several",
            "history",
            "drivers",
            "failures-memory",
            "failures-no-answer",
            "failures-refused-launch",
            "sanitizer-memcheck",
            "sanitizer-racecheck",
            "sanitizer-synccheck",
            "bench",
            "bench-cub",
            "bench-torch"
        ]
    );
    assert_eq!(results["device"]["name"], "stand-in 0");
    assert_eq!(results["device"]["capability"], "9.0");

    // Every row took some time, and has its peers.
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

    // What was printed is the table, and is printed again from the file.
    let again = Command::new(env!("CARGO_BIN_EXE_engram-gpu-check"))
        .args(["table"])
        .arg(machine.path("gpu-check.json"))
        .output()
        .unwrap();
    assert!(again.status.success());
    assert!(said(&output).contains(&String::from_utf8(again.stdout).unwrap()));
}

#[test]
fn without_a_gpu_nothing_is_done_and_the_reason_is_said() {
    let Some(machine) = Machine::new() else { return };
    let reason = |settings: &[(&str, &str)]| {
        let output = machine.check(settings, &SMALL);
        assert_eq!(output.status.code(), Some(1), "{}", said(&output));
        assert!(!machine.path("gpu-check.json").exists());
        said(&output)
    };
    assert!(
        reason(&[("CUDA_HOST_DEVICES", "0")])
            .contains("there is no GPU to check: there is no device 0: the driver has 0")
    );
    assert!(reason(&[("CUDA_HOST_DRIVER", "12080")]).contains("the driver is too old: it is of CUDA 12.8"));
    assert!(reason(&[("CUDA_HOST_CAPABILITY", "75")]).contains("nothing for a device of compute capability 7.5"));
}

#[test]
fn what_fails_is_said_with_its_reason_and_the_rest_goes_on() {
    let Some(machine) = Machine::new() else { return };
    let hazards = "echo '========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)'; exit 86";
    let machine = machine.has(
        "compute-sanitizer",
        &format!("case $2 in racecheck) {hazards} ;; memcheck) exit 0 ;; *) {SUMMARY} ;; esac"),
    );
    let failing = [("CUDA_HOST_FAIL", "cuLaunchKernel:9:700")];
    let output = machine.check(&failing, &[&SMALL[..], &["--only", "passes,sanitizer"]].concat());
    assert_eq!(output.status.code(), Some(1), "{}", said(&output));
    let results = machine.results();
    let checks = checks(&results);
    let outcome = |name: &str| {
        let check = checks.iter().find(|check| check.0 == name).unwrap();
        (check.1, check.2)
    };
    assert!(matches!(outcome("passes"), ("failed", why) if why.contains("code: 700")), "{checks:?}");
    assert!(matches!(outcome("sanitizer-racecheck"), ("failed", why) if why.contains("2 hazards")), "{checks:?}");
    assert!(matches!(outcome("sanitizer-memcheck"), ("failed", why) if why.contains("no summary")), "{checks:?}");
    assert_eq!(outcome("sanitizer-synccheck").0, "passed");
    assert!(said(&output).contains("1 passed, 3 failed, 0 skipped"));
}

#[test]
fn a_peer_with_another_order_is_a_failure_and_one_that_is_not_there_is_none() {
    let Some(machine) = Machine::new() else { return };
    let bench = [&SMALL[..], &["--only", "bench,sanitizer"]].concat();
    let machine = machine.has_nvcc().has("python3", "echo nonsense");
    let output = machine.check(&[("WRONG", "1")], &bench);
    assert_eq!(output.status.code(), Some(1), "{}", said(&output));
    let results = machine.results();
    let of: Vec<_> = checks(&results).into_iter().filter(|it| it.1 == "failed").map(|it| (it.0, it.2)).collect();
    assert_eq!(of.iter().map(|it| it.0).collect::<Vec<_>>(), ["bench-cub", "bench-cupy", "bench-torch"]);
    assert!(of[0].1.contains("another order"), "{of:?}");
    assert!(of[1].1.contains("did not print its figures"), "{of:?}");
    assert!(results["rows"].as_array().unwrap().iter().all(|row| row["peers"].as_array().unwrap().is_empty()));
    let skipped = checks(&results).into_iter().filter(|it| it.1 == "skipped");
    let lacking = "no compute-sanitizer on the PATH or in /usr/local/cuda/bin";
    assert_eq!(skipped.map(|it| it.2).collect::<Vec<_>>(), [lacking; 3]);
}

#[test]
fn the_python_peers_take_what_they_are_told() {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("peers/gpu_peer.py");
    for peer in ["cupy", "torch"] {
        let mut command = Command::new("python3");
        command.arg(&script).args([peer, "--device", "0", "--repeats", "1", "copy:10", "rank:10"]);
        let Ok(output) = command.output() else { return eprintln!("SKIPPED: no python3") };
        assert!(output.status.success(), "{}", said(&output));
        let printed: Value = serde_json::from_slice(&output.stdout).unwrap();
        // Where there is no GPU that it knows it says why.
        assert!(printed["skipped"].is_string() != printed["rows"].is_array(), "{printed}");
    }
}
