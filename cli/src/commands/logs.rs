//! `engram logs`: what the processes of a local cluster wrote, merged by time.

use crate::args::Context;
use crate::error::problem;
use crate::local::state;
use crate::target::Local;
use anyhow::Context as _;
use engram_api::{Code, ExitCode};
use std::collections::VecDeque;
use std::fs::File;
use std::io::{BufRead as _, BufReader, Read as _, Seek as _, SeekFrom, Write as _};
use std::path::{Path, PathBuf};
use std::time::Duration;
use tokio::signal::unix::{SignalKind, signal};

/// Between looks at files that may have grown.
const LOOK: Duration = Duration::from_millis(200);
/// Read of one file at a time while following: more waits for the next look.
const READ_BYTES: u64 = 1 << 20;
/// Colours of the names, by place.
const COLORS: [u8; 6] = [36, 33, 32, 35, 34, 31];

/// Show what the processes of a local cluster wrote
#[derive(Debug, clap::Args)]
#[command(before_help = "Examples:
  engram logs                    all processes, by time
  engram logs -f                 and follow
  engram logs worker-2           or: engram logs 2
  engram logs coordinator --tail 20")]
pub(crate) struct Arguments {
    /// `worker-N`, `N`, `coordinator` or `up`; without it all
    #[arg(value_name = "WORKER")]
    process: Option<String>,
    /// Go on with what is written from now on, until Ctrl-C
    #[arg(short, long)]
    follow: bool,
    /// Lines of each process to begin with
    #[arg(long, value_name = "N", default_value_t = 1_000)]
    tail: usize,
}

/// The log of one process.
struct Log {
    path: PathBuf,
    prefix: String,
    read: u64,
    /// The beginning of a line whose end is not there yet.
    rest: Vec<u8>,
}

pub(crate) async fn run(arguments: &Arguments, context: &Context) -> anyhow::Result<ExitCode> {
    let folder = folder(context)?;
    let mut logs = select(&folder, arguments, context)?;
    let mut lines = Vec::new();
    for log in &mut logs {
        log.tail(arguments.tail, &mut lines)?;
    }
    // Lines of one process keep their order: the sort is stable, and a line without a time has that of the line before.
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
            () = tokio::time::sleep(LOOK) => {}
            Some(()) = interrupted.recv() => return Ok(ExitCode::Ok),
        }
        for log in &mut logs {
            for line in log.grown()? {
                out.write_all(line.as_bytes())?;
            }
        }
    }
}

/// The state directory: logs outlive their cluster, so that it need not run.
fn folder(context: &Context) -> anyhow::Result<PathBuf> {
    if let Some(folder) = &context.state_dir {
        return Ok(folder.clone());
    }
    let base = state::base()?;
    if let Some(name) = &context.cluster {
        return Ok(base.join(name));
    }
    Local::find(context).map(|local| local.folder)
}

fn select(folder: &Path, arguments: &Arguments, context: &Context) -> anyhow::Result<Vec<Log>> {
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
    // worker-10 comes after worker-9.
    names.sort_by_key(|name| (name.len(), name.clone()));
    let known = names.join(", ");
    if let Some(wanted) = &wanted {
        names.retain(|name| name == wanted);
        if names.is_empty() {
            let message = format!("no process called {wanted} has a log; there are: {known}");
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
        Log { path: state::log(folder, &name), prefix, read: 0, rest: Vec::new() }
    };
    Ok(names.into_iter().enumerate().map(log).collect())
}

impl Log {
    /// Its last lines, each under the time that it begins with.
    fn tail(&mut self, most: usize, lines: &mut Vec<(String, String)>) -> anyhow::Result<()> {
        let file = File::open(&self.path).with_context(|| format!("failed to read {}", self.path.display()))?;
        let mut reader = BufReader::new(file);
        let (mut kept, mut time, mut line) = (VecDeque::new(), String::new(), Vec::new());
        while reader.read_until(b'\n', &mut line).with_context(|| format!("failed to read {}", self.path.display()))?
            > 0
        {
            self.read += line.len() as u64;
            let text = String::from_utf8_lossy(&line).into_owned();
            if let Some(stamp) = stamp(&text) {
                time = stamp.to_owned();
            }
            kept.push_back((time.clone(), format!("{}{}\n", self.prefix, text.trim_end_matches('\n'))));
            if kept.len() > most {
                kept.pop_front();
            }
            line.clear();
        }
        lines.extend(kept);
        Ok(())
    }

    /// Whole lines written since the last look.
    fn grown(&mut self) -> anyhow::Result<Vec<String>> {
        let mut file = match File::open(&self.path) {
            Ok(file) => file,
            // Put aside; the next one comes with its process.
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(error).with_context(|| format!("failed to read {}", self.path.display())),
        };
        if file.metadata()?.len() < self.read {
            (self.read, self.rest) = (0, Vec::new());
        }
        file.seek(SeekFrom::Start(self.read))?;
        let before = self.rest.len();
        file.take(READ_BYTES).read_to_end(&mut self.rest)?;
        self.read += (self.rest.len() - before) as u64;
        let whole = self.rest.iter().rposition(|byte| *byte == b'\n').map_or(0, |position| position + 1);
        let lines: Vec<u8> = self.rest.drain(..whole).collect();
        let lines = String::from_utf8_lossy(&lines).into_owned();
        Ok(lines.lines().map(|line| format!("{}{line}\n", self.prefix)).collect())
    }
}

/// The time that a line begins with, as it stands there: RFC 3339 in UTC sorts as text.
fn stamp(line: &str) -> Option<&str> {
    let (first, _) = line.split_once(' ')?;
    let bytes = first.as_bytes();
    let is_time = bytes.len() >= 20 && bytes[4] == b'-' && bytes[10] == b'T' && bytes.last() == Some(&b'Z');
    is_time.then_some(first)
}
