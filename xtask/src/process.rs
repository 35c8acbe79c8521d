//! Child processes: printed before they run, output forwarded, and a non-zero status is an error.

use std::ffi::OsStr;
use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Command, ExitStatus, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

/// Poll interval for a child with a deadline.
const POLL: Duration = Duration::from_millis(20);

/// Runs `command` with this program's standard input and output.
///
/// # Errors
/// When it cannot be started, or exits with a non-zero status.
pub(crate) fn run(command: &mut Command) -> Result<()> {
    announce(command);
    let status = command.status().with_context(|| format!("failed to start {}", name(command)))?;
    expect_success(command, status)
}

/// Runs `command`, forwards its standard output line by line, and passes each line to `observe`.
///
/// # Errors
/// When it cannot be started or read. The caller judges a non-zero status.
pub(crate) fn run_observed(command: &mut Command, mut observe: impl FnMut(&str)) -> Result<ExitStatus> {
    announce(command);
    let mut child =
        command.stdout(Stdio::piped()).spawn().with_context(|| format!("failed to start {}", name(command)))?;
    let mut reader = BufReader::new(child.stdout.take().expect("standard output is piped"));
    let mut out = std::io::stdout().lock();
    let mut line = Vec::new();
    // Bytes rather than strings: tests may print anything.
    while reader.read_until(b'\n', &mut line).context("failed to read the output of a child")? > 0 {
        out.write_all(&line).context("failed to write to standard output")?;
        out.flush().context("failed to write to standard output")?;
        observe(String::from_utf8_lossy(&line).trim_end());
        line.clear();
    }
    child.wait().with_context(|| format!("failed to wait for {}", name(command)))
}

/// Runs `command` and returns its standard output; its standard error is forwarded.
///
/// # Errors
/// When it cannot be started, exits with a non-zero status, or does not write UTF-8.
pub(crate) fn read(command: &mut Command) -> Result<String> {
    announce(command);
    let output =
        command.stderr(Stdio::inherit()).output().with_context(|| format!("failed to start {}", name(command)))?;
    expect_success(command, output.status)?;
    String::from_utf8(output.stdout).with_context(|| format!("{} did not write UTF-8", name(command)))
}

/// Runs `command` silently, and kills it after `limit`.
///
/// # Errors
/// When it cannot be started or exceeds the limit. The caller judges a non-zero status.
pub(crate) fn capture_within(command: &mut Command, limit: Duration) -> Result<Output> {
    let started = Instant::now();
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("failed to start {}", name(command)))?;
    // Both pipes are drained while the child runs, since a full pipe would block it.
    let stdout = drain(child.stdout.take().expect("standard output is piped"));
    let stderr = drain(child.stderr.take().expect("standard error is piped"));
    let status = loop {
        if let Some(status) = child.try_wait().with_context(|| format!("failed to wait for {}", name(command)))? {
            break status;
        }
        if started.elapsed() >= limit {
            child.kill().with_context(|| format!("failed to kill {}", name(command)))?;
            child.wait().with_context(|| format!("failed to wait for {}", name(command)))?;
            bail!("{} did not exit within {} s", name(command), limit.as_secs());
        }
        thread::sleep(POLL);
    };
    let collect = |reader: thread::JoinHandle<std::io::Result<Vec<u8>>>| {
        reader.join().expect("draining a pipe does not panic").context("failed to read the output of a child")
    };
    Ok(Output { status, stdout: collect(stdout)?, stderr: collect(stderr)? })
}

fn drain(mut pipe: impl Read + Send + 'static) -> thread::JoinHandle<std::io::Result<Vec<u8>>> {
    thread::spawn(move || {
        let mut bytes = Vec::new();
        pipe.read_to_end(&mut bytes).map(|_| bytes)
    })
}

fn expect_success(command: &Command, status: ExitStatus) -> Result<()> {
    if !status.success() {
        bail!("`{}` failed ({status})", line(command));
    }
    Ok(())
}

fn announce(command: &Command) {
    eprintln!("+ {}", line(command));
}

fn name(command: &Command) -> String {
    command.get_program().to_string_lossy().into_owned()
}

fn line(command: &Command) -> String {
    // The file name suffices to identify the program: cargo's own path is long.
    let program = std::path::Path::new(command.get_program());
    let mut words = vec![program.file_name().unwrap_or(program.as_os_str()).to_string_lossy()];
    words.extend(command.get_args().map(OsStr::to_string_lossy));
    words.join(" ")
}
