//! Child processes: parts of this program, and other programs.

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Read};
use std::process::{Command, Stdio};
use std::thread;

use anyhow::{Context, Result, bail};

/// Trailing lines of standard error that are kept as the reason of a failure.
const MAX_LINES: usize = 12;

/// Output of a process.
pub(crate) struct ProcessOutput {
    pub(crate) out: String,
    /// The last lines of standard error.
    pub(crate) last: String,
    pub(crate) code: Option<i32>,
}

impl ProcessOutput {
    /// Returns standard output if the process succeeded.
    ///
    /// # Errors
    /// The exit status and the last lines of standard error.
    pub(crate) fn expect(self, name: &str) -> Result<String> {
        match self.code {
            Some(0) => Ok(self.out),
            Some(code) => bail!("{name} exited with status {code}: {}", self.last),
            None => bail!("{name} was killed by a signal: {}", self.last),
        }
    }
}

/// Runs a command to completion. Its standard error is forwarded line by line.
///
/// # Errors
/// When it cannot be started or read.
pub(crate) fn run(command: &mut Command) -> Result<ProcessOutput> {
    let name = command.get_program().to_string_lossy().into_owned();
    let mut child = command
        .stdin(Stdio::null())
        // The last lines of a panic are then its message.
        .env("RUST_BACKTRACE", "0")
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("failed to start {name}"))?;
    let stderr = BufReader::new(child.stderr.take().expect("standard error is piped"));
    let reader = thread::spawn(move || {
        let mut last = VecDeque::new();
        for line in stderr.split(b'\n').map_while(Result::ok) {
            let line = String::from_utf8_lossy(&line).into_owned();
            eprintln!("  {line}");
            if last.len() == MAX_LINES {
                last.pop_front();
            }
            last.push_back(line);
        }
        last.make_contiguous().join("\n")
    });
    let mut out = Vec::new();
    child.stdout.take().expect("standard output is piped").read_to_end(&mut out)?;
    let status = child.wait().with_context(|| format!("failed to wait for {name}"))?;
    let last = reader.join().expect("the reader does not panic");
    Ok(ProcessOutput { out: String::from_utf8_lossy(&out).into_owned(), last, code: status.code() })
}
