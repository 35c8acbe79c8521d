//! Test programs as built by cargo, run in parallel.
//!
//! Cargo runs them one after another, although many tests mostly wait. The output of a program is shown in one piece when it ends.

use std::fs::{self, File};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use anyhow::{Context, Result};
use serde::Deserialize;

use crate::{process, workspace};

/// A line that cargo prints with `--message-format=json`.
#[derive(Deserialize)]
struct Message {
    reason: String,
    manifest_path: Option<PathBuf>,
    executable: Option<PathBuf>,
    target: Option<Target>,
    profile: Option<Profile>,
}

#[derive(Deserialize)]
struct Target {
    name: String,
}

#[derive(Deserialize)]
struct Profile {
    test: bool,
}

/// A program with tests.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct TestProgram {
    /// Name of its target: a crate, or a file in `tests/`.
    name: String,
    /// Directory of its package, where it runs.
    folder: PathBuf,
    executable: PathBuf,
}

impl TestProgram {
    /// Parses a cargo message; returns `None` if it does not describe a program with tests.
    fn parse(line: &str) -> Option<Self> {
        let message: Message = serde_json::from_str(line).ok()?;
        if message.reason != "compiler-artifact" || !message.profile?.test {
            return None;
        }
        let folder = message.manifest_path?.parent()?.to_owned();
        Some(Self { name: message.target?.name, folder, executable: message.executable? })
    }

    /// Returns the name of its target.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Runs it and returns its status and output.
    fn run(&self, arguments: &[String], environment: &[(&str, PathBuf)]) -> Result<(ExitStatus, Vec<u8>)> {
        let folder = workspace::target().join("test-output");
        let log = folder
            .join(self.executable.file_name().context("the program path has no file name")?)
            .with_extension("log");
        let failed = || format!("failed to run {}", self.executable.display());
        // A file rather than a pipe, which any process left behind by a test would keep open; one file, so that lines stay in order.
        fs::create_dir_all(&folder).with_context(failed)?;
        let file = File::options().create(true).append(true).open(&log).with_context(failed)?;
        file.set_len(0).with_context(failed)?;
        let mut command = Command::new(&self.executable);
        command.args(arguments).current_dir(&self.folder).env("CARGO_MANIFEST_DIR", &self.folder);
        command.envs(environment.iter().map(|(name, value)| (*name, value))).stdin(Stdio::null());
        let status =
            command.stdout(file.try_clone().with_context(failed)?).stderr(file).status().with_context(failed)?;
        Ok((status, fs::read(&log).with_context(failed)?))
    }
}

/// Builds the programs of a `cargo test` command.
///
/// # Errors
/// When the build fails.
pub(crate) fn build(cargo_test: &mut Command) -> Result<Vec<TestProgram>> {
    let messages = process::read(cargo_test.args(["--no-run", "--message-format=json-render-diagnostics"]))?;
    Ok(messages.lines().filter_map(TestProgram::parse).collect())
}

/// Runs all of them, one per processor at a time, and passes each one's output and success to `ended`.
///
/// # Errors
/// When one cannot be run.
pub(crate) fn run(
    programs: &[&TestProgram],
    arguments: &[String],
    environment: &[(&str, PathBuf)],
    ended: impl FnMut(&str, bool) + Send,
) -> Result<()> {
    let next = AtomicUsize::new(0);
    let ended = Mutex::new(ended);
    let work = || -> Result<()> {
        while let Some(program) = programs.get(next.fetch_add(1, Ordering::Relaxed)) {
            let started = Instant::now();
            let (status, output) = program.run(arguments, environment)?;
            let text = String::from_utf8_lossy(&output);
            let mut ended = ended.lock().expect("no thread panicked");
            let place = shown(&program.executable);
            println!("\n     Ran {} ({place}) in {:.1} s", program.name, started.elapsed().as_secs_f64());
            std::io::stdout().lock().write_all(&output).context("failed to write to standard output")?;
            if !status.success() {
                println!("error: {} failed ({status})", program.name);
            }
            (*ended)(&text, status.success());
        }
        Ok(())
    };
    let jobs = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..jobs).map(|_| scope.spawn(work)).collect();
        threads.into_iter().try_for_each(|thread| thread.join().expect("no thread panicked"))
    })
}

fn shown(path: &Path) -> String {
    path.strip_prefix(workspace::root()).unwrap_or(path).display().to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_programs_are_distinguished_from_other_artifacts() {
        let line = |reason: &str, test: bool, executable: &str| {
            format!(
                r#"{{"reason":"{reason}","manifest_path":"/w/store/Cargo.toml","target":{{"name":"gpu","kind":["test"]}},
                    "profile":{{"test":{test},"opt_level":"0"}},"executable":{executable},"fresh":true}}"#
            )
        };
        let program =
            TestProgram { name: "gpu".into(), folder: "/w/store".into(), executable: "/w/target/gpu-1f".into() };
        assert_eq!(TestProgram::parse(&line("compiler-artifact", true, r#""/w/target/gpu-1f""#)), Some(program));
        assert_eq!(TestProgram::parse(&line("compiler-artifact", false, r#""/w/target/engram""#)), None);
        assert_eq!(TestProgram::parse(&line("compiler-artifact", true, "null")), None);
        assert_eq!(TestProgram::parse(r#"{"reason":"build-finished","success":true}"#), None);
        assert_eq!(TestProgram::parse("not of cargo"), None);
    }

    #[test]
    fn failed_program_is_reported_with_its_output() {
        let program = TestProgram { name: "sh".into(), folder: "/".into(), executable: "/bin/sh".into() };
        let script = "echo out; echo err >&2; echo $WORD; exit 3";
        let mut seen = Vec::new();
        run(&[&program], &["-c".into(), script.into()], &[("WORD", "given".into())], |text, well| {
            seen.push((text.to_owned(), well));
        })
        .unwrap();
        assert_eq!(seen, [("out\nerr\ngiven\n".to_owned(), false)]);
    }
}
