//! `engram logs`: logs of the processes of a local cluster, merged by time.

use crate::context::Context;
use crate::error::problem;
use crate::local::state;
use crate::target::Running;
use anyhow::Context as _;
use engram_api::{Code, ExitCode};
use std::collections::VecDeque;
use std::fs::File;
use std::io::{BufRead as _, BufReader, Read as _, Seek as _, SeekFrom, Write as _};
use std::path::{Path, PathBuf};
use std::time::Duration;
use tokio::signal::unix::{SignalKind, signal};

/// Poll interval with `--follow`.
const POLL_INTERVAL: Duration = Duration::from_millis(200);
/// Bytes read from one file per poll.
const READ_BYTES: u64 = 1 << 20;
/// ANSI colors of the process names.
const COLORS: [u8; 6] = [36, 33, 32, 35, 34, 31];

/// Print the logs of a local cluster
#[derive(Debug, clap::Args)]
#[command(before_help = "Examples:
  engram logs                    logs of all processes, by time
  engram logs -f                 follow the logs
  engram logs worker-2           or: engram logs 2
  engram logs coordinator --tail 20")]
pub(crate) struct Logs {
    /// `worker-N`, `N`, `coordinator` or `up` [default: all]
    #[arg(value_name = "PROCESS")]
    process: Option<String>,
    /// Print new lines as they are written, until Ctrl-C
    #[arg(short, long)]
    follow: bool,
    /// Number of recent lines of each process to print
    #[arg(long, value_name = "N", default_value_t = 1_000)]
    tail: usize,
}

/// The log of one process.
struct Log {
    path: PathBuf,
    prefix: String,
    offset: u64,
    /// Incomplete last line.
    rest: Vec<u8>,
}

pub(crate) async fn run(arguments: &Logs, context: &Context) -> anyhow::Result<ExitCode> {
    let folder = folder(context)?;
    let mut logs = select(&folder, arguments, context)?;
    let mut lines = Vec::new();
    for log in &mut logs {
        log.tail(arguments.tail, &mut lines)?;
    }
    // Stable sort: lines without a timestamp keep the timestamp of the line before.
    lines.sort_by(|(a, _), (b, _)| a.cmp(b));
    let mut out = std::io::stdout().lock();
    for (_, line) in lines {
        out.write_all(line.as_bytes())?;
    }
    if !arguments.follow {
        return Ok(ExitCode::Ok);
    }
    let mut interrupted = signal(SignalKind::interrupt()).context("failed to listen for Ctrl-C")?;
    loop {
        out.flush()?;
        tokio::select! {
            () = tokio::time::sleep(POLL_INTERVAL) => {}
            Some(()) = interrupted.recv() => return Ok(ExitCode::Ok),
        }
        for log in &mut logs {
            for line in log.new_lines()? {
                out.write_all(line.as_bytes())?;
            }
        }
    }
}

/// Returns the state directory. The cluster need not run.
fn folder(context: &Context) -> anyhow::Result<PathBuf> {
    if let Some(folder) = &context.state_dir {
        return Ok(folder.clone());
    }
    let base = state::base()?;
    if let Some(name) = &context.cluster {
        return Ok(base.join(name));
    }
    Running::find(context).map(|running| running.folder)
}

fn select(folder: &Path, arguments: &Logs, context: &Context) -> anyhow::Result<Vec<Log>> {
    let wanted = arguments.process.as_ref().map(|name| match name.parse::<u32>() {
        Ok(ordinal) => format!("worker-{ordinal}"),
        Err(_) => name.clone(),
    });
    let entries = std::fs::read_dir(folder.join("logs"))
        .map_err(|error| problem(Code::NoLocalCluster, format!("no logs in {}: {error}", folder.display())))?;
    let mut names: Vec<String> = entries
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.strip_suffix(".log").map(str::to_owned))
        .collect();
    // Sorts worker-10 after worker-9.
    names.sort_by_key(|name| (name.len(), name.clone()));
    let existing = names.join(", ");
    if let Some(wanted) = &wanted {
        names.retain(|name| name == wanted);
        if names.is_empty() {
            let message = format!("no log of process {wanted}; existing logs: {existing}");
            return Err(problem(Code::NoLocalCluster, message));
        }
    }
    let width = names.iter().map(String::len).max().unwrap_or(0);
    let log = |(index, name): (usize, String)| {
        let text = format!("{name:<width$} | ");
        let prefix = match (&wanted, context.output.color) {
            (Some(_), _) => String::new(),
            (None, true) => format!("\u{1b}[{}m{text}\u{1b}[0m", COLORS[index % COLORS.len()]),
            (None, false) => text,
        };
        Log { path: state::log(folder, &name), prefix, offset: 0, rest: Vec::new() }
    };
    Ok(names.into_iter().enumerate().map(log).collect())
}

impl Log {
    /// Appends the last lines, each with its timestamp.
    fn tail(&mut self, limit: usize, lines: &mut Vec<(String, String)>) -> anyhow::Result<()> {
        let file = File::open(&self.path).with_context(|| format!("failed to read {}", self.path.display()))?;
        let mut reader = BufReader::new(file);
        let (mut kept, mut time, mut line) = (VecDeque::new(), String::new(), Vec::new());
        while reader.read_until(b'\n', &mut line).with_context(|| format!("failed to read {}", self.path.display()))?
            > 0
        {
            self.offset += line.len() as u64;
            let text = String::from_utf8_lossy(&line).into_owned();
            if let Some(stamp) = stamp(&text) {
                time = stamp.to_owned();
            }
            kept.push_back((time.clone(), format!("{}{}\n", self.prefix, text.trim_end_matches('\n'))));
            if kept.len() > limit {
                kept.pop_front();
            }
            line.clear();
        }
        lines.extend(kept);
        Ok(())
    }

    /// Returns complete lines written since the last call.
    fn new_lines(&mut self) -> anyhow::Result<Vec<String>> {
        let mut file = match File::open(&self.path) {
            Ok(file) => file,
            // Rotated; the process creates a new file.
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(error).with_context(|| format!("failed to read {}", self.path.display())),
        };
        if file.metadata()?.len() < self.offset {
            (self.offset, self.rest) = (0, Vec::new());
        }
        file.seek(SeekFrom::Start(self.offset))?;
        let before = self.rest.len();
        file.take(READ_BYTES).read_to_end(&mut self.rest)?;
        self.offset += (self.rest.len() - before) as u64;
        let end = self.rest.iter().rposition(|byte| *byte == b'\n').map_or(0, |position| position + 1);
        let lines: Vec<u8> = self.rest.drain(..end).collect();
        let lines = String::from_utf8_lossy(&lines).into_owned();
        Ok(lines.lines().map(|line| format!("{}{line}\n", self.prefix)).collect())
    }
}

/// Returns the timestamp at the start of a line. RFC 3339 in UTC sorts as text.
fn stamp(line: &str) -> Option<&str> {
    let (first, _) = line.split_once(' ')?;
    let bytes = first.as_bytes();
    let is_time = bytes.len() >= 20 && bytes[4] == b'-' && bytes[10] == b'T' && bytes.last() == Some(&b'Z');
    is_time.then_some(first)
}
