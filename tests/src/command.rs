//! One run of the binary, and what it said.

use serde_json::Value;
use std::ffi::OsStr;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;

/// The binary under test.
///
/// # Panics
/// There is none.
pub fn binary() -> &'static Path {
    static BINARY: OnceLock<PathBuf> = OnceLock::new();
    BINARY.get_or_init(|| {
        if let Some(path) = std::env::var_os("ENGRAM_BIN") {
            let path = PathBuf::from(path);
            assert!(path.is_file(), "ENGRAM_BIN is {}, which is no file", path.display());
            return path;
        }
        // This program lies in target/<profile>/deps.
        let this = std::env::current_exe().expect("a test knows its own file");
        let target = this.ancestors().nth(3).expect("a test lies three folders below target");
        let built = ["release", "debug"].map(|profile| target.join(profile).join("engram"));
        let newest = built.into_iter().max_by_key(|path| path.metadata().and_then(|it| it.modified()).ok());
        let path = newest.expect("there are two candidates");
        assert!(path.is_file(), "no binary: cargo build -p engram-cli");
        path
    })
}

/// How a command ended.
#[derive(Debug, Clone)]
pub struct Ran {
    /// The command line, for messages.
    pub line: String,
    /// Exit code; `None` after a signal.
    pub code: Option<i32>,
    /// What it printed.
    pub stdout: String,
    /// What it said.
    pub stderr: String,
}

/// Runs the binary. The user's own clusters are out of its sight: it sees no state directories but those it is told of.
pub fn engram<S: AsRef<OsStr>>(arguments: impl IntoIterator<Item = S>, input: &str) -> Ran {
    engram_within(arguments, &[], input)
}

/// The same, with more in its environment.
pub(crate) fn engram_within<S: AsRef<OsStr>>(
    arguments: impl IntoIterator<Item = S>,
    environment: &[(String, String)],
    input: &str,
) -> Ran {
    let mut command = command();
    command.args(arguments).envs(environment.iter().cloned());
    let line = format!("{command:?}");
    let spawned = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    let mut child = spawned.expect("the binary starts");
    let mut stdin = child.stdin.take().expect("it is piped");
    let input = input.to_owned();
    // A command that ends without reading its input closes the pipe; that is its right.
    let writer = std::thread::spawn(move || drop(stdin.write_all(input.as_bytes())));
    let output = child.wait_with_output().expect("it can be waited for");
    writer.join().expect("writing ends");
    Ran {
        line,
        code: output.status.code(),
        stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
        stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
    }
}

/// The binary, in an environment of its own.
pub(crate) fn command() -> Command {
    let mut command = Command::new(binary());
    for variable in ["ENGRAM_STATE_DIR", "ENGRAM_CLUSTER", "ENGRAM_ADDRESS", "CLICOLOR_FORCE"] {
        command.env_remove(variable);
    }
    command.env("XDG_STATE_HOME", "/nonexistent").env("NO_COLOR", "1");
    command
}

impl Ran {
    /// Asserts that it ended with this code.
    ///
    /// # Panics
    /// It did not.
    #[track_caller]
    pub fn ended(self, code: i32) -> Self {
        assert_eq!(self.code, Some(code), "{}\nstdout: {}\nstderr: {}", self.line, self.stdout, self.stderr);
        self
    }

    /// Asserts that it ended with this code and said each of these words.
    ///
    /// # Panics
    /// It did not.
    #[track_caller]
    pub fn refused(self, code: i32, words: &[&str]) -> Self {
        let ran = self.ended(code);
        for word in words {
            assert!(ran.stderr.contains(word), "{} does not say {word:?}:\n{}", ran.line, ran.stderr);
        }
        ran
    }

    /// What it printed, as JSON.
    ///
    /// # Panics
    /// It is not JSON.
    #[track_caller]
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.stdout).unwrap_or_else(|error| panic!("{}: {error}\n{}", self.line, self.stdout))
    }

    /// What it printed, a JSON value a line.
    ///
    /// # Panics
    /// It is not JSON.
    #[track_caller]
    pub fn json_lines(&self) -> Vec<Value> {
        let line = |line| serde_json::from_str(line).unwrap_or_else(|error| panic!("{}: {error}: {line}", self.line));
        self.stdout.lines().map(line).collect()
    }
}
