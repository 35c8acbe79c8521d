//! Runs the commands of one stage. Output goes to the stage's log, or straight to the terminal for an exclusive stage.

use std::fs::{self, File};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

use super::stages::Stage;
use crate::workspace::{self, Profile};

/// How a stage that did not fail ended.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    Passed,
    /// The machine lacks something; the reason.
    Skipped(String),
}

/// A running stage.
pub(super) struct Job {
    /// Folder that the stages of one run share.
    pub(super) scratch: PathBuf,
    /// `None` for an exclusive stage.
    log: Option<PathBuf>,
}

impl Job {
    pub(super) fn new(stage: &Stage, scratch: &Path) -> Result<Self> {
        let log = scratch.join(stage.name).with_extension("log");
        File::create(&log).with_context(|| format!("failed to create {}", log.display()))?;
        Ok(Self { scratch: scratch.to_owned(), log: (!stage.exclusive).then_some(log) })
    }

    /// Runs `cargo xtask` with these arguments, in this process's executable.
    pub(super) fn xtask(&self, arguments: &[&str]) -> Result<()> {
        let status = self.status(xtask()?.args(arguments))?;
        ensure!(status == 0, "cargo xtask {} failed (status {status})", arguments.join(" "));
        Ok(())
    }

    /// Runs a command.
    pub(super) fn run(&self, command: &mut Command) -> Result<()> {
        let shown = shown(command);
        let status = self.status(command)?;
        ensure!(status == 0, "{shown} failed (status {status})");
        Ok(())
    }

    /// Runs a command and returns its exit status; -1 if a signal ended it.
    pub(super) fn status(&self, command: &mut Command) -> Result<i32> {
        let shown = shown(command);
        command.stdin(Stdio::null());
        if let Some(log) = &self.log {
            let mut file = File::options().append(true).open(log).context("failed to open the log of the stage")?;
            writeln!(file, "+ {shown}")?;
            command.stdout(file.try_clone()?).stderr(file);
        } else {
            println!("+ {shown}");
        }
        let status = command.status().with_context(|| format!("failed to start {shown}"))?;
        Ok(status.code().unwrap_or(-1))
    }

    /// Runs a command, logs its standard output and returns it.
    pub(super) fn output(&self, command: &mut Command) -> Result<String> {
        let shown = shown(command);
        let output = command.stdin(Stdio::null()).stderr(Stdio::inherit()).output();
        let output = output.with_context(|| format!("failed to start {shown}"))?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        match &self.log {
            Some(log) => write!(File::options().append(true).open(log)?, "+ {shown}\n{text}")?,
            None => println!("+ {shown}\n{text}"),
        }
        ensure!(output.status.success(), "{shown} failed ({})", output.status);
        Ok(text)
    }

    /// Prints the log.
    pub(super) fn print(&self) -> Result<()> {
        let Some(log) = &self.log else { return Ok(()) };
        let text = fs::read(log).with_context(|| format!("failed to read {}", log.display()))?;
        std::io::stdout().lock().write_all(&text).context("failed to write to standard output")
    }
}

/// Returns a command that runs this program with the profile of CI for tests.
pub(super) fn xtask() -> Result<Command> {
    let mut command = Command::new(std::env::current_exe().context("failed to find this program")?);
    command.current_dir(workspace::root()).env(Profile::VARIABLE, "ci");
    Ok(command)
}

/// Returns the command with the lowest priority. Linux shares processors between sessions first, so it gets a session of its own where there is `setsid`.
pub(super) fn at_lowest_priority(command: &Command) -> Command {
    const SCRIPT: &str = r#"echo 19 2> /dev/null > /proc/self/autogroup; exec nice -n 19 "$0" "$@""#;
    let mut lowest = if cfg!(target_os = "linux") { Command::new("setsid") } else { Command::new("env") };
    lowest.args(["sh", "-c", SCRIPT]).arg(command.get_program()).args(command.get_args());
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => lowest.env(name, value),
            None => lowest.env_remove(name),
        };
    }
    if let Some(folder) = command.get_current_dir() {
        lowest.current_dir(folder);
    }
    lowest
}

fn shown(command: &Command) -> String {
    let program = Path::new(command.get_program());
    let mut words = vec![program.file_name().unwrap_or(program.as_os_str()).to_string_lossy()];
    words.extend(command.get_args().map(std::ffi::OsStr::to_string_lossy));
    words.join(" ")
}
