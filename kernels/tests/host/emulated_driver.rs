//! Runs a test with the emulated CUDA driver: the test re-executes itself with the driver on the library path, and with settings for it
//! (documented in `libcuda.cpp`).

use crate::build::{Variant, nccl, program};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// Marks the process that uses the emulated driver.
const EMULATED_ENV: &str = "ENGRAM_TEST_EMULATED_DRIVER";
/// Deadline for kernels on the CPU of a busy machine.
#[allow(dead_code)] // Not every test opens a device.
pub(crate) const LONG_DEADLINE: Duration = Duration::from_secs(600);

/// Runs `body` with an emulated driver of these settings and returns its output; `None` in the process that runs it, and if the driver cannot be
/// built. `test` is the name of the calling test.
pub(crate) fn run_with_emulated_driver(test: &str, settings: &[(&str, &str)], body: impl FnOnce()) -> Option<String> {
    run_emulated(test, settings, &|_| None, body)
}

/// As [`run_with_emulated_driver`], with the emulated NCCL.
#[allow(dead_code)] // Not every test sums over GPUs.
pub(crate) fn run_with_emulated_nccl(test: &str, settings: &[(&str, &str)], body: impl FnOnce()) -> Option<String> {
    run_emulated(test, settings, &|driver| Some(nccl(driver)), body)
}

fn run_emulated(
    test: &str,
    settings: &[(&str, &str)],
    further: &dyn Fn(&Path) -> Option<PathBuf>,
    body: impl FnOnce(),
) -> Option<String> {
    if std::env::var_os(EMULATED_ENV).is_some() {
        body();
        return None;
    }
    let library = program(Variant::Library, None)?;
    let mut path = library.parent().unwrap().as_os_str().to_owned();
    if let Some(further) = further(&library) {
        path.push(":");
        path.push(further.parent().unwrap());
    }
    if let Some(former) = std::env::var_os("LD_LIBRARY_PATH") {
        path.push(":");
        path.push(former);
    }
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", test, "--nocapture", "--include-ignored"])
        .env(EMULATED_ENV, "1")
        .env("LD_LIBRARY_PATH", path);
    let output = command.envs(settings.iter().copied()).output().unwrap();
    let output_text = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat();
    assert!(output.status.success() && output_text.contains("1 passed"), "{test} {settings:?}:\n{output_text}");
    Some(output_text)
}
