//! Processes: this program again for a part, and programs of others.

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Read};
use std::process::{Command, Stdio};
use std::thread;

use anyhow::{Context, Result, bail};

/// Lines of what a process said that are kept for the reason of its failure.
const KEPT: usize = 12;

/// What a process wrote.
pub(crate) struct Said {
    pub(crate) out: String,
    /// The last lines of its standard error.
    pub(crate) last: String,
    pub(crate) code: Option<i32>,
}

impl Said {
    /// Its standard output, when it ended well.
    ///
    /// # Errors
    /// How it ended, and its last words.
    pub(crate) fn expect(self, name: &str) -> Result<String> {
        match self.code {
            Some(0) => Ok(self.out),
            Some(code) => bail!("{name} ended with status {code}: {}", self.last),
            None => bail!("{name} was ended by a signal: {}", self.last),
        }
    }
}

/// Runs a command to its end. What it says on standard error is passed on line by line.
///
/// # Errors
/// When it cannot be started or read.
pub(crate) fn run(command: &mut Command) -> Result<Said> {
    let name = command.get_program().to_string_lossy().into_owned();
    let mut child = command
        .stdin(Stdio::null())
        // The last words of a panic are then its reason.
        .env("RUST_BACKTRACE", "0")
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("failed to start {name}"))?;
    let said = BufReader::new(child.stderr.take().expect("standard error was piped above"));
    let listening = thread::spawn(move || {
        let mut last = VecDeque::new();
        for line in said.split(b'\n').map_while(Result::ok) {
            let line = String::from_utf8_lossy(&line).into_owned();
            eprintln!("  {line}");
            if last.len() == KEPT {
                last.pop_front();
            }
            last.push_back(line);
        }
        last.make_contiguous().join("\n")
    });
    let mut out = Vec::new();
    child.stdout.take().expect("standard output was piped above").read_to_end(&mut out)?;
    let status = child.wait().with_context(|| format!("failed to wait for {name}"))?;
    let last = listening.join().expect("listening does not panic");
    Ok(Said { out: String::from_utf8_lossy(&out).into_owned(), last, code: status.code() })
}
