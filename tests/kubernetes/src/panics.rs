//! Panics in the logs of pods and programs. The kubelet removes the logs of a pod with it, so they are read while the suites run.

use crate::cluster::Cluster;
use anyhow::{Result, ensure};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{Read as _, Seek as _, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread::{self, JoinHandle};
use std::time::Duration;

/// Interval at which the logs are read. A pod that panicked is gone sooner only if a suite deletes it at once.
const INTERVAL: Duration = Duration::from_secs(2);
/// Bytes of a log that are read at a time; more follows at the next reading.
const MOST_BYTES: u64 = 8 << 20;
/// How the message of a panic of a Rust program begins, and how it goes on.
const MESSAGE: [&str; 2] = ["thread '", "panicked at "];

/// Reads the logs of a cluster until it is asked for the result.
pub struct PanicWatch {
    stop: Sender<()>,
    reader: JoinHandle<PanicReport>,
}

impl PanicWatch {
    /// Begins to read.
    pub fn start(cluster: &Cluster) -> Self {
        let folder = cluster.folder().to_owned();
        let (stop, stopped) = mpsc::channel();
        let reader = thread::spawn(move || {
            let mut report = PanicReport::default();
            while stopped.recv_timeout(INTERVAL) == Err(RecvTimeoutError::Timeout) {
                report.read(&folder);
            }
            report.read(&folder);
            report
        });
        Self { stop, reader }
    }

    /// Stops to read.
    ///
    /// # Errors
    /// A program has panicked; the log and the message.
    pub fn finish(self) -> Result<String> {
        // The reader ends only here.
        let _ = self.stop.send(());
        let report = self.reader.join().expect("reading logs does not panic");
        ensure!(report.panics.is_empty(), "{}", report.panics.join("; "));
        Ok(format!("{} logs", report.positions.len()))
    }
}

/// What was read so far.
#[derive(Debug, Default)]
struct PanicReport {
    /// Bytes read of each log.
    positions: BTreeMap<PathBuf, u64>,
    panics: Vec<String>,
}

impl PanicReport {
    /// Reads what was appended to the logs of the pods of all nodes, and of programs on nodes.
    fn read(&mut self, folder: &Path) {
        let entries = fs::read_dir(folder).into_iter().flatten().flatten();
        let mut folders: Vec<PathBuf> = entries.map(|entry| entry.path().join("podlogs")).collect();
        folders.push(folder.join("log"));
        while let Some(next) = folders.pop() {
            for path in fs::read_dir(next).into_iter().flatten().flatten().map(|entry| entry.path()) {
                let is_audit = path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("audit"));
                if path.is_dir() {
                    folders.push(path);
                } else if !is_audit && path.extension().is_some_and(|extension| extension == "log") {
                    self.read_log(&path);
                }
            }
        }
    }

    /// Reads the whole lines that were appended to a log.
    fn read_log(&mut self, path: &Path) {
        let position = self.positions.entry(path.to_owned()).or_default();
        let mut text = Vec::new();
        // A log that the kubelet has just removed.
        let Ok(mut file) = File::open(path) else { return };
        let appended = file.seek(SeekFrom::Start(*position)).and_then(|_| file.take(MOST_BYTES).read_to_end(&mut text));
        if appended.is_err() {
            return;
        }
        let is_part = (text.len() as u64) < MOST_BYTES;
        let end = text.iter().rposition(|byte| *byte == b'\n').map_or(0, |last| last + 1);
        text.truncate(if is_part { end } else { text.len() });
        *position += text.len() as u64;
        let text = String::from_utf8_lossy(&text);
        let panics = text.lines().filter(|line| MESSAGE.iter().all(|part| line.contains(part)));
        self.panics.extend(panics.map(|line| format!("{}: {line}", path.display())));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write as _;

    #[test]
    fn panics_of_pods_and_programs_are_found_once_also_when_the_pod_is_gone() {
        let folder = tempfile::tempdir().unwrap();
        let pod = folder.path().join("n2/podlogs/default_words-worker-0_1/worker");
        fs::create_dir_all(&pod).unwrap();
        fs::create_dir(folder.path().join("log")).unwrap();
        fs::write(folder.path().join("log/n1-engram-operator.log"), "{\"message\":\"ready\"}\n").unwrap();
        let mut log = File::create(pod.join("0.log")).unwrap();
        let mut report = PanicReport::default();
        let line = "2026-11-28T00:00:00Z stderr F thread 'main' (7) panicked at worker/src/a.rs:1:2:\n";
        log.write_all(&line.as_bytes()[..60]).unwrap();
        report.read(folder.path());
        assert!(report.panics.is_empty(), "the line is not complete: {report:?}");
        log.write_all(&line.as_bytes()[60..]).unwrap();
        report.read(folder.path());
        fs::remove_dir_all(&pod).unwrap();
        report.read(folder.path());
        assert_eq!((report.panics.len(), report.positions.len()), (1, 2), "{report:?}");
        assert!(report.panics[0].contains("words-worker-0") && report.panics[0].contains("a.rs:1:2"), "{report:?}");
        let operator = folder.path().join("log/n1-engram-operator.log");
        File::options().append(true).open(operator).unwrap().write_all(&line.as_bytes()[30..]).unwrap();
        report.read(folder.path());
        assert_eq!(report.panics.len(), 2, "{report:?}");
    }
}
