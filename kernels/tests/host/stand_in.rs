//! A test on the stand-in for libcuda: it starts itself once more with the stand-in on the path of libraries, and settings of what it
//! shall be like (`libcuda.cpp` has them).

use crate::build::{Variant, program};
use std::process::Command;
use std::time::Duration;

/// Says that this process is the one with the stand-in.
const ON_STAND_IN: &str = "ENGRAM_TEST_ON_STAND_IN";
/// Kernels on the CPU of a busy machine take their time.
#[allow(dead_code)] // Not every test opens a device itself.
pub(crate) const PATIENT: Duration = Duration::from_secs(600);

/// Runs `body` with a driver that is like this, and gives what it said; `None` in the process that runs it, and where none can. `test` is
/// the name of the test that calls.
pub(crate) fn on_stand_in(test: &str, settings: &[(&str, &str)], body: impl FnOnce()) -> Option<String> {
    if std::env::var_os(ON_STAND_IN).is_some() {
        body();
        return None;
    }
    let library = program(Variant::Library, None)?;
    let mut path = library.parent().unwrap().as_os_str().to_owned();
    if let Some(former) = std::env::var_os("LD_LIBRARY_PATH") {
        path.push(":");
        path.push(former);
    }
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", test, "--nocapture", "--include-ignored"])
        .env(ON_STAND_IN, "1")
        .env("LD_LIBRARY_PATH", path);
    let output = command.envs(settings.iter().copied()).output().unwrap();
    let said = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat();
    assert!(output.status.success() && said.contains("1 passed"), "{test} {settings:?}:\n{said}");
    Some(said)
}
