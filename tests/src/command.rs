//! Executes the binary and captures its output.

use serde_json::Value;
use std::ffi::OsStr;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;

/// Returns the path of the binary under test.
///
/// # Panics
/// The binary does not exist.
pub fn binary() -> &'static Path {
    static BINARY: OnceLock<PathBuf> = OnceLock::new();
    BINARY.get_or_init(|| {
        if let Some(path) = std::env::var_os("ENGRAM_BIN") {
            let path = PathBuf::from(path);
            assert!(path.is_file(), "ENGRAM_BIN is {}, which is not a file", path.display());
            return path;
        }
        // This executable is in target/<profile>/deps.
        let this = std::env::current_exe().expect("the path of this executable is known");
        let target = this.ancestors().nth(3).expect("test executables are in target/<profile>/deps");
        let built = ["release", "debug"].map(|profile| target.join(profile).join("engram"));
        let newest = built.into_iter().max_by_key(|path| path.metadata().and_then(|it| it.modified()).ok());
        let path = newest.expect("there are two candidates");
        assert!(path.is_file(), "no binary: cargo build -p engram-cli");
        path
    })
}

/// Exit code and output of a command.
#[derive(Debug, Clone)]
pub struct CommandOutput {
    /// The command line, for messages.
    pub line: String,
    /// Exit code; `None` after a signal.
    pub code: Option<i32>,
    /// Standard output.
    pub stdout: String,
    /// Standard error.
    pub stderr: String,
}

/// Runs the binary, isolated from the local clusters of the user.
pub fn engram<S: AsRef<OsStr>>(arguments: impl IntoIterator<Item = S>, input: &str) -> CommandOutput {
    engram_in_environment(arguments, &[], input)
}

/// Runs the binary with additional environment variables.
pub(crate) fn engram_in_environment<S: AsRef<OsStr>>(
    arguments: impl IntoIterator<Item = S>,
    environment: &[(String, String)],
    input: &str,
) -> CommandOutput {
    let mut command = command();
    command.args(arguments).envs(environment.iter().cloned());
    let line = format!("{command:?}");
    let child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    let mut child = child.expect("failed to start the binary");
    let mut stdin = child.stdin.take().expect("stdin is piped");
    let input = input.to_owned();
    // The command may exit without reading its input.
    let writer = std::thread::spawn(move || drop(stdin.write_all(input.as_bytes())));
    let output = child.wait_with_output().expect("failed to wait for the binary");
    writer.join().expect("the writer thread panicked");
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(find_panic(&stderr).is_none(), "{line} has panicked:\n{stderr}");
    let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
    CommandOutput { line, code: output.status.code(), stdout, stderr }
}

/// Returns the message of the first panic in the output of a process.
pub(crate) fn find_panic(text: &str) -> Option<String> {
    let panicked = |line: &str| line.starts_with("thread '") && line.contains("panicked at ");
    let at = text.lines().position(panicked)?;
    Some(text.lines().skip(at).take(3).collect::<Vec<_>>().join("\n"))
}

/// Returns a command for the binary, isolated from the user's environment.
pub(crate) fn command() -> Command {
    let mut command = Command::new(binary());
    for variable in ["ENGRAM_STATE_DIR", "ENGRAM_CLUSTER", "ENGRAM_ADDRESS", "CLICOLOR_FORCE"] {
        command.env_remove(variable);
    }
    command.env("XDG_STATE_HOME", "/nonexistent").env("NO_COLOR", "1");
    command
}

impl CommandOutput {
    /// Asserts the exit code.
    ///
    /// # Panics
    /// The exit code differs.
    #[track_caller]
    pub fn exits_with(self, code: i32) -> Self {
        assert_eq!(self.code, Some(code), "{}\nstdout: {}\nstderr: {}", self.line, self.stdout, self.stderr);
        self
    }

    /// Asserts the exit code and that stderr contains each of the texts.
    ///
    /// # Panics
    /// The exit code differs, or a text is missing.
    #[track_caller]
    pub fn fails_with(self, code: i32, texts: &[&str]) -> Self {
        let output = self.exits_with(code);
        for text in texts {
            assert!(output.stderr.contains(text), "stderr of {} lacks {text:?}:\n{}", output.line, output.stderr);
        }
        output
    }

    /// Parses stdout as JSON.
    ///
    /// # Panics
    /// stdout is not JSON.
    #[track_caller]
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.stdout).unwrap_or_else(|error| panic!("{}: {error}\n{}", self.line, self.stdout))
    }

    /// Parses stdout as JSON lines.
    ///
    /// # Panics
    /// A line is not JSON.
    #[track_caller]
    pub fn json_lines(&self) -> Vec<Value> {
        let line = |line| serde_json::from_str(line).unwrap_or_else(|error| panic!("{}: {error}: {line}", self.line));
        self.stdout.lines().map(line).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::find_panic;

    #[test]
    fn panics_are_found_by_their_message() {
        let log = "{\"message\":\"ready\"}\nthread 'tokio-rt-worker' (71) panicked at worker/src/a.rs:1:2:\nno value\nnote: x\n";
        assert!(find_panic(log).is_some_and(|panic| panic.contains("a.rs:1:2") && panic.contains("no value")));
        assert_eq!(find_panic("{\"message\":\"a user wrote that it panicked at noon\"}\n"), None);
    }
}
