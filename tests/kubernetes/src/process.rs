//! Processes: commands that end within a limit, waits with a deadline, and records by which a later call ends a daemon.

use crate::requirements::Skip;
use anyhow::{Context, Result, bail, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::fs;
use std::io::{Read, Write as _};
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// Polling interval of conditions. A shorter one would load the API server on two cores.
const LOOK: Duration = Duration::from_millis(200);

/// Waits until `look` returns a value. Errors count as "not yet"; the last one is reported at the deadline, and a [`Skip`] at once.
///
/// # Errors
/// It gives nothing within `limit`.
pub fn until<T>(what: &str, limit: Duration, mut look: impl FnMut() -> Result<Option<T>>) -> Result<T> {
    let began = Instant::now();
    loop {
        let last = match look() {
            Ok(Some(found)) => return Ok(found),
            Ok(None) => None,
            Err(error) if error.is::<Skip>() => return Err(error),
            Err(error) => Some(error),
        };
        if began.elapsed() >= limit {
            let waited = format!("waited {} s for {what}", limit.as_secs());
            return Err(last.map_or_else(|| anyhow::anyhow!(waited.clone()), |error| error.context(waited.clone())));
        }
        thread::sleep(LOOK);
    }
}

/// What a command said and how it ended.
pub(crate) struct Ended {
    pub(crate) status: ExitStatus,
    pub(crate) stdout: Vec<u8>,
    pub(crate) stderr: Vec<u8>,
}

/// Runs a command to its end, feeding it `input`.
///
/// # Errors
/// It does not start, or does not end within `limit` (it is killed then).
pub(crate) fn run(command: &mut Command, input: &[u8], limit: Duration) -> Result<Ended> {
    let name = line(command);
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("failed to start {name}"))?;
    let mut stdin = child.stdin.take().expect("it was piped above");
    let input = input.to_owned();
    // A command that ends without reading its input closes the pipe; that is its right.
    thread::spawn(move || drop(stdin.write_all(&input)));
    let stdout = drain(child.stdout.take().expect("it was piped above"));
    let stderr = drain(child.stderr.take().expect("it was piped above"));
    let began = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break status;
        }
        if began.elapsed() > limit {
            child.kill()?;
            child.wait()?;
            bail!("{name} did not end within {} s", limit.as_secs());
        }
        // Most commands take some milliseconds.
        thread::sleep(Duration::from_millis(3));
    };
    let read = |reader: thread::JoinHandle<Vec<u8>>| reader.join().expect("draining a pipe does not panic");
    Ok(Ended { status, stdout: read(stdout), stderr: read(stderr) })
}

/// Runs a command to its end and returns what it printed.
///
/// # Errors
/// As [`run`], and when it ends with a status other than 0 or prints other than UTF-8.
pub(crate) fn read(command: &mut Command, input: &[u8], limit: Duration) -> Result<String> {
    let ended = run(command, input, limit)?;
    let said = String::from_utf8_lossy(&ended.stderr);
    ensure!(ended.status.success(), "{} failed ({}): {}", line(command), ended.status, said.trim());
    String::from_utf8(ended.stdout).with_context(|| format!("{} did not print UTF-8", line(command)))
}

fn drain(mut pipe: impl Read + Send + 'static) -> thread::JoinHandle<Vec<u8>> {
    thread::spawn(move || {
        let mut bytes = Vec::new();
        // What came before an error is still worth showing.
        drop(pipe.read_to_end(&mut bytes));
        bytes
    })
}

fn line(command: &Command) -> String {
    let words = command.get_args().map(|it| it.to_string_lossy());
    let program = Path::new(command.get_program()).file_name().unwrap_or_default().to_string_lossy();
    std::iter::once(program).chain(words).collect::<Vec<_>>().join(" ")
}

/// A process that lives on: its number, and when it started, since numbers are given again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Record {
    pub(crate) pid: i32,
    started: u64,
}

impl Record {
    /// The process of this number, if there is one that has not ended.
    pub(crate) fn of(pid: i32) -> Option<Self> {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        // The name in brackets may hold anything; after it come the state (field 3) and, as field 22, the start.
        let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
        let state = fields.next()?;
        let started = fields.nth(18)?.parse().ok()?;
        (state != "Z" && state != "X").then_some(Self { pid, started })
    }

    /// The only child of a process, as soon as it has one.
    pub(crate) fn of_child(parent: i32) -> Option<Self> {
        let children = fs::read_to_string(format!("/proc/{parent}/task/{parent}/children")).ok()?;
        Self::of(children.split_whitespace().next()?.parse().ok()?)
    }

    pub(crate) fn load(path: &Path) -> Option<Self> {
        let text = fs::read_to_string(path).ok()?;
        let (pid, started) = text.split_once(' ')?;
        Some(Self { pid: pid.parse().ok()?, started: started.parse().ok()? })
    }

    pub(crate) fn save(self, path: &Path) -> Result<()> {
        let text = format!("{} {}", self.pid, self.started);
        fs::write(path, text).with_context(|| format!("failed to write {}", path.display()))
    }

    pub(crate) fn is_alive(self) -> bool {
        Self::of(self.pid) == Some(self)
    }

    /// Ends the process with `signal` and waits until it has gone. One that has ended already is fine.
    ///
    /// # Errors
    /// It does not end within 10 s.
    pub(crate) fn end(self, signal: Signal) -> Result<()> {
        if self.is_alive() {
            // It may end between the two lines; the wait reports that.
            let _ = kill(Pid::from_raw(self.pid), signal);
        }
        until(&format!("the end of process {}", self.pid), Duration::from_secs(10), || {
            Ok((!self.is_alive()).then_some(()))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_names_one_process_and_never_its_successor() {
        let mut child = Command::new("sleep").arg("60").spawn().unwrap();
        let record = Record::of(child.id().cast_signed()).unwrap();
        let other = Record { started: record.started + 1, ..record };
        // Another process of the same number is not ended.
        other.end(Signal::SIGKILL).unwrap();
        assert!(record.is_alive());
        kill(Pid::from_raw(record.pid), Signal::SIGKILL).unwrap();
        child.wait().unwrap();
        assert!(!record.is_alive());
        assert_eq!(Record::of(record.pid), None);
    }

    #[test]
    fn a_command_that_does_not_end_is_killed_and_named() {
        let error = run(Command::new("sleep").arg("60"), b"", Duration::from_millis(50)).err().unwrap();
        assert!(error.to_string().contains("sleep 60 did not end"), "{error}");
    }
}
